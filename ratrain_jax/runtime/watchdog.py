"""`watchdog`: says which ops a step that makes no progress waits for.

Terms.
    A step makes **progress** when an op is launched, or one that was launched ends. An op **runs** if it was launched and
    all that it reads is there. It **has ended** once its **mark** is there: the token of its launch (see
    `ratrain_jax.runtime.launches`), or what a tiny program makes of one of its arrays; without either, once what it reads
    is there.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ratrain_jax.errors import OptionError
from ratrain_jax.lowering.mnemonics import op_label
from ratrain_jax.lowering.program import Lane, Op
from ratrain_jax.runtime import launches
from ratrain_jax.runtime.instructions import LINK, THREAD_OF, Bundle, Instruction, Plan

_logger = logging.getLogger("ratrain_jax.watchdog")
_LANES = (Lane.COMPUTE, Lane.LINK)

_active: Watchdog | None = None


@contextlib.contextmanager
def watchdog(timeout: float = 60.0, then: Callable[[str], Any] | None = None) -> Iterator[None]:
    """Watches all decorated steps that are called within: says what they wait for once they make no progress.

    The message is logged as an error of the logger `ratrain_jax.watchdog`; without any set-up of `logging` that is a line
    group on standard error. It names each lane's first op that has not ended, with its stage and microbatch, and what that
    waits for. It is given once a stall. Results stay as they are, bit for bit, and a step between calls (the data are
    slow to come) is no stall. The op-by-op runs of `census` and `ratrain_jax.profile` are not watched.

    Args:
        timeout: seconds without progress. An op that takes longer is reported too; so choose more than the longest takes.
        then: called with the message afterwards, in the watchdog's thread: `lambda message: os._exit(1)` ends the process,
            for a supervisor to start it again.

    Raises:
        OptionError: the timeout is no number over 0, or another watchdog is at work.

    Example:
        >>> import ratrain_jax as rt
        >>> with rt.watchdog(timeout=300):
        ...     pass  # for batch in batches: state, metrics = train_step(state, batch)
    """
    global _active
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise OptionError(f"timeout={timeout!r}: expected seconds, a number over 0.")
    if _active is not None:
        raise OptionError("a watchdog is at work already; leave its `with` first.")
    _active = found = Watchdog(timeout, then)
    try:
        found.start()
        yield
    finally:
        _active = None
        found.stop()


def active() -> Watchdog | None:
    """The watchdog at work."""
    return _active


class Watchdog:
    """Looks at steps from a thread of its own.

    Args:
        timeout: seconds without progress.
        then: called with the message.
    """

    def __init__(self, timeout: float, then: Callable[[str], Any] | None) -> None:
        self._timeout, self._then = timeout, then
        self._steps: collections.deque[Flight] = collections.deque()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="ratrain-watchdog", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def stop(self) -> None:
        """Looks no more; what it is about to say, it says first."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def flight(self, name: str, plan: Plan) -> Flight:
        """A step that is about to be launched.

        Args:
            name: what to call it.
            plan: its instructions.
        """
        flight = Flight(name, plan)
        self._steps.append(flight)
        return flight

    def _look(self) -> None:
        since, said, seen = time.monotonic(), False, None
        while not self._ended.wait(min(1.0, self._timeout / 4)):
            while self._steps and self._steps[0].look():
                self._steps.popleft()
            now = [(id(step), *step.progress()) for step in self._steps]
            if now != seen or not now:
                since, said, seen = time.monotonic(), False, now
            elif not said and time.monotonic() - since >= self._timeout:
                said = True
                self._say()

    def _say(self) -> None:
        lines = self._steps[0].waiting()
        behind = len(self._steps) - 1
        head = f"no progress for {self._timeout:g} s in {self._steps[0].name}"
        head += f", nor in the {behind} behind it" if behind else ""
        message = "\n  ".join([f"{head}. It waits for:", *lines])
        _logger.error(message)
        if self._then is not None:
            self._then(message)


