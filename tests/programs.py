"""Real programs of a small synthetic model, for tests of what reads programs.

The model has eight layers, a skip from the first to the fifth, the first layer's matrix used again
in the last (tied), an auxiliary result, and an update with global-norm clipping. It is traced once;
any number of stages, microbatches and devices is a rearrangement of that one trace.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import ratrain_jax as rt
from ratrain_jax.kernels import load_machine
from ratrain_jax.lowering.build import build_program
from ratrain_jax.lowering.code import StepCode
from ratrain_jax.lowering.lower import compile_code
from ratrain_jax.lowering.program import Op, Program, Settings
from ratrain_jax.options import Options
from ratrain_jax.tracing import trace_step

LAYERS = 8
WIDTH = 4


def chain(params, x):
    """What the last layer takes, and what the network makes of it; of parameters of any width."""
    x = skipped = jnp.tanh(x @ params["l0"])
    for n in range(1, LAYERS - 1):
        x = rt.layer(x, f"l{n}")
        x = jnp.tanh(x @ params[f"l{n}"]["w"] + params[f"l{n}"]["b"])
        if n == 4:
            x = x + skipped
    x = rt.layer(x, f"l{LAYERS - 1}")
    return x, (x * params["l7"]) @ params["l0"].T


def _loss(params, batch):
    x, y = chain(params, batch["x"])
    return jnp.mean((y - batch["y"]) ** 2), {"size": jnp.mean(x)}


def _step(clip: bool):
    tail = optax.adam(1e-3)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), tail) if clip else tail

    def step(state, batch):
        call = rt.value_and_grad(_loss, has_aux=True)
        (loss, aux), grads = call(state["params"], batch)
        updates, new = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": new}, {"loss": loss, **aux}

    params = {f"l{n}": {"w": _type(WIDTH, WIDTH), "b": _type(WIDTH)} for n in range(1, LAYERS - 1)}
    params |= {"l0": _type(WIDTH, WIDTH), "l7": _type(WIDTH)}
    state = {"params": params, "opt": jax.eval_shape(optimizer.init, params)}
    return step, state


def _type(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@functools.cache
def traced(clip: bool) -> StepCode:
    """The code of the model on one stage."""
    step, state = _step(clip)
    options = Options(data_parallel=2, microbatches=2)
    batch = {"x": _type(8, WIDTH), "y": _type(8, WIDTH)}
    trace, _ = trace_step(step, (state, batch), options)
    return compile_code(trace, options.settings(), load_machine("generic"))


def step_code(settings: Settings, clip: bool = False, block: int = 2) -> StepCode:
    """The code of the model for the stages, devices and microbatches of some settings.

    Args:
        settings: the settings.
        clip: whether gradients are clipped by their global norm.
        block: the most layers in a block; programs that are lowered have no blocks of several layers beside others, but may.
    """
    code = traced(clip)
    layers = len(code.codes)
    stages = [n * settings.stages // layers for n in range(layers)]
    return dataclasses.replace(
        code,
        stage_of=tuple(stages),
        block_of=_blocks(stages, [c.fingerprint for c in code.codes], block),
        data_parallel=settings.data_parallel,
        microbatches=settings.microbatches,
        zero=settings.zero,
    )


def _blocks(stages: Sequence[int], prints: Sequence[str], most: int) -> tuple[int, ...]:
    """Blocks of up to `most` layers of equal code; a stage that is no longer is one block."""
    found: list[int] = []
    for stage in sorted(set(stages)):
        mine = [p for p, s in zip(prints, stages, strict=True) if s == stage]
        if len(mine) <= most:
            found += [0] * len(mine)
            continue
        number = 0
        for _, run in itertools.groupby(mine):
            length = len(list(run))
            found += [number + n // most for n in range(length)]
            number = found[-1] + 1
    return tuple(found)


def make_program(
    stages: int = 2,
    data_parallel: int = 2,
    microbatches: int = 3,
    *,
    clip: bool = False,
    block: int = 2,
    recovered: tuple[int, ...] | None = None,
    **settings: Any,
) -> Program:
    """A program of the model.

    Args:
        stages: P.
        data_parallel: D.
        microbatches: m.
        clip: whether gradients are clipped by their global norm.
        block: the most layers of a stage that is one block.
        recovered: how many blocks of each stage are recovered; none unless given.
        **settings: further settings.
    """
    if settings.get("schedule", "ratrain") != "ratrain":
        settings = {"layerwise_state": False, "update_prefetch": False} | settings
    chosen = Settings(stages, data_parallel, microbatches, **settings)
    code = step_code(chosen, clip, block)
    depth = recovered or (0,) * stages
    flags = [b < depth[s] for s, b in zip(code.stage_of, code.block_of, strict=True)]
    return build_program(code, chosen, load_machine("generic"), flags)


def place(
    program: Program, op_type: type[Op], stage: int | None = None, **fields
) -> tuple[int, int]:
    """The first op of a type whose fields have these values: its stage and index."""
    for s, ops in enumerate(program.order):
        for index, op in enumerate(ops):
            if stage in (None, s) and isinstance(op, op_type) and _has(op, fields):
                return s, index
    raise LookupError(f"no {op_type.__name__} with {fields}")


def _has(op: Op, fields: dict[str, Any]) -> bool:
    return all(getattr(op, name) == value for name, value in fields.items())


def op_of(program: Program, op_type: type[Op], stage: int | None = None, **fields) -> Any:
    """The op at that place."""
    at = place(program, op_type, stage, **fields)
    return program.order[at[0]][at[1]]


def with_order(program: Program, stage: int, ops) -> Program:
    """The program with another list for one stage."""
    order = list(program.order)
    order[stage] = tuple(ops)
    return dataclasses.replace(program, order=tuple(order))


def without(program: Program, op: Op) -> Program:
    """The program without one op, in every list."""
    order = tuple(tuple(o for o in ops if o != op) for ops in program.order)
    return dataclasses.replace(program, order=order)


def replaced(program: Program, op: Op, **changes) -> Program:
    """The program with one op changed, in every list."""
    new = dataclasses.replace(op, **changes)
    order = tuple(tuple(new if o == op else o for o in ops) for ops in program.order)
    return dataclasses.replace(program, order=order)


def moved(program: Program, stage: int, index: int, to: int) -> Program:
    """The program with one op of a stage's list moved to another place."""
    ops = list(program.order[stage])
    ops.insert(to, ops.pop(index))
    return with_order(program, stage, ops)
