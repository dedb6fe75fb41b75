"""What the ranks of test_cli_bench.py do."""

from __future__ import annotations

import os

from click.testing import CliRunner

from hvd_pipe.cli.main import main

Outcome = tuple[int, str, str]
"""Exit code, stdout and stderr."""


def bench(*arguments: str) -> Outcome:
    result = CliRunner().invoke(main, ["bench", *arguments], prog_name="hvd-pipe")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def bench_by_rank(*arguments: tuple[str, ...]) -> Outcome:
    """Run it with other options on each rank."""
    variable = "OMPI_COMM_WORLD_RANK"
    return bench(*arguments[int(os.environ[variable])])
