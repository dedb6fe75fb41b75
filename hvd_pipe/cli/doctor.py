"""``hvd-pipe doctor``: what is installed, built and reachable, and what to do where it is not."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hvd_pipe.cli import _checks as checks
from hvd_pipe.cli._checks import Row
from hvd_pipe.cli._launchers import launcher_rows, tasks_here
from hvd_pipe.cli._probe import Answer, ask, ask_host, ask_ranks
from hvd_pipe.cli.options import job_size
from hvd_pipe.cli.output import InputError, progress, write_json

__all__ = ["command"]

_PROBES = (
    "versions",
    "horovod_torch",
    "horovod_tensorflow",
    "mpi",
    "cuda",
    "network",
    "machine",
)
_LOCAL = {"localhost", "127.0.0.1", os.uname().nodename}
_AT_ONCE = 4


@click.command()
@click.option("-H", "--hosts", metavar="h1:4,h2:4", help="Hosts to reach, as for horovodrun.")
@click.option("-p", "--ssh-port", type=click.IntRange(1, 65535), help="The hosts' ssh port.")
@click.option(
    "--self-test/--no-self-test",
    default=True,
    help="Really run an all-reduce on two ranks (on one rank a host with -H). On by default.",
)
@click.option(
    "--timeout",
    type=click.IntRange(min=1),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="How long each look may take.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")
def command(
    hosts: str | None, ssh_port: int | None, self_test: bool, timeout: int, as_json: bool
) -> None:
    """Say what is missing here, and what to do.

    Looks at what is installed, built and reachable, and runs an all-reduce on two ranks.
    [X] is there and works, [ ] is not; a line behind -> says what to do. Exit code 0 when training
    can run (the rows that are marked ! are good), 1 otherwise.
    """
    if job_size() > 1:
        raise InputError(
            "doctor starts its own ranks: run `hvd-pipe doctor` alone, not under a launcher"
        )
    names = checks.parse_hosts(hosts) if hosts is not None else ()
    rows = examine(names, ssh_port, self_test, timeout)
    good = all(row.good is not False for row in rows if row.required)
    if as_json:
        found = [asdict(row) for row in rows]
        write_json({"command": "doctor", "good": good, "rows": found})
    else:
        _print(rows, good)
    sys.exit(0 if good else 1)


def examine(hosts: Sequence[str], port: int | None, self_test: bool, seconds: int) -> list[Row]:
    """Look at everything, some things at a time, and return the rows in order."""
    remote = [host for host in hosts if host not in _LOCAL]
    work: dict[str, Callable[[], Answer]] = {
        name: lambda name=name: ask(name, seconds)  # type: ignore[misc]
        for name in _PROBES
    }
    for host in remote:
        work[f"ssh {host}"] = lambda host=host: ask_host(host, port, "versions", seconds)  # type: ignore[misc]
    with progress("looking", len(work) + self_test) as step:
        answers = _all(work, step)
        if answers["mpi"].error and _built(answers).get("mpi"):
            answers["mpi"] = ask("mpi_of_horovod", seconds)
        tools = {name: _tool(name) for name in ("horovodrun", "mpirun", "ssh")}
        rows = _rows(answers, tools, remote, seconds)
        if self_test:
            rows.append(_self_test(rows, tools["horovodrun"], hosts, port, seconds))
            step()
    return rows


def _all(work: dict[str, Callable[[], Answer]], step: Callable[[], None]) -> dict[str, Answer]:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        futures: dict[Future[Answer], str] = {
            pool.submit(task): name for name, task in work.items()
        }
        answers = {}
        for future in as_completed(futures):
            answers[futures[future]] = future.result()
            step()
    return answers


def _rows(
    answers: dict[str, Answer], tools: dict[str, str | None], remote: list[str], seconds: int
) -> list[Row]:
    here = answers["versions"].found
    return [
        *checks.machine_rows(answers["machine"]),
        *checks.version_rows(answers["versions"]),
        *checks.built_rows(answers["horovod_torch"], answers["horovod_tensorflow"], here),
        *checks.tool_rows(tools, bool(remote)),
        *checks.mpi_rows(answers["mpi"]),
        *checks.cuda_rows(answers["cuda"], bool(_built(answers).get("nccl"))),
        *checks.network_rows(answers["network"]),
        *launcher_rows(os.environ, answers["machine"].found.get("cores", 1)),
        *checks.environment_rows(os.environ),
        *(checks.host_row(host, answers[f"ssh {host}"], here, seconds) for host in remote),
    ]


def _built(answers: dict[str, Answer]) -> dict[str, Any]:
    """Return what Horovod has, as the framework that loads tells."""
    return answers["horovod_torch"].found or answers["horovod_tensorflow"].found


def _self_test(
    rows: Sequence[Row],
    horovodrun: str | None,
    hosts: Sequence[str],
    port: int | None,
    seconds: int,
) -> Row:
    """Run it where it can run; what it needs has a row of its own that says what to do."""
    ranks = max(2, len(hosts))
    bad = [row.name for row in rows if row.required and row.good is False]
    if bad or horovodrun is None:
        name = f"all-reduce on {ranks} ranks"
        found = f"not run: {', '.join(bad or ['horovodrun'])} first"
        return Row("Self-test", name, False, found, required=True)
    several = hosts if len(hosts) > 1 else ()
    gloo = not several and ranks > tasks_here(os.environ, ranks)
    answer = ask_ranks(horovodrun, ranks, seconds, several, port, gloo=gloo)
    return checks.self_test_row(answer, ranks, seconds, several)


def _tool(name: str) -> str | None:
    """Return the command beside this Python, or else on PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def _print(rows: Sequence[Row], good: bool) -> None:
    width = max(len(row.name) for row in rows)
    section = ""
    for row in rows:
        if row.section != section:
            section = row.section
            click.echo(("" if row is rows[0] else "\n") + click.style(f"{section}:", bold=True))
        box = {True: "[X]", False: "[ ]", None: "   "}[row.good]
        colour = {True: "green", False: "red" if row.required else "yellow", None: None}[row.good]
        mark = "!" if row.required and row.good is False else " "
        line = f"  {mark} {click.style(box, fg=colour)} {row.name:<{width}}  {row.found}"
        click.echo(line.rstrip())
        if row.todo:
            click.echo(f"        -> {row.todo}")
    bad = [row for row in rows if row.required and row.good is False]
    click.echo()
    if good:
        click.echo("Training can run here.")
    else:
        click.echo(f"Training cannot run yet: see the {len(bad)} row(s) marked with !")
