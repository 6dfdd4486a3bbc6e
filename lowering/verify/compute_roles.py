"""What the compute ops must read and what they write: the calling convention, as tags."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ratrain_jax.lowering.program import Backward, Forward, Program, Recover

from .shape import Range, Shape
from .tags import THIS, Slot, Tag, slots


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """What a run of layers takes and gives.

    Attributes:
        owners: the layers whose parameters it reads, ascending.
        operands: the operands that it reads, ascending.
        inputs: the variables that it reads from other blocks, ascending.
        given: variables that it gives: outputs (forward) or cotangents (backward), ascending.
        returned: variables whose cotangent comes from later units, ascending; of Backward only.
    """

    owners: tuple[int, ...]
    operands: tuple[int, ...]
    inputs: tuple[int, ...]
    given: tuple[int, ...]
    returned: tuple[int, ...] = ()


class ComputeRoles:
    """The roles of Forward, Recover and Backward.

    Args:
        shape: the tables of the program.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.program: Program = shape.program
        self._forward: dict[Range, Unit] = {}
        self._backward: dict[Range, Unit] = {}
        self._starts = _unit_starts(shape)
        self._additions = _additions(shape)

    def forward_unit(self, layers: Range) -> Unit:
        """A block, going forward."""
        if layers not in self._forward:
            self._forward[layers] = self._new_forward_unit(layers)
        return self._forward[layers]

    def backward_unit(self, layers: Range) -> Unit:
        """A run of layers within a block, going backward."""
        if layers not in self._backward:
            self._backward[layers] = self._new_backward_unit(layers)
        return self._backward[layers]

    def first_of_unit(self, layer: int, microbatch: int) -> int:
        """The first layer of the Backward unit that covers a layer."""
        return self._starts[self.shape.stage(layer), microbatch].get(layer, layer)

    def additions(self, stage: int, owner: int, microbatch: int | None = None) -> int:
        """How often a bundle's gradient is added to in the step, or in a microbatch (ZeRO-2)."""
        return self._additions.total.get((stage, owner, microbatch), 0)

    def forward_reads(self, op: Forward) -> list[Slot]:
        """Views, operands, inputs."""
        unit = self.forward_unit(op.layers)
        inputs = [("variable", v, op.microbatch, op.stage) for v in unit.inputs]
        return [*self._entry(unit, op.stage), *slots(inputs)]

    def forward_writes(self, op: Forward) -> list[Tag]:
        """Outputs, residuals."""
        unit = self.forward_unit(op.layers)
        return [
            *(("variable", v, op.microbatch, op.stage) for v in unit.given),
            *(("residuals", n, op.microbatch, "Forward") for n in range(*op.layers)),
        ]

    def recover_reads(self, op: Recover) -> list[Slot]:
        """As Forward, from the checkpoint or from what an earlier Recover made."""
        unit = self.forward_unit(op.layers)
        return [*self._entry(unit, op.stage), *self._inputs(unit, op)]

    def recover_writes(self, op: Recover) -> list[Tag]:
        """Outputs, residuals."""
        unit = self.forward_unit(op.layers)
        return [
            *(("recovered", v, op.microbatch) for v in unit.given),
            *(("residuals", n, op.microbatch, "Recover") for n in range(*op.layers)),
        ]

    def backward_reads(self, op: Backward) -> list[Slot]:
        """Views, operands, inputs, residuals, cotangents, gradients to add to."""
        unit = self.backward_unit(op.layers)
        views = [Slot((("view", n, op.stage, THIS),), optional=True) for n in unit.owners]
        operands = [("operand", o, op.stage) for o in unit.operands]
        recovered = self.program.layers[op.layers[0]].recovered
        maker = "Recover" if recovered else "Forward"
        residuals = [("residuals", n, op.microbatch, maker) for n in range(*op.layers)]
        return [
            *views,
            *slots(operands),
            *self._inputs(unit, op),
            *slots(residuals),
            *slots(self.incoming(op.layers, op.stage, op.microbatch)),
            *slots(self._gradients(op, unit, added=False), donated=True),
        ]

    def backward_writes(self, op: Backward) -> list[Tag]:
        """Cotangents, gradients."""
        unit = self.backward_unit(op.layers)
        first = op.layers[0]
        return [
            *(("cotangent", v, op.microbatch, first, op.stage) for v in unit.given),
            *self._gradients(op, unit, added=True),
        ]

    def incoming(self, layers: Range, stage: int, microbatch: int) -> list[Tag]:
        """The cotangents that a Backward unit takes from later ones."""
        tags = []
        for v in self.backward_unit(layers).returned:
            later = next(r for r in self.program.variables[v].readers if r >= layers[1])
            first = self.first_of_unit(later, microbatch)
            tags.append(("cotangent", v, microbatch, first, stage))
        return tags

    def recover_waits(self, op: Recover) -> list[Tag]:
        """What a Recover waits for: the cotangents that come into its run of recovered blocks."""
        if self.program.settings.recovery != "backward":
            return []
        units = self.shape.units[op.stage, op.microbatch]
        later = [unit for unit in units if unit[0] >= op.layers[0]]
        last = next(u for u in reversed(later) if self.shape.is_last_unit_of_run(u))
        return self.incoming(last, op.stage, op.microbatch)

    def forward_waits(self, op: Forward) -> list[Tag]:
        """What a Forward waits for: a stage's first one for all of its views, where these are gathered in the same step."""
        settings = self.program.settings
        first = op.microbatch == 0 and op.layers == self.shape.blocks[op.stage][0]
        if settings.update_prefetch or not settings.trains or not first:
            return []
        read = self.forward_unit(op.layers).owners
        owners = [n for n in self.shape.bundles[op.stage] if n not in read]
        return [("view", n, op.stage, THIS) for n in owners]

    def backward_waits(self, op: Backward) -> list[Tag]:
        """What a Backward waits for: with ZeRO-2, the last microbatch's syncs of the layers that it is first to add to."""
        if self.program.settings.zero == 1 or op.microbatch == 0:
            return []
        step = self._additions.step
        return [
            ("shard", owner, op.stage, op.microbatch)
            for owner in self.backward_unit(op.layers).owners
            if step[op.layers, op.microbatch, owner] == 0
        ]

    def _entry(self, unit: Unit, stage: int) -> list[Slot]:
        return slots(
            [
                *(("view", n, stage, THIS) for n in unit.owners),
                *(("operand", o, stage) for o in unit.operands),
            ]
        )

    def _inputs(self, unit: Unit, op: Recover | Backward) -> list[Slot]:
        """Inputs as they were, or as an earlier Recover of the stage made them again."""
        found = []
        for v in unit.inputs:
            tags: list[Tag] = [("variable", v, op.microbatch, op.stage)]
            producer = self.program.layers[self.program.variables[v].producer]
            if producer.recovered and producer.stage == op.stage:
                tags.append(("recovered", v, op.microbatch))
            found.append(Slot(tuple(tags)))
        return found

    def _gradients(self, op: Backward, unit: Unit, added: bool) -> list[Tag]:
        """The gradients that a unit adds to, before or after it did."""
        step = self._additions.step
        tags: list[Tag] = []
        for owner in unit.owners:
            number = step[op.layers, op.microbatch, owner] + added
            if self.program.settings.zero == 1:
                tags.append(("accumulator", owner, op.stage, number))
            elif number:
                tags.append(("whole", owner, op.stage, op.microbatch, number))
        return tags

    def _new_forward_unit(self, layers: Range) -> Unit:
        variables = self.program.variables
        members = self.program.layers[slice(*layers)]
        made = {v for layer in members for v in layer.outputs}
        return Unit(
            owners=self._owners(layers),
            operands=_union(layer.operands for layer in members),
            inputs=tuple(v for v in _union(layer.inputs for layer in members) if v not in made),
            given=tuple(
                v
                for v in sorted(made)
                if variables[v].role != "boundary"
                or any(reader >= layers[1] for reader in variables[v].readers)
            ),
        )

    def _new_backward_unit(self, layers: Range) -> Unit:
        variables = self.program.variables
        members = self.program.layers[slice(*layers)]
        block = range(*self.shape.block_of[layers[0]])
        read = _union(layer.inputs for layer in members)
        touched = _union((*layer.inputs, *layer.outputs) for layer in members)
        needed = _union(layer.backward_inputs for layer in members)
        return Unit(
            owners=self._owners(layers),
            operands=_union(layer.backward_operands for layer in members),
            inputs=tuple(v for v in needed if variables[v].producer not in block),
            given=tuple(
                v for v in read if variables[v].differentiable and variables[v].producer < layers[0]
            ),
            returned=tuple(
                v
                for v in touched
                if variables[v].differentiable
                and any(reader >= layers[1] for reader in variables[v].readers)
            ),
        )

    def _owners(self, layers: Range) -> tuple[int, ...]:
        return _union(self.shape.owners[n] for n in range(*layers))


