"""A planned product as text: tiles, buffers, bytes, time and the place under the roofline."""

import dataclasses
import math
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ratrain_jax.kernels.cost import KernelCost, cost_gemm
from ratrain_jax.kernels.machine import Machine
from ratrain_jax.kernels.tiles import Gemm, TilePlan, accelerator_of

WIDTH: Final = 80
_BAR: Final = 44
_PLOT: Final = (64, 9)  # columns and rows of the roofline
_TILES: Final = (
    ("m_g", "rows of an A block in GSM"),
    ("k_g", "depth of an A block in GSM"),
    ("m_a", "rows of a C tile in a core's AM"),
    ("n_a", "columns of a C tile in a core's AM"),
    ("k_a", "depth of a B panel in AM"),
    ("m_s", "rows of an A strip"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Glyphs:
    full: tuple[str, ...]
    empty: str
    roof: str
    here: str


_RICH: Final = _Glyphs(("█", "▓", "▒"), "░", "─", "●")
_PLAIN: Final = _Glyphs(("#", "=", "+"), ".", "-", "o")


def show_gemm(gemm: Gemm, machine: Machine, plan: TilePlan, console: Console) -> None:
    """Prints a planned product on at most 80 columns; without colours where it is piped.

    Args:
      gemm: The product.
      machine: The machine.
      plan: Its plan.
      console: Where to print.
    """
    glyphs = _RICH if console.is_terminal else _PLAIN
    cost = cost_gemm(gemm, machine, plan)
    for part in (
        _heading(gemm, machine, plan),
        _tiles(plan),
        _buffers(gemm, machine, plan, glyphs),
        _bytes(cost, machine),
        _times(cost),
        _roofline(gemm, machine, cost, glyphs),
        Text("assumed: " + ", ".join(cost.assumed)) if cost.assumed else Text(""),
    ):
        console.print(part, width=min(WIDTH, console.width))


def _heading(gemm: Gemm, machine: Machine, plan: TilePlan) -> Text:
    operands = {"nn": "A·B", "nt": "A·Bᵀ", "tn": "Aᵀ·B"}[gemm.form]
    return Text(
        f"C = {operands}  {gemm.rows} × {gemm.cols} × {gemm.depth} {gemm.dtype} on "
        f"{machine.name}, accumulator {gemm.accumulator}\n"
        f"cores split {'M, B is broadcast' if plan.split == 'm' else 'N, A is broadcast'}; "
        f"flow {plan.flow}; micro-kernel {plan.m} × {plan.n} unrolled {plan.ku}",
        style="bold",
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _tiles(plan: TilePlan) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, meaning in _TILES:
        table.add_row(name, str(getattr(plan, name)), meaning)
    return table


def buffer_parts(gemm: Gemm, plan: TilePlan) -> dict[str, list[tuple[str, int]]]:
    """Returns the buffers of each on-chip memory: name and bytes of all their copies."""
    size = gemm.bytes
    strips = (f"A strips ×{plan.sm_depth}", plan.sm_depth * plan.m_s * plan.k_a * size)
    am = [
        (f"B panels ×{plan.b_depth}", plan.b_depth * plan.k_a * plan.n_a * size),
        (f"C tiles ×{plan.c_depth}", plan.c_depth * plan.m_a * plan.n_a * gemm.acc_bytes),
    ]
    block = (f"A blocks ×{plan.gsm_depth}", plan.gsm_depth * plan.m_g * plan.k_g * size)
    if plan.dot:
        return {"GSM": [block], "AM": [*am, strips], "SM": []}
    return {"GSM": [block], "AM": am, "SM": [strips]}


def _buffers(gemm: Gemm, machine: Machine, plan: TilePlan, glyphs: _Glyphs) -> Text:
    lines = []
    for name, held in buffer_parts(gemm, plan).items():
        size = machine.memory(name).bytes
        bar, used = "", 0
        for index, (_, count) in enumerate(held):
            used += count
            bar += glyphs.full[index] * (round(used / size * _BAR) - len(bar))
        bar += glyphs.empty * (_BAR - len(bar))
        lines.append(f"{name:4}{bar} {used / size:4.0%} of {_units(size)}")
        legend = ", ".join(
            f"{glyphs.full[index]} {part} {_units(count)}"
            for index, (part, count) in enumerate(held)
        )
        lines.append(f"    {legend or 'not used'}")
    return Text("\n".join(["", *lines, ""]))


def _units(count: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def _bytes(cost: KernelCost, machine: Machine) -> Table:
    table = _table("from", "to", "mode", "bytes", "alone", "of the time")
    for (source, to, mode), count in cost.transfers:
        # A core's own memories each have a port; the shared end is the slower one.
        shared = source if source in ("DDR", "GSM") else to
        alone = count / machine.memory(shared).bandwidth
        share = f"{alone / cost.seconds:.0%}"
        table.add_row(source, to, mode, _units(count), f"{alone * 1e3:.3f} ms", share)
    return table


def _times(cost: KernelCost) -> Text:
    busy = cost.compute_seconds + cost.start_seconds
    hidden = ", ".join(cost.hidden) or "none"
    return Text(
        f"\ntime {cost.seconds * 1e3:.3f} ms: arithmetic {cost.compute_seconds * 1e3:.3f}, "
        f"transfer starts {cost.start_seconds * 1e3:.3f},\n"
        f"first and last transfers {cost.fill_seconds * 1e3:.3f}, waiting for memory "
        f"{max(0.0, cost.seconds - busy - cost.fill_seconds) * 1e3:.3f}\n"
        f"half the bandwidth would cost no time: {hidden}"
    )


def _roofline(gemm: Gemm, machine: Machine, cost: KernelCost, glyphs: _Glyphs) -> Text:
    """Draws FLOP/s over FLOP per DDR byte, both logarithmic, with the product's place."""
    bandwidth = machine.memory("DDR").bandwidth
    intensity = gemm.flops / cost.ddr_bytes
    ridge = cost.peak / bandwidth
    reached = gemm.flops / cost.seconds
    columns, rows = _PLOT
    low, high = min(intensity, ridge) / 8, max(intensity, ridge) * 8
    step = math.log(high / low) / (columns - 1)
    top, bottom = cost.peak * 1.5, min(reached, low * bandwidth) / 1.5

    def row_of(rate: float) -> int:
        share = math.log(top / rate) / math.log(top / bottom)
        return min(rows - 1, max(0, round(share * (rows - 1))))

    grid = [[" "] * columns for _ in range(rows)]
    for column in range(columns):
        roof = min(cost.peak, low * math.exp(column * step) * bandwidth)
        grid[row_of(roof)][column] = glyphs.roof
    grid[row_of(reached)][round(math.log(intensity / low) / step)] = glyphs.here
    roof = min(cost.peak, intensity * bandwidth)
    cores = accelerator_of(machine).cores
    lines = [
        "",
        f"roofline: {glyphs.here} {reached / 1e12:.3f} TFLOPS, {cost.efficiency:.1%} of the peak "
        f"{cost.peak / 1e12:.2f} ({cores} cores),",
        f"{reached / roof:.1%} of the roof at {intensity:.1f} FLOP a DDR byte (ridge {ridge:.1f})",
        *("  |" + "".join(line).rstrip() for line in grid),
        "  +" + "-" * columns,
    ]
    return Text("\n".join(lines))
