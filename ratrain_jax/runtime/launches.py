"""Launches programs of several devices so that XLA's pool of threads never runs dry.

XLA's CPU client runs what is launched in a pool of as many threads as there are devices, and two things hold a thread of it
without doing work. A launch that would be a device's 33rd under way waits there, one thread for each device of the program;
and so does a rank of a collective whose partners have not come. Together they can hold all threads, and nothing runs any more
(`PjRtCpuClient`: `max_inflight_computations_semaphore`; two threads that each launch 120 `psum`s on two devices of four show
it within seconds).

So every program of a group of several devices gives one number more, which exists once the program is over:

* its **token**: a launch first waits, in the launching thread, for the token of this thread's launch `UNDER_WAY` before it;
* of a collective, its **turn**, which the group's next collective takes: a device then waits in one collective at a time.

Between processes a turn is a vector, so that no collective is cheap (see `ratrain_jax.runtime.packing.DEAR`).
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ratrain_jax.runtime.groups import Group
from ratrain_jax.runtime.packing import DEAR

UNDER_WAY = 12
"""Launches of a group under way at most, of each of the two launching threads.

Of the 32 that XLA admits some are left for reshapes and the user's programs. Each thread counts its own: the link thread has
several launches for each of the other's, and would wait for compute that nothing it launches depends on.
"""

_turns: dict[tuple[int, ...], Any] = {}
_tokens: collections.defaultdict[tuple[tuple[int, ...], str], collections.deque[Any]] = (
    collections.defaultdict(collections.deque)
)
"""By group and the launching thread's name: all link threads have one."""
_lock = threading.Lock()
_last = threading.local()


def turn_type(group: Group) -> jax.ShapeDtypeStruct:
    """The type of a group's turns on each of its devices."""
    return jax.ShapeDtypeStruct(() if group.is_whole else (DEAR,), jnp.int32)


def with_turn(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes a turn first and gives one first."""

    def chained(turn: Any, *args: Any) -> tuple[Any, Any]:
        return turn + 1, function(*args)

    return chained


def with_token(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gives a token first."""

    def marked(*args: Any) -> tuple[Any, Any]:
        return jnp.int32(0), function(*args)

    return marked


def launcher(group: Group, call: Callable[..., Any], chained: bool) -> Callable[..., Any]:
    """What launches a compiled function of a group of several devices.

    Args:
        group: the devices.
        call: a compiled `with_turn` function if `chained`, else a compiled `with_token` function.
        chained: whether it is a collective.
    """
    key = _key(group)

    def launch(*args: Any) -> Any:
        _wait(key)
        token, made = call(*args)
        _remember(key, token)
        return made

    def launch_in_turn(*args: Any) -> Any:
        _wait(key)
        turn = _turns.get(key)
        if turn is None or (turn.is_ready() and not _succeeded(turn)):
            turn = group.put_whole(np.zeros(turn_type(group).shape, np.int32))
        _turns[key], made = call(turn, *args)
        _remember(key, _turns[key])
        return made

    return launch_in_turn if chained else launch


def _wait(key: tuple[int, ...]) -> None:
    with _lock:
        tokens = _tokens[key, threading.current_thread().name]
        oldest = tokens.popleft() if len(tokens) >= UNDER_WAY else None
    if oldest is not None:
        _succeeded(oldest)


def _succeeded(token: Any) -> bool:
    """Waits for a launch to be over. Its own results tell of an error; the launches behind it must not be lost to it."""
    try:
        jax.block_until_ready(token)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _remember(key: tuple[int, ...], token: Any) -> None:
    _last.token = token
    with _lock:
        _tokens[key, threading.current_thread().name].append(token)


def last_token() -> Any:
    """The token of this thread's last launch, once; None if nothing was launched since it was last asked for."""
    token, _last.token = getattr(_last, "token", None), None
    return token


def settle(groups: Sequence[Group]) -> None:
    """Waits for launches on other groups that share devices with these: they are bounded and in turn by themselves."""
    own = {_key(group) for group in groups}
    devices = set().union(*own)
    with _lock:
        others = [k for k in _tokens if k[0] not in own and devices & set(k[0])]
        tokens = [token for k in others for token in _tokens.pop(k)]
    for token in tokens:
        _succeeded(token)
    for key, _ in others:
        _turns.pop(key, None)


def _key(group: Group) -> tuple[int, ...]:
    return tuple(device.id for device in group.devices)
