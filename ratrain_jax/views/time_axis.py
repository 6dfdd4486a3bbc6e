"""From seconds to places along the picture, with folds cut out and a gutter in place of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np

from ratrain_jax.views.folding import Fold

GUTTER: Final = 0.42
"""Inches of a fold."""

TICK_INCHES: Final = 0.6
"""About how far apart ticks are."""

TICK_GAP: Final = 0.33
"""Inches between ticks at the least."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TimeAxis:
    """A time axis that shows some spans and leaves out what is between.

    Attributes:
        starts: when the spans that are shown start, in seconds.
        ends: when they end.
        places: inches at which they start.
        inches: inches of the whole axis.
        inch: seconds of an inch.
    """

    starts: np.ndarray
    ends: np.ndarray
    places: np.ndarray
    inches: float
    inch: float

    @classmethod
    def of(cls, seconds: float, folds: Sequence[Fold], inches: float) -> TimeAxis:
        """An axis of so many inches.

        Args:
            seconds: when it ends.
            folds: what it leaves out.
            inches: how wide it is.
        """
        starts = np.array([0.0, *(fold.end for fold in folds)])
        ends = np.array([*(fold.start for fold in folds), seconds])
        shown = float((ends - starts).sum())
        inch = (shown or 1.0) / (inches - GUTTER * len(folds))
        before = np.append(0.0, np.cumsum((ends - starts) / inch + GUTTER)[:-1])
        return cls(starts, ends, before, inches, inch)

    def pieces(
        self, starts: Sequence[float] | np.ndarray, ends: Sequence[float] | np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What is seen of spans.

        Args:
            starts: when they start, in seconds.
            ends: when they end.

        Returns:
            Of each piece that is seen: which span it is of, and the inches where it starts and ends.
        """
        first, last = np.asarray(starts, float)[:, None], np.asarray(ends, float)[:, None]
        reaches = (last > self.starts) | ((first == last) & (first >= self.starts))
        which, shown = np.nonzero(reaches & (first < self.ends))
        left = np.maximum(first[which, 0], self.starts[shown]) - self.starts[shown]
        right = np.minimum(last[which, 0], self.ends[shown]) - self.starts[shown]
        base = self.places[shown]
        return which, base + left / self.inch, base + right / self.inch

    def place(self, seconds: float) -> float | None:
        """The inches of a moment; None if it is left out."""
        shown = int(np.searchsorted(self.starts, seconds, side="right")) - 1
        if shown < 0 or seconds > self.ends[shown]:
            return None
        return float(self.places[shown] + (seconds - self.starts[shown]) / self.inch)

    def gutters(self) -> list[tuple[float, float]]:
        """Inches where each fold's gutter starts and ends."""
        ends = self.places + (self.ends - self.starts) / self.inch
        return [(float(end), float(end) + GUTTER) for end in ends[:-1]]

    def ticks(self) -> list[tuple[float, float]]:
        """Round moments, each as seconds and inches; some in every span that is shown and not narrow."""
        wanted = TICK_INCHES * self.inch
        power = 10.0 ** np.floor(np.log10(wanted))
        step = power * next(part for part in (1, 2, 5, 10) if part * power >= wanted * 0.999)
        found: list[tuple[float, float]] = []
        for start, end, place in zip(self.starts, self.ends, self.places, strict=True):
            for finer in (step, step / 2, step / 5, step / 10):
                counts = np.arange(np.ceil(start / finer - 1e-9), np.floor(end / finer + 1e-9) + 1)
                if len(counts):
                    break
            for moment in counts * finer:
                at = float(place + (moment - start) / self.inch)
                if not found or at - found[-1][1] > TICK_GAP:
                    found.append((abs(float(moment)), at))
        return found


def unit_of(seconds: float) -> tuple[str, float]:
    """The unit in which so many seconds are at least 1, and how many of it a second is.

    Example:
        >>> unit_of(0.25), unit_of(90.0)
        (('ms', 1000.0), ('s', 1.0))
    """
    units = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
    return next((unit for unit in units if seconds * unit[1] >= 1), ("ns", 1e9))


def readable_seconds(seconds: float) -> str:
    """Seconds in the unit that keeps the number at 1 or above.

    Example:
        >>> readable_seconds(0.01234), readable_seconds(71.0)
        ('12.3 ms', '71 s')
    """
    name, factor = unit_of(seconds)
    return f"{seconds * factor:.3g} {name}"