class Flight:
    """One step under way: what was launched of it, and what of that has not been seen to end.

    Args:
        name: of the step.
        plan: its instructions.
    """

    def __init__(self, name: str, plan: Plan) -> None:
        self.name = name
        self._threads = plan.threads
        self._launched = [0, 0]
        # By thread and stage: numbers of instructions, and what is there once they have ended.
        self._pending: dict[tuple[int, int], collections.deque[tuple[Instruction, Any]]] = {}
        self._given_up = False

    def watch(self, instruction: Instruction, made: Sequence[Bundle]) -> None:
        """A hook for the launching threads: notes a launch."""
        thread = THREAD_OF.get(type(instruction.op), LINK)
        lane = (thread, instruction.op.stages[-1])
        self._pending.setdefault(lane, collections.deque()).append((instruction, _mark(made)))
        self._launched[thread] += 1

    def give_up(self) -> None:
        """Its launching failed: nothing more comes."""
        self._given_up = True

    def look(self) -> bool:
        """Forgets what has ended; whether that is the whole step."""
        lanes = list(self._pending.values())
        while any(self._forget_first(ops) for ops in lanes):
            pass
        whole = all(n == len(t) for n, t in zip(self._launched, self._threads, strict=True))
        return (whole or self._given_up) and not any(list(self._pending.values()))

    def _forget_first(self, ops: collections.deque[tuple[Instruction, Any]]) -> bool:
        """Forgets the first op of a lane if it has ended; whether it had."""
        if not ops:
            return False
        instruction, mark = ops[0]
        ended = mark.is_ready() if mark is not None else not self._cause(instruction, self._late())
        if ended:
            ops.popleft()
        return ended

    def progress(self) -> tuple[int, ...]:
        """Numbers that change as it makes progress."""
        return (*self._launched, sum(map(len, list(self._pending.values()))))

    def waiting(self) -> list[str]:
        """For each thread and stage its first op that has not ended, and why: those that run first."""
        heads = {lane: ops[0][0] for lane, ops in list(self._pending.items()) if ops}
        late = self._late()
        found: list[tuple[int, str]] = []
        for lane, instruction in sorted(heads.items()):
            cause = self._cause(instruction, late)
            why = "runs" if cause is None else f"is launched, and needs {_named(cause.op)}"
            found.append(
                (0 if cause is None else 1, f"{_described(instruction.op, lane[0])} {why}")
            )
        for thread, count in enumerate(self._launched):
            if count == len(self._threads[thread]) or self._given_up:
                continue
            instruction = self._threads[thread][count]
            cause = self._cause(instruction, self._missing(thread))
            why = (
                "is being launched"
                if cause is None
                else f"is not launched, and needs {_named(cause.op)}, which is not launched either"
            )
            found.append(
                (2 if cause is not None else 0, f"{_described(instruction.op, thread)} {why}")
            )
        return [line for _, line in sorted(found, key=lambda item: item[0])]

    def _late(self) -> dict[int, Instruction]:
        """What was launched and has not ended, by value."""
        pending = [item for ops in list(self._pending.values()) for item in list(ops)]
        return {value: instruction for instruction, _ in pending for value in instruction.writes}

    def _missing(self, thread: int) -> dict[int, Instruction]:
        """What the other thread has not launched, by value."""
        other = 1 - thread
        rest = self._threads[other][self._launched[other] :]
        return {value: instruction for instruction in rest for value in instruction.writes}

    @staticmethod
    def _cause(instruction: Instruction, late: dict[int, Instruction]) -> Instruction | None:
        """Whose values an op still needs, if any's."""
        return next((late[v] for v in instruction.reads if v in late), None)


def _mark(made: Sequence[Bundle]) -> Any:
    """What is there once an op has ended, and is never used up; None where there is no such thing."""
    token = launches.last_token()
    if token is not None:
        return token
    array = next((array for bundle in made for array in bundle), None)
    # What is sent between groups of several devices has no token, and one more launch on them could be one too many.
    several = array is None or len(array.sharding.device_set) > 1
    return None if several else _behind(array)


@functools.partial(jax.jit, keep_unused=True)
def _behind(array: Any) -> Any:
    """Exists once an array does."""
    return jnp.int32(0)


def _named(op: Op) -> str:
    return f"{type(op).__name__} ({op_label(op)}) of stage {op.stage}"


def _described(op: Op, thread: int) -> str:
    part = getattr(op, "microbatch", None)
    microbatch = "" if part is None else f", microbatch {part}"
    stages = " and ".join(map(str, op.stages))
    plural = "s" if len(op.stages) > 1 else ""
    return f"stage{plural} {stages}{microbatch}, {_LANES[thread]} lane: {type(op).__name__} ({op_label(op)})"
