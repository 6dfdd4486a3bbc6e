"""Random keys: makes each rank and microbatch draw its own numbers.

`microbatch_key` leaves a primitive in the trace of the loss. Outside a compiled step it folds 0 into the key. In one it
folds in the **part** of the batch that is at hand: `r * microbatches + i` for rank r and microbatch i, the place of its
rows in the batch. The parts reach the loss as one more operand that the prologue makes; nothing else of the
step needs to know of them.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from ratrain_jax import compat
from ratrain_jax.errors import OptionError, RandomKeyWarning, UnsupportedError
from ratrain_jax.lowering.graph import Eqn, Graph, Var, inline, is_var, needed
from ratrain_jax.lowering.labels import UNKNOWN, origin
from ratrain_jax.lowering.opening import emit, rename

Tree = TypeVar("Tree")

DRAWS = frozenset({"random_bits", "random_gamma", "rng_bit_generator", "rng_uniform"})
"""Primitives that draw random numbers."""


def _fold(keys: Any, part: Any) -> Any:
    """Folds a number into each key of an array of keys; raw keys have one more axis."""

    def fold(key: Any) -> Any:
        return jax.random.fold_in(key, part)

    for _ in range(keys.ndim - (not compat.is_extended(keys.dtype))):
        fold = jax.vmap(fold)
    return fold(keys)


def _outside(keys: Any) -> Any:
    return _fold(keys, 0)


def _jvp(primals: Any, _: Any) -> tuple[Any, Any]:
    out = microbatch_key_p.bind(*primals)
    return out, ad.Zero(jax.typeof(out).to_tangent_aval())


def _batch(args: Any, dims: Any) -> tuple[Any, Any]:
    return microbatch_key_p.bind(jnp.moveaxis(args[0], dims[0], 0)), 0


microbatch_key_p = jex.Primitive("ratrain_microbatch_key")
microbatch_key_p.def_impl(_outside)
microbatch_key_p.def_abstract_eval(lambda keys: keys)
mlir.register_lowering(microbatch_key_p, mlir.lower_fun(_outside, multiple_results=False))
ad.primitive_jvps[microbatch_key_p] = _jvp
batching.primitive_batchers[microbatch_key_p] = _batch


def microbatch_key(key: Tree) -> Tree:
    """Makes a random key that differs between data-parallel ranks and microbatches.

    Call it inside the loss, on each key from which the loss draws (dropout, noise): a compiled step runs the loss for
    one microbatch at a time, and without this every one of them would draw the same numbers.
    Rank r and microbatch i get `jax.random.fold_in(key, r * microbatches + i)`; outside a compiled step, and in
    one that does not cut its batch, the key is `jax.random.fold_in(key, 0)`.
    It is the same for any number of stages, and recomputed activations draw the same numbers again.

    Args:
        key: a key, typed (`jax.random.key`) or raw (`jax.random.PRNGKey`), or a tree of them. Raw keys that are arguments
            of the step belong in one that `batch_argnums` leaves out, since they look like a batch.

    Returns:
        A key of the same type, or a tree of them.

    Raises:
        OptionError: a leaf is no key.

    Example:
        >>> import jax, ratrain_jax as rt
        >>> key = jax.random.key(0)
        >>> bool(rt.microbatch_key(key) == jax.random.fold_in(key, 0))
        True
    """

    def fold(leaf: Any) -> Any:
        aval = jax.typeof(leaf)
        if compat.is_extended(aval.dtype) and not aval.shape:
            return microbatch_key_p.bind(leaf)
        if aval.dtype == np.uint32 and len(aval.shape) == 1:
            return microbatch_key_p.bind(jnp.asarray(leaf))
        raise OptionError(
            f"microbatch_key takes a random key such as jax.random.key(0), got {aval.str_short()}."
        )

    return jax.tree.map(fold, key)


def fold_keys(loss: Graph, parts: int) -> tuple[Graph, Eqn | None]:
    """Writes out what `microbatch_key` left in a loss.

    Args:
        loss: the loss at the size of a microbatch.
        parts: data-parallel ranks × microbatches.

    Returns:
        The loss; if it needs them, with one more input: its row of the numbers of all parts, which the equation
        returned beside it makes.

    Raises:
        UnsupportedError: `microbatch_key` was called inside a loop, a branch or a custom rule.
    """
    if not any(eqn.primitive is microbatch_key_p for eqn in loss.eqns):
        refuse_folding(loss, "inside a loop, a branch or a custom rule")
        return loss, None
    (numbered,), _ = emit(lambda: lax.iota(np.uint32, parts), [])
    part = compat.new_var(numbered.outvars[0].aval.update(shape=(1,)))
    eqns: list[Eqn] = []
    for eqn in loss.eqns:
        if eqn.primitive is microbatch_key_p:
            eqns += _folded(eqn, part, parts)
        else:
            eqns.append(eqn)
    loss = dataclasses.replace(loss, eqns=tuple(eqns))
    refuse_folding(loss, "inside a loop, a branch or a custom rule")
    if parts == 1:
        return loss, None
    return dataclasses.replace(loss, invars=(*loss.invars, part)), numbered


def _folded(eqn: Eqn, part: Var, parts: int) -> list[Eqn]:
    """The equations that stand for one `microbatch_key`."""
    (key,), (out,) = eqn.invars, eqn.outvars
    shapes = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in (key, part)]
    fold = _fold if parts > 1 else (lambda keys, _: _outside(keys))
    flat = inline(jax.make_jaxpr(lambda keys, row: fold(keys, row[0]))(*shapes))
    made, (result,) = rename(compat.closed(flat.invars, flat.outvars, flat.eqns), [key, part], {})
    return [e.replace(outvars=[out if v is result else v for v in e.outvars]) for e in made]


def refuse_folding(graph: Graph, where: str) -> None:
    """Refuses equations, other than the loss itself, that call `microbatch_key` where no microbatch is at hand.

    Args:
        graph: the equations.
        where: where they stand, for the message.

    Raises:
        UnsupportedError: one does.
    """
    for eqn in graph.eqns:
        if eqn.primitive.name != LOSS_PRIMITIVE and _holds(eqn, {microbatch_key_p.name}):
            raise UnsupportedError(
                f"ratrain_jax.microbatch_key is called {where} ({origin(eqn)}). Call it inside the loss, on the key"
                " as it enters the loss."
            )


LOSS_PRIMITIVE = "ratrain_value_and_grad"


def _holds(eqn: Eqn, names: frozenset[str] | set[str]) -> bool:
    """Whether an equation is, or holds, one of some primitives."""
    if eqn.primitive.name in names:
        return True
    return any(_holds(e, names) for _, sub in compat.sub_jaxprs(eqn) for e in sub.jaxpr.eqns)


def warn_of_shared_keys(loss: Graph, split: Sequence[Var], parts: int) -> None:
    """Warns once if a loss draws from a key that is the same in every part of the batch.

    Args:
        loss: the loss at the size of a microbatch, with `microbatch_key` written out.
        split: its inputs that differ between parts.
        parts: how many parts there are.
    """
    if parts == 1:
        return
    varying = set(split)
    eqns = needed(loss.eqns, loss.outvars, loss.invars)[0]
    for eqn in eqns:
        if _holds(eqn, DRAWS) and varying.isdisjoint(filter(is_var, _keys(eqn) or eqn.invars)):
            warnings.warn(
                f"the loss draws random numbers from a key that is the same for every rank and microbatch"
                f" ({_place(eqn, eqns)}). Write `key = ratrain_jax.microbatch_key(key)` inside the loss.",
                RandomKeyWarning,
                stacklevel=2,
            )
            return
        if not varying.isdisjoint(filter(is_var, eqn.invars)):
            varying.update(eqn.outvars)


def _place(draw: Eqn, eqns: Sequence[Eqn]) -> str:
    """Where numbers are drawn: JAX draws in code of its own, so perhaps where their key is made, or where they are read."""
    before = eqns[: eqns.index(draw)]
    made = set(draw.outvars)
    after = []
    for eqn in eqns[len(before) + 1 :]:
        if not made.isdisjoint(filter(is_var, eqn.invars)):
            made.update(eqn.outvars)
            after.append(eqn)
    near = [draw, *reversed(needed(before, _keys(draw))[0]), *after]
    return next((place for place in map(origin, near) if place != UNKNOWN), UNKNOWN)


def _keys(eqn: Eqn) -> list[Any]:
    """The inputs of an equation that are, or may be, random keys."""
    return [
        atom
        for atom in eqn.invars
        if compat.is_extended(atom.aval.dtype)
        or (atom.aval.dtype == np.uint32 and len(atom.aval.shape) > 0)
    ]
