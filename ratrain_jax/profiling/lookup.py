"""Looks ops of a program up in a profile.

An op is looked up by its key. If that was not measured:

1. A unit of layers is pieced together from the fewest measured runs of these layers.
2. A unit that was measured with another number of devices in its group takes as long as there, but for the slowdown by
   as many busy devices as it has here.
3. A send or a collective takes what the line of its kind says; sends always do.
4. A machine's model tells its seconds.
"""

from __future__ import annotations

import functools

from ratrain_jax.errors import SimulationError
from ratrain_jax.kernels import Machine, machine_of
from ratrain_jax.lowered import Lowered
from ratrain_jax.lowering.code import known_code
from ratrain_jax.lowering.op_costs import OpCoster
from ratrain_jax.lowering.program import Backward, Forward, Op, Program, Recover
from ratrain_jax.profiling.keys import Key, after_layers, key_of, moved_bytes, unit_code
from ratrain_jax.profiling.profile import Profile
from ratrain_jax.runtime.instructions import COMPUTE, LINK, THREAD_OF


class Lookup:
    """Tells the seconds of a program's ops.

    Args:
        profile: what was measured.
        program: a lowered step, or its program.
        machine: whose model tells the rest.

    Raises:
        MachineError: there is no such machine.
    """

    def __init__(
        self, profile: Profile, program: Program | Lowered, machine: str | Machine
    ) -> None:
        self._profile = profile
        self._lowered = program if isinstance(program, Lowered) else None
        self._program = program.program if isinstance(program, Lowered) else program
        self._machine = machine_of(machine)
        self._entries = {m.key: m for m in profile.measured}
        self._measured = {key: m.seconds for key, m in self._entries.items()}
        self._lines = {(line.kind, line.devices): line for line in profile.lines}
        self._numbers = sorted({m.devices for m in profile.measured})
        self._found: dict[Key, float | None] = {}

    def seconds(self, op: Op) -> float:
        """How long an op takes by itself.

        Raises:
            SimulationError: it was not measured, and the program's code is not known in this process.
        """
        key = key_of(op, self._program)
        if key is None:
            return 0.0
        found = self._find(key, op)
        return self._model.seconds(op) if found is None else found

    def share(self, op: Op) -> float:
        """Of a core, what each device of an op uses while it runs."""
        key = key_of(op, self._program)
        if key is None:
            return 1.0
        found = self._entries.get(key) or self._lines.get((key.kind, key.devices))
        return 1.0 if found is None else found.share

    def launches(self) -> tuple[float, float]:
        """Seconds of the host to launch all ops that were measured, of the compute thread and of the link thread."""
        seconds = [0.0, 0.0]
        for op in self._program.ops():
            key = key_of(op, self._program)
            entry = None if key is None else self._entries.get(key)
            if entry is not None:
                seconds[THREAD_OF.get(type(op), LINK)] += entry.launch
        return seconds[COMPUTE], seconds[LINK]

    def missing(self) -> tuple[Key, ...]:
        """The keys of the program that a model must step in for, each once."""
        keyed = ((key_of(op, self._program), op) for op in self._program.ops())
        absent = (key for key, op in keyed if key is not None and self._find(key, op) is None)
        return tuple(dict.fromkeys(absent))

    def _find(self, key: Key, op: Op) -> float | None:
        if key not in self._found:
            self._found[key] = self._search(key, op)
        return self._found[key]

    def _search(self, key: Key, op: Op) -> float | None:
        if key in self._measured:
            return self._measured[key]
        if isinstance(op, (Forward, Recover, Backward)):
            return self._unit(key, op)
        line = self._lines.get((key.kind, key.devices))
        return None if line is None else line.seconds(moved_bytes(op, self._program))

    def _unit(self, key: Key, op: Forward | Recover | Backward) -> float | None:
        prints = [layer.fingerprint for layer in self._program.layers[slice(*op.layers)]]
        after = after_layers(self._program, op)
        here = self._profile.slowdown(key.devices)
        for devices in sorted(self._numbers, key=lambda n: (abs(n - key.devices), n)):
            found = self._pieces(prints, key.kind, after, devices)
            if found is not None:
                return found * here / self._profile.slowdown(devices)
        return None

    def _pieces(self, prints: list[str], kind: str, after: str, devices: int) -> float | None:
        """The seconds of a run of layers, put together from the fewest measured runs."""
        best: list[tuple[int, float] | None] = [(0, 0.0)]
        for end in range(1, len(prints) + 1):
            ways = []
            for start in range(end):
                before = best[start]
                key = Key(kind, unit_code(prints[start:end], after), devices)
                if before is not None and key in self._measured:
                    ways.append((before[0] + 1, before[1] + self._measured[key]))
            best.append(min(ways, default=None))
        found = best[-1]
        return None if found is None else found[1]

    @functools.cached_property
    def _model(self) -> OpCoster:
        fingerprint = self._program.fingerprint
        code = self._lowered.code if self._lowered is not None else known_code(fingerprint)
        if code is None:
            raise SimulationError(
                f"the profile lacks {', '.join(map(str, self.missing()))}, and the program's code {fingerprint!r} is"
                " not known in this process, so that no model can tell their seconds; lower its step again and keep"
                " what `lower` returns."
            )
        return OpCoster(code, self._program, self._machine)
