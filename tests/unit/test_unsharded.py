"""What a lowered step says of state and updates that are not on shards."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ratrain_jax as rt


def lowered(optimizer, width=6, **options):
    @rt.train_step(stages=2, microbatches=2, **options)
    def step(state, batch):
        def loss_fn(params):
            x = batch
            for layer in params.values():
                x = jnp.tanh(x @ layer["kernel"]) * layer["scale"]
            return (x**2).mean()

        loss, grads = rt.value_and_grad(loss_fn)(state["params"])
        updates, inner = optimizer.update(grads, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": inner}, loss

    params = {f"layer_{n}": {"kernel": jnp.eye(width), "scale": jnp.ones(3)[n]} for n in range(3)}
    state = {"params": params, "optimizer": optimizer.init(params)}
    return step.lower(state, np.ones((8, width), np.float32))


def test_leaves_that_the_devices_do_not_divide_are_listed_with_their_bytes():
    report = lowered(optax.sgd(0.1), width=5, data_parallel=2).unsharded()
    assert dict(report.leaves) == {
        f"state['params']['layer_{n}']['{name}']": count
        for n in range(3)
        for name, count in (("kernel", 100), ("scale", 4))
    }
    assert report.equations == ()
    assert "100 B  state['params']['layer_0']['kernel']" in str(report)


def test_what_is_computed_whole_is_listed_with_what_is_gathered_for_it():
    noisy = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1))
    step = lowered(noisy, data_parallel=2)
    report = step.unsharded()
    drawn = {layer: n for layer, name, n in report.equations if name == "random_bits"}
    assert set(drawn.values()) == {6 * 6 * 4}
    assert str(report) in step.summary()
    assert max(map(len, step.summary().splitlines())) <= 80


def test_a_step_on_single_devices_has_nothing_to_say():
    step = lowered(optax.sgd(0.1), width=5)
    assert step.unsharded() is None
    assert "On every device" not in step.summary()
