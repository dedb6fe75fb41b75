"""The tables of speed in README and docs/, computed again from benchmarks/results/."""

from __future__ import annotations

import json
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

from tests import pages

Steps = dict[tuple[float, str], dict[str, float]]  # ms by contestant, by ratio and model

HOROVOD = ("horovod", "horovod:asleep")
DDP = ("ddp", "ddp:buckets=8")
MODELS = {
    "ResNet-50": "resnet50",
    "VGG-16": "vgg16",
    "DenseNet-121": "densenet121",
    "transformer": "transformer",
}
OVERLAP = "merged-gradient:overlap=forward"
# Columns of ratios: whose step divides that of the peer.
COLUMNS = {
    "`merged-gradient`": ("merged-gradient",),
    f"`{OVERLAP}`": (OVERLAP,),
    "`overlap=forward`": (OVERLAP,),
    "`pipe-sgd`": ("pipe-sgd",),
    "`pipe-sgd`, int8": ("pipe-sgd+int8",),
    "`cocod:period=8`": ("cocod:period=8",),
    "one worker by itself": ("single",),
    "Horovod, polling or asleep": HOROVOD,
    "DDP's best": DDP,
}


def _read(name: str) -> Any:
    return json.loads((pages.ROOT / "benchmarks" / "results" / name).read_text())


def _steps(name: str, workers: int = 4, backend: str = "gloo", busy: float = 0.0) -> Steps:
    """The cells of a file that were measured in this way, and with no other load if not busy."""
    found = {}
    for cell in _read(name):
        way = cell["workers"], cell["backend"], cell["settings"]["busy"]
        if way == (workers, backend, busy):
            times = {row["contestant"]: 1e3 * row["seconds"] for row in cell["rows"]}
            times["all-reduce"] = 1e3 * cell["all_reduce_s"][str(cell["gradient_bytes"])]
            found[cell["ratio"], cell["model"]] = times
    return found


def _best(times: dict[str, float], names: tuple[str, ...]) -> float:
    return min(times[name] for name in names)


def _table(page: str, first: str) -> list[list[str]]:
    """The rows of the table whose heading begins with these words, with its heading."""
    lines = (pages.ROOT / page).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(first))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [rows[0], *rows[2:]]


def _range(ratios: list[float]) -> str:
    least, most = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return least if least == most else f"{least} to {most}"


@pytest.mark.parametrize(
    ("name", "first", "peer"),
    [
        ("exact-1200ms.json", "| r | `merged-gradient`", lambda t: _best(t, HOROVOD + DDP)),
        ("exact-120ms.json", "| r | one worker by itself", lambda t: t["horovod"]),
    ],
)
def test_readme_has_the_ratios_of_the_results(
    name: str, first: str, peer: Callable[[dict[str, float]], float]
) -> None:
    steps = _steps(name)
    heading, *rows = _table("README.md", first)
    assert [float(row[0].split()[0]) for row in rows] == sorted({ratio for ratio, _ in steps})
    for row in rows:
        times = [each for (ratio, _), each in steps.items() if ratio == float(row[0].split()[0])]
        for column, cell in zip(heading[1:], row[1:], strict=True):
            ratios = [peer(each) / _best(each, COLUMNS[column]) for each in times]
            assert cell == _range(ratios), (column, row[0])


@pytest.mark.parametrize(
    ("page", "name", "first"),
    [
        ("docs/performance.md", "exact-120ms.json", "| ms a step | r | stock Horovod"),
        ("docs/overlap-forward.md", "exact-1200ms.json", "| ms a step | m / c"),
    ],
)
def test_a_page_has_the_times_of_the_results(page: str, name: str, first: str) -> None:
    steps = _steps(name)
    heading, *rows = _table(page, first)
    shown = set()
    for row in rows:
        cell = (float(row[1]), MODELS[row[0]])
        shown.add(cell)
        times = steps[cell]
        limit = max(times["single"], times["all-reduce"])
        peer, ours = _best(times, HOROVOD + DDP), times[OVERLAP]
        columns = {
            "stock Horovod": f"{_best(times, HOROVOD):.0f}",
            "PyTorch DDP": f"{_best(times, DDP):.0f}",
            "`merged-gradient`": f"{times['merged-gradient']:.0f}",
            "`overlap=forward`": f"{ours:.0f}",
            "one worker alone": f"{times['single']:.0f}",
            "the best peer / `overlap=forward`": f"{peer / ours:.2f}",
            "max(c, m) / `overlap=forward`": f"{limit / ours:.2f}",
        }
        engine = [ms for who, ms in times.items() if who.startswith("engine")]
        if engine:
            columns["Horovod's engine"] = f"{min(engine):.0f}"
        found = dict(zip(heading[2:], row[2:], strict=True))
        assert found == {column: columns[column] for column in found}, cell
    assert shown == set(steps)


