"""What the throughput benchmark found: tables, and the bounds that it is held to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from contestants import DDP_BUCKETS, ENGINE, TENSORFLOW, period_of
from emulated import scaled
from harness import markdown
from models import profile

from hvd_pipe.planning.codec import CODECS
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.timing import step_time

MERGED = "merged-gradient"
FORWARD = "merged-gradient:overlap=forward"
SETTINGS = {  # what counts as one contestant with other settings
    "horovod": ("horovod", "horovod:asleep"),
    "ddp": ("ddp", *DDP_BUCKETS),
    "engine": ENGINE,
}
TRUE_MS = 1000.0  # of computation, from which on latency is as small a part as on clusters
FIRST_READY = 1 / 3  # of a step: forward passes take a third, and no gradient is ready before
JUDGED_WORKERS = 4

Cell = dict[str, Any]


def of(cell: Cell, contestant: str, team: str = "") -> dict[str, Any]:
    """Return a contestant's row of a cell; a LookupError where it was not there."""
    for row in cell["rows"]:
        if row["contestant"] == contestant and (not team or row["team"] == team):
            return row
    raise LookupError(f"{contestant} did not run in this cell")


def seconds(cell: Cell, contestant: str, team: str = "") -> float:
    return float(of(cell, contestant, team)["seconds"])


def best_s(cell: Cell, contestant: str) -> float:
    """Return a contestant's seconds a step under its best settings; nan where it did not run."""
    names = SETTINGS.get(contestant, (contestant,))
    tried = [row["seconds"] for row in cell["rows"] if row["contestant"] in names]
    return min(tried, default=math.nan)


def stock_s(cell: Cell) -> float:
    """Return stock Horovod's seconds a step with its defaults; nan where it did not run."""
    with suppress(LookupError):
        return seconds(cell, "horovod", "stock")
    return math.nan


def limit_s(cell: Cell, contestant: str) -> float:
    """Return the least seconds a step that the contestant's method allows.

    From the computation C and the all-reduce T of all gradients, both measured in the same run:
    conventional C + T; overlapped with the backward pass, which takes two thirds, max(C, C/3 + T);
    behind the next forward pass, too, or pipelined, max(C, T); averaged behind k steps
    max(C, T/k), and after them, as PostLocalSGD does, C + T/k. With a codec, T is that of the two
    messages that it sends, in their compressed size.
    """
    prefix = TENSORFLOW if contestant.startswith(TENSORFLOW) else ""
    compute = seconds(cell, f"{prefix}single")
    kind, _, compression = contestant.removeprefix(prefix).partition("+")
    codec = CODECS[compression or "none"]
    size = cell["gradient_bytes"] * codec.ratio
    measured = cell["exchange_s" if codec.phases > 1 else "all_reduce_s"]
    times = {int(key): value for key, value in measured.items()}
    if not times:
        raise LookupError(f"no exchange was measured for {contestant}")
    comm = times[min(times, key=lambda measured: abs(measured - size))]
    if kind == "single":
        return compute
    if kind == "conventional":
        return compute + comm
    if kind.startswith("pipe-sgd") or kind == FORWARD:
        return max(compute, comm)
    if kind == "ddp:post-local":
        return compute + comm / period_of(kind)
    if kind.startswith("cocod"):
        return max(compute, comm / period_of(kind))
    return max(compute, FIRST_READY * compute + comm)


@cache
def _layers(model: str, compute_s: float, gradient_bytes: int) -> ModelProfile:
    return scaled(profile(model), compute_s, gradient_bytes)


def predicted_s(cell: Cell, contestant: str) -> float:
    """Return the seconds a step that `hvd_pipe.planning` predicts; nan where it cannot.

    From the emulated layers, and the line through the smallest and the largest all-reduce.
    """
    if cell["compute"] != "emulated" or not ours(contestant) or "+" in contestant:
        return math.nan
    points = sorted((int(size), seconds) for size, seconds in cell["all_reduce_s"].items())
    (small, early), (large, late) = (0, 0.0), points[-1]
    if len(points) > 1:
        small, early = points[0]
    slope = (late - early) / (large - small)
    comm = CommModel.linear(max(0.0, early - slope * small), slope)
    layers = _layers(cell["model"], seconds(cell, "single"), cell["gradient_bytes"])
    return step_time(contestant, layers, comm).total_s


