"""A program in a terminal: its layers, its schedule, its memory, and the line that sums up its step.

Everything fits the width it is given, and is plain text in 80 columns where standard output is no terminal. Memory bars
show kinds by colour, or by a letter each where there is no colour. Long tables are folded: layers that are alike but for
their stage become one line, and so do stages whose bars look the same.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TextIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ratrain_jax.lowering.program import Settings
from ratrain_jax.lowering.text import readable_bytes
from ratrain_jax.views.terminal_inspection import Inspection, LayerRow, StageRow
from ratrain_jax.views.terminal_schedule import row_lines
from ratrain_jax.words import counted

WIDTH: Final = 80
_MOST_LAYERS: Final = 24
_LONGEST_NAME: Final = 30
_MOST_BARS: Final = 16
_UP_TO: Final = "up to "
OTHER: Final = "other"
LETTERS: Final = {
    "parameters": ("P", "blue"),
    "optimizer": ("O", "bright_blue"),
    "view": ("V", "cyan"),
    "accumulator": ("A", "yellow"),
    "gradient": ("G", "bright_yellow"),
    "gradients": ("G", "bright_yellow"),
    "residuals": ("R", "green"),
    "checkpoints": ("K", "bright_green"),
    "boundary": ("B", "magenta"),
    "boundaries": ("B", "magenta"),
    "cotangent": ("C", "bright_magenta"),
    "operand": ("D", "white"),
    "operands": ("D", "white"),
    "scratch": ("S", "red"),
    OTHER: ("x", "bright_black"),
}
"""Letter and colour of each kind of bytes, of programs and of plans."""
_SCHEDULE_COLOURS: Final = {
    r"\+[A-Z]+[0-9*/.+]*": "yellow",
    r"\bR\d+[a-z:]?\d*": "magenta",
    r"x\d+$|x\d+ ": "bold",
}
_ASCII: Final = str.maketrans(
    {"×": "x", "…": ".", "–": "-", "µ": "u", "→": ">", "█": "#", "·": ".", "≥": ">", "≤": "<"}
)
_LAYERS_NOTE: Final = (
    "FLOPs and residuals of one microbatch; residuals made again are recovered;",
    "state: bytes of shards (parameters, optimizer) and view on each device",
)
_LEGEND: Final = {
    r"^|": "F forward  B backward",
    r"\bR\d": "R recovery",
    r"\bP\b": "P prologue",
    r"\bM\b": "M metrics",
    r"\+GS": "+GS gradient sync",
    r"\+U": "+U update",
    r"\+V\d": "+V validate",
    r"\+PV": "+PV gather of a view",
    r"\+BO": "+BO borrow",
    r"\+GR": "+GR global reduction",
    r"\b[FBR]\d": "F3 microbatch 3",
    r"\b[FBR]\d+[a-z]": "F3b its second block",
    r"\b[FBR]\d+:": "B3:7 its layer 7",
    r"/\d": "+GS7/3 layer 7 of microbatch 3",
    r"\)x\d": "(..)x9 nine times",
}
"""What is said of cells, where some are of the pattern."""


def render(parts: Iterable[RenderableType], stream: TextIO) -> str:
    r"""Renderables as text for a stream: with colours and as wide as it is if it is a terminal, else plain.

    Args:
        parts: what to show, one below the other.
        stream: where the text will go; its encoding decides which characters there are.

    Returns:
        The text, each line without trailing spaces.

    Example:
        >>> render(["2 stages × 4"], io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
        '2 stages x 4\n'
    """
    screen = Console(file=stream, highlight=False, markup=False)
    target = io.StringIO()
    console = Console(
        file=target,
        width=screen.width if screen.is_terminal else WIDTH,
        force_terminal=screen.is_terminal,
        color_system=screen.color_system if screen.is_terminal else None,  # pyright: ignore[reportArgumentType]
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    for part in parts:
        console.print(part)
    text = "".join(f"{line.rstrip()}\n" for line in target.getvalue().splitlines())
    encoding = getattr(stream, "encoding", None) or "ascii"
    return text if encoding.lower().replace("-", "").startswith("utf") else _in_ascii(text)


def _in_ascii(text: str) -> str:
    """Text in ASCII, character for character, so that columns stay where they are."""
    return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")


def inspection_view(shown: Inspection, fold: bool = True) -> Iterator[RenderableType]:
    """All that is shown of a program.

    Args:
        shown: the program.
        fold: whether long tables are folded.

    Yields:
        The parts, one below the other.
    """
    yield settings_line(shown.settings)
    yield ""
    yield layers_view(shown.layers, fold)
    yield ""
    yield schedule_view(shown.stages)
    yield ""
    bars = [Bar(str(s.stage), s.memory, s.limit) for s in shown.stages]
    yield MemoryBars(tuple(bars), fold)
    if shown.step is not None:
        yield ""
        yield from step_view(
            shown.step.text, shown.step.stage, len(shown.stages), shown.step.machine
        )


def settings_line(settings: Settings) -> str:
    """The choices of a program in a line."""
    s = settings
    size = (
        f"{counted(s.stages, 'stage')} × {s.data_parallel}, {counted(s.microbatches, 'microbatch')}"
    )
    return f"{size}, {s.schedule}, zero={s.zero}, recovery={s.recovery}"


def step_view(line: str, stage: int, stages: int, machine: str) -> Iterator[RenderableType]:
    """The line that sums up a step, broken at its terms where it is longer than the width."""
    yield Wrapped(line)
    yield f"paced by stage {stage} of {stages}, on {machine}"


@dataclasses.dataclass(frozen=True, slots=True)
class Wrapped:
    """Text that is broken at spaces to fit, its later lines indented."""

    text: str

    def __rich_console__(self, console: Console, options: Any) -> Iterator[RenderableType]:
        lines = textwrap.wrap(self.text, options.max_width, subsequent_indent="  ")
        yield Text("\n".join(lines), style="bold")


def table(*columns: str, left: Sequence[str] = ()) -> Table:
    """A table without lines.

    Args:
        *columns: their heads.
        left: those whose cells begin on the left; the first of them holds names, which are cut where they are long.
    """
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for name in columns:
        made.add_column(
            name,
            justify="left" if name in left else "right",
            no_wrap=True,
            overflow="ellipsis",
            max_width=_LONGEST_NAME if name in left[:1] else None,
        )
    return made


# Layers.


def layers_view(layers: Sequence[LayerRow], fold: bool = True) -> RenderableType:
    """The table of layers: parameters, FLOPs and bytes of each, and its stage."""
    made = table(
        "stage", "layer", "params", "FLOPs", "state", "residuals", "made", left=("layer", "made")
    )
    for run in _runs_of_layers(layers) if fold else [[layer] for layer in layers]:
        one, last = run[0], run[-1]
        where = str(one.stage) if one.stage == last.stage else f"{one.stage}–{last.stage}"
        made.add_row(
            where,
            one.name if len(run) == 1 else f"{_pattern(one.name)} ×{len(run)}",
            scaled(one.parameters),
            scaled(one.flops),
            readable_bytes(one.state_bytes),
            readable_bytes(one.residual_bytes),
            "again" if one.recovered else "once",
        )
    total = scaled(sum(layer.parameters for layer in layers))
    work = scaled(sum(layer.flops for layer in layers))
    made.add_row("all", f"{len(layers)} layers", total, work, "", "", "", style="bold")
    return Group(made, *(Text(line, style="dim") for line in _LAYERS_NOTE))


def _runs_of_layers(layers: Sequence[LayerRow]) -> list[list[LayerRow]]:
    """Each layer by itself, or where they are many those that differ in their number and stage alone."""
    if len(layers) <= _MOST_LAYERS:
        return [[layer] for layer in layers]
    alike: dict[Any, list[LayerRow]] = {}
    for layer in layers:
        plain = dataclasses.replace(layer, name=_pattern(layer.name), stage=0, block=0)
        alike.setdefault(plain, []).append(layer)
    return list(alike.values())


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def scaled(number: float) -> str:
    """Three figures and the letter of a power of a thousand.

    Example:
        >>> scaled(131_072), scaled(7), scaled(6_976_000_000), scaled(999_950)
        ('131k', '7', '6.98G', '1M')
    """
    power = 0
    while power < 6 and float(f"{abs(number):.3g}") >= 1000:
        number, power = number / 1000, power + 1
    return f"{number:.3g}{' kMGTPE'[power].strip()}"


# The schedule.


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduleRow:
    """A stage's cells behind its name, in lines of the width."""

    name: str
    runs: Sequence[str]

    def __rich_console__(self, console: Console, options: Any) -> Iterator[RenderableType]:
        head = len(self.name) + 2
        for number, line in enumerate(row_lines(self.runs, max(options.max_width - head, 20))):
            text = Text(line)
            for pattern, style in _SCHEDULE_COLOURS.items():
                text.highlight_regex(pattern, style)
            yield Text.assemble((f"{self.name if number == 0 else '':<{head}}", "bold"), text)


def schedule_view(stages: Sequence[StageRow]) -> RenderableType:
    """One row of cells a stage."""
    width = len(str(len(stages) - 1))
    rows = [ScheduleRow(f"stage {row.stage:>{width}}", row.schedule) for row in stages]
    shown = [run for row in stages for run in row.schedule]
    said = [text for pattern, text in _LEGEND.items() if any(re.search(pattern, s) for s in shown)]
    # Words of one entry stay together.
    words = "  ".join(said).replace(" ", "\0").replace("\0\0", "  ")
    lines = textwrap.wrap(words, WIDTH)
    return Group(*rows, *(Text(line.replace("\0", " "), style="dim") for line in lines))


# Memory.


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """Bytes of a stage.

    Attributes:
        name: which stage.
        parts: bytes by kind.
        limit: bytes that it may hold; None if nothing says.
    """

    name: str
    parts: Mapping[str, int]
    limit: int | None

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.parts.values())

    @property
    def number(self) -> str:
        """The bytes in words."""
        if self.limit is None:
            return readable_bytes(self.total)
        over = " OVER" if self.total > self.limit else ""
        return f"{readable_bytes(self.total)} of {readable_bytes(self.limit)}{over}"


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryBars:
    """One bar a stage, against the limit.

    Attributes:
        bars: the bars.
        fold: whether stages in a row whose bars look the same are drawn once.
    """

    bars: tuple[Bar, ...]
    fold: bool = True

    def __rich_console__(self, console: Console, options: Any) -> Iterator[RenderableType]:
        folds = self.fold and len(self.bars) > _MOST_BARS
        scale = max((max(bar.total, bar.limit or 0) for bar in self.bars), default=0) or 1
        names = max(len(bar.name) for bar in self.bars) * (2 if folds else 1) + folds
        numbers = max(len(bar.number) for bar in self.bars) + len(_UP_TO) * folds
        room = max(options.max_width - len("stage ") - names - numbers - 4, 10)
        drawn = [(bar, tuple(cells(bar, scale, room))) for bar in self.bars]
        coloured = console.color_system is not None and not console.no_color
        for run in _runs_of_bars(drawn) if folds else [[one] for one in drawn]:
            first, last = run[0][0], run[-1][0]
            fullest = max((bar for bar, _ in run), key=lambda bar: bar.total)
            same = len({bar.number for bar, _ in run}) == 1
            number = fullest.number if same else _UP_TO + fullest.number
            name = first.name if len(run) == 1 else f"{first.name}–{last.name}"
            text = Text(f"stage {name:<{names}} ")
            for kind in run[0][1]:
                text.append(*_drawn(kind, coloured))
            text.append(f"  {number:>{numbers}}", "red" if "OVER" in number else "")
            yield text
        yield _legend(
            [kind for kind in LETTERS if any(kind in shown for _, shown in drawn)],
            coloured,
            limited=any(bar.limit is not None for bar in self.bars),
        )


