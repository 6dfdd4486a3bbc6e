"""A language model with its train step: predicts each next token, and updates a Flax `TrainState`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from ratrain_jax.errors import OptionError
from ratrain_jax.losses import value_and_grad
from ratrain_jax.models.config import ModelConfig
from ratrain_jax.models.llama import Llama

DTYPES = ("float16", "bfloat16", "float32")
"""The compute dtypes."""

HALF_LOSS_SCALE = 2.0**10
"""The loss scale of float16, whose gradients would otherwise vanish below 6e-8."""


@dataclasses.dataclass(frozen=True, slots=True)
class LanguageModel:
    """A model, its optimizer and its train step, made by `language_model`.

    Attributes:
        config: The model's configuration.
        sequence: Tokens of each example that are predicted.
        model: The linen module.
        optimizer: Updates the parameters.
        loss_scale: What the loss is multiplied with before it is differentiated; gradients are divided by it.
    """

    config: ModelConfig
    sequence: int
    model: Llama
    optimizer: optax.GradientTransformation
    loss_scale: float

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """An ordinary train step, to decorate with `rt.train_step` or `jax.jit`.

        Args:
            state: Of `init`.
            batch: As `abstract_batch` describes it.

        Returns:
            The state after the step, and {"loss": the mean cross-entropy}.
        """

        def loss_fn(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, batch["inputs"]).astype(jnp.float32)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            return losses.mean() * self.loss_scale

        loss, grads = value_and_grad(loss_fn)(state.params)
        if self.loss_scale != 1.0:
            loss, grads = jax.tree.map(lambda x: x / self.loss_scale, (loss, grads))
        return state.apply_gradients(grads=grads), {"loss": loss}

    def init(self, key: jax.Array) -> TrainState:
        """Draws parameters.

        Args:
            key: A random key.

        Returns:
            The state before the first step, on the default device.
        """
        return jax.jit(lambda key: self._create(key))(key)

    def abstract_state(self) -> TrainState:
        """The types of the state; holds no parameters, whatever the model's size."""
        return jax.eval_shape(lambda: self._create(jax.random.key(0)))

    def abstract_batch(self, global_batch: int) -> Mapping[str, jax.ShapeDtypeStruct]:
        """The types of a batch.

        Args:
            global_batch: Examples, over all ranks and microbatches.

        Returns:
            "inputs" and "targets", int32 tokens, shape (global_batch, sequence); the target of a position is the
            input of the next one.

        Raises:
            OptionError: There are no examples.
        """
        _at_least_one("global_batch", global_batch)
        tokens = jax.ShapeDtypeStruct((global_batch, self.sequence), jnp.int32)
        return {"inputs": tokens, "targets": tokens}

    def _create(self, key: jax.Array) -> TrainState:
        # No parameter's shape depends on the length, so that the shortest sequence will do.
        params = self.model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
        return TrainState.create(apply_fn=self.model.apply, params=params, tx=self.optimizer)


def language_model(
    config: ModelConfig,
    *,
    sequence: int,
    optimizer: optax.GradientTransformation | None = None,
    dtype: str = "float16",
    loss_scale: float | None = None,
    scan: bool = True,
) -> LanguageModel:
    """Makes a language model and its train step.

    Parameters, their gradients as the optimizer gets them, and the cross-entropy are float32.

    Args:
        config: The model.
        sequence: Tokens of each example that are predicted.
        optimizer: Updates the parameters; AdamW unless given.
        dtype: Compute dtype: "float16", "bfloat16" or "float32".
        loss_scale: What the loss is multiplied with before it is differentiated; 1024 for float16 and 1 for the
            others unless given. The loss that a step returns, and the gradients that the optimizer gets, are without it.
        scan: Whether the layers are stacked; see `Llama`.

    Returns:
        The model, with its step, and the types of its state and batch.

    Raises:
        OptionError: The sequence is longer than the model is for, or another argument is out of range.

    Example:
        >>> import ratrain_jax as rt
        >>> from ratrain_jax.models import ModelConfig, language_model
        >>> config = ModelConfig("tiny", layers=2, hidden=16, ffn=32, heads=4, kv_heads=2, vocab=64)
        >>> lm = language_model(config, sequence=8)
        >>> train_step = rt.train_step(stages=2, microbatches=2)(lm.step)
        >>> lowered = train_step.lower(lm.abstract_state(), lm.abstract_batch(4))
        >>> {layer.stage for layer in lowered.program.layers}
        {0, 1}
    """
    _at_least_one("sequence", sequence)
    if sequence > config.max_positions:
        raise OptionError(
            f"sequence={sequence} is longer than {config.name} is for (max_positions={config.max_positions});"
            " shorten it, or raise max_positions with dataclasses.replace."
        )
    if dtype not in DTYPES:
        choices = ", ".join(map(repr, DTYPES))
        raise OptionError(f"dtype={dtype!r} is not known; choose one of {choices}.")
    if loss_scale is None:
        loss_scale = HALF_LOSS_SCALE if dtype == "float16" else 1.0
    if not 0 < loss_scale < float("inf"):
        raise OptionError(f"loss_scale={loss_scale!r} must be a finite number above 0.")
    if optimizer is None:
        optimizer = optax.adamw(3e-4, b2=0.95, weight_decay=0.1)
    model = Llama(config, dtype, scan)
    return LanguageModel(config, sequence, model, optimizer, float(loss_scale))


def _at_least_one(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(f"{name} must be a whole number of at least 1, got {value!r}.")
