"""``hvd-pipe trace``: timelines for Perfetto, or as pictures.

With --json, in bytes and seconds::

    {"command", "output", "title", "strategy", "events", "span_s",
     "lanes": [{"worker", "lane", "events", "busy_s"}, ...]}
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from hvd_pipe import units
from hvd_pipe.cli import options
from hvd_pipe.cli._cluster import cluster_options
from hvd_pipe.cli.output import InputError, note, one_line, table, write_json
from hvd_pipe.planning.cluster import Cluster
from hvd_pipe.planning.methods import Method, label
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.simulate import simulate
from hvd_pipe.timeline import Timeline

__all__ = ["command"]

_SHOWN_WORKERS = 4  # of a simulation; a picture with more is unreadable


@click.command(
    "trace",
    cls=options.Command,
    epilog="Examples:\n"
    "  HVD_PIPE_TIMELINE=run1 horovodrun -np 4 python train.py\n"
    "  hvd-pipe trace run1 -o run1.json    (open it in https://ui.perfetto.dev)\n"
    "  hvd-pipe trace run1 --to 0.5 -o start.png    (the first half second)\n"
    "  hvd-pipe trace model.json --strategy pipe-sgd --cluster k80-10gbe -o run.png",
)
@click.argument(
    "source",
    metavar="INPUT",
    type=click.Path(exists=True, path_type=Path),
)
@options.output_option(".json", ".png", ".svg", what="a Chrome trace or a picture", required=True)
@click.option(
    "--strategy",
    type=options.METHOD,
    metavar="NAME",
    help="INPUT is a profile: simulate this on a cluster.",
)
@click.option(
    "--steps",
    type=click.IntRange(1, 1000),
    metavar="N",
    help="Steps to simulate with --strategy.  [default: 4]",
)
@click.option(
    "--from",
    "start_s",
    type=click.FloatRange(min=0.0),
    metavar="SECONDS",
    help="Leave out what is before, counted from the first event.",
)
@click.option(
    "--to",
    "end_s",
    type=click.FloatRange(min=0.0, min_open=True),
    metavar="SECONDS",
    help="Leave out what is after; a picture then has all steps in between.",
)
@cluster_options(required=False)
@options.json_option
def command(
    source: Path,
    path: Path,
    strategy: Method | None,
    steps: int | None,
    start_s: float | None,
    end_s: float | None,
    cluster: Cluster | None,
    as_json: bool,
) -> None:
    """Convert a timeline to a Chrome trace or a picture.

    Perfetto opens the .json. INPUT is a trace written by hvd_pipe, a directory that a job filled
    under HVD_PIPE_TIMELINE, or with --strategy a profile, whose steps are simulated on the
    cluster that the other options describe.
    """
    if strategy is not None:
        timeline = _simulated(source, strategy, cluster, steps or 4)
    elif cluster is not None or steps is not None:
        raise click.UsageError(
            "the cluster's options and --steps describe a simulation: say of which "
            "--strategy, e.g. --strategy pipe-sgd."
        )
    else:
        timeline = _load(source)
    if not timeline.events:
        raise InputError(f"{source}: the timeline has no events, so there is nothing to show")
    cropped = start_s is not None or end_s is not None
    if cropped:
        timeline = _between(timeline, start_s or 0.0, math.inf if end_s is None else end_s)
    timeline.save(path, whole=cropped)
    lanes = _lanes(timeline)
    if as_json:
        write_json(
            {
                "command": "trace",
                "output": str(path),
                "title": timeline.title,
                "strategy": None if strategy is None else label(strategy),
                "events": len(timeline.events),
                "span_s": timeline.span_s,
                "lanes": lanes,
            }
        )
        return
    table(
        [">worker", "lane", ">events", ">busy", ">of span"],
        [
            [
                row["worker"],
                row["lane"],
                row["events"],
                units.format_seconds(row["busy_s"]),
                f"{row['busy_s'] / timeline.span_s:.0%}" if timeline.span_s else "",
            ]
            for row in lanes
        ],
        title=f"{timeline.title or source}: {units.format_seconds(timeline.span_s)}",
    )
    opens = ": open it in https://ui.perfetto.dev" if path.suffix.lower() == ".json" else ""
    note(f"Wrote {path}{opens}.")


def _lanes(timeline: Timeline) -> list[dict[str, Any]]:
    return [
        {
            "worker": worker,
            "lane": lane,
            "events": sum((e.worker, e.lane) == (worker, lane) for e in timeline.events),
            "busy_s": timeline.busy_s(worker, lane),
        }
        for worker in timeline.workers
        for lane in timeline.lanes(worker)
    ]


def _simulated(source: Path, strategy: Method, cluster: Cluster | None, steps: int) -> Timeline:
    if cluster is None:
        raise click.UsageError(
            "--strategy simulates a cluster: describe it, e.g. --workers 16 --bandwidth 10gbit."
        )
    if source.is_dir():
        raise click.UsageError(
            f"--strategy needs a profile, but {str(source)!r} is a directory: leave out "
            "--strategy to convert what a job wrote there."
        )
    unlike = cluster.jitter or cluster.speeds is not None
    workers = tuple(range(min(cluster.workers, _SHOWN_WORKERS) if unlike else 1))
    profile = ModelProfile.read(source)
    return simulate(profile, cluster, strategy, iterations=steps, trace_workers=workers).timeline


def _between(timeline: Timeline, start_s: float, end_s: float) -> Timeline:
    if start_s >= end_s:
        raise click.UsageError(f"--from {start_s:g} must be less than --to {end_s:g}.")
    part = timeline.between(start_s, end_s)
    if not part.events:
        raise InputError(
            f"nothing happens between {start_s:g} and {end_s:g} s: the timeline is "
            f"{units.format_seconds(timeline.span_s)} long"
        )
    return part


def _load(source: Path) -> Timeline:
    try:
        return Timeline.load(source)
    except ValueError as error:
        text = one_line(error)
        hint = ""
        if source.suffix in (".csv", ".txt") or "traceEvents" in text:
            hint = " (a profile needs --strategy and a cluster)"
        named = text if str(source) in text else f"{source}: {text}"
        raise InputError(named + hint) from error
