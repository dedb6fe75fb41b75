"""The tables of speed in README and docs/, computed again from benchmarks/results/."""

from __future__ import annotations

import json
from collections.abc import Callable

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
    "Horovod's best setting": HOROVOD,
    "DDP's best": DDP,
}


def _steps(name: str) -> Steps:
    """The cells of a file with four workers over Gloo on a machine that no test kept busy."""
    cells = json.loads((pages.ROOT / "benchmarks" / "results" / name).read_text())
    found = {}
    for cell in cells:
        if cell["workers"] == 4 and cell["backend"] == "gloo" and not cell["settings"]["busy"]:
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
