"""``hvd-pipe``: the group of commands, and how their errors are shown."""

from __future__ import annotations

import difflib
import errno
import importlib

import click
from click.shell_completion import get_completion_class

import hvd_pipe
from hvd_pipe.cli.output import Failure, InputError, one_line
from hvd_pipe.errors import HvdPipeError

# In the order in which a new user needs them: the module, and the command's name there.
COMMANDS = {
    "build-horovod": ("build_horovod", "command"),
    "doctor": ("doctor", "command"),
    "check": ("check", "command"),
    "bench": ("bench", "command"),
    "profile": ("profile", "command"),
    "advise": ("advise", "command"),
    "plan": ("plan", "command"),
    "simulate": ("simulate", "command"),
    "partition": ("partition", "command"),
    "trace": ("simulate", "trace"),
    "completion": ("main", "completion"),
}


class _Group(click.Group):
    """Imports a command's module when the command runs; prints errors in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(f"hvd_pipe.cli.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not ctx.resilient_parsing:
            near = difflib.get_close_matches(args[0], COMMANDS, 1, 0.6)
            hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(COMMANDS)}."
            if not args[0].startswith("-"):
                ctx.fail(f"no such command {args[0]!r}: {hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (HvdPipeError, ImportError) as error:  # a picture, without matplotlib
            raise Failure(one_line(error)) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of our output left; click ends quietly
                raise
            raise InputError(one_line(error)) from error
        except (ValueError, TypeError) as error:
            raise InputError(one_line(error)) from error


@click.group(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage or input.",
)
@click.version_option(hvd_pipe.__version__, "-V", "--version", prog_name="hvd-pipe")
def main() -> None:
    """Plan, predict and check training with hvd_pipe, before and on a cluster.

    Start with `hvd-pipe doctor`. Profile a model once, then ask `advise` which strategy suits a
    cluster and `simulate` how fast it gets. Every command prints a table, or with --json one
    JSON document in bytes and seconds.
    """


@click.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash:  eval "$(hvd-pipe completion bash)"       in ~/.bashrc
    zsh:   eval "$(hvd-pipe completion zsh)"        in ~/.zshrc
    fish:  hvd-pipe completion fish > ~/.config/fish/completions/hvd-pipe.fish
    """  # noqa: D301 - the \b is click's
    completer = get_completion_class(shell)
    assert completer is not None  # click has all of these
    click.echo(completer(main, {}, "hvd-pipe", "_HVD_PIPE_COMPLETE").source())
