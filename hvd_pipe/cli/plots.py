"""Pictures: sweeps over numbers of workers, all-reduce times, pipeline stages.

The suffix of the path says the form: ``.png``, ``.svg``, ``.pdf``. All are 1200 pixels wide and
use colours that colour-blind people tell apart (Okabe and Ito's). matplotlib is imported when the
first picture is drawn, and its state (``pyplot``) is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_pipe._pictures import COLOURS, DPI, GREY, WIDTH_IN, figure_of, save, unit_of_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hvd_pipe.planning.stages import Partition, Stage

__all__ = ["draw_comm", "draw_partition", "draw_sweep"]

_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
_WIDE = 30.0
_MARKERS = "osD^vPX*"


def draw_sweep(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Draw speedup and exposed communication by the number of workers, a line a method.

    Args:
        rows: One a method and number of workers, with ``workers``, ``method``, ``speedup`` (in
            units of one worker) and ``exposed_s`` (seconds per step).
        path: The picture's.

    Raises:
        ValueError: No rows.
        ImportError: matplotlib is not installed.
    """
    if not rows:
        raise ValueError("a sweep without rows cannot be drawn: simulate at least one method")
    methods = list(dict.fromkeys(str(row["method"]) for row in rows))
    counts = sorted({int(row["workers"]) for row in rows})
    figure, axes = figure_of(5.4, columns=2)
    speed, exposed = axes
    slowest = max(float(row["exposed_s"]) for row in rows)
    factor, unit = unit_of_time(slowest, below_ms=False)
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
    waits = [value * factor for row in rows if (value := float(row["exposed_s"])) > 0.0]
    if waits and most > _WIDE * min(waits):  # on a line axis the slowest method hides all others
        least = max(min(waits), most / 1e5)
        exposed.set_yscale("symlog", linthresh=10.0 ** math.floor(math.log10(least)), linscale=0.4)
        exposed.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        exposed.set_ylim(-0.3 * 10.0 ** math.floor(math.log10(least)), 2.0 * most)
    else:
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
    save(figure, path)


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
    figure, axes = figure_of(6.0)
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
    save(figure, path)


def draw_partition(partition: Partition, path: str | Path) -> None:
    """Draw the stages of a pipeline: their layers, and the time and memory of their workers.

    Args:
        partition: Of `hvd_pipe.planning.partition.partition`.
        path: The picture's.

    Raises:
        ImportError: matplotlib is not installed.
    """
    stages = partition.stages
    figure, axes = figure_of(2.1 + 0.62 * len(stages), columns=3, widths=(1.5, 1.0, 1.0))
    blocks, times, memory = axes
    replicas = "-".join(str(stage.replicas) for stage in stages)
    period, unit = unit_of_time(partition.period_s)
    figure.suptitle(
        f"{replicas} on {partition.workers} workers: {partition.period_s * period:.4g} {unit} a "
        f"minibatch (data-parallel {partition.data_parallel_s * period:.4g} {unit})",
        x=0.01,
        ha="left",
        fontweight="bold",
    )
    _draw_layers(blocks, stages)
    factor, unit = unit_of_time(max(max(s.compute_s / s.replicas, s.time_s) for s in stages))
    for i, stage in enumerate(stages):
        compute = stage.compute_s / stage.replicas
        times.barh(i - 0.18, compute * factor, 0.34, color=COLOURS["backward"])
        times.barh(i + 0.18, stage.time_s * factor, 0.34, color=COLOURS["allreduce"])
        for offset, seconds in ((-0.18, compute), (0.18, stage.time_s)):
            times.text(
                seconds * factor, i + offset, f" {seconds * factor:.3g}", va="center", fontsize=8
            )
    times.axvline(partition.period_s * factor, color=GREY, ls="--", lw=1, zorder=0)
    times.set_xlabel(f"{unit} a minibatch")
    times.set_title("Time", loc="left")
    times.margins(x=0.16)
    _legend_of_times(figure)
    _draw_memory(memory, stages)
    for one in axes:
        one.set_ylim(len(stages) - 0.45, -0.55)
        one.set_yticks([])
    blocks.set_yticks(range(len(stages)), [f"stage {i}" for i in range(len(stages))])
    for one in (times, memory):
        one.set_xlim(left=0.0)
        one.grid(axis="x", color="#E5E5E5", lw=0.8)
    save(figure, path)


def _draw_layers(blocks: Axes, stages: Sequence[Stage]) -> None:
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
                color=GREY,
            )
    blocks.set_xlim(0, 1)
    blocks.set_xticks([])
    blocks.set_title("Stages", loc="left")


def _draw_memory(memory: Axes, stages: Sequence[Stage]) -> None:
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


def _legend_of_times(figure: Figure) -> None:
    from matplotlib.lines import Line2D  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    figure.legend(
        handles=[
            Patch(facecolor=COLOURS["backward"], label="compute of a minibatch / workers"),
            Patch(facecolor=COLOURS["allreduce"], label="stage, with its messages"),
            Line2D([], [], color=GREY, ls="--", lw=1, label="whole pipeline"),
        ],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )


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
    return max(1, min(len(labels), int(WIDTH_IN * DPI // widest)))
