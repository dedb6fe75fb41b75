"""The study of convergence: its runs and its intervals. `docs/tables.py` writes its page."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import convergence
import convergence_rank as rank
import convergence_report as report

from hvd_pipe.strategy import parse


def result(contestant: str, seed: int, loss: float) -> dict[str, Any]:
    curve = [[60, 1.0, 2.0, 0.5, 0.0], [120, 0.5, loss, 0.9, 0.0]]
    task = {"task": "images", "workers": 2, "lr": 0.02, "steps": 120}
    return {**task, "contestant": contestant, "seed": seed, "curve": curve}


def test_an_interval_is_that_of_student() -> None:
    mean, reach = report.interval([1.0, 2.0, 3.0])
    assert mean == pytest.approx(2.0)
    assert reach == pytest.approx(4.303 / math.sqrt(3))
    assert math.isnan(report.interval([1.0, 2.0])[1])


@pytest.mark.parametrize("task", convergence.TASKS)
def test_all_methods_can_be_asked_for(task: str) -> None:
    for contestant in convergence.TASKS[task].contestants:
        name = contestant.partition("+")[0]
        if name.partition(":")[0] not in convergence.OTHERS:
            parse(name)


def test_runs_with_other_data_are_not_mixed() -> None:
    one, other = (
        result("horovod", seed, 1.0) | {"data": data} for seed, data in ((1, "a"), (2, "b"))
    )
    convergence.check_data([one, one, other | {"task": "text"}])
    with pytest.raises(SystemExit, match="images: some runs had the data a, others had b"):
        convergence.check_data([one, other])


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_share_one_batch(workers: int) -> None:
    """All methods see the same samples, whatever the number of workers."""
    inputs = torch.arange(1000)
    data = rank.Data((inputs, 2 * inputs), (inputs, inputs), "")
    whole = data.batch(7, 3, 16)
    shares = [data.share(7, 3, 16, one, workers) for one in range(workers)]
    for part in (0, 1):
        assert torch.equal(torch.cat([share[part] for share in shares]), whole[part])


def test_a_worker_with_unlike_data_sees_its_own_shard() -> None:
    inputs = torch.arange(1000)
    shards = [torch.arange(500), torch.arange(500, 1000)]
    data = rank.Data((inputs, inputs), (inputs, inputs), "", shards)
    first, second = (data.share(7, 3, 16, one, 2)[0] for one in range(2))
    assert len(first) == len(second) == 8
    assert int(first.max()) < 500 <= int(second.min())


def test_sharpness_is_the_largest_eigenvalue() -> None:
    """Of cross-entropy on a linear model of two classes: the Hessian is small enough to write."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    batch = torch.randn(20, 3), torch.randint(2, (20,))
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach()

    def loss(flat: torch.Tensor) -> torch.Tensor:
        weight, bias = flat[:6].view(2, 3), flat[6:]
        return rank.loss_of(batch[0] @ weight.T + bias, batch[1])

    hessian = torch.autograd.functional.hessian(loss, start)
    want = float(torch.linalg.eigvalsh(hessian).max())
    assert rank.sharpness(model, batch, 200) == pytest.approx(want, rel=1e-4)
