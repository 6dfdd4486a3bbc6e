"""What a program holds for a while: counted by hand."""

import jax
import jax.numpy as jnp
from jax import lax

from ratrain_jax.lowering.scratch import scratch_bytes

SQUARE = jnp.ones((8, 8))
ONE = SQUARE.nbytes


def scratch(function, *args):
    return scratch_bytes(jax.make_jaxpr(function)(*args))


def test_inputs_and_results_are_not_scratch():
    assert scratch(lambda x: x @ x, SQUARE) == 0


def test_what_elementwise_code_hands_on_is_not_stored():
    assert scratch(lambda x: jnp.tanh(x * 2 + 1) @ x, SQUARE) == ONE  # what the product reads is


def test_an_intermediate_lives_to_its_last_reader():
    def chain(x):
        return ((x @ x) @ x) @ x

    def kept(x):
        first = x @ x
        second = first @ x
        return (second @ x) @ first

    assert scratch(chain, SQUARE) == 2 * ONE  # one is read while the next is made
    assert scratch(kept, SQUARE) == 3 * ONE


def test_a_loop_counts_what_its_body_holds():
    def loop(x):
        return lax.scan(lambda h, _: ((h @ x) @ x, None), x, length=3)[0]

    assert scratch(loop, SQUARE) == ONE
