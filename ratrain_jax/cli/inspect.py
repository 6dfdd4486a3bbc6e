"""`ratrain inspect`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ratrain_jax.cli.options import Asked, json_option, machine_option, quiet_option, target_options
from ratrain_jax.cli.output import show, working
from ratrain_jax.cli.target import find

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ratrain_jax.planning.plan import Plan


@click.command(
    epilog="Example: ratrain inspect --model llama2-7b --stages 4 --microbatches 8 --machine a100"
)
@target_options
@machine_option(help="Sum up the step on this machine: a built-in one's name, or a .toml file.")
@click.option("--all", "everything", is_flag=True, help="Fold no layers and no stages.")
@json_option
@quiet_option
def inspect(asked: Asked, machine: str | None, everything: bool, as_json: bool) -> None:
    """Show a step's layers, schedule and memory.

    TARGET is module:step or path/to/file.py:step, a saved plan, or a saved program.

    A step may be decorated or not; what rt.train_step(...).lower or rt.plan gave will do as well. --stages and the like
    replace what it was decorated with. The JSON is described in ratrain_jax/views/terminal_inspection.py.
    """
    from ratrain_jax.simulation.simulate import simulate
    from ratrain_jax.views.terminal import inspection_view
    from ratrain_jax.views.terminal_inspection import inspection

    target = find(asked)
    if target.program is None and machine is None:
        assert target.plan is not None
        if as_json:
            click.echo(target.plan.to_json(), nl=False)
        else:
            show(_plan_view(target.plan, not everything))
        return
    timeline = None
    if machine is not None:
        lowered = target.need_lowered()
        with working("simulating"):
            timeline = simulate(lowered, machine)
    assert target.program is not None
    shown = inspection(target.program, timeline)
    if as_json:
        click.echo(shown.to_json(), nl=False)
    else:
        show(inspection_view(shown, not everything))


def _plan_view(plan: Plan, fold: bool) -> list[RenderableType]:
    """A plan's own tables, and the memory of its stages."""
    from ratrain_jax.planning.stage_costs import TERMS
    from ratrain_jax.views.terminal import Bar, MemoryBars

    parts = [{term: getattr(s.memory, term) for term in TERMS} for s in plan.stages]
    bars = tuple(Bar(str(n), each, plan.limit) for n, each in enumerate(parts))
    return [str(plan), "", MemoryBars(bars, fold)]
