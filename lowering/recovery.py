"""Chooses which blocks recover their activations, under the memory limit of each stage.

A stage recovers a prefix of its blocks: their backwards come last, so their residuals would live longest, and one
checkpoint serves them all. Blocks behind it that hold code under `jax.checkpoint` are recovered too, each run of them from
a checkpoint of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NoReturn

from ratrain_jax.errors import MemoryLimitError
from ratrain_jax.kernels import Machine
from ratrain_jax.lowering.build import build_program
from ratrain_jax.lowering.code import StepCode
from ratrain_jax.lowering.memory import MemoryAnalysis, memory_analysis
from ratrain_jax.lowering.program import Program, Settings


def recovered_layers(code: StepCode, blocks: Sequence[int]) -> tuple[bool, ...]:
    """Marks the layers of the first `blocks[s]` blocks of each stage s, and of those that the user checkpoints."""
    asked = {
        (stage, code.block_of[n])
        for n, stage in enumerate(code.stage_of)
        if code.layered.layers[n].checkpointed
    }
    return tuple(
        block < blocks[stage] or (stage, block) in asked
        for stage, block in zip(code.stage_of, code.block_of, strict=True)
    )


def program_within_limit(code: StepCode, settings: Settings, machine: Machine) -> Program:
    """The program with as little recovery as the settings and the memory limits allow.

    Raises:
        MemoryLimitError: a stage is over its limit whatever is recovered.
    """
    if settings.recovery == "auto":
        return _least_recovery(code, settings, machine)
    most = [len(code.stage_blocks(stage)) for stage in range(code.stages)]
    blocks = [0] * code.stages if settings.recovery == "none" else most
    program = build_program(code, settings, machine, recovered_layers(code, blocks))
    over = [(excess, stage) for stage, excess in enumerate(_excess(program)) if excess > 0]
    if over:
        remedy = _LESS_RECOVERED if settings.recovery == "none" else _ALL_RECOVERED
        _refuse(program, min(over)[1], remedy)
    return program


def _least_recovery(code: StepCode, settings: Settings, machine: Machine) -> Program:
    """Raises each stage's recovered prefix until it fits."""
    most = [len(code.stage_blocks(stage)) for stage in range(code.stages)]
    blocks = [0] * code.stages
    # The least that each stage was over its limit, and with which program.
    closest: dict[int, tuple[int, Program]] = {}
    while True:
        program = build_program(code, settings, machine, recovered_layers(code, blocks))
        over = {stage: excess for stage, excess in enumerate(_excess(program)) if excess > 0}
        if not over:
            return program
        for stage, excess in over.items():
            if stage not in closest or excess < closest[stage][0]:
                closest[stage] = (excess, program)
        stuck = [stage for stage in over if blocks[stage] == most[stage]]
        if stuck:
            stage = min(stuck, key=lambda stage: closest[stage][0])
            _refuse(closest[stage][1], stage, _ALL_RECOVERED)
        for stage in over:
            blocks[stage] += 1


def _excess(program: Program) -> list[int]:
    """Bytes by which each stage is over its limit."""
    limits = program.settings.memory_limit
    if not limits:
        return [0] * len(program.order)
    peaks = memory_analysis(program).peaks
    return [peak - limit for peak, limit in zip(peaks, limits, strict=True)]


_LESS_RECOVERED = 'Use recovery="auto" or "forward".'
_ALL_RECOVERED = (
    "Use more stages, more microbatches or more data-parallel devices, or raise the limit."
)


def _refuse(program: Program, stage: int, remedy: str) -> NoReturn:
    """Raises the error for a stage over its limit: by how much, and its largest term."""
    analysis = memory_analysis(program)
    limit, peak = program.settings.memory_limit[stage], analysis.peaks[stage]
    kind, count = _largest_term(analysis, stage)
    raise MemoryLimitError(
        f"stage {stage} needs {peak:,} bytes a device, {peak - limit:,} over its limit of {limit:,};"
        f" the largest term is {kind}, {count:,} bytes. {remedy}"
    )


def _largest_term(analysis: MemoryAnalysis, stage: int) -> tuple[str, int]:
    terms = analysis.by_kind[stage]
    kind = max(terms, key=lambda k: terms[k])
    return str(kind), terms[kind]


def with_limit(settings: Settings, limit: int | Sequence[int] | None) -> Settings:
    """Settings with a memory limit given as one number or one a stage."""
    if limit is None:
        return settings
    limits = (limit,) * settings.stages if isinstance(limit, int) else tuple(limit)
    return dataclasses.replace(settings, memory_limit=limits)
