"""The tables of convergence.py: what methods have learnt, with intervals over seeds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from harness import markdown

MARK = "convergence: "  # stands before a run's result in what its ranks print
GOOD = 0.15  # a loss that all methods that are run on links reach
COLUMNS = (
    *("method", "held-out loss", "minus stock's", "accuracy, %", "minus stock's"),
    *("replicas apart", "seeds"),
)
T_95 = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t for 95%, both sides, by the number of values. Two values say too little."""

Result = Mapping[str, Any]
Group = tuple[str, int, str]  # task, workers, contestant


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


def _last(result: Result) -> Sequence[float]:
    last: Sequence[float] = result["curve"][-1]
    return last


def _shown(values: Sequence[float], digits: int, sign: str = "") -> str:
    mean, reach = interval(values)
    if math.isnan(reach):
        return f"{mean:{sign}.{digits}f}"
    return f"{mean:{sign}.{digits}f} +- {reach:.{digits}f}"
