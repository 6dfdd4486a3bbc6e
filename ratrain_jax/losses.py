"""`value_and_grad` and `grad`: JAX's own, except that a compiled train step finds the loss through them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ratrain_jax import compat
from ratrain_jax.errors import LossError
from ratrain_jax.lowering.graph import inline
from ratrain_jax.lowering.regions import loss_region_p, refused_loss_p

_WITHOUT_EFFECT = "Remove it, or return the value as a scalar with has_aux=True."


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """A drop-in for `jax.value_and_grad`; the one line to change in a train step.

    In a step decorated with `train_step` the loss is captured whole and runs as a pipeline. Anywhere else it
    is `jax.value_and_grad`. In a compiled step the loss is taken to be a mean over the batch's examples.

    Args:
        fun: the loss; returns a scalar, or `(scalar, aux)` with `has_aux`.
        argnums: the argument, or arguments, to differentiate by.
        has_aux: whether `fun` returns auxiliary values too.

    Returns:
        A function with the arguments of `fun` that returns `(value, gradients)`.

    Raises:
        LossError: the loss is no real scalar; a `TypeError`, like JAX's.
        TypeError: as `jax.value_and_grad` does: an argument is not differentiable.

    Example:
        >>> import ratrain_jax as rt
        >>> value, grad = rt.value_and_grad(lambda x: x * x)(3.0)
        >>> float(value), float(grad)
        (9.0, 6.0)
    """
    plain = jax.value_and_grad(_checked(fun, has_aux), argnums=argnums, has_aux=has_aux)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        wanted = [args[n] for n in numbers]
        leaves, tree = jax.tree.flatten(wanted)
        if not any(compat.is_tracer(leaf) for leaf in leaves):
            return plain(*args, **kwargs)
        # JAX's own checks of the loss and its arguments, with JAX's own messages.
        (_, grads_shape) = jax.eval_shape(
            lambda chosen: plain(*_with(args, numbers, chosen), **kwargs), wanted
        )

        def flat_loss(*flat: Any) -> Any:
            out = fun(*_with(args, numbers, tree.unflatten(flat)), **kwargs)
            return out if has_aux else (out, ())

        closed, shape = jax.make_jaxpr(flat_loss, return_shape=True)(*leaves)
        if closed.effects:
            names = [f"`{eqn.primitive.name}`" for eqn in inline(closed).eqns if eqn.effects]
            how = (
                f"the loss has a side effect: {', '.join(dict.fromkeys(names))}. {_WITHOUT_EFFECT}"
            )
            marked = tree.unflatten(refused_loss_p.bind(*leaves, how=how))
            return plain(*_with(args, numbers, marked), **kwargs)
        aux_tree = jax.tree.structure(shape[1])
        hoisted = compat.closed(
            [*closed.jaxpr.constvars, *closed.jaxpr.invars], closed.jaxpr.outvars, closed.jaxpr.eqns
        )
        count = len(closed.consts)
        results = loss_region_p.bind(
            *closed.consts,
            *leaves,
            loss=hoisted,
            paths=_paths(wanted[0] if isinstance(argnums, int) else wanted),
            diff=tuple(range(count, count + len(leaves))),
        )
        value, aux = results[0], aux_tree.unflatten(results[1 : 1 + aux_tree.num_leaves])
        grads = jax.tree.structure(grads_shape).unflatten(results[1 + aux_tree.num_leaves :])
        return ((value, aux) if has_aux else value), grads

    return wrapped


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """A drop-in for `jax.grad`, as `value_and_grad` is one for `jax.value_and_grad`.

    Args:
        fun: the loss.
        argnums: the argument, or arguments, to differentiate by.
        has_aux: whether `fun` returns auxiliary values too.

    Returns:
        A function that returns the gradients, or `(gradients, aux)`.

    Example:
        >>> import ratrain_jax as rt
        >>> float(rt.grad(lambda x: x * x)(3.0))
        6.0
    """
    both = value_and_grad(fun, argnums, has_aux)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapped


def _checked(fun: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """The loss, checked to be a real scalar when it is traced."""

    @functools.wraps(fun)
    def checked(*args: Any, **kwargs: Any) -> Any:
        out = fun(*args, **kwargs)
        for leaf in jax.tree.leaves(out[0] if has_aux else out):
            aval = jax.typeof(leaf)
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


def _with(args: Sequence[Any], numbers: Sequence[int], chosen: Sequence[Any]) -> list[Any]:
    """The arguments with the differentiated ones replaced."""
    full = list(args)
    for number, value in zip(numbers, chosen, strict=True):
        full[number] = value
    return full


def _paths(tree: Any) -> tuple[tuple[str, ...], ...]:
    """The path of each leaf, key by key."""
    return tuple(
        tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    )
