"""`value_and_grad` and `grad`: JAX's own, except that a compiled train step finds the loss through them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from ratrain_jax import compat
from ratrain_jax.errors import LossError, OptionError
from ratrain_jax.lowering.graph import inline
from ratrain_jax.lowering.regions import Paths, loss_region_p, refused_loss_p
from ratrain_jax.lowering.results import REDUCTIONS, ratio, weight_moves

_WITHOUT_EFFECT = "Remove it, or return the value with has_aux=True."
_WEIGHT_MOVES = (
    "the weight that the loss returns depends on what the loss is differentiated by. Compute it from the batch"
    " alone, or pass it through jax.lax.stop_gradient."
)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    reduction: str = "mean",
) -> Callable[..., Any]:
    """A drop-in for `jax.value_and_grad`; the one line to change in a train step.

    In a step decorated with `train_step` the loss is captured whole and runs as a pipeline, for one microbatch of
    each data-parallel rank at a time. Anywhere else it is `jax.value_and_grad`.

    How the parts are put together again is said by `reduction`, for the loss and its gradients:

    - `"mean"`: the loss is a mean over examples, all of the same weight; the parts are averaged.
    - `"sum"`: it is a sum over examples; the parts are added.
    - `"weighted"`: `fun` returns `(sum, weight)` in place of a scalar, and the loss is all sums over all weights: right
      for a mean over tokens of which some are masked, a different number in each part. The weight must not depend on the
      parameters. Anywhere else the loss is `sum / weight`. No update can begin before all weights are known.

    Auxiliary values may be any tree of arrays. If axis 0 grows with the batch, the parts are put one behind another
    in the order of the batch; other floats (a mean, batch statistics) are averaged, integers (counts) added. Typed random
    keys are those of the first part. What does not depend on the batch (a step, a batch size) stays as it is.

    Args:
        fun: the loss; returns a scalar, or `(scalar, aux)` with `has_aux`.
        argnums: the argument, or arguments, to differentiate by.
        has_aux: whether `fun` returns auxiliary values too.
        reduction: `"mean"`, `"sum"` or `"weighted"`.

    Returns:
        A function with the arguments of `fun` that returns `(value, gradients)`.

    Raises:
        OptionError: an unknown reduction.
        LossError: the loss, or its weight, is no real scalar; a `TypeError`, like JAX's.
        TypeError: as `jax.value_and_grad` does: an argument is not differentiable.

    Example:
        >>> import ratrain_jax as rt
        >>> value, grad = rt.value_and_grad(lambda x: x * x)(3.0)
        >>> float(value), float(grad)
        (9.0, 6.0)
        >>> def masked(w, x, mask):
        ...     return (w * x * mask).sum(), mask.sum()
        >>> import jax.numpy as jnp
        >>> both = rt.value_and_grad(masked, reduction="weighted")
        >>> value, grad = both(2.0, jnp.array([1.0, 3.0, 5.0]), jnp.array([1, 1, 0]))
        >>> float(value), float(grad)
        (4.0, 2.0)
    """
    if reduction not in REDUCTIONS:
        choices = ", ".join(map(repr, REDUCTIONS))
        raise OptionError(f"reduction={reduction!r} is not known; choose one of {choices}.")
    weighted = reduction == "weighted"
    plain_loss = _divided(fun, has_aux) if weighted else fun
    plain = jax.value_and_grad(_checked(plain_loss, has_aux), argnums=argnums, has_aux=has_aux)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        several = isinstance(argnums, Sequence)
        given = list(argnums) if isinstance(argnums, Sequence) else [argnums]
        numbers = [operator.index(n) for n in given]
        if not all(-len(args) <= n < len(args) for n in numbers):
            return plain(*args, **kwargs)  # for JAX's own message
        wanted = [args[n] for n in numbers]
        leaves, tree = jax.tree.flatten(wanted)
        if not any(compat.is_tracer(leaf) for leaf in leaves):
            return plain(*args, **kwargs)
        # JAX's own checks of the arguments, with JAX's own messages, but without a trace of the loss.
        constant = jax.value_and_grad(lambda *_: jnp.zeros(()), argnums=argnums)
        _, grads_shape = jax.eval_shape(
            lambda chosen: constant(*_with(args, numbers, chosen)), wanted
        )

        def flat_loss(*flat: Any) -> Any:
            full = _with(args, numbers, tree.unflatten(flat))
            out = fun(*full, **kwargs)
            if has_aux and not _is_pair(out):
                return plain(*full, **kwargs)  # for JAX's own message
            loss = _divided(lambda: out, has_aux) if weighted else lambda: out
            _checked(loss, has_aux)()
            return tuple(out) if has_aux else (out, ())

        def refused(how: str) -> Any:
            """As outside a step; a step that holds it is told why it cannot be captured."""
            marked = tree.unflatten(refused_loss_p.bind(*leaves, how=how))
            return plain(*_with(args, numbers, marked), **kwargs)

        closed, shape = jax.make_jaxpr(flat_loss, return_shape=True)(*leaves)
        if closed.effects:
            names = [f"`{eqn.primitive.name}`" for eqn in inline(closed).eqns if eqn.effects]
            listed = ", ".join(dict.fromkeys(names))
            return refused(f"the loss has a side effect: {listed}. {_WITHOUT_EFFECT}")
        if weighted and weight_moves(closed, range(len(leaves))):
            return refused(_WEIGHT_MOVES)
        aux_tree = jax.tree.structure(shape[1])
        paths = key_paths(wanted if several else wanted[0])
        results = bind_region(closed, leaves, paths, reduction)
        value, aux = results[0], aux_tree.unflatten(results[1 : 1 + aux_tree.num_leaves])
        grads = jax.tree.structure(grads_shape).unflatten(results[1 + aux_tree.num_leaves :])
        return ((value, aux) if has_aux else value), grads

    return wrapped


def bind_region(
    closed: jex.ClosedJaxpr, leaves: Sequence[Any], paths: Paths, reduction: str
) -> list[Any]:
    """Leaves the equation that a lowering takes as the loss of a step.

    Args:
        closed: the loss as a function of `leaves`; its constants may be tracers.
        leaves: what it is differentiated by.
        paths: the path of each leaf.
        reduction: how its parts are put together; `"none"` if it is no loss, but what a step evaluates.

    Returns:
        The results of `closed`, joined, and the gradient by each leaf.
    """
    jaxpr, count = closed.jaxpr, len(closed.consts)
    return loss_region_p.bind(
        *closed.consts,
        *leaves,
        loss=compat.closed([*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns),
        paths=paths,
        diff=tuple(range(count, count + len(leaves))),
        held=(),
        reduction=reduction,
    )


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    reduction: str = "mean",
) -> Callable[..., Any]:
    """A drop-in for `jax.grad`, as `value_and_grad` is one for `jax.value_and_grad`.

    Args:
        fun: the loss.
        argnums: the argument, or arguments, to differentiate by.
        has_aux: whether `fun` returns auxiliary values too.
        reduction: as for `value_and_grad`.

    Returns:
        A function that returns the gradients, or `(gradients, aux)`.

    Example:
        >>> import ratrain_jax as rt
        >>> float(rt.grad(lambda x: x * x)(3.0))
        6.0
    """
    both = value_and_grad(fun, argnums, has_aux, reduction=reduction)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapped


def _checked(fun: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """The loss, checked to be a real scalar when it is traced."""

    @functools.wraps(fun)
    def checked(*args: Any, **kwargs: Any) -> Any:
        out = fun(*args, **kwargs)
        if has_aux and not _is_pair(out):
            return out  # JAX refuses it
        loss = out[0] if has_aux else out
        if not jax.tree_util.all_leaves([loss]):
            remedy = (
                "(loss, aux), the loss a scalar"
                if has_aux
                else "it alone, or (loss, aux) with has_aux=True"
            )
            raise LossError(
                f"the loss is a {type(loss).__name__}, but only a scalar can be differentiated. Return {remedy}."
            )
        aval = jax.typeof(loss)
        if aval.shape:
            raise LossError(
                f"the loss has shape {aval.shape}, but only a scalar can be differentiated."
                " Take the mean over its examples."
            )
        if not jax.numpy.issubdtype(aval.dtype, jax.numpy.floating):
            raise LossError(
                f"the loss is of dtype {aval.dtype}, which cannot be differentiated."
                " Compute it in a float type."
            )
        return out

    return checked


def _is_pair(out: Any) -> bool:
    """Whether JAX takes it for a value and what comes with it."""
    return isinstance(out, (tuple, list)) and len(out) == 2


def _divided(fun: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """A weighted loss as one scalar: its sum over its weight."""

    @functools.wraps(fun)
    def divided(*args: Any, **kwargs: Any) -> Any:
        out = fun(*args, **kwargs)
        pair = out[0] if has_aux and _is_pair(out) else out
        if not isinstance(pair, tuple) or len(pair) != 2:
            form = "((sum, weight), aux)" if has_aux else "(sum, weight)"
            raise LossError(
                f'with reduction="weighted" the loss must return {form}, but it returned'
                f" {jax.tree.structure(out)}."
            )
        total, weight = map(jnp.asarray, pair)
        if weight.shape or not jnp.issubdtype(weight.dtype, jnp.number) or _complex(weight):
            raise LossError(
                f"the weight of the loss is {jax.typeof(weight).str_short()}, but it must be a real scalar:"
                " the sum of the weights of the examples."
            )
        real = not total.shape and jnp.issubdtype(total.dtype, jnp.floating)
        value = ratio(total, weight) if real else total  # which is refused as any other loss is
        return (value, out[1]) if has_aux else value

    return divided


def _complex(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.complexfloating)


def _with(args: Sequence[Any], numbers: Sequence[int], chosen: Sequence[Any]) -> list[Any]:
    """The arguments with the differentiated ones replaced."""
    full = list(args)
    for number, value in zip(numbers, chosen, strict=True):
        full[number] = value
    return full


def key_paths(tree: Any) -> tuple[tuple[str, ...], ...]:
    """The path of each leaf, key by key."""
    return tuple(
        tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    )