def test_a_page_has_the_times_on_busy_machines_over_mpi_and_of_real_computation() -> None:
    ways = {
        "another process takes half of one core": _steps("exact-120ms.json", busy=0.5),
        "Horovod over MPI": _steps("exact-120ms.json", backend="mpi"),
        "two workers that really compute on one core each, 90 MiB, r = 0.78": _steps(
            "exact-cpu.json", workers=2
        ),
    }
    heading, *rows = _table("docs/performance.md", "| ms a step | | stock Horovod")
    assert heading[2:] == [
        "stock Horovod",
        "PyTorch DDP",
        "`merged-gradient`",
        "`overlap=forward`",
        "one worker alone",
    ]
    columns = (HOROVOD, DDP, ("merged-gradient",), (OVERLAP,), ("single",))
    shown, way = [], ""
    for model, said, *cells in rows:
        way = way if said == "likewise" else said
        shown.append((way, MODELS[model]))
        times = ways[way][1.0, MODELS[model]]
        assert cells == [f"{_best(times, column):.0f}" for column in columns], (model, way)
    assert sorted(shown) == sorted((way, model) for way in ways for _, model in ways[way])


def test_a_page_has_the_costs_of_a_message() -> None:
    seconds = _read("message-cost.json")["seconds"]
    _, *rows = _table("docs/performance.md", "| | messages | until Horovod looks")
    shown = set()
    for ranks, messages, *cells in rows:
        count, _, size = messages.partition(" of ")
        shown.add((ranks, f"{size}/{count}/sleeps"))
        found = seconds[ranks][f"{size}/{count}/sleeps"]
        parts = ("queue", "negotiate", "wire", "wake", "whole")
        assert cells == [f"{1e3 * found[part]:.1f}" for part in parts], (ranks, messages)
    every = {(ranks, way) for ranks, ways in seconds.items() for way in ways}
    assert shown == {(ranks, way) for ranks, way in every if way.endswith("sleeps")}
    assert f"{1e3 * seconds['gloo, 4 ranks']['4 KiB/1/spins']['whole']:.0f} ms" in _text(
        "docs/performance.md"
    )


def test_a_page_has_the_times_on_slow_links_and_of_nodes() -> None:
    """A column a cell, in the file's order; a contestant that was not raced has no number."""
    shown = {"stock Horovod": "horovod", "one worker by itself": "single"}
    cells = [
        {row["contestant"]: 1e3 * row["seconds"] for row in cell["rows"]}
        for cell in _read("cocod.json")
    ]
    _, *rows = _table("docs/performance.md", "| ms a step | r = 8 |")
    raced = set()
    for name, *figures in rows:
        contestant = shown.get(name, name.strip("`"))
        raced.add(contestant)
        for cell, figure in zip(cells, figures, strict=True):
            assert figure == (f"{cell[contestant]:.0f}" if contestant in cell else "")
    assert raced == {contestant for cell in cells for contestant in cell}


def _text(page: str) -> str:
    return " ".join((pages.ROOT / page).read_text().split())


def test_a_page_has_the_times_of_the_first_steps() -> None:
    seconds = _read("first-steps.json")["seconds"]
    stock, ours = (
        [median(seconds[rate][who]) for rate in ("100mbit", "20mbit")]
        for who in ("horovod", "merged-gradient")
    )
    ratios = [
        median(
            one / other
            for one, other in zip(runs["merged-gradient"], runs["horovod"], strict=True)
        )
        for runs in (seconds["100mbit"], seconds["20mbit"])
    ]
    assert (
        f"take {ours[0]:.2f} s at 100 Mbit/s, where stock Horovod's take {stock[0]:.2f} s, and "
        f"{ours[1]:.2f} s at 20 Mbit/s, where stock's take {stock[1]:.2f} s: {ratios[0]:.2f} and "
        f"{ratios[1]:.2f} times as long"
    ) in _text("docs/performance.md")


def test_a_page_has_the_time_of_hvd_pipe_itself() -> None:
    found = _read("overhead.json")
    plain, lines = found["not_distributed_s"], list(found["lines"].values())
    steps = [f"{1e3 * line['step_s']:.1f}" for line in lines]
    more = [f"{line['step_s'] / plain - 1:.1%}" for line in lines]
    own = [f"{line['own']:.1%}" for line in lines]
    text = _text("docs/performance.md")
    for words in (
        f"{1e3 * plain:.1f} ms with a plain SGD",
        f"{steps[0]}, {steps[1]} and {steps[2]} ms under",
        f"{more[0]}, {more[1]} and {more[2]} more",
        f"takes {own[0]}, {own[1]} and {own[2]} of the step",
    ):
        assert words in text


def test_a_page_has_the_time_of_a_pipeline() -> None:
    (cell,) = _read("pipedream-gnmt.json")
    rows = {row["contestant"]: row for row in cell["rows"]}
    pipe, stock = rows["pipedream straight stash"], rows["horovod"]["seconds"]
    assert (
        f"takes {1e3 * pipe['seconds']:.0f} ms a batch. Its plan promises "
        f"{1e3 * pipe['predicted']['seconds']:.0f} ms, and stock Horovod takes "
        f"{1e3 * stock:,.0f} ms, {stock / pipe['seconds']:.2f} times as long."
    ) in _text("docs/pipedream.md")


def test_a_page_has_the_best_of_all_settings() -> None:
    text = _text("docs/performance.md")
    stock, ours = [], []
    for cell in _read("exact-sweep.json"):
        times = [(row["contestant"], 1e3 * row["seconds"]) for row in cell["rows"]]
        stock.append(min(ms for name, ms in times if name in HOROVOD))
        ours.append(dict(times)["merged-gradient"])
    assert f"the best of all five was {stock[0]:.0f} ms on ResNet-50 and {stock[1]:.0f} ms" in text
    assert f"`merged-gradient` took {ours[0]:.0f} and {ours[1]:.0f} ms" in text
