"""``hvd-pipe bench``: what all-reduces cost between the ranks of a job, and a model of it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click

from hvd_pipe import units
from hvd_pipe.cli import options
from hvd_pipe.cli.output import InputError, emit, warning
from hvd_pipe.errors import HvdPipeError
from hvd_pipe.planning.cluster import Cluster, Network
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.fit import measured

_SMALLEST, _LEAST = 1024, 2048
_ROUNDS = 5
_FLOOR_S = 1e-6  # what measure_allreduce returns for a difference that the noise has swallowed


def _at_least(ctx: click.Context, param: click.Parameter, value: int) -> int:
    if value < _LEAST:
        raise click.BadParameter(f"a model needs two sizes: at least {_LEAST} bytes.")
    return value


@click.command(
    cls=options.Command,
    epilog="Example: horovodrun -np 4 -H h1:2,h2:2 hvd-pipe bench -o cluster.json. "
    "horovodrun writes the rank before every line; for --json use mpirun, which does not.",
)
@click.option(
    "--max-bytes",
    type=options.BYTES,
    default="64MiB",
    show_default=True,
    callback=_at_least,
    help="The largest message.",
)
@options.number(
    "--budget",
    positive=True,
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
    "--carrier",
    type=click.Choice(("horovod", "torch")),
    help="What carries them.  [default: torch over Gloo, horovod over MPI]",
)
@options.output_option(".json", what="the cluster for --cluster", multiple=True)
@options.json_option
def command(
    max_bytes: int,
    budget: float,
    device: str | None,
    carrier: str | None,
    paths: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Time all-reduces between the ranks of a job.

    Messages of 1 KiB to 64 MiB travel as gradients of PyTorch do. Run it under horovodrun
    or mpirun, on the hosts and with the settings of the training. Rank 0 prints the times, the
    bus bandwidth and a model fitted to them; -o cluster.json keeps it for advise, plan and
    simulate. Where one thread negotiates and carries (Horovod, but for NCCL), these count the cost
    of a message alone for each that is not sent in a burst.
    """
    if options.job_size() == 1:
        raise InputError(
            "bench measures between ranks: horovodrun -np 2 hvd-pipe bench (with -H for several "
            "hosts)"
        )
    if device == "cuda" and carrier == "torch":
        raise InputError("--carrier torch carries from processors only: --device cpu")
    try:
        result = measure(max_bytes, budget, device, carrier)
    except ImportError as error:
        raise HvdPipeError(f"{error}; hvd-pipe doctor says what is missing") from error
    if result is None:
        return
    cluster, document = result
    for path in paths:
        cluster.save(path)
    comm, rows = cluster.network.measured, document["rows"]
    assert comm is not None
    complete = rows[-1]["bytes"] >= max_bytes // 4 * 4
    emit(
        {**document, "complete": complete, "written": [str(path) for path in paths]},
        rows,
        {
            "message": lambda row: _binary(row["bytes"]),
            "time": lambda row: f"{1e3 * row['seconds']:.3f} ms",
            "alone": lambda row: f"{1e3 * row['alone_s']:.3f} ms",
            "busbw GB/s": lambda row: f"{row['busbw_bytes_per_s'] / 1e9:.3f}",
            "model": lambda row: f"{1e3 * row['model_s']:.3f} ms",
            "error": lambda row: f"{row['model_s'] / row['seconds'] - 1:+.0%}",
        },
        as_json=as_json,
        title=f"all-reduce on {cluster.workers} ranks ({document['controller']}, "
        f"{document['device']})",
        below=_notes(comm, paths, None if complete else budget),
    )
    if not as_json and comm.error is not None and comm.error > options.NOISY:
        warning(
            f"the model is off by {comm.error:.0%} on average: the times jump about. Is something "
            "else running on these hosts?"
        )


def _notes(comm: CommModel, paths: Sequence[Path], spent_s: float | None) -> Iterator[str]:
    seconds = units.format_seconds
    yield "time: of one more message in a burst; alone: with the delay of a single one."
    if comm.blocking:
        yield "One thread negotiates and carries: the link is idle for the delay before a message."
    if spent_s is not None:
        yield f"The {seconds(spent_s)} were used up: --budget gives more."
    rate = units.format_rate(1 / comm.slopes[-1]) if comm.slopes[-1] else "no limit"
    lines = f"{len(comm.starts)} lines, the last with" if len(comm.starts) > 1 else "a line of"
    error = f", mean error {comm.error:.0%}" if comm.error is not None else ""
    model = f"{lines} {rate}, {seconds(comm.latency)} for an empty message{error}"
    yield f"Delay {seconds(comm.delay)}; model: {model}."
    for path in paths:
        yield f"Wrote {path}: hvd-pipe advise PROFILE --cluster {path}"


def _binary(size: int) -> str:
    """Return a size in the powers of two that it is made of."""
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def message_sizes(max_bytes: int) -> list[int]:
    """Return the sizes of messages: 1 KiB and its doubles, and the largest; multiples of 4.

    Example:
        >>> message_sizes(5000)
        [1024, 2048, 4096, 5000]
    """
    largest, growing = max_bytes // 4 * 4, [_SMALLEST]
    while 2 * growing[-1] < largest:
        growing.append(2 * growing[-1])
    return [*growing, largest]


