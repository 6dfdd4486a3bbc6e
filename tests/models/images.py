"""Models over small images: a vision transformer, an MLP mixer and a U-Net."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from .case import Apply, Batch, cross_entropy, linen_case

SIZE = 16
CHANNELS = 3
NOISY_SIZE = 8
CLASSES = 10


class EncoderBlock(nn.Module):
    """Pre-norm self-attention and MLP, each with its skip."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        attention = nn.MultiHeadDotProductAttention(self.heads, use_bias=False, name="attention")
        x = x + attention(nn.LayerNorm(name="norm_1")(x))
        hidden = nn.gelu(nn.Dense(2 * x.shape[-1], name="up")(nn.LayerNorm(name="norm_2")(x)))
        return x + nn.Dense(x.shape[-1], name="down")(hidden)


class ViT(nn.Module):
    """Patches by convolution, a class token, learned positions, encoder blocks."""

    width: int = 16
    heads: int = 2
    layers: int = 4
    patch: int = 4

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        patch = (self.patch, self.patch)
        x = nn.Conv(self.width, patch, strides=patch, padding="VALID", name="patches")(images)
        x = x.reshape(x.shape[0], -1, self.width)
        init = nn.initializers.normal(0.5)  # norms of smaller tokens would amplify rounding
        token = self.param("class_token", init, (1, 1, self.width))
        x = jnp.concatenate([jnp.tile(token, (x.shape[0], 1, 1)), x], axis=1)
        x = x + self.param("positions", init, (1, x.shape[1], self.width))
        for index in range(self.layers):
            x = EncoderBlock(self.heads, name=f"block_{index}")(x)
        return nn.Dense(CLASSES, name="head")(nn.LayerNorm(name="norm")(x[:, 0]))


class MixerBlock(nn.Module):
    """An MLP over the patches, then one over the channels, each with its skip."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        turned = jnp.swapaxes(nn.LayerNorm(name="token_norm")(x), 1, 2)
        turned = nn.gelu(nn.Dense(2 * x.shape[1], name="token_up")(turned))
        # A bias here would shift all channels of a patch alike; every norm takes that off again.
        turned = nn.Dense(x.shape[1], use_bias=False, name="token_down")(turned)
        x = x + jnp.swapaxes(turned, 1, 2)
        hidden = nn.LayerNorm(name="channel_norm")(x)
        hidden = nn.gelu(nn.Dense(2 * x.shape[-1], name="channel_up")(hidden))
        return x + nn.Dense(x.shape[-1], name="channel_down")(hidden)


class Mixer(nn.Module):
    """Patches by convolution, mixer blocks, mean over the patches."""

    width: int = 16
    layers: int = 4
    patch: int = 4

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        patch = (self.patch, self.patch)
        x = nn.Conv(self.width, patch, strides=patch, padding="VALID", name="patches")(images)
        x = x.reshape(x.shape[0], -1, self.width)
        for index in range(self.layers):
            x = MixerBlock(name=f"block_{index}")(x)
        return nn.Dense(CLASSES, name="head")(nn.LayerNorm(name="norm")(x).mean(axis=1))


class ConvBlock(nn.Module):
    """Two convolutions with an activation after each."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.silu(nn.Conv(self.width, (3, 3), name="conv_1")(x))
        return nn.silu(nn.Conv(self.width, (3, 3), name="conv_2")(x))


class UNet(nn.Module):
    """Halves the image twice and doubles it twice; each way down hands its output across."""

    width: int = 8

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        down_0 = ConvBlock(self.width, name="down_0")(images)
        x = nn.avg_pool(down_0, (2, 2), (2, 2))
        down_1 = ConvBlock(2 * self.width, name="down_1")(x)
        x = nn.avg_pool(down_1, (2, 2), (2, 2))
        x = ConvBlock(4 * self.width, name="middle")(x)
        x = nn.ConvTranspose(2 * self.width, (2, 2), (2, 2), name="grow_1")(x)
        x = ConvBlock(2 * self.width, name="up_1")(jnp.concatenate([x, down_1], axis=-1))
        x = nn.ConvTranspose(self.width, (2, 2), (2, 2), name="grow_0")(x)
        x = ConvBlock(self.width, name="up_0")(jnp.concatenate([x, down_0], axis=-1))
        return nn.Conv(CHANNELS, (1, 1), name="head")(x)


def make_labelled(seed: int, batch_size: int) -> Batch:
    """Random images with random labels."""
    rng = np.random.default_rng(seed)
    images = rng.standard_normal((batch_size, SIZE, SIZE, CHANNELS)).astype(np.float32)
    labels = rng.integers(0, CLASSES, batch_size).astype(np.int32)
    return {"images": images, "labels": labels}


def make_noisy(seed: int, batch_size: int) -> Batch:
    """Random images and what was added to them."""
    rng = np.random.default_rng(seed)
    clean = rng.random((batch_size, 1, 1, CHANNELS)) + np.linspace(0, 1, NOISY_SIZE)[:, None, None]
    noise = rng.standard_normal((batch_size, NOISY_SIZE, NOISY_SIZE, CHANNELS))
    return {"images": (clean + noise).astype(np.float32), "noise": noise.astype(np.float32)}


def label_loss(apply: Apply, params: object, batch: Batch) -> jax.Array:
    """Cross entropy of the labels."""
    return cross_entropy(apply({"params": params}, batch["images"]), batch["labels"])


def noise_loss(apply: Apply, params: object, batch: Batch) -> jax.Array:
    """Mean squared error of the predicted noise."""
    return jnp.mean((apply({"params": params}, batch["images"]) - batch["noise"]) ** 2)


VIT_CASE = linen_case("vit", ViT(), inputs=("images",), loss=label_loss, make_batch=make_labelled)
MIXER_CASE = linen_case(
    "mixer", Mixer(), inputs=("images",), loss=label_loss, make_batch=make_labelled
)
UNET_CASE = linen_case("unet", UNet(), inputs=("images",), loss=noise_loss, make_batch=make_noisy)
