"""An instrumented run of planned attention: real buffers, real copies, every byte counted.

It walks the tile loops that `attention_plan` describes, head after head, on memories of the machine's size, as `emulator`
does for products. It is slow and made for checking: the cost model must count the same bytes, and the JAX path must give
the same numbers up to rounding. Products are NumPy's, in float32, of float16 operands.
"""

import abc
import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from ratrain_jax.errors import MachineError
from ratrain_jax.kernels.attention_cost import row_tiles, slices_at_once
from ratrain_jax.kernels.attention_plan import (
    HALF,
    Attention,
    AttentionPlan,
    check_attention_plan,
)
from ratrain_jax.kernels.emulator import Arena
from ratrain_jax.kernels.gemm_cost import Transfer
from ratrain_jax.kernels.machine import Machine
from ratrain_jax.kernels.tiles import accelerator_of, ceil_div

Array = np.ndarray[Any, Any]
NARROW, FLOAT = "float16", "float32"


@dataclasses.dataclass(frozen=True, slots=True)
class EmulatedAttention:
    """What an instrumented run gives.

    Attributes:
      values: O and the log-sum-exp (forward), or dQ, dK and dV (backward); a head along axis 0.
      transfers: (from, to, mode) → bytes, broadcasts once.
    """

    values: tuple[Array, ...]
    transfers: dict[Transfer, int]


def emulate_attention(
    shape: Attention,
    plan: AttentionPlan,
    machine: Machine,
    arrays: tuple[Array, ...],
    bias: Array | None = None,
) -> EmulatedAttention:
    """Runs a plan on emulated memories.

    Args:
      shape: The attention; scores are scaled by 1/sqrt(head size).
      plan: The plan of its forward or memory-resident backward pass.
      machine: The machine.
      arrays: Q (heads, rows, size), K and V (heads, keys, size) and, backward, dO, O and the
        log-sum-exp (heads, rows); all but the last in float16.
      bias: Of the scores, (heads, rows, keys), if `shape.bias`.

    Returns:
      The results and the bytes moved.

    Raises:
      MachineError: If the plan does not fit, or a bias is missing.
    """
    check_attention_plan(plan, shape, machine)
    if (bias is not None) != shape.bias:
        raise MachineError(f"the shape says bias={shape.bias}; give a bias just where it says so.")
    kind = {"forward": _Forward, "backward": _Backward}[plan.which]
    moved: Counter[Transfer] = Counter()
    results = []
    for head in range(shape.count):
        own = None if bias is None else bias[head].astype(NARROW)
        run = kind(shape, plan, machine, tuple(x[head] for x in arrays), own, moved)
        results.append(run.run())
    values = tuple(np.stack(parts) for parts in zip(*results, strict=True))
    return EmulatedAttention(values, {key: count for key, count in moved.items() if count})


class _Head(abc.ABC):
    """One key-value head on the cores of its group."""

    def __init__(
        self,
        shape: Attention,
        plan: AttentionPlan,
        machine: Machine,
        arrays: tuple[Array, ...],
        bias: Array | None,
        moved: Counter[Transfer],
    ) -> None:
        self.shape, self.plan, self.bias, self.moved = shape, plan, bias, moved
        self.q, self.k, self.v, *self.rest = arrays
        accelerator = accelerator_of(machine)
        self.team = accelerator.cores // plan.groups
        self.lanes = accelerator.lanes(HALF)
        self.at_once = slices_at_once(plan, accelerator.cores, self.lanes)
        rows, self.seen = row_tiles(shape, plan)
        ends = np.cumsum(rows)
        self.tiles = [
            slice(int(end - count), int(end)) for end, count in zip(ends, rows, strict=True)
        ]
        self.sm = [self._take("SM", machine.memory("SM").bytes) for _ in range(self.team)]
        self.am = [self._take("AM", machine.memory("AM").bytes) for _ in range(self.team)]

    def _take(self, name: str, size: int) -> dict[str, Array]:
        """The buffers of one core in one of its memories."""
        arena = Arena(name, size)
        return {key: arena.take(*what) for key, what in self.buffers(name).items()}

    @abc.abstractmethod
    def buffers(self, name: str) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of the buffers in a memory."""

    def copy(self, to: Array, source: Array, kind: Transfer, counts: bool = True) -> Array:
        """Copies into a corner of a buffer and counts the bytes; a broadcast is counted by its first receiver."""
        view = to[tuple(slice(0, size) for size in source.shape)]
        view[...] = source
        self.moved[kind] += view.nbytes * counts
        return view

    def scores(self, core: int, q: Array, k: Array, rows: slice, keys: Array) -> Array:
        """Scores of some rows and keys in a core's AM, -inf where masked."""
        scores = q.astype(FLOAT) @ k.astype(FLOAT).T * np.float32(self.shape.head_size**-0.5)
        if self.bias is not None:
            part = self.bias[rows][:, keys]
            scores += self.copy(self.am[core]["bias"], part, ("DDR", "AM", "point"))
        if self.shape.causal:
            queries = np.arange(rows.start, rows.stop) % self.shape.queries
            scores[keys[None, :] > queries[:, None]] = -np.inf
        return scores


