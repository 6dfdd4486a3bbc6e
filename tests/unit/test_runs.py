"""The file of a run of `ratrain train`."""

import json
import math

import pytest

from ratrain_jax.cli.runs import Step, check, opened, write
from ratrain_jax.cli.text import passages
from ratrain_jax.errors import OptionError

HEAD = {"model": "small"}


def step(number, loss=1.5):
    return Step(number, loss, 0.1, 100.0, 1 << 20)


def steps_of(path):
    head, *lines = map(json.loads, path.read_text().splitlines())
    assert (head["format"], head["version"]) == ("ratrain-run", 1)
    return head, [(line["step"], line["loss"]) for line in lines]


def written(path, numbers, start=0, **head):
    with opened(str(path), HEAD | head, start) as file:
        for number in numbers:
            write(file, step(number))


def test_steps_are_there_while_a_run_goes(tmp_path):
    path = tmp_path / "run.jsonl"
    with opened(str(path), HEAD, 0) as file:
        assert steps_of(path) == ({"format": "ratrain-run", "version": 1, **HEAD}, [])
        write(file, step(1, math.inf))
        assert steps_of(path)[1] == [(1, None)]
    assert [one.name for one in tmp_path.iterdir()] == ["run.jsonl"]


def test_a_run_that_goes_on_loses_what_came_after_its_checkpoint(tmp_path):
    path = tmp_path / "run.jsonl"
    written(path, range(1, 6))
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # torn when the process was killed
    written(path, [4, 5], start=3, model="renamed")
    head, steps = steps_of(path)
    assert head["model"] == "small"
    assert steps == [(n, 1.5) for n in range(1, 6)]


def test_a_run_that_begins_replaces_all(tmp_path):
    path = tmp_path / "run.jsonl"
    written(path, range(1, 6))
    written(path, [1])
    assert steps_of(path)[1] == [(1, 1.5)]


def test_a_file_that_is_lost_is_begun_where_the_run_goes_on(tmp_path):
    written(tmp_path / "run.jsonl", [4], start=3)
    assert steps_of(tmp_path / "run.jsonl")[1] == [(4, 1.5)]


@pytest.mark.parametrize("content", ["", "mine\n", "[1]\n", '{"format": "other"}\n'])
def test_another_file_is_not_gone_on_with(content, tmp_path):
    path = tmp_path / "run.jsonl"
    check(str(path), False, True)
    path.write_text(content)
    with pytest.raises(OptionError, match="not the file of a run"):
        check(str(path), False, True)
    with pytest.raises(OptionError, match="give --overwrite"):
        check(str(path), False, False)
    check(str(path), True, False)


def test_a_run_is_gone_on_with(tmp_path):
    path = tmp_path / "run.jsonl"
    written(path, [1])
    check(str(path), False, True)


def test_passages_that_are_skipped_were_drawn():
    import numpy as np

    tokens = np.arange(50, dtype=np.uint8)
    drawn = passages(tokens, 3, 4, seed=7)
    for _ in range(2):
        next(drawn)
    wanted, found = next(drawn), next(passages(tokens, 3, 4, seed=7, skipped=2))
    assert all((wanted[name] == found[name]).all() for name in wanted)
