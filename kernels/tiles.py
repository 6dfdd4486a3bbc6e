"""The blocking of one matrix product over the memories of an accelerator, as data.

A product C = A·B has M rows, N columns and depth K. Its *form* says how the operands lie in main
memory: "nn" (A is M×K, B is K×N), "nt" (B is N×K: C = A·Bᵀ) or "tn" (A is K×M: C = Aᵀ·B).
A `TilePlan` blocks it into this loop nest, which the emulator executes and the cost model counts:

    for rows of m_g, for depth of k_g                  A block: DDR → GSM
      for columns of n_a (n_a a core, if split "n")
        on every core, for its rows in tiles of m_a    C tile: DDR → AM, or zero
          for depth of k_a                             B panel: DDR → AM
            for rows of m_s                            A strip: GSM → SM
              micro-kernels of m rows × n vectors
                                                       C tile: AM → DDR

Cores share the work of a block by *split*: "m" gives every core its own rows, and B panels are
broadcast; "n" gives every core its own columns, and A strips are broadcast. A B panel stays in AM
for all row tiles of a core where it spans the whole depth of the block.

The *flow* of the micro-kernel is "outer" (for each step of K, scalars of A are broadcast and
multiplied with vectors of B along N) or "dot" (A and B are vectors along K; each lane has a partial
sum, and a tree adds the lanes at the end; A strips then go to AM). "nt" takes either: "outer" then
first transposes each B panel inside AM.

The *accumulator* of float16 operands is "fp32", "fp16", or "promote" (float16 inside one K panel,
float32 between panels). Wider operands accumulate in their own type, whatever it says.
"""

import dataclasses
from typing import Any, Final

from ratrain_jax.errors import MachineError
from ratrain_jax.kernels.machine import ACCUMULATORS, Accelerator, Machine

FORMS: Final = ("nn", "nt", "tn")
DTYPE_BYTES: Final = {"float16": 2, "float32": 4, "float64": 8}


