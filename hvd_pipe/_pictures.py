"""Pictures: a timeline, and a sweep over numbers of workers.

The suffix of the path says the form: ``.png`` or ``.svg``. matplotlib is imported when something
is drawn, and its state (``pyplot``) is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hvd_pipe.timeline import Event, Timeline

COLOURS: Mapping[str, str] = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "ready": "#000000",
    "allreduce": "#D55E00",
    "wait": "#BDBDBD",
    "update": "#009E73",
    "send": "#E69F00",
    "recv": "#CC79A7",
    "codec": "#F0E442",
}
"""Of each category of events; those of Okabe and Ito, which colour-blind people tell apart."""

WIDTH_IN, DPI = 12.0, 100
_WORKERS = 8
_PASSES = 48  # more of them on a line are too narrow to see


def figure_of(height_in: float, columns: int = 1) -> Any:
    """Return a figure 1200 pixels wide and its axes."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'hvd_pipe[plot]'") from error
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, layout="constrained")
    axes = figure.subplots(1, columns)
    for part in axes if columns > 1 else (axes,):
        part.set_axisbelow(True)
        part.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure; without the date, equal pictures are equal files."""
    date: dict[str, Any] = {"Date": None} if Path(path).suffix.lower() == ".svg" else {}
    figure.savefig(path, dpi=DPI, facecolor="white", metadata=date)


def draw_timeline(timeline: Timeline, path: str | Path, whole: bool = False) -> None:
    """Draw what each worker does and when: a row a lane, a colour a category.

    A picture has at most eight workers and, unless ``whole``, some steps from the middle of many.
    """
    if not timeline.events:
        raise ValueError("a timeline without events cannot be drawn: trace at least one step")
    workers = timeline.workers[:_WORKERS]
    events = [event for event in timeline.events if event.worker in workers]
    first, last = (min(e.start_s for e in events), max(e.end_s for e in events))
    start, end = (first, last) if whole else _window(events)
    shown = [event for event in events if event.start_s <= end and event.end_s >= start]
    part = replace(timeline, events=tuple(shown))
    rows = [
        (f"worker {worker}" if number == 0 and index == 0 else "", lane if index == 0 else "", row)
        for worker in part.workers
        for number, lane in enumerate(part.lanes(worker))
        for index, row in enumerate(part.rows(worker, lane))
    ]
    figure, axes = figure_of(1.4 + min(0.6 * len(rows), max(9.0, 0.26 * len(rows))))
    scale, unit = (1.0, "s") if end - start > 30.0 else (1e3, "ms")
    if end - start < 5e-4:
        scale, unit = 1e6, "µs"
    width_s = 1200 / max(end - start, 1e-9) * 0.86  # pixels of a second
    for place, (_, _, row) in enumerate(rows):
        for category in COLOURS:
            bars = [event for event in row if event.category == category]
            spans = [((e.start_s - start) * scale, e.duration_s * scale) for e in bars]
            if category == "ready":
                axes.vlines([x for x, _ in spans], place - 0.45, place + 0.45, "black", lw=1)
                continue
            narrow = [event.duration_s * width_s < 5 for event in bars]
            edges = [COLOURS[category] if hidden else "white" for hidden in narrow]
            axes.broken_barh(
                spans, (place - 0.38, 0.76), facecolors=COLOURS[category], edgecolors=edges, lw=0.6
            )
    names = [f"{worker}   {lane}".strip() for worker, lane, _ in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="x", color="#E5E5E5", lw=0.8)
    axes.set_xlabel(f"time, {unit}" + ("" if start == 0.0 else " since the first that is shown"))
    title = timeline.title or "Timeline"
    if len(shown) < len(events):
        title += f"  ({start - first:.4g} to {end - first:.4g} of {last - first:.4g} s)"
    if len(timeline.workers) > len(workers):
        title += f"  ({len(workers)} of {len(timeline.workers)} workers)"
    axes.set_title(title, loc="left", fontweight="bold", pad=30)
    used = {event.category for event in shown}
    for category in (category for category in COLOURS if category in used):
        axes.broken_barh([], (0, 1), facecolors=COLOURS[category], label=category)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(used), frameon=False)
    save(figure, path)


def _window(events: Sequence[Event]) -> tuple[float, float]:
    """Return what is drawn of so many events, first and last second: all, or some steps."""
    passes = [event for event in events if event.lane == "compute" and event.duration_s > 0.0]
    worker = events[0].worker
    of_one = sorted(
        (event for event in passes or events if event.worker == worker), key=lambda e: e.start_s
    )
    middle = of_one[max(0, len(of_one) - _PASSES) // 2 :][:_PASSES]
    if len(middle) == len(of_one):
        return min(event.start_s for event in events), max(event.end_s for event in events)
    # From a forward pass on, so that the picture begins with a step.
    begin = next((event for event in middle if event.category == "forward"), middle[0])
    return begin.start_s, max(event.end_s for event in middle)


def draw_sweep(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Draw speedup and exposed communication by the number of workers, a line a method.

    Each row has ``workers``, ``method``, ``speedup`` (in units of one worker) and ``exposed_s``.
    """
    counts = sorted({row["workers"] for row in rows})
    figure, (speed, exposed) = figure_of(5.4, columns=2)
    speed.plot(counts, counts, color="#999999", ls="--", label="ideal")
    for method in dict.fromkeys(row["method"] for row in rows):
        line = [row for row in rows if row["method"] == method]
        x = [row["workers"] for row in line]
        speed.plot(x, [row["speedup"] for row in line], marker="o", label=method)
        exposed.plot(x, [1e3 * row["exposed_s"] for row in line], marker="o")
    for axes in (speed, exposed):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.grid(color="#E5E5E5", lw=0.8)
        axes.set_xlabel("workers")
    speed.set_yscale("log", base=2)
    speed.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    speed.set_title("Speedup over one worker", loc="left", fontweight="bold")
    exposed.set_yscale("symlog")
    exposed.set_ylim(bottom=0)
    exposed.set_title("Time a step that waits for the network, ms", loc="left", fontweight="bold")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)
