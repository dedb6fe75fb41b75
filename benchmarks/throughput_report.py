"""What the throughput benchmark found: tables, pictures, and the bounds that it is held to."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from contestants import DDP_BUCKETS, ENGINE, TENSORFLOW, period_of
from emulated import scaled
from models import profile
from rich import box
from rich.console import Console
from rich.table import Table

from hvd_pipe._pictures import figure_of, save
from hvd_pipe.planning.codec import CODECS
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.timing import step_time

__all__ = ["all_bounds", "bounds", "draw", "limit_s", "summary", "table", "write_page"]

FORWARD = "merged-gradient:overlap=forward"
SETTINGS = {
    "horovod": ("horovod", "horovod:asleep"),
    "ddp": ("ddp", *DDP_BUCKETS),
    "engine": ENGINE,
}
"""What counts as one contestant with other settings."""
TRUE_MS = 1000.0
"""From this much computation on, latency is as small a part of a step as on clusters."""
FIRST_READY = 1 / 3  # of a step: forward passes take a third, and no gradient is ready before


def of(cell: dict[str, Any], contestant: str, team: str = "") -> dict[str, Any]:
    """Return a contestant's row of a cell.

    Raises:
        LookupError: It was not there.
    """
    for row in cell["rows"]:
        if row["contestant"] == contestant and (not team or row["team"] == team):
            return row
    raise LookupError(f"{contestant} did not run in this cell")


def seconds_or_nan(cell: dict[str, Any], contestant: str, team: str = "") -> float:
    """Return a contestant's seconds a step; nan where it did not run."""
    try:
        return float(of(cell, contestant, team)["seconds"])
    except LookupError:
        return math.nan


def best_s(cell: dict[str, Any], contestant: str) -> float:
    """Return a contestant's seconds a step under its best settings; nan where it did not run."""
    names = SETTINGS.get(contestant, (contestant,))
    tried = [row["seconds"] for row in cell["rows"] if row["contestant"] in names]
    return min(tried, default=math.nan)


def limit_s(cell: dict[str, Any], contestant: str) -> float:
    """Return the least seconds a step that the contestant's method allows.

    From the computation C and the all-reduce T of all gradients, both measured in the same run:
    conventional C + T; overlapped with the backward pass, which takes two thirds, max(C, C/3 + T);
    behind the next forward pass, too, or pipelined, max(C, T); averaged behind k steps
    max(C, T/k), and after them, as PostLocalSGD does, C + T/k. With a codec, T is that of the two
    messages that it sends, in their compressed size.
    """
    prefix = TENSORFLOW if contestant.startswith(TENSORFLOW) else ""
    compute = of(cell, f"{prefix}single")["seconds"]
    kind, _, compression = contestant.removeprefix(prefix).partition("+")
    codec = CODECS[compression or "none"]
    size = cell["gradient_bytes"] * codec.ratio
    measured = cell["exchange_s" if codec.phases > 1 else "all_reduce_s"]
    times = {int(key): value for key, value in measured.items()}
    if not times:
        raise LookupError(f"no exchange was measured for {contestant}")
    comm = times[min(times, key=lambda each: abs(each - size))]
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


def predicted_s(cell: dict[str, Any], contestant: str) -> float:
    """Return the seconds a step that `hvd_pipe.planning` predicts; nan where it cannot.

    From the emulated layers, and the line through the smallest and the largest all-reduce.
    """
    if cell["compute"] != "emulated" or not ours(contestant) or "+" in contestant:
        return math.nan
    compute = of(cell, "single")["seconds"]
    points = sorted((int(size), seconds) for size, seconds in cell["all_reduce_s"].items())
    (small, early), (large, late) = (0, 0.0), points[-1]
    if len(points) > 1:
        small, early = points[0]
    slope = (late - early) / (large - small)
    comm = CommModel.linear(max(0.0, early - slope * small), slope)
    layers = _layers(cell["model"], compute, cell["gradient_bytes"])
    return step_time(contestant, layers, comm).total_s