class _Forward(_Head):
    def buffers(self, name: str) -> dict[str, tuple[tuple[int, ...], str]]:
        q, k, size = self.plan.block_q, self.plan.block_k, self.shape.head_size
        if name == "SM":
            found = {"q": ((2, q, size), NARROW), "p": ((q, k), NARROW), "scalars": ((2, q), FLOAT)}
        else:
            found = {
                "k": ((2, k, size), NARROW),
                "v": ((2, k, size), NARROW),
                "s": ((q, k), FLOAT),
                "p": ((q, k), NARROW),
                "o": ((q, size), FLOAT),
            }
            found |= {"bias": ((2 * q, k), NARROW)} if self.shape.bias else {}
        return found

    def run(self) -> tuple[Array, Array]:
        out = np.zeros(self.q.shape, NARROW)
        lse = np.zeros(len(self.q), FLOAT)
        for first in range(0, len(self.tiles), self.team):
            self._round(range(first, min(first + self.team, len(self.tiles))), out, lse)
        return out, lse

    def _round(self, tiles: range, out: Array, lse: Array) -> None:
        """One row tile a core, while keys and values pass by once."""
        block, keys = self.plan.block_k, self.shape.keys
        for core, tile in enumerate(tiles):
            rows = self.q[self.tiles[tile]]
            self.copy(self.sm[core]["q"][tile % 2], rows, ("DDR", "SM", "point"))
            self.sm[core]["scalars"][0], self.sm[core]["scalars"][1] = -np.inf, 0
            self.am[core]["o"][...] = 0
        ends = [min(ceil_div(int(self.seen[tile]), block) * block, keys) for tile in tiles]
        for start in range(0, max(ends), block):
            stop = min(start + block, keys)
            slot = start // block % 2
            for core in range(self.team):
                for name, source in (("k", self.k), ("v", self.v)):
                    kind = ("DDR", "AM", "broadcast")
                    self.copy(self.am[core][name][slot], source[start:stop], kind, core == 0)
            for core, tile in enumerate(tiles):
                if ends[core] > start:
                    self._tile(core, tile, slot, np.arange(start, stop))
        for core, tile in enumerate(tiles):
            self._store(core, self.tiles[tile], out, lse)

    def _tile(self, core: int, tile: int, slot: int, keys: Array) -> None:
        rows = self.tiles[tile]
        am, sm, count = self.am[core], self.sm[core], rows.stop - rows.start
        k, v = (am[name][slot][: len(keys)] for name in ("k", "v"))
        scores = am["s"][:count, : len(keys)]
        scores[...] = self.scores(core, sm["q"][tile % 2][:count], k, rows, keys)
        most, total = sm["scalars"][0][:count], sm["scalars"][1][:count]
        new = np.maximum(most, scores.max(1))
        safe = np.where(np.isinf(new), 0, new)
        weights = np.exp(scores - safe[:, None])
        shrink = np.exp(most - safe)
        total[...] = total * shrink + weights.sum(1)
        most[...] = new
        am["p"][:count, : len(keys)] = weights
        p = self.copy(sm["p"], am["p"][:count, : len(keys)], ("AM", "SM", "point"))
        out = am["o"][:count]
        out[...] = out * shrink[:, None] + p.astype(FLOAT) @ v.astype(FLOAT)

    def _store(self, core: int, rows: slice, out: Array, lse: Array) -> None:
        count = rows.stop - rows.start
        most, total = (row[:count] for row in self.sm[core]["scalars"])
        self.copy(out[rows], (self.am[core]["o"][:count] / total[:, None]).astype(NARROW), _STORE)
        self.copy(lse[rows], most + np.log(total), _STORE)


