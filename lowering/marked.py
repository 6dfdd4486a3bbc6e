"""Puts the passes of a loss side by side, with the layers that marks name or without any.

A network with marks that runs more than once in a loss marks every layer in every pass. The first mark of a name says where
the layer begins; what stands behind the others has to go back to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ratrain_jax.errors import OptionError
from ratrain_jax.lowering.dependence import Flow, Mark
from ratrain_jax.lowering.passes import Path, together, together_between


def arranged(
    flow: Flow, paths: Sequence[Path], trained: int | None, marks: Sequence[Mark]
) -> tuple[Flow, list[tuple[str, int]]]:
    """The equations of a loss with every pass beside the first.

    Args:
        flow: the equations as they were traced.
        paths: the path of each parameter.
        trained: how many parameters the loss is differentiated by; all if None.
        marks: where layers were marked.

    Returns:
        The equations, and the name and the first main equation of each marked layer.

    Raises:
        OptionError: two marks have one name but are no two passes.
    """
    if not marks:
        return together(flow, paths, trained), []
    first: dict[str, int] = {}
    for mark in marks:
        first.setdefault(mark.name, sum(place < mark.place for place in flow.places))
    names, starts = list(first), list(first.values())
    if len(names) < len(marks):
        moved, starts = together_between(flow, paths, trained, starts)
        _check(names, starts, () if moved is flow else moved.places, marks)
        flow = moved
    return flow, list(zip(names, starts, strict=True))


def _check(
    names: Sequence[str], starts: Sequence[int], places: Sequence[int], marks: Sequence[Mark]
) -> None:
    """Refuses a name that comes again where nothing goes back to its layer.

    Args:
        names: of the layers.
        starts: where they begin.
        places: where in the loss each equation stood; nothing if none was moved.
        marks: all marks.
    """
    ends = [*starts[1:], len(places)]
    first: set[str] = set()
    for mark in marks:
        number = names.index(mark.name)
        here = places[starts[number] : ends[number]]
        if mark.name in first and not any(place >= mark.place for place in here):
            raise OptionError(
                f"two layers are marked {mark.name!r}, and the second is no other pass through the first that could run"
                " beside it. Give every ratrain_jax.layer of a step a name of its own."
            )
        first.add(mark.name)
