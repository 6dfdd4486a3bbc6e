"""`eval_step`: what goes forward only, through the stages of a train step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ratrain_jax import compat
from ratrain_jax.errors import OptionError, StepError
from ratrain_jax.kernels import load_machine
from ratrain_jax.losses import bind_region, key_paths
from ratrain_jax.lowered import Lowered
from ratrain_jax.lowering.evaluation import Homes, state_homes
from ratrain_jax.lowering.graph import inline, needed
from ratrain_jax.lowering.held import parameter_paths
from ratrain_jax.lowering.held_paths import aligned
from ratrain_jax.lowering.lower import lower_step
from ratrain_jax.lowering.trace import Trace
from ratrain_jax.options import Options
from ratrain_jax.step import Step
from ratrain_jax.tracing import Signature, abstract, leaf_names, microbatch, trace_small, traced
from ratrain_jax.train import TrainStep

Path = tuple[str, ...]


class EvalStep(Step):
    """A decorated evaluation. Call it like the function, or `lower` it to look first.

    Attributes:
        options: the train step's, as far as they matter.
        __wrapped__: the undecorated function.
    """

    def __init__(self, fun: Callable[..., Any], train: TrainStep, options: Options) -> None:
        super().__init__(fun, options)
        self._train = train
        self._homes: tuple[Lowered | None, Any] = (None, None)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Traces and lowers the evaluation.

        Args:
            *args: its arguments, or their types; the first is the state.
            **kwargs: arguments by name.

        Raises:
            StepError, BatchError, LayoutError, MemoryLimitError: what to change is in the message.
        """
        args = self._positional(args, kwargs)
        known = self._trained(args)
        parameters = None if known is None else parameter_paths(known.trace)
        trace, signature = _trace(self.__wrapped__, args, self.options, parameters)
        read = signature.read or ()
        everywhere = self._homes_in(known)
        homes = None if everywhere is None else everywhere.of(read)
        kernels = self.options.kernels()
        settings = dataclasses.replace(
            self.options.settings(),
            schedule="forward",
            recovery="none",
            layerwise_state=False,
            update_prefetch=False,
        )
        machine = kernels.machine if kernels is not None else load_machine("generic")
        code, program = lower_step(trace, settings, machine, None, kernels, homes)
        return Lowered(code, program, signature, self.options, trace)

    def _key(self, args: Sequence[Any]) -> Any:
        """Where the train step keeps parameters counts: it is not known before that is lowered."""
        return (super()._key(args), self._homes_in(self._trained(args)))

    def _homes_in(self, known: Lowered | None) -> Homes | None:
        """Where a lowered train step keeps the leaves of the state."""
        if known is None:
            return None
        if self._homes[0] is not known:
            self._homes = (known, state_homes(known.code))
        return self._homes[1]

    def _trained(self, args: Sequence[Any]) -> Lowered | None:
        """The lowered train step, if it was for such a state."""
        known = self._train.lowered
        if known is None or not args:
            return None
        leaves, tree = jax.tree.flatten(abstract(args[0]))
        types = [(leaf.shape, leaf.dtype) for leaf in leaves]
        avals = known.signature.avals[: known.signature.states]
        same = tree == known.signature.state and types == [(a.shape, a.dtype) for a in avals]
        return known if same else None


def eval_step(
    train_step: TrainStep,
    *,
    microbatches: int | None = None,
    batch_argnums: Sequence[int] | None = None,
) -> Callable[[Callable[..., Any]], EvalStep]:
    """Decorates an evaluation so that it runs forward through the stages of a train step.

    The function takes the state of the train step first and a batch after it, and returns any tree of arrays. Parameters
    stay where training keeps them, nothing of the state is used up, and no residuals are kept. The batch may be of
    another shape than in training; each shape is compiled once.

    Results are joined over microbatches and ranks as the auxiliary values of `ratrain_jax.value_and_grad` are: what has
    the batch along axis 0 comes back in the order of the batch, other floats are averaged, integers are added.

    Args:
        train_step: the decorated train step, whose stages, devices and backend are taken.
        microbatches: parts that each device's batch is cut into; the train step's unless given.
        batch_argnums: which arguments are cut along axis 0; all but the first unless given.

    Returns:
        A decorator that gives an `EvalStep`.

    Raises:
        OptionError: `train_step` is no decorated train step, or another option is out of range.

    Example:
        >>> import jax.numpy as jnp, ratrain_jax as rt
        >>> @rt.train_step(microbatches=2)
        ... def step(state, batch):
        ...     loss, grads = rt.value_and_grad(lambda w: ((batch["x"] @ w) ** 2).mean())(state["w"])
        ...     return {"w": state["w"] - 0.1 * grads}, {"loss": loss}
        >>> @rt.eval_step(step)
        ... def predict(state, batch):
        ...     return batch["x"] @ state["w"]
        >>> predict({"w": jnp.ones(3)}, {"x": jnp.eye(3)[:2]}).tolist()
        [1.0, 1.0]
    """
    if not isinstance(train_step, TrainStep):
        raise OptionError(
            f"eval_step takes a step decorated with ratrain_jax.train_step, got {train_step!r}."
        )
    options = dataclasses.replace(
        train_step.options,
        microbatches=train_step.options.microbatches if microbatches is None else microbatches,
        batch_argnums=batch_argnums,
        zero=1,
        donate_state=False,
    )
    return lambda fun: EvalStep(fun, train_step, options)


