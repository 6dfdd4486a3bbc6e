"""Balances layers into pipeline stages.

Terms.
    A **split** gives each stage a run of consecutive layers. Its **bottleneck** is the seconds of
    its slowest stage, which sets the pace of the pipeline. Its **traffic** is what the stages send
    each other for one microbatch: a variable goes once to each stage that reads it, other than the
    one that makes it, and its gradient comes back.

Of all splits whose bottleneck is within `SLACK` of the least, the one with the least traffic is
taken.
"""

from __future__ import annotations

import bisect
import difflib
import itertools
import math
from collections.abc import Sequence

from ratrain_jax.errors import LayoutError
from ratrain_jax.kernels import Machine
from ratrain_jax.lowering.cost import aval_bytes
from ratrain_jax.lowering.layers import LayeredLoss

SLACK = 1.01
"""Bottlenecks whose ratio is at most this are as good as equal."""


def split_stages(
    layered: LayeredLoss,
    stages: int,
    *,
    machine: Machine,
    boundaries: Sequence[str] | None = None,
) -> tuple[int, ...]:
    """Gives each layer a stage.

    Args:
        layered: the layers of a loss.
        stages: how many stages; each gets at least one layer.
        machine: what they run on.
        boundaries: the first layer of each stage but stage 0, by name; chosen unless given. The
            name of a group of parameters that was opened stands for the first layer in it.

    Returns:
        The stage of each layer, in order.

    Raises:
        LayoutError: more stages than layers, or boundaries that name no split.
    """
    names = [layer.name for layer in layered.layers]
    if stages > len(names):
        raise LayoutError(
            f"{stages} stages need {stages} layers at least, but the loss has {len(names)}:"
            f" {', '.join(names)}. Use stages={len(names)} or fewer, or mark more layers with"
            " ratrain_jax.layer."
        )
    named = boundaries is not None
    firsts = (
        _named_firsts(names, stages, boundaries) if named else _balanced_firsts(layered, stages)
    )
    return tuple(bisect.bisect_right(firsts, layer) - 1 for layer in range(len(names)))


def _named_firsts(names: Sequence[str], stages: int, boundaries: Sequence[str]) -> list[int]:
    """The first layer of each stage, of which all but the first are named."""
    if isinstance(boundaries, str) or len(boundaries) != stages - 1:
        raise LayoutError(
            f"boundaries={boundaries!r}, but {stages} stages need a list of {stages - 1} names:"
            " the first layer of each stage but stage 0."
        )
    firsts = [0, *(_layer_number(names, name) for name in boundaries)]
    for before, after in itertools.pairwise(firsts):
        if after <= before:
            raise LayoutError(
                f"boundaries={list(boundaries)} leave a stage without layers: {names[after]!r}"
                f" does not come after {names[before]!r}. The layers, in order: {', '.join(names)}."
            )
    return firsts


def _layer_number(names: Sequence[str], name: str) -> int:
    for number, known in enumerate(names):
        if known == name or known.startswith(f"{name}/"):
            return number
    close = difflib.get_close_matches(name, names, 1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise LayoutError(
        f"boundaries name {name!r}, which is no layer.{hint} The layers: {', '.join(names)}."
    )


def _balanced_firsts(layered: LayeredLoss, stages: int) -> list[int]:
    """The first layer of each stage of the best split."""
    count = len(layered.layers)
    before = list(itertools.accumulate((layer.seconds for layer in layered.layers), initial=0.0))
    limit = SLACK * _least_bottleneck(before, stages)
    # best[end]: traffic, bottleneck and first layers of the best split of layers 0 to end.
    best: list[tuple[int, float, list[int]] | None] = [(0, 0.0, []), *[None] * count]
    for _ in range(stages):
        longer: list[tuple[int, float, list[int]] | None] = [None] * (count + 1)
        for first, so_far in enumerate(best[:-1]):
            if so_far is None:
                continue
            sent, slowest, firsts = so_far
            for end, taken in enumerate(_taken(layered, first), first + 1):
                seconds = before[end] - before[first]
                if seconds > limit:
                    break
                found = (sent + taken, max(slowest, seconds), [*firsts, first])
                known = longer[end]
                if known is None or found < known:
                    longer[end] = found
        best = longer
    last = best[count]
    if last is None:
        raise AssertionError("the split of the least bottleneck is within the limit")
    return last[2]


def _least_bottleneck(before: Sequence[float], stages: int) -> float:
    """Seconds of the slowest stage of the most even split."""
    count = len(before) - 1
    least = [before[end] if end else math.inf for end in range(count + 1)]
    for stage in range(1, stages):
        least = [
            min(
                (max(least[first], before[end] - before[first]) for first in range(stage, end)),
                default=math.inf,
            )
            for end in range(count + 1)
        ]
    return least[count]


def _taken(layered: LayeredLoss, first: int) -> list[int]:
    """Traffic into a stage that begins at layer `first`, for each layer with which it may end.

    Counts the bytes of what the stage reads of earlier ones, and of the gradients that it sends
    back.
    """
    new = [0] * (len(layered.layers) - first)
    for variable in layered.variables:
        place = bisect.bisect_left(variable.readers, first)
        if variable.producer < first and place < len(variable.readers):
            ways = 2 if variable.differentiable else 1
            new[variable.readers[place] - first] += ways * aval_bytes(variable.aval)
    return list(itertools.accumulate(new))
