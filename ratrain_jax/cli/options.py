"""Options that several commands have.

Commands that look at a step take it as `TARGET`, or describe a model with `--model`; `target_options` reads both into one
`Asked`, which `ratrain_jax.cli.target` turns into a program.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ratrain_jax.cli.output import QUIET

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What a command was asked to look at.

    Attributes:
        target: `module:attribute`, or a file; None for a model.
        state: where the state is, `module:attribute` or an attribute of the step's module; None for the usual names.
        batch: likewise, each argument behind the state.
        model: a built-in model's name or a config.json; None without.
        sequence: tokens of an example, of a model.
        dtype: compute dtype of a model.
        microbatch_size: examples of a microbatch on a device, of a model.
        settings: options of `train_step` that were given.
        plan: a saved plan that says the settings of a step; None without.
    """

    target: str | None
    state: str | None
    batch: tuple[str, ...]
    model: str | None
    sequence: int
    dtype: str
    microbatch_size: int
    settings: Mapping[str, Any]
    plan: str | None = None


def _quiet(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        context.find_root().meta[QUIET] = True


quiet_option = click.option(
    "-q",
    "--quiet",
    is_flag=True,
    expose_value=False,
    callback=_quiet,
    help="Show no progress and no notes.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def complete_models(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Built-in models, and files."""
    from ratrain_jax.models.config import builtin_configs

    names = [CompletionItem(n) for n in builtin_configs() if n.startswith(incomplete)]
    return names or [CompletionItem(incomplete, type="file")]


def complete_machines(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Built-in machines, and files."""
    from ratrain_jax import machines

    names = [CompletionItem(n) for n in machines.names() if n.startswith(incomplete)]
    return names or [CompletionItem(incomplete, type="file")]


def machine_option(required: bool = False, help: str = "") -> Callable[[F], F]:
    """`--machine`."""
    return click.option(
        "--machine",
        required=required,
        shell_complete=complete_machines,
        help=help or "A built-in machine's name, or a .toml file.",
    )


class Output(click.Path):
    """A file to write, in a folder that is there: what cannot be written is told before the work."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path as it is."""
        path = super().convert(value, param, ctx)
        folder = os.path.dirname(path) or os.curdir
        if not os.path.isdir(folder):
            self.fail(f"{path}: there is no folder {folder}; make it, or name another.", param, ctx)
        if not os.path.exists(path) and not os.access(folder, os.W_OK):
            self.fail(
                f"{path}: nothing can be written in {folder}; name another folder.", param, ctx
            )
        return path


def output_option(help: str, required: bool = False) -> Callable[[F], F]:
    """`-o`, a file to write."""
    return click.option(
        "-o",
        "--output",
        type=Output(),
        required=required,
        help=help,
    )


_MODEL_OPTIONS = (
    click.option(
        "--model",
        shell_complete=complete_models,
        help="Instead of a step: a built-in model's name, or a Hugging Face config.json.",
    ),
    click.option(
        "--sequence",
        default=2048,
        show_default=True,
        type=click.IntRange(1),
        help="Tokens of an example (with --model).",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["float16", "bfloat16", "float32"]),
        default="float16",
        show_default=True,
        help="Compute dtype (with --model).",
    ),
)

plan_option = click.option(
    "--plan",
    type=click.Path(exists=True, dir_okay=False),
    help="A plan of ratrain plan that says the settings of the step.",
)

microbatch_size_option = click.option(
    "--microbatch-size",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Examples of a microbatch on a device (with --model).",
)

_SETTINGS = {
    "stages": click.option("--stages", type=click.IntRange(1), help="Pipeline stages."),
    "data_parallel": click.option(
        "--data-parallel", type=click.IntRange(1), help="Devices of each stage."
    ),
    "microbatches": click.option(
        "--microbatches", type=click.IntRange(1), help="Microbatches of a step."
    ),
    "schedule": click.option(
        "--schedule", type=click.Choice(["gpipe", "1f1b", "ratrain"]), help="Order of ops."
    ),
    "zero": click.option("--zero", type=click.IntRange(1, 2), help="ZeRO stage."),
    "recovery": click.option(
        "--recovery",
        type=click.Choice(["auto", "none", "backward", "forward"]),
        help="What activations are made again.",
    ),
    "memory_limit": click.option("--memory-limit", type=click.IntRange(1), help="Bytes a device."),
}

_SOURCE_OPTIONS = (
    click.option(
        "--state",
        metavar="[MODULE:]NAME",
        help="The state, its types, or a function without arguments that makes it, of the step's module unless another"
        " is named; 'state' or 'make_state' unless given.",
    ),
    click.option(
        "--batch",
        metavar="[MODULE:]NAME",
        multiple=True,
        help="The batch, likewise; once for each argument behind the state.",
    ),
)


def _stack(options: tuple[Callable[[Any], Any], ...], function: Any) -> Any:
    for option in reversed(options):
        function = option(function)
    return function


def settings_options(function: F) -> F:
    """The options of `train_step`; those given come as one argument, `settings`."""

    @functools.wraps(function)
    def gathered(*args: Any, **given: Any) -> Any:
        settings = {name: given.pop(name) for name in _SETTINGS}
        given["settings"] = {name: v for name, v in settings.items() if v is not None}
        return function(*args, **given)

    return _stack(tuple(_SETTINGS.values()), gathered)


def source_options(function: F) -> F:
    """`TARGET`, `--state` and `--batch`, and those of a model."""
    argument = click.argument("target", required=False)
    return _stack((argument, *_SOURCE_OPTIONS, *_MODEL_OPTIONS), function)


def target_options(function: F) -> F:
    """All by which a program is named; they come as one argument, `asked`."""
    names = [field.name for field in dataclasses.fields(Asked)]

    @functools.wraps(function)
    def gathered(*args: Any, **given: Any) -> Any:
        asked = Asked(**{name: given.pop(name) for name in names})
        return function(*args, asked=asked, **given)

    return source_options(microbatch_size_option(plan_option(settings_options(gathered))))  # pyright: ignore[reportReturnType]
