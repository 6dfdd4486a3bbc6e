"""What the ops around the compute ops must read and what they write, as tags."""

from __future__ import annotations

from typing import Final

from ratrain_jax.lowering.program import (
    Borrow,
    GlobalReduce,
    GradSync,
    Kind,
    Metrics,
    PrefetchView,
    Program,
    Prologue,
    Send,
    UpdateShard,
    Validate,
    ZeroGradient,
)

from .compute_roles import ComputeRoles
from .shape import Shape
from .tags import EARLY, NEW, NEXT, OLD, THIS, Slot, Tag, slots


class StateRoles:
    """The roles of transfers, gradient syncs, updates, gathers, reductions and metrics.

    Args:
        compute: the roles of the compute ops.
        tags: the tags of all values, as far as they are known.
    """

    def __init__(self, compute: ComputeRoles, tags: list[Tag | None]) -> None:
        self.compute = compute
        self.tags = tags
        self.shape: Shape = compute.shape
        self.program: Program = compute.program
        self.zero = self.program.settings.zero
        kinds = ((v.kind, v.layer) for v in self.program.values)
        self._with_outputs = {layer for kind, layer in kinds if kind is Kind.METRICS}

    def prologue_reads(self, op: Prologue) -> list[Slot]:
        """Replicated state and arguments."""
        return [*self._replicated(op.stage, optional=True), self._arguments(op.stage)]

    def prologue_writes(self, op: Prologue) -> list[Tag]:
        """The operands that it computes."""
        made = (n for n, operand in enumerate(self.program.operands) if operand.prologue)
        return [("operand", n, op.stage) for n in made]

    def zero_writes(self, op: ZeroGradient) -> list[Tag]:
        """A gradient before any addition."""
        return [("accumulator" if self.zero == 1 else "shard", op.layer, op.stage, 0)]

    def send_reads(self, op: Send) -> list[Slot]:
        """What is sent, on the sender's stage."""
        return slots([self._sent(op, op.stage)])

    def send_writes(self, op: Send) -> list[Tag]:
        """The same on the target."""
        return [self._sent(op, op.target)]

    def _sent(self, op: Send, stage: int) -> Tag:
        """The tag on a stage of what a send carries, judged by its row in the table of values."""
        value = self.program.values[op.reads[0]]
        match value.kind:
            case Kind.OPERAND:
                tag = self.tags[value.id]
                return ("operand", tag[1] if tag else -1, stage)
            case Kind.BOUNDARY | Kind.LOSS:
                return ("variable", int(value.name[1:]), op.microbatch, stage)
            case Kind.COTANGENT:
                return self._cotangent(op, int(value.name[1:]), stage)
        owner = value.layer if value.layer is not None else -1
        if stage == op.target:
            return ("share", owner, op.stage)
        return self._own_gradient(owner, stage)

    def _cotangent(self, op: Send, variable: int, stage: int) -> Tag:
        """What the sender's stage summed: from its first reader on."""
        microbatch = op.microbatch or 0
        readers = self.program.variables[variable].readers
        first = next(r for r in readers if self.shape.stage(r) == op.stage)
        start = self.compute.first_of_unit(first, microbatch)
        return ("cotangent", variable, microbatch, start, stage)

    def _own_gradient(self, owner: int, stage: int) -> Tag:
        """A bundle's gradient after the stage's own last addition."""
        if self.zero == 1:
            return ("accumulator", owner, stage, self.compute.additions(stage, owner))
        return ("shard", owner, stage, self.program.settings.microbatches)

    def view_reads(self, op: PrefetchView | Borrow) -> list[Slot]:
        """Parameters: the new ones if the view is for the next step."""
        age = NEW if self.program.settings.update_prefetch else OLD
        if self._deferred(op.layer):
            age = EARLY
        return slots([("parameters", op.layer, age)])

    def view_writes(self, op: PrefetchView | Borrow) -> list[Tag]:
        """A view, at home or on the borrower."""
        step = NEXT if self.program.settings.update_prefetch else THIS
        if self._deferred(op.layer):
            step = EARLY
        return [("view", op.layer, op.target if isinstance(op, Borrow) else op.stage, step)]

    def sync_reads(self, op: GradSync) -> list[Slot]:
        """Whole gradient and shares, or a microbatch's gradient and the shard so far (ZeRO-2)."""
        if op.microbatch is None:
            shares = [("share", op.layer, stage) for stage in self.shape.borrowers[op.layer]]
            return slots([self._own_gradient(op.layer, op.stage), *shares], donated=True)
        count = self.compute.additions(op.stage, op.layer, op.microbatch)
        whole = ("whole", op.layer, op.stage, op.microbatch, count)
        return slots([whole, ("shard", op.layer, op.stage, op.microbatch)], donated=True)

    def sync_writes(self, op: GradSync) -> list[Tag]:
        """The final gradient, or with ZeRO-2 the shard after one more microbatch."""
        if op.microbatch is None:
            return [("gradient", op.layer)]
        return [("shard", op.layer, op.stage, op.microbatch + 1)]

    def update_reads(self, op: UpdateShard) -> list[Slot]:
        """Gradient, parameters, optimizer, replicated state, scalars."""
        if op.layer is None:
            return [*self._replicated(op.stage), *self._scalars(op.stage, op.phase)]
        layer = self.program.layers[op.layer]
        final = op.phase == layer.update_phase
        own = slots(self._own(op.layer), donated=final and not layer.deferred)
        scalars = self._scalars(op.stage, layer.waits if final else op.phase)
        return [*own, *self._replicated(op.stage), *scalars]

    def _scalars(self, stage: int, phase: int) -> list[Slot]:
        """What the reductions up to a phase give to a stage."""
        return slots(
            ("scalars", reduction.phase, stage)
            for reduction in self.program.reductions[:phase]
            if stage in reduction.stages
        )

    def _own(self, layer: int) -> list[Tag]:
        """What an update reads of its layer."""
        own: list[Tag] = [self._final_gradient(layer), ("parameters", layer, OLD)]
        if layer in self.shape.optimizers:
            own.append(("optimizer", layer, OLD))
        return own

    def _deferred(self, layer: int) -> bool:
        return 0 <= layer < len(self.program.layers) and self.program.layers[layer].deferred

    def update_writes(self, op: UpdateShard) -> list[Tag]:
        """Partials for the next reduction; in the last phase new parameters and optimizer too."""
        if op.layer is None:
            return [("replicated", op.stage, NEW)]
        tags: list[Tag] = [
            ("partials", op.layer, reduction.phase)
            for reduction in self.program.reductions[op.phase : op.phase + 1]
            if op.layer in reduction.layers
        ]
        if op.phase < self.program.layers[op.layer].update_phase:
            return tags
        if self._deferred(op.layer):
            return self._early(op.layer)
        tags.append(("parameters", op.layer, NEW))
        if op.layer in self.shape.optimizers:
            tags.append(("optimizer", op.layer, NEW))
        if len(op.writes) > len(tags):
            tags.append(("layer metrics", op.layer))
        return tags

    def _early(self, layer: int) -> list[Tag]:
        """What the early update of a layer writes."""
        phase = self.program.layers[layer].update_phase
        tags: list[Tag] = [
            ("early partials", layer, reduction.phase)
            for reduction in self.program.reductions[phase : phase + 1]
            if layer in reduction.layers
        ]
        tags.append(("parameters", layer, EARLY))
        if layer in self.shape.optimizers:
            tags.append(("optimizer", layer, EARLY))
        if layer in self._with_outputs:
            tags.append(("early metrics", layer))
        return tags

    def validate_reads(self, op: Validate) -> list[Slot]:
        """What the update reads, scalars included; then what the early one wrote, and its view."""
        early = [*self._early(op.layer), ("view", op.layer, op.stage, EARLY)]
        return [
            *slots(self._own(op.layer), donated=True),
            *self._replicated(op.stage),
            *self._scalars(op.stage, op.phase),
            *slots(early, donated=True),
        ]

    def validate_writes(self, op: Validate) -> list[Tag]:
        """The same as the early update and its view, and right."""
        return [
            *(_right(tag) for tag in self._early(op.layer)),
            ("view", op.layer, op.stage, NEXT),
        ]

    def _final_gradient(self, layer: int) -> Tag:
        if self.zero == 2 and not self.shape.borrowers[layer]:
            return self._own_gradient(layer, self.shape.stage(layer))
        return ("gradient", layer)

    def reduce_reads(self, op: GlobalReduce) -> list[Slot]:
        """Partials, losses; then for each receiver replicated state, arguments, earlier scalars."""
        reduction = self.program.reductions[op.phase - 1]
        found = slots(("partials", layer, op.phase) for layer in reduction.layers)
        if reduction.loss:
            found += self._losses(op, len(found))
        for stage in reduction.stages:
            found += [*self._replicated(stage), self._arguments(stage)]
            found += slots(
                ("scalars", earlier.phase, stage)
                for earlier in self.program.reductions[: op.phase - 1]
                if stage in earlier.stages
            )
        return found

    def _losses(self, op: GlobalReduce, start: int) -> list[Slot]:
        """Loss and auxiliary values by microbatch, each time in the order of the first."""
        results = self.shape.results
        first = [self.tags[number] for number in op.reads[start : start + len(results)]]
        order = [tag[1] for tag in first if tag is not None and tag[0] == "variable"]
        if sorted(order) != results:
            order = results
        return slots(
            ("variable", v, i, self.shape.stage(self.program.variables[v].producer))
            for i in range(self.program.settings.microbatches)
            for v in order
        )

    def reduce_writes(self, op: GlobalReduce) -> list[Tag]:
        """Scalars on each receiving stage."""
        return [("scalars", op.phase, s) for s in self.program.reductions[op.phase - 1].stages]

    def metrics_reads(self, op: Metrics) -> list[Slot]:
        """Scalars, replicated state, arguments and operands, losses."""
        scalars = slots(
            ("scalars", reduction.phase, op.stage)
            for reduction in self.program.reductions
            if op.stage in reduction.stages
        )
        operands = [("operand", n, op.stage) for n in range(len(self.program.operands))]
        losses = [
            ("variable", v, i, op.stage)
            for i in range(self.program.settings.microbatches)
            for v in self.shape.results
        ]
        return [
            *scalars,
            *self._replicated(op.stage, optional=True),
            Slot((*self._arguments(op.stage).tags, *operands), many=True),
            Slot(tuple(losses), many=True),
        ]

    def metrics_writes(self, op: Metrics) -> list[Tag]:
        """The metrics."""
        return [("metrics", op.stage)]

    def _replicated(self, stage: int, optional: bool = False) -> list[Slot]:
        if stage not in self.shape.replicated:
            return []
        return [Slot((("replicated", stage, OLD),), optional=optional)]

    def _arguments(self, stage: int) -> Slot:
        return Slot((("argument", stage),), many=True)


_RIGHT: Final = {"early partials": "partials", "early metrics": "layer metrics"}


def _right(tag: Tag) -> Tag:
    """The tag of what was made early, once it is validated."""
    if tag[0] in _RIGHT:
        return (_RIGHT[tag[0]], *tag[1:])
    return (tag[0], tag[1], NEW)
