"""What the ops of a program cost on a described machine, by layer and kind of op.

Code is costed equation by equation: a kernel by its plan on the machine, anything else by its roofline. State ops are costed
by the bytes of the values that they read and write, transfers and collectives by those that cross a link.

Terms.
    **Ideal** seconds are those in which a machine at its peak does the products' FLOPs. **MAC-only** utilization is ideal
    seconds over the seconds of the products; **overall** utilization is ideal seconds over all seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jax.extend import core as jex

from ratrain_jax.kernels import Machine
from ratrain_jax.kernels.primitives import call_cost
from ratrain_jax.lowering.code import StepCode
from ratrain_jax.lowering.cost import compute_dtype, equation_costs, has_product, jaxpr_cost
from ratrain_jax.lowering.durations import Durations
from ratrain_jax.lowering.program import (
    Backward,
    Borrow,
    Forward,
    GlobalReduce,
    GradSync,
    Kind,
    Metrics,
    Op,
    PrefetchView,
    Program,
    Prologue,
    Recover,
    SendActivation,
    SendGradient,
    UpdateShard,
    Value,
    ZeroGradient,
)

STEP = "(step)"
"""Where ops stand that belong to no layer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What some code or transfer asks of a device.

    Attributes:
        flops: floating-point operations.
        product_flops: those of them in products and attention.
        ddr_bytes: bytes between main memory and the chip.
        link_bytes: bytes that leave the device over a link.
        seconds: how long it takes.
        product_seconds: how much of that products and attention take.
        ideal_seconds: how long they would take at the machine's peak.
        compute_seconds: how long arithmetic is busy.
        ddr_seconds: how long main memory is busy.
        link_seconds: how long the link is busy.
    """

    flops: float = 0
    product_flops: float = 0
    ddr_bytes: float = 0
    link_bytes: float = 0
    seconds: float = 0.0
    product_seconds: float = 0.0
    ideal_seconds: float = 0.0
    compute_seconds: float = 0.0
    ddr_seconds: float = 0.0
    link_seconds: float = 0.0

    def __add__(self, other: Work) -> Work:
        names = (field.name for field in dataclasses.fields(self))
        return Work(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def limit(self) -> str:
        """What is busy longest: `compute`, `ddr` or `link`."""
        busy = {
            "compute": self.compute_seconds,
            "ddr": self.ddr_seconds,
            "link": self.link_seconds,
        }
        return max(busy, key=lambda name: busy[name])

    @property
    def mac_utilization(self) -> float | None:
        """Share of the peak that products and attention reach; None without any."""
        return self.ideal_seconds / self.product_seconds if self.product_seconds else None

    @property
    def utilization(self) -> float | None:
        """Share of the peak over all seconds; None without a product."""
        return self.ideal_seconds / self.seconds if self.product_seconds else None


@dataclasses.dataclass(frozen=True, slots=True)
class OpCost:
    """All ops of one kind for one layer in a step.

    Attributes:
        kind: name of the op, such as `Forward`.
        count: how many there are.
        work: of all of them, on one device.
    """

    kind: str
    count: int
    work: Work


@dataclasses.dataclass(frozen=True, slots=True)
class LayerCost:
    """What one layer costs in a step.

    Attributes:
        name: the layer's; `(step)` for what belongs to no layer.
        stage: where it runs.
        ops: its ops by kind.
    """

    name: str
    stage: int
    ops: tuple[OpCost, ...]

    @property
    def work(self) -> Work:
        """Of all its ops."""
        return sum((op.work for op in self.ops), Work())


def layer_costs(code: StepCode, program: Program, machine: Machine) -> tuple[LayerCost, ...]:
    """Costs a program by layer and kind of op.

    Args:
        code: the code that its ops name.
        program: the program.
        machine: what it is to run on.

    Returns:
        The layers in order, then for each stage what belongs to no layer.
    """
    coster = _Coster(code, program, machine)
    counts: dict[tuple[int, int], dict[str, int]] = {}
    works: dict[tuple[int, int, str], Work] = {}
    for op in program.ops():
        for layer, work in coster.of(op):
            stage = op.stage if layer < 0 else program.layers[layer].stage
            key, kind = (layer if layer >= 0 else len(program.layers), stage), type(op).__name__
            kinds = counts.setdefault(key, {})
            kinds[kind] = kinds.get(kind, 0) + 1
            works[*key, kind] = works.get((*key, kind), Work()) + work
    return tuple(
        LayerCost(
            name=program.layers[layer].name if layer < len(program.layers) else STEP,
            stage=stage,
            ops=tuple(
                OpCost(kind, count, works[layer, stage, kind]) for kind, count in kinds.items()
            ),
        )
        for (layer, stage), kinds in sorted(counts.items())
    )


def code_work(closed: jex.ClosedJaxpr, machine: Machine) -> Work:
    """What one program of a layer costs.

    Args:
        closed: a program without calls.
        machine: what it is to run on.
    """
    total = Work()
    costs = equation_costs(closed.jaxpr.eqns, closed.jaxpr.outvars)
    for eqn, cost in zip(closed.jaxpr.eqns, costs, strict=True):
        planned = call_cost(eqn, machine) if machine.accelerator is not None else None
        if planned is not None:
            moved = planned.ddr_bytes
            total += Work(
                flops=planned.flops,
                product_flops=planned.flops,
                ddr_bytes=moved,
                seconds=planned.seconds,
                product_seconds=planned.seconds,
                ideal_seconds=planned.flops / planned.peak,
                compute_seconds=planned.compute_seconds + planned.start_seconds,
                ddr_seconds=moved / machine.ddr_bandwidth,
            )
            continue
        dtype = compute_dtype(eqn)
        busy = cost.flops / machine.peak(dtype)
        seconds = machine.roofline_seconds(cost.flops, cost.bytes, dtype)
        multiplies = has_product(eqn)
        total += Work(
            flops=cost.flops,
            product_flops=cost.flops if multiplies else 0,
            ddr_bytes=cost.bytes,
            seconds=seconds,
            product_seconds=seconds if multiplies else 0.0,
            ideal_seconds=busy if multiplies else 0.0,
            compute_seconds=busy,
            ddr_seconds=cost.bytes / machine.ddr_bandwidth,
        )
    return total


class _Coster:
    """Costs ops; each program of a layer once."""

    def __init__(self, code: StepCode, program: Program, machine: Machine) -> None:
        self.code, self.program, self.machine = code, program, machine
        self.durations = Durations(machine, (), code.data_parallel)
        self.known: dict[tuple[str, str], Work] = {}

    def of(self, op: Op) -> Iterator[tuple[int, Work]]:
        """The layers that an op works for (-1 for none) and what each of them costs."""
        rule = _RULES.get(type(op))
        if rule is not None:
            yield from rule(self, op)

    def value(self, number: int) -> Value:
        return self.program.values[number]

    def swept(self, op: Op, flops: float = 0) -> Work:
        """Reading and writing all values of an op."""
        count = sum(self.value(v).bytes for v in (*op.reads, *op.writes))
        seconds = self.durations.sweep(count)
        busy = flops / self.machine.peak("float32")
        return Work(
            flops=flops,
            ddr_bytes=count,
            seconds=max(seconds, busy),
            compute_seconds=busy,
            ddr_seconds=seconds,
        )

    def producer(self, value: Value) -> int:
        """The layer that a value belongs to, or that makes its variable; -1 for none."""
        if value.layer is None and value.kind in (Kind.BOUNDARY, Kind.COTANGENT):
            return self.program.variables[int(value.name[1:])].producer
        return -1 if value.layer is None else value.layer

    def sent(self, count: int, seconds: float) -> Work:
        return Work(link_bytes=count, seconds=seconds, link_seconds=seconds)

    def collected(self, count: int) -> Work:
        """A ring collective over the group, of an array of `count` bytes."""
        ranks = self.code.data_parallel
        return self.sent((ranks - 1) * count // ranks, self.durations.collective(count))

    def program_of(self, layer: int, which: str) -> Work:
        key = (self.code.codes[layer].fingerprint, which)
        if key not in self.known:
            self.known[key] = code_work(getattr(self.code.codes[layer], which), self.machine)
        return self.known[key]


def _run(which: str) -> Callable[[_Coster, Any], Iterator[tuple[int, Work]]]:
    def rule(coster: _Coster, op: Any) -> Iterator[tuple[int, Work]]:
        for layer in range(*op.layers):
            yield layer, coster.program_of(layer, which)

    return rule


def _swept(coster: _Coster, op: Any) -> Iterator[tuple[int, Work]]:
    yield getattr(op, "layer", -1), coster.swept(op)


def _send(coster: _Coster, op: Any) -> Iterator[tuple[int, Work]]:
    value = coster.value(op.writes[0])
    yield coster.producer(value), coster.sent(value.bytes, coster.durations.send(value.bytes))


def _sync(coster: _Coster, op: Any) -> Iterator[tuple[int, Work]]:
    yield op.layer, coster.collected(coster.value(op.reads[0]).bytes)


def _gather(coster: _Coster, op: Any) -> Iterator[tuple[int, Work]]:
    yield op.layer, coster.collected(coster.value(op.writes[0]).bytes)


def _borrow(coster: _Coster, op: Any) -> Iterator[tuple[int, Work]]:
    shards = coster.value(op.reads[0]).bytes
    gathered = coster.collected(coster.value(op.writes[0]).bytes)
    yield op.layer, coster.sent(shards, coster.durations.send(shards)) + gathered


def _update(coster: _Coster, op: Any) -> Iterator[tuple[int, Work]]:
    if op.layer is None:
        yield -1, coster.swept(op)
        return
    phases = coster.code.update.layers[op.layer].phases
    flops = jaxpr_cost(phases[op.phase]).flops / coster.code.data_parallel
    yield op.layer, coster.swept(op, flops)


def _reduce(coster: _Coster, op: Any) -> Iterator[tuple[int, Work]]:
    count = sum(coster.value(v).bytes for v in op.writes)
    yield -1, coster.sent(count, coster.durations.send(count))


_RULES: dict[type[Op], Callable[[_Coster, Any], Iterator[tuple[int, Work]]]] = {
    Prologue: _swept,
    Forward: _run("forward"),
    Recover: _run("forward"),
    Backward: _run("backward"),
    ZeroGradient: _swept,
    SendActivation: _send,
    SendGradient: _send,
    Borrow: _borrow,
    GradSync: _sync,
    GlobalReduce: _reduce,
    UpdateShard: _update,
    PrefetchView: _gather,
    Metrics: _swept,
}
"""How each op is costed; what is not here costs nothing."""
