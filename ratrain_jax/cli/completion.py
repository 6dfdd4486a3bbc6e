"""`ratrain completion`: what makes a shell complete ratrain's words."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_HELP = """Print what makes a shell complete commands, options and names.

\b
bash: ratrain completion bash > ~/.ratrain-complete
      and in ~/.bashrc the line: . ~/.ratrain-complete
zsh:  the same, with zsh and ~/.zshrc
fish: ratrain completion fish > ~/.config/fish/completions/ratrain.fish
"""


@click.command(help=_HELP, epilog="Example: ratrain completion fish")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Prints a shell's completion script."""
    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(context.find_root().command, {}, "ratrain", "_RATRAIN_COMPLETE").source())
