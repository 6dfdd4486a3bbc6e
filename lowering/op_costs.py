"""What the ops of a program cost on a described machine, by layer and kind of op.

Code is costed equation by equation: a kernel by its plan on the machine, anything else by its roofline, in which products
reach the machine's efficiency for their size. State ops are costed by the bytes of the values that they read and write,
transfers and collectives by those that cross a link (`ratrain_jax.kernels.collectives`).

Starting a program costs the machine's `launch_seconds`, once an op and not once an equation: ops on the compute lane are
one program each, also one that runs several layers, whose first layer then bears it. What the link lane starts is in the
latency of its links.

Terms.
    **Ideal** seconds are those in which a machine at its peak does the products' FLOPs. **MAC-only** utilization is ideal
    seconds over the seconds of the products; **overall** utilization is ideal seconds over all seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

from jax.extend import core as jex

from ratrain_jax.kernels import Machine
from ratrain_jax.kernels.primitives import call_cost
from ratrain_jax.lowering.code import StepCode
from ratrain_jax.lowering.cost import equation_costs, jaxpr_flops
from ratrain_jax.lowering.durations import Durations
from ratrain_jax.lowering.graph import Eqn
from ratrain_jax.lowering.products import compute_dtype, product_count
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
    Send,
    SendActivation,
    SendGradient,
    UpdateShard,
    Validate,
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
        launch_seconds: how much of `seconds` starting programs takes.
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
    launch_seconds: float = 0.0

    def __add__(self, other: Work) -> Work:
        names = (field.name for field in dataclasses.fields(self))
        return Work(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def limit(self) -> str:
        """What is busy longest: `compute`, `ddr`, `link` or `launch`."""
        busy = {
            "compute": self.compute_seconds,
            "ddr": self.ddr_seconds,
            "link": self.link_seconds,
            "launch": self.launch_seconds,
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


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
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

    def __repr__(self) -> str:
        return f"<LayerCost {self.name} on stage {self.stage}: {self.work.seconds:.4g} s a step>"

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
    coster = OpCoster(code, program, machine)
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
    """What one program of a layer costs, without starting it.

    Args:
        closed: a program without calls.
        machine: what it is to run on.
    """
    costs = equation_costs(closed.jaxpr.eqns, closed.jaxpr.outvars)
    pairs = zip(closed.jaxpr.eqns, costs, strict=True)
    return sum((equation_work(eqn, cost.flops, cost.bytes, machine) for eqn, cost in pairs), Work())


def equation_work(
    eqn: Eqn, flops: float, moved: float, machine: Machine, *, share: float = 1.0
) -> Work:
    """What one equation costs among others.

    Args:
        eqn: the equation.
        flops: its operations.
        moved: the bytes that it reads and writes.
        machine: what it is to run on.
        share: what part of the equation the device computes; `flops` and `moved` are of that part already, but a kernel
            is planned whole.
    """
    planned = call_cost(eqn, machine) if machine.accelerator is not None else None
    if planned is not None:
        return Work(
            flops=share * planned.flops,
            product_flops=share * planned.flops,
            ddr_bytes=share * planned.ddr_bytes,
            seconds=share * planned.seconds,
            product_seconds=share * planned.seconds,
            ideal_seconds=share * planned.flops / planned.peak,
            compute_seconds=share * (planned.compute_seconds + planned.start_seconds),
            ddr_seconds=share * planned.ddr_bytes / machine.ddr_bandwidth,
        )
    dtype, products = compute_dtype(eqn), product_count(eqn)
    seconds = machine.roofline_seconds(flops, moved, dtype, products=products)
    return Work(
        flops=flops,
        product_flops=flops if products else 0,
        ddr_bytes=moved,
        seconds=seconds,
        product_seconds=seconds if products else 0.0,
        ideal_seconds=flops / machine.peak(dtype) if products else 0.0,
        compute_seconds=machine.compute_seconds(flops, dtype, products=products),
        ddr_seconds=moved / machine.streaming_bandwidth,
    )


@functools.cache
def _where(kind: type[Op]) -> tuple[Callable[[Op], Any], bool]:
    """Gives of ops of a kind what says where they work; and whether they may be of one microbatch."""
    fields = {field.name for field in dataclasses.fields(kind)}
    wheres = sorted(fields & {"layers", "layer", "target", "phase"})
    return operator.attrgetter("stage", *wheres), "microbatch" in fields


class OpCoster:
    """Costs ops; each program of a layer once.

    Args:
        code: the code that the ops name.
        program: the program that they stand in.
        machine: what they are to run on.
    """

    def __init__(self, code: StepCode, program: Program, machine: Machine) -> None:
        self.code, self.program, self.machine = code, program, machine
        self.durations = Durations(machine, (), code.data_parallel)
        self.known: dict[tuple[str, str], Work] = {}
        self._seconds: dict[tuple[Any, ...], float] = {}

    def seconds(self, op: Op) -> float:
        """How long an op takes by itself; the same for every microbatch."""
        # Asked for each of hundreds of thousands of ops. That an op is of one microbatch counts, but not of which.
        kind = type(op)
        where, may_have_microbatch = _where(kind)
        once = may_have_microbatch and op.microbatch is None  # pyright: ignore[reportAttributeAccessIssue]
        sent = self.program.values[op.writes[0]].name if isinstance(op, Send) else None
        key = (kind, once, where(op), sent)
        found = self._seconds.get(key)
        if found is None:
            found = self._seconds[key] = sum(work.seconds for _, work in self.of(op))
        return found

    def of(self, op: Op) -> Iterator[tuple[int, Work]]:
        """The layers that an op works for (-1 for none) and what each of them costs."""
        rule = _RULES.get(type(op))
        if rule is not None and not self.program.runs_nothing(op):
            yield from rule(self, op)

    def value(self, number: int) -> Value:
        """The value of a number."""
        return self.program.values[number]

    def launch(self) -> Work:
        """Starting the program of an op."""
        seconds = self.machine.launch_seconds
        return Work(seconds=seconds, launch_seconds=seconds)

    def swept(self, op: Op, flops: float = 0) -> Work:
        """A program that reads and writes all values of an op."""
        count = sum(self.value(v).bytes for v in (*op.reads, *op.writes))
        seconds = self.durations.sweep(count)
        busy = flops / self.machine.peak("float32")
        return self.launch() + Work(
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
        """Bytes that leave the device within some seconds."""
        return Work(link_bytes=count, seconds=seconds, link_seconds=seconds)

    def collected(self, count: int) -> Work:
        """A reduce-scatter or all-gather over the group, of an array of `count` bytes."""
        ranks = self.code.data_parallel
        return self.sent((ranks - 1) * count // ranks, self.durations.collective(count))

    def program_of(self, layer: int, which: str) -> Work:
        """A layer's `forward` or `backward` program, without starting it."""
        key = (self.code.codes[layer].fingerprint, which)
        if key not in self.known:
            self.known[key] = code_work(getattr(self.code.codes[layer], which), self.machine)
        return self.known[key]


