"""What commands print: results on standard output, everything else on standard error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator

import click
from rich.console import Console, RenderableType

QUIET = "ratrain.quiet"


def is_quiet() -> bool:
    """Whether `--quiet` was given."""
    return bool(click.get_current_context().find_root().meta.get(QUIET))


def hush() -> None:
    """Does from now on as if `--quiet` had been given."""
    click.get_current_context().find_root().meta[QUIET] = True


def progress() -> bool | None:
    """What functions that report progress are told: nothing, or a bar if standard error is a terminal."""
    return False if is_quiet() else None


def show(parts: Iterable[RenderableType]) -> None:
    """Prints results: plain text in 80 columns unless standard output is a terminal."""
    from ratrain_jax.views.terminal import render

    click.echo(render(parts, sys.stdout), nl=False)


def note(text: str) -> None:
    """Says what was done, unless told to be quiet."""
    if not is_quiet():
        click.echo(text, err=True)


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Shows that something long is under way, if standard error is a terminal."""
    console = Console(stderr=True)
    if is_quiet() or not console.is_terminal:
        yield
        return
    with console.status(what):
        yield
