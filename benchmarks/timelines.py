r"""What a worker and its link do when, as a picture: stock Horovod above, overlap=forward below.

    sudo python benchmarks/timelines.py timeline.png --json timeline.json

Two jobs, one after the other, train on the same hosts (`cluster.py`) with an emulated accelerator
(`models.py`). The links are so fast that an all-reduce of all gradients takes ``--ratio`` times
the computation. Rank 0 notes steps once plans were tried: see `timelines_rank.py`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import Cluster, ClusterError
from models import MODELS
from throughput import Team, set_ratio, settle_steps

from hvd_pipe._pictures import COLOURS, figure_of, save
from hvd_pipe.timeline import Event, Timeline

SCRIPT = Path(__file__).with_name("timelines_rank.py")
JOBS = {"stock": "horovod", "ours": "merged-gradient:overlap=forward"}
TITLES = ("stock Horovod", JOBS["ours"])  # of workers 0 and 1 of the timeline
ROWS = ("computation", "wait, update", "link")
MESSAGE = (COLOURS["allreduce"], "#F2A673")  # of steps with an odd and an even number
PIXELS, LETTER = 970.0, 8.6  # of the time axis, and of a letter in a bar

Interval = tuple[float, float]


@dataclass(frozen=True)
class Bar:
    """A bar of the picture, in seconds since its left edge."""

    start: float
    end: float
    colour: str
    text: str = ""


def record(options: argparse.Namespace) -> Timeline:
    """Run both jobs; return rank 0's last steps, as worker 0 (stock Horovod) and 1 (ours)."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that all that was started ends
    events: list[Event] = []
    with Cluster(options.workers) as cluster, tempfile.TemporaryDirectory() as folder:
        for worker, (team, name) in enumerate(JOBS.items()):
            env = {"HOROVOD_TIMELINE": f"{folder}/{team}.json"}
            if team == "ours":
                env["HVD_PIPE_TIMELINE"] = f"{folder}/ours"
            with closing(Team(cluster, team, env, Path(folder), "gloo", SCRIPT)) as job:
                if not events:
                    rated = options.compute_ms / 1e3, options.ratio, options.gradient_bytes
                    set_ratio(cluster, job, *rated)
                answers = job.ask(
                    "record",
                    name=name,
                    model=options.model,
                    compute_s=options.compute_ms / 1e3,
                    gradient_bytes=options.gradient_bytes,
                    settle=settle_steps(name),
                    steps=2 * options.steps + 1,
                )
            events += [Event(worker=worker, **event) for event in answers[0]["events"]]
    about = f"{options.model}, {options.workers} hosts, {options.compute_ms / 1e3:g} s of "
    about += f"computation a step, communication / computation = {options.ratio:g}"
    return Timeline(tuple(events), about)


def without(event: Event, others: Iterable[Event]) -> Iterator[Interval]:
    """Yield the parts of an event in which none of the others happens.

    Example:
        >>> a, b = (Event("", "wait", 0, "compute", at, 1.0) for at in (1.0, 3.5))
        >>> list(without(Event("", "forward", 0, "compute", 0.0, 4.0), [a, b]))
        [(0.0, 1.0), (2.0, 3.5)]
    """
    reached = event.start_s
    for other in sorted(others, key=lambda each: each.start_s):
        if other.start_s > reached:
            yield reached, min(other.start_s, event.end_s)
        reached = max(reached, other.end_s)
        if reached >= event.end_s:
            return
    yield reached, event.end_s


def begins(timeline: Timeline, worker: int) -> list[float]:
    """Return when each step of a worker begins; the picture begins with the second one."""
    mine = (e for e in timeline.events if (e.worker, e.category) == (worker, "forward"))
    return sorted(event.start_s for event in mine)


def bars(timeline: Timeline, worker: int, span_s: float) -> dict[str, list[Bar]]:
    """Return the bars of each row, of so many seconds from the worker's second step on."""
    starts = begins(timeline, worker)
    rows: dict[str, list[Bar]] = {row: [] for row in ROWS}

    def add(row: str, part: Interval, colour: str, text: str = "") -> None:
        start, end = max(part[0] - starts[1], 0.0), min(part[1] - starts[1], span_s)
        if start < end:
            rows[row].append(Bar(start, end, colour, text))

    mine = [event for event in timeline.events if event.worker == worker]
    idle = [event for event in mine if event.category in ("wait", "update")]
    for event in sorted(mine, key=lambda each: each.start_s):
        if event.category == "allreduce":
            step = int(str(event.args["step"]))
            add("link", (event.start_s, event.end_s), MESSAGE[step % 2 == 0], str(step))
        elif event in idle:
            colour = COLOURS[event.category]
            add("wait, update", (event.start_s, event.end_s), colour, event.category)
        else:
            step = bisect_right(starts, event.start_s) - 1
            parts = sorted(without(event, idle), key=lambda part: part[0] - part[1])
            for number, part in enumerate(parts):  # the longest has the words
                text = f"{event.category} {step}" if number == 0 else ""
                add("computation", part, COLOURS[event.category], text)
    return rows


