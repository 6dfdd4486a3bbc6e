"""Kernels as single equations of a jaxpr.

What a kernel computes on the CPU is a page of XLA code, of which nobody could tell any more that it was one product or
one attention. So each kernel is a primitive: a compiler that reads the jaxpr sees one equation, its operands in float16,
and in its parameters what was planned. It can be costed (`call_cost`), placed and kept apart from other code. XLA gets
the emulation.

Reverse-mode differentiation never meets the primitives: custom rules around them say which kernels make the gradients.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from ratrain_jax.kernels.cost import KernelCost
from ratrain_jax.kernels.machine import Machine


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """What is known of a kernel primitive.

    Attributes:
      kind: What it is called in reports, such as "product".
      results: Types of its operands, its `spec` → shapes and dtypes of its results. Asked whenever
        it is traced, which is why the emulation is not.
      problem: Shapes of its operands, its `spec` → what there is to plan, as hashable dataclasses
        and numbers; all that the three below depend on.
      flops: The problem → operations that the mathematics asks for.
      cost: The problem, a machine → its cost.
      seconds: The problem, a machine → the seconds of its cost alone, which are found sooner.
    """

    kind: str
    results: Callable[[Sequence[Any], Any], list[tuple[tuple[int, ...], Any]]]
    problem: Callable[[Sequence[tuple[int, ...]], Any], Any]
    flops: Callable[[Any], int]
    cost: Callable[[Any, Machine], KernelCost]
    seconds: Callable[[Any, Machine], float]


KERNELS: dict[str, Kernel] = {}
"""All kernel primitives, by name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A kernel with what it is asked to do.

    Attributes:
      name: The kernel's name.
      problem: See `Kernel`.
    """

    name: str
    problem: Any

    def cost(self, machine: Machine) -> KernelCost:
        """What it costs on a machine with an accelerator."""
        return KERNELS[self.name].cost(self.problem, machine)

    def seconds(self, machine: Machine) -> float:
        """How long it takes there."""
        return KERNELS[self.name].seconds(self.problem, machine)


def define(name: str, run: Callable[..., Sequence[jax.Array]], kernel: Kernel) -> jex.Primitive:
    """Makes a primitive that computes `run`.

    Args:
      name: The primitive's name.
      run: Takes arrays and, by keyword, a hashable `spec`; returns a sequence of arrays.
      kernel: What is known of it.

    Returns:
      The primitive; its results are several.
    """
    primitive = jex.Primitive(name)
    primitive.multiple_results = True
    # A jit of its own keeps equal kernels of one program one function.
    shared = jax.jit(run, static_argnames="spec")

    def types(*avals: Any, spec: Any) -> list[Any]:
        return [jax.core.ShapedArray(*one) for one in kernel.results(avals, spec)]

    def batch(args: Any, dims: Any, *, spec: Any) -> tuple[Any, Any]:
        results = jax.vmap(lambda *xs: shared(*xs, spec=spec), in_axes=tuple(dims))(*args)
        return results, [0] * len(results)

    def jvp(primals: Any, tangents: Any, *, spec: Any) -> tuple[Any, Any]:
        dense = tuple(ad.instantiate_zeros(tangent) for tangent in tangents)
        return jax.jvp(lambda *xs: list(run(*xs, spec=spec)), tuple(primals), dense)

    primitive.def_impl(lambda *args, spec: list(shared(*args, spec=spec)))
    primitive.def_abstract_eval(types)
    mlir.register_lowering(
        primitive,
        mlir.lower_fun(lambda *args, spec: list(shared(*args, spec=spec)), multiple_results=True),
    )
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    KERNELS[name] = kernel
    return primitive


def call_cost(eqn: Any, machine: Machine) -> KernelCost | None:
    """What an equation costs if it is a kernel.

    Args:
      eqn: Any equation of a jaxpr.
      machine: A machine with an accelerator.

    Returns:
      The cost, or None if the equation is no kernel.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from ratrain_jax.kernels import load_machine
      >>> from ratrain_jax.kernels.dot_general import Arithmetic, product_p, ProductSpec
      >>> spec = ProductSpec(Arithmetic.of("mt3000", "fp32", "fast"), "nn", "float16")
      >>> x = jnp.ones((1, 64, 64), jnp.float16)
      >>> jaxpr = jax.make_jaxpr(lambda a, b: product_p.bind(a, b, spec=spec))(x, x)
      >>> call_cost(jaxpr.eqns[0], load_machine("mt3000")).flops
      524288
    """
    call = call_of(eqn)
    return None if call is None else call.cost(machine)


def call_of(eqn: Any) -> Call | None:
    """The call that an equation is; None if it is no kernel."""
    kernel = KERNELS.get(eqn.primitive.name)
    if kernel is None:
        return None
    shapes = [tuple(atom.aval.shape) for atom in eqn.invars]
    return Call(eqn.primitive.name, kernel.problem(shapes, eqn.params["spec"]))


def call_flops(eqn: Any) -> int:
    """Operations that the mathematics of a kernel's equation asks for."""
    call = call_of(eqn)
    assert call is not None
    return KERNELS[call.name].flops(call.problem)
