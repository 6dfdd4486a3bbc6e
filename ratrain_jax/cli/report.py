"""`ratrain report`."""

from __future__ import annotations

import click

from ratrain_jax.cli.options import (
    Asked,
    machine_option,
    output_option,
    quiet_option,
    target_options,
)
from ratrain_jax.cli.output import note, working
from ratrain_jax.cli.simulated import profile_option, simulated


@click.command(epilog="Example: ratrain report plan.json --model llama2-7b -o report.html")
@target_options
@machine_option(
    help="On what: a built-in machine's name, or a .toml file; a plan's own unless given."
)
@profile_option
@output_option("Write the report here; the usual ending is .html.", required=True)
@quiet_option
def report(asked: Asked, machine: str | None, profile: str | None, output: str) -> None:
    """Write all there is to see of a step as one HTML file.

    TARGET is module:step or path/to/file.py:step, or a saved plan with the --model that it is for. The file opens without
    a network.
    """
    target, timeline = simulated(asked, machine, profile)
    with working("writing the report"):
        timeline.report(output, plan=target.plan)
    note(f"wrote {output}")