def table(cell: dict[str, Any]) -> Table:
    """Return a cell as a table."""
    compute = of(cell, "single")["seconds"]
    stock = seconds_or_nan(cell, "horovod", "stock")
    least = 2 * (cell["workers"] - 1) / cell["workers"] * cell["gradient_bytes"]
    title = (
        f"{cell['model']}, {cell['workers']} workers, r = {cell['ratio']:g} "
        f"(reached {cell['reached_ratio']:.2f}); {cell['compute']} compute "
        f"{compute * 1e3:.1f} ms, {cell['gradient_bytes'] / 2**20:.1f} MiB, {cell['backend']}"
    )
    if "others" in cell:
        title += f"; others took {cell['others']:.0%} of the processors"
    found = Table(title=title)
    found.add_column("contestant", no_wrap=True)
    for heading in (
        "ms a step",
        "min .. max",
        "minibatches/s",
        "x stock",
        "x limit",
        "predicted ms",
        "exposed ms",
    ):
        found.add_column(heading, justify="right")
    found.add_column("wire / least", justify="right")
    found.add_column("CPU ms", justify="right")
    for row in cell["rows"]:
        swept = row["contestant"] == "horovod" and row["team"] != "stock"
        name = f"horovod {row['team']}" if swept else row["contestant"]
        seconds, predicted = row["seconds"], predicted_s(cell, row["contestant"])
        found.add_row(
            name,
            f"{seconds * 1e3:.1f}",
            f"{row['least_s'] * 1e3:.1f} .. {row['most_s'] * 1e3:.1f}",
            f"{(1 if row['contestant'] == 'single' else cell['workers']) / seconds:.1f}",
            "-" if math.isnan(stock) else f"{stock / seconds:.2f}",
            f"{limit_s(cell, row['contestant']) / seconds:.2f}",
            "-" if math.isnan(predicted) else f"{predicted * 1e3:.1f}",
            f"{max(seconds - compute, 0.0) * 1e3:.1f}",
            f"{row['sent_bytes'] / least:.2f}",
            f"{row['cpu_s'] * 1e3:.1f}",
        )
    return found


def summary(cells: list[dict[str, Any]]) -> Table:
    """Return all cells in a table: how many times as fast as stock Horovod's default."""
    found = Table(title="Speed / stock Horovod's default")
    headings = ("model", "workers", "compute", "backend", "r", "one worker", "stock's best")
    for heading in (*headings, *SUMMARY):
        words = heading in ("model", "compute", "backend")
        found.add_column(heading, justify="left" if words else "right")
    for cell in cells:
        seconds = [best_s(cell, name) for name in ("single", "horovod", *SUMMARY)]
        stock = seconds_or_nan(cell, "horovod", "stock")
        found.add_row(
            cell["model"],
            f"{cell['workers']}",
            f"{cell['compute']} {best_s(cell, 'single') * 1e3:.0f} ms{_beside(cell)}",
            cell["backend"],
            f"{cell['ratio']:g}",
            *("-" if math.isnan(stock / each) else f"{stock / each:.2f}" for each in seconds),
        )
    return found


SUMMARY = ("ddp", "merged-gradient", FORWARD, "pipe-sgd", "pipe-sgd+int8", "cocod:period=8")


PREAMBLE = """\
# Throughput

Written by `benchmarks/throughput.py --page`. Each table below is one run on emulated hosts, which
are network namespaces of one machine. `benchmarks/README.md` says what is emulated and what the
columns mean. `docs/performance.md` says when these cells ran, with which versions, how to repeat
them, and why bounds were missed. A bound is judged by its worst cell."""


def write_page(cells: list[dict[str, Any]], path: Path) -> None:
    """Write all tables as Markdown, and beside it a picture of the cells that belong together."""
    text = io.StringIO()
    console = Console(file=text, width=1000, highlight=False, markup=False)
    console.print(PREAMBLE)
    together: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        together.setdefault(setting(cell), []).append(cell)
    curves = {
        title: some
        for title, some in together.items()
        if len({cell["ratio"] for cell in some}) > 1
    }
    for number, (title, some) in enumerate(curves.items()):
        picture = path.with_name(f"{path.stem}-{number + 1}.png")
        draw(some, picture)
        console.print(f"\n![{title}]({picture.name})")
    for sheet in (*all_bounds(cells), summary(cells), *map(table, cells)):
        console.print(f"\n## {sheet.title}")
        sheet.title, sheet.box = None, box.MARKDOWN
        console.print(sheet)
    lines = text.getvalue().splitlines()
    path.write_text("".join(f"{line.rstrip()}\n" for line in lines))


def setting(cell: dict[str, Any]) -> str:
    """Return what cells must share to be drawn together."""
    compute = f"{cell['compute']} compute"
    if cell["compute"] == "emulated":
        compute += f" of {cell['settings']['compute_ms']:g} ms"
    return f"{cell['workers']} workers, {compute}, Horovod over {cell['backend']}{_beside(cell)}"


