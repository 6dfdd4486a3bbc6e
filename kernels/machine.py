"""The description of a machine: what a device computes, stores and moves, and how fast.

A *device* is the unit that trains: one accelerator, or one acceleration cluster of MT-3000. It has
*memories*, ordered from the innermost (closest to the arithmetic) to the outermost, which holds the
tensors and is called *main memory* (DDR on MT-3000). Devices are joined by *links*, ordered from
the shortest reach to the longest: neighbouring devices that the same link joins are a *node*. Work
goes on in four *lanes* (compute, link, memory, host); an *overlap* says that two lanes may work at
once and by how much each then slows down. An *efficiency* is the share of a rate that real code
reaches, 1 unless told: rates are peaks. A value in `assumed` has no source: reports list it.

The optional *accelerator* describes the insides that tiling needs: *cores* (DSPs), each with vector
*lanes*, multiply-add units, registers, latencies and a DMA engine.
"""

import dataclasses
import itertools
import math
from typing import Any, Final

from ratrain_jax.errors import MachineError
from ratrain_jax.kernels.schema import check, check_number, choice, quantity, shown

LANES: Final = ("compute", "link", "memory", "host")
ACCUMULATORS: Final = ("fp32", "fp16", "promote")
COLLECTIVES: Final = ("ring", "ring or halving")
_PEAK_RANGE: Final = (1e6, 1e19)
# Where a rate is not given, the one of the type that the same units usually serve.
_PEAK_FALLBACK: Final = {"bfloat16": "float16", "float16": "bfloat16", "complex64": "float32"}


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """One memory of a device.

    Attributes:
      name: How plans and messages call it.
      bytes: Its size, of each one where every core has its own.
      sharing: "core" where every core has its own, "device" where all cores share it.
      bandwidth: Bytes a second that go in or out of it by DMA, of each one where every core has
        its own. A transfer takes as long as the slower of its two ends.
    """

    name: str
    bytes: int = quantity("bytes", 1, 1e16, whole=True)
    sharing: str = choice(("core", "device"), default="device")
    bandwidth: float = quantity("bytes/s", 1e3, 1e16, default=1e12)

    def __post_init__(self) -> None:
        check(self, f"memories.{self.name}")


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """What joins devices up to some distance.

    Attributes:
      name: How reports call it.
      bandwidth: Bytes a second of one such link in one direction. A device that sends alone may use
        all of it, unless a link of shorter reach, which its bytes take first, is slower.
      latency: Seconds before the first byte arrives.
      devices: How many neighbouring devices it reaches (a node of 8: 8); 0 for all.
      shared_by: How many neighbouring devices share one such link (eight devices and the network
        cards of their node: 8). As many of them as send at once divide its bandwidth.
      efficiency: Share of the bandwidth that transfers reach.
    """

    name: str
    bandwidth: float = quantity("bytes/s", 1e3, 1e16)
    latency: float = quantity("seconds", 0, 10)
    devices: int = quantity("devices", 0, 1e9, default=0, whole=True)
    shared_by: int = quantity("devices", 1, 1e6, default=1, whole=True)
    efficiency: float = quantity("a share", 0.01, 1, default=1.0)

    def __post_init__(self) -> None:
        check(self, f"links.{self.name}")

    @property
    def reach(self) -> float:
        """How many neighbouring devices it joins; infinite where it joins all."""
        return self.devices or math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class Overlap:
    """Two lanes that may work at the same time.

    Attributes:
      lanes: The two lanes.
      slowdown: By which factor each takes longer while the other works too.
    """

    lanes: tuple[str, str]
    slowdown: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        pair = _is_pair(self.lanes) and self.lanes[0] != self.lanes[1]
        if not pair or any(lane not in LANES for lane in self.lanes):
            raise MachineError(
                f"overlaps.lanes is {_listed(self.lanes)}; name two different lanes out of "
                f"{', '.join(LANES)}."
            )
        if not _is_pair(self.slowdown):
            raise MachineError(
                f"overlaps.slowdown is {_listed(self.slowdown)}; give one factor a lane, two in all."
            )
        for value in self.slowdown:
            check_number("overlaps.slowdown", value, "a factor", 1, 100)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def _listed(value: Any) -> str:
    """As a file would have it."""
    return shown(list(value) if isinstance(value, tuple) else value)


