"""Steps whose loss reads other parameters than it is differentiated by: adapters, references, teachers, averages, rivals.

Each takes the gradient function as an argument, as the cases of `tests.models.case` do, and returns its loss.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

WIDTH = 8


class Net(nn.Module):
    """A residual MLP; its layers in a loop, or stacked."""

    depth: int = 4
    stacked: bool = False

    @nn.compact
    def __call__(self, x):
        if self.stacked:
            blocks = nn.scan(
                _Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.depth
            )
            x, _ = blocks(name="blocks")(x, None)
        else:
            for n in range(self.depth):
                x, _ = _Block(name=f"block_{n}")(x, None)
        return nn.Dense(WIDTH, name="head")(jnp.tanh(x))


class _Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = jnp.tanh(nn.Dense(2 * WIDTH, name="up")(x))
        return x + nn.Dense(WIDTH, name="down")(h), None


def draw(net: nn.Module, seed: int) -> Any:
    """Parameters of JAX's default float type."""
    params = net.init(jax.random.key(seed), jnp.zeros((1, WIDTH)))
    return jax.tree.map(lambda leaf: leaf.astype(jnp.result_type(float)), params)


def batches(count: int, rows: int = 8) -> list[dict[str, np.ndarray]]:
    """Two inputs and a target an example."""
    rng = np.random.default_rng(0)
    return [
        {name: rng.standard_normal((rows, WIDTH)) for name in ("x", "other", "y")}
        for _ in range(count)
    ]


def optimizer() -> optax.GradientTransformation:
    """Clips, so that updates wait for all layers or are validated."""
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2, eps=1e-4))


def make_step(
    loss: Callable[..., jax.Array], value_and_grad: Any, after: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """A step over `{"params", "held", "opt", "count"}`.

    Args:
        loss: of the parameters, the held ones and the batch.
        value_and_grad: JAX's or ours.
        after: makes the new held parameters from the new parameters, the old held ones and the number of steps.
    """
    tx = optimizer()

    def step(state, batch):
        value, grads = value_and_grad(lambda p: loss(p, state["held"], batch))(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params, count = optax.apply_updates(state["params"], updates), state["count"] + 1
        held = after(params, state["held"], count) if after else state["held"]
        return {"params": params, "held": held, "opt": opt, "count": count}, {"loss": value}

    return step


def make_state(params: Any, held: Any) -> Any:
    """The state that `make_step`'s steps take."""
    return {
        "params": params,
        "held": held,
        "opt": optimizer().init(params),
        "count": jnp.zeros((), jnp.int32),
    }


def adapted(net: Net) -> tuple[Any, Any, Callable[..., jax.Array]]:
    """Adapters of low rank beside base weights."""
    base = draw(net, 0)["params"]
    rng = np.random.default_rng(1)

    def adapter(path: Any, leaf: jax.Array) -> Any:
        if leaf.ndim < 2 or path[-1].key == "bias":
            return None
        *outer, rows, columns = leaf.shape
        return {
            "a": jnp.asarray(rng.standard_normal((*outer, rows, 2))),
            "b": jnp.asarray(0.1 * rng.standard_normal((*outer, 2, columns))),
        }

    adapters = jax.tree_util.tree_map_with_path(adapter, base)

    def join(leaf: jax.Array, adapter: Any) -> jax.Array:
        return leaf if adapter is None else leaf + adapter["a"] @ adapter["b"]

    def loss(adapters, held, batch):
        params = jax.tree.map(join, held["base"], adapters)
        return jnp.mean((net.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)

    return adapters, {"base": base}, loss


def preferred(net: Net) -> tuple[Any, Any, Callable[..., jax.Array]]:
    """Prefers one answer to another more than a reference does."""

    def score(params, x):
        return -jnp.sum(net.apply(params, x) ** 2, axis=-1)

    def loss(params, held, batch):
        own, other = (score(params, batch[name]) for name in ("x", "other"))
        theirs, their_other = (score(held["reference"], batch[name]) for name in ("x", "other"))
        return -jnp.mean(jax.nn.log_sigmoid(own - other - theirs + their_other))

    return draw(net, 0), {"reference": draw(net, 1)}, loss


def taught(net: Net) -> tuple[Any, Any, Callable[..., jax.Array]]:
    """Learns what a deeper teacher says."""
    teacher = Net(net.depth + 2, net.stacked)

    def loss(params, held, batch):
        said = teacher.apply(held["teacher"], batch["x"])
        return jnp.mean((said - net.apply(params, batch["x"])) ** 2)

    return draw(net, 0), {"teacher": draw(teacher, 1)}, loss


def averaged(net: Net) -> tuple[Any, Any, Callable[..., jax.Array]]:
    """Foretells what a moving average of itself says of another view."""

    def loss(params, held, batch):
        said = net.apply(held["average"], batch["other"])
        return jnp.mean((jax.lax.stop_gradient(said) - net.apply(params, batch["x"])) ** 2)

    return draw(net, 0), {"average": draw(net, 1)}, loss


def rival(net: Net) -> tuple[Any, Any, Callable[..., jax.Array]]:
    """Feeds a net whose layers have the same names."""

    def loss(params, held, batch):
        made = net.apply(params, batch["x"])
        return jnp.mean((net.apply(held["rival"], made) - 1) ** 2)

    return draw(net, 0), {"rival": draw(net, 1)}, loss


def moving(params: Any, held: Any, count: Any) -> Any:
    """The next moving average."""
    del count
    return {"average": optax.incremental_update(params, held["average"], 0.2)}


def copied(params: Any, held: Any, count: Any) -> Any:
    """A copy of the parameters every other step."""
    return {"average": optax.periodic_update(params, held["average"], count, 2)}
