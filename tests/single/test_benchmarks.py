"""The benchmarks' arithmetic: verdicts, limits, shares. `docs/tables.py` writes their pages."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import contestants
import convergence_rank
import models
import published_models
import throughput
import throughput_rank
import throughput_report as report
from kill_loop_check import KINDS, Outcome, Run, named_by_launcher, named_by_ranks, schedule
from soak import Moment
from soak import Run as Soak

MIB = 2**20
COMPUTE_S, COMM_S = 0.12, 0.48
CELL: dict[str, Any] = {
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
    "rows": [{"team": "ddp", "contestant": "single", "seconds": COMPUTE_S}],
}


@pytest.mark.parametrize(
    ("contestant", "limit"),
    [
        ("single", COMPUTE_S),
        ("conventional", COMPUTE_S + COMM_S),
        ("ddp+fp16", COMPUTE_S / 3 + COMM_S / 2),
        ("merged-gradient:overlap=backward", COMPUTE_S / 3 + COMM_S),
        ("merged-gradient", COMM_S),
        ("pipe-sgd:bucket_bytes=786432+int8", 0.16),
        ("cocod:period=2", COMM_S / 2),
        ("cocod:period=8", COMPUTE_S),
        ("ddp:post-local", COMPUTE_S + COMM_S / 4),
    ],
)
def test_a_limit_is_of_the_method_and_the_codec(contestant: str, limit: float) -> None:
    assert report.limit_s(CELL, contestant) == pytest.approx(limit)
    if contestant == "merged-gradient:overlap=backward":
        assert limit <= report.predicted_s(CELL, contestant) <= 1.02 * limit


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
    assert throughput.steps_for("cocod:period=8+int8", 17.0) == 16  # whole periods


def test_an_emulated_model_has_the_parameters_of_the_real_one() -> None:
    with torch.device("meta"):
        real, _ = models.MODELS["transformer"]()
    sizes = {path: 4 * parameter.numel() for path, parameter in real.named_parameters()}
    layers = models.profile("transformer").layers
    assert {layer.name: layer.gradient_bytes for layer in layers} == sizes
    model = models.emulated("transformer", 0.001, 3 * MIB)
    assert sum(4 * p.numel() for p in model.parameters()) == pytest.approx(3 * MIB, rel=0.01)
    network = published_models.NETWORKS["resnet152"]()  # MG-WFBP, arXiv 1912.09268, table 4
    assert (len(network.tensors), round(network.parameters / 1e6, 1)) == (467, 60.2)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_of_the_study_of_convergence_share_one_batch(workers: int) -> None:
    inputs = torch.arange(1000)
    data = convergence_rank.Data((inputs, 2 * inputs), (inputs, inputs), "")
    whole = data.batch(7, 3, 16)
    shares = [data.share(7, 3, 16, one, workers) for one in range(workers)]
    for part in (0, 1):
        assert torch.equal(torch.cat([share[part] for share in shares]), whole[part])


def test_the_soak_names_what_grows_and_what_is_unlike() -> None:
    flat = [Moment(100 * i, 300.0, 80, 9, 20, 0, 0.0, True, 1.0 / i) for i in range(1, 11)]
    assert Soak("pipe-sgd", 4, 1.0, flat).faults() == []
    wrong = [replace(flat[0], alike=False, spread=1e-7), *flat[1:-1], replace(flat[-1], files=21)]
    faults = " ".join(Soak("pipe-sgd", 4, 1.0, wrong).faults())
    assert "files grew from 20 to 21" in faults
    assert "replicas were unlike at step 100" in faults


GOOD = Outcome("stop", [1], 2.5, 40, 8.4, by_ranks=[1], by_launcher=[2])


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"ended_s": None}, "had not ended"),
        ({"by_ranks": [2]}, "no message named"),
        ({"misnamed": [[0, 2]]}, "named another"),
        ({"left": ["4242: python train.py"]}, "4242: python train.py"),
        ({"kind": "none"}, "nothing had happened"),
    ],
)
def test_the_kill_loop_names_a_bad_outcome(changed: dict[str, Any], word: str) -> None:
    run = Run("restart, mpi, pipe-sgd", {"seed": 1}, [GOOD, replace(GOOD, **changed)], 12, [])
    (wrong,) = run.wrong()
    assert wrong.startswith(f"{run.name}: fault 2 (")
    assert word in wrong
    assert replace(run, outcomes=[GOOD]).wrong() == []


def test_the_kill_loop_reads_what_ranks_and_launchers_say() -> None:
    first = schedule(1, "pipe-sgd", 20, KINDS, 3, (2.0, 6.0))
    assert first == schedule(1, "pipe-sgd", 20, KINDS, 3, (2.0, 6.0))
    assert first != schedule(2, "pipe-sgd", 20, KINDS, 3, (2.0, 6.0))
    said = "hvd_pipe: rank 2 failed because of another: rank 1 on h2 (pid 42) raised Value"
    assert named_by_ranks(said) == [(2, 1)]
    said = "mpirun noticed that process rank 2 with PID 0 on node h3 exited on signal 9"
    assert named_by_launcher(said, ["h1", "h2", "h3"]) == {2}