def ours(contestant: str) -> bool:
    """Return whether hvd_pipe trains it."""
    return contestant.startswith(("merged-gradient", "pipe-sgd", "cocod"))


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def table(cell: Cell) -> tuple[str, str]:
    """Return a cell's title and its table."""
    compute = seconds(cell, "single")
    stock = stock_s(cell)
    least = 2 * (cell["workers"] - 1) / cell["workers"] * cell["gradient_bytes"]
    title = (
        f"{cell['model']}, {cell['workers']} workers, r = {cell['ratio']:g} "
        f"(reached {cell['reached_ratio']:.2f}); {cell['compute']} compute "
        f"{compute * 1e3:.1f} ms, {cell['gradient_bytes'] / 2**20:.1f} MiB, {cell['backend']}"
    )
    if "others" in cell:
        title += f"; others took {cell['others']:.0%} of the processors"
    heads = ["contestant", "ms a step", "min .. max", "minibatches/s", "x stock", "x limit"]
    heads += ["predicted ms", "exposed ms", "wire / least", "CPU ms"]
    rows = []
    for row in cell["rows"]:
        name, step_s = row["contestant"], row["seconds"]
        swept = name == "horovod" and row["team"] != "stock"
        rows.append(
            [
                f"horovod {row['team']}" if swept else name,
                f"{step_s * 1e3:.1f}",
                f"{row['least_s'] * 1e3:.1f} .. {row['most_s'] * 1e3:.1f}",
                f"{(1 if name == 'single' else cell['workers']) / step_s:.1f}",
                _number(stock / step_s, 2),
                f"{limit_s(cell, name) / step_s:.2f}",
                _number(predicted_s(cell, name) * 1e3, 1),
                f"{max(step_s - compute, 0.0) * 1e3:.1f}",
                f"{row['sent_bytes'] / least:.2f}",
                f"{row['cpu_s'] * 1e3:.1f}",
            ]
        )
    return title, markdown(heads, rows)


def summary(cells: list[Cell]) -> str:
    """Return all cells in a table: how many times as fast as stock Horovod's default."""
    names = ("ddp", MERGED, FORWARD, "pipe-sgd", "pipe-sgd+int8", "cocod:period=8")
    heads = ["model", "workers", "compute", "backend", "r", "one worker", "stock's best", *names]
    rows = [
        [
            cell["model"],
            f"{cell['workers']}",
            f"{cell['compute']} {best_s(cell, 'single') * 1e3:.0f} ms{_beside(cell)}",
            cell["backend"],
            f"{cell['ratio']:g}",
            *(
                _number(stock_s(cell) / best_s(cell, name), 2)
                for name in ("single", "horovod", *names)
            ),
        ]
        for cell in cells
    ]
    return markdown(heads, rows)


def write_page(cells: list[Cell], path: Path) -> None:
    """Write all tables as Markdown."""
    parts = [
        "# Throughput",
        "Written by `benchmarks/throughput.py --page`. Each table below is one run on emulated "
        "hosts, which\nare network namespaces of one machine. `benchmarks/README.md` says what is "
        "emulated and what the\ncolumns mean. A bound is judged by its worst cell.",
    ]
    sheets = [*all_bounds(cells), ("Speed / stock Horovod's default", summary(cells))]
    for title, text in [*sheets, *map(table, cells)]:
        parts += [f"## {title}", text]
    path.write_text("\n\n".join(parts) + "\n")


def _beside(cell: Cell) -> str:
    busy = cell["settings"].get("busy")
    return f", one core {busy:.0%} busy" if busy else ""


def judged(cells: list[Cell]) -> list[Cell]:
    """Return the cells that `bounds` is about."""
    wanted = ("emulated", JUDGED_WORKERS, "gloo")
    return [
        cell for cell in cells if (cell["compute"], cell["workers"], cell["backend"]) == wanted
    ]


def all_bounds(cells: list[Cell]) -> list[tuple[str, str]]:
    """Return `bounds` of cells of their own, and of those beside a process that takes a core."""
    groups: dict[str, list[Cell]] = {}
    for cell in judged(cells):
        groups.setdefault(_beside(cell), []).append(cell)
    title = f"Bounds ({JUDGED_WORKERS} workers, emulated compute, Gloo"
    return [(f"{title}{where})", bounds(some)) for where, some in sorted(groups.items())]


def bounds(cells: list[Cell]) -> str:
    """Return each bound with the worst cell, or the best where one will do.

    All are ratios of medians within one cell; cells of 4 workers, emulated compute and Gloo count.
    """
    rows = []
    for what, least, ratio, where in _bounds():
        values = []
        for cell in judged(cells):
            if all(cell[key] == value for key, value in where.items() if key in cell):
                with suppress(LookupError):  # of cells that lack a contestant
                    values.append((ratio(cell), cell))
        values = [(value, cell) for value, cell in values if not math.isnan(value)]
        if not values:
            rows.append([what, f">= {least:g}", "not measured", ""])
            continue
        pick = max if where.get("somewhere") else min
        value, cell = pick(values, key=lambda found: found[0])
        reached = f"{value:.2f}" if value >= least else f"{value:.3f} (missed)"
        place = f"{cell['model']}, r = {cell['ratio']:g} (reached {cell['reached_ratio']:.2f})"
        rows.append([what, f">= {least:g}", reached, f"{place}{_beside(cell)}"])
    return markdown(["what", "bound", "reached", "where"], rows)


