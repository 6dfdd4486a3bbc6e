"""Finds what a command looks at: a step in a module, a file, or a model.

Terms.
    A **target** is what was found: at least a program, or a plan whose step is not known.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ratrain_jax.cli.devices import ask_for
from ratrain_jax.cli.modules import Source, load, source_of
from ratrain_jax.cli.options import Asked
from ratrain_jax.cli.output import working
from ratrain_jax.errors import OptionError, PlanError, ProgramFormatError

if TYPE_CHECKING:
    from ratrain_jax.lowered import Lowered
    from ratrain_jax.lowering.program import Program
    from ratrain_jax.planning.plan import Plan
    from ratrain_jax.step import Step

ARGUMENTS_OF_A_MODEL = 0
"""Seed of the parameters and tokens of a model that is only measured."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What a command looks at.

    Attributes:
        name: what to call it.
        program: the program; None for a plan whose step is not known.
        lowered: with its code; None for a program that was read from a file.
        plan: the plan that it comes from; None without.
        source: the step; None where only a program is known.
    """

    name: str
    program: Program | None = None
    lowered: Lowered | None = None
    plan: Plan | None = None
    source: Source | None = None

    def need_lowered(self) -> Lowered:
        """The lowered step.

        Raises:
            PlanError, OptionError: there is only a plan, or a program without its code.
        """
        if self.lowered is not None:
            return self.lowered
        if self.plan is not None:
            raise PlanError(
                f"{self.name} is a plan without its step; name the step that it is for and give --plan {self.name}, or"
                " give its model with --model and the same --sequence and --dtype."
            )
        raise OptionError(
            f"{self.name} is a program without its code; give the step as module:step, or a model with --model."
        )

    def need_source(self) -> Source:
        """The step with its arguments.

        Raises:
            OptionError: only a program is known.
        """
        if self.source is None:
            self.need_lowered()
            raise OptionError(
                f"{self.name} is a lowered step, and there is nothing to run it on; give the step itself as module:step."
            )
        return self.source


def find(asked: Asked) -> Target:
    """Finds and lowers what was asked for.

    A plan may be the target, with the model that it is for, or stand beside a step or a model as `--plan`.

    Args:
        asked: what the options say.

    Raises:
        RATrainError: it is not there, or cannot be lowered; the message says what to change.
    """
    if asked.target is None or asked.model is not None:
        return _of_model(asked)
    if _is_file(asked.target):
        _refuse_settings(asked, "a saved program")
        program, plan = read_file(asked.target)
        return Target(asked.target, program, plan=plan)
    from ratrain_jax.lowered import Lowered
    from ratrain_jax.lowering.program import Program
    from ratrain_jax.planning.plan import Plan

    ask_for_devices(asked.settings)
    found = load(asked.target, "the step")
    if isinstance(found, (Lowered, Program, Plan)):
        _refuse_settings(asked, f"a {type(found).__name__}")
    if isinstance(found, Lowered):
        return Target(asked.target, found.program, found)
    if isinstance(found, Program):
        return Target(asked.target, found)
    if isinstance(found, Plan):
        if "_lower" not in vars(found):
            return Target(asked.target, plan=found)
        lowered = found.lowered
        return Target(asked.target, lowered.program, lowered, found)
    source = source_of(asked, found)
    step = decorated(source.step, asked)
    return _lowered(asked.target, _as_planned(dataclasses.replace(source, step=step)))


def find_source(asked: Asked) -> Source:
    """The step and the types of its arguments, where no program is wanted.

    Args:
        asked: what the options say.
    """
    if asked.model is not None or asked.target is None:
        return _model_source(asked, 1)
    if _is_file(asked.target):
        raise OptionError(
            f"{asked.target} is a file; give a step as module:step, or a model with --model."
        )
    return source_of(asked, load(asked.target, "the step"))


def decorated(step: Callable[..., Any], asked: Asked) -> Step:
    """A step with the settings that were asked for.

    Args:
        step: decorated or not.
        asked: what the options say.
    """
    from ratrain_jax.evaluation import EvalStep
    from ratrain_jax.planning.plan import Plan
    from ratrain_jax.train import TrainStep, train_step

    settings: dict[str, Any] = dict(asked.settings)
    if asked.plan is not None:
        _refuse_settings(asked, "a plan")
        plain = step.__wrapped__ if isinstance(step, TrainStep) else step
        return train_step(plan=Plan.load(asked.plan))(plain)
    if isinstance(step, EvalStep) or (isinstance(step, TrainStep) and step.plan is not None):
        _refuse_settings(asked, "a step that evaluates, or was decorated with a plan,")
        return step
    if isinstance(step, TrainStep):
        return TrainStep(step.__wrapped__, dataclasses.replace(step.options, **settings))
    return train_step(**settings)(step)


def _as_planned(source: Source) -> Source:
    """A source whose batch has the examples that the step's plan is for, as `rt.plan` took it."""
    from ratrain_jax.planning.plan import fingerprint_of
    from ratrain_jax.tracing import abstract, resized

    step: Any = source.step
    if getattr(step, "plan", None) is None:
        return source
    rows = step.plan.global_batch
    given = [abstract(arg) for arg in source.types[1:]]
    batch = resized(given, step.options.batch_argnums, lambda _: rows)

    def values() -> tuple[Any, ...]:
        if fingerprint_of(given) != fingerprint_of(batch):
            raise OptionError(
                f"the plan is for {rows} examples a step, and the batch has another number; name one of {rows} with --batch."
            )
        return source.values()

    return dataclasses.replace(source, types=(source.types[0], *batch), values=values)


