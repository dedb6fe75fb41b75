"""Predicted against published step times: clusters, models and measurements of others.

    python benchmarks/published.py    # the tables of docs/scale.md, in Markdown

`results/published.json` has the measurements with their sources. A prediction takes three things
from a publication: the model, the step of one worker alone, and the cost of an all-reduce or a
link. Nothing is fitted to the measured steps. Nothing here needs a network, Horovod or a GPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from harness import markdown
from published_models import NETWORKS

from hvd_pipe.planning.cluster import Cluster, Link, Network
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.planning.simulate import simulate

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "tests" / "data"
NAMES = {
    "resnet152": "ResNet-152",
    "densenet161": "DenseNet-161",
    "densenet201": "DenseNet-201",
    "inception-v4": "Inception-v4",
    "googlenet": "GoogLeNet",
    "resnet50": "ResNet-50",
    "vgg16": "VGG-16",
}
METHODS = {
    "wfbp": "WFBP",
    "single": "one message",
    "greedy": "MG-WFBP",
    "horovod:threshold=64MiB,cycle=5ms": "Horovod",
}
TIE = 1e-3  # predictions as close as this are the same
STEPS = 4  # without jitter, every step of a simulation takes the same


@dataclass(frozen=True)
class Row:
    """One measurement and its prediction, in seconds a step."""

    model: str
    workers: int
    network: str
    method: str
    bits: int
    single_s: float
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """How much longer the prediction is than the measurement, as a part of it."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True)
class Study:
    """What one publication measured, with all that a prediction needs."""

    title: str
    facts: dict[str, Any]
    rows: tuple[Row, ...]

    def runs(self) -> list[tuple[Row, ...]]:
        """The rows, together where a model, a network and workers are the same."""
        count = len(self.facts["methods"])
        return [self.rows[at : at + count] for at in range(0, len(self.rows), count)]

    def regrets(self) -> list[float]:
        """What a step is longer than the fastest for who takes the method predicted as fastest.

        Of methods whose predictions are the same, the slowest counts.
        """
        found = []
        for run in self.runs():
            least = min(row.predicted_s for row in run)
            chosen = [row.measured_s for row in run if row.predicted_s <= (1 + TIE) * least]
            found.append(max(chosen) / min(row.measured_s for row in run) - 1.0)
        return found

    def slopes(self) -> list[tuple[Row, float, float]]:
        """Of a run's one message: its row, and seconds a byte, as measured and as predicted.

        What a step with one message is longer than one worker's own is that message's time.
        """
        found = []
        for run in self.runs():
            row = next(row for row in run if row.method == "single")
            size = sum(profile_of(row).gradient_bytes().tolist())
            late = (row.measured_s - row.single_s, row.predicted_s - row.single_s)
            found.append((row, late[0] / size, late[1] / size))
        return found


def studies() -> list[Study]:
    """Every study in `results/published.json`, predicted anew."""
    found = json.loads((HERE / "results" / "published.json").read_text())
    return [Study(facts["title"], facts, tuple(rows(facts))) for facts in found]


def rows(facts: dict[str, Any]) -> Iterable[Row]:
    """Predict every measurement of a study."""
    for run in facts["runs"]:
        workers = run.get("workers", facts.get("workers"))
        if "batch" in run:
            single = run["batch"] / run["single_rate"]
            measured = [run["batch"] / rate for rate in run["measured_rate"]]
        else:
            single, measured = run["single_s"], run["measured_s"]
        network = _network(facts["networks"][run["network"]], facts["id"], workers)
        bits = run.get("bits", 32)
        model = profile(run["model"], single, bits)
        for method, seconds in zip(facts["methods"], measured, strict=True):
            step = simulate(model, Cluster(workers, network), method, iterations=STEPS).step_s
            name, link = run["model"], run["network"]
            yield Row(name, workers, link, method, bits, single, seconds, step)


def _network(constants: Sequence[float], study: str, workers: int) -> Network:
    """What a publication says of a network, as the planner takes it."""
    if study == "v100":  # an all-reduce over all 16
        return Network(None, measured=CommModel.linear(*constants), measured_workers=workers)
    if study == "k80":  # logs of these numbers of nodes
        nodes = int(max(constants) if workers > min(constants) else min(constants))
        table = list(_numbers(DATA / f"osu_allreduce_10gbe_{nodes}nodes.csv"))
        sizes, microseconds = zip(*table, strict=True)
        measured = CommModel.table(sizes, [each * 1e-6 for each in microseconds])
        return Network(None, measured=measured, measured_workers=nodes)
    return Network(Link(*constants))


