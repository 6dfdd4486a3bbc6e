"""Parts of the HTML that notebooks show: small, self-contained, in the notebook's own colours, all text escaped."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape
from itertools import islice

from .grid import grid
from .program import Program

_MOST_ROWS = 200
_MOST_LINES = 60
_MOST_OPS = 20_000  # a grid of more takes seconds to draw
_SCROLLS = "overflow:auto;max-height:28em;margin:0.4em 0"
# Pages without a doctype would give tables a colour and a size of their own.
_PLAIN = "color:inherit;font-size:inherit;white-space:nowrap;border-collapse:collapse"
_CELL = "padding:0.1em 0.6em"


def paragraph(title: str, text: str = "") -> str:
    """A title in bold, and text behind it.

    Example:
        >>> paragraph("Plan", "2 < 3")
        '<p><b>Plan</b> 2 &lt; 3</p>'
    """
    return f"<p><b>{escape(title)}</b> {escape(text)}</p>"


def table(names: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = ()) -> str:
    """A table that scrolls where it is long, and is cut where it is very long.

    Args:
        names: the heads of the columns.
        rows: the cells, row by row.
        left: the columns whose cells are words.
    """
    sides = ["left" if name in left else "right" for name in names]
    rest = iter(rows)
    lines = [_row("th", names, sides)]
    lines += [_row("td", row, sides) for row in islice(rest, _MOST_ROWS)]
    more = sum(1 for _ in rest)
    cut = f"<p>{more} more rows are left out.</p>" if more else ""
    return f'<div style="{_SCROLLS}"><table style="{_PLAIN}">{"".join(lines)}</table></div>{cut}'


def _row(tag: str, cells: Sequence[str], sides: Sequence[str]) -> str:
    each = zip(cells, sides, strict=True)
    shown = (
        f'<{tag} style="text-align:{side};{_CELL}">{escape(cell)}</{tag}>' for cell, side in each
    )
    return f"<tr>{''.join(shown)}</tr>"


def preformatted(text: str) -> str:
    """Text as it stands, cut where it is very long."""
    lines = text.splitlines()
    shown = escape("\n".join(lines[:_MOST_LINES]))
    more = len(lines) - _MOST_LINES
    cut = f"\n… {more} more lines; print the text to see them" if more > 0 else ""
    return f'<pre style="{_SCROLLS};line-height:1.25">{shown}{cut}</pre>'


def program_html(program: Program) -> str:
    """A program's settings and its schedule."""
    s = program.settings
    told = (
        f"{len(program.layers)} layers in {s.stages} stages × {s.data_parallel},"
        f" {s.microbatches} microbatches, {s.schedule}, zero={s.zero}, recovery={s.recovery},"
        f" layerwise_state={s.layerwise_state}, update_prefetch={s.update_prefetch}"
    )
    if sum(map(len, program.order)) > _MOST_OPS:
        drawn = "<p>The schedule is too long for a cell; <code>grid</code> gives it as text.</p>"
    else:
        drawn = preformatted(grid(program))
    return paragraph("Program", told) + drawn
