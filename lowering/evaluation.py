"""What lowers differently for a step that only evaluates: no backward, and no state to keep up.

Such a step has the schedule `forward`. Its layers keep no residuals, nothing flows back through its variables, and its
layers run on the stages where a train step keeps their parameters, if it is known where that is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from ratrain_jax import compat
from ratrain_jax.lowering.autodiff import LayerCode
from ratrain_jax.lowering.code import StepCode
from ratrain_jax.lowering.graph import fingerprint
from ratrain_jax.lowering.layers import LayeredLoss
from ratrain_jax.lowering.stacks import StackMap, flat_parts


def forward_code(layered: LayeredLoss) -> tuple[LayeredLoss, tuple[LayerCode, ...]]:
    """The layers of an evaluation, and code for each that goes forward alone.

    Args:
        layered: the layers as they are found for a loss.

    Returns:
        The same layers, through whose variables nothing flows back; and the code of each.
    """
    nothing = compat.closed([], [], [])
    codes = tuple(
        LayerCode(layer.program, nothing, (), (), (), (), fingerprint(layer.program))
        for layer in layered.layers
    )
    still = tuple(dataclasses.replace(v, differentiable=False) for v in layered.variables)
    # Without a backward there is nothing to recover for.
    layers = tuple(dataclasses.replace(layer, checkpointed=False) for layer in layered.layers)
    return dataclasses.replace(layered, layers=layers, variables=still), codes


@dataclasses.dataclass(frozen=True, slots=True)
class Homes:
    """Where a train step keeps the leaves of the user's state.

    Attributes:
        stages: for each leaf its stage, or of a stacked one those of its layers.
        fixed: the leaves that every device of their group has whole, because they never change.
    """

    stages: tuple[tuple[int, ...], ...]
    fixed: frozenset[int]

    def of(self, leaves: Sequence[int]) -> Homes:
        """Those of some leaves, in their order."""
        fixed = frozenset(place for place, leaf in enumerate(leaves) if leaf in self.fixed)
        return Homes(tuple(self.stages[leaf] for leaf in leaves), fixed)


def state_homes(code: StepCode) -> Homes:
    """Where a train step keeps the leaves of the user's state."""
    stage = code.leaf_stages
    parts = range(len(stage)) if code.stacks is None else code.stacks.states
    opened = [flat_parts(part) for part in parts]
    return Homes(
        tuple(tuple(stage[leaf] for leaf in leaves) for leaves in opened),
        frozenset(n for n, leaves in enumerate(opened) if code.fixed.issuperset(leaves)),
    )


def opened_leaves(leaves: Collection[int], stacks: StackMap | None) -> frozenset[int]:
    """The leaves of the opened step that some of the user's became."""
    if stacks is None:
        return frozenset(leaves)
    return frozenset(part for leaf in leaves for part in flat_parts(stacks.states[leaf]))


def opened_homes(
    homes: Sequence[Sequence[int]], stacks: StackMap | None, params: Sequence[int]
) -> dict[int, int]:
    """The stage that each parameter lies on.

    Args:
        homes: for each leaf of the user's state the stage that it lies on, or of a stacked one those of its layers.
        stacks: what became of the leaves.
        params: the leaf of the opened step behind each parameter.

    Returns:
        The stage of each parameter, by its number; nothing if a leaf was taken apart into other layers.
    """
    parts = range(len(homes)) if stacks is None else stacks.states
    stage: dict[int, int] = {}
    for where, part in zip(homes, parts, strict=True):
        leaves = flat_parts(part)
        if len(where) not in (1, len(leaves)):
            return {}
        stage.update(zip(leaves, where if len(where) > 1 else [*where] * len(leaves), strict=True))
    return {number: stage[leaf] for number, leaf in enumerate(params)}


def stages_at_home(
    layered: LayeredLoss, stages: int, homes: Mapping[int, int]
) -> tuple[int, ...] | None:
    """Gives each layer the stage that its parameters lie on.

    Args:
        layered: the layers.
        stages: how many stages there are.
        homes: the stage of each parameter.

    Returns:
        The stage of each layer; a layer without parameters goes with the one before. None if the layers do not pass
        through all the stages in order.
    """
    found: list[int] = []
    for layer in layered.layers:
        own = [homes[p] for p in layer.owned if p in homes]
        found.append(max(own) if own else found[-1] if found else 0)
    in_order = found == sorted(found) and set(found) == set(range(stages))
    return tuple(found) if in_order else None
