"""``hvd-pipe bench``: what all-reduces cost between the ranks of a job, and a model of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvd_pipe import units
from hvd_pipe.cli._cluster import NOISY
from hvd_pipe.cli.options import (
    BYTES,
    SharedCommand,
    check_writable,
    cluster_json,
    job_rank,
    job_size,
    json_option,
)
from hvd_pipe.cli.output import InputError, note, table, warning, write_json
from hvd_pipe.errors import HvdPipeError
from hvd_pipe.planning.comm import CommModel

if TYPE_CHECKING:
    from hvd_pipe.cli._allreduce import Measurement

__all__ = ["command"]

_LEAST = 2048
_ALONE = (
    "bench measures between ranks: horovodrun -np 2 hvd-pipe bench (with -H for several hosts)"
)


def _at_least(ctx: click.Context, param: click.Parameter, value: int) -> int:
    if value < _LEAST:
        raise click.BadParameter(f"a model needs two sizes: at least {_LEAST} bytes.")
    return value


@click.command(
    cls=SharedCommand,
    epilog="Example: horovodrun -np 4 -H h1:2,h2:2 hvd-pipe bench -o cluster.json. "
    "horovodrun writes the rank before every line; for --json use mpirun, which does not.",
)
@click.option(
    "--max-bytes",
    type=BYTES,
    default="64MiB",
    show_default=True,
    callback=_at_least,
    help="The largest message.",
)
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    default=20.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to measure, about: up to 5 rounds through all sizes.",
)
@click.option(
    "--device",
    type=click.Choice(("cpu", "cuda")),
    help="Where the messages lie.  [default: GPUs if there are]",
)
@click.option(
    "-o",
    "--output",
    "paths",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the cluster for --cluster (.json). May be repeated.",
)
@json_option
def command(
    max_bytes: int, budget: float, device: str | None, paths: tuple[Path, ...], as_json: bool
) -> None:
    """Time all-reduces between the ranks of a job.

    Messages of 1 KiB to 64 MiB travel through Horovod, as gradients do. Run it under horovodrun
    or mpirun, on the hosts and with the settings of the training. Rank 0 prints the times, the
    bus bandwidth and a model fitted to them; -o cluster.json keeps it for advise, plan and
    simulate. Where one thread negotiates and carries (Gloo, MPI), these count the cost of a
    message alone for each that is not sent in a burst.
    """
    if job_size() == 1:
        raise InputError(_ALONE)
    if job_rank() == 0:
        for path in paths:
            _check_output(path)
    try:
        from hvd_pipe.cli import _allreduce  # noqa: PLC0415 - torch and Horovod: seconds
    except ImportError as error:
        raise HvdPipeError(f"{error}; hvd-pipe doctor says what is missing") from error
    found = _allreduce.measure(max_bytes, budget, device, _progress)
    if found is None:
        return
    for path in paths:
        found.cluster.save(path)
    _print(found, paths, budget, complete=found.sizes[-1] >= max_bytes // 4 * 4, as_json=as_json)


def _progress(place: str, size: int, seconds: float) -> None:
    click.echo(f"size {place}, {_binary(size)}: {units.format_seconds(seconds)}", err=True)


def _check_output(path: Path) -> None:
    """Refuse before the first message what would fail after the last."""
    if path.suffix.lower() != ".json":
        raise click.BadParameter(f"{str(path)!r} must end in .json.", param_hint="-o")
    if path.is_dir() or not path.parent.is_dir():
        what = "is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise InputError(f"{path}: {what}")
    check_writable(path)


def _print(
    found: Measurement, paths: Sequence[Path], budget_s: float, *, complete: bool, as_json: bool
) -> None:
    rows = found.rows()
    if as_json:
        document: dict[str, Any] = {
            "command": "bench",
            "workers": found.cluster.workers,
            "device": found.device,
            "controller": found.controller,
            "delay_s": found.comm.delay,
            "complete": complete,
            "rows": rows,
            "error": found.comm.error,
            "cluster": cluster_json(found.cluster),
            "written": [str(path) for path in paths],
        }
        write_json(document)
        return
    table(
        [">message", ">time", ">alone", ">busbw GB/s", ">model", ">error"],
        [
            [
                _binary(row["bytes"]),
                f"{1e3 * row['seconds']:.3f} ms",
                f"{1e3 * row['alone_s']:.3f} ms",
                f"{row['busbw_bytes_per_s'] / 1e9:.3f}",
                f"{1e3 * row['model_s']:.3f} ms",
                f"{row['model_s'] / row['seconds'] - 1:+.0%}",
            ]
            for row in rows
        ],
        title=f"all-reduce on {found.cluster.workers} ranks ({found.controller}, {found.device})",
    )
    note("time: of one more message in a burst; alone: with the delay of a single one.")
    if found.comm.blocking:
        note("One thread negotiates and carries: the link is idle for the delay before a message.")
    if not complete:
        note(f"The {units.format_seconds(budget_s)} were used up: --budget gives more.")
    note(f"Delay {units.format_seconds(found.comm.delay)}; model: {_in_words(found.comm)}.")
    if found.comm.error is not None and found.comm.error > NOISY:
        warning(
            f"the model is off by {found.comm.error:.0%} on average: the times jump about. Is "
            "something else running on these hosts?"
        )
    for path in paths:
        use = f": hvd-pipe advise PROFILE --cluster {path}" if path.suffix == ".json" else ""
        click.echo(f"Wrote {path}{use}")


def _in_words(comm: CommModel) -> str:
    rate = units.format_rate(1 / comm.slopes[-1]) if comm.slopes[-1] else "no limit"
    parts = f"{len(comm.starts)} lines, the last with" if len(comm.starts) > 1 else "a line of"
    error = f", mean error {comm.error:.0%}" if comm.error is not None else ""
    start = units.format_seconds(comm.latency)
    return f"{parts} {rate}, {start} for an empty message{error}"


def _binary(size: int) -> str:
    """Return a size in the powers of two that it is made of."""
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"
