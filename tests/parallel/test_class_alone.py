"""A script that changes nothing but the class of its optimizer: all else is Horovod's own."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import horovod.torch
import numpy as np
import pytest
import torch
import workers_class_alone as job
from cases import of_case
from on_ranks import on_ranks
from ranks import once, run_ranks
from workers_resume import Case

import hvd_pipe.torch

results = once(lambda: run_ranks(2, job.run, timeout=150))
restarts = once(lambda: run_ranks(2, job.run_restarts, timeout=120))


def assert_equal(one: list[job.Array], other: list[job.Array]) -> None:
    """Bit for bit."""
    assert len(one) == len(other)
    wrong = [
        i for i, (x, y) in enumerate(zip(one, other, strict=True)) if not np.array_equal(x, y)
    ]
    assert not wrong, f"rows {wrong} of {len(one)} differ"


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("case", job.RESUMED, ids=str)
def test_a_state_that_rank_0_alone_has_loaded(case: Case, before: int) -> None:
    """Horovod's broadcast made a step on the ranks without a state, and on those only: a hang.

    It does not know of a gradient in flight or of a plan either, which rank 0 then had alone.
    """
    for whole, resumed in of_case([each for _, each in results()], f"{before} before: {case}"):
        assert_equal(resumed, whole)


@pytest.mark.parametrize("name", ["adamw-groups", "sgd"])
def test_a_broadcast_before_the_first_step(name: str) -> None:
    """Horovod's broadcast called step() for a state, which averaged zeros and decayed weights."""
    ranks = of_case([each for _, each in results()], ("fresh", name))
    for before, after, rate, trained in ranks:
        np.testing.assert_array_equal(before, after)
        assert rate == 0.125
        assert not np.array_equal(trained, after)
        np.testing.assert_array_equal(trained, ranks[0][-1])


def test_names_of_parameters() -> None:
    """Scripts read them from ``_parameter_names``, which ours lacked."""
    first, second = of_case([each for _, each in results()], "names")
    assert first == second
    assert len(set(first[0])) == 6
    assert first[1]


def test_step_after_synchronize_is_told_in_horovods_words() -> None:
    """Scripts look for Horovod's words, which ours did not have."""
    for texts in of_case([each for _, each in results()], "warned"):
        assert "optimizer.step() called without optimizer.skip_synchronize()" in texts[0]


@pytest.mark.parametrize("strategy", job.STRATEGIES)
def test_ranks_that_join_after_unlike_steps(strategy: str) -> None:
    """Horovod's join left Pipe-SGD's pending gradient to be waited for, and plans out of step."""
    first, second = (
        tuple(-w / job.LR for w in weights)
        for weights in of_case([each for _, each in results()], ("joined", strategy))
    )
    alone = (job.LATE - job.EARLY) * (1.0 if strategy.startswith("cocod") else 0.5)
    more = float(job.MORE)
    if strategy.startswith("cocod"):
        assert first[1] == second[1]
    else:
        assert first[:2] == (job.EARLY, job.EARLY)
        assert second[:2] == (job.EARLY + alone, job.EARLY + alone)
    assert first[2] == first[1] + more
    assert second[2] == second[1] + more


def test_messages_of_the_scripts_own() -> None:
    for total, weight in of_case([each for _, each in results()], "mixed"):
        assert total == 5 * (1.0 + 1.0)
        assert -weight / job.LR == 5


def test_init_once_more() -> None:
    assert of_case([each for _, each in results()], "init again") == [-6 * job.LR] * 2


def test_ranks_watch_each_other_from_the_first_optimizer_on() -> None:
    """hvd_pipe.torch.init() began to watch, which such a script does not call."""
    assert all(watches for watches, _ in results())


@pytest.mark.parametrize("case", job.RESTARTED, ids=str)
def test_horovod_may_end_and_start_again(case: Case) -> None:
    """An optimizer went on with messages of a Horovod that had ended."""
    for whole, rows in of_case(restarts(), str(case)):
        assert_equal(rows, whole)


def test_ranks_watch_each_other_again() -> None:
    assert all(result["watched"] for result in restarts())


def gradient_of_the_mean(hvd: Any, x: torch.Tensor) -> Any:
    x = x.requires_grad_()
    (hvd.allreduce(x, name="forward") * torch.ones(2)).sum().backward()
    return x.grad


COLLECTIVES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "allgather": lambda hvd, x: hvd.allgather(x),
    "allreduce": lambda hvd, x: hvd.allreduce(x),
    "allreduce, in place": lambda hvd, x: hvd.allreduce_(x),
    "allreduce, its gradient": gradient_of_the_mean,
    "alltoall": lambda hvd, x: hvd.alltoall(x),
    "broadcast": lambda hvd, x: hvd.broadcast(x, 1),
    "grouped allgather": lambda hvd, x: hvd.grouped_allgather([x, x])[1],
    "grouped allreduce": lambda hvd, x: hvd.grouped_allreduce([x, x])[1],
    "grouped reducescatter": lambda hvd, x: hvd.grouped_reducescatter([x, x])[1],
    "reducescatter": lambda hvd, x: hvd.reducescatter(x),
}
RESULTS = {
    "allgather": ([1, 1, 3, 3], [1, 1, 3, 3]),
    "allreduce, its gradient": ([1, 1], [1, 1]),
    "alltoall": ([1, 3], [1, 3]),
    "broadcast": ([3, 3], [3, 3]),
    "grouped allgather": ([1, 1, 3, 3], [1, 1, 3, 3]),
    "grouped reducescatter": ([2], [2]),
    "reducescatter": ([2], [2]),
}


@on_ranks(2, init=horovod.torch.init, timeout=60)
@pytest.mark.parametrize("library", [horovod.torch, hvd_pipe.torch], ids=lambda m: m.__name__)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_unnamed_collectives_after_unlike_numbers_of_messages(
    name: str, library: ModuleType
) -> None:
    """Horovod named them by a number that counts all messages, ours too: the ranks waited."""
    hvd: Any = library
    parameter = torch.nn.Parameter(torch.zeros(1))
    hvd_pipe.torch.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1))

    def send() -> int:
        return int(horovod.torch.allreduce_async(torch.ones(1), name="a message of ours"))

    handle = send() if hvd.rank() == 0 else None
    result = COLLECTIVES[name](hvd, torch.full((2,), 1.0 + 2 * hvd.rank()))
    handle = send() if handle is None else handle
    assert horovod.torch.synchronize(handle) == 1
    values = result[0] if isinstance(result, tuple) else result
    assert values.tolist() == RESULTS.get(name, ([2, 2], [2, 2]))[hvd.rank()]
