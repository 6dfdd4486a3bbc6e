"""A plan: the configuration chosen, what it is predicted to take, and why the others were not; as text and as JSON."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax

from ratrain_jax.errors import PlanError
from ratrain_jax.kernels import Arithmetic
from ratrain_jax.lowering.records import Form, read
from ratrain_jax.options import BACKENDS, Options, Window
from ratrain_jax.planning.configuration import Configuration
from ratrain_jax.planning.memory_parts import MemoryPart
from ratrain_jax.planning.stage_costs import StageMemory
from ratrain_jax.planning.why_not import WhyNot
from ratrain_jax.tracing import abstract

if TYPE_CHECKING:
    from ratrain_jax.lowered import Lowered
    from ratrain_jax.lowering.program import Program

_FORM: Final = Form("ratrain-plan", 2, "plan", PlanError)


def fingerprint_of(args: Sequence[Any]) -> str:
    """Tells states and batches of other shapes, dtypes or structure apart.

    Args:
        args: the types of a step's arguments.
    """
    # Of the tree only the paths: what it closes over (a model, an optimizer) is written anew in every process.
    found = jax.tree_util.tree_leaves_with_path(tuple(args))
    shown = [f"{jax.tree_util.keystr(path)}{leaf.shape}{leaf.dtype}" for path, leaf in found]
    return hashlib.sha256("\n".join(shown).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedStage:
    """One stage of a plan.

    Attributes:
        first: name of its first layer.
        layers: how many it has.
        recovered: how many of them are recovered.
        seconds: forward, backward and recovery of one microbatch.
        memory: bytes of each of its devices at its fullest, by term.
        parts: what each term is made of.
    """

    first: str
    layers: int
    recovered: int
    seconds: float
    memory: StageMemory
    parts: tuple[MemoryPart, ...]


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """How a step runs best on a machine, as far as it was searched; its `str` says why.

    Attributes:
        configuration: the choice.
        stages: its stages.
        step_seconds: the step that is predicted.
        tail_seconds: the part of it after the pacing stage's last backward.
        machine: the machine's name.
        limit: bytes a device that the plan had to fit in.
        global_batch: examples of a step.
        fingerprint: of the state and the batch that it was made for.
        backend: what computes products, as in `train_step`.
        layering: for how many stages layers must be found for them to be those that were planned with.
        searched: how many configurations the space had.
        assumed: what of the machine has no source.
        why_not: the best rejected plan of each kind.
        idle: devices that stay idle.
    """

    configuration: Configuration
    stages: tuple[PlannedStage, ...]
    step_seconds: float
    tail_seconds: float
    machine: str
    limit: int
    global_batch: int
    fingerprint: str
    backend: str
    layering: float
    searched: int
    assumed: tuple[str, ...]
    why_not: tuple[WhyNot, ...]
    idle: int = 0

    def __post_init__(self) -> None:
        wanted = self.configuration.stages
        if not self.stages or (self.configuration.runs and len(self.stages) != wanted):
            raise PlanError(
                f"stages: expected one entry for each of the configuration's {wanted} stages, found {len(self.stages)}."
            )
        c = self.configuration
        if c.rows * c.data_parallel * c.microbatches != self.global_batch:
            raise PlanError(
                f"global_batch: expected rows {c.rows} × data_parallel {c.data_parallel} × microbatches"
                f" {c.microbatches} of the configuration, found {self.global_batch}; plan again."
            )

    def bound(self, lower: Callable[[Plan], Lowered]) -> Plan:
        """This plan, with the step that it is for."""
        bound = dataclasses.replace(self)
        bound.__dict__["_lower"] = lower
        return bound

    @functools.cached_property
    def lowered(self) -> Lowered:
        """The step lowered as planned, with transfers in the order that suits the machine.

        Raises:
            PlanError: the plan was read from a file: decorate the step with `rt.train_step(plan=plan)` and lower that.
            OptionError: the runtime does not run such plans.
        """
        lower = self.__dict__.get("_lower")
        if lower is None:
            raise PlanError(
                "a plan that was read back holds no step; decorate it with rt.train_step(plan=plan) and call lower."
            )
        return lower(self)

    @property
    def program(self) -> Program:
        """The program of `lowered`."""
        return self.lowered.program

    def check(self, args: Sequence[Any]) -> None:
        """Refuses a state or a batch that the plan was not made for.

        Args:
            args: a step's arguments, or their types.

        Raises:
            PlanError: their shapes, dtypes or structure are others.
        """
        found = fingerprint_of([abstract(arg) for arg in args])
        if found != self.fingerprint:
            raise PlanError(
                f"the plan is for another model or batch: it was made for shapes {self.fingerprint} with"
                f" {self.global_batch} examples, and these are {found}. Plan again with this state and batch."
            )

    def options(self, backend: Arithmetic | None = None) -> Options:
        """What `rt.train_step` is asked for.

        Args:
            backend: the kernels of a machine of one's own, which a plan only names.

        Raises:
            PlanError: the runtime does not run such plans; the message names what it lacks.
        """
        c = self.configuration
        if not c.runs:
            raise PlanError(
                f"the plan ({c}) is only simulated: the runtime runs no tensor parallelism, no zero=3, and of schedules"
                " gpipe, 1f1b and ratrain. Plan without include_simulated."
            )
        if backend is None and self.backend not in BACKENDS:
            raise PlanError(
                f"the plan is for the kernels of {self.backend!r}, which is no built-in machine; give"
                " backend=ratrain_jax.kernels.Arithmetic.of(machine, None, 'fast') beside it."
            )
        return Options(
            stages=c.stages,
            data_parallel=c.data_parallel,
            microbatches=c.microbatches,
            schedule=c.schedule,
            zero=c.zero,
            recovery=c.recovery,
            layerwise_state=c.layerwise_state if c.layerwise_state is not None else True,
            update_prefetch=c.update_prefetch if c.update_prefetch is not None else True,
            window=Window(layers=c.window),
            memory_limit=tuple(self.limit - stage.memory.scratch for stage in self.stages),
            boundaries=tuple(stage.first for stage in self.stages[1:]),
            backend=self.backend if backend is None else backend,
            layering=self.layering,
        )

    def explain(self, stage: int | None = None) -> str:
        """The formula of each figure of a stage's memory: how often, how many bytes, and of what.

        Args:
            stage: the stage; the fullest unless given.

        Raises:
            OptionError: there is no such stage.
        """
        from ratrain_jax.planning.tables import memory_text

        return memory_text(self, stage)

    def to_json(self) -> str:
        """The plan as JSON that `from_json` reads back to an equal plan."""
        return json.dumps({**_FORM.head, **dataclasses.asdict(self)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Plan:
        """Reads a plan.

        Raises:
            PlanError: the text is no JSON, of another version, or not of this form; the message has the path.
        """
        return read(Plan, text, _FORM)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON."""
        pathlib.Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Reads a plan from a file.

        Raises:
            PlanError: there is no such file, or it is no plan.
        """
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"cannot read plan {os.fspath(path)!r}: {error}.") from error
        return Plan.from_json(text)

    def __str__(self) -> str:
        from ratrain_jax.planning.tables import plan_text

        return plan_text(self)

    def _repr_html_(self) -> str:
        from ratrain_jax.views.notebook import plan_html

        return plan_html(self)

    def __repr__(self) -> str:
        return f"<Plan {self.configuration}: {self.step_seconds:.4g} s on {self.machine}>"
