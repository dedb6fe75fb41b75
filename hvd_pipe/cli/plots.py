"""The picture of a sweep over numbers of workers.

The suffix of the path says the form: ``.png``, ``.svg``, ``.pdf``. It is 1200 pixels wide and in
colours that colour-blind people tell apart (Okabe and Ito's). matplotlib is imported when it is
drawn, and its state (``pyplot``) is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_pipe._pictures import DPI, WIDTH_IN, figure_of, save, unit_of_time

__all__ = ["draw_sweep"]

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


def _columns(labels: Sequence[str]) -> int:
    """Return how many of these fit beside each other in a legend."""
    widest = max(map(len, labels)) * 7.5 + 80
    return max(1, min(len(labels), int(WIDTH_IN * DPI // widest)))
