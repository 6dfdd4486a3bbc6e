"""Dynamic loss scaling: gradients in float16 that neither underflow nor stay infinite.

The loss is multiplied by a scale, and the gradients are divided by it. Where a gradient is not finite the step is
skipped and the scale is divided by a factor; after a number of good steps in a row it is multiplied by it. The scale is an
ordinary part of the user's state. In a pipeline the finite check is a scalar of each layer that one global reduction
joins, the same one that joins the norms of a clipped gradient, so that all stages take or skip a step together.

Semantics as of Micikevicius et al., "Mixed Precision Training" (2018), section 3.2.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ratrain_jax.errors import OptionError

Tree = TypeVar("Tree")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that follows the gradients. It is a pytree: keep it in the state, and hand on what `adjust` returns.

    Args:
        scale: what the loss is multiplied by; a float32 scalar.
        good_steps: finite steps in a row since the scale changed; an int32 scalar.
        growth_interval: after how many of those the scale grows.
        factor: what it is multiplied by then, and divided by where a gradient is not finite; over 1.
        minimum: where it stops to shrink.
        maximum: where it stops to grow.

    Raises:
        OptionError: an argument is out of range.

    Example:
        >>> loss_scale = DynamicLossScale.create(scale=8.0, growth_interval=2)
        >>> grads = loss_scale.unscale({"w": jnp.float16([16.0, 24.0])})
        >>> grads["w"].tolist(), str(grads["w"].dtype)
        ([2.0, 3.0], 'float32')
        >>> finite = all_finite(grads)
        >>> loss_scale = loss_scale.adjust(finite).adjust(finite)
        >>> float(loss_scale.scale)  # grown after two good steps
        16.0
        >>> float(loss_scale.adjust(jnp.bool_(False)).scale)
        8.0
    """

    scale: jax.Array
    good_steps: jax.Array
    growth_interval: int = dataclasses.field(default=2000, metadata={"static": True})
    factor: float = dataclasses.field(default=2.0, metadata={"static": True})
    minimum: float = dataclasses.field(default=1.0, metadata={"static": True})
    maximum: float = dataclasses.field(default=2.0**24, metadata={"static": True})

    @classmethod
    def create(
        cls,
        scale: float = 2.0**15,
        *,
        growth_interval: int = 2000,
        factor: float = 2.0,
        minimum: float = 1.0,
        maximum: float = 2.0**24,
    ) -> DynamicLossScale:
        """A scale to begin with; see the class.

        Raises:
            OptionError: an argument is out of range.
        """
        if growth_interval < 1:
            raise OptionError(f"growth_interval is {growth_interval}; it must be at least 1 step.")
        if not factor > 1:
            raise OptionError(f"factor is {factor}; it must be over 1, or the scale never changes.")
        if not 0 < minimum <= scale <= maximum:
            raise OptionError(
                f"scale is {scale}; it must be over 0 and between minimum={minimum} and maximum={maximum}."
            )
        return cls(jnp.float32(scale), jnp.int32(0), growth_interval, factor, minimum, maximum)

    def scaled(self, loss: jax.Array) -> jax.Array:
        """The loss times the scale, to differentiate by; in float32, for the scale may be over what float16 holds.

        Args:
            loss: a scalar.
        """
        return loss.astype(jnp.promote_types(loss.dtype, jnp.float32)) * self.scale

    def unscale(self, tree: Tree) -> Tree:
        """Gradients, or a scaled loss, divided by the scale; at least in float32.

        Args:
            tree: floating-point arrays; others are left as they are.
        """
        inverse = 1 / self.scale

        def divided(leaf: Any) -> Any:
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                return leaf
            return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) * inverse

        return jax.tree.map(divided, tree)

    def adjust(self, finite: jax.Array) -> DynamicLossScale:
        """The scale for the next step.

        Args:
            finite: whether this step's gradients were finite, from `all_finite`.
        """
        grows = self.good_steps + 1 >= self.growth_interval
        larger = jnp.minimum(self.scale * self.factor, self.maximum)
        smaller = jnp.maximum(self.scale / self.factor, self.minimum)
        scale = jnp.where(finite, jnp.where(grows, larger, self.scale), smaller)
        good_steps = jnp.where(finite & ~grows, self.good_steps + 1, 0)
        return dataclasses.replace(self, scale=scale, good_steps=good_steps)


def all_finite(tree: Any) -> jax.Array:
    """Whether no element of a tree is infinite or NaN; integers always are finite.

    Args:
        tree: arrays, such as gradients.

    Returns:
        A boolean scalar.

    Example:
        >>> bool(all_finite({"a": jnp.ones(3), "b": jnp.array([1.0, jnp.inf])}))
        False
    """
    finite = jnp.bool_(True)
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            finite &= jnp.isfinite(leaf).all()
    return finite


def select_tree(pred: jax.Array, on_true: Tree, on_false: Tree) -> Tree:
    """One of two trees, leaf by leaf: the new state where the gradients were finite, else the old one.

    Args:
        pred: a boolean scalar.
        on_true: what is taken if it holds.
        on_false: a tree of the same structure, taken otherwise.

    Example:
        >>> float(select_tree(jnp.bool_(False), jnp.float32(1), jnp.float32(2)))
        2.0
    """
    return jax.tree.map(lambda new, old: jax.lax.select(pred, new, old), on_true, on_false)
