"""Files that are damaged in any way: read or refused with one sentence of ours; never a traceback from within, never a hang.

What is read from a damaged file must be of use: it can be printed, written, verified, simulated, or is refused there with an
error of ours. Perfetto traces, pictures and reports are only written.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ratrain_jax as rt
from ratrain_jax.errors import MachineError, PlanError, RATrainError
from tests.malformed import (
    EVERY_FORM,
    FORMS,
    ROUNDS,
    TABLES,
    a_plan,
    altered,
    altered_machine,
    check,
    damaged,
    readable,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("malformed")


@EVERY_FORM
def test_a_file_that_is_right_is_read_and_of_use(name, folder):
    form = FORMS[name]
    path = folder / f"right.{form.suffix}"
    path.write_text(form.valid())
    form.use(form.load(path))


DEEP = [b"[" * 200_000, b'{"a":' * 100_000, b"(" * 100_000, b"a = " + b"[" * 100_000]
SHORT = [b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf{}", b"{}", b"[]", b"null", b'{"format": 1}']
LONG = [b"9" * 10_000, b"a = " + b"9" * 10_000, b"\n" * 100_000, b"a" * 1_000_000]
PICKLE = b"cos\nsystem\n(S'true'\ntR."


@EVERY_FORM
@pytest.mark.parametrize("content", [*SHORT, *DEEP, *LONG, PICKLE], ids=lambda c: repr(c[:12]))
def test_what_is_no_such_file_at_all_is_refused(name, content, folder):
    form = FORMS[name]
    path = folder / f"other.{form.suffix}"
    path.write_bytes(content)
    with pytest.raises(RATrainError) as caught:
        form.load(path)
    readable(str(caught.value))


FOUND = [  # by these tests: each was a traceback from within
    ('name = "mt3000"', "name = 3", "name is 3; make it a string"),
    ('name = "DDR"', "name = [1]", "memories.[1].name is [1]; make it a string"),
    ("latency = 1e-5", "latency = 1e400", "latency is inf, out of range"),
    ("cores = 24", f"cores = {'9' * 400}", "cores is 999"),
    ("cores = 24", f"cores = {'9' * 5000}", "is not valid TOML"),
    ("cores = 24", "cores = 1.5", "cores is 1.5, which is not a whole number"),
    ('lanes = ["compute", "link"]', "lanes = 2.5", "lanes is 2.5; name two"),
    ('lanes = ["compute", "link"]', 'lanes = "ab"', "lanes is 'ab'; name two"),
    ('lanes = ["compute", "link"]', "slowdown = 1\n\\g<0>", "slowdown is 1; give one factor"),
    ("assumed = ", f"more = {'[' * 100_000}\nassumed = ", "is not valid TOML"),
]


@pytest.mark.parametrize(("old", "new", "message"), FOUND, ids=lambda text: text[:20])
def test_a_machine_with_a_value_of_another_kind_is_refused_by_its_key(old, new, message, folder):
    content = FORMS["machine"].valid()
    assert old in content
    path = folder / "found.toml"
    path.write_text(content.replace(old, new.replace("\\g<0>", old), 1))
    with pytest.raises(MachineError) as caught:
        rt.machines.load(path)
    assert message in str(caught.value)
    readable(str(caught.value))


@pytest.mark.parametrize("count", [0, 3])
def test_a_plan_without_an_entry_for_each_stage_is_refused(count):
    table = json.loads(a_plan().to_json())
    table["stages"] = table["stages"][:1] * count
    with pytest.raises(PlanError, match=rf"stages: expected one entry for each .* found {count}\."):
        rt.Plan.from_json(json.dumps(table))


@EVERY_FORM
@given(content=st.binary(max_size=200))
@ROUNDS
def test_any_bytes(name, folder, content):
    check(name, content, folder)


@EVERY_FORM
@given(data=st.data())
@ROUNDS
def test_damaged_bytes(name, folder, data):
    check(name, data.draw(damaged(name)), folder)


@pytest.mark.parametrize("name", TABLES)
@given(data=st.data())
@ROUNDS
def test_altered_fields(name, folder, data):
    check(name, data.draw(altered(name)), folder)


@given(content=altered_machine())
@ROUNDS
def test_altered_keys_of_a_machine(folder, content):
    check("machine", content, folder)


@pytest.mark.slow
@EVERY_FORM
@given(data=st.data())
@settings(ROUNDS, max_examples=3000)
def test_many_damaged_files(name, folder, data):
    fields = altered_machine() if name == "machine" else altered(name)
    check(
        name,
        data.draw(damaged(name) | (fields if name != "program text" else st.nothing())),
        folder,
    )
