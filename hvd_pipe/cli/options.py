"""Arguments and options that several commands share, and what they become."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvd_pipe import units
from hvd_pipe.cli.output import InputError, note, one_line
from hvd_pipe.planning import methods
from hvd_pipe.planning.cluster import Cluster, Link
from hvd_pipe.planning.codec import CODECS
from hvd_pipe.planning.profile import ModelProfile

__all__ = [
    "BANDWIDTH",
    "BYTES",
    "EXIT_CODES",
    "INTEGERS",
    "METHOD",
    "MOST_WORKERS",
    "NUMBERS",
    "OUTPUT_PATH",
    "SECONDS",
    "ClusterOption",
    "Command",
    "Parsed",
    "SharedCommand",
    "check_writable",
    "cluster_json",
    "compression_option",
    "describe",
    "document",
    "heading",
    "job_rank",
    "job_size",
    "json_option",
    "output_option",
    "profile_argument",
    "profile_json",
    "suffix_checker",
    "summary",
]


Function = Callable[..., Any]


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


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is no list of numbers: write 1,1,2,2") from None


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is no list of whole numbers: write 4,8,16") from None


MOST_WORKERS = 100_000
"""More are a typing error, and would take the memory of this machine."""

BYTES = Parsed("size", units.parse_bytes)
BANDWIDTH = Parsed("bandwidth", units.parse_bandwidth)
SECONDS = Parsed("time", units.parse_seconds)
NUMBERS = Parsed("numbers", _numbers)
INTEGERS = Parsed("integers", _integers)
METHOD = Parsed("strategy", methods.parse)

optimizer_state_option = click.option(
    "--optimizer-state",
    type=click.FloatRange(min=0),
    metavar="NUMBER",
    default=1.0,
    show_default=True,
    help="Its bytes a byte of weights: 0 for SGD, 1 with momentum, 2 for Adam.",
)

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document instead of tables."
)

compression_option = click.option(
    "--compression",
    type=click.Choice(tuple(CODECS)),
    default="none",
    show_default=True,
    help="What gradients travel as.",
)


OUTPUT_PATH = click.Path(dir_okay=False, writable=True, path_type=Path)


def suffix_checker(
    *suffixes: str,
) -> Callable[[click.Context, click.Parameter, Path | None], Path | None]:
    """A callback that refuses, before any work, a file that could not be written in the end."""

    def check(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
        if value is not None and value.suffix.lower() not in suffixes:
            raise click.BadParameter(
                f"{str(value)!r} must end in {' or '.join(suffixes)}, which says what to write."
            )
        if value is not None and not value.parent.is_dir():
            raise click.BadParameter(f"there is no directory {str(value.parent)!r}.")
        return value

    return check


def check_writable(path: Path) -> None:
    """Refuse, before minutes of measuring, a file that could not be written after them."""
    if not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"{path}: cannot be written")


def output_option(
    *suffixes: str, what: str, required: bool = False
) -> Callable[[Function], Function]:
    """``-o FILE``, handed on as ``path``; its suffix must be one of those given."""
    return click.option(
        "-o",
        "--output",
        "path",
        required=required,
        type=OUTPUT_PATH,
        callback=suffix_checker(*suffixes),
        metavar="FILE",
        help=f"Write {what} ({', '.join(suffixes)}).",
    )


def profile_argument(command: Function) -> Function:
    """Add ``PROFILE``: a .json, .csv or .graph.txt file, handed on as a `ModelProfile`."""

    @functools.wraps(command)
    def with_profile(*args: Any, profile: Path, **kwargs: Any) -> Any:
        return command(*args, profile=ModelProfile.read(profile), **kwargs)

    return click.argument("profile", type=click.Path(exists=True, dir_okay=False, path_type=Path))(
        with_profile
    )


_ARGUMENTS = {
    "PROFILE": "A model: .json of hvd-pipe profile, .csv trace, or .graph.txt of PipeDream.",
    "INPUT": "A trace (.json), a job's directory of them, or with --strategy a profile.",
}


class ClusterOption(click.Option):
    """An option that describes a cluster; help lists it apart."""


class Command(click.Command):
    """A command whose help has the cluster's options apart, and says what exit codes mean."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write arguments, the command's own options, then those that describe a cluster."""
        sections: dict[str, list[tuple[str, str]]] = {
            "Arguments": [],
            "Options": [],
            "Cluster": [],
        }
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Argument):
                what = _ARGUMENTS[parameter.human_readable_name]
                sections["Arguments"].append((parameter.human_readable_name, what))
            elif record is not None:
                shared = isinstance(parameter, ClusterOption)
                sections["Cluster" if shared else "Options"].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example as it is to be typed, and the exit codes."""
        formatter.write_paragraph()
        for line in (self.epilog or "").splitlines():
            formatter.write(f"{line}\n")
        formatter.write_paragraph()
        formatter.write_text(EXIT_CODES)


EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 wrong usage or input."


def describe(cluster: Cluster) -> str:
    """A cluster in one line.

    Example:
        >>> from hvd_pipe.planning.cluster import PUBLISHED
        >>> describe(PUBLISHED["k80-10gbe"]).partition(":")[0]
        '16 workers'
    """
    network = cluster.network
    if network.measured is not None:
        parts = [f"all-reduce measured on {network.measured_workers} workers"]
    else:
        parts = [f"{network.algorithm} all-reduce"]
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
    count = f"{cluster.workers} worker{'s' if cluster.workers > 1 else ''}"
    return f"{count}: {', '.join(parts)}"


def summary(profile: ModelProfile) -> str:
    """A profile in one line.

    Example:
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> summary(ModelProfile((LayerProfile("fc", 1_000_000, 0.25),), name="tiny"))
        'tiny: 1 layer, 1 MB of gradients, forward 0 s, backward 250 ms'
    """
    count = len(profile.layers)
    parts = [
        f"{count} layer{'s' if count > 1 else ''}",
        f"{units.format_bytes(int(profile.gradient_bytes().sum()))} of gradients",
        f"forward {units.format_seconds(profile.forward_s)}",
        f"backward {units.format_seconds(profile.backward_s)}",
    ]
    if profile.update_s:
        parts.append(f"update {units.format_seconds(profile.update_s)}")
    return f"{profile.name or 'model'}: {', '.join(parts)}"


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


def cluster_json(cluster: Cluster) -> dict[str, Any]:
    """What every JSON document says of the cluster; `--cluster` reads it back from a file."""
    document: dict[str, Any] = json.loads(cluster.to_json())
    return document


def document(command: str, profile: ModelProfile, cluster: Cluster, **rest: Any) -> dict[str, Any]:
    """A command's JSON document: its name, the profile, the cluster, then what it found."""
    about = {"profile": profile_json(profile), "cluster": cluster_json(cluster)}
    return {"command": command, **about, **rest}


def heading(profile: ModelProfile, cluster: Cluster) -> None:
    """Print what a table is about: the profile and the cluster, a line each."""
    note(summary(profile))
    note(describe(cluster))


def _link(link: Link) -> str:
    rate = units.format_rate(1 / link.beta) if link.beta else "no limit"
    return f"{rate}, {units.format_seconds(link.alpha)} a message"


_SIZE = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_RANK = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_STEP = "SLURM_STEP_NUM_TASKS"  # under srun; its tasks are ranks of one job only with PMIx
_PATIENCE_S = 10.0


def job_size() -> int:
    """Return how many ranks the launcher (horovodrun, mpirun, srun) has started; 1 without one."""
    return _number((*_SIZE, _STEP) if "PMIX_RANK" in os.environ else _SIZE, 1)


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
