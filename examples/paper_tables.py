"""The tables of `reproduce_paper.py`: the paper's figures beside ours, the differences, and what they come from."""

from __future__ import annotations

import dataclasses
import itertools
import math
import string
from collections.abc import Iterable

from paper_causes import CAUSES
from rich.console import Console
from rich.table import Table

CONSOLE = Console(width=100, emoji=False)
LARGE = 0.05
"""A difference above this has its cause printed."""
UNEXPLAINED = "No cause is known."
MACHINES = ("ours", "fitted:\nforward", "fitted:\nauto")


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure of the paper and ours.

    Attributes:
        label: what it is of.
        paper: the paper's; None where it has none, infinite where nothing fits.
        ours: ours on the machine as described, and with its clock fitted with either recovery.
        cause: the key in `CAUSES` of what makes them differ by more than `LARGE`; one, or one for each of `ours`.
        form: how numbers are written.
    """

    label: str
    paper: float | None
    ours: tuple[float, ...]
    cause: str | tuple[str, ...] = ""
    form: str = ",.1f"

    @property
    def differences(self) -> tuple[float | None, ...]:
        """Ours over the paper's, less 1; None where there is nothing to compare."""
        return tuple(self._difference(one) for one in self.ours)

    def _difference(self, one: float) -> float | None:
        if self.paper is None:
            return None
        if math.isinf(self.paper) or math.isinf(one):
            return 0.0 if self.paper == one else math.inf
        return one / self.paper - 1

    def causes(self) -> tuple[str, ...]:
        """What each difference comes from; empty where it is small."""
        given = (self.cause,) * len(self.ours) if isinstance(self.cause, str) else self.cause
        return tuple(
            CAUSES.get(cause, UNEXPLAINED) if off is not None and abs(off) > LARGE else ""
            for off, cause in zip(self.differences, given, strict=True)
        )

    def written(self, number: float | None) -> str:
        """A number as the table has it."""
        if number is None:
            return ""
        return "OOM" if math.isinf(number) else format(number, self.form)


def show(figures: Iterable[Figure], title: str, *notes: str) -> None:
    """Prints a table, and beneath it the causes that it names and some notes.

    Args:
        figures: its rows.
        title: its title.
        *notes: lines.
    """
    letters: dict[str, str] = {}
    free = iter(string.ascii_lowercase)
    heads = itertools.chain.from_iterable((name, "diff.") for name in MACHINES)
    table = Table("", "paper", *heads, title=title, title_justify="left", box=None)
    table.columns[0].no_wrap = True
    for figure in figures:
        cells = [figure.label, figure.written(figure.paper)]
        for one, off, cause in zip(figure.ours, figure.differences, figure.causes(), strict=True):
            if cause and cause not in letters:
                letters[cause] = next(free)
            cells += [figure.written(one), _shown(off) + letters.get(cause, "")]
        table.add_row(*cells)
    CONSOLE.print(table)
    for cause, letter in letters.items():
        CONSOLE.print(f"  {letter}  {cause}")
    for note in notes:
        CONSOLE.print(note)
    CONSOLE.print()


def _shown(off: float | None) -> str:
    if off is None:
        return ""
    return "differs " if math.isinf(off) else f"{off:+.1%} "