class _Backward(_Head):
    def buffers(self, name: str) -> dict[str, tuple[tuple[int, ...], str]]:
        q, k, size = self.plan.block_q, self.plan.block_k, self.shape.head_size
        if name == "SM":
            return {
                "q": ((2, q, size), NARROW),
                "do": ((2, q, size), NARROW),
                "ds": ((q, k), NARROW),
                "scalars": ((2, 2, q), FLOAT),
            }
        found = {
            "k": ((2, k, size), NARROW),
            "v": ((k, size), NARROW),
            "dk": ((k, size), FLOAT),
            "dv": ((k, size), FLOAT),
            "s": ((2, q, k), FLOAT),
            "p": ((2, q, k), NARROW),
            "dq": ((q, size), FLOAT),
        }
        return found | ({"bias": ((2 * q, k), NARROW)} if self.shape.bias else {})

    def run(self) -> tuple[Array, Array, Array]:
        self.grad, self.out, self.lse = self.rest
        size, keys = self.shape.head_size, self.shape.keys
        self.dots = np.zeros(len(self.q), FLOAT)
        self.waiting = np.zeros(self.q.shape, FLOAT)
        self.dq = np.zeros(self.q.shape, NARROW)
        dk, dv = (np.zeros((keys, size), NARROW) for _ in range(2))
        slices = ceil_div(keys, self.lanes)
        for first in range(0, slices, self.at_once):
            owned = dict(self._owned(first, min(first + self.at_once, slices)))
            for core, own in owned.items():
                am = self.am[core]
                self.copy(am["k"][0], self.k[own], ("DDR", "AM", "point"))
                self.copy(am["v"], self.v[own], ("DDR", "AM", "point"))
                am["dk"][...] = am["dv"][...] = 0
            for tile in range(len(self.tiles)):
                here = ceil_div(int(self.seen[tile]), self.lanes)
                if here > first:
                    self._tile(tile, first, here, owned)
            for core, own in owned.items():
                for name, home in (("dk", dk), ("dv", dv)):
                    done = self.am[core][name][: len(own)].astype(NARROW)
                    home[own] = done
                    self.moved[_STORE] += done.nbytes
        return self.dq, dk, dv

    def _owned(self, first: int, stop: int) -> Iterator[tuple[int, Array]]:
        """Keys of each core in a pass: registers of keys, dealt in turn."""
        for core in range(min(self.team, stop - first)):
            mine = range(first + core, stop, self.team)
            spans = [
                range(s * self.lanes, min((s + 1) * self.lanes, self.shape.keys)) for s in mine
            ]
            yield core, np.concatenate([np.array(span) for span in spans])

    def _tile(self, tile: int, first: int, here: int, owned: dict[int, Array]) -> None:
        """One row tile in one pass, on all cores that own keys that it sees."""
        rows, slot = self.tiles[tile], tile % 2
        count = rows.stop - rows.start
        if first == 0:
            self._dots(rows)
        for core in owned:
            sm = self.sm[core]
            for name, source in (("q", self.q), ("do", self.grad)):
                self.copy(sm[name][slot], source[rows], _BROADCAST, core == 0)
            for place, source in enumerate((self.lse, self.dots)):
                self.copy(sm["scalars"][slot][place], source[rows], _BROADCAST, core == 0)
        gsm = np.zeros((count, self.shape.head_size), FLOAT)
        if first:
            gsm += self.copy(self.am[0]["dq"], self.waiting[rows], ("DDR", "AM", "point"))
        for core, own in owned.items():
            visible = own[own < here * self.lanes]
            if len(visible):
                share = self._share(core, rows, slot, visible)
                gsm += share
                self.moved["AM", "GSM", "point"] += share.nbytes
        last = here <= first + self.at_once
        home, dtype = (self.dq, NARROW) if last else (self.waiting, FLOAT)
        self.copy(home[rows], gsm.astype(dtype), ("GSM", "DDR", "point"))

    def _dots(self, rows: slice) -> None:
        """D of a row tile, once."""
        out = self.copy(self.am[0]["dq"].view(NARROW), self.out[rows], ("DDR", "AM", "point"))
        grad = self.grad[rows].astype(FLOAT)
        self.copy(self.dots[rows], (grad * out.astype(FLOAT)).sum(1), _STORE)

    def _share(self, core: int, rows: slice, slot: int, keys: Array) -> Array:
        """A core's share of dQ; adds to its dK and dV."""
        am, sm = self.am[core], self.sm[core]
        count, seen = rows.stop - rows.start, len(keys)
        q, grad = (sm[name][slot][:count].astype(FLOAT) for name in ("q", "do"))
        lse, dots = (row[:count, None] for row in sm["scalars"][slot])
        k, v = am["k"][0][:seen], am["v"][:seen].astype(FLOAT)
        p, ds = (x[:count, :seen] for x in am["s"])
        p[...] = np.exp(self.scores(core, q, k, rows, keys) - lse)
        ds[...] = p * (grad @ v.T - dots)
        for place, x in enumerate((p, ds)):
            am["p"][place][:count, :seen] = x
        narrow_p, narrow_ds = (x[:count, :seen].astype(FLOAT) for x in am["p"])
        self.copy(sm["ds"], am["p"][1][:count, :seen], ("AM", "SM", "point"))
        scale = np.float32(self.shape.head_size**-0.5)
        am["dv"][:seen] += narrow_p.T @ grad
        am["dk"][:seen] += narrow_ds.T @ q * scale
        return narrow_ds @ k.astype(FLOAT) * scale


_STORE: Transfer = ("AM", "DDR", "point")
_BROADCAST: Transfer = ("DDR", "SM", "broadcast")
