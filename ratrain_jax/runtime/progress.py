"""Shows how far something long is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Report = Callable[[int, int], None]
"""Takes how many are done, and of how many."""


@contextlib.contextmanager
def reporting(progress: bool | Report | None, what: str) -> Iterator[Report]:
    """What is told of each thing that is done.

    Args:
        progress: a function; True for a bar on standard error; False for nothing; None for a bar if standard error is a
            terminal.
        what: the word before the bar.
    """
    if callable(progress):
        yield progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if progress is False or not (progress or console.is_terminal):
        yield lambda done, total: None
        return
    columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        TextColumn(what),
        *columns,
        console=console,
        transient=console.is_terminal,
        expand=True,
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