def _trace(
    fun: Callable[..., Any],
    args: Sequence[Any],
    options: Options,
    parameters: Sequence[tuple[int, Path]] | None,
) -> tuple[Trace, Signature]:
    """Traces an evaluation as a step whose loss region is all of it.

    Args:
        fun: the undecorated function.
        args: its arguments, or their types; the first is the state.
        options: the parts that the batch is cut into, and which arguments are batch.
        parameters: the leaves of the state that are parameters in training, and their paths; None if unknown.
    """
    if not args:
        raise StepError("an evaluation takes the state as its first argument, but none was given.")
    state, *rest = (abstract(arg) for arg in args)
    leaves, tree = jax.tree.flatten(state)
    small_rest = microbatch(rest, options)
    read = _read(fun, leaves, tree, small_rest)
    chosen = [(n, path) for n, path in parameters or _parameters(state, read) if n in read]
    if not chosen:
        raise StepError(
            "the evaluation reads no parameter of the state. Compute what it returns under jax.jit."
        )
    results: list[Any] = []

    def step(given: Sequence[Any], *batch: Any) -> Any:
        full = [
            jnp.zeros(a.shape, a.dtype) if n not in read else None for n, a in enumerate(leaves)
        ]
        for n, leaf in zip(read, given, strict=True):
            full[n] = leaf

        def flat(*params: Any) -> list[Any]:
            whole = list(full)
            for (n, _), param in zip(chosen, params, strict=True):
                whole[n] = param
            out, out_tree = jax.tree.flatten(fun(tree.unflatten(whole), *batch))
            results[:] = [out_tree]
            return [jnp.asarray(leaf) for leaf in out]

        params = [full[n] for n, _ in chosen]
        closed = jax.make_jaxpr(flat)(*params)
        paths = tuple(path for _, path in chosen)
        return bind_region(closed, params, paths, "none")[: len(closed.out_avals)]

    given = [leaves[n] for n in read]
    whole, _ = traced(step, given, *rest)
    parts = options.data_parallel * options.microbatches
    small = whole if parts == 1 else trace_small(step, given, small_rest)
    names = leaf_names((state, *rest))
    trace = Trace(
        whole=whole,
        small=small,
        names=(*(names[n] for n in read), *names[len(leaves) :]),
        states=len(read),
        state_out=(None,) * len(read),
        metrics_out=tuple(range(len(whole.out_avals))),
    )
    batch_leaves, batch_tree = jax.tree.flatten(tuple(rest))
    signature = Signature(
        state=tree,
        batch=batch_tree,
        result=results[0],
        avals=(*leaves, *batch_leaves),
        names=tuple(names),
        has_state=False,
        read=tuple(read),
    )
    return trace, signature


def _read(
    fun: Callable[..., Any], leaves: Sequence[Any], tree: Any, batch: Sequence[Any]
) -> list[int]:
    """The leaves of the state that an evaluation reads; random keys in any case."""

    def flat(leaves: Sequence[Any], batch: Sequence[Any]) -> Any:
        return fun(tree.unflatten(leaves), *batch)

    graph = inline(traced(flat, leaves, batch)[0])
    _, free = needed(graph.eqns, graph.outvars, graph.invars)
    invars = graph.invars[: len(leaves)]
    return [
        n
        for n, (var, aval) in enumerate(zip(invars, leaves, strict=True))
        if var in free or compat.is_extended(aval.dtype)
    ]


def _parameters(state: Any, read: Collection[int]) -> list[tuple[int, Path]]:
    """What are taken for parameters before the train step is known: the floats of each tree of the state with a matrix."""
    trees: dict[str, dict[int, Path]] = {}
    leaves = jax.tree.leaves(state)
    for n, path in enumerate(key_paths(state)):
        if n in read and jnp.issubdtype(leaves[n].dtype, jnp.floating):
            trees.setdefault(path[0] if path else "", {})[n] = path
    models = [tree for tree in trees.values() if any(leaves[n].ndim > 1 for n in tree)]
    found = [aligned(tree, ()) for tree in models or trees.values()]
    return sorted(item for tree in found for item in tree.items())
