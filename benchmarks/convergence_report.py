"""Tables and pictures of convergence.py: what methods have learnt, with intervals over seeds."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
from harness import markdown

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator

MARK = "convergence: "  # stands before a run's result in what its ranks print
FAR = 8.0  # a ratio of links from which on time is drawn on a logarithmic axis
GOOD = 0.15  # a loss that all methods that are run on links reach
RESULTS = Path(__file__).resolve().parent / "results"
COLUMNS = (
    *("method", "held-out loss", "minus stock's", "accuracy, %", "minus stock's"),
    *("replicas apart", "seeds"),
)
T_95 = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t for 95%, both sides, by the number of values. Two values say too little."""

Result = Mapping[str, Any]
Group = tuple[str, int, str]  # task, workers, contestant


@dataclass(frozen=True)
class Row:
    """A row of the pictures: a task's loss over updates, then over time on two links."""

    task: str  # and its ``workers``
    workers: int
    steps: str  # the file of measured steps, of ``model``, that time is computed from
    model: str
    ratios: tuple[float, float]  # communication over computation, of the links
    # for each method its contestant in that file, its label and its colour
    lines: Mapping[str, tuple[str, str, str]]


STOCK = {"horovod": ("horovod", "stock Horovod", "black")}
LINES = STOCK | {
    "merged-gradient:overlap=forward": (
        "merged-gradient:overlap=forward",
        "merged-gradient:overlap=forward",
        "#d55e00",
    ),
    "pipe-sgd:warmup_steps=50": ("pipe-sgd", "pipe-sgd", "#56b4e9"),
    "pipe-sgd:warmup_steps=50,prediction=local": (
        "pipe-sgd",
        "pipe-sgd, prediction=local",
        "#0072b2",
    ),
    "cocod:period=8": ("cocod:period=8", "cocod, period 8", "#009e73"),
}
SLOW_LINKS = STOCK | {
    name: (name, label, colour)
    for name, label, colour in (
        ("cocod:period=8", "cocod, period 8", "#009e73"),
        ("cocod:period=32", "cocod, period 32", "#56b4e9"),
        ("cocod:period=32,fragments=8", "period 32, fragments=8", "#0072b2"),
        ("cocod:period=32,fragments=8,outer=nesterov", "fragments=8, outer=nesterov", "#cc79a7"),
    )
}
PICTURES = {
    "convergence.png": (
        Row("images", 2, "exact-120ms.json", "resnet50", (1.0, 4.0), LINES),
        Row("text", 2, "exact-120ms.json", "transformer", (1.0, 4.0), LINES),
    ),
    "convergence-slow-links.png": (
        Row("images-four", 4, "cocod.json", "resnet50", (8.0, 32.0), SLOW_LINKS),
    ),
}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and how far its 95% interval reaches to each side; nan for one or two values.

    >>> interval([1.0, 2.0, 3.0])
    (2.0, 2.4843381986483...)
    """
    mean = sum(values) / len(values)
    if len(values) not in T_95:
        return mean, math.nan
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, T_95[len(values)] * math.sqrt(variance / len(values))


def groups(results: Sequence[Result]) -> dict[Group, dict[int, Result]]:
    """Results by seed, for each method of a task; methods in their order in the file."""
    found: dict[Group, dict[int, Result]] = defaultdict(dict)
    for each in results:
        found[each["task"], each["workers"], each["contestant"]][each["seed"]] = each
    return found


def tables(results: Sequence[Result]) -> dict[tuple[str, int], str]:
    """A table for each task and number of workers, in Markdown."""
    by_group = groups(results)
    rows: dict[tuple[str, int], list[list[str]]] = defaultdict(list)
    for (task, workers, contestant), seeds in by_group.items():
        stock = by_group.get((task, workers, "horovod"), {})
        apart = max(moment[4] for result in seeds.values() for moment in result["curve"])
        both = sorted(set(seeds) & set(stock))
        shown = []
        for column, factor, digits in ((2, 1, 3), (3, 100, 1)):  # the loss, and the accuracy
            values = {seed: factor * _last(result)[column] for seed, result in seeds.items()}
            gaps = [values[seed] - factor * _last(stock[seed])[column] for seed in both]
            shown.append(_shown(list(values.values()), digits))
            compared = gaps and contestant != "horovod"
            shown.append(_shown(gaps, digits, "+") if compared else "")
        distance = f"{100 * apart:.1f}%" if apart else "0"
        rows[task, workers].append([_name(contestant), *shown, distance, str(len(seeds))])
    return {key: markdown(COLUMNS, lines) for key, lines in rows.items()}


def sharpness(results: Sequence[Result]) -> str:
    """A table of L, the largest eigenvalue of the loss's Hessian, along runs that have it."""
    heads = ["task", "learning rate", "L, first to last", "largest L", "at the highest rate"]
    rows = []
    for result in results:
        if found := result["sharpness"]:
            least_most = f"{found[0]:.1f} to {found[-1]:.1f}"
            highest = f"{result['lr'] * max(found):.2f}"
            row = [result["task"], f"{result['lr']}", least_most, f"{max(found):.1f}", highest]
            rows.append(row)
    return markdown(heads, rows)