def _numbers(path: Path) -> Iterable[list[float]]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return (list(map(float, row)) for row in csv.reader(lines[1:]))


def profile(model: str, step_s: float, bits: int = 32) -> ModelProfile:
    """A model on a worker whose step takes so long."""
    if model in NETWORKS:
        return NETWORKS[model]().profile(step_s, bits // 8)
    if model == "googlenet":  # the backward pass was measured, and the step
        trace = ModelProfile.read(DATA / "googlenet_k80_backward.csv")
        rest = LayerProfile("(forward)", 0, 0.0, forward_s=step_s - trace.backward_s)
        return ModelProfile((rest, *trace.layers))
    found = ModelProfile.read(DATA / f"{model}.graph.txt")
    scale = step_s / found.compute_s
    layers = tuple(
        replace(layer, forward_s=scale * layer.forward_s, backward_s=scale * layer.backward_s)
        for layer in found.layers
    )
    return replace(found, layers=layers)


def profile_of(row: Row) -> ModelProfile:
    """The model of a row."""
    return profile(row.model, row.single_s, row.bits)


# The tables ---------------------------------------------------------------------------------


def summary(found: Sequence[Study]) -> list[list[str]]:
    """Errors by study and method: how many, mean of absolute errors, mean, the worst."""
    table = []
    for study in found:
        for method in study.facts["methods"]:
            errors = [row.error for row in study.rows if row.method == method]
            worst = max(errors, key=abs)
            table.append(
                [
                    study.title,
                    METHODS[method],
                    str(len(errors)),
                    f"{100 * fmean(map(abs, errors)):.0f}%",
                    f"{100 * fmean(errors):+.0f}%",
                    f"{100 * worst:+.0f}%",
                ]
            )
    return table


SUMMARY = ["measurements of", "method", "cells", "mean error", "bias", "worst"]
CHOICES = ["measurements of", "runs", "mean loss", "worst loss"]
SLOPES = ["measurements of", "network", "workers", "ns a byte in training", "from the constants"]
DETAIL = [
    "model",
    "workers",
    "network",
    "ms alone",
    "method",
    "ms measured",
    "ms predicted",
    "error",
]


def _detail(study: Study) -> list[list[str]]:
    return [
        [
            NAMES[row.model] + (" FP16" if row.bits == 16 else ""),
            str(row.workers),
            row.network,
            f"{1e3 * row.single_s:.0f}",
            METHODS[row.method],
            f"{1e3 * row.measured_s:.0f}",
            f"{1e3 * row.predicted_s:.0f}",
            f"{100 * row.error:+.0f}%",
        ]
        for row in study.rows
    ]


def choices(found: Sequence[Study]) -> list[list[str]]:
    """What choosing by the predictions costs, of the studies that measured several methods."""
    return [
        [
            study.title,
            str(len(study.runs())),
            f"{100 * fmean(study.regrets()):.0f}%",
            f"{100 * max(study.regrets()):.0f}%",
        ]
        for study in found
        if len(study.facts["methods"]) > 1
    ]


def slopes(study: Study) -> list[list[str]]:
    """What a byte of one message took, as training showed it, and as the constants have it."""
    table: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for row, measured, predicted in study.slopes():
        table.setdefault((row.network, row.workers), []).append((measured, predicted))
    return [
        [
            network,
            str(workers),
            *(_range([1e9 * value for value in values]) for values in zip(*pairs, strict=True)),
        ]
        for (network, workers), pairs in table.items()
    ]


def _range(values: Sequence[float]) -> str:
    least, most = f"{min(values):.1f}", f"{max(values):.1f}"
    return least if least == most else f"{least} to {most}"


def main() -> int:
    """Print every table, in Markdown."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    print("\n\n".join(tables(studies())))
    return 0


def tables(found: Sequence[Study]) -> list[str]:
    """Every table: errors, choices, costs of a byte, then each study's rows."""
    several = [study for study in found if "single" in study.facts["methods"]]
    return [
        markdown(SUMMARY, summary(found)),
        markdown(CHOICES, choices(found)),
        markdown(SLOPES, [[study.title, *line] for study in several for line in slopes(study)]),
        *(f"{study.title}:\n\n{markdown(DETAIL, _detail(study))}" for study in found),
    ]


if __name__ == "__main__":
    sys.exit(main())
