"""Pictures: timelines, sweeps over numbers of workers, all-reduce times, pipeline stages.

The suffix of the path says the form: ``.png``, ``.svg``, ``.pdf``. All are 1200 pixels wide and
use colours that colour-blind people tell apart (Okabe and Ito's). matplotlib is imported when the
first picture is drawn, and its state (``pyplot``) is left alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_pipe.timeline import CATEGORIES, Event, Timeline, stack

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hvd_pipe.planning.stages import Partition

__all__ = ["COLOURS", "draw_comm", "draw_partition", "draw_sweep", "draw_timeline"]

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
"""The colour of each category of events."""

_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
_MARKERS = "osD^vPX*"
_DARK = frozenset({"backward", "ready", "allreduce", "update"})

_WIDTH_IN, _DPI = 12.0, 100
_WORKERS = 8
_PASSES = 48  # forward, backward, wait, update: more of them on a line are too narrow to see
_LABELS = 600  # a picture with more bars has them too narrow for words, anyway
_GREY = "#555555"


def draw_timeline(timeline: Timeline, path: str | Path) -> None:
    """Draw what each worker does and when: a row a lane, a colour a category.

    Of more than 8 workers the first 8 are drawn, and of many steps some from the middle; the
    picture says so. What overlaps within a lane is drawn in rows beneath each other.

    Args:
        timeline: With at least one event.
        path: The picture's; see the module's docstring.

    Raises:
        ValueError: No events, or a suffix that matplotlib does not know.
        ImportError: matplotlib is not installed.
    """
    if not timeline.events:
        raise ValueError("a timeline without events cannot be drawn: trace at least one step")
    workers = timeline.workers[:_WORKERS]
    of_workers = [event for event in timeline.events if event.worker in workers]
    start, end = _window(of_workers)
    shown = [event for event in of_workers if event.start_s <= end and event.end_s >= start]
    by_lane: dict[tuple[int, str], list[Event]] = {}
    for event in shown:
        by_lane.setdefault((event.worker, event.lane), []).append(event)
    span = max(end - start, 1e-9)
    factor, unit = _unit_of_time(span)
    rows = [
        (worker, lane, row)
        for worker in workers
        for lane in timeline.lanes(worker)
        for row in stack(by_lane.get((worker, lane), ()))
    ]
    height = min(0.62, max(0.26, 9.0 / len(rows)))
    gaps = 0.35 * (len(workers) - 1)
    figure, axes = _figure(1.45 + height * (len(rows) + gaps))
    at = place = 0.0
    ticks: list[float] = []
    names: list[str] = []
    middles: dict[int, list[float]] = {}
    labels_left, previous = _LABELS, (rows[0][0], "")
    for worker, lane, row in rows:
        if worker != previous[0]:
            place += 0.35
        if (worker, lane) != previous:
            ticks.append(place)
            names.append(lane)
        middles.setdefault(worker, []).append(place)
        previous = (worker, lane)
        labels_left = _draw_row(axes, row, place, start, factor, span, labels_left)
        place += 1.0
        at = place
    axes.set_ylim(at - 0.4, -0.6)
    axes.set_xlim(-0.004 * span * factor, 1.004 * span * factor)
    axes.set_yticks(ticks, names)
    axes.tick_params(axis="y", length=0)
    for worker, places in middles.items():
        axes.annotate(
            f"worker {worker}",
            (0, sum(places) / len(places)),
            xycoords=("axes fraction", "data"),
            xytext=(-72, 0),
            textcoords="offset points",
            ha="center",
            va="center",
            rotation=90 if len(places) * height > 0.85 else 0,
            fontweight="bold",
        )
        if worker != rows[0][0]:
            axes.axhline(places[0] - 0.675, color="#CCCCCC", lw=0.8)
    axes.set_xlabel(f"time, {unit}" + ("" if start == 0.0 else " since the first that is shown"))
    axes.grid(axis="x", color="#E5E5E5", lw=0.8)
    _legend_of_categories(figure, axes, {event.category for event in shown})
    left_out = len(timeline.workers) - len(workers)
    title = timeline.title or "Timeline"
    if len(shown) < len(of_workers):
        first = min(event.start_s for event in of_workers)
        last = max(event.end_s for event in of_workers)
        scale, name = (1.0, "s") if last - first > 1.0 else _unit_of_time(last - first)
        title += (
            f"  ({(start - first) * scale:.4g} to {(end - first) * scale:.4g} of "
            f"{(last - first) * scale:.4g} {name})"
        )
    if left_out:
        title += f"  ({len(workers)} of {len(timeline.workers)} workers; {left_out} left out)"
    axes.set_title(title, loc="left", fontweight="bold", pad=30)
    _save(figure, path)


def _window(events: Sequence[Event]) -> tuple[float, float]:
    """Return what is drawn of so many events, first and last second: all, or some steps."""
    passes = [event for event in events if event.lane == "compute" and event.duration_s > 0.0]
    counts = Counter(event.worker for event in passes or events)
    worker, count = counts.most_common(1)[0]
    if count <= _PASSES:
        return min(event.start_s for event in events), max(event.end_s for event in events)
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
    pixels = _WIDTH_IN * _DPI * 0.86 / span
    for category in CATEGORIES:
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
            text = event.name
            if len(text) * 6.6 + 6 > event.duration_s * pixels:
                text = event.name.rsplit(".", 1)[-1].rsplit(" ", 1)[-1]
            if labels_left and len(text) * 6.6 + 6 <= event.duration_s * pixels:
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


def _legend_of_categories(figure: Figure, axes: Axes, used: set[str]) -> None:
    from matplotlib.lines import Line2D  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    handles: list[Patch | Line2D] = []
    for category in (category for category in CATEGORIES if category in used):
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


def draw_sweep(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Draw speedup and exposed communication by the number of workers, a line a method.

    Args:
        rows: One a method and number of workers, with ``workers``, ``method``, ``speedup`` (in
            units of one worker) and ``exposed_s`` (seconds a step).
        path: The picture's.

    Raises:
        ValueError: No rows.
        ImportError: matplotlib is not installed.
    """
    if not rows:
        raise ValueError("a sweep without rows cannot be drawn: simulate at least one method")
    methods = list(dict.fromkeys(str(row["method"]) for row in rows))
    counts = sorted({int(row["workers"]) for row in rows})
    figure, axes = _figure(5.4, columns=2)
    speed, exposed = axes
    slowest = max(float(row["exposed_s"]) for row in rows)
    factor, unit = _unit_of_time(slowest, below_ms=False)
    speed.plot(counts, counts, color="#999999", ls="--", lw=1.2, label="ideal", zorder=1)
    for i, method in enumerate(methods):
        mine = sorted(
            (row for row in rows if row["method"] == method), key=lambda row: int(row["workers"])
        )
        style = {
            "color": _LINES[i % len(_LINES)],
            "marker": _MARKERS[i % len(_MARKERS)],
            "ls": "-" if i < len(_LINES) else ":",
            "ms": 6,
            "lw": 1.8,
            "label": method,
            "markeredgecolor": "white",
            "markeredgewidth": 0.5,
        }
        x = [int(row["workers"]) for row in mine]
        speed.plot(x, [float(row["speedup"]) for row in mine], **style)
        exposed.plot(x, [float(row["exposed_s"]) * factor for row in mine], **style)
    for one in axes:
        one.set_xscale("log", base=2)
        one.set_xticks(counts, [str(count) for count in counts])
        one.minorticks_off()
        one.set_xlabel("workers")
        one.grid(color="#E5E5E5", lw=0.8)
    speeds = [value for row in rows if (value := float(row["speedup"])) > 0.0]
    speed.set_yscale("log", base=2)
    speed.set_ylim(min([*speeds, counts[0]]) / 1.3, max([*speeds, counts[-1]]) * 1.3)
    speed.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    speed.set_ylabel("speedup over one worker")
    speed.set_title("Speedup", loc="left", fontweight="bold")
    exposed.set_ylabel(f"exposed communication, {unit} a step")
    exposed.set_title("Time a step that waits for the network", loc="left", fontweight="bold")
    most = slowest * factor or 1.0
    exposed.set_ylim(-0.03 * most, 1.05 * most)
    handles, labels = speed.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=_columns(labels),
        frameon=False,
        columnspacing=1.6,
    )
    _save(figure, path)


