"""Arguments and options that several commands share, and what they become."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvd_pipe import units
from hvd_pipe.cli.output import InputError, one_line, warning
from hvd_pipe.planning import methods
from hvd_pipe.planning.cluster import ALGORITHMS, PUBLISHED, Cluster, Link, Network
from hvd_pipe.planning.comm import CODECS
from hvd_pipe.planning.profile import ModelProfile

Function = Callable[..., Any]
Option = Callable[[Function], Function]

NOISY = 0.25
"""The mean error of a measured all-reduce that is worth a warning."""

MOST_WORKERS = 100_000
"""More are a typing error, and would take the memory of this machine."""

_FAR = 4  # times as many workers as were measured: the formula may be far off
_LATENCY_S, _INNER_LATENCY_S = 30e-6, 5e-6
_PATIENCE_S = 10.0


class Command(click.Command):
    """A command of whose ranks rank 0 alone prints wrong usage."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; other ranks end after rank 0 has printed what is wrong."""
        if job_size() > 1:
            # Open MPI gives ranks a pseudo-terminal, but what they print ends in a pipe or a file.
            os.environ.setdefault("TTY_COMPATIBLE", "0")
        try:
            return super().parse_args(ctx, args)
        except click.UsageError:
            if job_rank() > 0:
                time.sleep(_PATIENCE_S)
                ctx.exit(2)
            raise

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Explain PROFILE below the options, where a command takes one."""
        if any(param.name == "profile" for param in self.params):
            formatter.write_paragraph()
            formatter.write_text(
                "PROFILE is a model: the .json of hvd-pipe profile, a .csv trace, or a .graph.txt "
                "of PipeDream."
            )
        super().format_epilog(ctx, formatter)


def job_size() -> int:
    """Return how many ranks the launcher (horovodrun, mpirun, srun) has started; 1 without one."""
    # Under srun, tasks are ranks of one job only with PMIx.
    names = ("SLURM_STEP_NUM_TASKS",) if "PMIX_RANK" in os.environ else ()
    return _number("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", *names, otherwise=1)


def job_rank() -> int:
    """Return this process's rank under its launcher; 0 without one."""
    return _number("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", otherwise=0)


def _number(*names: str, otherwise: int) -> int:
    values = (os.environ[name] for name in names if os.environ.get(name, "").isdigit())
    return int(next(values, otherwise))


if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # generic from click 8.4 on


class Parsed(ParamType):
    """A parameter that one of our parsers reads; its ValueError is the message."""

    def __init__(self, name: str, parser: Callable[[str], Any]) -> None:
        self.name, self._parser = name, parser

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parser(value)
        except (ValueError, TypeError) as error:
            self.fail(one_line(error), param, ctx)


def _list_of(number: Callable[[str], Any], what: str, example: str) -> Parsed:
    def parse(text: str) -> tuple[Any, ...]:
        try:
            return tuple(map(number, text.split(",")))
        except ValueError:
            raise ValueError(f"{text!r} is no list of {what}: write {example}") from None

    return Parsed(what.rpartition(" ")[2], parse)


BYTES = Parsed("size", units.parse_bytes)
BANDWIDTH = Parsed("bandwidth", units.parse_bandwidth)
SECONDS = Parsed("time", units.parse_seconds)
INTEGERS = _list_of(int, "whole numbers", "4,8,16")
METHOD = Parsed("strategy", methods.parse)


