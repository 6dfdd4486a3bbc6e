"""Runs the two lists of a step, each in its thread, and stops both when one fails.

The compute list runs in the thread that called the step, the link list in one of its own. A Ctrl-C comes up in the calling
thread, between any two of its instructions; whatever it breaks off, the other thread must not wait for ever for a value.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence

from ratrain_jax.lowering.program import Program
from ratrain_jax.runtime import watchdog
from ratrain_jax.runtime.instructions import (
    COMPUTE,
    LINK,
    Bundle,
    Inbox,
    Instruction,
    Plan,
    Stopped,
    run,
)
from ratrain_jax.runtime.nans import nan_check
from ratrain_jax.runtime.workers import Task, Workers

Hook = Callable[[Instruction, Sequence[Bundle]], None]


class Threads:
    """Launches the steps of one program.

    Args:
        name: what messages call the step.
        program: the program.
        plan: its instructions.
        link: the thread for the link list.
    """

    def __init__(self, name: str, program: Program, plan: Plan, link: Workers) -> None:
        self._name, self._program, self._plan = name, program, plan
        self._link = link

    def launch(self, tables: Sequence[dict[int, Bundle]], watch: Hook | None = None) -> None:
        """Launches a step.

        Args:
            tables: each thread's inputs; afterwards what it made.
            watch: called after each launch with what it made.

        Raises:
            BaseException: what came up in either thread, with a note that names the op. Both have stopped then, unless a
                second Ctrl-C came while the other one was waited for.
        """
        dog = watchdog.active()
        if dog is None:
            return self._launch(tables, (nan_check(self._program), watch))
        flight = dog.flight(self._name, self._plan)
        try:
            self._launch(tables, (nan_check(self._program), flight.watch, watch))
        except BaseException:
            flight.give_up()
            raise

    def _launch(self, tables: Sequence[dict[int, Bundle]], hooks: Sequence[Hook | None]) -> None:
        watch = _all_of([hook for hook in hooks if hook is not None])
        launching = threading.Lock()
        to_compute, to_link = Inbox(), Inbox(giver=launching)
        compute, link = self._plan.threads
        task: Task | None = None
        try:
            # However this thread is stopped, the lock is released, and by that the link thread stops too.
            with launching:
                task = self._link.submit(
                    functools.partial(run, link, tables[LINK], to_link, to_compute, watch)
                )
                # Where the link thread has failed, its error is the one to raise.
                with contextlib.suppress(Stopped):
                    run(compute, tables[COMPUTE], to_compute, to_link, watch)
            task.result()
        except BaseException:
            if task is not None:
                task.wait()
            raise


def _all_of(hooks: Sequence[Hook]) -> Hook | None:
    """One hook that calls several; None for none."""
    if len(hooks) < 2:
        return hooks[0] if hooks else None

    def watch(instruction: Instruction, made: Sequence[Bundle]) -> None:
        for hook in hooks:
            hook(instruction, made)

    return watch
