"""Time all-reduces on all ranks of a job and fit a model: the part of bench that needs Horovod."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import click
import torch

import hvd_pipe.torch
from hvd_pipe.cli.options import job_size
from hvd_pipe.errors import HvdPipeError
from hvd_pipe.planning.cluster import Cluster, Network
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.fit import measured
from hvd_pipe.torch.agree import check_alike, largest
from hvd_pipe.torch.measuring.probes import measure_allreduce, uses_nccl

__all__ = ["Measurement", "measure", "sizes"]

hvd: Any = hvd_pipe.torch  # most of its names are Horovod's, which has no types

Progress = Callable[[str, int, float], None]

_SMALLEST = 1024
_ROUNDS = 5
_FLOOR_S = 1e-6  # what measure_allreduce returns for a difference that the noise has swallowed


@dataclass(frozen=True)
class Measurement:
    """What rank 0 reports."""

    sizes: list[int]
    seconds: list[float]
    cluster: Cluster
    device: str
    controller: str

    @property
    def comm(self) -> CommModel:
        assert self.cluster.network.measured is not None
        return self.cluster.network.measured

    def rows(self) -> list[dict[str, Any]]:
        """Return one row a size; busbw is nccl-tests' figure, which the links bound."""
        share = 2 * (self.cluster.workers - 1) / self.cluster.workers
        return [
            {
                "bytes": size,
                "seconds": seconds,
                "alone_s": self.comm.delay + seconds,
                "busbw_bytes_per_s": share * size / seconds,
                "model_s": float(self.comm(size)),
            }
            for size, seconds in zip(self.sizes, self.seconds, strict=True)
        ]


def sizes(max_bytes: int) -> list[int]:
    """Return the sizes of messages: 1 KiB and its doubles, and the largest; multiples of 4.

    Example:
        >>> sizes(5000)
        [1024, 2048, 4096, 5000]
    """
    largest, growing = max_bytes // 4 * 4, [_SMALLEST]
    while 2 * growing[-1] < largest:
        growing.append(2 * growing[-1])
    return [*growing, largest]


def measure(
    max_bytes: int, budget_s: float, device: str | None, progress: Progress
) -> Measurement | None:
    """Measure on all ranks; return what rank 0 reports, None on the others."""
    hvd.init()
    if hvd.size() == 1:
        raise HvdPipeError(
            f"the launcher started {job_size()} ranks, but Horovod sees one: "
            "hvd-pipe doctor says which launchers it is built for"
        )
    everyone = hvd.global_process_set
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    lacks = where == "cuda" and torch.cuda.device_count() < hvd.local_size()
    if device is None and lacks:
        where = "cpu"
    options = f"--max-bytes {max_bytes} --budget {budget_s:g}"
    check_alike(
        [("options", options), ("device", where), ("a GPU for each rank", str(not lacks))],
        "hvd_pipe.bench",
        everyone,
    )
    if where == "cuda" and lacks:
        raise HvdPipeError(
            f"--device cuda needs a GPU for each of the {hvd.local_size()} ranks of a host, but "
            f"torch sees {torch.cuda.device_count()}: fewer ranks, or --device cpu"
        )
    place = torch.device(where, hvd.local_rank()) if where == "cuda" else torch.device("cpu")
    if where == "cuda":
        torch.cuda.set_device(place)
    done, seconds, delay = _rounds(sizes(max_bytes), place, budget_s, progress)
    workers, each, first = hvd.size(), hvd.local_size(), hvd.rank() == 0
    controller = "MPI" if hvd.mpi_enabled() else "Gloo"
    hvd.shutdown()
    if not first:
        return None
    memory = torch.cuda.get_device_properties(place).total_memory if where == "cuda" else None
    model = replace(measured(done, seconds), delay=delay, blocking=not uses_nccl(place))
    network = Network(None, measured=model, measured_workers=workers, measured_per_node=each)
    cluster = Cluster(
        workers, network, memory_bytes=memory, name=f"measured on {workers} ranks, {where}"
    )
    return Measurement(done, seconds, cluster, where, controller)


def _rounds(
    every: list[int], device: torch.device, budget_s: float, progress: Progress
) -> tuple[list[int], list[float], float]:
    """Measure the sizes some times; return sizes, median seconds over rounds, and the delay."""
    everyone, first = hvd.global_process_set, hvd.rank() == 0

    def measured_one(size: int, seconds: float) -> None:
        if first and not delays:
            progress(f"{every.index(size) + 1}/{len(every)}", size, seconds)

    samples: dict[int, list[float]] = {}
    delays: list[float] = []
    left = longest = budget_s
    # Where noise leaves fewer than two sizes, which make no model, another try is worth its time.
    while len(delays) < _ROUNDS and (len(samples) < 2 or longest <= left):
        start = time.perf_counter()
        (measured_sizes, seconds), delay = measure_allreduce(
            every,
            device,
            everyone,
            left if len(samples) > 1 else budget_s,
            measured_one,
            "hvd_pipe.bench",
        )
        for size, sample in zip(measured_sizes, seconds, strict=True):
            if sample > _FLOOR_S:
                samples.setdefault(size, []).append(sample)
        delays.append(delay)
        # The ranks' clocks differ, and all must stop after the same round.
        [longest] = largest([time.perf_counter() - start], "hvd_pipe.bench.spent", everyone)
        left -= longest
        if first and len(delays) > 1:
            click.echo(f"round {len(delays)}/{_ROUNDS}", err=True)
    if len(samples) < 2:
        raise HvdPipeError(
            f"the times of {len(every)} sizes were lost in the noise: more --budget and larger "
            "messages (--max-bytes), or fewer other jobs on these hosts"
        )
    done = sorted(samples)
    return done, [median(samples[size]) for size in done], median(delays)