def ceil_div(a: Any, b: Any) -> Any:
    """Returns a/b rounded up, for integers and integer arrays."""
    return -(-a // b)


@dataclasses.dataclass(frozen=True, slots=True)
class Gemm:
    """One matrix product, C = A·B or C += A·B.

    Attributes:
      rows: M.
      cols: N.
      depth: K.
      dtype: Name of the operands' dtype: float16, float32 or float64.
      form: "nn", "nt" (B is stored transposed) or "tn" (A is stored transposed).
      accumulator: "fp32", "fp16" or "promote", for float16 operands.
      out_dtype: Name of the dtype of C in main memory; the operands' unless given.
      accumulate: Whether C is read first and added to.
    """

    rows: int
    cols: int
    depth: int
    dtype: str = "float16"
    form: str = "nn"
    accumulator: str = "fp32"
    out_dtype: str = ""
    accumulate: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "cols", "depth"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise MachineError(f"{name} of a matrix product is {size!r}; give an int >= 1.")
        if not self.out_dtype:
            object.__setattr__(self, "out_dtype", self.dtype)
        for name, options in (
            ("dtype", DTYPE_BYTES),
            ("out_dtype", DTYPE_BYTES),
            ("form", FORMS),
            ("accumulator", ACCUMULATORS),
        ):
            if getattr(self, name) not in options:
                raise MachineError(
                    f"{name} of a matrix product is {getattr(self, name)!r}; "
                    f"use one of {', '.join(options)}."
                )

    @property
    def flops(self) -> int:
        """Multiplications and additions of the product."""
        return 2 * self.rows * self.cols * self.depth

    @property
    def bytes(self) -> int:
        """Bytes of one operand element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def out_bytes(self) -> int:
        """Bytes of one element of the finished C."""
        return DTYPE_BYTES[self.out_dtype]

    @property
    def acc_bytes(self) -> int:
        """Bytes of one element of C in AM and, between depth blocks, in DDR."""
        narrow = self.dtype != "float16" or self.accumulator == "fp16"
        return self.bytes if narrow else 4

    @property
    def widening(self) -> int:
        """Accumulator registers that one vector multiply-add feeds: 2 for FP16 into FP32."""
        return 2 if self.dtype == "float16" and self.accumulator == "fp32" else 1

    @property
    def promotes(self) -> bool:
        """Whether float16 sums of one K panel are added to float32 sums between panels."""
        return self.dtype == "float16" and self.accumulator == "promote"


@dataclasses.dataclass(frozen=True, slots=True)
class TilePlan:
    """The blocking of one product; the module's docstring shows the loop nest.

    Attributes:
      m_g: Rows of an A block in GSM.
      k_g: Depth of an A block in GSM.
      m_a: Rows of a C tile in a core's AM.
      n_a: Columns of a C tile in a core's AM.
      k_a: Depth of a B panel in AM.
      m_s: Rows of an A strip.
      m: Rows of the micro-kernel.
      n: Vectors (flow "outer") or columns (flow "dot") of the micro-kernel.
      ku: Steps of K that the micro-kernel unrolls.
      split: "m" or "n", the dimension that cores share out.
      flow: "outer" or "dot".
      gsm_depth: Buffers for A blocks; with 2, loading one overlaps with using the other.
      sm_depth: Buffers for A strips.
      b_depth: Buffers for B panels.
      c_depth: Buffers for C tiles; 3 overlap loading, using and storing.
    """

    m_g: int
    k_g: int
    m_a: int
    n_a: int
    k_a: int
    m_s: int
    m: int
    n: int
    ku: int = 1
    split: str = "m"
    flow: str = "outer"
    gsm_depth: int = 1
    sm_depth: int = 2
    b_depth: int = 2
    c_depth: int = 3

    @property
    def split_n(self) -> int:
        """1 where cores share out columns, else 0."""
        return int(self.split == "n")

    @property
    def dot(self) -> int:
        """1 for the "dot" flow, else 0."""
        return int(self.flow == "dot")


def accelerator_of(machine: Machine) -> Accelerator:
    """Returns the accelerator of a machine that has the memories of the loop nest.

    Raises:
      MachineError: If the machine describes no accelerator, or lacks SM, AM or GSM.
    """
    if machine.accelerator is None:
        raise MachineError(
            f"machine {machine.name!r} describes no accelerator to tile for; add an "
            "[accelerator] table, or use mt3000."
        )
    for name in ("SM", "AM", "GSM"):
        machine.memory(name)
    return machine.accelerator


def micro_width(plan: Any, gemm: Gemm, accelerator: Accelerator) -> Any:
    """Returns the columns of one micro-kernel."""
    lanes = accelerator.lanes(gemm.bytes)
    return plan.n * (lanes + (1 - lanes) * plan.dot)


def buffer_bytes(plan: Any, gemm: Gemm) -> dict[str, Any]:
    """Returns the bytes that a plan needs in each on-chip memory, for ints and arrays alike."""
    strips = plan.sm_depth * plan.m_s * plan.k_a * gemm.bytes
    panels = plan.b_depth * plan.k_a * gemm.bytes
    tiles = plan.c_depth * plan.m_a * gemm.acc_bytes
    return {
        "GSM": plan.gsm_depth * plan.m_g * plan.k_g * gemm.bytes,
        "AM": (panels + tiles) * plan.n_a + strips * plan.dot,
        "SM": strips * (1 - plan.dot),
    }


def registers_needed(plan: Any, gemm: Gemm) -> Any:
    """Returns the vector registers of a micro-kernel: operands of `ku` steps and accumulators."""
    return (plan.m + plan.n) * plan.ku + plan.m * plan.n * gemm.widening


def micro_kernel_fault(plan: Any, gemm: Gemm, accelerator: Accelerator) -> str:
    """Returns what is wrong with a micro-kernel, or an empty string."""
    used = registers_needed(plan, gemm)
    if used > accelerator.registers:
        return (
            f"micro-kernel {plan.m}×{plan.n} (ku={plan.ku}) needs {used} vector registers of "
            f"{accelerator.registers}, {used - accelerator.registers} too many; shrink m, n or ku"
        )
    chains = plan.m * plan.n * gemm.widening
    least = accelerator.fma_units * accelerator.latencies.fma
    if chains < least:
        return (
            f"micro-kernel {plan.m}×{plan.n} has {chains} accumulators, too few to keep "
            f"{accelerator.fma_units} units busy over their latency; have at least {least}"
        )
    if plan.m * plan.n % accelerator.fma_units:
        return (
            f"micro-kernel {plan.m}×{plan.n} does not divide over {accelerator.fma_units} "
            f"units; make m·n a multiple of {accelerator.fma_units}"
        )
    body = chains * plan.ku // accelerator.fma_units
    wait = accelerator.latencies.scalar_load + accelerator.latencies.broadcast
    if not plan.dot and body < wait:
        return (
            f"the unrolled body of micro-kernel {plan.m}×{plan.n} takes {body} cycles, less than "
            f"the {wait} that a scalar needs to arrive; raise ku to {ceil_div(wait, body)} or more"
        )
    return ""


def check_plan(plan: TilePlan, gemm: Gemm, machine: Machine) -> None:
    """Refuses a plan that does not fit the machine.

    Args:
      plan: The plan.
      gemm: The product that it blocks.
      machine: The machine.

    Raises:
      MachineError: If a size is out of order, a buffer too small (the message has the buffer, its
        size and the excess in bytes), or the micro-kernel breaks a register rule.
    """
    accelerator = accelerator_of(machine)
    _check_sizes(plan, gemm, accelerator)
    fault = micro_kernel_fault(plan, gemm, accelerator)
    if fault:
        raise MachineError(f"{fault}.")
    for name, need in buffer_bytes(plan, gemm).items():
        size = machine.memory(name).bytes
        if need > size:
            raise MachineError(
                f"the plan needs {need} bytes of {name}, which has {size} bytes: {need - size} "
                f"bytes too many; make {_BUFFER_KEYS[name]} smaller."
            )


_BUFFER_KEYS: Final = {"GSM": "m_g, k_g or gsm_depth", "AM": "n_a, k_a or m_a", "SM": "m_s or k_a"}


def _check_sizes(plan: TilePlan, gemm: Gemm, accelerator: Accelerator) -> None:
    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        if field.type is int and (not isinstance(value, int) or value < 1):
            raise MachineError(f"{field.name} of the plan is {value!r}; give an int >= 1.")
    if plan.split not in ("m", "n") or plan.flow not in ("outer", "dot"):
        raise MachineError(
            f"split is {plan.split!r} and flow {plan.flow!r}; split is 'm' or 'n', flow 'outer' "
            "or 'dot'."
        )
    if plan.dot and gemm.form != "nt":
        raise MachineError(
            f"flow 'dot' needs both operands contiguous along K, but the form is {gemm.form!r}; "
            "use it with form 'nt'."
        )
    width = micro_width(plan, gemm, accelerator)
    for name, value, unit in (
        ("m_a", plan.m_a, plan.m),
        ("m_s", plan.m_s, plan.m),
        ("n_a", plan.n_a, width),
    ):
        if value % unit:
            raise MachineError(
                f"{name} is {value}, not a multiple of the micro-kernel's {unit}; "
                f"use {ceil_div(value, unit) * unit}."
            )
    for inner, outer in (("k_a", "k_g"), ("m_s", "m_a")):
        if getattr(plan, inner) > getattr(plan, outer):
            raise MachineError(
                f"{inner} is {getattr(plan, inner)}, more than {outer}, which is "
                f"{getattr(plan, outer)}; lower it."
            )
