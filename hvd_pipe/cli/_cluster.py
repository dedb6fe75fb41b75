"""The options that describe a cluster, and the `Cluster` that they describe."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hvd_pipe.cli.options import (
    BANDWIDTH,
    BYTES,
    MOST_WORKERS,
    NUMBERS,
    SECONDS,
    ClusterOption,
    Parsed,
)
from hvd_pipe.cli.output import InputError, one_line, warning
from hvd_pipe.planning.cluster import PUBLISHED, Cluster, Link, Network
from hvd_pipe.planning.collectives import ALGORITHMS

__all__ = ["NOISY", "cluster_options", "warn_of_measurement"]

Function = Callable[..., Any]
_option = functools.partial(click.option, cls=ClusterOption)

_COUNT = click.IntRange(1, MOST_WORKERS)
_LATENCY_S = 30e-6
_INNER_S = 5e-6
NOISY = 0.25  # mean error of a measured all-reduce that is worth a warning
_FAR = 4  # times as many workers as were measured: the formula may be far off


def cluster_options(
    *, required: bool = True, sweep: bool = False, machines: bool = False
) -> Callable[[Function], Function]:
    """Add the options that describe a cluster; the command gets ``cluster`` (a `Cluster`)."""

    def decorate(command: Function) -> Function:
        @functools.wraps(command)
        def with_cluster(*args: Any, **kwargs: Any) -> Any:
            given = {name: kwargs.pop(name) for name in _CLUSTER_PARAMETERS}
            if machines:
                _apply_machines(given, kwargs.pop("machines"))
            if not required and all(value is None for value in given.values()):
                return command(*args, cluster=None, **kwargs)
            if sweep:
                kwargs["workers"] = given["workers"]
                if given["workers"] is None and given["speeds"] is not None:
                    kwargs["workers"] = len(given["speeds"])
            cluster = _cluster(given, workers_required=not sweep)
            if not sweep:
                warn_of_measurement(cluster.network, cluster.workers)
            return command(*args, cluster=cluster, **kwargs)

        decorated: Function = with_cluster
        if machines:
            decorated = _MACHINES_OPTION(decorated)
        for option in reversed(_CLUSTER_OPTIONS):
            decorated = option(decorated)
        return decorated

    return decorate


def warn_of_measurement(network: Network, workers: int) -> None:
    """Warn on stderr of a measurement that says little, in itself or about so many workers."""
    ranks, each, comm = network.measured_workers, network.measured_per_node, network.measured
    if ranks is None:
        return
    if comm is not None and comm.error is not None and comm.error > NOISY:
        warning(
            f"the measured all-reduce is off by {comm.error:.0%} on average: its times jumped "
            "about; measure again with nothing else running, or give --bandwidth"
        )
    if each is not None and each >= ranks and workers > each:
        warning(
            f"measured on {ranks} ranks of one machine: the network between machines is not in "
            "it; measure on two machines or give --bandwidth"
        )
    elif workers > _FAR * ranks:
        warning(
            f"measured on {ranks} ranks: for {workers} workers it is extrapolated by the formula "
            "of the all-reduce; measure on more ranks to be sure"
        )


def _machines(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise ValueError(f"{text!r}: write MACHINESxWORKERS, such as 4x8 for 4 machines of 8.")
    machines, workers = int(match[1]), int(match[2])
    if machines * workers > MOST_WORKERS:
        raise ValueError(f"{text!r} are more than {MOST_WORKERS} workers.")
    return machines, workers


def _apply_machines(given: dict[str, Any], machines: tuple[int, int] | None) -> None:
    if machines is None:
        return
    for name in ("cluster", "workers", "workers_per_node"):
        if given[name] is not None:
            raise click.UsageError(
                f"--machines {machines[0]}x{machines[1]} says how many workers there are and "
                f"where: leave out {_flag(name)}."
            )
    given["workers"] = machines[0] * machines[1]
    given["workers_per_node"] = machines[1]


_MACHINES_OPTION = _option(
    "--machines",
    type=Parsed("machines", _machines),
    metavar="MxW",
    help="Machines and workers of each, 4x8, for the two options --workers*.",
)
_CLUSTER_OPTIONS = (
    _option("-n", "--workers", type=_COUNT, metavar="N", help="Workers, one a GPU."),
    _option(
        "--cluster",
        metavar="FILE|NAME",
        help=f"Instead of a network: a cluster's JSON file, or one of {', '.join(PUBLISHED)}.",
    ),
    _option("--bandwidth", type=BANDWIDTH, help="Of a machine's link: 10gbit, 1.25GB/s."),
    _option("--latency", type=SECONDS, help="Of one message.  [default: 30us]"),
    _option(
        "--algorithm",
        type=click.Choice(ALGORITHMS),
        metavar="NAME",
        help=f"Of the all-reduce: {', '.join(ALGORITHMS)}.  [default: ring]",
    ),
    _option(
        "--workers-per-node",
        type=_COUNT,
        metavar="N",
        help="Workers of one machine.  [default: 1]",
    ),
    _option("--inner-bandwidth", type=BANDWIDTH, help="Within a machine: 100gbit."),
    _option("--inner-latency", type=SECONDS, help="Within a machine.  [default: 5us]"),
    _option("--memory", type=BYTES, help="Of one worker: 16GB."),
    _option("--speeds", type=NUMBERS, help="Of each worker, relative: 1,1,2,2."),
    _option(
        "--jitter",
        type=click.FloatRange(min=0),
        metavar="NUMBER",
        help="Of step times: standard deviation over mean, 0.1.  [default: 0]",
    ),
)
_CLUSTER_PARAMETERS = (
    "workers",
    "cluster",
    "bandwidth",
    "latency",
    "algorithm",
    "workers_per_node",
    "inner_bandwidth",
    "inner_latency",
    "memory",
    "speeds",
    "jitter",
)
_NETWORK_PARAMETERS = _CLUSTER_PARAMETERS[2:8]


def _cluster(given: dict[str, Any], *, workers_required: bool) -> Cluster:
    """The cluster that the options describe."""
    base = _read_cluster(given) if given["cluster"] is not None else _made_cluster(given)
    count = given["workers"]
    if count is None and given["cluster"] is None:
        if given["speeds"] is not None:
            count = len(given["speeds"])
        elif workers_required:
            raise click.UsageError("say how many workers: --workers 16.")
        else:
            count = 2
    changes: dict[str, Any] = {}
    if given["memory"] is not None:
        changes["memory_bytes"] = given["memory"]
    if given["jitter"] is not None:
        changes["jitter"] = given["jitter"]
    if given["speeds"] is not None:
        changes["speeds"] = given["speeds"]
        count = base.workers if count is None else count
        if len(given["speeds"]) != count:
            raise click.UsageError(
                f"--speeds names {len(given['speeds'])} workers, but there are {count}: give one "
                f"number a worker, or --workers {len(given['speeds'])}."
            )
    if count is not None and count != base.workers:
        if "speeds" not in changes and base.speeds is not None:
            raise click.UsageError(
                f"--workers {count} does not fit the {base.workers} speeds of --cluster "
                f"{given['cluster']}: give --speeds with {count} numbers."
            )
        changes["workers"] = count
    return dataclasses.replace(base, **changes)


def _made_cluster(given: dict[str, Any]) -> Cluster:
    if given["bandwidth"] is None:
        raise click.UsageError(
            "describe the network: --bandwidth 10gbit (and --latency 30us), or --cluster FILE or "
            f"NAME ({', '.join(PUBLISHED)})."
        )
    per_node = given["workers_per_node"] or 1
    if per_node > 1 and given["inner_bandwidth"] is None:
        raise click.UsageError(
            f"--workers-per-node {per_node} needs the links within a machine: "
            "--inner-bandwidth 100gbit."
        )
    inner = [name for name in ("inner_bandwidth", "inner_latency") if given[name] is not None]
    if per_node == 1 and inner:
        raise click.UsageError(
            f"{_flag(inner[0])} describes the links within a machine: say how many workers one "
            "has, --workers-per-node 4."
        )
    workers = given["workers"] or (len(given["speeds"]) if given["speeds"] else None)
    if workers is not None and workers > per_node and workers % per_node:
        raise click.UsageError(
            f"--workers {workers} does not fill machines of --workers-per-node {per_node}: take "
            f"{workers // per_node * per_node} or {-(-workers // per_node) * per_node}."
        )
    latency = given["latency"] if given["latency"] is not None else _LATENCY_S
    inner_latency = given["inner_latency"] if given["inner_latency"] is not None else _INNER_S
    network = Network(
        Link.of(given["bandwidth"], latency),
        algorithm=given["algorithm"] or "ring",
        per_node=per_node,
        inside=Link.of(given["inner_bandwidth"], inner_latency) if inner else None,
    )
    return Cluster(workers or per_node, network)


def _read_cluster(given: dict[str, Any]) -> Cluster:
    name = given["cluster"]
    extra = [_flag(option) for option in _NETWORK_PARAMETERS if given[option] is not None]
    if extra:
        raise click.UsageError(
            f"--cluster {name} describes the network already: leave out {', '.join(extra)}, or "
            "--cluster."
        )
    if name in PUBLISHED:
        return PUBLISHED[name]
    if Path(name).suffix != ".json":
        close = difflib.get_close_matches(name, list(PUBLISHED), 1, 0.6)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise click.UsageError(
            f"--cluster {name!r} is neither a .json file nor one of {', '.join(PUBLISHED)}{hint}."
        )
    try:
        return Cluster.load(name)
    except ValueError as error:
        raise InputError(one_line(error)) from error


def _flag(parameter: str) -> str:
    return "--" + parameter.replace("_", "-")
