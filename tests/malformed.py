"""Files to damage, how they are damaged, and what becomes of what is read from them.

Every form of file that is read back has a line in `FORMS`.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import ratrain_jax as rt
from ratrain_jax.errors import (
    MachineError,
    ModelConfigError,
    PlanError,
    ProfileError,
    ProgramFormatError,
    RATrainError,
)
from ratrain_jax.lowering import jsonform, text
from ratrain_jax.lowering.grid import grid
from ratrain_jax.lowering.memory import memory_analysis
from ratrain_jax.lowering.verify import verify
from ratrain_jax.profiling.profile import Line, Measured, Profile
from tests.programs import make_program

LONGEST = 1000
"""Characters of a message: what is said of the file, however large that is, and what would be right."""


def plain(state, x):
    def loss_fn(params):
        return (jnp.tanh(x @ params["a"]) @ params["b"]).mean()

    loss, grads = rt.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": loss}


TYPES = ({name: jax.ShapeDtypeStruct((8, 8), "float32") for name in "ab"},)
TYPES += (jax.ShapeDtypeStruct((8, 8), "float32"),)


@functools.cache
def program():
    return make_program(2, 2, 2, clip=True)


@functools.cache
def lowered():
    return rt.train_step(stages=2, microbatches=2)(plain).lower(*TYPES)


@functools.cache
def a_profile():
    measured = (Measured("Forward", "ab12", 2, 1e-3, 9, 1e-5), Measured("Metrics", "", 1, 0, 1, 0))
    line = Line("Send", 1, 1e-5, 1e9, ((8, 1e-5), (1 << 20, 2e-3)))
    head = ("ab12", "cpu", "cpu", "0.10", 4, 2, "2030-01-01", 1e-5, 1e-5, None)
    return Profile(*head, measured, (line,), ((1, 1.0), (2, 1.5)))


@functools.cache
def a_plan():
    return rt.plan(plain, *TYPES, machine="generic", devices=2, global_batch=8)


CONFIG = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
    "sliding_window": 32,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "rope_scaling": None,
}


def use_program(found):
    assert text.parse(text.as_text(found)) == found
    assert jsonform.from_json(jsonform.to_json(found)) == found
    verify(found)
    str(memory_analysis(found))
    grid(found)
    rt.simulate(found, "generic", seconds=lambda op: 1.0)


def use_plan(plan):
    assert rt.Plan.from_json(plan.to_json()) == plan
    str(plan), repr(plan), plan._repr_html_()
    rt.train_step(plan=plan)(plain).lower(*TYPES)


def use_profile(profile):
    assert Profile.from_json(profile.to_json()) == profile
    str(profile), repr(profile), profile.merge(a_profile())
    profile.missing(lowered())
    rt.simulate(lowered(), "generic", profile=profile)


def use_machine(machine):
    assert hash(machine) == hash(dataclasses.replace(machine))
    repr(machine)
    machine.roofline_seconds(1e9, 1e6, "float32")
    rt.simulate(program(), machine, seconds=lambda op: 1.0)


def use_config(config):
    assert config.parameters > 0
    repr(config)


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """A form of file.

    Attributes:
        suffix: of its files.
        valid: makes the text of a file that is right.
        load: reads a file.
        use: does with what was read what a user would.
        error: what says that a file is wrong.
    """

    suffix: str
    valid: Callable[[], str]
    load: Callable[[pathlib.Path], Any]
    use: Callable[[Any], Any]
    error: type[RATrainError]


def load_program(path):
    from ratrain_jax.cli.target import read_file

    return read_file(str(path))[0]


FORMS = {
    "program text": Form(
        "txt", lambda: text.as_text(program()), load_program, use_program, ProgramFormatError
    ),
    "program JSON": Form(
        "json", lambda: jsonform.to_json(program()), load_program, use_program, ProgramFormatError
    ),
    "plan": Form("json", lambda: a_plan().to_json(), rt.Plan.load, use_plan, PlanError),
    "profile": Form("json", lambda: a_profile().to_json(), Profile.load, use_profile, ProfileError),
    "machine": Form(
        "toml",
        lambda: (
            pathlib.Path(rt.machines.__file__)
            .with_name("kernels")
            .joinpath("data/mt3000.toml")
            .read_text()
        ),
        rt.machines.load,
        use_machine,
        MachineError,
    ),
    "config": Form(
        "json",
        lambda: json.dumps(CONFIG, indent=1),
        rt.models.load_config,
        use_config,
        ModelConfigError,
    ),
}
EVERY_FORM = pytest.mark.parametrize("name", FORMS)
TABLES = [name for name, form in FORMS.items() if form.suffix == "json"]


def check(name, content, path):
    """Reads and uses a file; asserts that only errors of ours come up, and that they can be read."""
    form = FORMS[name]
    path = path / f"damaged.{form.suffix}"
    path.write_bytes(content)
    try:
        found = form.load(path)
    except RATrainError as error:
        # A program's file that calls itself a plan is read as one.
        assert isinstance(error, (form.error, PlanError) if "program" in name else form.error)
        readable(str(error))
        return
    if found is None:
        return
    try:
        form.use(found)
    except RATrainError as error:
        readable(str(error), LONGEST * 4)  # the verifier shows a part of the grid


def readable(message, longest=LONGEST):
    assert 10 < len(message) < longest, message
    message.encode()


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 2**31, 2**63, 2**64, -(10**30), 10**30, 10**400])
    | st.floats()
    | st.sampled_from([1e308, -1e-320, 1.5])
    | st.text(max_size=5)
    | st.sampled_from(["\ud800", "é" * 500, "", "../..", "0", "none", "\n", "%s{}"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
PIECES = st.binary(max_size=6) | st.sampled_from(
    [
        b"NaN",
        b"Infinity",
        b"1e999",
        b"9" * 5000,
        b"[[",
        b"-",
        b"{}",
        b"null",
        b"\xff\xfe",
        b"\0",
        b'"',
        b"#",
        b"=",
    ]
)
ROUNDS = settings(
    max_examples=50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@st.composite
def damaged(draw, name):
    """A file with some bytes flipped, cut out, doubled, put in, or cut off."""
    content = bytearray(FORMS[name].valid().encode())
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, 40)))
        kind = draw(st.sampled_from(["flip", "cut", "double", "put", "end"]))
        if kind == "flip" and start < len(content):
            content[start] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del content[start:end]
        elif kind == "double":
            content[start:start] = content[start:end]
        elif kind == "put":
            content[start:end] = draw(PIECES)
        else:
            del content[max(start, 1) :]
    return bytes(content)


@st.composite
def altered(draw, name):
    """A file of valid JSON in which one field has another value, is gone, or is new."""
    table = json.loads(FORMS[name].valid())
    for _ in range(draw(st.integers(1, 2))):
        alter(draw, table)
    return json.dumps(table).encode()


def alter(draw, table):
    spot, key = table, draw(st.sampled_from(sorted(table)))
    while isinstance(spot[key], (list, dict)) and spot[key] and draw(st.integers(0, 4)):
        spot = spot[key]
        key = draw(st.sampled_from(sorted(spot) if isinstance(spot, dict) else range(len(spot))))
    kind = draw(st.sampled_from(["value", "value", "value", "number", "gone", "new"]))
    if kind == "value":
        spot[key] = draw(JUNK)
    elif kind == "number" and isinstance(spot[key], int):
        spot[key] += draw(st.integers(-3, 3))
    elif kind == "gone":
        del spot[key]
    elif isinstance(spot, dict):
        spot[draw(st.text(max_size=3))] = draw(JUNK)


NUMBERS = [
    "nan",
    "inf",
    "-1",
    "0",
    "1e308",
    "1e-320",
    "0x10",
    "1_000",
    "2.5",
    "1979-05-27",
    "12:00:00",
    "true",
]
TABLES_AND_TEXTS = ['""', '"x"', "[]", "[1]", '[""]', "{}", "[[]]", "{a = 1}", '"\\u0000"']
TOML = st.sampled_from([*NUMBERS, *TABLES_AND_TEXTS, "9" * 400, '["ddr", "ddr"]'])


@st.composite
def altered_machine(draw):
    """A machine file in which a key has another value, is gone, or stands twice."""
    lines = FORMS["machine"].valid().splitlines()
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.sampled_from([i for i, line in enumerate(lines) if "=" in line]))
        kind = draw(st.sampled_from(["value", "value", "gone", "double", "head"]))
        if kind == "value":
            lines[at] = f"{lines[at].split('=')[0]}= {draw(TOML)}"
        elif kind == "gone":
            lines[at] = ""
        elif kind == "double":
            lines.insert(at, lines[at])
        else:
            lines.insert(
                at,
                draw(
                    st.sampled_from(
                        ["[[links]]", "[links]", "[accelerator]", "[[memories]]", "[a.b]"]
                    )
                ),
            )
    return "\n".join(lines).encode()
