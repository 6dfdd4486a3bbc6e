"""The summary tells of a layer that no split balances."""

import jax
import jax.numpy as jnp
import pytest

import ratrain_jax as rt
from ratrain_jax.oversized import oversized

DEPTH, WIDTH = 6, 16
STACKED = {"blocks": jnp.ones((DEPTH, WIDTH, WIDTH)), "head": jnp.ones((WIDTH, WIDTH))}


def looped(params, x):
    for n in range(DEPTH):
        x = jnp.tanh(x @ params["blocks"][n])
    return x


def marked(params, x):
    for n in range(DEPTH):
        x = jnp.tanh(rt.layer(x, f"block_{n}") @ params["blocks"][n])
    return x


def scanned(params, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["blocks"])[0]


def lowered(net, stages):
    def step(params, x):
        loss, grads = rt.value_and_grad(lambda p: jnp.mean(net(p, x) @ p["head"]))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return rt.train_step(stages=stages, microbatches=2)(step).lower(STACKED, jnp.ones((8, WIDTH)))


def test_a_loop_over_slices_is_one_layer_and_the_summary_says_so():
    found = lowered(looped, 2)
    told = oversized(found.program)
    seconds = {layer.name: layer.seconds for layer in found.program.layers}
    assert told.layer == "blocks"
    assert told.share == pytest.approx(seconds["blocks"] / sum(seconds.values()))
    assert told.even == 0.5
    text = found.summary()
    assert "Layer `blocks` has" in text
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize(("net", "stages"), [(looped, 1), (marked, 2), (scanned, 2)])
def test_nothing_is_said_where_stages_can_be_balanced(net, stages):
    found = lowered(net, stages)
    assert oversized(found.program) is None
    assert "split" not in found.summary()