@dataclasses.dataclass(frozen=True, slots=True)
class Latencies:
    """Cycles from issue to result of the instructions that a micro-kernel uses.

    Attributes:
      fma: Vector multiply-add.
      broadcast: Scalar to all lanes of a vector register.
      scalar_load: Scalar memory to scalar register.
      vector_load: Array memory to vector register.
      vector_store: Vector register to array memory.
    """

    fma: int = quantity("cycles", 1, 1000, whole=True)
    broadcast: int = quantity("cycles", 1, 1000, whole=True)
    scalar_load: int = quantity("cycles", 1, 1000, whole=True)
    vector_load: int = quantity("cycles", 1, 1000, whole=True)
    vector_store: int = quantity("cycles", 1, 1000, whole=True)

    def __post_init__(self) -> None:
        check(self, "accelerator.latencies")


@dataclasses.dataclass(frozen=True, slots=True)
class Accelerator:
    """The insides of a device that tiling needs.

    Attributes:
      latencies: Instruction latencies.
      cores: DSPs of a device.
      clock: Cycles a second.
      fma_units: Vector multiply-add units of a core.
      registers: Vector registers of a core.
      register_bytes: Bytes of one vector register.
      broadcast_bytes: Scalar bytes that a core can broadcast a cycle.
      scalar_load_bytes: Bytes from scalar memory to scalar registers a cycle.
      vector_load_bytes: Bytes from array memory to vector registers a cycle.
      wide_rate: Rate of a multiply-add into an accumulator of twice the operand's width, as a
        share of the plain rate.
      dma_start_cycles: Cycles to start a transfer and see its end, paid once a transfer.
      exp_operations: Vector operations of one float32 exponential.
      dma_modes: Kinds of transfer that the DMA engine knows.
      accumulator: "fp32", "fp16", or "promote" (FP16 inside one K block, FP32 between blocks).
    """

    latencies: Latencies
    cores: int = quantity("cores", 1, 1e6, whole=True)
    clock: float = quantity("Hz", 1e6, 1e11)
    fma_units: int = quantity("units", 1, 64, whole=True)
    registers: int = quantity("registers", 8, 4096, whole=True)
    register_bytes: int = quantity("bytes", 8, 65536, whole=True)
    broadcast_bytes: int = quantity("bytes/cycle", 1, 1024, whole=True)
    scalar_load_bytes: int = quantity("bytes/cycle", 1, 4096, whole=True)
    vector_load_bytes: int = quantity("bytes/cycle", 8, 65536, whole=True)
    dma_start_cycles: int = quantity("cycles", 0, 1e7, whole=True)
    wide_rate: float = quantity("a share", 0.01, 1, default=0.5)
    exp_operations: int = quantity("vector operations", 1, 1000, default=10, whole=True)
    dma_modes: tuple[str, ...] = ("point", "broadcast")
    accumulator: str = choice(ACCUMULATORS, default="fp32")

    def __post_init__(self) -> None:
        check(self, "accelerator")

    def lanes(self, dtype_bytes: int) -> int:
        """Returns the elements of one vector register for elements of `dtype_bytes` bytes."""
        return self.register_bytes // dtype_bytes

    def peak_flops(self, dtype_bytes: int) -> float:
        """Returns the multiply-add peak of the whole device, in FLOP/s."""
        return 2.0 * self.cores * self.fma_units * self.lanes(dtype_bytes) * self.clock


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Machine:
    """A described machine: one kind of device and the links between devices.

    Attributes:
      name: How reports call it.
      memories: The memories of a device, innermost first; the last one is main memory.
      usable_bytes: Bytes of main memory that a program may use.
      peak_flops: Pairs of dtype name and peak FLOP/s; float32 is always there.
      links: What joins devices, shortest reach first.
      launch_seconds: Seconds to start one program on a device.
      overlaps: The pairs of lanes that may work at once; all other pairs take turns.
      accelerator: The insides that tiling needs, or None where only rooflines are wanted.
      description: One line for reports.
      assumed: Keys whose value has no source.
      devices: How many devices there are; 0 where that is not said.
      product_efficiency: Share of the arithmetic peak that a large product reaches.
      product_half_flops: Operations of one product at which half of that share is reached.
      memory_efficiency: Share of main memory's bandwidth that code without a tile plan reaches.
      collectives: Algorithms of its collectives (see `collectives`); of two, the faster each time.
    """

    name: str
    memories: tuple[Memory, ...]
    peak_flops: tuple[tuple[str, float], ...]
    links: tuple[Link, ...]
    usable_bytes: int = quantity("bytes", 1, 1e16, whole=True)
    launch_seconds: float = quantity("seconds", 0, 10, default=0.0)
    overlaps: tuple[Overlap, ...] = ()
    accelerator: Accelerator | None = None
    description: str = ""
    assumed: tuple[str, ...] = ()
    devices: int = quantity("devices", 0, 1e9, default=0, whole=True)
    product_efficiency: float = quantity("a share", 0.01, 1, default=1.0)
    product_half_flops: float = quantity("FLOPs", 0, 1e15, default=0.0)
    memory_efficiency: float = quantity("a share", 0.01, 1, default=1.0)
    collectives: str = choice(COLLECTIVES, default="ring")

    def __post_init__(self) -> None:
        check(self)
        if not self.memories:
            raise MachineError(f"machine {self.name!r} has no memories; describe main memory.")
        self._check_links()
        for what, items in (("memories", self.memories), ("links", self.links)):
            names = [item.name for item in items]
            if len(set(names)) != len(names):
                raise MachineError(f"{what} of {self.name!r} share a name: {names}; rename one.")
        for dtype, rate in self.peak_flops:
            check_number(f"peak_flops.{dtype}", rate, "FLOP/s", *_PEAK_RANGE)
        if "float32" not in dict(self.peak_flops):
            raise MachineError("peak_flops.float32 is missing; add it, in FLOP/s.")
        main = self.memories[-1]
        if self.usable_bytes > main.bytes:
            raise MachineError(
                f"usable_bytes is {self.usable_bytes}, more than the {main.bytes} bytes of "
                f"{main.name}; lower it or correct memories.{main.name}.bytes."
            )

    def __repr__(self) -> str:
        main, links = self.memories[-1], ", ".join(link.name for link in self.links)
        return f"<Machine {self.name}: {main.bytes / 1e9:.4g} GB {main.name}, links {links}>"

    def _check_links(self) -> None:
        if not self.links:
            raise MachineError(f"machine {self.name!r} has no links; describe at least one.")
        for near, far in itertools.pairwise(self.links):
            if near.reach >= far.reach:
                raise MachineError(
                    f"links.{far.name} reaches no further than links.{near.name}, which stands "
                    "before it; order links from the shortest reach (devices) to the longest."
                )
        last = self.links[-1]
        if self.devices > last.reach:
            raise MachineError(
                f"devices is {self.devices}, but links.{last.name} joins only {last.devices}; add "
                f"a link of longer reach, set links.{last.name}.devices to 0, or lower devices."
            )

    def memory(self, name: str) -> Memory:
        """Returns the memory of that name.

        Raises:
          MachineError: If the machine has no such memory.
        """
        for memory in self.memories:
            if memory.name == name:
                return memory
        known = ", ".join(memory.name for memory in self.memories)
        raise MachineError(f"machine {self.name!r} has no memory {name!r}; it has {known}.")

    @property
    def ddr_bandwidth(self) -> float:
        """Bytes a second between main memory and a device."""
        return self.memories[-1].bandwidth

    @property
    def streaming_bandwidth(self) -> float:
        """Bytes a second of main memory that code without a tile plan reaches."""
        return self.ddr_bandwidth * self.memory_efficiency

    @property
    def link_bandwidth(self) -> float:
        """Bytes a second of one link of the longest reach."""
        return self.links[-1].bandwidth

    @property
    def link_latency(self) -> float:
        """Seconds of latency of the link of the longest reach."""
        return self.links[-1].latency

    def link(self, devices: int) -> Link:
        """Returns the shortest link that joins `devices` neighbouring devices."""
        for link in self.links:
            if devices <= link.reach:
                return link
        return self.links[-1]

    def peak(self, dtype: str) -> float:
        """Returns the peak FLOP/s for a dtype name; kinds that are not listed use float32's."""
        rates = dict(self.peak_flops)
        for name in (dtype, _PEAK_FALLBACK.get(dtype, "float32")):
            if name in rates:
                return rates[name]
        return rates["float32"]

    def overlap(self, first: str, second: str) -> tuple[float, float] | None:
        """Returns the slow-down of two lanes that work at once, or None if they may not.

        Example:
          >>> from ratrain_jax.kernels import load_machine
          >>> load_machine("generic").overlap("compute", "link")
          (1.0, 1.0)
        """
        for overlap in self.overlaps:
            if overlap.lanes == (first, second):
                return overlap.slowdown
            if overlap.lanes == (second, first):
                return overlap.slowdown[1], overlap.slowdown[0]
        return None

    def compute_seconds(
        self, flops: float, dtype: str = "float32", *, products: float = 0
    ) -> float:
        """Returns how long arithmetic is busy.

        A product of f operations runs at `product_efficiency` · f / (f + `product_half_flops`) of
        the peak, so that small products are slow (R. Hockney's n½, here in operations). n products
        that have f operations between them take

            (f + n · product_half_flops) / (peak · product_efficiency)

        seconds; anything else takes f / peak.

        Args:
          flops: Floating-point operations.
          dtype: Name of the operands' dtype, which sets the arithmetic peak.
          products: How many products the operations are in; 0 for other work.

        Returns:
          Seconds.

        Example:
          >>> import dataclasses
          >>> from ratrain_jax.kernels import load_machine
          >>> half = dataclasses.replace(load_machine("generic"), product_half_flops=1e12)
          >>> half.compute_seconds(10e12), half.compute_seconds(10e12, products=2)
          (1.0, 1.2)
        """
        if not products:
            return flops / self.peak(dtype)
        work = flops + products * self.product_half_flops
        return work / (self.peak(dtype) * self.product_efficiency)

    def roofline_seconds(
        self,
        flops: float,
        bytes_moved: float,
        dtype: str = "float32",
        *,
        products: float = 0,
        launch: bool = False,
    ) -> float:
        """Returns the least time that arithmetic and main memory allow.

        Args:
          flops: Floating-point operations.
          bytes_moved: Bytes read from and written to main memory.
          dtype: Name of the operands' dtype, which sets the arithmetic peak.
          products: How many products the operations are in; 0 for other work.
          launch: Whether to add the time to start one program.

        Returns:
          Seconds: the larger of compute time (`compute_seconds`) and memory time, which is bytes
          over `streaming_bandwidth`.

        Example:
          >>> from ratrain_jax.kernels import load_machine
          >>> load_machine("generic").roofline_seconds(0.0, 500e9)
          1.0
        """
        busy = self.compute_seconds(flops, dtype, products=products)
        seconds = max(busy, bytes_moved / self.streaming_bandwidth)
        return seconds + (self.launch_seconds if launch else 0.0)