def _runs_of_bars(drawn: Sequence[tuple[Bar, Any]]) -> Iterator[list[tuple[Bar, Any]]]:
    """Stages in a row whose bars look the same."""
    for _, run in itertools.groupby(drawn, key=lambda one: (one[1], one[0].limit)):
        yield list(run)


def _legend(kinds: Sequence[str], coloured: bool, limited: bool) -> RenderableType:
    text = Text("bytes a device at its fullest")
    text.append("; dots are free below the limit" if limited else "; no limit is given")
    for kind in kinds:
        text.append("; " if kind == kinds[0] else ", ")
        text.append(*_drawn(kind, coloured))
        text.append(f" {kind}")
    return text


def _drawn(kind: str, coloured: bool) -> tuple[str, str]:
    """A cell of a bar, and its style."""
    if kind not in LETTERS:
        return kind, ""
    letter, colour = LETTERS[kind]
    return ("█", colour) if coloured else (letter, "")


def cells(bar: Bar, scale: int, room: int) -> Iterator[str]:
    """A bar as kinds, one a character; `.` is free below the limit, a space beyond it.

    Args:
        bar: the bar.
        scale: bytes of the whole width.
        room: characters of it.

    Example:
        >>> list(cells(Bar("0", {"view": 50, "optimizer": 25}, 90), 100, 8))
        ['view', 'view', 'view', 'view', 'optimizer', 'optimizer', '.', ' ']
    """
    end = drawn = 0
    for kind, size in bar.parts.items():
        end += size
        for _ in range(drawn, round(room * end / scale)):
            yield kind if kind in LETTERS else OTHER
        drawn = max(drawn, round(room * end / scale))
    limit = math.floor(room * (bar.limit or 0) / scale)
    yield from "." * (limit - drawn)
    yield from " " * (room - max(limit, drawn))