Bound = tuple[str, float, Callable[[Cell], float], dict[str, Any]]


def _bounds() -> Iterator[Bound]:
    """Yield what is bounded, its least value, how a cell has it, and for which cells it holds."""

    def slow(ratio: Callable[[Cell], float]) -> Callable[[Cell], float]:
        """Of cells of 1 s and more."""
        return lambda cell: ratio(cell) if _is_true(cell) else math.nan

    def peer(cell: Cell) -> float:
        return min(best_s(cell, "horovod"), best_s(cell, "ddp")) / seconds(cell, FORWARD)

    for ratio, model, least in (
        (0.5, "", 1.0),
        (1.0, "resnet50", 1.25),
        (1.0, "vgg16", 1.25),
        (1.0, "densenet121", 1.2),
        (2.0, "", 1.12),
    ):
        at = f"r = {ratio:g}{', ' if model else ''}{model}"
        what = f"{FORWARD} / the best of stock Horovod and DDP, {at}, cells of 1 s and more"
        yield what, least, slow(peer), {"ratio": ratio, **({"model": model} if model else {})}
    what = f"{FORWARD} / max(compute, communication), cells of 1 s and more"
    yield what, 0.90, slow(lambda cell: _of_limit(cell, FORWARD)), {}
    what = f"{FORWARD} / its prediction, or the other way round"
    yield what, 0.9, lambda cell: _off(seconds(cell, FORWARD), predicted_s(cell, FORWARD)), {}
    what = f"{FORWARD} / {MERGED}"
    yield what, 1.0, lambda cell: seconds(cell, MERGED) / seconds(cell, FORWARD), {}
    what = f"{MERGED} / DDP, best of its settings, cells of 1 s and more"
    yield what, 1.0, slow(lambda cell: best_s(cell, "ddp") / seconds(cell, MERGED)), {}
    what = f"{MERGED} / Horovod's engine by itself, cells of less than 1 s"
    yield what, 0.97, _of_engine, {}
    what = f"{MERGED} / stock Horovod, best of its settings"
    yield what, 1.0, lambda cell: best_s(cell, "horovod") / seconds(cell, MERGED), {}
    what = f"{MERGED} / stock Horovod, on DenseNet somewhere"
    some = {"model": "densenet121", "somewhere": True}
    yield what, 1.15, lambda cell: _of_stock(cell, MERGED), some
    yield f"{MERGED} / its own plan", 0.92, _of_plan, {}
    for name in ("pipe-sgd", "pipe-sgd+bf16", "pipe-sgd+int8", f"{TENSORFLOW}pipe-sgd"):
        least = 0.90 if name.startswith(TENSORFLOW) else 0.93
        what = f"{name} / max(compute, communication)"
        yield what, least, lambda cell, name=name: _of_limit(cell, name), {}
    for prefix, least in (("", 0.95), (TENSORFLOW, 0.93)):
        what = f"{prefix}cocod with period >= r / one worker alone"
        yield what, least, lambda cell, prefix=prefix: _of_single(cell, prefix), {}
    for name, least in (("pipe-sgd+int8", 3.0), ("cocod:period=8", 4.0)):
        what = f"{name} / stock Horovod, r = 4"
        yield what, least, lambda cell, name=name: _of_stock(cell, name), {"ratio": 4.0}
    yield "the best strategy / conventional, r = 8", 5.0, _of_conventional, {"ratio": 8.0}


def _is_true(cell: Cell) -> bool:
    return float(cell["settings"]["compute_ms"]) >= TRUE_MS


def _off(one: float, other: float) -> float:
    return min(one / other, other / one)


def _of_limit(cell: Cell, name: str) -> float:
    return limit_s(cell, name) / seconds(cell, name)


def _of_stock(cell: Cell, name: str) -> float:
    return stock_s(cell) / seconds(cell, name)


def _of_engine(cell: Cell) -> float:
    return math.nan if _is_true(cell) else best_s(cell, "engine") / seconds(cell, MERGED)


def _of_plan(cell: Cell) -> float:
    exposed_s = float(of(cell, MERGED)["planned_exposed_s"])
    return _off(seconds(cell, MERGED), seconds(cell, "single") + exposed_s)


def _of_single(cell: Cell, prefix: str) -> float:
    """Of the slowest whose messages of so many steps can arrive in time."""
    in_time = [
        row["seconds"]
        for row in cell["rows"]
        if row["contestant"].startswith(f"{prefix}cocod")
        and period_of(row["contestant"]) >= cell["ratio"]
    ]
    return seconds(cell, f"{prefix}single") / max(in_time, default=math.nan)


def _of_conventional(cell: Cell) -> float:
    best = min(
        (row["seconds"] for row in cell["rows"] if ours(row["contestant"])), default=math.nan
    )
    return seconds(cell, "conventional") / best
