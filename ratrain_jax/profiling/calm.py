"""How much of the host other processes use meanwhile: what is measured on a busy host says little."""

from __future__ import annotations

import os
import time

DISTURBED = 0.1
"""Cores that other processes may use at most for a measurement to count as calm."""


class Others:
    """Tells how many cores other processes have used since it was made.

    Example:
        >>> cores = Others().cores()
        >>> cores is None or cores >= 0
        True
    """

    def __init__(self) -> None:
        self._start, self._busy, self._own = time.perf_counter(), _busy(), time.process_time()

    @property
    def own(self) -> float:
        """CPU seconds that this process has used since."""
        return time.process_time() - self._own

    def cores(self, own: float | None = None) -> float | None:
        """Cores that others used on average; None where the system does not say.

        Args:
            own: CPU seconds that do not count as others'; unless given, those of this process.
        """
        busy = _busy()
        if busy is None or self._busy is None:
            return None
        mine = self.own if own is None else own
        return max(0.0, (busy - self._busy - mine) / (time.perf_counter() - self._start))


def _busy() -> float | None:
    """CPU seconds that all processes of a Linux host have used, and those that a hypervisor gave to other hosts."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _, _, *more = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + sum(more)) / os.sysconf("SC_CLK_TCK")