def links(results: Sequence[Result]) -> str:
    """A table of runs on links of emulated hosts: what they took, and what they learnt."""
    heads = ["link", "method", "s, all updates", f"s to a loss of {GOOD}", "held-out loss"]
    rows = []
    for result in results:
        moments = zip(result["curve"], result["seconds"], strict=True)
        reached = next((f"{s:.0f}" for moment, s in moments if moment[2] <= GOOD), "-")
        loss, right = _last(result)[2:4]
        figures = [f"{result['seconds'][-1]:.0f}", reached, f"{loss:.3f}", f"{100 * right:.1f}"]
        rows.append([result["link"], _name(result["contestant"]), *figures])
    return markdown([*heads, "accuracy, %"], rows)


def _name(contestant: str) -> str:
    return "stock Horovod" if contestant == "horovod" else f"`{contestant}`"


def draw_all(folder: Path, results: Sequence[Result]) -> None:
    """Draw the pictures of the page."""
    for name, rows in PICTURES.items():
        draw(folder / name, rows, results)


def draw(path: Path, rows: Sequence[Row], results: Sequence[Result]) -> None:
    """Held-out loss over updates, and over time on links."""
    by_group = groups(results)
    figure, axes = plt.subplots(len(rows), 3, figsize=(11, 3.1 * len(rows) + 0.5), squeeze=False)
    for row, row_axes in zip(rows, axes, strict=True):
        of_task = {c: by_group.get((row.task, row.workers, c), {}) for c in row.lines}
        shown = {c: seeds for c, seeds in of_task.items() if seeds}
        common = set.intersection(*map(set, shown.values()))
        for axis, ratio in zip(row_axes, (None, *row.ratios), strict=True):
            for contestant, seeds in shown.items():
                _, label, colour = row.lines[contestant]
                curves = [seeds[seed]["curve"] for seed in common]
                length = min(map(len, curves))
                step = 1.0 if ratio is None else step_of(row, ratio, contestant)
                x = [moment[0] * step for moment in curves[0][:length]]
                y = [sum(c[i][2] for c in curves) / len(curves) for i in range(length)]
                axis.plot(x, y, color=colour, label=label, linewidth=1.4)
            axis.set(xscale="linear" if ratio is None or ratio < FAR else "log", yscale="log")
            axis.yaxis.set_minor_locator(LogLocator(subs=(2.0, 2.5, 3.0, 4.0, 5.0, 7.0)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
            axis.set_ylabel(f"{row.task}: held-out loss, nats")
            where = "updates" if ratio is None else f"time at r = {ratio:g}, in units of c"
            axis.set_xlabel(where)
            axis.grid(alpha=0.3, which="both")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=8)
    figure.tight_layout(rect=(0, 0.11 / len(rows), 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


@cache
def cells_of(name: str) -> Any:
    """The measured cells of a file; every line of a picture asks for it."""
    return json.loads((RESULTS / name).read_text())


def step_of(row: Row, ratio: float, contestant: str) -> float:
    """A measured step on a link, in units of the computation of one."""
    measured = row.lines[contestant][0]
    for cell in cells_of(row.steps):
        times = {each["contestant"]: each["seconds"] for each in cell["rows"]}
        if (cell["model"], cell["ratio"]) == (row.model, ratio) and measured in times:
            return float(times[measured] / times["single"])
    raise KeyError(f"{row.steps} has no step of {measured} with {row.model} at r = {ratio:g}")


def _last(result: Result) -> Sequence[float]:
    last: Sequence[float] = result["curve"][-1]
    return last


def _shown(values: Sequence[float], digits: int, sign: str = "") -> str:
    mean, reach = interval(values)
    if math.isnan(reach):
        return f"{mean:{sign}.{digits}f}"
    return f"{mean:{sign}.{digits}f} +- {reach:.{digits}f}"
