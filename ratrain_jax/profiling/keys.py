"""What of an op decides how long it takes: ops of equal keys take equally long, in whatever program they stand.

Terms.
    An op's **code** is, for units of layers, the fingerprints of these layers; for anything else its role and the bytes of
    the values that it reads and writes on each device. `devices` are the devices that run it side by side: D. Recover runs
    Forward's executable, and so has its key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ratrain_jax.lowering.program import (
    Backward,
    Borrow,
    Forward,
    GlobalReduce,
    GradSync,
    Metrics,
    Op,
    PrefetchView,
    Program,
    Prologue,
    Recover,
    Send,
    SendActivation,
    SendGradient,
    UpdateShard,
    Validate,
    ZeroGradient,
)

SEPARATOR = "+"
"""Stands between the fingerprints of a unit's layers."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Key:
    """What of an op decides how long it takes.

    Attributes:
        kind: name of the op; `Forward` for Recover too, and `Send` for both kinds of send.
        code: what it runs.
        devices: how many devices run it side by side.
    """

    kind: str
    code: str
    devices: int

    def __str__(self) -> str:
        return f"{self.kind} {self.code} on {self.devices}"


def key_of(op: Op, program: Program) -> Key | None:
    """The key of an op; None for a `Free`, which takes no time.

    Args:
        op: the op.
        program: the program that it stands in.

    Example:
        >>> import jax.numpy as jnp, ratrain_jax as rt
        >>> @rt.train_step()
        ... def step(w, x):
        ...     loss, grad = rt.value_and_grad(lambda w: ((x * w) ** 2).mean())(w)
        ...     return w - grad, loss
        >>> program = step.lower(jnp.float32(1), jnp.ones(2)).program
        >>> keys = [key_of(op, program) for op in program.ops()]
        >>> [str(key) for key in keys if key is not None and key.kind == "ZeroGradient"]
        ['ZeroGradient 4 on 1']
    """
    rule = _RULES.get(type(op))
    if rule is None:
        return None
    kind, code = rule
    return Key(kind, code(program, op), program.settings.data_parallel)


def unit_code(fingerprints: Sequence[str], after: str = "") -> str:
    """The code of a unit of layers."""
    return SEPARATOR.join(fingerprints) + after


def after_layers(program: Program, op: Op) -> str:
    """What stands behind the fingerprints in the code of a unit: how a Backward hands its gradients on."""
    return f"/zero{program.settings.zero}" if isinstance(op, Backward) else ""


def moved_bytes(op: Op, program: Program) -> int:
    """The bytes of each device that a send or a collective is measured by."""
    sent = op.reads if isinstance(op, (Send, GradSync)) else op.writes
    seen = 0
    if isinstance(op, PrefetchView) and program.settings.data_parallel > 1:
        seen = program.values[op.writes[0]].aliased  # in place, not gathered
    return _bytes(program, sent[:1]) - seen


def _bytes(program: Program, values: Sequence[int]) -> int:
    """Bytes of values, those included that are the buffers of others."""
    return sum(array.bytes for v in values for array in program.values[v].arrays)


def _unit(program: Program, op: Any) -> str:
    prints = [layer.fingerprint for layer in program.layers[slice(*op.layers)]]
    return unit_code(prints, after_layers(program, op))


def _touched(program: Program, op: Op) -> str:
    return str(_bytes(program, (*op.reads, *op.writes)))


def _moved(program: Program, op: Op) -> str:
    return str(moved_bytes(op, program))


def _update(program: Program, op: Any) -> str:
    role = "replicated"
    if op.layer is not None:
        layer = program.layers[op.layer]
        role = "early" if layer.deferred and op.phase == layer.update_phase else "layer"
    return f"{role}/{op.phase}/{_touched(program, op)}"


def _sync(program: Program, op: Any) -> str:
    once = op.microbatch is None
    role = ("ties" if program.settings.zero == 2 else "scatter") if once else "accumulate"
    return f"{role}/{len(op.reads)}/{_moved(program, op)}"


_RULES: dict[type[Op], tuple[str, Callable[[Program, Any], str]]] = {
    Prologue: ("Prologue", _touched),
    Forward: ("Forward", _unit),
    Recover: ("Forward", _unit),
    Backward: ("Backward", _unit),
    ZeroGradient: ("ZeroGradient", _touched),
    SendActivation: ("Send", _moved),
    SendGradient: ("Send", _moved),
    Borrow: ("Borrow", _moved),
    GradSync: ("GradSync", _sync),
    GlobalReduce: ("GlobalReduce", _touched),
    UpdateShard: ("UpdateShard", _update),
    PrefetchView: ("PrefetchView", _moved),
    Validate: ("Validate", _touched),
    Metrics: ("Metrics", _touched),
}
"""The kind and the code of each op."""
