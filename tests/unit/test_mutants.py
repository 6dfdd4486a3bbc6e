"""The verifier, proved by mutation: what a judge of its own finds wrong is refused, and legal reorderings pass."""

import collections
import random

import pytest

from ratrain_jax.errors import VerificationError
from ratrain_jax.lowering.verify import verify
from ratrain_jax.lowering.verify.shape import shape_of
from ratrain_jax.lowering.verify.window import check_window
from tests.mutants import KINDS, Wrong, mutant, outcome
from tests.programs import make_program

SHAPES = {
    "1f1b": {"schedule": "1f1b", "stages": 2, "microbatches": 3},
    "gpipe": {
        "schedule": "gpipe",
        "stages": 3,
        "microbatches": 2,
        "recovery": "forward",
        "recovered": (1, 0, 1),
    },
    "ratrain": {"stages": 2, "microbatches": 2, "data_parallel": 2, "clip": True},
    "deferred": {
        "stages": 2,
        "microbatches": 2,
        "data_parallel": 2,
        "clip": True,
        "validation": "deferred",
    },
    "zero 2": {"stages": 2, "microbatches": 3, "data_parallel": 2, "zero": 2},
    "recovered": {
        "stages": 4,
        "microbatches": 4,
        "recovery": "backward",
        "recovered": (1, 1, 0, 1),
    },
    "no prefetch": {"stages": 3, "microbatches": 2, "update_prefetch": False, "zero": 2},
}


def is_refused(check, program):
    try:
        check(program)
    except VerificationError:
        return True
    return False


def judged(program, wanted):
    try:
        return "right" if outcome(program) == wanted else "other results"
    except Wrong as wrong:
        return str(wrong).split(" %")[0].split(" [")[0]


def hunt(name, count):
    """Judges and verifies mutants; returns how many there were of each kind and fate."""
    program = make_program(**SHAPES[name])
    wanted = outcome(program)
    chance = random.Random(name)
    fates = collections.Counter()
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        wrong = mutant(program, kind, chance)
        if wrong == program:
            continue
        verdict, refused = judged(wrong, wanted), is_refused(verify, wrong)
        if verdict != "right":
            assert refused, f"mutant {number} of {name!r} ({kind}) passes, but it {verdict}"
        elif refused and kind in ("swap", "move"):
            out_of_window = is_refused(lambda p: check_window(shape_of(p)), wrong)
            assert out_of_window, f"mutant {number} of {name!r} ({kind}) is right, but refused"
        fates[kind, verdict, "refused" if refused else "passes"] += 1
    return fates


def report(fates):
    total = sum(fates.values())
    rows = [f"{n:6} {kind:14} {verdict:34} {fate}" for (kind, verdict, fate), n in fates.items()]
    return "\n".join([f"{total} mutants", *sorted(rows, key=lambda row: row[7:])])


@pytest.mark.parametrize("name", SHAPES)
def test_wrong_mutants_are_refused_and_legal_reorderings_pass(name):
    fates = hunt(name, 80)
    assert {fate for _, _, fate in fates} == {"refused", "passes"}


@pytest.mark.slow
def test_more_than_two_thousand_mutants():
    fates = sum((hunt(name, 400) for name in SHAPES), collections.Counter())
    print(report(fates))
    assert sum(fates.values()) >= 2000
