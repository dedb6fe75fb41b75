"""``hvd-pipe simulate`` and ``trace``: how fast each strategy gets, and timelines as pictures.

In the rows of ``simulate``, ``speedup`` is in units of one worker, and ``messages`` are those of a
step. With a sweep, the cluster of the JSON document is that of its last number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import click

from hvd_pipe import _pictures, units
from hvd_pipe.cli import options
from hvd_pipe.cli.output import InputError, emit, exposed, one_line, progress, warning, wrote
from hvd_pipe.planning.cluster import Cluster
from hvd_pipe.planning.comm import CODECS
from hvd_pipe.planning.methods import Method, label, parse
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.simulate import simulate
from hvd_pipe.timeline import Timeline

SWEEP = tuple(2**power for power in range(2, 12))
METHODS = ("wfbp", "single", "greedy", "merged-gradient", "pipe-sgd", "cocod")
_TIMELINE_STEPS = 4
_SHOWN_WORKERS = 4  # of a simulation; a picture with more is unreadable


@click.command(
    "simulate",
    cls=options.Command,
    epilog="Example: hvd-pipe simulate model.json --cluster v100-10gbe -o sweep.png",
)
@options.profile_argument
@options.cluster_options(sweep=True)
@click.option(
    "--sweep",
    type=options.INTEGERS,
    help=f"Numbers of workers.  [default: {','.join(map(str, SWEEP))}]",
)
@click.option(
    "--method",
    "methods",
    type=options.METHOD,
    metavar="NAME",
    multiple=True,
    help="What to simulate, may be repeated; also horovod, conventional, local-sgd.  "
    f"[default: {', '.join(METHODS)}]",
)
@options.compression_option
@options.count("--steps", least=2, most=100_000, default=100, help="Steps to simulate.")
@options.count("--seed", least=0, default=0, help="Of the jitter.")
@options.output_option(
    *(".json", ".png", ".svg"),
    what=f"the first {_TIMELINE_STEPS} steps of one run",
    name="--timeline",
)
@options.output_option(".png", ".svg", what="a plot of speedup and exposed time")
@options.json_option
def command(
    profile: ModelProfile,
    cluster: Cluster,
    workers: int | None,
    sweep: tuple[int, ...] | None,
    methods: tuple[Method, ...],
    compression: str,
    steps: int,
    seed: int,
    timeline: Path | None,
    path: Path | None,
    as_json: bool,
) -> None:
    """Simulate training of PROFILE on 4 to 2048 workers.

    Speedup is in units of one worker; exposed is the time a step in which computation waits for
    the network. --workers asks about one number of workers instead of a sweep.
    """
    counts = _counts(cluster, workers, sweep)
    options.warn_of_measurement(cluster.network, max(counts))
    if timeline is not None and (len(counts) > 1 or len(methods) != 1):
        raise click.UsageError(
            "--timeline writes one run: say which with one --method and --workers."
        )
    if not any(layer.gradient_bytes for layer in profile.layers):
        raise ValueError("the profile has no layer with a gradient, so there is nothing to send")
    codec, rows = CODECS[compression], []
    chosen = methods or tuple(map(parse, METHODS))
    for count, method in progress([(n, m) for n in counts for m in chosen], "simulating"):
        sized = cluster.with_workers(count)
        run = simulate(profile, sized, method, codec, iterations=steps, seed=seed)
        speedup = count * profile.compute_s / run.step_s if run.step_s else math.nan
        fields = ("workers", "method", "step_s", "exposed_s", "comm_s", "messages")
        row = {name: getattr(run, name) for name in fields}
        rows.append({**row, "speedup": speedup, "efficiency": speedup / count})
    if timeline is not None:
        run = simulate(profile, sized, chosen[0], codec, iterations=_TIMELINE_STEPS, seed=seed)
        run.timeline.save(timeline)
    if path is not None:
        _pictures.draw_sweep(rows, path)
    if not profile.forward_s:
        warning(
            "the profile has no forward times: steps are backward alone, so speedups are too low"
        )
    settings = {"compression": compression, "steps": steps, "seed": seed}
    described = options.describe(cluster)
    few = len(counts) == 1
    emit(
        options.document("simulate", profile, sized, **settings, rows=rows),
        rows,
        {
            **({} if few else {"workers": "workers"}),
            "method~": "method",
            "step": "step_s",
            "exposed": lambda row: exposed(row["exposed_s"], row["step_s"]),
            "network": "comm_s",
            "messages": "messages",
            "speedup": lambda row: f"{row['speedup']:.2f}",
            "effi-\nciency": lambda row: f"{row['efficiency']:.1%}",
        },
        as_json=as_json,
        above=(options.summary(profile), described if few else described.partition(": ")[2]),
        below=_notes(methods, timeline, path),
    )


def _notes(methods: tuple[Method, ...], *paths: Path | None) -> Iterator[str]:
    if not methods:
        yield "pipe-sgd and cocod as they are by default: hvd-pipe advise finds options that fit."
    yield from wrote(*paths)


def _counts(
    cluster: Cluster, workers: int | None, sweep: tuple[int, ...] | None
) -> tuple[int, ...]:
    if sweep is None:
        if workers is not None:
            return (workers,)
        if cluster.speeds is not None:
            return (cluster.workers,)
        per_node = cluster.network.per_node
        fit = tuple(n for n in SWEEP if n <= per_node or n % per_node == 0)
        return fit or tuple(per_node * 2**power for power in range(8))
    if workers is not None or cluster.speeds is not None:
        raise click.UsageError(
            f"--sweep {','.join(map(str, sweep))} sets the numbers of workers: leave out "
            f"{'--workers' if cluster.speeds is None else '--speeds'}, or --sweep."
        )
    if min(sweep) < 1 or max(sweep) > options.MOST_WORKERS:
        raise click.UsageError(
            f"--sweep: numbers of workers are from 1 to {options.MOST_WORKERS}, got "
            f"{min(sweep) if min(sweep) < 1 else max(sweep)}."
        )
    return tuple(dict.fromkeys(sweep))


@click.command(
    "trace",
    cls=options.Command,
    epilog="\b\nExamples:\n"
    "  HVD_PIPE_TIMELINE=run1 horovodrun -np 4 python train.py\n"
    "  hvd-pipe trace run1 -o run1.json    (open it in https://ui.perfetto.dev)\n"
    "  hvd-pipe trace run1 --to 0.5 -o start.png    (the first half second)\n"
    "  hvd-pipe trace model.json --strategy pipe-sgd --cluster k80-10gbe -o run.png",
)
@click.argument("source", metavar="INPUT", type=click.Path(exists=True, path_type=Path))
@options.output_option(".json", ".png", ".svg", what="a Chrome trace or a picture", required=True)
@click.option(
    "--strategy",
    type=options.METHOD,
    metavar="NAME",
    help="INPUT is a profile: simulate this on a cluster.",
)
@options.count("--steps", most=1000, help="Steps to simulate with --strategy.  [default: 4]")
@options.number(
    *("--from", "start_s"),
    metavar="SECONDS",
    help="Leave out what is before, counted from the first event.",
)
@options.number(
    *("--to", "end_s"),
    positive=True,
    metavar="SECONDS",
    help="Leave out what is after; a picture then has all steps in between.",
)
@options.cluster_options(required=False)
@options.json_option
def trace(
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
    span_s = timeline.span_s
    lanes = [
        {
            "worker": worker,
            "lane": lane,
            "events": sum((e.worker, e.lane) == (worker, lane) for e in timeline.events),
            "busy_s": timeline.busy_s(worker, lane),
        }
        for worker in timeline.workers
        for lane in timeline.lanes(worker)
    ]
    opens = ": open it in https://ui.perfetto.dev" if path.suffix.lower() == ".json" else ""
    emit(
        {
            "command": "trace",
            "output": str(path),
            "title": timeline.title,
            "strategy": None if strategy is None else label(strategy),
            "events": len(timeline.events),
            "span_s": span_s,
            "lanes": lanes,
        },
        lanes,
        {
            "worker": "worker",
            "lane~": "lane",
            "events": "events",
            "busy": "busy_s",
            "of span": lambda row: f"{row['busy_s'] / span_s:.0%}" if span_s else "",
        },
        as_json=as_json,
        title=f"{timeline.title or source}: {units.format_seconds(span_s)}",
        below=[f"Wrote {path}{opens}."],
    )


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
