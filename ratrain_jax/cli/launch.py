"""`ratrain launch`: the processes of a run on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ratrain_jax.cli.devices import environment
from ratrain_jax.cli.options import quiet_option
from ratrain_jax.cli.output import note
from ratrain_jax.errors import OptionError

if TYPE_CHECKING:
    from ratrain_jax.distributed.launcher import Ended

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green")


@click.command(
    context_settings={"allow_interspersed_args": False},
    epilog="Example: ratrain launch -n 4 -- train.py --steps 100",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
@click.option("-n", "count", type=click.IntRange(1), help="Processes to start here.")
@click.option(
    "--coordinator",
    metavar="HOST:PORT",
    help="Of process 0; a free port of this machine unless given.",
)
@click.option(
    "--processes",
    type=click.IntRange(1),
    help="Of the whole run, over all machines; as many as -n unless given.",
)
@click.option(
    "--process-id",
    type=click.IntRange(0),
    help="Of the first process that is started here; 0 unless given.",
)
@click.option(
    "--devices-per-process",
    "devices",
    type=click.IntRange(1),
    help="CPU devices that each process makes.",
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="Of XLA's pool on the CPU, in each process; all cores unless given.",
)
@click.option(
    "--grace",
    default=5.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds to end in, before a process is killed.",
)
@quiet_option
def launch(
    command: tuple[str, ...],
    count: int | None,
    coordinator: str | None,
    processes: int | None,
    process_id: int | None,
    devices: int | None,
    threads: int | None,
    grace: float,
) -> None:
    """Start the processes of a run on this machine.

    COMMAND is what stands behind `python`: script.py, or -m and a module, with
    its arguments. The script calls rt.initialize() first. Or it is `ratrain
    train` with its arguments. Each line that a process prints begins with its
    id; when one fails, the others are ended.

    For a run over several machines, start each machine's processes with
    --coordinator, --processes and --process-id.
    """
    from ratrain_jax.distributed import launcher

    here, total, first = _places(count, coordinator, processes, process_id)
    address = coordinator or f"127.0.0.1:{launcher.free_port()}"
    base = dict(os.environ) if devices is None else environment(devices)
    if threads is not None:
        base["NPROC"] = str(threads)
    places = {
        one: launcher.environment_of(base, address, total, one)
        for one in range(first, first + here)
    }
    outcome = launcher.run(launcher.command_of(command), places, _shown(len(str(total - 1))), grace)
    if outcome.failed is not None:
        _tell(outcome.failed, others=total > 1)
        sys.exit(outcome.failed.exit_code)
    if outcome.interrupted is not None:
        note("ratrain: stopped.")
        sys.exit(128 + outcome.interrupted)


def _places(
    count: int | None, coordinator: str | None, processes: int | None, process_id: int | None
) -> tuple[int, int, int]:
    """How many processes are started here, how many there are, and the id of the first."""
    from ratrain_jax.distributed.initialize import split_address

    if coordinator is not None:
        split_address(coordinator)
    if processes is not None or process_id is not None:
        if coordinator is None or processes is None or process_id is None:
            raise OptionError(
                "a run over several machines needs --coordinator, --processes and --process-id together; for processes"
                " on this machine alone give -n."
            )
        here = 1 if count is None else count
        if process_id + here > processes:
            raise OptionError(
                f"--process-id {process_id} with {here} here goes beyond the last of {processes} processes, which is"
                f" {processes - 1}."
            )
        return here, processes, process_id
    if count is None:
        raise OptionError("say with -n how many processes to start.")
    return count, count, 0


def _shown(width: int) -> Callable[[int, bytes, bool], None]:
    """Shows lines behind the ids of their processes."""

    def show(process_id: int, line: bytes, is_error: bool) -> None:
        stream = sys.stderr if is_error else sys.stdout
        prefix = f"[{process_id:{width}}] "
        if stream.isatty() and "NO_COLOR" not in os.environ:
            prefix = click.style(prefix, fg=_COLOURS[process_id % len(_COLOURS)])
        stream.buffer.write(prefix.encode() + line)
        stream.buffer.flush()

    return show


def _tell(failed: Ended, others: bool) -> None:
    """Says which process failed first, and how."""
    from ratrain_jax.distributed.failures import explained

    ended = "; the others were ended." if others else "."
    click.echo(f"ratrain: process {failed.process_id} {failed.how}{ended}", err=True)
    if failed.tail:
        click.echo("Its last lines on standard error:", err=True)
        for line in failed.tail:
            click.echo(f"  {line}", err=True)
    meaning = explained(failed.tail)
    if meaning is not None:
        click.echo(f"ratrain: {meaning}", err=True)
