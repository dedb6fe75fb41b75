"""What the throughput benchmark found: tables, limits and predictions."""

from __future__ import annotations

import math
from contextlib import suppress
from functools import cache
from typing import Any

from contestants import TENSORFLOW, parts_of, period_of
from emulated import scaled
from harness import markdown
from models import profile

from hvd_pipe.planning.comm import CODECS, CommModel
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.timing import step_time

OVERLAPPING = ("merged-gradient", "merged-gradient:overlap=forward")  # TensorFlow: the second
FIRST_READY = 1 / 3  # of a step: forward passes take a third, and no gradient is ready before
Cell = dict[str, Any]


def of(cell: Cell, contestant: str, team: str = "") -> dict[str, Any]:
    """Return a contestant's row of a cell; a LookupError where it was not there."""
    for row in cell["rows"]:
        if row["contestant"] == contestant and (not team or row["team"] == team):
            return row
    raise LookupError(f"{contestant} did not run in this cell")


def seconds(cell: Cell, contestant: str, team: str = "") -> float:
    return float(of(cell, contestant, team)["seconds"])


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
    kind, compression, _ = parts_of(contestant.removeprefix(prefix))
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
    if kind.startswith("pipe-sgd") or kind in OVERLAPPING[bool(prefix) :]:
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
    return step_time(parts_of(contestant)[0], layers, comm).total_s


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
