"""`ratrain profile`."""

from __future__ import annotations

import click

from ratrain_jax.cli.devices import ask_for
from ratrain_jax.cli.options import (
    Asked,
    json_option,
    output_option,
    quiet_option,
    target_options,
)
from ratrain_jax.cli.output import note, progress, show
from ratrain_jax.cli.target import find

devices_option = click.option(
    "--devices",
    type=click.IntRange(1),
    help="CPU devices to make before the step's module is imported; as many as it needs unless given.",
)


@click.command(
    epilog="Example: ratrain profile examples/demo_step.py:train_step --stages 2 -o profile.json"
)
@target_options
@devices_option
@click.option(
    "--repetitions", default=5, show_default=True, type=click.IntRange(1), help="Runs of the step."
)
@output_option("Write the profile here, as JSON.")
@json_option
@quiet_option
def profile(
    asked: Asked, devices: int | None, repetitions: int, output: str | None, as_json: bool
) -> None:
    """Measure what a step's ops take on the devices here.

    TARGET is module:step or path/to/file.py:step. ratrain simulate --profile then predicts steps with it.
    """
    from ratrain_jax.profiling.measure import profile as measure

    if devices is not None:
        ask_for(devices)
    target = find(asked)
    source = target.need_source()
    values = source.values()
    found = measure(target.need_lowered(), *values, repetitions=repetitions, progress=progress())
    if output is not None:
        found.save(output)
        note(f"wrote {output}")
    if as_json:
        click.echo(found.to_json(), nl=False)
    else:
        show([str(found)])
