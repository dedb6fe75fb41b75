"""A script that changes nothing but the class of its optimizer: all else is Horovod's own."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from checkpoints import (
    FEEDBACK,
    PLANNED,
    Case,
    advance,
    assert_equal,
    broadcast_from_rank_0,
)
from on_ranks import gather, on_ranks
from problem import make_model, one_weight, train, update_one, updates_of, weights_of

import hvd_pipe.torch
from hvd_pipe.runtime.watch import rank_side
from hvd_pipe.torch import DistributedOptimizer

EARLY, LATE, MORE = 5, 25, 16  # a plan is due between the first two, and in the last, if none is
BEFORE, AFTER = 7, 20  # steps before hvd.shutdown(), and after hvd.init()

pytestmark = on_ranks(2, init=hvd.init, timeout=60)


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize(
    "case",
    [
        *(
            Case(strategy, optimizer)
            for strategy in ("merged-gradient", "pipe-sgd", "pipe-sgd:prediction=previous")
            for optimizer in ("momentum", "adam", "adamw-groups", "sgd")
        ),
        Case("merged-gradient", saved=PLANNED),
        Case("cocod:period=4", "sgd", saved=8),
    ],
    ids=str,
)
def test_a_state_that_rank_0_alone_has_loaded(case: Case, before: int) -> None:
    """Horovod's broadcast made a step on the ranks without a state, and on those only: a hang.

    It does not know of a gradient in flight or of a plan either, which rank 0 then had alone.
    """
    drain = case.strategy.startswith("cocod")
    whole, resumed, _ = broadcast_from_rank_0(case, hvd, before, drain)
    assert_equal(resumed, whole)


@pytest.mark.parametrize("name", ["adamw-groups", "sgd"])
def test_a_broadcast_before_the_first_step(name: str) -> None:
    """Horovod's broadcast called step() for a state, which averaged zeros and decayed weights."""
    model, optimizer = Case("merged-gradient", name).start()
    if hvd.rank() == 0:
        optimizer.param_groups[0]["lr"] = 0.125
    before = weights_of(model)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.125
    np.testing.assert_array_equal(before, weights_of(model))
    train(model, optimizer, hvd.rank(), steps=2)
    first, second = gather(weights_of(model))
    assert not np.array_equal(before, first)
    np.testing.assert_array_equal(first, second)


def test_step_after_synchronize_is_told_in_horovods_words() -> None:
    """Scripts look for Horovod's words, which ours did not have."""
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(plain, model.named_parameters())
    model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
    optimizer.synchronize()
    words = r"optimizer\.step\(\) called without optimizer\.skip_synchronize\(\)"
    with pytest.warns(UserWarning, match=words):
        optimizer.step()


@pytest.mark.parametrize("strategy", ["merged-gradient", "pipe-sgd", "cocod:period=2"])
def test_ranks_that_join_after_unlike_steps(strategy: str) -> None:
    """Horovod's join left Pipe-SGD's pending gradient to be waited for, and plans out of step."""
    model, optimizer = one_weight(strategy)
    update_one(model, optimizer, LATE if hvd.rank() else EARLY)
    hvd.join()
    optimizer.synchronize()
    before = updates_of(model)
    update_one(model, optimizer, MORE)
    optimizer.synchronize()
    assert updates_of(model) == before + MORE


def test_ranks_watch_each_other_from_the_first_optimizer_on() -> None:
    """hvd_pipe.torch.init() began to watch, which such a script does not call."""
    one_weight("merged-gradient")
    assert rank_side._watch is not None


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


@pytest.mark.parametrize("library", [hvd, hvd_pipe.torch], ids=lambda m: m.__name__)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_unnamed_collectives_after_unlike_numbers_of_messages(
    name: str, library: ModuleType
) -> None:
    """Horovod named them by a number that counts all messages, ours too: the ranks waited."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1))

    def send() -> int:
        return int(hvd.allreduce_async(torch.ones(1), name="a message of ours"))

    handle = send() if hvd.rank() == 0 else None
    result = COLLECTIVES[name](library, torch.full((2,), 1.0 + 2 * hvd.rank()))
    handle = send() if handle is None else handle
    assert hvd.synchronize(handle) == 1
    values = result[0] if isinstance(result, tuple) else result
    assert values.tolist() == RESULTS.get(name, ([2, 2], [2, 2]))[hvd.rank()]


# Horovod can start again over MPI, if somebody else has initialised that. Over Gloo it may find
# where the other ranks listened the time before, and abort.


def init() -> None:
    importlib.import_module("mpi4py.MPI")
    hvd.init()


@on_ranks(2, init=init)
@pytest.mark.parametrize(
    "case",
    [
        Case("merged-gradient"),
        Case("pipe-sgd", "adam"),
        Case("cocod:period=3"),
        Case("pipe-sgd", compression=FEEDBACK),
    ],
    ids=str,
)
def test_horovod_may_end_and_start_again(case: Case) -> None:
    """An optimizer went on with messages of a Horovod that had ended."""
    model, optimizer = case.start()
    whole = advance(model, optimizer, range(BEFORE + AFTER))
    optimizer.synchronize()
    whole.append(weights_of(model))
    model, optimizer = case.start()
    rows = advance(model, optimizer, range(BEFORE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hvd.shutdown()
    optimizer.state_dict()
    hvd.init()
    rows += advance(model, optimizer, range(BEFORE, BEFORE + AFTER))
    optimizer.synchronize()
    assert_equal([*rows, weights_of(model)], whole)
    assert rank_side._watch is not None  # ranks watch each other again
