"""Threads that make calls for others, and cannot be broken by a Ctrl-C.

Python raises a KeyboardInterrupt in the main thread between any two of its instructions. Where that is inside a `Condition`,
as `concurrent.futures` and `threading.Event` use them, its lock may stay locked, and every thread that needs it hangs. Here
threads share only locks and simple queues, which are left alone or changed as a whole.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE_AT_EXIT = 60.0
"""Seconds for which the end of the process waits for a call that is being made; what XLA runs cannot be broken off."""


class Task:
    """A call that a worker makes.

    Args:
        call: what to call.
    """

    __slots__ = ("_call", "_claim", "_error", "_over", "_result")

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._claim, self._over = threading.Lock(), threading.Lock()
        self._over.acquire()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Makes the call, unless it is cancelled."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
        finally:
            self._over.release()

    def cancel(self) -> bool:
        """Keeps the call from being made; whether that was still possible."""
        return self._claim.acquire(blocking=False)

    def wait(self) -> BaseException | None:
        """Waits until the call has ended, and gives what it raised; must not be cancelled."""
        with self._over:
            error = self._error
        return error

    @property
    def failed(self) -> bool:
        """Whether the call has raised."""
        return self._error is not None

    def result(self) -> Any:
        """Waits for what the call gives.

        Raises:
            BaseException: what the call raised.
        """
        error = self.wait()
        if error is not None:
            raise error
        return self._result


class Workers:
    """Some threads that make calls in the order in which they are asked for. They end with this object or the process.

    Args:
        count: how many threads.
        name: of the threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        for number in range(count):
            busy = threading.Lock()
            _busy.append(busy)
            thread = threading.Thread(
                target=_work, args=(self._tasks, busy), name=f"{name}_{number}", daemon=True
            )
            thread.start()
            weakref.finalize(self, self._tasks.put, None)

    def submit(self, call: Callable[[], Any]) -> Task:
        """Asks for a call."""
        task = Task(call)
        self._tasks.put(task)
        return task

    def call(self, call: Callable[[], T]) -> T:
        """Makes a call in a worker and waits for what it gives. Where the wait is broken off, the call is over or never made."""
        task = Task(call)
        try:
            self._tasks.put(task)
            return task.result()
        except BaseException:
            if not task.cancel():
                task.wait()
            raise


_busy: list[threading.Lock] = []
"""Of each thread, held while it makes a call."""


def _work(tasks: queue.SimpleQueue[Task | None], busy: threading.Lock) -> None:
    while (task := tasks.get()) is not None:
        with busy:
            task.run()
        del task  # what it has made is not kept by the wait for the next
    _busy.remove(busy)


@atexit.register
def _await_calls() -> None:
    """A thread that is in XLA when the interpreter is taken down would crash the process."""
    for busy in list(_busy):
        busy.acquire(timeout=PATIENCE_AT_EXIT)
