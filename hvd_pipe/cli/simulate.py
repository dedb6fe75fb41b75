"""``hvd-pipe simulate``: how fast each strategy gets on few to very many workers.

With --json, in bytes and seconds::

    {"command", "profile", "cluster", "compression", "steps", "seed", "rows": [`Row`'s fields,
     ...]}

With a sweep, the cluster is that of its last number of workers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from hvd_pipe import units
from hvd_pipe.cli import options, plots
from hvd_pipe.cli._cluster import cluster_options, warn_of_measurement
from hvd_pipe.cli.output import exposed, note, progress, table, warning, width, write_json
from hvd_pipe.planning.cluster import Cluster
from hvd_pipe.planning.codec import CODECS, CodecCost
from hvd_pipe.planning.methods import Method, label, parse
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.simulate import simulate

__all__ = ["Row", "command", "simulate_row"]

SWEEP = tuple(2**power for power in range(2, 12))
METHODS = ("wfbp", "single", "greedy", "merged-gradient", "pipe-sgd", "cocod")
OURS = "merged-gradient"
_TIMELINE_STEPS = 4


@dataclass(frozen=True)
class Row:
    """One method on one number of workers.

    Args:
        workers: How many.
        method: Its label.
        step_s: Mean time of a step, simulated.
        exposed_s: The part of it in which computation waits.
        comm_s: Time a step in which the link is busy.
        messages: Messages a step.
        speedup: Samples per second, in those of one worker.
        efficiency: Speedup / workers.
    """

    workers: int
    method: str
    step_s: float
    exposed_s: float
    comm_s: float
    messages: float
    speedup: float
    efficiency: float


def simulate_row(
    profile: ModelProfile,
    cluster: Cluster,
    method: Method,
    codec: CodecCost,
    steps: int,
    seed: int,
) -> Row:
    """Simulate a method on a cluster."""
    run = simulate(profile, cluster, method, codec, iterations=steps, seed=seed)
    speedup = cluster.workers * profile.compute_s / run.step_s if run.step_s else float("nan")
    return Row(
        workers=cluster.workers,
        method=label(method),
        step_s=run.step_s,
        exposed_s=run.exposed_s,
        comm_s=run.comm_s,
        messages=run.messages,
        speedup=speedup,
        efficiency=speedup / cluster.workers,
    )


@click.command(
    "simulate",
    cls=options.Command,
    epilog="Example: hvd-pipe simulate model.json --cluster v100-10gbe -o sweep.png",
)
@options.profile_argument
@cluster_options(sweep=True)
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
@click.option(
    "--steps",
    type=click.IntRange(2, 100_000),
    metavar="N",
    default=100,
    show_default=True,
    help="Steps to simulate.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    show_default=True,
    help="Of the jitter.",
)
@click.option(
    "--timeline",
    callback=options.suffix_checker(".json", ".png", ".svg"),
    type=options.OUTPUT_PATH,
    metavar="FILE",
    help=f"Write the first {_TIMELINE_STEPS} steps of one run (.json, .png, .svg).",
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
    chosen = methods or tuple(map(parse, METHODS))
    counts = _counts(cluster, workers, sweep)
    warn_of_measurement(cluster.network, max(counts))
    if timeline is not None and (len(counts) > 1 or len(methods) != 1):
        raise click.UsageError(
            "--timeline writes one run: say which with one --method and --workers."
        )
    if not any(layer.gradient_bytes for layer in profile.layers):
        raise ValueError("the profile has no layer with a gradient, so there is nothing to send")
    codec, rows = CODECS[compression], []
    with progress("simulating", len(counts) * len(chosen)) as step:
        for count in counts:
            sized = cluster.with_workers(count)
            for method in chosen:
                rows.append(simulate_row(profile, sized, method, codec, steps, seed))
                step()
    if timeline is not None:
        few = simulate(profile, sized, chosen[0], codec, iterations=_TIMELINE_STEPS, seed=seed)
        few.timeline.save(timeline)
    if path is not None:
        plots.draw_sweep([asdict(row) for row in rows], path)
    if as_json:
        asked = {"compression": compression, "steps": steps, "seed": seed}
        found = {"rows": [asdict(row) for row in rows]}
        write_json(options.document("simulate", profile, sized, **asked, **found))
        return
    note(options.summary(profile))
    note(options.describe(cluster) if len(counts) == 1 else _sweep_line(cluster))
    (_one if len(counts) == 1 else _many)(rows)
    if not methods:
        note("pipe-sgd and cocod as they are by default: hvd-pipe advise finds options that fit.")
    if not profile.forward_s:
        warning(
            "the profile has no forward times: steps are backward alone, so speedups are too low"
        )
    for written in filter(None, (timeline, path)):
        note(f"Wrote {written}.")


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


def _one(rows: Sequence[Row]) -> None:
    ratios = any(row.method == OURS for row in rows)
    table(
        [
            "method~",
            ">step",
            *([">ratio"] if ratios else []),
            ">exposed",
            ">network",
            ">messages",
            ">speedup",
            ">effi-\nciency",
        ],
        [
            [
                row.method,
                units.format_seconds(row.step_s),
                *([_ratio(row, rows)] if ratios else []),
                units.format_seconds(exposed(row.exposed_s, row.step_s)),
                units.format_seconds(row.comm_s),
                f"{row.messages:g}",
                f"{row.speedup:.2f}",
                f"{row.efficiency:.1%}",
            ]
            for row in rows
        ],
    )
    if ratios:
        note(f"ratio: how many times as long as with {OURS}.")


def _many(rows: Sequence[Row]) -> None:
    """Tables with a row a number of workers and a column a method; several if they are wide."""
    _pivot("Step in ms on N workers", rows, lambda row: _ms(row.step_s))
    _pivot(
        "Exposed ms on N workers (messages a step)",
        rows,
        lambda row: f"{_ms(exposed(row.exposed_s, row.step_s))} ({row.messages:g})",
    )
    _pivot(
        "Speedup of N workers over one, and efficiency",
        rows,
        lambda row: f"{row.speedup:.1f} {row.efficiency:.0%}",
    )
    others = [row for row in rows if row.method != OURS]
    if others and len(others) < len(rows):
        _pivot(f"Step on N workers, in steps of {OURS}", others, lambda row: _ratio(row, rows))


def _ms(seconds: float) -> str:
    """Milliseconds, with two decimals while they are below 1000.

    >>> _ms(0.002086), _ms(0.4334), _ms(8.6)
    ('2.09', '433.40', '8600')
    """
    return f"{seconds * 1e3:.{2 if seconds < 0.999995 else 0}f}"


def _pivot(title: str, rows: Sequence[Row], cell: Callable[[Row], str]) -> None:
    methods = list(dict.fromkeys(row.method for row in rows))
    cells = {(row.workers, row.method): cell(row) for row in rows}
    counts = list(dict.fromkeys(row.workers for row in rows))
    parts: list[list[str]] = [[]]
    left = room = width() - len("2048")
    for method in methods:
        need = 2 + max(
            *(len(part) for part in _heading(method).split("\n")),
            *(len(cells[count, method]) for count in counts),
        )
        if need > left and parts[-1]:
            parts.append([])
            left = room
        parts[-1].append(method)
        left -= need
    for number, part in enumerate(parts):
        table(
            [">N", *(f">{_heading(method)}" for method in part)],
            [[count, *(cells[count, method] for method in part)] for count in counts],
            title=title if number == 0 else f"{title}, continued",
        )
        note()


def _heading(method: str) -> str:
    r"""A method's name over two lines where it has two words.

    >>> _heading("merged-gradient"), _heading("cocod:period=8")
    ('merged-\ngradient', 'cocod:\nperiod=8')
    """
    return re.sub(r"(?<=[-:,])(?=\w)", "\n", method)


def _ratio(row: Row, rows: Sequence[Row]) -> str:
    """How many times as long a step is as with merged-gradient on as many workers."""
    ours = [r.step_s for r in rows if r.workers == row.workers and r.method == OURS]
    return f"{row.step_s / ours[0]:.2f}x" if ours and ours[0] else ""


def _sweep_line(cluster: Cluster) -> str:
    return options.describe(cluster).partition(": ")[2]
