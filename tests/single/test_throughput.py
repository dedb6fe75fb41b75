"""The throughput benchmark: its limits and its turns; the race itself needs root."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import contestants
import models
import throughput
import throughput_rank
import throughput_report as report

MIB = 2**20
COMPUTE_S, COMM_S = 0.12, 0.48


def row(contestant: str, seconds: float, team: str = "ours") -> dict[str, Any]:
    return {
        "team": team,
        "contestant": contestant,
        "seconds": seconds,
        "least_s": seconds,
        "most_s": seconds,
        "cpu_s": 0.01,
        "sent_bytes": 4.5 * MIB,
    }


def cell(**changed: Any) -> dict[str, Any]:
    return {
        "model": "densenet121",
        "workers": 4,
        "ratio": 4.0,
        "compute": "emulated",
        "backend": "gloo",
        "settings": {"compute_ms": 120.0},
        "gradient_bytes": 3 * MIB,
        # The keys are text: a cell may come from a file.
        "all_reduce_s": {str(MIB * 3): COMM_S, str(MIB * 3 // 2): COMM_S / 2},
        "exchange_s": {str(MIB * 3 // 2): 0.30, "798720": 0.16},
        "reached_ratio": 4.0,
        "rows": [
            row("single", COMPUTE_S, "ddp"),
            row("conventional", 0.62, "stock"),
            row("horovod", 0.55, "stock"),
            row("horovod", 0.50, "fusion=0,cycle=1"),
            row("merged-gradient", 0.52),
            row("pipe-sgd", 0.50),
            row("pipe-sgd+int8", 0.20),
            row("cocod:period=8", 0.125),
            row("cocod:period=2", 0.26),
        ],
        **changed,
    }


@pytest.mark.parametrize(
    ("contestant", "limit"),
    [
        ("single", COMPUTE_S),
        ("conventional", COMPUTE_S + COMM_S),
        ("horovod", COMPUTE_S / 3 + COMM_S),
        ("ddp+fp16", COMPUTE_S / 3 + COMM_S / 2),
        ("merged-gradient", COMPUTE_S / 3 + COMM_S),
        ("merged-gradient+bf16", COMPUTE_S / 3 + 0.30),
        ("pipe-sgd", COMM_S),
        ("pipe-sgd:bucket_bytes=786432+int8", 0.16),
        ("cocod:period=2", COMM_S / 2),
        ("cocod:period=8", COMPUTE_S),
        ("ddp:post-local", COMPUTE_S + COMM_S / 4),
    ],
)
def test_a_limit_is_of_the_method_and_the_codec(contestant: str, limit: float) -> None:
    assert report.limit_s(cell(), contestant) == pytest.approx(limit)


@pytest.mark.parametrize(
    ("contestant", "least", "most"),
    [
        # COMM_S is several times COMPUTE_S: after the first gradient, the link never rests.
        ("merged-gradient:overlap=forward", COMM_S, 1.02 * COMM_S),
        ("merged-gradient", COMM_S + COMPUTE_S / 3, 1.02 * (COMM_S + COMPUTE_S / 3)),
        ("pipe-sgd", COMM_S, 1.02 * COMM_S),
        ("cocod:period=8", COMPUTE_S, 1.02 * COMPUTE_S),
    ],
)
def test_a_prediction_is_of_the_emulated_layers_and_the_measured_line(
    contestant: str, least: float, most: float
) -> None:
    assert least <= report.predicted_s(cell(), contestant) <= most


def test_a_run_goes_on_only_with_cells_of_its_own_settings(tmp_path: Path) -> None:
    grid = tmp_path / "grid.json"
    options = throughput.parse_arguments(["--json", str(grid), "--resume"])
    assert throughput.kept(options) == []
    throughput_rank.write(grid, [cell(settings=throughput.settings_of(options))])  # type: ignore[arg-type]
    assert throughput.todo(options, throughput.kept(options)).count(GRID_CELL) == 0
    for changed in ("--rounds", "--gradient-bytes"):
        other = throughput.parse_arguments(["--json", str(grid), "--resume", changed, "5"])
        assert throughput.todo(other, throughput.kept(other)).count(GRID_CELL) == 1


GRID_CELL = throughput.Cell("densenet121", 4, 4.0)


def test_a_turn_is_of_whole_periods() -> None:
    assert throughput.steps_for("pipe-sgd", 4.8) == 5
    assert throughput.steps_for("pipe-sgd", 0.3) == 2
    assert throughput.steps_for("cocod:period=8", 4.8) == 8
    assert throughput.steps_for("cocod:period=8+int8", 17.0) == 16
    assert throughput.steps_for("ddp:post-local", 4.8) == 4
    assert throughput.steps_for("cocod", 3.0) == 4  # its own default
    assert throughput.steps_for("cocod:pull_back=0.6,period=3+int8", 3.0) == 3


def test_a_turn_waits_for_messages_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn once began right after a barrier, and models of 8 steps hid any communication.

    Here a message takes 100 steps' time, so a step must take 12.5.
    """
    now = arrives = steps = 0

    def step() -> None:
        nonlocal now, arrives, steps
        now, steps = now + 1, steps + 1
        if steps % 8 == 0:
            now = max(now, arrives)
            arrives = now + 100

    def barrier() -> None:
        nonlocal now
        now = max(now, arrives)

    monkeypatch.setattr(throughput_rank, "time", SimpleNamespace(perf_counter=lambda: now))
    rank = object.__new__(throughput_rank.Rank)
    rank.contestants = {"cocod:period=8": contestants.Contestant(step)}
    rank.barrier = barrier
    assert rank.race("cocod:period=8", 8)["seconds"] == 12.5


# nightly: networks of hundreds of modules, which take as many seconds as all else here
DEEP = dict.fromkeys(("resnet50", "densenet121"), pytest.mark.nightly)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=DEEP.get(name, ())) for name in models.MODELS]
)
def test_an_emulated_model_has_the_parameters_of_the_real_one(name: str) -> None:
    with torch.device("meta"):
        real, _ = models.MODELS[name]()
    sizes = {path: 4 * parameter.numel() for path, parameter in real.named_parameters()}
    layers = models.profile(name).layers
    assert {layer.name: layer.gradient_bytes for layer in layers} == sizes
    assert len(layers) == len(sizes)
    model = models.emulated(name, 0.001, 3 * MIB)
    assert sum(4 * p.numel() for p in model.parameters()) == pytest.approx(3 * MIB, rel=0.01)


def test_attention_is_emulated_where_it_happens() -> None:
    """Its output's weights, which PyTorch uses without calling their module, once came last."""
    order = [layer.name for layer in models.profile("transformer").layers]
    inside = order.index("encoder.layers.0.self_attn.out_proj.weight")
    assert inside < order.index("encoder.layers.0.linear1.weight")