def share(row: Sequence[Bar], span_s: float) -> float:
    """Return the part of the time in which a row has bars."""
    return sum(bar.end - bar.start for bar in row) / span_s


def draw(timeline: Timeline, path: Path, steps: int) -> None:
    """Draw so many steps of stock Horovod, and what ours does in the same time."""
    starts = begins(timeline, 0)
    span_s = starts[1 + steps] - starts[1]
    figure, axes = figure_of(5.6)
    ticks = []
    for worker, title in enumerate(TITLES):
        top = worker * (len(ROWS) + 1.3)
        mine = begins(timeline, worker)
        shown = (i for i, start in enumerate(mine) if start <= mine[1] + 1.001 * span_s)
        last = max(2, *shown)
        step_s = (mine[last] - mine[1]) / (last - 1)
        axes.text(0, top - 0.62, f"{title}: {step_s:.2f} s a step", fontsize=13, fontweight="bold")
        for place, (name, row) in enumerate(bars(timeline, worker, span_s).items()):
            ticks.append((top + place, name))
            _draw_row(axes, row, top + place, span_s)
            axes.text(
                1.012 * span_s,
                top + place,
                f"{100 * share(row, span_s):.0f}%",
                va="center_baseline",
                fontsize=12,
            )
    axes.text(1.012 * span_s, -0.62, "of the time", fontsize=12)
    axes.set_yticks(*zip(*ticks, strict=True), fontsize=12)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=12)
    axes.set_ylim(ticks[-1][0] + 0.5, -1.1)
    axes.set_xlim(0.0, span_s)
    axes.set_xlabel("time, s", fontsize=12)
    axes.grid(axis="x", color="#E5E5E5", lw=0.8)
    axes.set_title(timeline.title, loc="left", fontsize=13)
    _legend(figure)
    save(figure, path)


def _draw_row(axes: Any, row: Sequence[Bar], place: float, span_s: float) -> None:
    for bar in row:
        width = bar.end - bar.start
        axes.broken_barh(
            [(bar.start, width)],
            (place - 0.4, 0.8),
            facecolor=bar.colour,
            edgecolor="white" if width * PIXELS / span_s > 5 else bar.colour,
            linewidth=0.6,
            zorder=3,
        )
        texts = (bar.text, bar.text.rpartition(" ")[2])
        room = width * PIXELS / span_s - 4
        text = next((each for each in texts if len(each) * LETTER <= room), "")
        dark = bar.colour in (COLOURS["backward"], COLOURS["update"], MESSAGE[0])
        axes.text(
            (bar.start + bar.end) / 2,
            place,
            text,
            ha="center",
            va="center_baseline",
            fontsize=11,
            color="white" if dark else "black",
            zorder=4,
        )


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415

    colours = {name: COLOURS[name] for name in ("forward", "backward", "wait", "update")}
    colours |= {"message of an odd step": MESSAGE[0], "of an even step": MESSAGE[1]}
    figure.legend(
        handles=[Patch(facecolor=colour, label=name) for name, colour in colours.items()],
        loc="outside lower center",
        ncols=len(colours),
        frameon=False,
        fontsize=12,
        handlelength=1.3,
    )


def main() -> int:
    """Record both jobs, or read what an earlier run has kept, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path, help=".png or .svg")
    parser.add_argument("--workers", type=int, default=4, help="default: 4")
    parser.add_argument("--model", default="resnet50", choices=list(MODELS))
    parser.add_argument("--ratio", type=float, default=1.0, help="communication / computation")
    parser.add_argument("--compute-ms", type=float, default=1200.0, help="of an emulated step")
    parser.add_argument("--gradient-bytes", type=int, default=30 * 2**20)
    parser.add_argument("--steps", type=int, default=3, help="of stock Horovod that are drawn")
    parser.add_argument(
        "--realtime", action="store_true", help="the hosts go before all else on this machine"
    )
    parser.add_argument(
        "--json", type=Path, help="keep the events here, for hvd-pipe trace: 0 is stock Horovod"
    )
    parser.add_argument(
        "--draw", type=Path, help="draw the events of such a file, and run nothing"
    )
    options = parser.parse_args()
    if options.workers < 2 or options.steps < 1 or options.ratio <= 0.0:
        parser.error("--workers: 2 at least; --steps: 1 at least; --ratio: more than 0")
    if options.picture.suffix not in (".png", ".svg"):
        parser.error(f"{options.picture}: a picture ends in .png or .svg")
    if options.realtime:  # all that this process starts has it, too
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        timeline = Timeline.load(options.draw) if options.draw else record(options)
    except (ClusterError, OSError, RuntimeError, ValueError) as error:
        print(f"timelines: {error}", file=sys.stderr)
        return 2
    if options.json:
        timeline.save(options.json)
    draw(timeline, options.picture, options.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