def _beside(cell: dict[str, Any]) -> str:
    busy = cell["settings"].get("busy")
    return f", one core {busy:.0%} busy" if busy else ""


JUDGED_WORKERS = 4


def judged(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cells that `bounds` is about."""
    wanted = ("emulated", JUDGED_WORKERS, "gloo")
    return [
        cell for cell in cells if (cell["compute"], cell["workers"], cell["backend"]) == wanted
    ]


def all_bounds(cells: list[dict[str, Any]]) -> list[Table]:
    """Return `bounds` of cells of their own, and of those beside a process that takes a core."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for cell in judged(cells):
        groups.setdefault(_beside(cell), []).append(cell)
    return [bounds(some) for _, some in sorted(groups.items())]


def bounds(cells: list[dict[str, Any]]) -> Table:
    """Return each bound with the worst cell, or the best where one will do.

    All are ratios of medians within one cell; cells of 4 workers, emulated compute and Gloo count.
    """
    cells = judged(cells)
    where = _beside(cells[0]) if cells else ""
    found = Table(title=f"Bounds ({JUDGED_WORKERS} workers, emulated compute, Gloo{where})")
    for heading in ("what", "bound", "reached", "where"):
        found.add_column(heading)
    for text, least, values, all_cells in _bounds(cells):
        if not values:
            found.add_row(text, f">= {least:g}", "not measured", "")
            continue
        pick = min if all_cells else max
        value, where = pick(values, key=lambda each: each[0])
        reached = f"{value:.2f}" if value >= least else f"{value:.3f} (missed)"
        found.add_row(text, f">= {least:g}", reached, where)
    return found


def _bounds(
    cells: list[dict[str, Any]],
) -> Iterator[tuple[str, float, list[tuple[float, str]], bool]]:
    def ratios(
        ratio: Callable[[dict[str, Any]], float], at: float | None = None, model: str = ""
    ) -> list[tuple[float, str]]:
        found = []
        for cell in cells:
            if at in (None, cell["ratio"]) and model in ("", cell["model"]):
                where = f"{cell['model']}, r = {cell['ratio']:g}"
                where += f" (reached {cell['reached_ratio']:.2f}), {setting(cell)}"
                with suppress(LookupError):  # of cells that lack a contestant
                    found.append((ratio(cell), where))
        return [(value, where) for value, where in found if not math.isnan(value)]

    def seconds(cell: dict[str, Any], name: str) -> float:
        return float(of(cell, name)["seconds"])

    def planned(cell: dict[str, Any]) -> float:
        plan = seconds(cell, "single") + of(cell, merged)["planned_exposed_s"]
        return off(seconds(cell, merged), float(plan))

    def off(one: float, other: float) -> float:
        return min(one / other, other / one)

    def default(cell: dict[str, Any]) -> float:
        return float(of(cell, "horovod", "stock")["seconds"])

    def in_time(cell: dict[str, Any], prefix: str) -> list[float]:
        return [
            row["seconds"]
            for row in cell["rows"]
            if row["contestant"].startswith(f"{prefix}cocod")
            and period_of(row["contestant"]) >= cell["ratio"]
        ]

    def exact_peer(cell: dict[str, Any]) -> float:
        return min(best_s(cell, "horovod"), best_s(cell, "ddp"))

    def is_true(cell: dict[str, Any]) -> bool:
        return float(cell["settings"]["compute_ms"]) >= TRUE_MS

    merged = "merged-gradient"
    for ratio, models, least in (
        (0.5, "", 1.0),
        (1.0, "resnet50", 1.25),
        (1.0, "vgg16", 1.25),
        (1.0, "densenet121", 1.2),
        (2.0, "", 1.12),
    ):
        where = f"r = {ratio:g}" + (f", {models}" if models else "")
        yield (
            f"{FORWARD} / the best of stock Horovod and DDP, {where}, cells of 1 s and more",
            least,
            ratios(
                lambda cell: (
                    exact_peer(cell) / seconds(cell, FORWARD) if is_true(cell) else math.nan
                ),
                at=ratio,
                model=models,
            ),
            True,
        )
    yield (
        f"{FORWARD} / max(compute, communication), cells of 1 s and more",
        0.90,
        ratios(
            lambda cell: (
                limit_s(cell, FORWARD) / seconds(cell, FORWARD) if is_true(cell) else math.nan
            )
        ),
        True,
    )
    yield (
        f"{FORWARD} / its prediction, or the other way round",
        0.9,
        ratios(lambda cell: off(seconds(cell, FORWARD), predicted_s(cell, FORWARD))),
        True,
    )
    yield (
        f"{FORWARD} / {merged}",
        1.0,
        ratios(lambda cell: seconds(cell, merged) / seconds(cell, FORWARD)),
        True,
    )
    yield (
        f"{merged} / DDP, best of its settings, cells of 1 s and more",
        1.0,
        ratios(
            lambda cell: best_s(cell, "ddp") / seconds(cell, merged) if is_true(cell) else math.nan
        ),
        True,
    )
    yield (
        f"{merged} / Horovod's engine by itself, cells of less than 1 s",
        0.97,
        ratios(
            lambda cell: (
                math.nan if is_true(cell) else best_s(cell, "engine") / seconds(cell, merged)
            )
        ),
        True,
    )
    yield (
        f"{merged} / stock Horovod, best of its settings",
        1.0,
        ratios(lambda cell: best_s(cell, "horovod") / seconds(cell, merged)),
        True,
    )
    yield (
        f"{merged} / stock Horovod, on DenseNet somewhere",
        1.15,
        ratios(lambda cell: default(cell) / seconds(cell, merged), model="densenet121"),
        False,
    )
    yield f"{merged} / its own plan", 0.92, ratios(planned), True
    for name in ("pipe-sgd", "pipe-sgd+bf16", "pipe-sgd+int8", f"{TENSORFLOW}pipe-sgd"):
        yield (
            f"{name} / max(compute, communication)",
            0.90 if name.startswith(TENSORFLOW) else 0.93,
            ratios(lambda cell, name=name: limit_s(cell, name) / seconds(cell, name)),
            True,
        )
    for prefix, least in (("", 0.95), (TENSORFLOW, 0.93)):
        yield (
            f"{prefix}cocod with period >= r / one worker alone",
            least,
            ratios(
                lambda cell, prefix=prefix: (
                    seconds(cell, f"{prefix}single") / sorted(in_time(cell, prefix))[-1]
                )
            ),
            True,
        )
    for name, least in (("pipe-sgd+int8", 3.0), ("cocod:period=8", 4.0)):
        yield (
            f"{name} / stock Horovod, r = 4",
            least,
            ratios(lambda cell, name=name: default(cell) / seconds(cell, name), at=4.0),
            True,
        )
    yield (
        "the best strategy / conventional, r = 8",
        5.0,
        ratios(
            lambda cell: (
                seconds(cell, "conventional")
                / sorted(row["seconds"] for row in cell["rows"] if ours(row["contestant"]))[0]
            ),
            at=8.0,
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
    FORWARD: ("merged-gradient, overlap=forward", "#D55E00", "*"),
    "pipe-sgd": ("pipe-sgd", "#56B4E9", "^"),
    "pipe-sgd+int8": ("pipe-sgd + int8", "#0072B2", "D"),
    "cocod:period=8": ("cocod, period 8", "#009E73", "P"),
}


def draw(cells: list[dict[str, Any]], path: Path) -> None:
    """Draw each model's speed by r: 1 is all workers at the speed of one worker by itself."""
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    figure, axes = figure_of(4.6, columns=len(models))
    for axis, model in zip(axes if len(models) > 1 else [axes], models, strict=True):
        mine = sorted(
            (cell for cell in cells if cell["model"] == model), key=lambda cell: cell["ratio"]
        )
        for name, (label, colour, marker) in LINES.items():
            speeds = [best_s(cell, "single") / best_s(cell, name) for cell in mine]
            if all(map(math.isnan, speeds)):
                continue  # it was not there
            ratios = [cell["ratio"] for cell in mine]
            axis.plot(ratios, speeds, label=label, color=colour, marker=marker)
        axis.set_xscale("log", base=2)
        ticks = [cell["ratio"] for cell in mine]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ylim(0, 1.1)
        axis.set_title(model)
        axis.set_xlabel("communication / computation")
        axis.grid(color="#DDDDDD")
    every = list(axes) if len(models) > 1 else [axes]
    every[0].set_ylabel("speed of each worker / of one worker alone")
    shown: dict[str, Any] = {}
    for axis in every:
        shown |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    labels, handles = list(shown), list(shown.values())
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(
        f"{setting(cells[0])}, links limited by tc tbf",
        fontsize="medium",
    )
    save(figure, path)
