"""What failures and stragglers are expected to cost: time that no simulation of one undisturbed step shows.

**Failures** come independently of each other and of the time, so that a system of N devices has exponential times
between failures with a mean of M = mtbf / N. Work of τ seconds, then a checkpoint of δ seconds, is begun anew until no
failure comes in between; each failure costs a restart of R seconds, which may fail as well. Then τ seconds of work take

    E = M · e^(R/M) · (e^((τ+δ)/M) − 1)

on average (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
Computer Systems 22(3), 2006), of which

    τ                                work
    δ                                the checkpoint
    M · (e^((τ+δ)/M) − 1) − (τ+δ)    rework: work and checkpoints that a failure cut off
    (e^((τ+δ)/M) − 1) · M · (e^(R/M) − 1)    restarts, those that fail among them

Least time is lost where τ is about √(2δM) (J. W. Young, "A first order approximation to the optimum checkpoint interval",
Communications of the ACM 17(9), 1974); Daly's next terms make that

    τ = √(2δM) · (1 + √(δ/2M)/3 + (δ/2M)/9) − δ    for δ < 2M, else M

**Stragglers**: in each step every rank computes by a factor of its own slower or faster, for the whole step. Factors are
independent and normal with mean 1 and a given standard deviation c, the coefficient of variation. All ranks wait for each
other once a step, so compute takes as long as that of the slowest: by the factor 1 + c · E(n), where E(n) is the expected
greatest of n standard normal values (H. A. David, H. N. Nagaraja, "Order Statistics", 2003, section 3.1):

    E(n) = ∫ (1 − Φ(x)^n) dx over x > 0  −  ∫ Φ(x)^n dx over x < 0

That is so where every stage computes as long as the slowest; where some have time to spare it is an upper bound.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from ratrain_jax.errors import SimulationError
from ratrain_jax.simulation.breakdown import Breakdown
from ratrain_jax.words import counted

MOST_VARIATION = 0.3
"""Of what is normally distributed with more, one in a thousand would take less than a tenth of the mean, or no time."""

_STEPS, _REACH = 4096, 12.0  # of the integrals: Φ is 0 or 1 in float64 beyond


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """How devices fail, and what is done about it; see `ratrain_jax.simulation.reliability` for the model and its sources.

    Attributes:
        mtbf: mean seconds between failures of one device.
        checkpoint: seconds for which training stands still to write a checkpoint.
        restart: seconds from a failure until the last checkpoint is restored and work goes on.
        interval: seconds of work between checkpoints; about the best unless given.

    Raises:
        SimulationError: a value is out of range.

    Example:
        >>> import ratrain_jax as rt
        >>> failures = rt.Failures(mtbf=50_000 * 3600, checkpoint=60, restart=600)
        >>> lost = failures.expected(10_000)
        >>> round(lost.mtbf), round(lost.interval), f"{lost.goodput:.1%}"
        (18000, 1430, '89.0%')
    """

    mtbf: float
    checkpoint: float
    restart: float = 0.0
    interval: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("mtbf", 0.0), ("checkpoint", 0.0), ("interval", 0.0)):
            value = getattr(self, name)
            if value is not None and not least < value < math.inf:
                raise SimulationError(f"{name} is {value}; give seconds, more than 0.")
        if not 0 <= self.restart < math.inf:
            raise SimulationError(f"restart is {self.restart}; give seconds, 0 or more.")

    def expected(self, devices: int, step: float | None = None) -> LostTime:
        """What of the time is lost where so many devices work together, and one failure stops all.

        Args:
            devices: how many.
            step: seconds of a step; checkpoints are then written between steps, so that the interval becomes a whole
                number of them.
        """
        if devices < 1:
            raise SimulationError(f"devices is {devices}; give 1 or more.")
        mean = self.mtbf / devices
        interval = best_interval(mean, self.checkpoint) if self.interval is None else self.interval
        if step is not None:
            interval = max(1, round(interval / step)) * step
        segment = interval + self.checkpoint
        try:
            failed = math.expm1(segment / mean)
            restarts = failed * mean * math.expm1(self.restart / mean)
        except OverflowError:
            failed = restarts = math.inf
        whole = mean * failed + restarts
        if math.isinf(whole):
            # Hardly ever does a whole interval go well.
            return LostTime(devices, mean, interval, 0.0, 0.0, 1.0, 0.0)
        rework = max(0.0, mean * failed - segment)
        return LostTime(
            devices,
            mean,
            interval,
            interval / whole,
            self.checkpoint / whole,
            rework / whole,
            restarts / whole,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class LostTime:
    """What failures and checkpoints are expected to cost.

    Attributes:
        devices: how many work together.
        mtbf: mean seconds between failures of any of them.
        interval: seconds of work between checkpoints.
        goodput: share of the time in which work is done that lasts.
        checkpoint: share of the time in which checkpoints are written.
        rework: share in which work is done that a failure undoes.
        restart: share that goes by between failures and the work after them.
    """

    devices: int
    mtbf: float
    interval: float
    goodput: float
    checkpoint: float
    rework: float
    restart: float

    def __str__(self) -> str:
        return (
            f"{counted(self.devices, 'device')}: a failure every {readable_seconds(self.mtbf)},"
            f" a checkpoint every {readable_seconds(self.interval)} of work;"
            f" lost {1 - self.goodput:.2%} = checkpoints {self.checkpoint:.2%}"
            f" + rework {self.rework:.2%} + restarts {self.restart:.2%}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """What a step is expected to take in the long run.

    Attributes:
        undisturbed: seconds of the step as simulated.
        step: seconds of a step with stragglers.
        ranks: how many ranks wait for each other.
        stragglers: coefficient of variation of their compute.
        slowest: by which factor the slowest of them is expected to compute longer than the mean.
        lost: what failures cost; None if they are left out.
        mean_step: seconds of a step with all that is lost spread over the steps; None where none is ever finished.
    """

    undisturbed: float
    step: float
    ranks: int
    stragglers: float
    slowest: float
    lost: LostTime | None
    mean_step: float | None

    def __str__(self) -> str:
        lines = []
        if self.stragglers:
            lines.append(
                f"stragglers: the slowest of {self.ranks} ranks computes {self.slowest:.4g} times the mean,"
                f" a step takes {self.step:.4g} s (normal, of sd {self.stragglers:.3g} of the mean, by rank and step)"
            )
        if self.lost is not None:
            lines.append(f"failures: {self.lost}")
            steps, mean = round(self.lost.interval / self.step), self.mean_step
            took = "no step is ever finished" if mean is None else f"{mean:.4g} s a step that lasts"
            lines.append(f"{took}; {counted(steps, 'step')} between checkpoints")
        return "\n".join(lines) or f"step {self.step:.4g} s"


def expected_step(
    line: Breakdown, ranks: int, failures: Failures | None, stragglers: float
) -> Expected:
    """What a step is expected to take in the long run; see `Timeline.expected`.

    Args:
        line: where the time of the undisturbed step goes.
        ranks: how many ranks, each a device, wait for each other.
        failures: how they fail; None to leave that out.
        stragglers: coefficient of variation of their compute.
    """
    slowest = slowest_factor(stragglers, ranks)
    step = line.step + (slowest - 1) * (line.ideal + line.recovery + line.bubble)
    lost = None if failures is None else failures.expected(ranks, step)
    mean: float | None = step
    if lost is not None:
        mean = step / lost.goodput if lost.goodput else None
    return Expected(line.step, step, ranks, stragglers, slowest, lost, mean)


def best_interval(mtbf: float, checkpoint: float) -> float:
    """Seconds of work between checkpoints at which about the least time is lost, by Daly's estimate.

    Args:
        mtbf: M, mean seconds between failures of the system.
        checkpoint: δ, seconds of a checkpoint.

    Example:
        >>> round(best_interval(24 * 3600.0, 300.0))  # Young's √(2δM) is 7200
        7001
    """
    if checkpoint >= 2 * mtbf:
        return mtbf
    half = checkpoint / (2 * mtbf)
    return math.sqrt(2 * checkpoint * mtbf) * (1 + math.sqrt(half) / 3 + half / 9) - checkpoint


def slowest_factor(variation: float, ranks: int) -> float:
    """By which factor the slowest of several ranks is expected to compute longer than the mean.

    Args:
        variation: c, standard deviation over mean of a rank's compute, from 0 to `MOST_VARIATION`.
        ranks: n, how many.

    Raises:
        SimulationError: an argument is out of range.

    Example:
        >>> round(slowest_factor(0.05, 2), 4)  # 1 + 0.05 / √π
        1.0282
    """
    if not 0 <= variation <= MOST_VARIATION:
        raise SimulationError(
            f"stragglers is {variation}; give a standard deviation over the mean from 0 to {MOST_VARIATION}."
        )
    if ranks < 1:
        raise SimulationError(f"ranks is {ranks}; give 1 or more.")
    return 1 + variation * greatest_of_normals(ranks)


@functools.lru_cache(maxsize=1024)
def greatest_of_normals(count: int) -> float:
    """The expected greatest of so many independent standard normal values."""
    width = _REACH / _STEPS
    total = 0.0
    for k in range(_STEPS):
        x = (k + 0.5) * width
        above = 0.5 * math.erfc(x / math.sqrt(2))
        # 1 − Φ(x)^n, less Φ(−x)^n
        total += -math.expm1(count * math.log1p(-above)) - above**count
    return total * width


def readable_seconds(seconds: float) -> str:
    """Seconds in the unit that suits them.

    Example:
        >>> readable_seconds(45.0), readable_seconds(90.0), readable_seconds(3e5)
        ('45 s', '1.5 min', '83.33 h')
    """
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds:.4g} s"
