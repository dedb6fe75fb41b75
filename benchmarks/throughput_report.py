"""What the throughput benchmark found: tables, pictures, and the bounds that it is held to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from contestants import period_of
from rich.table import Table

from hvd_pipe._pictures import figure_of, save
from hvd_pipe.planning.codec import CODECS

__all__ = ["bounds", "draw", "limit_s", "table"]

FIRST_READY = 1 / 3  # of a step: forward passes take a third, and no gradient is ready before


def of(cell: dict[str, Any], contestant: str, team: str = "") -> dict[str, Any]:
    """Return a contestant's row of a cell."""
    return next(
        row
        for row in cell["rows"]
        if row["contestant"] == contestant and (not team or row["team"] == team)
    )


def best_stock(cell: dict[str, Any]) -> dict[str, Any]:
    """Return the row of stock Horovod's best settings, the default among them."""
    rows = [row for row in cell["rows"] if row["contestant"] == "horovod"]
    return min(rows, key=lambda row: row["seconds"])


def limit_s(cell: dict[str, Any], contestant: str) -> float:
    """Return the least seconds a step that the contestant's method allows.

    From the computation C and the all-reduce T of all gradients (of the compressed size), both
    measured in the same run: conventional C + T; overlapped with the backward pass, which takes
    two thirds, max(C, C/3 + T); pipelined max(C, T); averaged every k steps max(C, T/k).
    """
    compute = of(cell, "single")["seconds"]
    kind, _, compression = contestant.partition("+")
    size = cell["gradient_bytes"] * CODECS[compression or "none"].ratio
    times = {int(key): value for key, value in cell["all_reduce_s"].items()}
    comm = times[min(times, key=lambda each: abs(each - size))]
    if kind == "single":
        return compute
    if kind == "conventional":
        return compute + comm
    if kind == "pipe-sgd":
        return max(compute, comm)
    if kind.startswith("cocod") or kind == "ddp:post-local":
        return max(compute, comm / period_of(kind))
    return max(compute, FIRST_READY * compute + comm)


def table(cell: dict[str, Any]) -> Table:
    """Return a cell as a table."""
    compute = of(cell, "single")["seconds"]
    stock = of(cell, "horovod", "stock")["seconds"] if has(cell, "horovod", "stock") else math.nan
    least = 2 * (cell["workers"] - 1) / cell["workers"] * cell["gradient_bytes"]
    title = (
        f"{cell['model']}, {cell['workers']} workers, r = {cell['ratio']:g} "
        f"(reached {cell['reached_ratio']:.2f}); {cell['compute']} compute "
        f"{compute * 1e3:.1f} ms, {cell['gradient_bytes'] / 2**20:.1f} MiB, {cell['backend']}"
    )
    found = Table(title=title)
    found.add_column("contestant", no_wrap=True)
    for heading in ("ms a step", "min .. max", "steps/s", "x stock", "x limit", "exposed ms"):
        found.add_column(heading, justify="right")
    found.add_column("wire / least", justify="right")
    found.add_column("CPU ms", justify="right")
    for row in cell["rows"]:
        swept = row["contestant"] == "horovod" and row["team"] != "stock"
        name = f"horovod {row['team']}" if swept else row["contestant"]
        seconds = row["seconds"]
        found.add_row(
            name,
            f"{seconds * 1e3:.1f}",
            f"{row['least_s'] * 1e3:.1f} .. {row['most_s'] * 1e3:.1f}",
            f"{cell['workers'] / seconds:.1f}",
            f"{stock / seconds:.2f}",
            f"{limit_s(cell, row['contestant']) / seconds:.2f}",
            f"{max(seconds - compute, 0.0) * 1e3:.1f}",
            f"{row['sent_bytes'] / least:.2f}",
            f"{row['cpu_s'] * 1e3:.1f}",
        )
    return found


def has(cell: dict[str, Any], contestant: str, team: str = "") -> bool:
    """Return whether the cell has such a row."""
    return any(
        row["contestant"] == contestant and (not team or row["team"] == team)
        for row in cell["rows"]
    )


def bounds(cells: list[dict[str, Any]]) -> Table:
    """Return each bound that the cells can show, with its worst cell, or the best if one will do.

    All are ratios of medians within one cell.
    """
    found = Table(title="bounds")
    for heading in ("what", "bound", "reached", "where"):
        found.add_column(heading)
    for text, least, values, all_cells in _bounds(cells):
        if values:
            pick = min if all_cells else max
            value, where = pick(values, key=lambda each: each[0])
            met = "" if value >= least else " (missed)"
            found.add_row(text, f">= {least:g}", f"{value:.2f}{met}", where)
    return found