def _union(lists: object) -> tuple[int, ...]:
    return tuple(sorted({item for items in lists for item in items}))  # pyright: ignore


def _unit_starts(shape: Shape) -> dict[tuple[int, int], dict[int, int]]:
    """For each (stage, microbatch), the first layer of each layer's Backward unit."""
    tables: dict[tuple[Range, ...], dict[int, int]] = {}
    starts = {}
    for key, units in shape.units.items():
        if units not in tables:
            tables[units] = {layer: unit[0] for unit in units for layer in range(*unit)}
        starts[key] = tables[units]
    return starts


@dataclasses.dataclass(slots=True)
class _Additions:
    """The order in which Backward units add to the gradients of each bundle.

    Attributes:
        step: how many additions to an owner's gradient come before (unit, microbatch, owner).
        total: how many there are by (stage, owner, microbatch); None for the whole step (ZeRO-1).
    """

    step: dict[tuple[Range, int, int], int]
    total: dict[tuple[int, int, int | None], int]


def _additions(shape: Shape) -> _Additions:
    """Microbatch after microbatch, and in each from the last layer to the first."""
    zero, additions = shape.program.settings.zero, _Additions({}, {})
    owners_of: dict[Range, Sequence[int]] = {}
    for (stage, microbatch), units in sorted(shape.units.items()):
        for unit in units:
            if unit not in owners_of:
                owners_of[unit] = _union(shape.owners[n] for n in range(*unit))
            for owner in owners_of[unit]:
                key = (stage, owner, None if zero == 1 else microbatch)
                before = additions.total.get(key, 0)
                additions.step[unit, microbatch, owner] = before
                additions.total[key] = before + 1
    return additions
