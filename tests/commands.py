"""Commands of `ratrain` run in this process, and what they are given: small models, a text, and a module with a step.

A module that asks for a fixture imports it `as` itself, so that the linter sees that it is wanted.
"""

import json
import textwrap

import pytest

from ratrain_jax import cli

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
"""The `config.json` of a model that is quick to train."""
TEXT = "the quick brown fox jumps over the lazy dog. " * 40
"""What it learns."""
SMALL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
"""The `config.json` of a model to plan for."""
OPTIONS = ["--machine", "a100", "--clusters", "2", "--global-batch", "4", "--sequence", "32"]
STEP = """
    import jax, jax.numpy as jnp, ratrain_jax as rt

    def plain(state, x):
        def loss_fn(params):
            return (jnp.tanh(x @ params["a"]) @ params["b"]).mean()
        loss, grads = rt.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": loss}

    step = rt.train_step(stages=2, microbatches=4, boundaries=("b",))(plain)
    def make_state():
        state = {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))}
        MADE.append(type(state["a"]).__name__)
        return state
    MADE = []
    batch = jax.ShapeDtypeStruct((8, 8), "float32")
    def wide_batch():
        return jnp.ones((16, 8))
    def long_batch():
        return jnp.ones((8, 16))
    def three(state, x, key):
        return state, x
    def raises(state, x):
        raise KeyError("of\\nmy own")
    def makes_nothing():
        return [][0]
    def needs(argument):
        return argument
    lowered = step.lower(jax.eval_shape(make_state), batch)
    program = lowered.program
    plan = rt.plan(step, jax.eval_shape(make_state), batch, machine="generic", devices=2, global_batch=8)
    number = 3
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    """A module with a step and all that goes with it; its path."""
    path = tmp_path_factory.mktemp("user") / "user_step.py"
    path.write_text(textwrap.dedent(STEP))
    return str(path)


def run(*arguments, capsys):
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(map(str, arguments)))
    return ended.value.code, *capsys.readouterr()


def refused(*arguments, capsys):
    """The one sentence that a command ends with."""
    code, out, err = run(*arguments, capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith("ratrain: ") and err.count("\n") == 1
    return err


def done(*arguments, capsys):
    """What a command prints."""
    code, out, err = run(*arguments, capsys=capsys)
    assert code == 0, err
    return out
