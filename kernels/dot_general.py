"""`lax.dot_general` through the planned kernels, differentiable through the same kernels.

Operands of any batch and contracting axes are brought to (batch, M, K) and (batch, K, N). Where the
axes lay before says which form of product it is: a right operand whose contracting axes come last
is "nt", a left operand whose contracting axes come first is "tn". Both backward products go the
same way: dA = G·Bᵀ in form "nt", dB = Aᵀ·G in form "tn".

Operands are cast to float16. Results have the dtype that `lax.dot_general` would give them; where
it is wider than float16, the accumulator's float32 value is kept.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ratrain_jax.errors import OptionError
from ratrain_jax.kernels.cost import KernelCost, cost_gemm, gemm_seconds, repeated
from ratrain_jax.kernels.gemm_plan import plan_for
from ratrain_jax.kernels.machine import Machine
from ratrain_jax.kernels.machine_file import machine_of
from ratrain_jax.kernels.numerics import MODES, product
from ratrain_jax.kernels.primitives import Kernel, define
from ratrain_jax.kernels.tiles import Gemm, accelerator_of

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Arithmetic:
    """How products are planned and computed.

    Attributes:
      machine: The machine that plans are made for.
      accumulator: "fp32", "fp16" or "promote".
      mode: "exact" or "fast".
    """

    machine: Machine
    accumulator: str
    mode: str

    @classmethod
    def of(cls, machine: str | Machine, accumulator: str | None, mode: str) -> "Arithmetic":
        """Returns checked arithmetic; without an accumulator, the machine's own."""
        found = machine_of(machine)
        if mode not in MODES:
            raise OptionError(f"mode is {mode!r}; use 'exact' or 'fast'.")
        return cls(found, accumulator or accelerator_of(found).accumulator, mode)

    def __repr__(self) -> str:
        # Stands in jaxprs, and so in fingerprints: all that machine says, in a few letters.
        digest = hashlib.sha256(repr(dataclasses.astuple(self.machine)).encode()).hexdigest()[:8]
        return f"<{self.machine.name}#{digest} {self.accumulator} {self.mode}>"


@dataclasses.dataclass(frozen=True, slots=True)
class _Axes:
    """Axes of both operands by role, and the form that their order makes."""

    batch: tuple[tuple[int, ...], tuple[int, ...]]
    contract: tuple[tuple[int, ...], tuple[int, ...]]
    free: tuple[tuple[int, ...], tuple[int, ...]]
    form: str


def vmac_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    *,
    machine: str | Machine = "mt3000",
    accumulator: str | None = None,
    mode: str = "fast",
) -> jax.Array:
    """Multiplies like `jax.lax.dot_general`, by the float16 kernels of an accelerator.

    Args:
      lhs: The left operand, of a floating dtype.
      rhs: The right operand, of a floating dtype.
      dimension_numbers: As in `jax.lax.dot_general`.
      precision: Taken for the sake of the signature; the accumulator says what is computed.
      preferred_element_type: Dtype of the result; the operands' common one unless given.
      out_sharding: Only None is taken.
      machine: The machine that plans are made for: one, or the name of a built-in one.
      accumulator: "fp32", "fp16" or "promote"; the machine's own unless given.
      mode: "exact" for the machine's bits, "fast" for XLA's dots block by block.

    Returns:
      The product, with axes in the order of `jax.lax.dot_general`.

    Raises:
      OptionError: If an operand is not floating, or an option is unknown.
      MachineError: If the machine cannot be planned for.

    Example:
      >>> import jax.numpy as jnp
      >>> x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
      >>> vmac_dot_general(x, w, (((1,), (0,)), ((), ())))[0, 0].item()
      3.0
    """
    del precision
    if out_sharding is not None:
        raise OptionError("vmac_dot_general takes no out_sharding; leave it None.")
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise OptionError(
                f"{name} of vmac_dot_general is {x.dtype}; use lax.dot_general for it."
            )
    arithmetic = Arithmetic.of(machine, accumulator, mode)
    axes = _axes(lhs.ndim, rhs.ndim, dimension_numbers)
    out = jnp.dtype(preferred_element_type or jnp.result_type(lhs.dtype, rhs.dtype))
    a = _canonical(lhs, (axes.batch[0], axes.free[0], axes.contract[0]))
    b = _canonical(rhs, (axes.batch[1], axes.contract[1], axes.free[1]))
    shape = [lhs.shape[axis] for axis in (*axes.batch[0], *axes.free[0])]
    shape += [rhs.shape[axis] for axis in axes.free[1]]
    return matmul(a, b, arithmetic, axes.form, out).reshape(shape)


def gemm_of(
    lhs_shape: Sequence[int],
    rhs_shape: Sequence[int],
    dimension_numbers: DimensionNumbers,
    *,
    accumulator: str = "fp32",
    out_dtype: str = "",
) -> tuple[Gemm, int]:
    """Returns the product that a `dot_general` of these shapes is, and how many there are of it.

    Example:
      >>> gemm_of((8, 16, 32), (8, 32, 64), (((2,), (1,)), ((0,), (0,))))[0].depth
      32
    """
    axes = _axes(len(lhs_shape), len(rhs_shape), dimension_numbers)
    count, rows, depth = (
        math.prod(lhs_shape[axis] for axis in group)
        for group in (axes.batch[0], axes.free[0], axes.contract[0])
    )
    cols = math.prod(rhs_shape[axis] for axis in axes.free[1])
    gemm = Gemm(rows, cols, depth, "float16", axes.form, accumulator, out_dtype)
    return gemm, count


