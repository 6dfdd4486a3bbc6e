"""What a model under test is: a state, batches and an ordinary Flax train step.

A *case* carries no mark of the runtime under test. Its step is written the way a user writes it and
takes the gradient function as an argument, so that one text runs undecorated with
`jax.value_and_grad` and decorated with `ratrain_jax.value_and_grad`:

    state = case.make_state(optimizer)
    plain = jax.jit(case.make_step(optimizer, jax.value_and_grad))
    piped = rt.train_step(stages=2)(case.make_step(optimizer, rt.value_and_grad))

Floating-point parameters have JAX's default float type, so a case built under `jax_enable_x64`
trains in float64. No model has dropout, and none has a leaf whose gradient is zero in exact
arithmetic (such as the key bias of softmax attention): sign-based optimizers amplify its noise.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

Batch = dict[str, np.ndarray]
Metrics = dict[str, jax.Array]
Step = Callable[[Any, Batch], tuple[Any, Metrics]]
ValueAndGrad = Callable[..., Any]
Apply = Callable[..., Any]
Loss = Callable[[Apply, Any, Batch], jax.Array]


@dataclass(frozen=True, slots=True)
class Case:
    """One model with its state, its batches and its train step.

    Attributes:
        name: Unique name, used as the test's id.
        make_state: Builds the initial state (a `TrainState`, or a dict) for an optimizer; equal
            calls give equal values.
        make_batch: Builds the batch of a seed and a number of examples: a dict of numpy arrays
            that agree on axis 0.
        make_step: Builds `step(state, batch) -> (state, metrics)` from an optimizer and a
            function like `jax.value_and_grad`. The optimizer must be the state's own; steps over
            a `TrainState` find it there.
    """

    name: str
    make_state: Callable[[optax.GradientTransformation], Any]
    make_batch: Callable[[int, int], Batch]
    make_step: Callable[[optax.GradientTransformation, ValueAndGrad], Step]


MAX_NORM = 0.1
"""Where `adamw` clips the global norm: low enough that clipping is at work in every case."""

OPTIMIZERS: Mapping[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.chain(
        optax.clip_by_global_norm(MAX_NORM),
        optax.adamw(optax.cosine_decay_schedule(3e-4, 100), eps=1e-5, weight_decay=1e-2),
    ),
    "sgd": lambda: optax.sgd(5e-3, momentum=0.9),
    "lion": lambda: optax.lion(3e-6, weight_decay=1e-2),
    "adam": lambda: optax.adam(3e-4, eps=1e-4),
}
"""Makers of the optimizers, by name.

Rounding may turn the sign of a gradient near zero; Adam's first steps and every step of Lion then go
the other way. The sizes of `eps` and of the learning rates keep what one such turn does to a weight
matrix, and to the gradients after it, below 1e-5 of their norms.
"""


@functools.cache
def initial_params(init: Callable[[], Any]) -> Any:
    """Draws parameters once a process, as float32 numpy arrays: the same under `jax_enable_x64`."""
    with jax.enable_x64(False):
        drawn = jax.jit(init)()
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), drawn)


def default_float(tree: Any) -> Any:
    """Copies every leaf to an array of JAX's default float type, float64 under `jax_enable_x64`."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.result_type(float)), tree)


def cross_entropy(logits: jax.Array, targets: jax.Array | np.ndarray) -> jax.Array:
    """Mean cross entropy over all targets, the same number of them in every example."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def tokens(rng: np.random.Generator, batch_size: int, length: int, vocabulary: int) -> np.ndarray:
    """Draws token ids from 1 on, small ids more often; 0 is left for padding."""
    drawn = rng.random((batch_size, length)) ** 2 * (vocabulary - 1)
    return 1 + drawn.astype(np.int32)


def linen_case(
    name: str,
    model: nn.Module,
    *,
    inputs: tuple[str, ...],
    loss: Loss,
    make_batch: Callable[[int, int], Batch],
) -> Case:
    """A case of a linen model with a `TrainState`.

    Args:
        name: Name of the case.
        model: The module, called on the batch's `inputs`.
        inputs: Keys of the batch that the module takes, in order.
        loss: Mean loss over examples, from the apply function, the parameters and the batch.
        make_batch: As in `Case`.

    Returns:
        The case.
    """

    def init() -> Any:
        batch = make_batch(0, 1)
        return model.init(jax.random.key(7), *(batch[key] for key in inputs))["params"]

    def make_state(optimizer: optax.GradientTransformation) -> TrainState:
        params = default_float(initial_params(init))
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def make_step(_: optax.GradientTransformation, value_and_grad: ValueAndGrad) -> Step:
        def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            def loss_fn(params: Any) -> jax.Array:
                return loss(state.apply_fn, params, batch)

            value, grads = value_and_grad(loss_fn)(state.params)
            metrics = {"loss": value, "grad_norm": optax.tree.norm(grads)}
            return state.apply_gradients(grads=grads), metrics

        return train_step

    return Case(name, make_state, make_batch, make_step)


def dict_case(
    name: str,
    init: Callable[[], Any],
    *,
    apply: Apply,
    loss: Loss,
    make_batch: Callable[[int, int], Batch],
) -> Case:
    """A case whose state is a dict of step, parameters and optimizer state.

    Args:
        name: Name of the case.
        init: Draws the initial parameters; traced.
        apply: The model as a function of the parameters and its inputs.
        loss: As in `linen_case`; its first argument is `apply`.
        make_batch: As in `Case`.

    Returns:
        The case.
    """

    def make_state(optimizer: optax.GradientTransformation) -> dict[str, Any]:
        params = default_float(initial_params(init))
        step = jnp.zeros((), jnp.int32)
        return {"step": step, "params": params, "opt_state": optimizer.init(params)}

    def make_step(optimizer: optax.GradientTransformation, value_and_grad: ValueAndGrad) -> Step:
        def train_step(state: dict[str, Any], batch: Batch) -> tuple[dict[str, Any], Metrics]:
            value, grads = value_and_grad(lambda params: loss(apply, params, batch))(
                state["params"]
            )
            updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
            params = optax.apply_updates(state["params"], updates)
            metrics = {"loss": value, "grad_norm": optax.tree.norm(grads)}
            new_state = {"step": state["step"] + 1, "params": params, "opt_state": opt_state}
            return new_state, metrics

        return train_step

    return Case(name, make_state, make_batch, make_step)
