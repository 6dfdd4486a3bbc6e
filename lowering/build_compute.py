"""Adds forwards, recoveries, backwards, and the transfers between them."""

from __future__ import annotations

import itertools

from ratrain_jax.lowering.code import Range, Unit
from ratrain_jax.lowering.program import (
    Backward,
    Forward,
    Recover,
    SendActivation,
    SendGradient,
    ZeroGradient,
)
from ratrain_jax.lowering.schedules import Slot, compute_order, in_order_of_data
from ratrain_jax.lowering.sheet import COMPUTE, TRANSFER, Sheet


class ComputeTasks:
    """Adds one stage after another, each in its schedule's order.

    Attributes:
        sheet: the growing program.
        variables: the value of (variable, stage, microbatch).
        cotangents: the value of (variable, stage, microbatch) that the next reader towards the producer takes.
        residuals: the value of (layer, microbatch).
    """

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet
        self.code = sheet.code
        self.variables: dict[tuple[int, int, int], int] = {}
        self.cotangents: dict[tuple[int, int, int], int] = {}
        self.residuals: dict[tuple[int, int], int] = {}
        self._recovered_inputs: dict[tuple[int, int], int] = {}
        self._chain: dict[int, tuple[int, ...]] = {}
        self._forwards: dict[int, int] = {}
        self._recovers: dict[int, int] = {}

    def run(self) -> None:
        """Adds everything. Values are made in the order of data, tasks are chained in the order of the schedule."""
        settings = self.sheet.settings
        slots = compute_order(settings.schedule, settings.stages, settings.microbatches)
        seen: set[tuple[str, int, int]] = set()
        for stage, (kind, i) in in_order_of_data(slots, lambda s, slot: self._ready(s, slot, seen)):
            self._forward(stage, i) if kind == "F" else self._backward(stage, i)
            seen.add((kind, stage, i))

    def _ready(self, stage: int, slot: Slot, seen: set[tuple[str, int, int]]) -> bool:
        """Whether the neighbouring stage's half is there already."""
        kind, i = slot
        if kind == "F":
            return stage == 0 or ("F", stage - 1, i) in seen
        return stage == self.code.stages - 1 or ("B", stage + 1, i) in seen

    def _link(self, stage: int, task: int) -> None:
        self._chain[stage] = (task,)

    def _after(self, stage: int) -> tuple[int, ...]:
        return self._chain.get(stage, ())

    def _forward(self, stage: int, i: int) -> None:
        self._forwards[stage] = i + 1
        blocks = self.code.stage_blocks(stage)
        for block in blocks:
            unit = self.code.forward_unit(block)
            outputs = [self._output(v, stage, i) for v in unit.outputs]
            kept = [self.sheet.values.residuals(n, i) for n in range(*block)]
            if not self.sheet.recovered[block[0]]:
                self.residuals.update(((n, i), r) for n, r in zip(range(*block), kept, strict=True))
            reads = (*self._entry(unit), *self._inputs(unit.inputs, stage, i))
            waits = self._all_views(stage, reads) if i == 0 and block == blocks[0] else ()
            op = Forward(stage, reads, (*outputs, *kept), (), waits, layers=block, microbatch=i)
            seconds = self.sheet.durations.forward(block)
            self._link(stage, self.sheet.add(op, seconds, (COMPUTE,), self._after(stage)))
            self._send_activations(unit, stage, i)

    def _all_views(self, stage: int, read: tuple[int, ...]) -> tuple[int, ...]:
        """What a stage's first forward waits for where views are gathered at the start of the step: the last of them."""
        settings = self.sheet.settings
        if settings.update_prefetch or not settings.trains:
            return ()
        views = [view for (s, _), view in self.sheet.views.items() if s == stage]
        return tuple(view for view in views if view not in read)

    def _output(self, variable: int, stage: int, i: int) -> int:
        value = self.sheet.values.variable(variable, stage, i)
        if self.code.layered.variables[variable].role == "boundary":
            self.variables[variable, stage, i] = value
        else:
            self.sheet.losses[i, variable] = value
            self.variables[variable, stage, i] = value
        return value

    def _entry(self, unit: Unit) -> tuple[int, ...]:
        """Views and operands of a unit."""
        return (
            *(self.sheet.views[unit.stage, owner] for owner in unit.views),
            *(self.sheet.operands[o, unit.stage] for o in unit.operands),
        )

    def _inputs(self, variables: tuple[int, ...], stage: int, i: int) -> list[int]:
        return [self.variables[v, stage, i] for v in variables]

    def _reader_stages(self, variable: int) -> list[int]:
        """The stages that hold a variable, from its producer's on."""
        v = self.code.layered.variables[variable]
        home = self.code.stage_of[v.producer]
        return sorted({home, *(self.code.stage_of[r] for r in v.readers)})

    def _send_activations(self, unit: Unit, stage: int, i: int) -> None:
        """Hands each boundary value from its producer along the stages that read it."""
        for v in unit.outputs:
            holders = self._reader_stages(v)
            for source, target in itertools.pairwise(holders):
                value = self.variables[v, source, i]
                copy = self.sheet.values.copy(value, target)
                self.variables[v, target, i] = copy
                op = SendActivation(source, (value,), (copy,), target=target, microbatch=i)
                seconds = self.sheet.durations.send(self.sheet.bytes(copy), target - source)
                self.sheet.add(op, seconds, (TRANSFER, i))

    def _backward(self, stage: int, i: int) -> None:
        early = self.sheet.settings.recovery != "backward"
        ranges = self.code.backward_ranges(stage, i)
        runs = self._recovered_runs(stage)
        if early and runs:
            self._recover_ahead(stage, i, [block for run in runs for block in run])
        if i == 0:
            self._zero(stage)
        for layers in reversed(ranges):
            for run in runs:
                if not early and layers[1] == run[-1][1]:
                    self._recover(stage, i, run, wait_for=layers)
            self._backward_unit(stage, i, layers)

    def _recovered_runs(self, stage: int) -> list[list[Range]]:
        """The recovered blocks of a stage, in runs without a kept block between."""
        by_mark = itertools.groupby(
            self.code.stage_blocks(stage), lambda block: self.sheet.recovered[block[0]]
        )
        return [list(blocks) for recovered, blocks in by_mark if recovered]

    def _zero(self, stage: int) -> None:
        """Zero accumulators, right before the first backward."""
        for home, owner in self.code.bundles:
            if home != stage:
                continue
            if self.code.zero == 1:
                value = self.sheet.values.accumulator(owner, stage)
            else:
                value = self.sheet.values.gradient(owner, stage)
            self.sheet.accumulators[stage, owner] = value
            op = ZeroGradient(stage, (), (value,), layer=owner)
            seconds = self.sheet.durations.sweep(self.sheet.bytes(value))
            self._link(stage, self.sheet.add(op, seconds, (COMPUTE,), self._after(stage)))

    def _recover_ahead(self, stage: int, i: int, blocks: list[Range]) -> None:
        """Recovers microbatch i and those after it that the window allows and whose forward is over."""
        stop = min(i + self.sheet.settings.window_microbatches, self._forwards.get(stage, 0))
        for j in range(self._recovers.get(stage, 0), stop):
            self._recover(stage, j, blocks)
            self._recovers[stage] = j + 1

    def _recover(
        self, stage: int, i: int, blocks: list[Range], wait_for: Range | None = None
    ) -> None:
        """Recovers the blocks of one microbatch, first to last; each run starts from its checkpoint."""
        waits: tuple[int, ...] = ()
        if wait_for is not None:
            waits = tuple(self._incoming(self.code.backward_unit(wait_for), stage, i))
        again: dict[int, int] = {}
        for block in blocks:
            unit = self.code.forward_unit(block)
            kept = [self.sheet.values.residuals(n, i) for n in range(*block)]
            self.residuals.update(((n, i), r) for n, r in zip(range(*block), kept, strict=True))
            inputs = [again.get(v, self.variables[v, stage, i]) for v in unit.inputs]
            reads = (*self._entry(unit), *inputs)
            outputs = [self.sheet.values.variable(v, stage, i) for v in unit.outputs]
            again.update(zip(unit.outputs, outputs, strict=True))
            op = Recover(stage, reads, (*outputs, *kept), (), waits, layers=block, microbatch=i)
            seconds = self.sheet.durations.forward(block)
            self._link(stage, self.sheet.add(op, seconds, (COMPUTE,), self._after(stage)))
        # Backward reads the recovered copies, so that a run keeps no more than the inputs of its first block.
        for v, value in again.items():
            self._recovered_inputs[v, i] = value

    def _incoming(self, unit: Unit, stage: int, i: int) -> list[int]:
        return [self.cotangents[v, stage, i] for v in unit.cotangents_in]

    def _backward_unit(self, stage: int, i: int, layers: Range) -> None:
        unit = self.code.backward_unit(layers)
        added, writes_to = self._accumulators(unit, stage, i)
        inputs = [
            self._recovered_inputs.get((v, i), self.variables[v, stage, i])
            if self._made_in_recovered_run(v, layers)
            else self.variables[v, stage, i]
            for v in unit.inputs
        ]
        reads = (
            *self._entry(unit),
            *inputs,
            *(self.residuals[n, i] for n in range(*layers)),
            *self._incoming(unit, stage, i),
            *added,
        )
        outgoing = [self.sheet.values.cotangent(v, stage, i) for v in unit.cotangents_out]
        for v, value in zip(unit.cotangents_out, outgoing, strict=True):
            self.cotangents[v, stage, i] = value
        op = Backward(
            stage, reads, (*outgoing, *writes_to), tuple(added), layers=layers, microbatch=i
        )
        task = self.sheet.add(
            op, self.sheet.durations.backward(layers), (COMPUTE,), self._after(stage)
        )
        self._link(stage, task)
        self.sheet.last_backward[stage, i] = task
        for owner in unit.accumulators:
            self.sheet.backwards.setdefault((stage, owner, i), []).append(task)
        self._send_gradients(unit, stage, i)

    def _made_in_recovered_run(self, variable: int, layers: Range) -> bool:
        producer = self.code.layered.variables[variable].producer
        same_stage = self.code.stage_of[producer] == self.code.stage_of[layers[0]]
        return same_stage and self.sheet.recovered[producer] and self.sheet.recovered[layers[0]]

    def _accumulators(self, unit: Unit, stage: int, i: int) -> tuple[list[int], list[int]]:
        """What a unit adds into, and what it writes."""
        values = self.sheet.values
        if self.code.zero == 1:
            table, key = self.sheet.accumulators, lambda owner: (stage, owner)
            read = [table[key(owner)] for owner in unit.accumulators]
            written = [values.accumulator(owner, stage) for owner in unit.accumulators]
            for owner, value in zip(unit.accumulators, written, strict=True):
                table[key(owner)] = value
            return read, written
        read, written = [], []
        for owner in unit.accumulators:
            if (stage, owner, i) in self.sheet.microbatch_gradients:
                read.append(self.sheet.microbatch_gradients[stage, owner, i])
            value = values.accumulator(owner, stage, i)
            self.sheet.microbatch_gradients[stage, owner, i] = value
            written.append(value)
        return read, written

    def _send_gradients(self, unit: Unit, stage: int, i: int) -> None:
        """Hands a cotangent to the stage of the previous reader, or of the producer."""
        for v in unit.cotangents_out:
            variable = self.code.layered.variables[v]
            earlier = [r for r in variable.readers if r < unit.layers[0]]
            target = self.code.stage_of[earlier[-1] if earlier else variable.producer]
            if target == stage:
                continue
            value = self.cotangents[v, stage, i]
            copy = self.sheet.values.copy(value, target)
            self.cotangents[v, target, i] = copy
            op = SendGradient(stage, (value,), (copy,), target=target, microbatch=i)
            seconds = self.sheet.durations.send(self.sheet.bytes(copy), target - stage)
            self.sheet.add(op, seconds, (TRANSFER, i))
