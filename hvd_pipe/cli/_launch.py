"""Commands under a launcher: what it tells before anything is initialised, and who may speak."""

from __future__ import annotations

import os
import time

import click

__all__ = ["SharedCommand", "job_rank", "job_size"]

_SIZE = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_RANK = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_PATIENCE_S = 10.0


def job_size() -> int:
    """Return how many ranks the launcher (horovodrun, mpirun) has started; 1 without one."""
    return _number(_SIZE, 1)


def job_rank() -> int:
    """Return this process's rank under its launcher; 0 without one."""
    return _number(_RANK, 0)


class SharedCommand(click.Command):
    """A command that may run on all ranks: wrong options are told by rank 0 alone, and plainly."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; on other ranks leave a mistake to rank 0, whose end ends them all."""
        if job_size() > 1:
            # Open MPI gives ranks a pseudo-terminal, but what they print ends in a pipe or a file.
            os.environ.setdefault("TTY_COMPATIBLE", "0")
        try:
            return super().parse_args(ctx, args)
        except click.UsageError:
            if job_rank() > 0:
                time.sleep(_PATIENCE_S)  # leaving first might end rank 0 before it has spoken
                ctx.exit(2)
            raise


def _number(names: tuple[str, ...], otherwise: int) -> int:
    found = (os.environ[name] for name in names if os.environ.get(name, "").isdigit())
    return int(next(found, otherwise))
