"""Planning attention on an accelerator: which tiles live where, and what fits.

The *rows* of one key-value head are the queries of all heads that share it. `groups` heads are
worked on at once, each by its own cores / groups cores.

* Forward: a core owns tiles of `block_q` rows. Its query tile is in SM; key and value tiles of
  `block_k` stream from DDR into the AM of all cores of the group (a broadcast). Scores,
  probabilities and the output tile stay in AM; probabilities go to SM as the left operand of P·V.
* Backward, memory-resident: a core owns `block_k` keys; their K, V, dK and dV stay in its AM while
  tiles of `block_q` rows of Q and dO stream by (a broadcast). Scores and probabilities are
  recomputed from the log-sum-exp and never leave the chip; the cores' shares of a dQ tile are added
  in GSM. Keys that do not fit at once take several *passes*, between which dQ waits in DDR.

Under a causal mask tiles above the diagonal are skipped. Rows (forward) and, a register of keys at
a time, keys (backward) are dealt to cores in turn, which evens out what is left.
"""

import dataclasses
import itertools
from typing import Final

from ratrain_jax.errors import MachineError
from ratrain_jax.kernels.machine import ACCUMULATORS, Machine
from ratrain_jax.kernels.tiles import accelerator_of, ceil_div

HALF: Final = 2
WIDE: Final = 4
PASSES: Final = ("forward", "backward")
_BLOCKS_Q: Final = (6, 12, 16, 24, 32, 48, 64, 96, 128)
_VECTORS_K: Final = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """One attention over a batch.

    Attributes:
      batch: Sequences.
      heads: Query heads.
      kv_heads: Key and value heads; divides `heads`.
      queries: Query positions.
      keys: Key positions.
      head_size: Elements of a head.
      causal: Whether keys after the query are masked.
      bias: Whether an additive bias is read from DDR (ALiBi is not: it is computed).
      accumulator: Of the products, as for `Gemm`.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_size: int
    causal: bool = False
    bias: bool = False
    accumulator: str = "fp32"

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "kv_heads", "queries", "keys", "head_size"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise MachineError(f"{name} of an attention is {size!r}; give an int >= 1.")
        if self.heads % self.kv_heads:
            raise MachineError(
                f"{self.heads} query heads cannot share {self.kv_heads} key heads evenly; make "
                "heads a multiple of kv_heads."
            )
        if self.accumulator not in ACCUMULATORS:
            raise MachineError(
                f"accumulator is {self.accumulator!r}; use one of {', '.join(ACCUMULATORS)}."
            )

    @property
    def count(self) -> int:
        """Key-value heads over the batch, each an attention of its own."""
        return self.batch * self.kv_heads

    @property
    def rows(self) -> int:
        """Query rows of one key-value head."""
        return self.queries * (self.heads // self.kv_heads)

    @property
    def visible(self) -> int:
        """Pairs of query row and key that are not masked by causality."""
        if not self.causal:
            return self.rows * self.keys
        full = min(self.queries, self.keys)
        pairs = full * (full + 1) // 2 + max(0, self.queries - self.keys) * self.keys
        return pairs * (self.heads // self.kv_heads)

    def flops(self, which: str) -> int:
        """Multiplications and additions of the 2 or 5 products over visible pairs."""
        products = {"forward": 2, "backward": 5}[which]
        return 2 * products * self.count * self.visible * self.head_size


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The blocking of one pass; the module's docstring shows what is where.

    Attributes:
      which: "forward" or "backward".
      groups: Heads worked on at once.
      block_q: Rows of a query tile.
      block_k: Keys of a tile (forward), or keys a core owns at a time (backward).
    """

    which: str
    groups: int
    block_q: int
    block_k: int


def attention_buffers(plan: AttentionPlan, shape: Attention) -> dict[str, int]:
    """Returns the bytes that a plan needs in each on-chip memory."""
    q, k, size = plan.block_q, plan.block_k, shape.head_size
    bias = 2 * HALF * q * k * shape.bias
    if plan.which == "forward":
        streamed = 2 * 2 * HALF * k * size
        tiles = (WIDE + HALF) * q * k + WIDE * q * size
        # Query tiles twice; probabilities; running maximum and sum.
        scalars = 2 * HALF * q * size + HALF * q * k + 2 * WIDE * q
        return {"AM": streamed + tiles + bias, "SM": scalars, "GSM": 0}
    # K both ways round, V; their gradients; S and dP wide, P and dS narrow; a share of dQ.
    owned = 3 * HALF * k * size + 2 * WIDE * k * size
    tiles = 2 * (WIDE + HALF) * q * k + WIDE * q * size
    scalars = 2 * 2 * HALF * q * size + HALF * q * k + 2 * 2 * WIDE * q
    return {"AM": owned + tiles + bias, "SM": scalars, "GSM": 2 * plan.groups * WIDE * q * size}


def check_attention_plan(plan: AttentionPlan, shape: Attention, machine: Machine) -> None:
    """Refuses a plan that does not fit the machine.

    Raises:
      MachineError: If a size is out of order or a buffer too small; the message has the buffer, its
        size and the excess in bytes.
    """
    cores = accelerator_of(machine).cores
    if plan.which not in PASSES:
        raise MachineError(f"which is {plan.which!r}; use 'forward' or 'backward'.")
    if plan.groups < 1 or cores % plan.groups:
        raise MachineError(
            f"groups is {plan.groups}, which does not divide the {cores} cores; use a divisor."
        )
    for name in ("block_q", "block_k"):
        if getattr(plan, name) < 1:
            raise MachineError(f"{name} is {getattr(plan, name)}; give at least 1.")
    for name, need in attention_buffers(plan, shape).items():
        size = machine.memory(name).bytes
        if need > size:
            raise MachineError(
                f"attention {plan.which} with block_q={plan.block_q}, block_k={plan.block_k} "
                f"needs {need} bytes of {name}, which has {size} bytes: {need - size} bytes too "
                "many; make the blocks or the head size smaller."
            )


def attention_plans(shape: Attention, machine: Machine, which: str) -> list[AttentionPlan]:
    """Returns every plan of the searched space that fits."""
    accelerator = accelerator_of(machine)
    lanes = accelerator.lanes(HALF)
    # Blocks past the end are cut to what there is, whole registers of keys at a time.
    most_k = ceil_div(shape.keys, lanes) * lanes
    blocks_q = sorted({min(block, shape.rows) for block in _BLOCKS_Q})
    blocks_k = sorted({min(count * lanes, most_k) for count in _VECTORS_K})
    groups = [count for count in range(1, accelerator.cores + 1) if accelerator.cores % count == 0]
    plans = []
    for group, block_q, block_k in itertools.product(groups, blocks_q, blocks_k):
        plan = AttentionPlan(which, group, block_q, block_k)
        need = attention_buffers(plan, shape)
        if all(count <= machine.memory(name).bytes for name, count in need.items()):
            plans.append(plan)
    return plans
