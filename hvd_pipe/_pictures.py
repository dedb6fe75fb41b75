"""Pictures: what all share (size, colours, units), and that of a timeline.

A timeline's picture has a line a worker and lane, and a bar an event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hvd_pipe.timeline import Event, Timeline

__all__ = [
    "COLOURS",
    "DPI",
    "GREY",
    "WIDTH_IN",
    "draw_timeline",
    "figure_of",
    "save",
    "unit_of_time",
]


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
"""The colour of each category of events, in the order of legends: hvd_pipe.timeline.CATEGORIES."""

GREY = "#555555"
WIDTH_IN, DPI = 12.0, 100


def figure_of(height_in: float, columns: int = 1, widths: Sequence[float] | None = None) -> Any:
    """Return a figure 1200 pixels wide and its axes."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'hvd_pipe[plot]'") from error
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, layout="constrained")
    axes = figure.subplots(1, columns, width_ratios=widths)
    for one in axes if columns > 1 else (axes,):
        one.set_axisbelow(True)
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
    return figure, axes


def save(figure: Figure, path: str | Path) -> None:
    # Without the date, equal pictures are equal files.
    date: dict[str, Any] = {"Date": None} if Path(path).suffix.lower() == ".svg" else {}
    figure.savefig(path, dpi=DPI, facecolor="white", metadata=date)


def unit_of_time(seconds: float, below_ms: bool = True) -> tuple[float, str]:
    """Return what to multiply seconds by, and the unit: ms unless that reads badly.

    Example:
        >>> unit_of_time(0.3), unit_of_time(2e-5), unit_of_time(60.0)
        ((1000.0, 'ms'), (1000000.0, 'µs'), (1.0, 's'))
    """
    if seconds > 30.0:
        return 1.0, "s"
    if below_ms and seconds < 5e-4:
        return 1e6, "µs"
    return 1e3, "ms"


_DARK = frozenset({"backward", "ready", "allreduce", "update"})
_WORKERS = 8
_PASSES = 48  # forward, backward, wait, update: more of them on a line are too narrow to see
_LABELS = 600  # a picture with more bars has them too narrow for words, anyway


def draw_timeline(timeline: Timeline, path: str | Path, whole: bool = False) -> None:
    """Draw what each worker does and when: a row a lane, a colour a category."""
    if not timeline.events:
        raise ValueError("a timeline without events cannot be drawn: trace at least one step")
    workers = timeline.workers[:_WORKERS]
    of_workers = [event for event in timeline.events if event.worker in workers]
    start, end = _all(of_workers) if whole else _window(of_workers)
    shown = [event for event in of_workers if event.start_s <= end and event.end_s >= start]
    part = replace(timeline, events=tuple(shown))
    span = max(end - start, 1e-9)
    factor, unit = unit_of_time(span)
    rows = [
        (worker, lane, row)
        for worker in workers
        for lane in timeline.lanes(worker)
        for row in part.rows(worker, lane)
    ]
    height = min(0.62, max(0.26, 9.0 / len(rows)))
    gaps = 0.35 * (len(workers) - 1)
    figure, axes = figure_of(1.45 + height * (len(rows) + gaps))
    one_lane = len({lane for _, lane, _ in rows}) == 1
    place, labels_left, previous = 0.0, _LABELS, (rows[0][0], "")
    ticks: list[float] = []
    names: list[str] = []
    places: dict[int, list[float]] = {}
    for worker, lane, row in rows:
        if worker != previous[0]:
            place += 0.35
        if (worker, lane) != previous:
            ticks.append(place)
            names.append("" if one_lane else lane)
        places.setdefault(worker, []).append(place)
        previous = (worker, lane)
        labels_left = _draw_row(axes, row, place, start, factor, span, labels_left)
        place += 1.0
    axes.set_ylim(place - 0.4, -0.6)
    axes.set_xlim(-0.004 * span * factor, 1.004 * span * factor)
    axes.set_yticks(ticks, names)
    axes.tick_params(axis="y", length=0)
    _name_workers(axes, places, height, one_lane)
    axes.set_xlabel(f"time, {unit}" + ("" if start == 0.0 else " since the first that is shown"))
    axes.grid(axis="x", color="#E5E5E5", lw=0.8)
    _legend_of_categories(figure, axes, {event.category for event in shown})
    title = timeline.title or "Timeline"
    if len(shown) < len(of_workers):
        first, last = _all(of_workers)
        scale, name = (1.0, "s") if last - first > 1.0 else unit_of_time(last - first)
        title += (
            f"  ({(start - first) * scale:.4g} to {(end - first) * scale:.4g} of "
            f"{(last - first) * scale:.4g} {name})"
        )
    left_out = len(timeline.workers) - len(workers)
    if left_out:
        title += f"  ({len(workers)} of {len(timeline.workers)} workers; {left_out} left out)"
    axes.set_title(title, loc="left", fontweight="bold", pad=30)
    save(figure, path)


