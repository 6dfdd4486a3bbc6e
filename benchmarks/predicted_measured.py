"""Predicted against measured step times of the benchmark GPT on this machine, after profiling it.

python benchmarks/predicted_measured.py

Configurations with the same number of devices share a process. In turn, each process profiles its splits and predicts from
that, then runs each of its configurations for some steps that follow each other. Shown are medians over the rounds; the
error is the median of the rounds' errors, as the machine is not equally fast at all times. `fastest` is the error of the
least prediction against the least measurement: a virtual machine's neighbours can make it slower, but never faster. What
other processes of the machine do meanwhile is measured too: what they disturbed is done again, and told.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from ratrain_jax.profiling.calm import DISTURBED, Others

LAYERS, MICROBATCHES, ROWS = 4, 4, 1
TRIES, PATIENCE, GLANCE = 2, 5.0, 0.2
"""How often something is measured where others disturb, seconds to wait for them, and between looks at them."""
UNLIKE = 0.05
"""By which share step times of two schedules must differ for their order to count."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A configuration.

    Attributes:
        stages: P.
        ranks: D.
        schedule: of the step.
        recovery: of the step.
    """

    stages: int
    ranks: int
    schedule: str
    recovery: str

    def __str__(self) -> str:
        return f"{self.stages} × {self.ranks}  {self.schedule:8}{self.recovery:9}"


CASES = (
    Case(1, 1, "ratrain", "none"),
    Case(1, 2, "ratrain", "none"),
    *(Case(2, 1, schedule, "none") for schedule in ("gpipe", "ratrain")),
    Case(2, 1, "1f1b", "backward"),
    Case(2, 1, "ratrain", "forward"),
    Case(3, 1, "1f1b", "backward"),
    Case(4, 1, "gpipe", "none"),
    Case(4, 1, "1f1b", "backward"),
    Case(4, 1, "ratrain", "forward"),
    Case(2, 2, "gpipe", "none"),
    Case(2, 2, "1f1b", "backward"),
    Case(2, 2, "ratrain", "forward"),
)


class Child:
    """The configurations of one number of devices, in a process of their own, which does what it is told."""

    def __init__(self, devices: int) -> None:
        flags = f"--xla_force_host_platform_device_count={devices}"
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", str(devices)],
            env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> Any:
        """Lets it do something, and gives its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a measured process ended early; see its message above")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Worker:
    """What a child does: holds its compiled configurations, predicts their step times, and runs them."""

    def __init__(self, devices: int) -> None:
        import gpt_step
        import jax

        import ratrain_jax as rt

        self.cases = [case for case in CASES if case.stages * case.ranks == devices]
        ranks = {case.ranks for case in self.cases}
        self.batches = {d: gpt_step.make_batch(MICROBATCHES * ROWS * d) for d in ranks}
        self.state = jax.tree.map(jax.numpy.asarray, gpt_step.make_state(LAYERS))
        self.compiled, self.states = {}, {}
        for case in self.cases:
            step = rt.train_step(
                stages=case.stages,
                data_parallel=case.ranks,
                microbatches=MICROBATCHES,
                schedule=case.schedule,
                recovery=case.recovery,
            )(gpt_step.pipelined)
            batch = self.batches[case.ranks]
            self.compiled[case] = step.lower(self.state, batch).compile()
            self.states[case], _ = self.compiled[case](self.state, batch)

    def predict(self) -> list[float]:
        """Profiles each split once; the step time of each case, by the profile of its split."""
        import ratrain_jax as rt

        profiles, found = {}, []
        for case in self.cases:
            compiled, split = self.compiled[case], (case.stages, case.ranks)
            if split not in profiles:
                batch = self.batches[case.ranks]
                profiles[split] = rt.profile(compiled, self.state, batch, repetitions=1)
            missing = profiles[split].missing(compiled.lowered)
            if missing:
                raise SystemExit(f"not measured: {', '.join(map(str, missing))}")
            timeline = rt.simulate(compiled.lowered, "cpu", profile=profiles[split])
            found.append(timeline.step_seconds)
        return found

    def measure(self, number: int, steps: int) -> float:
        """Seconds a step of a case, of steps that follow each other."""
        import jax

        case, returned = self.cases[number], []
        # A call returns once the step before the last has ended, so that later calls return step by step.
        for _ in range(steps + 3):
            self.states[case], metrics = self.compiled[case](
                self.states[case], self.batches[case.ranks]
            )
            returned.append(time.perf_counter())
        jax.block_until_ready((self.states[case], metrics))
        return (returned[-1] - returned[2]) / steps


def child(devices: int) -> None:
    """Compiles, then answers requests from standard input."""
    worker = Worker(devices)
    for line in sys.stdin:
        request, busy = json.loads(line), time.process_time()
        answer: Any = None
        if request["what"] == "predict":
            answer = worker.predict()
        elif request["what"] == "measure":
            answer = worker.measure(request["number"], request["steps"])
        print(json.dumps({"answer": answer, "busy": time.process_time() - busy}), flush=True)


