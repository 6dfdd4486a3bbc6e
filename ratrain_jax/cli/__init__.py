"""The command line, `ratrain`.

Its commands are `inspect`, `plan`, `simulate`, `profile`, `report`, `train`, `launch`, `bench`, `machines` and `completion`.
One module a command; what they share stands in `options` (what is asked for), `target` (what is looked at), `devices` and
`output`. Errors that users can mend end a command with one sentence on standard error and exit code 2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from ratrain_jax import __version__
from ratrain_jax.cli.bench import bench
from ratrain_jax.cli.completion import completion
from ratrain_jax.cli.failures import told
from ratrain_jax.cli.inspect import inspect
from ratrain_jax.cli.launch import launch
from ratrain_jax.cli.machines import list_machines
from ratrain_jax.cli.options import quiet_option
from ratrain_jax.cli.plan import plan
from ratrain_jax.cli.profile import profile
from ratrain_jax.cli.report import report
from ratrain_jax.cli.simulate import simulate
from ratrain_jax.cli.train import train
from ratrain_jax.distributed import departures
from ratrain_jax.errors import RATrainError


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    epilog="To complete words with Tab: ratrain completion --help",
)
@click.version_option(__version__, prog_name="ratrain")
@quiet_option
def cli() -> None:
    """Pipeline training, to look at, plan, simulate, measure and run.

    Each command has an example at the end of its help.
    """


for _command in (
    inspect,
    plan,
    simulate,
    profile,
    report,
    train,
    launch,
    bench,
    list_machines,
    completion,
):
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Args:
        arguments: what stands behind the program's name; `sys.argv`'s unless given.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = cli.main(given, prog_name="ratrain", standalone_mode=False, obj=given)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except (RATrainError, click.ClickException) as error:
        _end(error.format_message() if isinstance(error, click.ClickException) else str(error), 2)
    except (click.Abort, KeyboardInterrupt):
        _end("stopped.", 130)
    except BrokenPipeError:
        # What reads the output has enough; without this, Python would complain when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _end(f"{error.filename or 'the file'}: {error.strerror or error}.", 2)
    except Exception as error:
        message = told(error)
        if message is None:
            raise
        _end(message, 2)
    sys.exit(code if isinstance(code, int) else 0)


def _end(message: str, code: int) -> None:
    click.echo(f"ratrain: {message}", err=True)
    departures.fail(code)
    sys.exit(code)
