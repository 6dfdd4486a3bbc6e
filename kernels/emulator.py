"""An instrumented run of a planned product: real buffers, real copies, every byte counted.

The emulator walks the loop nest of `tiles` turn by turn. Each memory is an arena of the machine's
size, from which buffers are taken; a copy between memories counts its bytes when it happens, and a
micro-kernel its cycles. It is slow and made for checking: the cost model must count the same, and
the JAX path must give the same bits.
"""

import dataclasses
import itertools
from collections import Counter
from typing import Any

import numpy as np

from ratrain_jax.errors import MachineError
from ratrain_jax.kernels.gemm_cost import Transfer, column_block, core_cols, core_rows
from ratrain_jax.kernels.machine import Machine
from ratrain_jax.kernels.microkernel import fill_cycles, step_cycles, transpose_cycles
from ratrain_jax.kernels.tiles import (
    Gemm,
    TilePlan,
    accelerator_of,
    ceil_div,
    check_plan,
    micro_width,
)

Array = np.ndarray[Any, Any]


class Arena:
    """A memory of a fixed size, from which buffers are taken once."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self._bytes = np.zeros(size, np.uint8)
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Returns a new buffer.

        Raises:
          MachineError: If the memory is full.
        """
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        end = self._used + count
        if end > self._bytes.size:
            raise MachineError(
                f"{self.name} has {self._bytes.size} bytes, {end - self._bytes.size} too few for "
                f"a buffer of {count} bytes; make the plan's blocks smaller."
            )
        view = self._bytes[self._used : end].view(dtype).reshape(shape)
        self._used = end
        return view


@dataclasses.dataclass(frozen=True, slots=True)
class Emulated:
    """What an instrumented run gives.

    Attributes:
      value: C.
      transfers: (from, to, mode) → bytes, broadcasts once.
      cycles: Arithmetic of the busiest core, turn by turn.
      start_cycles: Starting A strips, on the busiest core.
    """

    value: Array
    transfers: dict[Transfer, int]
    cycles: int
    start_cycles: int


@dataclasses.dataclass(slots=True)
class _Core:
    strips: list[Array]
    panels: list[Array]
    tiles: list[Array]


def emulate_gemm(
    a: Any, b: Any, plan: TilePlan, gemm: Gemm, machine: Machine, c: Any = None
) -> Emulated:
    """Runs a plan on emulated memories.

    Args:
      a: The left operand as it lies in DDR: M×K, or K×M for form "tn".
      b: The right operand as it lies in DDR: K×N, or N×K for form "nt".
      plan: The plan.
      gemm: The product; its operands are float16.
      machine: The machine.
      c: What is added to, if `gemm.accumulate`.

    Returns:
      The product, the bytes moved and the cycles.

    Raises:
      MachineError: If the plan does not fit, or the operands are not float16.
    """
    check_plan(plan, gemm, machine)
    if gemm.dtype != "float16":
        raise MachineError(f"the emulator computes in float16, not {gemm.dtype}; cast or cost it.")
    return _Run(np.asarray(a), np.asarray(b), plan, gemm, machine, c).run()