def ask_for_devices(settings: Mapping[str, Any]) -> None:
    """Asks for the CPU devices that settings need, before a module is imported that may use one."""
    if "stages" in settings or "data_parallel" in settings:
        ask_for(settings.get("stages", 1) * settings.get("data_parallel", 1))


def read_file(path: str) -> tuple[Program | None, Plan | None]:
    """Reads a saved program, as JSON or text, or a saved plan.

    Args:
        path: the file.

    Raises:
        ProgramFormatError, PlanError, OptionError: it is neither; the message has the spot.
    """
    from ratrain_jax.lowering import jsonform, text
    from ratrain_jax.planning.plan import Plan

    try:
        content = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ProgramFormatError(
            f"cannot read {path}: {why}; give a step as module:step, or a saved plan or program."
        ) from error
    if path.endswith(".py"):
        raise OptionError(f"{path} is a file of steps; name one of them, as in {path}:train_step.")
    if not content.strip():
        raise ProgramFormatError(
            f"{path} is empty; give a step as module:step, or a saved plan or program."
        )
    try:
        if not content.lstrip().startswith("{"):
            return text.parse(content), None
        if _format(content) == "ratrain-plan":
            return None, Plan.from_json(content)
        return jsonform.from_json(content), None
    except (ProgramFormatError, PlanError) as error:
        raise type(error)(f"{path}: {error}") from error


def _format(content: str) -> Any:
    try:
        return json.loads(content).get("format")
    except (ValueError, RecursionError):
        return None


def _is_file(target: str) -> bool:
    return ":" not in target or pathlib.Path(target).is_file()


def _refuse_settings(asked: Asked, what: str) -> None:
    if asked.settings:
        name = next(iter(asked.settings)).replace("_", "-")
        raise OptionError(f"--{name} was given beside {what} that says it; leave it out.")


def _lowered(name: str, source: Source) -> Target:
    """A target of a decorated step."""
    step: Any = source.step
    plan = getattr(step, "plan", None)
    ask_for(step.options.stages * step.options.data_parallel)
    with working("lowering"):
        lowered = step.lower(*source.types)
    return Target(name, lowered.program, lowered, plan, source)


def _of_model(asked: Asked) -> Target:
    if asked.model is None:
        raise OptionError(
            "what to look at is not said; give a step as module:step, a saved plan or program, or --model."
        )
    name = asked.target or asked.model
    if asked.target is not None:
        plan = read_file(asked.target)[1] if _is_file(asked.target) else None
        if plan is None or asked.plan is not None:
            raise OptionError(
                f"{asked.target} was given beside --model, which goes with a saved plan or alone; leave one of them out."
            )
        asked = dataclasses.replace(asked, plan=asked.target)
    step: Any = decorated(_model(asked).step, asked)
    parts = step.options.data_parallel * step.options.microbatches
    rows = parts * asked.microbatch_size if step.plan is None else step.plan.global_batch
    source = dataclasses.replace(_model_source(asked, rows), step=step)
    return _lowered(name, source)


def _model(asked: Asked) -> Any:
    from ratrain_jax.models import language_model, load_config

    assert asked.model is not None
    return language_model(load_config(asked.model), sequence=asked.sequence, dtype=asked.dtype)


def _model_source(asked: Asked, global_batch: int) -> Source:
    if asked.model is None:
        raise OptionError("what to plan for is not said; give a step as module:step, or --model.")
    model = _model(asked)

    def values() -> tuple[Any, ...]:
        import jax
        import numpy as np

        rng = np.random.default_rng(ARGUMENTS_OF_A_MODEL)
        shape = (global_batch, asked.sequence + 1)
        tokens = rng.integers(0, model.config.vocab, shape, np.int32)
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        return model.init(jax.random.key(ARGUMENTS_OF_A_MODEL)), batch

    return Source(model.step, (model.abstract_state(), model.abstract_batch(global_batch)), values)
