"""`Profile`: what ops were measured to take, to simulate with in place of a machine's model.

Terms.
    Seconds of an op are those of it **alone**: once launched, with nothing else under way. Devices of one host
    may share its cores; then everything takes longer the more devices are **busy**, by the *slowdown* of their number.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from ratrain_jax.errors import ProfileError
from ratrain_jax.kernels import Machine
from ratrain_jax.lowered import Lowered
from ratrain_jax.lowering.program import Op, Program
from ratrain_jax.lowering.records import Form, read
from ratrain_jax.profiling.keys import Key

FORM: Final = Form("ratrain-profile", 1, "profile", ProfileError)


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """What ops of one key took.

    Attributes:
        kind: of the key (see `ratrain_jax.profiling.keys`).
        code: of the key.
        devices: of the key.
        seconds: the median.
        count: repetitions.
        spread: seconds between the first and the third quartile.
        launch: seconds of the host before those, on average, as a step has them all: its launching thread runs ahead, but
            uses a core meanwhile.
        share: of a core, that each device uses meanwhile: less than all where an op between processes waits for the link.
    """

    kind: str
    code: str
    devices: int
    seconds: float
    count: int
    spread: float
    launch: float = 0.0
    share: float = 1.0

    def __post_init__(self) -> None:
        _at_least(self, devices=1, seconds=0, count=1, spread=0, launch=0, share=0)

    @property
    def key(self) -> Key:
        """Its key."""
        return Key(self.kind, self.code, self.devices)


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """What moving bytes takes: latency + bytes / bandwidth, fitted to what some sizes took.

    Attributes:
        kind: `Send`, or `GradSync` (reduce-scatter) or `PrefetchView` (all-gather) over a group.
        devices: how many move that many bytes side by side, each to its like, or that make up the group.
        latency: seconds.
        bandwidth: bytes a second.
        points: bytes and seconds (medians) that were measured.
        share: of a core, that each device uses meanwhile.
    """

    kind: str
    devices: int
    latency: float
    bandwidth: float
    points: tuple[tuple[int, float], ...] = ()
    share: float = 1.0

    def __post_init__(self) -> None:
        _at_least(self, devices=1, latency=0, bandwidth=1, share=0)

    def seconds(self, count: int) -> float:
        """Seconds that moving `count` bytes takes."""
        return self.latency + count / self.bandwidth


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """Measured seconds of a step's ops on some devices; its `str` is a table.

    It serves any program whose layers have the same code, whatever its schedule, recovery, stages and microbatches: ops are
    looked up one by one, and for those that were not measured a machine's model steps in (see `missing`).

    Attributes:
        fingerprint: of the program that was measured.
        platform: such as `cpu`.
        device_kind: as JAX calls it.
        jax_version: of the measuring process.
        device_count: how many devices that process had; on CPU it decides how many threads an op gets.
        cores: how many cores that process had.
        date: when it was measured, in ISO 8601.
        launch_seconds: of the host, to launch a program that does nothing.
        wait_seconds: until that program was seen to have ended, beyond its launch. It is subtracted from all measured
            seconds: steps wait for no op.
        busy_elsewhere: cores that other processes used meanwhile, on average; None where the system does not say.
        measured: by key.
        lines: of transfers and collectives.
        slowdowns: busy devices, ascending, and by which factor an op on one of them takes longer than with one busy (or
            than with the least number that could be measured).

    Example:
        >>> line = Line("Send", 1, 1e-4, 1e9)
        >>> profile = Profile("", "cpu", "cpu", "0", 2, 2, "2030-01-01", 0, 0, None, (), (line,), ((1, 1.0), (2, 1.2)))
        >>> Profile.from_json(profile.to_json()) == profile
        True
        >>> profile.slowdown(1.5)
        1.1
    """

    fingerprint: str
    platform: str
    device_kind: str
    jax_version: str
    device_count: int
    cores: int
    date: str
    launch_seconds: float
    wait_seconds: float
    busy_elsewhere: float | None = None
    measured: tuple[Measured, ...] = ()
    lines: tuple[Line, ...] = ()
    slowdowns: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _at_least(self, device_count=1, cores=1, launch_seconds=0, wait_seconds=0)
        busy = [number for number, _ in self.slowdowns]
        if busy != sorted(set(busy)) or any(n < 1 or not f > 0 for n, f in self.slowdowns):
            raise ProfileError(
                f"slowdowns: expected pairs of a number of devices, ascending from 1, and a factor over 0, found"
                f" {list(self.slowdowns)}."
            )

    # What a program takes.

    def seconds(
        self, program: Program | Lowered, machine: str | Machine = "cpu"
    ) -> Callable[[Op], float]:
        """How long each op of a program takes by itself.

        Args:
            program: a lowered step, or its program; where an op was not measured, its code must be known in this process.
            machine: whose model tells the seconds of ops that were not measured.

        Returns:
            A function from an op to its seconds.

        Raises:
            MachineError: there is no such machine.
            SimulationError: (by that function) an op was not measured, and the program's code is not known here.
        """
        from ratrain_jax.profiling.lookup import Lookup

        return Lookup(self, program, machine).seconds

    def shares(self, program: Program | Lowered) -> Callable[[Op], float]:
        """Of a core, what each device of an op uses while it runs: all of it, but for ops that wait for other processes.

        Args:
            program: a lowered step, or its program.
        """
        from ratrain_jax.profiling.lookup import Lookup

        return Lookup(self, program, "cpu").share

    def launches(self, program: Program | Lowered) -> tuple[float, float]:
        """Seconds of the host to launch the ops of a step that were measured: of its compute thread and its link thread.

        Args:
            program: a lowered step, or its program.
        """
        from ratrain_jax.profiling.lookup import Lookup

        return Lookup(self, program, "cpu").launches()

    def missing(self, program: Program | Lowered) -> tuple[Key, ...]:
        """What of a program was not measured, so that a machine's model tells its seconds; each key once.

        Args:
            program: a lowered step, or its program.
        """
        from ratrain_jax.profiling.lookup import Lookup

        return Lookup(self, program, "cpu").missing()

    def slowdown(self, busy: float) -> float:
        """By which factor an op takes longer while so many devices are busy.

        Between numbers that were measured it is interpolated. Beyond the last, devices that share a host's cores get
        slower in proportion once they outnumber them; other devices do not.

        Args:
            busy: how many devices are busy.
        """
        if not self.slowdowns:
            return self._crowding(busy)
        numbers = [number for number, _ in self.slowdowns]
        factors = [factor for _, factor in self.slowdowns]
        place = bisect.bisect_left(numbers, busy)
        if place == 0:
            return factors[0]
        if place == len(numbers):
            return factors[-1] * self._crowding(busy) / self._crowding(numbers[-1])
        part = (busy - numbers[place - 1]) / (numbers[place] - numbers[place - 1])
        return factors[place - 1] + part * (factors[place] - factors[place - 1])

    def _crowding(self, busy: float) -> float:
        return max(1.0, busy / self.cores) if self.platform == "cpu" else 1.0

    def pace(self, devices: int) -> Callable[[float], float]:
        """By which factor every op takes longer while some run at once, each on `devices` devices.

        Args:
            devices: D, those of a group.

        Returns:
            A function from how many ops run, each counted by its share of a core, to the factor; that of one is 1.
        """
        alone = self.slowdown(devices)
        return lambda running: self.slowdown(max(running, 1.0) * devices) / alone

    # Profiles as files, and several as one.

    def merge(self, other: Profile) -> Profile:
        """A profile with what this one and another measured; where both did, this one's.

        Args:
            other: measured on such devices, as many, with as many cores.

        Raises:
            ProfileError: it was measured on others.
        """
        for name in ("platform", "device_kind", "device_count", "cores"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ProfileError(
                    f"{name}: expected {mine!r} as in the other profile, found {theirs!r}; profiles of different"
                    " devices cannot be merged."
                )
        measured = {m.key: m for m in (*other.measured, *self.measured)}
        lines = {(line.kind, line.devices): line for line in (*other.lines, *self.lines)}
        slowdowns = max(self.slowdowns, other.slowdowns, key=len)
        return dataclasses.replace(
            self,
            measured=tuple(measured[key] for key in sorted(measured)),
            lines=tuple(lines[key] for key in sorted(lines)),
            slowdowns=slowdowns,
        )

    def to_json(self) -> str:
        """The profile as JSON that `from_json` reads back to an equal one."""
        return "\n".join(_json_lines(self)) + "\n"

    @staticmethod
    def from_json(text: str) -> Profile:
        """Reads a profile from its JSON form.

        Args:
            text: what `to_json` gives.

        Raises:
            ProfileError: it is no JSON, of another version, or not of this form; the message has the line, or the path to
                the spot, and what was expected there.
        """
        return read(Profile, text, FORM)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        """Reads a profile from a file that `save` wrote.

        Raises:
            ProfileError: the file cannot be read, or is no profile; the message names it.
        """
        try:
            return Profile.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(f"{os.fspath(path)}: expected a profile, found {error}.") from error
        except ProfileError as error:
            raise ProfileError(f"{os.fspath(path)}: {error}") from error

    def __str__(self) -> str:
        from ratrain_jax.profiling.table import profile_table

        return profile_table(self)

    def __repr__(self) -> str:
        return (
            f"<Profile of {len(self.measured)} kinds of op, {self.device_count} {self.device_kind}"
            f" devices, {self.date}>"
        )


def _json_lines(profile: Profile) -> Iterator[str]:
    table = {**FORM.head, **dataclasses.asdict(profile)}
    for name, value in table.items():
        opening = "{" if name == "format" else " "
        closing = "}" if name == "slowdowns" else ","
        if name in ("measured", "lines"):
            rows = ",\n".join(f"  {json.dumps(row)}" for row in value)
            yield f"{opening}{json.dumps(name)}: [\n{rows}\n ]{closing}"
        else:
            yield f"{opening}{json.dumps(name)}: {json.dumps(value)}{closing}"


def _at_least(instance: Any, **least: float) -> None:
    """Checks that fields hold finite numbers of some size."""
    for name, value in least.items():
        found = getattr(instance, name)
        if not value <= found < math.inf:
            raise ProfileError(f"{name}: expected a number of at least {value:g}, found {found!r}.")