def _run(which: str) -> Callable[[OpCoster, Any], Iterator[tuple[int, Work]]]:
    def rule(coster: OpCoster, op: Any) -> Iterator[tuple[int, Work]]:
        for layer in range(*op.layers):
            work = coster.program_of(layer, which)
            yield layer, work + coster.launch() if layer == op.layers[0] else work

    return rule


def _swept(coster: OpCoster, op: Any) -> Iterator[tuple[int, Work]]:
    yield getattr(op, "layer", -1), coster.swept(op)


def _send(coster: OpCoster, op: Any) -> Iterator[tuple[int, Work]]:
    value = coster.value(op.writes[0])
    seconds = coster.durations.send(value.bytes, op.target - op.stage)
    yield coster.producer(value), coster.sent(value.bytes, seconds)


def _sync(coster: OpCoster, op: Any) -> Iterator[tuple[int, Work]]:
    yield op.layer, coster.collected(coster.value(op.reads[0]).bytes)


def _gather(coster: OpCoster, op: Any) -> Iterator[tuple[int, Work]]:
    yield op.layer, coster.collected(coster.value(op.writes[0]).bytes)


def _borrow(coster: OpCoster, op: Any) -> Iterator[tuple[int, Work]]:
    shards = coster.value(op.reads[0]).bytes
    gathered = coster.collected(coster.value(op.writes[0]).bytes)
    seconds = coster.durations.send(shards, op.target - op.stage)
    yield op.layer, coster.sent(shards, seconds) + gathered


def _update(coster: OpCoster, op: Any) -> Iterator[tuple[int, Work]]:
    if op.layer is None:
        yield -1, coster.swept(op)
        return
    phases = coster.code.update.layers[op.layer].phases
    flops = jaxpr_flops(phases[op.phase]) / coster.code.data_parallel
    yield op.layer, coster.swept(op, flops)


def _validate(coster: OpCoster, op: Any) -> Iterator[tuple[int, Work]]:
    """What was made early stays where it is; that it must be made anew is rare, and not counted."""
    yield op.layer, coster.launch()


def _reduce(coster: OpCoster, op: Any) -> Iterator[tuple[int, Work]]:
    count = sum(coster.value(v).bytes for v in op.writes)
    yield -1, coster.sent(count, coster.durations.send(count))


_RULES: dict[type[Op], Callable[[OpCoster, Any], Iterator[tuple[int, Work]]]] = {
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
    Validate: _validate,
    Metrics: _swept,
}
"""How each op is costed; what is not here costs nothing."""
