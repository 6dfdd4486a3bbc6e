"""The options of `train_step`, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from ratrain_jax.errors import OptionError
from ratrain_jax.kernels import Arithmetic
from ratrain_jax.lowering.program import Settings
from ratrain_jax.lowering.schedules import SCHEDULES

if TYPE_CHECKING:
    from ratrain_jax.planning.plan import Plan

BACKENDS = ("xla", "mt3000")
STATE_LAYOUTS = ("stacked", "layers")
RECOVERIES = ("auto", "none", "backward", "forward")
VALIDATIONS = ("immediate", "deferred")


def _at_least(name: str, value: Any, least: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise OptionError(f"{name} must be a whole number of at least {least}, got {value!r}.")


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """How far a stage's state tasks may run ahead.

    Attributes:
        layers: layers whose gradient sync, update and prefetch may be in flight at once. With fewer than a stage has, views
            that are wanted late are gathered ahead of gradients that wait, and less hides behind the next step's forward.
        bytes: bytes of gradient shards and new views that they may hold; None for no bound.
        microbatches: microbatches whose activations may be recovered ahead of their backward.

    Example:
        >>> Window(layers=4).microbatches
        1
    """

    layers: int = 8
    bytes: int | None = None
    microbatches: int = 1

    def __post_init__(self) -> None:
        _at_least("Window.layers", self.layers, 1)
        _at_least("Window.microbatches", self.microbatches, 1)
        if self.bytes is not None:
            _at_least("Window.bytes", self.bytes, 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `train_step` was asked for. See there for the meaning of each field.

    Attributes:
        layering: for how many stages layers are found, where a plan has found them; for `stages` unless given.
    """

    stages: int = 1
    data_parallel: int = 1
    microbatches: int = 1
    schedule: str = "ratrain"
    zero: int = 1
    recovery: str = "auto"
    layerwise_state: bool = True
    update_prefetch: bool = True
    validation: str = "immediate"
    window: Window = Window()
    memory_limit: int | Sequence[int] | None = None
    boundaries: Sequence[str] | None = None
    batch_argnums: Sequence[int] | None = None
    devices: Sequence[Any] | None = None
    donate_state: bool = True
    state_layout: str = "stacked"
    backend: str | Arithmetic = "xla"
    layering: float | None = None

    def __post_init__(self) -> None:
        for name in ("stages", "data_parallel", "microbatches"):
            _at_least(name, getattr(self, name), 1)
        _one_of("schedule", self.schedule, tuple(SCHEDULES))
        _one_of("recovery", self.recovery, RECOVERIES)
        _one_of("validation", self.validation, VALIDATIONS)
        if self.zero == 3:
            raise OptionError("zero=3 is costed by the planner but not run; use zero=1 or zero=2.")
        _one_of("zero", self.zero, (1, 2))
        _one_of("state_layout", self.state_layout, STATE_LAYOUTS)
        if not isinstance(self.backend, Arithmetic):
            _one_of("backend", self.backend, BACKENDS)
        if not isinstance(self.window, Window):
            raise OptionError(f"window must be a ratrain_jax.Window, got {self.window!r}.")
        if not isinstance(self.boundaries, str):  # one name is refused where the layers are known
            _sequence("boundaries", self.boundaries, "layer names such as ['block_3']")
            if not all(isinstance(name, str) for name in self.boundaries or ()):
                raise OptionError(
                    f"boundaries must be names of layers, as summary() lists them, got {self.boundaries!r}."
                )
        _sequence("batch_argnums", self.batch_argnums, "argument numbers such as (1,)")
        _sequence("devices", self.devices, "devices such as jax.devices()")
        limit = self.memory_limit
        if isinstance(limit, Sequence):
            if len(limit) != self.stages:
                raise OptionError(
                    f"memory_limit has {len(limit)} entries for stages={self.stages};"
                    " give one number, or one a stage."
                )
            for number in limit:
                _at_least("memory_limit", number, 1)
        elif limit is not None:
            _at_least("memory_limit", limit, 1)

    def kernels(self) -> Arithmetic | None:
        """How kernels compute the products that they take; None where XLA takes all."""
        if isinstance(self.backend, Arithmetic):
            return self.backend
        return None if self.backend == "xla" else Arithmetic.of(self.backend, None, "fast")

    def settings(self) -> Settings:
        """The part of the options that a program depends on."""
        plain = self.schedule != "ratrain"
        prefetch = self.update_prefetch and not plain
        limit = self.memory_limit
        limits = (
            ()
            if limit is None
            else limit
            if isinstance(limit, Sequence)
            else (limit,) * self.stages
        )
        return Settings(
            stages=self.stages,
            data_parallel=self.data_parallel,
            microbatches=self.microbatches,
            schedule=self.schedule,
            zero=self.zero,
            recovery=self.recovery,
            layerwise_state=self.layerwise_state and not plain,
            update_prefetch=prefetch,
            window_layers=self.window.layers,
            window_bytes=self.window.bytes,
            window_microbatches=self.window.microbatches,
            memory_limit=tuple(map(int, limits)),
            validation=self.validation if prefetch else "immediate",
        )


BESIDE_A_PLAN = ("devices", "donate_state", "state_layout", "batch_argnums", "validation")
"""Options that a plan leaves open; so is the backend, where it is kernels of one's own."""


def planned_options(plan: Plan, given: Options) -> Options:
    """The options of a plan, with those that it leaves open as given.

    Args:
        plan: the plan.
        given: what the step was decorated with beside it.

    Raises:
        OptionError: options were given that the plan says.
        PlanError: the plan is for what the runtime does not run.
    """
    kernels = given.backend if isinstance(given.backend, Arithmetic) else None
    for field in dataclasses.fields(given):
        value = getattr(given, field.name)
        left_open = field.name in BESIDE_A_PLAN or value is kernels
        if not left_open and value != field.default:
            raise OptionError(
                f"{field.name}={value!r} was given beside a plan, which says it; leave one of them out."
            )
    beside = {name: getattr(given, name) for name in BESIDE_A_PLAN}
    return dataclasses.replace(plan.options(kernels), **beside)


def _sequence(name: str, value: Any, what: str) -> None:
    if value is not None and (isinstance(value, str) or not isinstance(value, Iterable)):
        raise OptionError(f"{name} must be a sequence of {what}, got {value!r}.")


def _one_of(name: str, value: Any, known: Sequence[Any]) -> None:
    if value not in known:
        choices = ", ".join(repr(k) for k in known)
        raise OptionError(f"{name}={value!r} is not known; choose one of {choices}.")
