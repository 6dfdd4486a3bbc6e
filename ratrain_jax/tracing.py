"""Traces a train step twice: with the global batch, and with one rank's microbatch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ratrain_jax import compat
from ratrain_jax.errors import BatchError, OptionError, StepError, UnsupportedError
from ratrain_jax.losses import key_paths
from ratrain_jax.lowering.collector import collector_paused
from ratrain_jax.lowering.graph import inline
from ratrain_jax.lowering.lower import Trace
from ratrain_jax.lowering.placements import without_placements
from ratrain_jax.lowering.regions import find_loss, rows_per_microbatch
from ratrain_jax.options import Options
from ratrain_jax.stacked_leaf import StackedLeaf, is_stacked_leaf


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Signature:
    """The trees and types of a step's arguments and results.

    Attributes:
        state: tree of the state.
        batch: tree of the other arguments.
        result: tree of the results.
        avals: types of all flat inputs, the state's first.
        names: the path of each flat input.
        has_state: whether the step returns a new state.
        read: which leaves of the state the program takes; None for all.
    """

    state: Any
    batch: Any
    result: Any
    avals: tuple[jax.ShapeDtypeStruct, ...]
    names: tuple[str, ...]
    has_state: bool
    read: tuple[int, ...] | None = None

    @property
    def states(self) -> int:
        """How many leaves the state has."""
        return self.state.num_leaves

    def __repr__(self) -> str:
        others = len(self.avals) - self.states
        return f"<Signature: {self.states} leaves of the state, {others} others>"


def abstract(tree: Any) -> Any:
    """The types of a tree's leaves."""
    return jax.tree.map(_leaf_type, tree, is_leaf=is_stacked_leaf)


def _leaf_type(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, (jax.ShapeDtypeStruct, StackedLeaf)):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    try:
        aval = jax.typeof(leaf)
    except TypeError as error:
        raise UnsupportedError(
            f"a leaf of type {type(leaf).__name__} is no array: {leaf!r}."
            " Make it part of the tree's structure, or close over it."
        ) from error
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


@collector_paused()
def trace_step(
    step: Callable[..., Any], args: Sequence[Any], options: Options
) -> tuple[Trace, Signature]:
    """Traces a step.

    Args:
        step: the undecorated step.
        args: its arguments, or their types; the first is the state.
        options: the parts that the batch is cut into, and which arguments are batch.

    Raises:
        StepError: the step has no arguments or its microbatch-sized trace fails.
        BatchError: the batch does not divide.
        OptionError: batch_argnums name other arguments.
    """
    if not args:
        raise StepError("a train step takes the state as its first argument, but none was given.")
    state, *rest = (abstract(arg) for arg in args)
    small_rest = microbatch(rest, options)
    where = _where(step)
    whole, result = traced(step, state, *rest, where=where)
    parts = options.data_parallel * options.microbatches
    small = whole
    if parts > 1:
        try:
            small = trace_small(step, state, small_rest)
        except StepError as error:
            find_loss(inline(whole), where)  # what is wrong with the whole step matters more
            raise StepError(f"{error}{_suspect(state, rest, options)}") from error.__cause__
    state_leaves, state_tree = jax.tree.flatten(state)
    batch_leaves, batch_tree = jax.tree.flatten(tuple(rest))
    has_state = _returns_state(result, state)
    outputs = len(whole.out_avals)
    states = len(state_leaves)
    names = leaf_names((state, *rest))
    trace = Trace(
        whole=whole,
        small=small,
        names=tuple(names),
        states=states,
        state_out=tuple(range(states)) if has_state else (None,) * states,
        metrics_out=tuple(range(states if has_state else 0, outputs)),
        where=where,
        paths=key_paths(state),
    )
    signature = Signature(
        state=state_tree,
        batch=batch_tree,
        result=jax.tree.structure(result),
        avals=(*state_leaves, *batch_leaves),
        names=tuple(names),
        has_state=has_state,
    )
    return trace, signature


@compat.without_mesh()
def traced(step: Callable[..., Any], *args: Any, where: str = "") -> tuple[Any, Any]:
    """Traces a function; gives its jaxpr and the tree of its results' types.

    Args:
        step: the function.
        *args: types of its arguments.
        where: its name, file and line, for messages.

    Raises:
        UnsupportedError: it uses a mapped axis, a mesh, or maps a function over devices.
    """
    try:
        closed, shape = jax.make_jaxpr(step, return_shape=True)(*args)
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise UnsupportedError(
            f"the step{where} uses a mapped axis, as for jax.pmap: {str(error).split('. ')[0]}. Remove the collective: with"
            " data_parallel= losses and gradients are reduced over devices without one."
        ) from error
    except RuntimeError as error:
        if "mesh in context" not in str(error):
            raise
        raise UnsupportedError(
            f"the step{where} constrains a sharding by a PartitionSpec, and runs without the mesh of jax.set_mesh. Remove the"
            " constraint: each value lies where its stage is."
        ) from error
    return without_placements(closed, where), shape


def _suspect(state: Any, rest: Sequence[Any], options: Options) -> str:
    """What may be cut though it should not be, or should be and is not, for a message."""
    cut = {
        n: [leaf for leaf in jax.tree.leaves(rest[n - 1]) if _is_split(leaf)]
        for n in sorted(_batch_arguments(1 + len(rest), options.batch_argnums))
    }
    for n, leaves in cut.items():
        if found := _raw_key(leaves, f"argument {n}"):
            return found
    if len(cut) > 1:
        return (
            f" Arguments {', '.join(map(str, cut))} are all cut; if one is no batch (an optimizer's state, a key), leave it out"
            " of batch_argnums."
        )
    rows = {leaf.shape[0] for leaves in cut.values() for leaf in leaves}
    for name, leaf in zip(leaf_names((state,)), jax.tree.leaves(state), strict=True):
        if leaf.shape and leaf.shape[0] in rows:
            return (
                f" {name} has {leaf.shape[0]} rows like the batch, but no state is cut: if they are the batch's, make it an"
                " argument beside the batch, and an auxiliary result of the loss."
            )
    return ""


