"""The steps that a worker holds: compiled once, run in blocks of some that follow each other."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from typing import Any

import gpt_step
import jax
import optax
from links.cases import CLIPPED_FROM, LAYERS, WIDTH, WINDOW
from links.seconds import compute_seconds, forward_seconds, ideal_seconds, moved, once

import ratrain_jax as rt
from ratrain_jax.lowering.program import Backward, Forward, Recover, Send


class Steps:
    """Answers what a worker is asked; every worker of a run is asked the same."""

    def __init__(self) -> None:
        self._compiled: dict[str, Any] = {}
        self._states: dict[str, Any] = {}
        self._batches: dict[str, Any] = {}
        self._fresh: dict[bool, Any] = {}
        self._profile: Any = None

    def compile(self, options: dict[str, dict[str, Any]], rows: int, clip: bool) -> float:
        """Forgets all steps, and compiles others; gives the seconds.

        Args:
            options: of each, by name.
            rows: of a microbatch on each rank.
            clip: whether the global norm is clipped.
        """
        start = time.perf_counter()
        self._compiled.clear()
        self._states.clear()
        for name, chosen in options.items():
            whole = chosen["data_parallel"] * chosen["microbatches"] * rows
            step = rt.train_step(window=rt.Window(layers=WINDOW), **chosen)(gpt_step.pipelined)
            batch = self._batches[name] = gpt_step.make_batch(whole)
            state = self._states[name] = self._state(clip)
            self._compiled[name] = step.lower(state, batch).compile(progress=False)
        return time.perf_counter() - start

    def _state(self, clip: bool) -> Any:
        if clip not in self._fresh:
            adam = optax.adamw(1e-3)
            optimizer = optax.chain(optax.clip_by_global_norm(CLIPPED_FROM), adam) if clip else adam
            self._fresh[clip] = gpt_step.make_state(LAYERS, WIDTH, optimizer)
        return self._fresh[clip]

    def run(self, name: str, steps: int) -> dict[str, Any]:
        """Runs steps that follow each other, after one that is not counted.

        Returns:
            Seconds from the loss of one step to that of the next, CPU seconds of a step, and the last loss.
        """
        seen = _Losses()
        busy = time.process_time()
        for _ in range(1 + steps):
            self._states[name], metrics = self._compiled[name](
                self._states[name], self._batches[name]
            )
            seen.watch(metrics["loss"])
        ends, loss = seen.finish()
        jax.block_until_ready(self._states[name])
        busy = time.process_time() - busy
        return {
            "seconds": [after - before for before, after in itertools.pairwise(ends)],
            "busy": busy / (1 + steps),
            "loss": loss,
        }

    def gaps(self, name: str) -> tuple[float, float]:
        """Traces a step that follows others.

        Returns:
            Seconds from its first Forward to its last Backward, and those of them in which nothing is computed.
        """
        measured = self._traced(name)
        computed = [m for m in measured.ops if isinstance(m.op, (Forward, Recover, Backward))]
        start, end = min(m.start for m in computed), max(m.end for m in computed)
        return end - start, end - start - sum(m.end - m.start for m in computed)

    def picture(self, path: str, names: list[str]) -> None:
        """Draws traced steps below each other."""
        first, *others = [self._traced(name) for name in names]
        if jax.process_index() == 0:
            first.plot(*others).savefig(path, dpi=150)

    def _traced(self, name: str) -> Any:
        self.run(name, 1)
        step = self._compiled[name]
        result, measured = step.trace(self._states[name], self._batches[name])
        self._states[name], _ = result
        return measured

    def profile(self, name: str, repetitions: int) -> None:
        """Profiles a step on the links as they are, for what is asked about afterwards."""
        step, state = self._compiled[name], self._states[name]
        self._profile = rt.profile(
            step, state, self._batches[name], repetitions=repetitions, progress=False
        )

    def about(self, name: str) -> dict[str, float]:
        """By the profile, compute seconds of a step and of a stage's forward; bytes that collectives and a send move."""
        lowered = self._compiled[name].lowered
        seconds = self._profile.seconds(lowered)
        bytes_of = moved(lowered.program)
        sent = [count for op, count in bytes_of.items() if isinstance(op, Send)]
        return {
            "compute": compute_seconds(lowered.program, seconds),
            "forward": forward_seconds(lowered.program, seconds),
            "bytes": sum(bytes_of.values()),
            "gradients": once(bytes_of),
            "sent": max(sent, default=0.0),
        }

    def predict(self, name: str, rate: float) -> dict[str, float]:
        """Seconds of a step by the simulator: with the profile, and without any overhead at a rate."""
        lowered = self._compiled[name].lowered
        ideal = ideal_seconds(lowered.program, self._profile.seconds(lowered), rate)
        return {
            "profile": rt.simulate(lowered, "generic", profile=self._profile).step_seconds,
            "ideal": rt.simulate(lowered, "generic", seconds=ideal).step_seconds,
        }


class _Losses:
    """Notes when losses become known, in a thread of its own: the calls of steps return earlier or later."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ends: list[float] = []
        self._last = 0.0
        self._thread = threading.Thread(target=self._take)
        self._thread.start()

    def watch(self, loss: Any) -> None:
        self._queue.put(loss)

    def finish(self) -> tuple[list[float], float]:
        self._queue.put(None)
        self._thread.join()
        return self._ends, self._last

    def _take(self) -> None:
        while (loss := self._queue.get()) is not None:
            jax.block_until_ready(loss)
            self._ends.append(time.perf_counter())
            self._last = float(loss)