def draw_comm(
    sizes: Sequence[float],
    seconds: Sequence[float],
    model: Callable[[float], object] | None,
    path: str | Path,
) -> None:
    """Draw measured all-reduce times by message size, and the model that was fitted to them.

    Args:
        sizes: Bytes of each sample; sizes and times of 0 have no place on the axes.
        seconds: The time of each.
        model: Returns seconds for bytes, as `CommModel`; None draws the samples alone.
        path: The picture's.

    Raises:
        ValueError: No samples, or not as many times as sizes.
        ImportError: matplotlib is not installed.
    """
    if not sizes or len(sizes) != len(seconds):
        raise ValueError(
            f"there must be a time for every size, got {len(sizes)} sizes and {len(seconds)} times"
        )
    figure, axes = _figure(6.0)
    lowest, highest = min(size for size in sizes if size > 0), max(sizes)
    if model is not None:
        curve = [lowest * (highest / lowest) ** (i / 400) for i in range(401)]
        times = [float(model(size)) * 1e3 for size in curve]  # type: ignore[arg-type]
        axes.plot(curve, times, color=_LINES[1], lw=2, label="model")
    axes.plot(
        sizes,
        [time * 1e3 for time in seconds],
        color=_LINES[0],
        marker="o",
        ls="",
        ms=6,
        alpha=0.85,
        label="measured",
        zorder=3,
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    powers = range(math.floor(math.log2(lowest)), math.ceil(math.log2(highest)) + 1)
    step = max(1, -(-len(powers) // 14))
    shown = [2.0**power for power in powers[::step]]
    axes.set_xticks(shown, [_bytes(size) for size in shown])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("message size")
    axes.set_ylabel("all-reduce time, ms")
    axes.set_title("All-reduce", loc="left", fontweight="bold")
    axes.grid(color="#E5E5E5", lw=0.8)
    axes.legend(frameon=False, loc="upper left")
    _save(figure, path)


def draw_partition(partition: Partition, path: str | Path) -> None:
    """Draw the stages of a pipeline: their layers, and the time and memory of their workers.

    Args:
        partition: Of `hvd_pipe.planning.partition.partition`.
        path: The picture's.

    Raises:
        ImportError: matplotlib is not installed.
    """
    stages = partition.stages
    figure, axes = _figure(2.1 + 0.62 * len(stages), columns=3, widths=(1.5, 1.0, 1.0))
    blocks, times, memory = axes
    replicas = "-".join(str(stage.replicas) for stage in stages)
    period, unit = _unit_of_time(partition.period_s)
    figure.suptitle(
        f"{replicas} on {partition.workers} workers: {partition.period_s * period:.4g} {unit} a "
        f"minibatch (data-parallel {partition.data_parallel_s * period:.4g} {unit})",
        x=0.01,
        ha="left",
        fontweight="bold",
    )
    for i, stage in enumerate(stages):
        blocks.barh(i, 1.0, 0.8, color=_LINES[i % len(_LINES)], alpha=0.22)
        blocks.barh(i, 0.012, 0.8, color=_LINES[i % len(_LINES)])
        many = "layer" if len(stage.layers) == 1 else "layers"
        workers = "worker" if stage.replicas == 1 else "workers"
        blocks.text(
            0.03,
            i,
            f"{_ends(stage.layers)}\n{len(stage.layers)} {many} on {stage.replicas} {workers}",
            va="center",
            fontsize=9,
            linespacing=1.3,
        )
        if i + 1 < len(stages):
            blocks.text(
                0.97,
                i + 0.5,
                f"↓ {_bytes(stage.activation_out_bytes)}",
                va="center",
                ha="right",
                fontsize=8,
                color=_GREY,
            )
    blocks.set_xlim(0, 1)
    blocks.set_xticks([])
    blocks.set_title("Stages", loc="left")
    factor, unit = _unit_of_time(max(max(s.compute_s / s.replicas, s.time_s) for s in stages))
    for i, stage in enumerate(stages):
        compute = stage.compute_s / stage.replicas
        times.barh(i - 0.18, compute * factor, 0.34, color=COLOURS["backward"])
        times.barh(i + 0.18, stage.time_s * factor, 0.34, color=COLOURS["allreduce"])
        for offset, seconds in ((-0.18, compute), (0.18, stage.time_s)):
            times.text(
                seconds * factor, i + offset, f" {seconds * factor:.3g}", va="center", fontsize=8
            )
    times.axvline(partition.period_s * factor, color=_GREY, ls="--", lw=1, zorder=0)
    times.set_xlabel(f"{unit} a minibatch")
    times.set_title("Time", loc="left")
    times.margins(x=0.16)
    _legend_of_times(figure)
    largest = max(stage.memory_bytes for stage in stages)
    scale, unit = (1e9, "GB") if largest >= 1e9 else (1e6, "MB")
    for i, stage in enumerate(stages):
        memory.barh(i, stage.memory_bytes / scale, 0.6, color=COLOURS["update"])
        memory.text(
            stage.memory_bytes / scale,
            i,
            f" {stage.memory_bytes / scale:.3g}",
            va="center",
            fontsize=8,
        )
    memory.set_xlabel(f"{unit} a worker")
    memory.set_title("Memory", loc="left")
    memory.margins(x=0.16)
    for one in axes:
        one.set_ylim(len(stages) - 0.45, -0.55)
        one.set_yticks([])
    blocks.set_yticks(range(len(stages)), [f"stage {i}" for i in range(len(stages))])
    for one in (times, memory):
        one.set_xlim(left=0.0)
        one.grid(axis="x", color="#E5E5E5", lw=0.8)
    _save(figure, path)


def _legend_of_times(figure: Figure) -> None:
    from matplotlib.lines import Line2D  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    figure.legend(
        handles=[
            Patch(facecolor=COLOURS["backward"], label="compute of a minibatch / workers"),
            Patch(facecolor=COLOURS["allreduce"], label="stage, with its messages"),
            Line2D([], [], color=_GREY, ls="--", lw=1, label="whole pipeline"),
        ],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )


def _figure(height_in: float, columns: int = 1, widths: Sequence[float] | None = None) -> Any:
    """Return a figure 1200 pixels wide and its axes."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'hvd_pipe[plot]'") from error
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=_DPI, layout="constrained")
    axes = figure.subplots(1, columns, width_ratios=widths)
    for one in axes if columns > 1 else (axes,):
        one.set_axisbelow(True)
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
    return figure, axes


def _save(figure: Figure, path: str | Path) -> None:
    # Without the date, equal pictures are equal files.
    date: dict[str, Any] = {"Date": None} if Path(path).suffix.lower() == ".svg" else {}
    figure.savefig(path, dpi=_DPI, facecolor="white", metadata=date)


def _unit_of_time(seconds: float, below_ms: bool = True) -> tuple[float, str]:
    """Return what to multiply seconds by, and the unit: ms unless that reads badly.

    Example:
        >>> _unit_of_time(0.3), _unit_of_time(2e-5), _unit_of_time(60.0)
        ((1000.0, 'ms'), (1000000.0, 'µs'), (1.0, 's'))
    """
    if seconds > 30.0:
        return 1.0, "s"
    if below_ms and seconds < 5e-4:
        return 1e6, "µs"
    return 1e3, "ms"


def _bytes(size: float) -> str:
    """Return a size with a binary unit.

    Example:
        >>> _bytes(1024), _bytes(1.5 * 2**20), _bytes(100)
        ('1 KiB', '1.5 MiB', '100 B')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 2**power:
            return f"{size / 2**power:.3g} {unit}"
    return f"{size:.3g} B"


def _ends(layers: Sequence[str], longest: int = 26) -> str:
    """Return the first and the last layer's name, shortened."""
    ends = [name if len(name) <= longest else f"{name[: longest - 1]}…" for name in layers]
    return ends[0] if len(ends) == 1 else f"{ends[0]} … {ends[-1]}"


def _columns(labels: Sequence[str]) -> int:
    """Return how many of these fit beside each other in a legend."""
    widest = max(map(len, labels)) * 7.5 + 80
    return max(1, min(len(labels), int(_WIDTH_IN * _DPI // widest)))