def _axes(lhs_rank: int, rhs_rank: int, numbers: DimensionNumbers) -> _Axes:
    contract = tuple(tuple(int(axis) for axis in side) for side in numbers[0])
    batch = tuple(tuple(int(axis) for axis in side) for side in numbers[1])
    free = tuple(
        tuple(axis for axis in range(rank) if axis not in (*contract[side], *batch[side]))
        for side, rank in enumerate((lhs_rank, rhs_rank))
    )
    form = "nn"
    if free[0] and contract[0] and max(contract[0]) < min(free[0]):
        form = "tn"
    if free[1] and contract[1] and min(contract[1]) > max(free[1]):
        form = "nt"
    return _Axes((batch[0], batch[1]), (contract[0], contract[1]), (free[0], free[1]), form)


def _canonical(x: jax.Array, groups: tuple[tuple[int, ...], ...]) -> jax.Array:
    """Transposes and reshapes to one axis a group."""
    sizes = [math.prod(x.shape[axis] for axis in group) for group in groups]
    return x.transpose([axis for group in groups for axis in group]).reshape(sizes)


def matmul(
    a: jax.Array, b: jax.Array, arithmetic: Arithmetic, form: str = "nn", out: Any = jnp.float16
) -> jax.Array:
    """Multiplies (batch, M, K) by (batch, K, N); `form` says how they lie in memory.

    Args:
      a: The left operand.
      b: The right operand.
      arithmetic: How to plan and compute.
      form: "nn", "nt" or "tn".
      out: Dtype of the result.

    Returns:
      The product, (batch, M, N).
    """
    spec = _Spec(arithmetic, form, str(a.dtype), str(b.dtype), str(jnp.dtype(out)))
    return _matmul(a, b, spec)


@dataclasses.dataclass(frozen=True, slots=True)
class _Spec:
    arithmetic: Arithmetic
    form: str
    left: str
    right: str
    out: str


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(a: jax.Array, b: jax.Array, spec: _Spec) -> jax.Array:
    return _compute(a, b, spec)


@dataclasses.dataclass(frozen=True, slots=True)
class ProductSpec:
    """What one product fixes before its operands.

    Attributes:
      arithmetic: How to plan and compute.
      form: "nn", "nt" or "tn".
      stored: Dtype in which C is stored: float16 or float32.
    """

    arithmetic: Arithmetic
    form: str
    stored: str


def _gemm(left: Sequence[int], right: Sequence[int], spec: ProductSpec) -> Gemm:
    return Gemm(
        left[1],
        right[2],
        left[2],
        form=spec.form,
        accumulator=spec.arithmetic.accumulator,
        out_dtype=spec.stored,
    )


def _product(a: jax.Array, b: jax.Array, *, spec: ProductSpec) -> tuple[jax.Array]:
    """The planned product of float16 (batch, M, K) and (batch, K, N)."""
    gemm = _gemm(a.shape, b.shape, spec)
    machine = spec.arithmetic.machine
    lanes = accelerator_of(machine).lanes(gemm.bytes)
    return (product(a, b, gemm, plan_for(gemm, machine), spec.arithmetic.mode, lanes),)


def _product_type(avals: Sequence[Any], spec: ProductSpec) -> list[tuple[tuple[int, ...], Any]]:
    left, right = (aval.shape for aval in avals)
    return [((left[0], left[1], right[2]), jnp.dtype(spec.stored))]


def _products(shapes: Sequence[tuple[int, ...]], spec: ProductSpec) -> tuple[Gemm, int]:
    """The product, and how many there are of it."""
    return _gemm(shapes[0], shapes[1], spec), shapes[0][0]


def _product_cost(problem: tuple[Gemm, int], machine: Machine) -> KernelCost:
    gemm, count = problem
    return repeated(cost_gemm(gemm, machine), count)


def _product_seconds(problem: tuple[Gemm, int], machine: Machine) -> float:
    gemm, count = problem
    return count * gemm_seconds(gemm, machine)


def _product_flops(problem: tuple[Gemm, int]) -> int:
    gemm, count = problem
    return count * gemm.flops


product_p = define(
    "vmac_product",
    _product,
    Kernel("product", _product_type, _products, _product_flops, _product_cost, _product_seconds),
)


def _compute(a: jax.Array, b: jax.Array, spec: _Spec) -> jax.Array:
    if 0 in (*a.shape, *b.shape):
        return jnp.zeros((a.shape[0], a.shape[1], b.shape[2]), spec.out)
    stored = "float16" if spec.out == "float16" else "float32"
    planned = ProductSpec(spec.arithmetic, spec.form, stored)
    half = jnp.float16
    return product_p.bind(a.astype(half), b.astype(half), spec=planned)[0].astype(spec.out)


def _forward(
    a: jax.Array, b: jax.Array, spec: _Spec
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # The backward products want float16 anyway: keep half the bytes.
    kept = a.astype(jnp.float16), b.astype(jnp.float16)
    return _matmul(*kept, dataclasses.replace(spec, left="float16", right="float16")), kept


def _backward(
    spec: _Spec, kept: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    a, b = kept
    grad = grad.astype(jnp.float16)
    left = matmul(grad, jnp.swapaxes(b, 1, 2), spec.arithmetic, "nt", spec.left)
    right = matmul(jnp.swapaxes(a, 1, 2), grad, spec.arithmetic, "tn", spec.right)
    return left, right


_matmul.defvjp(_forward, _backward)
