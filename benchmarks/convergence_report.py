"""The page of convergence.py: what each method has learnt, with intervals over seeds."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

__all__ = ["MARK", "interval", "tables", "write"]

MARK = "convergence: "
"""Stands before a run's result in what its ranks print."""

STEPS = Path(__file__).resolve().parent / "results" / "exact-120ms.json"
COLUMNS = ("method", "held-out loss", "minus stock's", "right", "replicas apart", "seeds")
T_95 = {3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t for 95%, both sides, by the number of values. Two values say too little."""

Result = Mapping[str, Any]
Group = tuple[str, int, str]  # task, workers, contestant

TITLES = {
    "images": "Images",
    "images-fast": "Images, at four times the learning rate",
    "images-unlike": "Images, each worker with classes of its own",
    "text": "Text",
}
MODEL = {"images": "resnet50", "text": "transformer"}
"""Whose measured steps stand for a task's in pictures over time."""
LINES = {
    "horovod": ("horovod", "stock Horovod", "black"),
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
    rows: dict[tuple[str, int], list[str]] = {}
    for (task, workers, contestant), seeds in by_group.items():
        stock = by_group.get((task, workers, "horovod"), {})
        losses = [_last(one)[2] for one in seeds.values()]
        right = [100 * _last(one)[3] for one in seeds.values()]
        apart = max(_last(one)[4] for one in seeds.values())
        both = sorted(set(seeds) & set(stock))
        gaps = [_last(seeds[seed])[2] - _last(stock[seed])[2] for seed in both]
        gap = "" if contestant == "horovod" or not both else _shown(gaps, "+.3f")
        cells = [
            f"`{contestant}`" if contestant != "horovod" else "stock Horovod",
            _shown(losses, ".3f"),
            gap,
            f"{sum(right) / len(right):.1f}%",
            f"{100 * apart:.1f}%" if apart else "0",
            str(len(seeds)),
        ]
        table = rows.setdefault(
            (task, workers),
            [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"],
        )
        table.append(f"| {' | '.join(cells)} |")
    return {key: "\n".join(lines) for key, lines in rows.items()}


def write(page: Path, results: Sequence[Result]) -> None:
    """Put the tables between their marks in a page, and draw its pictures beside it."""
    text = page.read_text()
    for (task, workers), table in tables(results).items():
        begin, end = f"<!-- {task} {workers} -->\n", "<!-- end -->"
        if begin not in text:
            raise SystemExit(f"{page} has no place for {task} on {workers} workers: {begin}{end}")
        head, rest = text.split(begin, 1)
        text = f"{head}{begin}\n{table}\n\n{end}{rest.split(end, 1)[1]}"
    page.write_text(text)
    draw(page.with_name("convergence.png"), results)


def draw(path: Path, results: Sequence[Result]) -> None:
    """Held-out loss over updates, and over time on links of r = 1 and 4."""
    cells = {(cell["model"], cell["ratio"]): cell for cell in json.loads(STEPS.read_text())[::-1]}
    by_group = groups(results)
    figure, axes = plt.subplots(len(MODEL), 3, figsize=(11, 3.1 * len(MODEL)), squeeze=False)
    for row, (task, model) in zip(axes, MODEL.items(), strict=True):
        lines = {c: line for c, line in LINES.items() if (task, 2, c) in by_group}
        common = set.intersection(*(set(by_group[task, 2, c]) for c in lines))
        for axis, ratio in zip(row, (None, 1.0, 4.0), strict=True):
            for contestant, (raced, label, colour) in lines.items():
                seeds = by_group.get((task, 2, contestant), {})
                step = 1.0
                if ratio is not None:
                    times = {r["contestant"]: r["seconds"] for r in cells[model, ratio]["rows"]}
                    step = times[raced] / times["single"]
                curves = [seeds[seed]["curve"] for seed in common]
                length = min(map(len, curves))
                x = [moment[0] * step for moment in curves[0][:length]]
                y = [sum(c[i][2] for c in curves) / len(curves) for i in range(length)]
                axis.plot(x, y, color=colour, label=label, linewidth=1.4)
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
            axis.set_ylabel(f"{task}: held-out loss, nats")
            where = "updates" if ratio is None else f"time at r = {ratio:g}, in units of c"
            axis.set_xlabel(where)
            axis.grid(alpha=0.3, which="both")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(LINES), fontsize=8)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _last(result: Result) -> Sequence[float]:
    last: Sequence[float] = result["curve"][-1]
    return last


def _shown(values: Sequence[float], form: str) -> str:
    mean, reach = interval(values)
    if math.isnan(reach):
        return f"{mean:{form}}"
    return f"{mean:{form}} +- {reach:.3f}"
