"""``hvd-pipe completion``: the script that completes commands and options in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

__all__ = ["command"]

SHELLS = ("bash", "zsh", "fish")
_NAME, _VARIABLE = "hvd-pipe", "_HVD_PIPE_COMPLETE"


_HELP = """Print the completion script of a shell.

\b
bash:  eval "$(hvd-pipe completion bash)"       in ~/.bashrc
zsh:   eval "$(hvd-pipe completion zsh)"        in ~/.zshrc
fish:  hvd-pipe completion fish > ~/.config/fish/completions/hvd-pipe.fish
"""


@click.command(help=_HELP)
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the script."""
    group = click.get_current_context().find_root().command
    made = get_completion_class(shell)
    assert made is not None  # SHELLS are click's own
    click.echo(made(group, {}, _NAME, _VARIABLE).source())
