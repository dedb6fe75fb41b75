"""What belongs to one rank, a codec's residuals, is restored on that rank alone."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from on_ranks import gather, on_ranks
from problem import OPTIMIZERS, loss_of, make_model
from torch import nn

import hvd_pipe.torch as hvd

two = on_ranks(2, init=hvd.init)

STRATEGIES = (
    "merged-gradient:plan=single",
    "pipe-sgd",
    "pipe-sgd:warmup_steps=20",
    "cocod:period=2",
    "cocod:period=2,warmup_steps=20",
)
STEPS = 5

Labelled = dict[str, list[Any]]


CODECS = {
    "none": hvd.Compression.none,
    "fp16": hvd.Compression.fp16,
    "bf16": hvd.BF16(error_feedback=True),
    "int8": hvd.Int8(chunk=8, error_feedback=True),
}


def trained(strategy: str, codec: str = "int8") -> tuple[nn.Module, Any]:
    """A model with an optimizer whose codec has lost something, on each rank something else."""
    model = make_model(torch.float32)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model),
        model.named_parameters(),
        compression=CODECS[codec],
        strategy=strategy,
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
    return model, optimizer


def lost(optimizer: Any) -> Labelled:
    """Copies of the residuals, by label."""
    tensors = optimizer._engine().state().tensors
    return {
        label: [None if each is None else each.clone() for each in tensors[label]]
        for label in ("own.sent", "own.reduced")
    }


def load(strategy: str, state: Any) -> Any:
    _, optimizer = trained(strategy)
    optimizer.load_state_dict(copy.deepcopy(state))
    return optimizer


def from_own_file(strategy: str, optimizer: Any, _: nn.Module) -> Any:
    return load(strategy, optimizer.state_dict())


def from_a_plain_state(strategy: str, optimizer: Any, _: nn.Module) -> Any:
    state = optimizer.state_dict()
    del state["hvd_pipe"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it holds nothing in flight
        return load(strategy, state)


def from_rank_0s_file(strategy: str, optimizer: Any, _: nn.Module) -> Any:
    return load(strategy, gather(optimizer.state_dict())[0])


def from_rank_0s_pickle(_: str, optimizer: Any, model: nn.Module) -> Any:
    return pickle.loads(gather(pickle.dumps((model, optimizer)))[0])[1]


def after_a_broadcast(_: str, optimizer: Any, __: nn.Module) -> Any:
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return optimizer


def on_new_workers(_: str, optimizer: Any, model: nn.Module) -> Any:
    """As in an elastic job, after hosts have come or gone."""
    hvd.elastic.TorchState(model=model, optimizer=optimizer).sync()
    return optimizer


WAYS: dict[str, tuple[Callable[[str, Any, nn.Module], Any], tuple[bool, bool]]] = {
    # and whether each rank has its residuals after that
    "own file": (from_own_file, (True, True)),
    "plain state": (from_a_plain_state, (False, False)),
    "rank 0's file": (from_rank_0s_file, (True, False)),
    "rank 0's pickle": (from_rank_0s_pickle, (True, False)),
    "broadcast": (after_a_broadcast, (True, False)),
    "new workers": (on_new_workers, (False, False)),
}


@two
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_residuals_stay_with_their_rank(strategy: str, way: str) -> None:
    model, optimizer = trained(strategy)
    before = lost(optimizer)
    everyone = gather(before)
    for label in before:
        assert all(any(each.any() for each in one[label]) for one in everyone)
    go_on, keeps = WAYS[way]
    after = lost(go_on(strategy, optimizer, model))
    assert after.keys() == before.keys()
    for label, residuals in after.items():
        for now, then in zip(residuals, before[label], strict=True):
            expected = then if keeps[hvd.rank()] else torch.zeros_like(then)
            np.testing.assert_array_equal(now, expected, label)


@two
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rank_0s_file_on_all_ranks(strategy: str, codec: str) -> None:
    """Replicas are equal afterwards, and what a codec has lost on rank 0 is sent once."""
    model, optimizer = trained(strategy, codec)
    weights, state = gather((model.state_dict(), optimizer.state_dict()))[0]
    before = optimizer._engine().state().tensors
    model, optimizer = trained(strategy, codec)
    model.load_state_dict(copy.deepcopy(weights))
    optimizer.load_state_dict(copy.deepcopy(state))
    after = optimizer._engine().state().tensors
    labels = [label for label in before if label.startswith("own.")]
    assert bool(labels) == (codec in {"bf16", "int8"})
    for label in labels:
        for now, then in zip(after[label], before[label], strict=True):
            expected = then if hvd.rank() == 0 else torch.zeros_like(then)
            np.testing.assert_array_equal(now, expected, label)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
    optimizer.synchronize()
    first, other = gather([p.detach().numpy() for p in model.parameters()])
    for one, another in zip(first, other, strict=True):
        np.testing.assert_array_equal(one, another)
