"""`ratrain plan`."""

from __future__ import annotations

from typing import Any

import click

from ratrain_jax.cli.options import (
    Asked,
    json_option,
    machine_option,
    output_option,
    quiet_option,
    source_options,
)
from ratrain_jax.cli.output import note, show, working
from ratrain_jax.cli.target import find_source

_SPACE = {
    "stages": ("stages", click.IntRange(1)),
    "microbatch_size": ("rows", click.IntRange(1)),
    "schedule": ("schedules", click.Choice(["gpipe", "1f1b", "ratrain", "interleaved", "zb-h1"])),
    "zero": ("zeros", click.IntRange(1, 3)),
    "recovery": ("recoveries", click.Choice(["auto", "none", "backward", "forward"])),
}
"""Options that narrow the search, with what `rt.plan` calls them."""


def _space_options(function: Any) -> Any:
    for name, (_, kind) in reversed(_SPACE.items()):
        words = name.replace("_", "-")
        function = click.option(
            f"--{words}", name, type=kind, multiple=True, help="Search only this; may be repeated."
        )(function)
    return function


@click.command(
    epilog="Example: ratrain plan --model llama2-7b --machine mt3000 --clusters 256 --global-batch 2048 -o plan.json"
)
@source_options
@machine_option(required=True)
@click.option(
    "--clusters",
    "--devices",
    "devices",
    required=True,
    type=click.IntRange(1),
    help="How many devices.",
)
@click.option("--global-batch", required=True, type=click.IntRange(1), help="Examples of a step.")
@click.option(
    "--memory-limit",
    type=click.IntRange(1),
    help="Bytes a device; the machine's usable ones unless given.",
)
@click.option(
    "--include-simulated", is_flag=True, help="Search what the runtime does not run as well."
)
@click.option(
    "--idle",
    type=click.FloatRange(0, 1, max_open=True),
    metavar="SHARE",
    help="Of the devices, may stay idle; up to an eighth where nothing that uses all of them fits, unless given.",
)
@_space_options
@output_option("Write the plan here, as JSON.")
@json_option
@quiet_option
def plan(
    machine: str,
    devices: int,
    global_batch: int,
    memory_limit: int | None,
    include_simulated: bool,
    idle: float | None,
    output: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Find the fastest way to train on a machine.

    TARGET is module:step or path/to/file.py:step; --model describes a language model instead.
    """
    from ratrain_jax import machines
    from ratrain_jax.planning.planner import plan as find_plan

    space = {to: given.pop(name) for name, (to, _) in _SPACE.items()}
    source = find_source(Asked(**given, microbatch_size=1, settings={}))
    with working("planning"):
        found = find_plan(
            source.step,
            *source.types,
            machine=machines.load(machine, clusters=devices),
            global_batch=global_batch,
            memory_limit=memory_limit,
            include_simulated=include_simulated,
            idle=idle,
            **{name: chosen for name, chosen in space.items() if chosen},
        )
    if output is not None:
        found.save(output)
        note(f"wrote {output}")
    if as_json:
        click.echo(found.to_json(), nl=False)
    else:
        show([str(found)])