def _name_workers(
    axes: Axes, places: Mapping[int, Sequence[float]], height: float, one_lane: bool
) -> None:
    """Write each worker's name beside its rows, and draw a line above all but the first."""
    first = next(iter(places))
    for worker, rows in places.items():
        axes.annotate(
            f"worker {worker}",
            (0, sum(rows) / len(rows)),
            xycoords=("axes fraction", "data"),
            xytext=(-36 if one_lane else -72, 0),
            textcoords="offset points",
            ha="center",
            va="center",
            rotation=90 if len(rows) * height > 0.85 else 0,
            fontweight="bold",
        )
        if worker != first:
            axes.axhline(rows[0] - 0.675, color="#CCCCCC", lw=0.8)


def _all(events: Sequence[Event]) -> tuple[float, float]:
    return min(event.start_s for event in events), max(event.end_s for event in events)


def _window(events: Sequence[Event]) -> tuple[float, float]:
    """Return what is drawn of so many events, first and last second: all, or some steps."""
    passes = [event for event in events if event.lane == "compute" and event.duration_s > 0.0]
    counts = Counter(event.worker for event in passes or events)
    worker, count = counts.most_common(1)[0]
    if count <= _PASSES:
        return _all(events)
    mine = sorted((e for e in passes or events if e.worker == worker), key=lambda e: e.start_s)
    middle = mine[(count - _PASSES) // 2 :][:_PASSES]
    # From a forward pass on, so that the picture begins with a step.
    begin = next((e for e in middle if e.category == "forward"), middle[0])
    return begin.start_s, max(event.end_s for event in middle)


def _draw_row(
    axes: Axes,
    row: Sequence[Event],
    place: float,
    start: float,
    factor: float,
    span: float,
    labels_left: int,
) -> int:
    """Draw one row and return how many labels more there may be."""
    pixels = WIDTH_IN * DPI * 0.86 / span
    for category in COLOURS:
        some = [event for event in row if event.category == category]
        if not some:
            continue
        if category == "ready":
            times = [(event.start_s - start) * factor for event in some]
            width = 1.1 if len(times) < 150 else 0.4
            axes.vlines(times, place - 0.45, place + 0.45, COLOURS[category], lw=width, zorder=4)
            continue
        axes.broken_barh(
            [((e.start_s - start) * factor, e.duration_s * factor) for e in some],
            (place - 0.38, 0.76),
            facecolors=COLOURS[category],
            # A line of its own colour keeps the shortest in sight; a white one parts the long.
            edgecolors=["white" if e.duration_s * pixels > 5 else COLOURS[category] for e in some],
            linewidth=0.6,
            zorder=3,
        )
        for event in some:
            room = event.duration_s * pixels
            text = next((text for text in _texts(event) if len(text) * 6.6 + 6 <= room), "")
            if labels_left and text:
                labels_left -= 1
                axes.text(
                    (event.start_s + event.duration_s / 2 - start) * factor,
                    place,
                    text,
                    ha="center",
                    va="center_baseline",
                    fontsize=8,
                    color="white" if category in _DARK else "black",
                    zorder=5,
                    clip_on=True,
                )
    return labels_left


def _texts(event: Event) -> tuple[str, ...]:
    """Return what may stand in an event's box, the longest first.

    >>> from hvd_pipe.timeline import Event
    >>> _texts(Event("backward 3.1", "backward", 0, "compute", 0.0, 1.0))
    ('backward 3.1', '3.1')
    >>> _texts(Event("gradients.1", "allreduce", 0, "network", 0.0, 1.0))
    ('gradients.1', '1')
    """
    if event.category == "wait":
        return (event.name,)
    words = event.name.rsplit(" ", 1)
    return event.name, words[1] if len(words) == 2 else event.name.rsplit(".", 1)[-1]


def _legend_of_categories(figure: Figure, axes: Axes, used: set[str]) -> None:
    from matplotlib.lines import Line2D  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    handles: list[Patch | Line2D] = []
    for category in (category for category in COLOURS if category in used):
        if category == "ready":
            line = Line2D([], [], color="black", marker="|", ls="", ms=11, label=category)
            handles.append(line)
        else:
            handles.append(Patch(facecolor=COLOURS[category], label=category))
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=len(handles),
        frameon=False,
        borderaxespad=0.2,
        handlelength=1.3,
        columnspacing=1.6,
    )
