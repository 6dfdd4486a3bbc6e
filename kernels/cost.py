"""What a kernel costs on a machine: the common report of products and attention."""

import dataclasses
import functools

from ratrain_jax.kernels.gemm_cost import Transfer, times, transfers
from ratrain_jax.kernels.gemm_plan import plan_for
from ratrain_jax.kernels.machine import Machine
from ratrain_jax.kernels.tiles import Gemm, TilePlan, accelerator_of, check_plan


@dataclasses.dataclass(frozen=True, slots=True)
class KernelCost:
    """Time and traffic of one kernel.

    Attributes:
      seconds: From the first byte to the last.
      flops: Operations that the mathematics asks for.
      peak: FLOP/s of the device for the operands' dtype.
      compute_seconds: Arithmetic of the busiest core.
      start_seconds: Starting transfers, not hidden.
      fill_seconds: Transfers before the first tile, after the last, and between unbuffered blocks.
      transfers: Pairs of (from, to, mode) and bytes; a broadcast counts once.
      hidden: Memories of which half the bandwidth would cost no time.
      assumed: Assumptions about the machine that the figures rest on.
    """

    seconds: float
    flops: int
    peak: float
    compute_seconds: float
    start_seconds: float
    fill_seconds: float
    transfers: tuple[tuple[Transfer, int], ...]
    hidden: tuple[str, ...]
    assumed: tuple[str, ...]

    @property
    def efficiency(self) -> float:
        """Share of the device's peak that is reached."""
        return self.flops / self.peak / self.seconds

    @property
    def ddr_bytes(self) -> int:
        """Bytes that cross between DDR and the chip."""
        return sum(count for (source, to, _), count in self.transfers if "DDR" in (source, to))

    @property
    def limit(self) -> str:
        """What takes most of the time: "compute", or "memory" where arithmetic waits for it."""
        busy = self.compute_seconds + self.start_seconds
        return "compute" if busy >= 0.5 * self.seconds else "memory"


@functools.lru_cache(maxsize=4096)
def cost_gemm(gemm: Gemm, machine: Machine, plan: TilePlan | None = None) -> KernelCost:
    """Returns the cost of a product. Repeated calls cost nothing.

    Args:
      gemm: The product.
      machine: A machine with an accelerator.
      plan: The plan to cost; the best one unless given.

    Returns:
      The cost.

    Raises:
      MachineError: If the plan does not fit the machine.

    Example:
      >>> from ratrain_jax.kernels import load_machine
      >>> cost = cost_gemm(Gemm(2048, 4096, 4096), load_machine("mt3000"))
      >>> cost.flops
      68719476736
    """
    plan = plan or plan_for(gemm, machine)
    check_plan(plan, gemm, machine)
    took = times(gemm, plan, machine)
    seconds = float(took.total)
    hidden = []
    for index, memory in enumerate(machine.memories):
        slower = dataclasses.replace(memory, bandwidth=memory.bandwidth / 2)
        memories = (*machine.memories[:index], slower, *machine.memories[index + 1 :])
        if times(gemm, plan, dataclasses.replace(machine, memories=memories)).total <= seconds:
            hidden.append(memory.name)
    moved = transfers(gemm, plan, machine)
    return KernelCost(
        seconds=seconds,
        flops=gemm.flops,
        peak=accelerator_of(machine).peak_flops(gemm.bytes),
        compute_seconds=float(took.compute),
        start_seconds=float(took.starts),
        fill_seconds=float(took.fill),
        transfers=tuple((kind, int(count)) for kind, count in moved.items() if count),
        hidden=tuple(hidden),
        assumed=assumptions(machine),
    )


@functools.lru_cache(maxsize=4096)
def gemm_seconds(gemm: Gemm, machine: Machine) -> float:
    """Returns the seconds of `cost_gemm` by the best plan, without what else there is to say of it."""
    return float(times(gemm, plan_for(gemm, machine), machine).total)


def repeated(cost: KernelCost, count: int) -> KernelCost:
    """Returns the cost of `count` equal kernels, one after the other."""
    return dataclasses.replace(
        cost,
        seconds=cost.seconds * count,
        flops=cost.flops * count,
        compute_seconds=cost.compute_seconds * count,
        start_seconds=cost.start_seconds * count,
        fill_seconds=cost.fill_seconds * count,
        transfers=tuple((kind, total * count) for kind, total in cost.transfers),
    )


def assumptions(machine: Machine, exponentials: bool = False) -> tuple[str, ...]:
    """Returns the assumed keys that a kernel's time depends on."""
    used = ("memories", "accelerator", "peak_flops")
    return tuple(
        key
        for key in machine.assumed
        if key.startswith(used) and (exponentials or key != "accelerator.exp_operations")
    )