class _Run:
    def __init__(
        self, a: Array, b: Array, plan: TilePlan, gemm: Gemm, machine: Machine, c: Any
    ) -> None:
        self.a = a.T if gemm.form == "tn" else a
        self.b = b.T if gemm.form == "nt" else b
        self.plan, self.gemm, self.machine = plan, gemm, machine
        self.accelerator = accelerator_of(machine)
        self.acc = "float16" if gemm.acc_bytes == 2 else "float32"
        self.partial = np.zeros((gemm.rows, gemm.cols), self.acc)
        self.out = np.zeros((gemm.rows, gemm.cols), gemm.out_dtype)
        if gemm.accumulate:
            self.out[:] = c
        self.moved: Counter[Transfer] = Counter()
        self.cycles = self.start_cycles = 0
        self.strip_home = "AM" if plan.dot else "SM"
        gsm = Arena("GSM", machine.memory("GSM").bytes)
        self.blocks = [gsm.take((plan.m_g, plan.k_g), "float16") for _ in range(plan.gsm_depth)]
        self.cores = [self._core() for _ in range(self.accelerator.cores)]

    def _core(self) -> _Core:
        plan = self.plan
        am = Arena("AM", self.machine.memory("AM").bytes)
        sm = am if plan.dot else Arena("SM", self.machine.memory("SM").bytes)
        panels = [am.take((plan.k_a, plan.n_a), "float16") for _ in range(plan.b_depth)]
        tiles = [am.take((plan.m_a, plan.n_a), self.acc) for _ in range(plan.c_depth)]
        strips = [sm.take((plan.m_s, plan.k_a), "float16") for _ in range(plan.sm_depth)]
        return _Core(strips, panels, tiles)

    def _copy(self, to: Array, source: Array, kind: Transfer) -> Array:
        view = to[: source.shape[0], : source.shape[1]]
        view[:] = source
        self.moved[kind] += source.size * source.itemsize
        return view

    def run(self) -> Emulated:
        plan, gemm = self.plan, self.gemm
        turn = itertools.count()
        for row in range(0, gemm.rows, plan.m_g):
            for k in range(0, gemm.depth, plan.k_g):
                block = self._copy(
                    self.blocks[next(turn) % plan.gsm_depth],
                    self.a[row : row + plan.m_g, k : k + plan.k_g],
                    ("DDR", "GSM", "point"),
                )
                for col in range(0, gemm.cols, column_block(plan, len(self.cores))):
                    self._turn(block, row, k, col)
        moved = {kind: count for kind, count in self.moved.items() if count}
        return Emulated(self.out, moved, self.cycles, self.start_cycles)

    def _turn(self, block: Array, row: int, k: int, col: int) -> None:
        """One turn of the column loop on all cores."""
        plan, cores = self.plan, len(self.cores)
        cols = min(column_block(plan, cores), self.gemm.cols - col)
        width = int(micro_width(plan, self.gemm, self.accelerator))
        own_rows = int(core_rows(block.shape[0], plan, cores))
        own_cols = int(core_cols(cols, plan, width, cores))
        shares = []
        for core in range(cores):
            top, left = (0, core * own_cols) if plan.split_n else (core * own_rows, 0)
            rows = min(own_rows, block.shape[0] - top)
            wide = min(own_cols, cols - left)
            if rows > 0 and wide > 0:
                shares.append((core, top, rows, col + left, wide))
        before = np.zeros((2, cores), np.int64)
        for tile in range(0, own_rows, plan.m_a):
            self._row_tile(block, row, k, tile, shares, before)
        self.cycles += int(before[0].max())
        self.start_cycles += int(before[1].max())

    def _row_tile(
        self, block: Array, row: int, k: int, tile: int, shares: list[Any], spent: Array
    ) -> None:
        plan = self.plan
        active = [
            (core, top + tile, min(plan.m_a, rows - tile), left, wide)
            for core, top, rows, left, wide in shares
            if rows > tile
        ]
        last = k + plan.k_g >= self.gemm.depth
        tiles = {c[0]: self._load_tile(row, k, tile, *c) for c in active}
        for start in range(0, block.shape[1], plan.k_a):
            size = min(plan.k_a, block.shape[1] - start)
            slot = start // plan.k_a % plan.b_depth
            if tile == 0 or block.shape[1] > plan.k_a:
                self._load_panels(k + start, size, slot, shares, spent)
            for core, top, rows, _, wide in active:
                panel = self.cores[core].panels[slot][:size, :wide]
                strips = block[top : top + rows, start : start + size]
                self._strips(core, strips, panel, tiles[core], spent, core == active[0][0])
        for core, top, rows, left, wide in active:
            self._store_tile(tiles[core], row + top, left, rows, wide, last)

    def _load_tile(
        self, row: int, k: int, tile: int, core: int, top: int, rows: int, left: int, wide: int
    ) -> Array:
        buffers = self.cores[core].tiles
        buffer = buffers[tile // self.plan.m_a % len(buffers)]
        place = (slice(row + top, row + top + rows), slice(left, left + wide))
        if k or self.gemm.accumulate:
            source = self.partial[place] if k else self.out[place]
            return self._copy(buffer, source, ("DDR", "AM", "point"))
        buffer[:] = 0
        return buffer[:rows, :wide]

    def _store_tile(
        self, tile: Array, row: int, left: int, rows: int, wide: int, last: bool
    ) -> None:
        home = self.out if last else self.partial
        place = home[row : row + rows, left : left + wide]
        place[:] = tile
        self.moved["AM", "DDR", "point"] += place.size * place.itemsize

    def _load_panels(self, k: int, size: int, slot: int, shares: list[Any], spent: Array) -> None:
        mode = "point" if self.plan.split_n else "broadcast"
        for at, (core, _, _, left, wide) in enumerate(shares):
            source = self.b[k : k + size, left : left + wide]
            self.cores[core].panels[slot][:size, :wide] = source
            if mode == "point" or at == 0:
                self.moved["DDR", "AM", mode] += source.size * source.itemsize
            if self.gemm.form == "nt" and not self.plan.dot:
                spent[0, core] += transpose_cycles(size, wide, self.gemm, self.accelerator)

    def _strips(
        self, core: int, rows: Array, panel: Array, tile: Array, spent: Array, first: bool
    ) -> None:
        plan = self.plan
        mode = "broadcast" if plan.split_n else "point"
        for at in range(0, rows.shape[0], plan.m_s):
            source = rows[at : at + plan.m_s]
            buffer = self.cores[core].strips[at // plan.m_s % plan.sm_depth]
            strip = buffer[: source.shape[0], : source.shape[1]]
            strip[:] = source
            if mode == "point" or first:
                self.moved["GSM", self.strip_home, mode] += source.size * source.itemsize
            spent[1, core] += self.accelerator.dma_start_cycles
            micro_panel(strip, panel, tile[at : at + plan.m_s], self.gemm, plan, self._lanes())
            spent[0, core] += self._micro_cycles(strip, panel)

    def _lanes(self) -> int:
        return self.accelerator.lanes(self.gemm.bytes)

    def _micro_cycles(self, strip: Array, panel: Array) -> int:
        """Cycles of the micro-kernels that cover one strip and panel."""
        plan, gemm, accelerator = self.plan, self.gemm, self.accelerator
        width = int(micro_width(plan, gemm, accelerator))
        vector = width // plan.n
        steps = ceil_div(strip.shape[1], self._lanes()) if plan.dot else strip.shape[1]
        total = 0
        for left in range(0, panel.shape[1], width):
            n = ceil_div(min(width, panel.shape[1] - left), vector)
            call = steps * step_cycles(plan.m, n, gemm, accelerator, plan.dot)
            total += int(call + fill_cycles(plan.m, n, gemm, accelerator, plan.dot))
        return total * ceil_div(strip.shape[0], plan.m)


def micro_panel(
    strip: Array, panel: Array, tile: Array, gemm: Gemm, plan: TilePlan, lanes: int
) -> None:
    """Adds one panel's product to a C tile in place, by the specification in `numerics`.

    float64 holds every sum of a product and an accumulator closely enough that rounding it to the
    accumulator's format is the one rounding of a fused step.
    """
    narrow = np.float16 if gemm.widening == 1 else np.float32
    left, right = strip.astype(np.float64), panel.astype(np.float64)
    products = left.T[:, :, None] * right[:, None, :]
    with np.errstate(over="ignore", invalid="ignore"):
        if plan.dot:
            sums = np.zeros((lanes, *tile.shape), narrow)
            for k, item in enumerate(products):
                sums[k % lanes] = (sums[k % lanes] + item).astype(narrow)
            while len(sums) > 1:
                half = len(sums) // 2
                wide = sums[:half].astype(np.float64) + sums[half:]
                sums = wide.astype(narrow)
            tile[:] = (tile.astype(np.float64) + sums[0]).astype(tile.dtype)
        elif gemm.promotes:
            inner = np.zeros(tile.shape, np.float16)
            for item in products:
                inner = (inner + item).astype(np.float16)
            tile[:] = tile + inner
        else:
            for item in products:
                tile[:] = (tile + item).astype(tile.dtype)
