"""`ratrain machines`."""

from __future__ import annotations

import dataclasses
import json

import click

from ratrain_jax.cli.options import quiet_option


@click.command("machines", epilog="Example: ratrain machines")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: all that is known of each.")
@quiet_option
def list_machines(as_json: bool) -> None:
    """List the machines that come with the package."""
    from ratrain_jax import machines

    found = [machines.load(name) for name in machines.names()]
    if as_json:
        head = {"format": "ratrain-machines", "version": 1}
        rows = [dataclasses.asdict(machine) for machine in found]
        click.echo(json.dumps({**head, "machines": rows}, indent=1, default=str))
        return
    for machine in found:
        click.echo(f"{machine.name:<12}{machine.description}")
