"""`ratrain simulate`."""

from __future__ import annotations

import click

from ratrain_jax.cli.options import (
    Asked,
    Output,
    json_option,
    machine_option,
    quiet_option,
    target_options,
)
from ratrain_jax.cli.output import note, show, working
from ratrain_jax.cli.reliability import Trouble, reliability_options
from ratrain_jax.cli.simulated import profile_option, simulated


@click.command(
    epilog="Example: ratrain simulate plan.json --model llama2-7b --machine mt3000 --perfetto trace.json"
)
@target_options
@machine_option(
    help="On what: a built-in machine's name, or a .toml file; a plan's own unless given."
)
@profile_option
@click.option(
    "--perfetto",
    type=Output(),
    help="Write a trace that ui.perfetto.dev opens.",
)
@click.option(
    "--plot",
    type=Output(),
    help="Write a picture: .png, .svg or .pdf.",
)
@reliability_options
@json_option
@quiet_option
def simulate(
    asked: Asked,
    machine: str | None,
    profile: str | None,
    perfetto: str | None,
    plot: str | None,
    trouble: Trouble,
    as_json: bool,
) -> None:
    """Simulate a step: where its time goes.

    TARGET is module:step or path/to/file.py:step, or a saved plan with the --model that it is for. Each lane is busy for a
    share of the time; with many stages the least, the mean and the most are shown. With --mtbf or --stragglers also what
    a step takes in the long run; docs/explanation/scale.md has the formulas. The JSON is described in
    ratrain_jax/views/terminal_timeline.py.
    """
    from ratrain_jax.views.terminal_timeline import summary, timeline_view

    trouble.check()
    target, timeline = simulated(asked, machine, profile)
    if perfetto is not None:
        with working("writing the trace"):
            timeline.to_perfetto(perfetto)
        note(f"wrote {perfetto}")
    if plot is not None:
        with working("drawing"):
            _save(timeline.plot(), plot)
        note(f"wrote {plot}")
    shown = summary(timeline, trouble.expected(timeline, target))
    if as_json:
        click.echo(shown.to_json(), nl=False)
    else:
        show(timeline_view(shown))


def _save(figure: object, path: str) -> None:
    try:
        figure.savefig(path)  # pyright: ignore[reportAttributeAccessIssue]
    except ValueError as error:  # an ending that matplotlib does not know
        raise click.UsageError(f"--plot {path}: {error}.") from error
