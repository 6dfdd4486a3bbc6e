"""The verifier refuses cyclic waits, and programs beyond their windows or memory limits."""

import dataclasses

from ratrain_jax.lowering.memory import memory_analysis
from ratrain_jax.lowering.program import Forward, Free, Recover, SendActivation, SendGradient
from ratrain_jax.lowering.verify import verify
from tests.programs import make_program, moved, place, with_order
from tests.verifier import program as program
from tests.verifier import refused


def test_cyclic_wait_between_stages(program):
    stage, index = place(program, SendGradient, 0, microbatch=0)
    later = next(
        n
        for n, op in enumerate(program.order[0])
        if n > index and isinstance(op, SendActivation) and op.microbatch == 1
    )
    text = refused(moved(program, stage, later, index), "A cyclic wait: ")
    assert "which waits for" in text


def test_window_of_layers():
    program = make_program(1, window_layers=3)
    verify(program)
    tight = dataclasses.replace(program.settings, window_layers=2)
    text = refused(
        dataclasses.replace(program, settings=tight),
        "in flight, of 2 layers that its window allows",
    )
    assert "[GS" in text


def test_window_of_bytes():
    program = make_program(1, window_layers=3)
    one = dataclasses.replace(program.settings, window_bytes=1)
    refused(dataclasses.replace(program, settings=one), "above the 1 of its window")
    verify(make_program(1, window_layers=3, window_bytes=1))


def test_window_of_recovered_microbatches():
    program = make_program(schedule="gpipe", recovered=(1, 1), recovery="forward")
    ops = list(program.order[0])
    recovers = [op for op in ops if isinstance(op, Recover)]
    rest = [op for op in ops if not isinstance(op, Recover)]
    last = max(n for n, op in enumerate(rest) if isinstance(op, Forward))
    rest[last + 1 : last + 1] = recovers
    recovered = {number for op in recovers for number in op.writes}
    early = [op for op in rest if isinstance(op, Free) and op.reads[0] in recovered]
    wrong = with_order(program, 0, [op for op in rest if op not in early] + early)
    refused(wrong, "has recovered the residuals of 3 microbatches, where its window allows 1")


def test_memory_limit(program):
    peaks = memory_analysis(program).peaks
    fits = dataclasses.replace(program.settings, memory_limit=peaks)
    verify(dataclasses.replace(program, settings=fits))
    tight = dataclasses.replace(program.settings, memory_limit=(peaks[0], peaks[1] - 1))
    text = refused(
        dataclasses.replace(program, settings=tight),
        f"Stage 1 needs {peaks[1]:,} bytes a device, above its limit of {peaks[1] - 1:,}",
    )
    assert "\n> " in text