class _ProfileFile(click.Path):
    """A path whose file becomes a `ModelProfile`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return ModelProfile.read(str(super().convert(value, param, ctx)))


profile_argument = click.argument("profile", type=_ProfileFile(exists=True, dir_okay=False))

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document instead of tables."
)


def number(*names: str, positive: bool = False, **more: Any) -> Option:
    """An option that takes a number of at least 0, or above 0."""
    kind = click.FloatRange(min=0, min_open=positive)
    return click.option(*names, **{"type": kind, "metavar": "NUMBER", **more})


def count(*names: str, least: int = 1, most: int | None = None, **more: Any) -> Option:
    """An option that takes a whole number."""
    kind = click.IntRange(least, most)
    return click.option(*names, **{"type": kind, "metavar": "N", "show_default": True, **more})


optimizer_state_option = number(
    "--optimizer-state",
    default=1.0,
    show_default=True,
    help="Its bytes a byte of weights: 0 for SGD, 1 with momentum, 2 for Adam.",
)

compression_option = click.option(
    "--compression",
    type=click.Choice(tuple(CODECS)),
    default="none",
    show_default=True,
    help="What gradients travel as.",
)


def output_option(
    *suffixes: str, what: str, name: str = "-o", required: bool = False, multiple: bool = False
) -> Option:
    """``-o FILE``, handed on as ``path``, or another option of a file with one of the suffixes."""

    def check(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        paths = value if multiple else () if value is None else (value,)
        for path in paths if job_rank() == 0 else ():
            if path.suffix.lower() not in suffixes:
                raise click.BadParameter(
                    f"{str(path)!r} must end in {' or '.join(suffixes)}, which says what to write."
                )
            if not path.parent.is_dir():
                raise click.BadParameter(f"there is no directory {str(path.parent)!r}.")
            check_writable(path)
        return value

    return click.option(
        *((name, "--output", "paths" if multiple else "path") if name == "-o" else (name,)),
        required=required,
        multiple=multiple,
        type=click.Path(dir_okay=False, path_type=Path),
        callback=check,
        metavar="FILE",
        help=f"Write {what} ({', '.join(suffixes)}).{' May be repeated.' if multiple else ''}",
    )


def check_writable(path: Path) -> None:
    """Refuse, before minutes of work, a file that could not be written after them."""
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"{path}: cannot be written")


def document(command: str, profile: ModelProfile, cluster: Cluster, **rest: Any) -> dict[str, Any]:
    """A command's JSON document: its name, the profile, the cluster, then its results."""
    about = {"profile": profile_json(profile), "cluster": json.loads(cluster.to_json())}
    return {"command": command, **about, **rest}


def profile_json(profile: ModelProfile) -> dict[str, Any]:
    """What every JSON document says of the profile."""
    return {
        "name": profile.name,
        "layers": len(profile.layers),
        "gradient_bytes": int(profile.gradient_bytes().sum()),
        "forward_s": profile.forward_s,
        "backward_s": profile.backward_s,
        "update_s": profile.update_s,
    }


def summary(profile: ModelProfile) -> str:
    """A profile in one line.

    Example:
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> summary(ModelProfile((LayerProfile("fc", 1_000_000, 0.25),), name="tiny"))
        'tiny: 1 layer, 1 MB of gradients, forward 0 s, backward 250 ms'
    """
    parts = [
        counted(len(profile.layers), "layer"),
        f"{units.format_bytes(int(profile.gradient_bytes().sum()))} of gradients",
        f"forward {units.format_seconds(profile.forward_s)}",
        f"backward {units.format_seconds(profile.backward_s)}",
    ]
    if profile.update_s:
        parts.append(f"update {units.format_seconds(profile.update_s)}")
    return f"{profile.name or 'model'}: {', '.join(parts)}"


def describe(cluster: Cluster) -> str:
    """A cluster in one line.

    Example:
        >>> describe(PUBLISHED["k80-10gbe"]).partition(":")[0]
        '16 workers'
    """
    network = cluster.network
    parts = [f"{network.algorithm} all-reduce"]
    if network.measured is not None:
        parts = [f"all-reduce measured on {network.measured_workers} workers"]
    if network.link is not None:
        parts.append(_link(network.link))
    if network.per_node > 1:
        inside = f" ({_link(network.inside)})" if network.inside is not None else ""
        parts.append(f"{network.per_node} a machine{inside}")
    if cluster.memory_bytes is not None:
        parts.append(f"{units.format_bytes(cluster.memory_bytes)} each")
    if cluster.speeds is not None:
        parts.append(f"speeds {min(cluster.speeds):g} to {max(cluster.speeds):g}")
    if cluster.jitter:
        parts.append(f"jitter {cluster.jitter:g}")
    return f"{counted(cluster.workers, 'worker')}: {', '.join(parts)}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 layer``, ``2 layers``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _link(link: Link) -> str:
    rate = units.format_rate(1 / link.beta) if link.beta else "no limit"
    return f"{rate}, {units.format_seconds(link.alpha)} a message"


