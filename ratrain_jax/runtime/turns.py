"""Lets the collectives of a device run one after another.

A rank that waits in a collective holds a thread of XLA's pool. Two collectives that wait on one device at once could hold all
threads while their partners find none. So each collective of a group takes, as one more argument, the **turn** that the one
before it gave: a number on each device that exists once that collective is over there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ratrain_jax.runtime.groups import Group

TURN_TYPE = jax.ShapeDtypeStruct((), jnp.int32)

_turns: dict[tuple[int, ...], Any] = {}


def with_turn(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes a turn first and gives one first."""

    def chained(turn: Any, *args: Any) -> tuple[Any, Any]:
        return turn + 1, function(*args)

    return chained


def in_turn(group: Group, call: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a group's compiled `with_turn` function with the group's turn."""
    key = _key(group)

    def called(*args: Any) -> Any:
        turn = _turns.get(key)
        if turn is None:
            turn = group.put_whole(np.int32(0))
        _turns[key], made = call(turn, *args)
        return made

    return called


def settle(groups: Sequence[Group]) -> None:
    """Waits for collectives of other groups that share devices with these; they are in no common chain."""
    own = {_key(group) for group in groups}
    devices = set().union(*own)
    for key in [k for k in _turns if k not in own and devices & set(k)]:
        jax.block_until_ready(_turns.pop(key))


def _key(group: Group) -> tuple[int, ...]:
    return tuple(device.id for device in group.devices)