def _bounds(
    cells: list[dict[str, Any]],
) -> Iterator[tuple[str, float, list[tuple[float, str]], bool]]:
    def ratios(
        ratio: Callable[[dict[str, Any]], float], chosen: Callable[[dict[str, Any]], bool]
    ) -> list[tuple[float, str]]:
        return [
            (ratio(cell), f"{cell['model']}, r = {cell['ratio']:g}, {cell['workers']} workers")
            for cell in cells
            if chosen(cell)
        ]

    def seconds(cell: dict[str, Any], name: str) -> float:
        return float(of(cell, name)["seconds"])

    def planned(cell: dict[str, Any]) -> float:
        row = of(cell, "merged-gradient")
        plan = seconds(cell, "single") + row["planned_exposed_s"]
        return float(min(plan / row["seconds"], row["seconds"] / plan))

    def limited(name: str) -> list[tuple[float, str]]:
        return ratios(
            lambda cell: limit_s(cell, name) / seconds(cell, name), lambda cell: has(cell, name)
        )

    def stock(cell: dict[str, Any]) -> float:
        return float(of(cell, "horovod", "stock")["seconds"])

    merged = "merged-gradient"
    yield (
        f"{merged} / stock Horovod, best of its settings",
        0.98,
        ratios(
            lambda cell: best_stock(cell)["seconds"] / seconds(cell, merged),
            lambda cell: has(cell, merged) and has(cell, "horovod"),
        ),
        True,
    )
    yield (
        f"{merged} / stock Horovod, on DenseNet somewhere",
        1.15,
        ratios(
            lambda cell: stock(cell) / seconds(cell, merged),
            lambda cell: cell["model"] == "densenet121" and has(cell, merged),
        ),
        False,
    )
    yield (
        f"{merged} / its own plan",
        0.92,
        ratios(planned, lambda cell: has(cell, merged)),
        True,
    )
    for name in ("pipe-sgd", "pipe-sgd+bf16", "pipe-sgd+int8"):
        yield f"{name} / max(compute, communication)", 0.93, limited(name), True
    yield (
        "cocod with period >= r / one worker alone",
        0.95,
        ratios(
            lambda cell: seconds(cell, "single") / seconds(cell, "cocod:period=8"),
            lambda cell: has(cell, "cocod:period=8"),
        ),
        True,
    )
    for name, least in (("pipe-sgd+int8", 3.0), ("cocod:period=8", 4.0)):
        yield (
            f"{name} / stock Horovod, r = 4",
            least,
            ratios(
                lambda cell, name=name: stock(cell) / seconds(cell, name),
                lambda cell, name=name: cell["ratio"] == 4 and has(cell, name),
            ),
            True,
        )
    yield (
        "the best strategy / conventional, r = 8",
        5.0,
        ratios(
            lambda cell: (
                seconds(cell, "conventional")
                / min(row["seconds"] for row in cell["rows"] if ours(row["contestant"]))
            ),
            lambda cell: cell["ratio"] == 8 and has(cell, "conventional"),
        ),
        True,
    )


def ours(contestant: str) -> bool:
    """Return whether hvd_pipe trains it."""
    return contestant.startswith(("merged-gradient", "pipe-sgd", "cocod"))


LINES = {  # what is drawn: label, colour, marker
    "conventional": ("no overlap", "#999999", "x"),
    "ddp": ("PyTorch DDP (Gloo)", "#CC79A7", "v"),
    "horovod": ("stock Horovod, best setting", "#000000", "s"),
    "merged-gradient": ("merged-gradient", "#E69F00", "o"),
    "pipe-sgd": ("pipe-sgd", "#56B4E9", "^"),
    "pipe-sgd+int8": ("pipe-sgd + int8", "#0072B2", "D"),
    "cocod:period=8": ("cocod, period 8", "#009E73", "P"),
}


def draw(cells: list[dict[str, Any]], path: Path) -> None:
    """Draw each model's speed by r: 1 is all workers at the speed of one worker by itself."""
    workers = max(cell["workers"] for cell in cells)
    cells = [cell for cell in cells if cell["workers"] == workers]
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    figure, axes = figure_of(4.6, columns=len(models))
    for axis, model in zip(axes if len(models) > 1 else [axes], models, strict=True):
        mine = sorted(
            (cell for cell in cells if cell["model"] == model), key=lambda cell: cell["ratio"]
        )
        for name, (label, colour, marker) in LINES.items():
            points = [
                (cell["ratio"], of(cell, "single")["seconds"] / row["seconds"])
                for cell in mine
                if has(cell, name)
                for row in [best_stock(cell) if name == "horovod" else of(cell, name)]
            ]
            axis.plot(*zip(*points, strict=True), label=label, color=colour, marker=marker)
        axis.set_xscale("log", base=2)
        ticks = [cell["ratio"] for cell in mine]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ylim(0, 1.1)
        axis.set_title(model)
        axis.set_xlabel("communication / computation")
        axis.grid(color="#DDDDDD")
    first = axes[0] if len(models) > 1 else axes
    first.set_ylabel("speed of each worker / of one worker alone")
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(
        f"{workers} workers, {cells[0]['compute']} compute, links limited by tc tbf",
        fontsize="medium",
    )
    save(figure, path)
