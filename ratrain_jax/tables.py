"""Tables for the terminal; they fit 80 columns and are plain text when piped."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from ratrain_jax.lowering.program import Program

WIDTH = 80


def layer_table(program: Program) -> str:
    """The layers of a program: stage, block, parameters, work for one microbatch, recovery."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("stage", "block", "layer", "arrays", "MFLOP", "share", "activations"):
        justify = "left" if name in ("layer", "activations") else "right"
        table.add_column(name, justify=justify, overflow="ellipsis", no_wrap=True)
    total = sum(layer.seconds for layer in program.layers) or 1.0
    for layer in program.layers:
        table.add_row(
            str(layer.stage),
            str(layer.block),
            layer.name,
            str(len(layer.parameters)),
            f"{layer.flops / 1e6:,.1f}",
            f"{layer.seconds / total:.1%}",
            "recovered" if layer.recovered else "saved",
        )
    return render(table)


def render(table: Table) -> str:
    """A table as plain text."""
    target = io.StringIO()
    # Whatever the environment says of colours: this is a string.
    Console(file=target, width=WIDTH, force_terminal=False, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines())


def wrapped(head: str, words: Iterable[str]) -> list[str]:
    """Words behind a head, in lines of the usual width."""
    lines, line = [], head
    for word in words:
        if len(line) + len(word) + 1 > WIDTH:
            lines.append(line.rstrip())
            line = "  "
        line += f"{word} "
    return [*lines, line.rstrip()]
