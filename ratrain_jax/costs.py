"""What a lowered step costs on a machine, to read."""

from __future__ import annotations

import dataclasses
import math

from rich.table import Table

from ratrain_jax.kernels import Machine
from ratrain_jax.lowering.op_costs import LayerCost, OpCost, Work
from ratrain_jax.lowering.routing import Routing
from ratrain_jax.tables import render, wrapped

_COLUMNS = ("layer", "op", "×", "FLOP", "DDR B", "link B", "s", "limit", "MAC", "all")


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class CostAnalysis:
    """The cost of a step by layer and kind of op, on one device of each stage; its `str` is a table.

    Seconds are those of each op by itself: what overlaps is for a simulation to say.

    Attributes:
        machine: what it was counted for.
        layers: the layers in order, then what belongs to no layer.
        routing: what a backend's kernels take; None where XLA takes all.
    """

    machine: Machine
    layers: tuple[LayerCost, ...]
    routing: Routing | None = None

    @property
    def by_kind(self) -> tuple[OpCost, ...]:
        """All layers together, by kind of op."""
        found: dict[str, OpCost] = {}
        for op in (op for layer in self.layers for op in layer.ops):
            known = found.get(op.kind, OpCost(op.kind, 0, Work()))
            found[op.kind] = OpCost(op.kind, known.count + op.count, known.work + op.work)
        return tuple(found.values())

    @property
    def assumed(self) -> tuple[str, ...]:
        """What of the machine has no source."""
        return self.machine.assumed

    def __str__(self) -> str:
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
        for name in _COLUMNS:
            left = name in ("layer", "op", "limit")
            table.add_column(
                name,
                justify="left" if left else "right",
                no_wrap=True,
                overflow="ellipsis",
                max_width=14 if name == "layer" else None,
            )
        for layer in self.layers:
            for place, op in enumerate(layer.ops):
                table.add_row("" if place else f"{layer.stage} {layer.name}", *_row(op))
        for place, op in enumerate(self.by_kind):
            table.add_row("" if place else "all", *_row(op))
        return "\n".join([render(table), "", *self._notes()])

    def __repr__(self) -> str:
        flops = sum(op.work.flops for op in self.by_kind)
        return f"<CostAnalysis on {self.machine.name}: {flops:.4g} FLOP a step>"

    def _notes(self) -> list[str]:
        lines = [f"{self.machine.name}, one step, each device of a stage"]
        if self.routing is not None:
            lines.append(f"kernels take {self.routing.share:.1%} of the forward FLOPs; XLA keeps")
            for kind, reason, count, share in self.routing.left():
                many = f" ({count})" if count else ""
                lines.append(f"  {share:6.1%}  {kind}{many}: {reason}")
        if self.assumed:
            lines += wrapped("assumed: ", self.assumed)
        return lines


def _row(op: OpCost) -> tuple[str, ...]:
    work = op.work
    return (
        op.kind,
        str(op.count),
        _scaled(work.flops),
        _scaled(work.ddr_bytes),
        _scaled(work.link_bytes),
        _scaled(work.seconds),
        work.limit if work.seconds else "",
        _percent(work.mac_utilization),
        _percent(work.utilization),
    )


def _scaled(number: float) -> str:
    """Three figures and the letter of a power of a thousand.

    Example:
        >>> _scaled(131_072), _scaled(6.59e-5), _scaled(0)
        ('131k', '65.9µ', '')
    """
    if not number:
        return ""
    power = min(max(math.floor(math.log10(number) / 3), -4), 6)
    if float(f"{number / 1000.0**power:.3g}") >= 1000 and power < 6:
        power += 1
    return f"{number / 1000.0**power:.3g}{'pnµm kMGTPE'[power + 4].strip()}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
