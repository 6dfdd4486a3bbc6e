"""Measures cases: sets the rate of the links, and lets the workers run the variants of a step in turn."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from links.cases import BOUNDARY_SHARES, MOST, SHARES, Case, variants
from links.network import Network
from links.processes import Team

ROUNDS = 2
"""Blocks of each variant at each rate, in turn with the others'."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """A variant of a step on links of one rate.

    Attributes:
        seconds: of a step; the median.
        predicted: of the same, by the simulator with a profile of this set-up.
        ideal: of the same, by the simulator, if nothing but bytes and computation took time.
        tail: seconds from the last Backward to the next step's first Forward; None where no step was traced.
        exposed: seconds between the first Forward and the last Backward in which nothing is computed; likewise.
    """

    seconds: float
    predicted: float
    ideal: float
    tail: float | None = None
    exposed: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """A case on links of one rate.

    Attributes:
        case: the case.
        share: link seconds over compute seconds of a step, or of a transfer over those of a forward.
        rate: bytes a second, each way.
        compute: seconds of a step, by the profile.
        variants: by name.
    """

    case: Case
    share: float
    rate: float
    compute: float
    variants: dict[str, Measured]

    def ratio(self, name: str, base: str) -> float:
        """How many times faster a variant is."""
        return self.variants[base].seconds / self.variants[name].seconds

    def ideal_ratio(self, name: str, base: str) -> float:
        """How many times faster it could be."""
        return self.variants[base].ideal / self.variants[name].ideal

    def gain_share(self, name: str, base: str) -> float:
        """The gain, as a share of what it could be."""
        return (self.ratio(name, base) - 1) / (self.ideal_ratio(name, base) - 1)


class Bench:
    """Measures with a team on its network.

    Args:
        network: whose rate is set.
        team: the workers.
        rounds: blocks of each variant.
    """

    def __init__(self, network: Network, team: Team, rounds: int = ROUNDS) -> None:
        self._network, self._team, self._rounds = network, team, rounds
        self._start = time.perf_counter()

    def results(
        self, case: Case, shares: Sequence[float] | None = None, traced: bool = False
    ) -> Iterator[Result]:
        """Measures a case at each rate.

        Args:
            case: the case.
            shares: of the rates; the usual ones unless given.
            traced: whether a step of each variant is traced.
        """
        names = variants(case)
        self._network.limit(None)
        options = {name: case.options(name) for name in names}
        seconds = self._ask("compile", options=options, rows=case.rows, clip=case.clip)
        self._say(f"{case}: compiled in {seconds:.0f} s")
        self._check_losses(names)
        self._ask("profile", name=names[0], repetitions=1)
        about = self._ask("about", name=names[0])
        for share in shares or (BOUNDARY_SHARES if case.stages > 1 else SHARES):
            once, of = ("sent", "forward") if case.stages > 1 else ("gradients", "compute")
            rate = about[once] / (share * about[of])
            if case.stages == 1 and about["bytes"] / rate > MOST * about["compute"]:
                continue
            self._network.limit(rate)
            self._ask("profile", name=names[0], repetitions=1)
            measured = self._variants(case, names, rate, traced)
            yield Result(case, share, rate, about["compute"], measured)
            self._say(f"{case}: share {share} measured")

    def _variants(
        self, case: Case, names: Sequence[str], rate: float, traced: bool
    ) -> dict[str, Measured]:
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(self._rounds):
            for name in names:
                answers = self._team.ask(do="run", name=name, steps=case.steps)
                seconds[name] += answers[0]["seconds"]
        found = {}
        for name in names:
            predicted = self._ask("predict", name=name, rate=rate)
            step = statistics.median(seconds[name])
            found[name] = Measured(step, predicted["profile"], predicted["ideal"])
            if traced:
                body, exposed = self._ask("gaps", name=name)
                tail = max(step - body, 0.0)
                found[name] = dataclasses.replace(found[name], tail=tail, exposed=exposed)
        return found

    def _check_losses(self, names: Sequence[str]) -> None:
        losses = {name: self._ask("run", name=name, steps=1)["loss"] for name in names}
        if len(set(losses.values())) > 1:
            raise SystemExit(f"variants of one step have different losses: {losses}")

    def losses(self, case: Case, name: str, steps: int) -> list[float]:
        """Losses of the first steps of a variant, as this team computes them."""
        self._network.limit(None)
        self._ask("compile", options={name: case.options(name)}, rows=case.rows, clip=case.clip)
        return [self._ask("run", name=name, steps=0)["loss"] for _ in range(steps)]

    def picture(self, path: str, names: Sequence[str]) -> None:
        """Draws a step of each variant of the last case as it ran."""
        self._ask("picture", path=path, names=list(names))

    def _ask(self, what: str, **request: Any) -> Any:
        return self._team.ask(do=what, **request)[0]

    def _say(self, what: str) -> None:
        passed = time.perf_counter() - self._start
        print(f"{passed:6.0f} s  {what}", file=sys.stderr, flush=True)
