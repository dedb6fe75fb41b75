"""Checkpoints: a run that is resumed goes on as if it had never stopped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.torch as stock
import numpy as np
import pytest
import torch
from checkpoints import (
    FEEDBACK,
    OPTIMIZERS,
    PLANNED,
    SAVED,
    STEPS,
    Array,
    Case,
    advance,
    assert_equal,
    broadcast_from_rank_0,
    finish,
    load,
    loaded,
    saved,
    state_of,
)
from on_ranks import gather, on_ranks
from problem import OPTIMIZERS as COMMON
from problem import loss_of, make_model, weights_of
from ranks import once, run_ranks
from serial import PipeSGD, make_workers
from torch import nn

import hvd_pipe.torch as hvd

TOLERANCE = 1e-12
two = on_ranks(2, init=hvd.init)
STRATEGIES = ("merged-gradient", "pipe-sgd", "cocod:period=4")

CASES = [
    *(
        Case(strategy, optimizer)
        for strategy in (
            "merged-gradient",
            "pipe-sgd",
            "pipe-sgd:warmup_steps=9",
            "pipe-sgd:prediction=local",
            "pipe-sgd:prediction=previous",
            "cocod:period=4",
            "cocod:period=4,warmup_steps=9",
            "cocod:period=4,momentum=average",
            "cocod:period=4,pull_back=0.6,anchor_momentum=0.7",
            "cocod:period=2,warmup_steps=5,outer=nesterov,outer_lr=0.3",
            "cocod:period=6,warmup_steps=4,fragments=3",
            "cocod:period=4,fragments=2,outer=nesterov",
            "cocod:period=3,momentum=average,weights=3/1",
        )
        for optimizer in (("momentum", "adam") if strategy in STRATEGIES else ("momentum",))
    ),
    *(
        Case(strategy, "momentum", FEEDBACK)
        for strategy in (
            "merged-gradient:plan=single",  # another plan would mean other roundings
            *STRATEGIES[1:],
            "pipe-sgd:warmup_steps=9",
            "cocod:period=4,warmup_steps=9",
            "cocod:period=4,fragments=2",
            "cocod:period=2,weights=3/1",
        )
    ),
    Case("cocod:period=4,fragments=2,outer=nesterov", "adam", saved=4),
    Case("merged-gradient", saved=PLANNED),
    Case("merged-gradient", compression=FEEDBACK, saved=PLANNED),
    Case("cocod:period=4", saved=8),  # at the border of two rounds
    Case("pipe-sgd", saved=1),  # before the first update: the optimizer has no state
    Case("pipe-sgd:prediction=local", saved=1),
]

ON_RANK_0 = [
    Case("pipe-sgd", "adam"),
    Case("pipe-sgd:warmup_steps=9"),
    Case("merged-gradient", saved=PLANNED),
]
"""Saved and loaded on rank 0 alone, and broadcast; `test_class_alone` has more."""

LED = [Case("pipe-sgd:prediction=local", optimizer) for optimizer in ("momentum", "adam")]
"""The same, where each rank's model leads elsewhere: one gradient is computed at rank 0's."""

DRAINED = [
    Case("cocod:period=4", "sgd"),
    Case("cocod:period=4,momentum=average", "momentum"),
    Case("cocod:period=4", "momentum"),
]
"""The same after ``synchronize()``; the last one's momenta are rank 0's from then on."""

MOVED = [
    *(Case(strategy, optimizer) for strategy in STRATEGIES[:2] for optimizer in COMMON),
    Case("pipe-sgd:warmup_steps=9"),
    Case("pipe-sgd:prediction=previous"),
    Case("cocod:period=4"),
    Case("cocod:period=4", "adam"),
]
"""Saved on two ranks (CoCoD: after ``synchronize()``), resumed on others."""


def of_cases(cases: Sequence[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=str)


def continued(
    content: bytes, case: Case, n: int = 2, *, in_flight: bool = True
) -> Sequence[list[Array]]:
    """The rows of n workers in one process that go on from a checkpoint."""
    checkpoint = loaded(content)
    workers = make_workers(case.strategy, n, make_model, OPTIMIZERS[case.optimizer])
    for model, optimizer in zip(workers.models, workers.optimizers, strict=True):
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(loaded(content)["optimizer"])  # which keeps its tensors
    state = checkpoint["optimizer"].get("hvd_pipe") if in_flight else None
    if state is not None and isinstance(workers, PipeSGD):
        # Tensors are numbered as in param_groups.
        groups = workers.optimizers[0].param_groups
        number = {id(p): i for i, p in enumerate(p for group in groups for p in group["params"])}
        order = [number[id(p)] for p in workers.models[0].parameters()]
        tensors = state["tensors"]
        if "pending" in tensors:
            workers._pending = [tensors["pending"][i] for i in order]
        if "weights" in tensors:
            workers._true = [[tensors["weights"][i] for i in order] for _ in range(n)]
        workers._steps = case.saved
    for step in range(case.saved, case.steps):
        workers.backward(loss_of, step)
        workers.step()
        workers.record()
    workers.synchronize()
    workers.record()
    return list(workers.trajectory)


def assert_close(mine: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.array(mine), np.array(wanted), rtol=0, atol=TOLERANCE)


def rank_0s(content: bytes) -> bytes:
    return gather(content)[0]


@two
@of_cases(CASES)
def test_each_rank_goes_on_from_its_own_file(case: Case) -> None:
    """Two runs may measure other plans: after that, the run that is saved is the undisturbed one.

    A rank may also make states alone, which changes nothing.
    """
    model, optimizer = case.start()
    begun = advance(model, optimizer, range(case.saved))
    content = saved(model, optimizer)
    whole = [*begun, *finish(case, model, optimizer)]
    model, optimizer = case.start(seed=8)
    assert load(model, optimizer, content) == []
    assert_equal([*begun, *finish(case, model, optimizer)], whole)
    if case.saved == PLANNED:
        return
    for saves in (False, True):
        model, optimizer = case.start()
        rows = []
        for number in range(case.steps):
            rows += advance(model, optimizer, [number])
            if saves and hvd.rank() == 0:
                saved(model, optimizer)
        optimizer.synchronize()
        assert_equal([*rows, weights_of(model), *state_of(optimizer)], whole)


@two
@pytest.mark.parametrize("before", [0, 3])
@of_cases([*ON_RANK_0, *DRAINED[:-1]])
def test_all_ranks_go_on_from_what_rank_0_has_loaded(case: Case, before: int) -> None:
    whole, resumed, _ = broadcast_from_rank_0(case, hvd, before, case in DRAINED)
    assert_equal(resumed, whole)


@two
@pytest.mark.parametrize("before", [0, 3])
@of_cases([DRAINED[-1], *LED])
def test_what_is_local_is_rank_0s_after_a_broadcast(case: Case, before: int) -> None:
    """CoCoD's local momenta (`synchronize()` makes models equal), a model that leads."""
    _, resumed, content = broadcast_from_rank_0(case, hvd, before, case in DRAINED)
    rows = case.steps - case.saved + 1
    assert_close(resumed[:rows], continued(content, case)[hvd.rank()])