def _machines(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise ValueError(f"{text!r}: write MACHINESxWORKERS, such as 4x8 for 4 machines of 8.")
    if int(match[1]) * int(match[2]) > MOST_WORKERS:
        raise ValueError(f"{text!r} are more than {MOST_WORKERS} workers.")
    return int(match[1]), int(match[2])


_CLUSTER_OPTIONS = (
    count("-n", "--workers", most=MOST_WORKERS, help="Workers, one a GPU."),
    click.option(
        "--cluster",
        metavar="FILE|NAME",
        help=f"Instead of a network: a cluster's JSON file, or one of {', '.join(PUBLISHED)}.",
    ),
    click.option("--bandwidth", type=BANDWIDTH, help="Of a machine's link: 10gbit, 1.25GB/s."),
    click.option("--latency", type=SECONDS, help="Of one message.  [default: 30us]"),
    click.option(
        "--algorithm",
        type=click.Choice(ALGORITHMS),
        metavar="NAME",
        help=f"Of the all-reduce: {', '.join(ALGORITHMS)}.  [default: ring]",
    ),
    count("--workers-per-node", most=MOST_WORKERS, help="Of one machine.  [default: 1]"),
    click.option("--inner-bandwidth", type=BANDWIDTH, help="Within a machine: 100gbit."),
    click.option("--inner-latency", type=SECONDS, help="Within a machine.  [default: 5us]"),
    click.option("--memory", type=BYTES, help="Of one worker: 16GB."),
    click.option(
        "--speeds",
        type=_list_of(float, "numbers", "1,1,2,2"),
        help="Of each worker, relative: 1,1,2,2.",
    ),
    number("--jitter", help="Of step times: standard deviation over mean, 0.1.  [default: 0]"),
)
_MACHINES_OPTION = click.option(
    "--machines",
    type=Parsed("machines", _machines),
    metavar="MxW",
    help="Machines and workers of each, 4x8, for the two options --workers*.",
)
_INNER = ("inner_bandwidth", "inner_latency")
_NETWORK = ("bandwidth", "latency", "algorithm", "workers_per_node", *_INNER)
_CLUSTER = ("workers", "cluster", *_NETWORK, "memory", "speeds", "jitter")


def cluster_options(
    *, required: bool = True, sweep: bool = False, machines: bool = False
) -> Callable[[Function], Function]:
    """Add the options that describe a cluster, handed on as ``cluster``.

    It is None where it need not be described and is not. With ``sweep``, the command also gets
    ``workers``, None where they are not given.
    """

    def decorate(command: Function) -> Function:
        @functools.wraps(command)
        def with_cluster(*args: Any, **kwargs: Any) -> Any:
            given = {name: kwargs.pop(name) for name in _CLUSTER}
            if machines:
                _apply_machines(given, kwargs.pop("machines"))
            if not required and all(value is None for value in given.values()):
                return command(*args, cluster=None, **kwargs)
            if sweep:
                kwargs["workers"] = given["workers"] or len(given["speeds"] or ()) or None
            cluster = _cluster(given, workers_required=not sweep)
            if not sweep:
                warn_of_measurement(cluster.network, cluster.workers)
            return command(*args, cluster=cluster, **kwargs)

        decorated: Function = _MACHINES_OPTION(with_cluster) if machines else with_cluster
        for option in reversed(_CLUSTER_OPTIONS):
            decorated = option(decorated)
        return decorated

    return decorate


def warn_of_measurement(network: Network, workers: int) -> None:
    """Warn on stderr of a measurement that is noisy, or of far fewer workers."""
    ranks, per_node, comm = network.measured_workers, network.measured_per_node, network.measured
    if ranks is None:
        return
    if comm is not None and comm.error is not None and comm.error > NOISY:
        warning(
            f"the measured all-reduce is off by {comm.error:.0%} on average: its times jumped "
            "about; measure again with nothing else running, or give --bandwidth"
        )
    if per_node is not None and per_node >= ranks and workers > per_node:
        warning(
            f"measured on {ranks} ranks of one machine: the network between machines is not in "
            "it; measure on two machines or give --bandwidth"
        )
    elif workers > _FAR * ranks:
        warning(
            f"measured on {ranks} ranks: for {workers} workers it is extrapolated by the formula "
            "of the all-reduce; measure on more ranks to be sure"
        )


def _apply_machines(given: dict[str, Any], machines: tuple[int, int] | None) -> None:
    if machines is None:
        return
    for name in ("cluster", "workers", "workers_per_node"):
        if given[name] is not None:
            raise click.UsageError(
                f"--machines {machines[0]}x{machines[1]} says how many workers there are and "
                f"where: leave out {_flag(name)}."
            )
    given["workers"], given["workers_per_node"] = machines[0] * machines[1], machines[1]


def _cluster(given: dict[str, Any], *, workers_required: bool) -> Cluster:
    """The cluster that the options describe."""
    speeds, workers, named = given["speeds"], given["workers"], given["cluster"]
    network = _read(given) if named is not None else _described(given)
    if workers is None and named is not None:
        workers = network.workers
    elif workers is None and speeds is not None:
        workers = len(speeds)
    elif workers is None and workers_required:
        raise click.UsageError("say how many workers: --workers 16.")
    if speeds is not None and len(speeds) != workers:
        raise click.UsageError(
            f"--speeds names {len(speeds)} workers, but there are {workers}: give one "
            f"number a worker, or --workers {len(speeds)}."
        )
    if speeds is None and network.speeds is not None and workers != network.workers:
        raise click.UsageError(
            f"--workers {workers} does not fit the {network.workers} speeds of --cluster "
            f"{named}: give --speeds with {workers} numbers."
        )
    fields = {"memory_bytes": given["memory"], "jitter": given["jitter"], "speeds": speeds}
    changes = {field: value for field, value in fields.items() if value is not None}
    return dataclasses.replace(network, workers=workers or 2, **changes)


def _described(given: dict[str, Any]) -> Cluster:
    """A machine on the network that the options describe."""
    per_node = given["workers_per_node"] or 1
    workers = given["workers"] or len(given["speeds"] or ())
    if per_node > 1 and given["inner_bandwidth"] is None:
        raise click.UsageError(
            f"--workers-per-node {per_node} needs the links within a machine: "
            "--inner-bandwidth 100gbit."
        )
    if given["bandwidth"] is None and not 1 < workers <= per_node:
        raise click.UsageError(
            "describe the network: --bandwidth 10gbit (and --latency 30us), or --cluster FILE or "
            f"NAME ({', '.join(PUBLISHED)})."
        )
    inner = [name for name in _INNER if given[name] is not None]
    if per_node == 1 and inner:
        raise click.UsageError(
            f"{_flag(inner[0])} describes the links within a machine: say how many workers one "
            "has, --workers-per-node 4."
        )
    if workers > per_node and workers % per_node:
        raise click.UsageError(
            f"--workers {workers} does not fill machines of --workers-per-node {per_node}: take "
            f"{workers // per_node * per_node} or {-(-workers // per_node) * per_node}."
        )

    def link(bandwidth: float, latency: float | None, otherwise: float) -> Link:
        return Link.of(bandwidth, otherwise if latency is None else latency)

    inside = (given["inner_bandwidth"], given["inner_latency"], _INNER_LATENCY_S)
    network = Network(
        link(given["bandwidth"] or given["inner_bandwidth"], given["latency"], _LATENCY_S),
        algorithm=given["algorithm"] or "ring",
        per_node=per_node,
        inside=link(*inside) if inner else None,
    )
    return Cluster(per_node, network)


def _read(given: dict[str, Any]) -> Cluster:
    name = given["cluster"]
    extra = [_flag(option) for option in _NETWORK if given[option] is not None]
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
    return Cluster.load(name)


def _flag(parameter: str) -> str:
    return "--" + parameter.replace("_", "-")