def _where(step: Callable[..., Any]) -> str:
    """The step's name, file and line, as far as it has them."""
    code = getattr(step, "__code__", None)
    name = f" {getattr(step, '__name__', '')}".rstrip()
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else name


def leaf_names(args: Sequence[Any]) -> list[str]:
    """The path of each flat argument: of the state, then of the batch."""
    state = args[0] if args else ()
    names = [f"state{path}" for path in _paths(state)]
    return names + [f"batch{path}" for path in _paths(_unwrap(args[1:]))]


def _unwrap(rest: Sequence[Any]) -> Any:
    return rest[0] if len(rest) == 1 else tuple(rest)


def _paths(tree: Any) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_stacked_leaf)
    return [jax.tree_util.keystr(path) for path, _ in leaves]


def _batch_arguments(count: int, batch_argnums: Sequence[int] | None) -> set[int]:
    """Which arguments are cut along axis 0."""
    if batch_argnums is None:
        return set(range(1, count))
    chosen = set(batch_argnums)
    if not chosen <= set(range(1, count)):
        raise OptionError(
            f"batch_argnums={tuple(batch_argnums)} must name arguments 1 to {count - 1};"
            " argument 0 is the state."
        )
    return chosen


def _resized(tree: Any, where: str, rows: Callable[[int], int]) -> Any:
    """An argument's types with another number of rows. Scalars and typed keys pass whole."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if _is_split(leaf)]
    sizes = sorted({leaf.shape[0] for leaf in leaves})
    if len(sizes) > 1:
        raise BatchError(
            f"the leaves of {where} disagree on axis 0: {', '.join(map(str, sizes))}. Put what is not cut by"
            " the batch into an argument of its own and leave that out of batch_argnums."
        )
    if not sizes:
        return tree
    try:
        count = rows(sizes[0])
    except BatchError as error:
        raise BatchError(f"{error}{_raw_key(leaves, where)}") from None
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype) if _is_split(leaf) else leaf
        ),
        tree,
    )


def _raw_key(leaves: Sequence[jax.ShapeDtypeStruct], where: str) -> str:
    """For a message, that an argument looks like a key of `jax.random.PRNGKey`."""
    if not any(leaf.shape == (2,) and leaf.dtype == "uint32" for leaf in leaves):
        return ""
    return (
        f" {where.capitalize()} looks like a raw random key: make it with jax.random.key, which is not cut, or leave the"
        " argument out of batch_argnums."
    )


def microbatch(rest: Sequence[Any], options: Options) -> list[Any]:
    """The types of one rank's microbatch.

    Args:
        rest: the types of all arguments but the state.
        options: the parts, and which arguments are cut.

    Raises:
        BatchError: the batch does not divide.
        OptionError: batch_argnums name other arguments.
    """
    return resized(
        rest,
        options.batch_argnums,
        lambda rows: rows_per_microbatch(rows, options.data_parallel, options.microbatches),
    )


def resized(
    rest: Sequence[Any], batch_argnums: Sequence[int] | None, rows: Callable[[int], int]
) -> list[Any]:
    """The types of a step's arguments but the state, with another number of rows in those that are cut.

    Args:
        rest: the types.
        batch_argnums: which arguments are cut; all unless given.
        rows: how many rows an argument of so many gets.

    Raises:
        BatchError: the leaves of an argument disagree on axis 0.
        OptionError: batch_argnums name other arguments.
    """
    cut = _batch_arguments(1 + len(rest), batch_argnums)
    return [
        _resized(arg, f"argument {n}", rows) if n in cut else arg for n, arg in enumerate(rest, 1)
    ]


def _is_split(leaf: jax.ShapeDtypeStruct) -> bool:
    return bool(leaf.shape) and not compat.is_extended(leaf.dtype)


def trace_small(step: Callable[..., Any], state: Any, rest: Sequence[Any]) -> Any:
    """Traces a step with one rank's microbatch, where it was traced with the whole batch before."""
    try:
        return traced(step, state, *rest)[0]
    except (TypeError, ValueError) as error:
        if isinstance(error, (StepError, BatchError)):
            raise
        raise StepError(
            "the step can be traced with the whole batch but not with one microbatch, so some code in it writes the"
            f" batch size down; take it from the inputs' shape instead. JAX says: {str(error).splitlines()[0]}"
        ) from error


def _returns_state(result: Any, state: Any) -> bool:
    """Whether the (first) result is a new state: the same tree, with the same shapes."""
    first = result[0] if isinstance(result, tuple) and len(result) >= 1 else result
    for candidate in (first, result):
        if jax.tree.structure(candidate) == jax.tree.structure(state):
            new, old = jax.tree.leaves(candidate), jax.tree.leaves(state)
            if [leaf.shape for leaf in new] != [leaf.shape for leaf in old]:
                return False
            for name, after, before in zip(_paths(state), new, old, strict=True):
                if after.dtype != before.dtype:
                    raise StepError(
                        f"state{name} is {before.dtype} and its new value {after.dtype}. Cast it back with"
                        f" .astype({before.dtype.name!r}) before the step returns it."
                    )
            return True
    return False