def measure(
    max_bytes: int, budget_s: float, device: str | None, carrier: str | None
) -> tuple[Cluster, dict[str, Any]] | None:
    """Measure on all ranks; return the cluster and rank 0's document, None on other ranks."""
    import hvd_pipe.torch  # noqa: PLC0415 - torch and Horovod take seconds
    from hvd_pipe.torch.arguments import default_carrier  # noqa: PLC0415
    from hvd_pipe.torch.measuring.probes import measure_allreduce, uses_nccl  # noqa: PLC0415
    from hvd_pipe.torch.messages.group import Group  # noqa: PLC0415

    hvd: Any = hvd_pipe.torch  # most of its names are Horovod's, which has no types
    hvd.init()
    if hvd.size() == 1:
        raise HvdPipeError(
            f"the launcher started {options.job_size()} ranks, but Horovod sees one: "
            "hvd-pipe doctor says which launchers it is built for"
        )
    settings = f"--max-bytes {max_bytes} --budget {budget_s:g} --carrier {carrier}"
    place, memory = _place(hvd, "cpu" if carrier == "torch" else device, settings)
    if carrier is None:
        carrier = default_carrier() if place.type == "cpu" else "horovod"
    first, everyone = hvd.rank() == 0, hvd.global_process_set
    group = Group(everyone, "hvd_pipe.bench.group") if carrier == "torch" else None
    time_sizes = partial(
        measure_allreduce, device=place, process_set=everyone, tag="hvd_pipe.bench", group=group
    )
    sizes, seconds, delay = _rounds(
        time_sizes, message_sizes(max_bytes), budget_s, first, everyone
    )
    workers, per_node = hvd.size(), hvd.local_size()
    controller = "MPI" if hvd.mpi_enabled() else "Gloo"
    blocking = group is None and not uses_nccl(place)
    hvd.shutdown()
    if not first:
        return None
    model = replace(measured(sizes, seconds), delay=delay, blocking=blocking)
    network = Network(None, measured=model, measured_workers=workers, measured_per_node=per_node)
    by = "" if group is None else ", by torch.distributed"
    name = f"measured on {workers} ranks, {place.type}{by}"
    cluster = Cluster(workers, network, memory_bytes=memory, name=name)
    document = {
        "command": "bench",
        "workers": workers,
        "device": place.type,
        "controller": controller,
    }
    document |= {
        "carrier": carrier,
        "delay_s": delay,
        "rows": _rows(sizes, seconds, model, workers),
    }
    return cluster, {**document, "error": model.error, "cluster": json.loads(cluster.to_json())}


def _place(hvd: Any, device: str | None, settings: str) -> tuple[Any, int | None]:
    """Return where messages lie on this rank, and a GPU's memory; all ranks do so alike."""
    import torch  # noqa: PLC0415

    from hvd_pipe.torch.agree import check_alike  # noqa: PLC0415

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    lacks = where == "cuda" and torch.cuda.device_count() < hvd.local_size()
    if device is None and lacks:
        where = "cpu"
    check_alike(
        [("options", settings), ("device", where), ("a GPU for each rank", str(not lacks))],
        "hvd_pipe.bench",
        hvd.global_process_set,
    )
    if where == "cpu":
        return torch.device("cpu"), None
    if lacks:
        raise HvdPipeError(
            f"--device cuda needs a GPU for each of the {hvd.local_size()} ranks of a host, but "
            f"torch sees {torch.cuda.device_count()}: fewer ranks, or --device cpu"
        )
    place = torch.device(where, hvd.local_rank())
    torch.cuda.set_device(place)
    return place, torch.cuda.get_device_properties(place).total_memory


def _rows(
    sizes: list[int], seconds: list[float], model: CommModel, workers: int
) -> list[dict[str, Any]]:
    share = 2 * (workers - 1) / workers  # busbw is nccl-tests' figure, which the links bound
    return [
        {
            "bytes": size,
            "seconds": time_s,
            "alone_s": model.delay + time_s,
            "busbw_bytes_per_s": share * size / time_s,
            "model_s": float(model(size)),
        }
        for size, time_s in zip(sizes, seconds, strict=True)
    ]


def _rounds(
    measure_allreduce: Any, sizes: list[int], budget_s: float, first: bool, everyone: Any
) -> tuple[list[int], list[float], float]:
    """Measure the sizes some times; return sizes, median seconds over rounds, and the delay."""
    from hvd_pipe.torch.agree import largest  # noqa: PLC0415

    samples: dict[int, list[float]] = {}
    delays: list[float] = []

    def progress(size: int, seconds: float) -> None:
        if first and not delays:
            number = f"{sizes.index(size) + 1}/{len(sizes)}"
            text = f"size {number}, {_binary(size)}: {units.format_seconds(seconds)}"
            click.echo(text, err=True)

    left = longest = budget_s
    # Where noise leaves fewer than two sizes, which make no model, another try is worth its time.
    while len(delays) < _ROUNDS and (len(samples) < 2 or longest <= left):
        start = time.perf_counter()
        budget = left if len(samples) > 1 else budget_s
        (measured_sizes, seconds), delay = measure_allreduce(
            sizes, budget_s=budget, progress=progress
        )
        for size, sample in zip(measured_sizes, seconds, strict=True):
            if sample > _FLOOR_S:
                samples.setdefault(size, []).append(sample)
        delays.append(delay)
        # The ranks' clocks differ, and all must stop after the same round.
        spent = [time.perf_counter() - start]
        [longest] = largest(spent, "hvd_pipe.bench.spent", everyone)
        left -= longest
        if first and len(delays) > 1:
            click.echo(f"round {len(delays)}/{_ROUNDS}", err=True)
    if len(samples) < 2:
        raise HvdPipeError(
            f"the times of {len(sizes)} sizes were lost in the noise: more --budget and larger "
            "messages (--max-bytes), or fewer other jobs on these hosts"
        )
    kept = sorted(samples)
    return kept, [median(samples[size]) for size in kept], median(delays)
