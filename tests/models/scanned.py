"""Models whose layers are stacked: a GPT with `nn.scan`, and an MLP with `lax.scan`."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .case import Apply, Batch, dict_case, linen_case
from .gpt import VOCABULARY, Block, loss, make_batch


class _Layer(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return Block(self.heads, name="block")(x), None


class _Call(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Block(self.heads, name="block")(x)


class ScannedGPT(nn.Module):
    """`tests.models.gpt.GPT` with its blocks under one `nn.scan`.

    Attributes:
        remat: whether each block is under `nn.remat`.
        lengths: layers, or the lengths of nested scans, which are then under `nn.remat_scan`.
    """

    vocabulary: int = VOCABULARY
    width: int = 16
    heads: int = 2
    lengths: tuple[int, ...] = (4,)
    remat: bool = False

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        embedding = nn.Embed(self.vocabulary, self.width, name="embedding")
        init = nn.initializers.normal(0.1)
        positions = self.param("positions", init, (inputs.shape[1], self.width))
        x = embedding(inputs) + positions
        if len(self.lengths) > 1:
            x = nn.remat_scan(_Call, lengths=self.lengths)(self.heads, name="blocks")(x)
        else:
            layer = nn.remat(_Layer, prevent_cse=False) if self.remat else _Layer
            scan = nn.scan(
                layer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.lengths[0],
            )
            x, _ = scan(self.heads, name="blocks")(x, None)
        return embedding.attend(nn.LayerNorm(name="norm")(x))


def scanned_gpt(name: str, **fields: Any) -> Any:
    """A case of `ScannedGPT`."""
    model = ScannedGPT(**fields)
    return linen_case(name, model, inputs=("inputs",), loss=loss, make_batch=make_batch)


WIDTH = 8


def residual_layer(x: jax.Array, layer: Any) -> jax.Array:
    """One layer of the scanned MLP."""
    return x + layer["scale"] * jnp.tanh(x @ layer["kernel"] + layer["bias"])


def scanned_mlp(params: Any, x: jax.Array, reverse: bool = False, remat: bool = False) -> jax.Array:
    """An MLP with skips over stacked layers; `scale` is a scalar a layer."""
    x = x @ params["first"]
    layer = jax.checkpoint(residual_layer) if remat else residual_layer
    x, _ = lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"], reverse=reverse)
    return x @ params["last"]


def init_mlp(layers: int) -> Any:
    """Parameters of `scanned_mlp`."""
    keys = jax.random.split(jax.random.key(3), 4)
    normal = jax.random.normal
    stacked = {
        "kernel": normal(keys[0], (layers, WIDTH, WIDTH)) / 4,
        "bias": normal(keys[1], (layers, WIDTH)) / 8,
        "scale": jnp.linspace(0.5, 1.0, layers),
    }
    return {
        "first": normal(keys[2], (4, WIDTH)) / 2,
        "layers": stacked,
        "last": normal(keys[3], (WIDTH, 2)) / 2,
    }


def make_points(seed: int, batch_size: int) -> Batch:
    """Points, and a smooth function of each."""
    x = np.random.default_rng(seed).normal(size=(batch_size, 4))
    x = x.astype(jnp.result_type(float))
    return {"x": x, "y": np.sin(x[:, :2] + x[:, 2:])}


def mlp_loss(apply: Apply, params: Any, batch: Batch) -> jax.Array:
    """Mean squared error."""
    return ((apply(params, batch["x"]) - batch["y"]) ** 2).mean()


def mlp_case(layers: int = 4, apply: Apply = scanned_mlp) -> Any:
    """A case of `scanned_mlp`."""
    return dict_case(
        "scanned_mlp",
        lambda: init_mlp(layers),
        apply=apply,
        loss=mlp_loss,
        make_batch=make_points,
    )