def start_stock() -> tuple[nn.Module, Any]:
    model = make_model()
    plain = OPTIMIZERS["momentum"](model)
    return model, stock.DistributedOptimizer(plain, model.named_parameters())


@two
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stock_horovods_checkpoint_loads_here(strategy: str) -> None:
    model, optimizer = start_stock()
    advance(model, optimizer, range(SAVED))
    content = saved(model, optimizer)
    theirs = advance(model, optimizer, range(SAVED, STEPS))
    model, optimizer = Case(strategy).start(seed=8)
    advance(model, optimizer, range(50, 53))  # what is in flight then is forgotten
    warned = load(model, optimizer, content)
    rows = advance(model, optimizer, range(SAVED, STEPS))
    optimizer.synchronize()
    wanted = continued(rank_0s(content), Case(strategy))[hvd.rank()]
    assert_close([*rows, weights_of(model)], wanted)
    if strategy == "merged-gradient":
        assert warned == []
        assert_close(rows, theirs)
    else:
        assert len(warned) == 1
        assert "holds nothing in flight" in warned[0]


def check_same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Ours has one more key."""
    assert set(ours) - set(theirs) == {"hvd_pipe"}
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, values in ours["state"].items():
        for key, value in values.items():
            other = theirs["state"][number][key]
            assert torch.equal(value, other) if torch.is_tensor(value) else value == other


@two
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_of_ours_loads_into_others(strategy: str) -> None:
    """Into stock Horovod, which goes on from it, and into plain torch."""
    model, optimizer = Case(strategy).start()
    advance(model, optimizer, range(SAVED))
    content = rank_0s(saved(model, optimizer))
    ours = loaded(content)["optimizer"]
    model, theirs = start_stock()
    model.load_state_dict(loaded(content)["model"])
    for other in (theirs, OPTIMIZERS["momentum"](make_model())):
        other.load_state_dict(loaded(content)["optimizer"])
        check_same_state(ours, other.state_dict())
    wanted = continued(content, Case("merged-gradient"), in_flight=False)[hvd.rank()]
    assert_close(advance(model, theirs, range(SAVED, STEPS)), wanted[:-1])
    if strategy == "pipe-sgd":  # a checkpoint has the plain layout, plain values and tensors
        assert set(ours) == {"state", "param_groups", "hvd_pipe"}
        pending = ours["hvd_pipe"]["tensors"]["pending"]
        assert sorted(pending) == list(range(6))
        assert all(torch.is_tensor(tensor) for tensor in pending.values())


@two
@pytest.mark.parametrize(
    ("strategy", "other"),
    [
        ("pipe-sgd", "merged-gradient"),
        ("pipe-sgd", "cocod:period=4"),
        ("merged-gradient", "pipe-sgd"),
    ],
)
def test_another_strategy_starts_clean(strategy: str, other: str) -> None:
    """It warns of what is lost, which under merged-gradient is nothing."""
    model, optimizer = Case(strategy).start()
    advance(model, optimizer, range(SAVED))
    content = rank_0s(saved(model, optimizer))
    model, optimizer = Case(other).start(seed=8)
    warned = load(model, optimizer, content)
    rows = advance(model, optimizer, range(SAVED, STEPS))
    optimizer.synchronize()
    wanted = continued(content, Case(other), 2, in_flight=False)[hvd.rank()]
    assert_close([*rows, weights_of(model)], wanted)
    if strategy == "merged-gradient":
        assert warned == []
    else:
        assert len(warned) == 1
        assert f"was saved under {strategy.partition(':')[0]!r}" in warned[0]


# From two ranks to another number: a job saves, and one with other ranks goes on.


def save_all() -> dict[Case, bytes]:
    hvd.init()
    files = {}
    for case in MOVED:
        model, optimizer = case.start()
        advance(model, optimizer, range(case.saved))
        if case.strategy.startswith("cocod"):
            optimizer.synchronize()
        files[case] = saved(model, optimizer)
    return files


def go_on_all(files: dict[Case, bytes]) -> dict[Case, list[Array]]:
    hvd.init()
    ends = {}
    for case, content in files.items():
        model, optimizer = case.start(seed=8)
        load(model, optimizer, content)
        rows = advance(model, optimizer, range(case.saved, case.steps))
        optimizer.synchronize()
        ends[case] = [*rows, weights_of(model)]
    return ends


files = once(lambda: run_ranks(2, save_all)[0])
moved = once(lambda: run_ranks(1, go_on_all, files()))


@pytest.mark.parametrize("case", MOVED, ids=str)
def test_another_number_of_ranks_goes_on(case: Case) -> None:
    [ends] = moved()
    assert_close(ends[case], continued(files()[case], case, 1)[0])
