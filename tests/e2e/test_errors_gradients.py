"""What a user is told of `value_and_grad` where it is missing, hidden in a loop, or called another way than it can be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import LossError, StepError, UnsupportedError
from tests.refusals import descend, loss_of, refused, step


def test_a_step_without_value_and_grad_is_shown_the_line_to_change():
    def plain(state, batch):
        return descend(state, jax.grad(lambda params: loss_of(params, batch))(state))

    words = ("does not call it", "jax.value_and_grad(loss_fn)", "rt.value_and_grad(loss_fn)")
    words += (f"the step plain ({__file__}:{plain.__code__.co_firstlineno})",)
    refused(StepError, plain, words=words)


def test_two_losses():
    def twice(state, batch):
        return step(step(state, batch)[0], batch)

    refused(StepError, twice, words=("calls it 2 times", "Join the losses"))


def in_scan(state, batch):
    def body(total, part):
        grads = rt.grad(lambda params: loss_of(params, part))(state)
        return jax.tree.map(jnp.add, total, grads), None

    parts = jax.tree.map(lambda leaf: leaf.reshape(2, -1, *leaf.shape[1:]), batch)
    total, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, state), parts)
    return descend(state, total)


def in_cond(state, batch):
    return jax.lax.cond(batch["x"][0, 0] > 0, lambda: step(state, batch)[0], lambda: state)


def in_while(state, batch):
    def body(carry):
        return carry[0] - 1, step(carry[1], batch)[0]

    return jax.lax.while_loop(lambda carry: carry[0] > 0, body, (3, state))[1]


def in_vmap(state, batch):
    def one(x, y):
        return rt.grad(lambda params: loss_of(params, {"x": x[None], "y": y[None]}))(state)

    grads = jax.vmap(one)(batch["x"], batch["y"])
    return descend(state, jax.tree.map(lambda leaf: leaf.mean(0), grads))


def in_jit_in_scan(state, batch):
    inner = jax.jit(lambda carry: step(carry, batch)[0])
    return jax.lax.scan(lambda carry, _: (inner(carry), None), state, length=2)[0]


HIDDEN = {
    "scan": in_scan,
    "cond": in_cond,
    "while": in_while,
    "vmap": in_vmap,
    "jit in scan": in_jit_in_scan,
}


@pytest.mark.parametrize("where", HIDDEN)
def test_a_loss_inside_a_loop_a_branch_or_a_map(where):
    name = where.split()[-1]
    words = (f"`{name}`", "Remove your own accumulation loop", "microbatches")
    refused(UnsupportedError, HIDDEN[where], words=words)


def test_a_loss_that_is_differentiated_again():
    def again(state, batch):
        def penalty(params):
            grads = rt.grad(lambda params: loss_of(params, batch))(params)
            return sum((grad**2).sum() for grad in grads.values())

        return descend(state, jax.grad(penalty)(state))

    refused(UnsupportedError, again, words=("value_and_grad", "differentiated"))


@pytest.mark.parametrize("where", HIDDEN)
def test_outside_a_step_value_and_grad_is_that_of_jax(where, monkeypatch):
    state = {name: jnp.linspace(-1, 1, 32).reshape(4, 8) for name in ("first", "third")}
    state = {"first": state["first"], "second": jnp.eye(8), "third": state["third"].T}
    batch = {"x": jnp.linspace(0, 1, 96).reshape(24, 4), "y": jnp.ones((24, 4))}
    ours = jax.jit(HIDDEN[where])(state, batch)
    monkeypatch.setattr(rt, "grad", jax.grad, raising=False)
    monkeypatch.setattr(rt, "value_and_grad", jax.value_and_grad, raising=False)
    theirs = jax.jit(lambda state, batch: HIDDEN[where](state, batch))(state, batch)
    for name in state:
        assert jnp.array_equal(ours[name], theirs[name])


def test_outside_a_step_a_loss_may_have_effects_and_be_differentiated_again(capfd):
    def square(x):
        jax.debug.print("x is {}", x)
        return x * x

    value, grad = jax.jit(rt.value_and_grad(square))(3.0)
    jax.effects_barrier()
    assert (value, grad) == (9.0, 6.0)
    assert "x is 3.0" in capfd.readouterr().out
    assert jax.jit(jax.grad(rt.grad(lambda x: x**3)))(2.0) == 12.0
    with pytest.raises(TypeError, match="scalar"):
        jax.jit(rt.grad(lambda x: x * jnp.ones(2)))(1.0)


def test_a_loss_with_aux_that_was_not_announced():
    refused(
        LossError, lambda p, b: rt.grad(lambda p: (loss_of(p, b), 1.0))(p), words=("has_aux=True",)
    )


@pytest.mark.parametrize("call", [lambda f, x: f(x), lambda f, x: jax.jit(f)(x)], ids=["", "jit"])
@pytest.mark.parametrize(
    "loss",
    [lambda x: (x, 1.0), lambda x: None, lambda x: {"loss": x}],
    ids=["pair", "none", "dict"],
)
def test_a_loss_that_is_a_tree(call, loss):
    with pytest.raises(LossError, match=r"only a scalar can be differentiated.*has_aux=True"):
        call(rt.grad(loss), 3.0)


@pytest.mark.parametrize("call", [lambda f, x: f(x), lambda f, x: jax.jit(f)(x)], ids=["", "jit"])
def test_jaxs_own_errors_and_freedoms(call):
    with pytest.raises(TypeError, match="two-element tuple"):
        call(rt.value_and_grad(lambda x: x * x, has_aux=True), 3.0)
    with pytest.raises(TypeError, match="argnums"):
        call(rt.grad(lambda x: x * x, argnums=1), 3.0)
    assert call(rt.grad(lambda x: x * x, argnums=np.int64(0)), 3.0) == 6.0
    assert call(rt.value_and_grad(lambda x: [x * x, x], has_aux=True), 3.0)[0] == (9.0, 3.0)


def test_a_decorated_step_inside_jit():
    step = rt.train_step()(lambda p, b: rt.grad(lambda p: (b @ p).sum())(p))
    with pytest.raises(StepError, match=r"inside jax\.jit.*call it directly"):
        jax.jit(step)(jnp.ones(3), jnp.ones((2, 3)))
