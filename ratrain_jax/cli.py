"""The command line: `ratrain plan`, `ratrain machines`.

Errors that this package raises on purpose end a command with one sentence on standard error and exit code 2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from ratrain_jax import __version__, machines
from ratrain_jax.errors import RATrainError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(__version__, prog_name="ratrain")
def cli() -> None:
    """Plan pipeline training, and look at machines."""


@cli.command(
    epilog="Example: ratrain plan --model llama2-7b --machine mt3000 --clusters 256 --global-batch 2048"
)
@click.option(
    "--model", required=True, help="A built-in model's name, or a Hugging Face config.json."
)
@click.option("--machine", required=True, help="A built-in machine's name, or a .toml file.")
@click.option(
    "--clusters", "devices", required=True, type=click.IntRange(1), help="How many devices."
)
@click.option("--global-batch", required=True, type=click.IntRange(1), help="Examples of a step.")
@click.option(
    "--sequence",
    default=2048,
    show_default=True,
    type=click.IntRange(1),
    help="Tokens of an example.",
)
@click.option("--dtype", default="float16", show_default=True, help="Compute dtype.")
@click.option(
    "--memory-limit",
    type=click.IntRange(1),
    help="Bytes a device; the machine's usable ones unless given.",
)
@click.option(
    "--include-simulated", is_flag=True, help="Search what the runtime does not run as well."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, writable=True),
    help="Write the plan here, as JSON.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    model: str,
    machine: str,
    devices: int,
    global_batch: int,
    sequence: int,
    dtype: str,
    memory_limit: int | None,
    include_simulated: bool,
    output: str | None,
    as_json: bool,
) -> None:
    """Find the fastest way to train a language model on a machine."""
    from ratrain_jax.models import language_model, load_config
    from ratrain_jax.planning.planner import plan as find_plan

    lm = language_model(load_config(model), sequence=sequence, dtype=dtype)
    found = find_plan(
        lm.step,
        lm.abstract_state(),
        lm.abstract_batch(1),
        machine=machines.load(machine, clusters=devices),
        global_batch=global_batch,
        memory_limit=memory_limit,
        include_simulated=include_simulated,
    )
    if output is not None:
        found.save(output)
    click.echo(found.to_json() if as_json else str(found), nl=not as_json)


@cli.command("machines", epilog="Example: ratrain machines")
def list_machines() -> None:
    """List the machines that come with the package."""
    for name in machines.names():
        click.echo(f"{name:<12}{machines.load(name).description}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Args:
        arguments: what stands behind the program's name; `sys.argv`'s unless given.
    """
    try:
        cli(args=arguments, prog_name="ratrain")
    except RATrainError as error:
        click.echo(f"ratrain: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