def wait_for_calm() -> None:
    """Waits until other processes rest, but not for long."""
    until = time.perf_counter() + PATIENCE
    while time.perf_counter() < until:
        watch = Others()
        time.sleep(GLANCE)
        if (watch.cores() or 0.0) <= DISTURBED:
            return


def calmly(process: Child, **request: Any) -> tuple[Any, float]:
    """The answer to a request, and how many cores others used; the calmest of a few tries."""
    found = []
    for _ in range(TRIES):
        wait_for_calm()
        watch = Others()
        reply = process.ask(**request)
        others = watch.cores(own=reply["busy"]) or 0.0
        found.append((others, reply["answer"]))
        if others <= DISTURBED:
            break
    others, answer = min(found, key=lambda pair: pair[0])
    return answer, others


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """One case in one round.

    Attributes:
        predicted: seconds.
        measured: seconds.
        others: cores that other processes used meanwhile, at the worse of the two.
    """

    predicted: float
    measured: float
    others: float


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One case over all rounds, those alone that nothing disturbed where there are some.

    Attributes:
        predicted: seconds.
        measured: seconds.
        error: share; the median over rounds.
        fastest: share; of the least prediction and measurement.
        calm: rounds that nothing disturbed.
    """

    predicted: float
    measured: float
    error: float
    fastest: float
    calm: int


def result(rounds: list[Round]) -> Result:
    """Takes medians."""
    calm = [one for one in rounds if one.others <= DISTURBED]
    used = calm or rounds
    return Result(
        statistics.median(one.predicted for one in used),
        statistics.median(one.measured for one in used),
        statistics.median(one.predicted / one.measured - 1 for one in used),
        min(one.predicted for one in used) / min(one.measured for one in used) - 1,
        len(calm),
    )


def compare(minutes: float, steps: int) -> None:
    """Measures for so long, and prints the tables."""
    start, rounds = time.perf_counter(), 0
    processes: dict[int, Child] = {}
    for devices in sorted({case.stages * case.ranks for case in CASES}):
        processes[devices] = Child(devices)
        processes[devices].ask(what="compile")
        print(f"{devices} devices are compiled", file=sys.stderr, flush=True)
    found: dict[Case, list[Round]] = {case: [] for case in CASES}
    passed = 0.0
    while not rounds or passed + passed / (rounds + 1) < minutes * 60:
        for devices, process in processes.items():
            cases = [case for case in CASES if case.stages * case.ranks == devices]
            answers, others = calmly(process, what="predict")
            for place, (case, seconds) in enumerate(zip(cases, answers, strict=True)):
                took, meanwhile = calmly(process, what="measure", number=place, steps=steps)
                found[case].append(Round(seconds, took, max(others, meanwhile)))
        rounds, passed = rounds + 1, time.perf_counter() - start
        print(f"round {rounds} ended after {passed:.0f} s", file=sys.stderr, flush=True)
    for process in processes.values():
        process.close()
    print(
        f"GPT of {LAYERS} layers, {MICROBATCHES} microbatches of {ROWS}; {rounds} rounds, {steps} steps each"
    )
    results = {case: result(found[case]) for case in CASES}
    show(results)
    show_order(results)


def show(results: dict[Case, Result]) -> None:
    """Prints each case, and the mean error."""
    print(
        f"{'stages × D':27}{'predicted ms':>14}{'measured ms':>13}{'error':>8}{'fastest':>9}{'calm':>6}"
    )
    for case, one in results.items():
        told, took = one.predicted * 1e3, one.measured * 1e3
        print(
            f"{case!s:27}{told:14.1f}{took:13.1f}{one.error:+8.1%}{one.fastest:+9.1%}{one.calm:6}"
        )
    for name in ("error", "fastest"):
        errors = [abs(getattr(one, name)) for one in results.values()]
        print(f"{name}: mean {statistics.mean(errors):.1%}, largest {max(errors):.1%}")


def show_order(results: dict[Case, Result]) -> None:
    """Prints whether pairs on the same devices that differ are predicted in the measured order."""
    right, wrong = 0, []
    for one, other in itertools.combinations(results, 2):
        if (one.stages, one.ranks) != (other.stages, other.ranks):
            continue
        took = results[one].measured / results[other].measured
        if max(took, 1 / took) <= 1 + UNLIKE:
            continue
        if (took > 1) == (results[one].predicted > results[other].predicted):
            right += 1
        else:
            wrong.append(f"{one} and {other}")
    print(
        f"of pairs on the same devices that differ by more than {UNLIKE:.0%}, {right} in the measured order,"
        f" {len(wrong)} not {'; '.join(wrong)}"
    )


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=6, help="rounds are made while they fit")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
    else:
        compare(options.minutes, options.steps)


if __name__ == "__main__":
    main()
