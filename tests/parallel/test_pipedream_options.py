"""Options of PyTorch's PipeDream: each does what it says, as the equations have it."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from on_ranks import gather
from pipeline_problem import MODELS, Paired, make_mixed, make_paired, make_sparse, plan
from ranks import run_ranks
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, StepLR
from torch_pipelines import (
    ON,
    Case,
    Result,
    State,
    arrays,
    assert_equal,
    check,
    expected,
    make_engine,
    on_their_ranks,
    reference,
    train,
)

import hvd_pipe.torch as hvd
from hvd_pipe.torch import pipedream

SEED = 11  # of dropout


def shared(folder: Path) -> Path:
    """Rank 0's folder, on all ranks."""
    return Path(gather(folder)[0])


def make_dropping() -> nn.Module:
    torch.manual_seed(12)
    layers = OrderedDict[str, nn.Module](
        conv=nn.Conv1d(2, 4, 3, padding=1, bias=False),
        norm=nn.BatchNorm1d(4),
        drop=nn.Dropout(0.25),
        flatten=nn.Flatten(),
        one=nn.Linear(24, 6, bias=False),
        last_norm=nn.BatchNorm1d(6),
        tanh=nn.Tanh(),
        dropped=nn.Dropout(0.5),
        head=nn.Linear(6, 3),
    )
    return nn.Sequential(layers).double()


MODELS["dropping"] = make_dropping
DROPPING_CUTS = {2: ("one",), 3: ("flatten", "tanh")}


def _dropping(config: str, mode: str, microbatches: int = 1) -> Case:
    return Case(plan(config, DROPPING_CUTS), mode, "momentum", "dropping", microbatches)


RECOMPUTED = {
    "1-1 stash": _dropping("1-1", "stash"),
    "1-1 flush": _dropping("1-1", "flush", 3),
    "1-1 gpipe": _dropping("1-1", "gpipe", 3),
    "1-1-1 stash": _dropping("1-1-1", "stash"),
    "1-1-1 vertical-sync": _dropping("1-1-1", "vertical-sync"),
    "2-1 2bw": _dropping("2-1", "2bw", 4),
    "1-2 stash": _dropping("1-2", "stash"),
    "1-1-1 stash, LSTM": Case(plan("1-1-1"), "stash", "adam"),
}


DAILY_RECOMPUTED = {"1-1 stash", "1-1 gpipe", "1-1-1 vertical-sync", "2-1 2bw", "1-2 stash"}


def assert_same(found: State, wanted: State) -> None:
    """Bit for bit."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert np.array_equal(found[name], value), name


@functools.cache
def seeded(name: str, recompute: bool) -> Result:
    torch.manual_seed(SEED)
    return train(RECOMPUTED[name], recompute=recompute)


@pytest.mark.parametrize("name", on_their_ranks(RECOMPUTED, DAILY_RECOMPUTED))
def test_recomputing_changes_nothing(name: str) -> None:
    """Not the masks of dropout, and running statistics are not updated twice."""
    one, other = seeded(name, recompute=False), seeded(name, recompute=True)
    assert one.losses == other.losses
    for state, same in zip(one.states, other.states, strict=True):
        assert_same(state, same)
    assert one.evaluated == other.evaluated


class _Round(torch.autograd.Function):
    """What a message in bfloat16 makes of activations and gradients."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().to(x.dtype)

    @staticmethod
    def backward(_: Any, g: torch.Tensor) -> torch.Tensor:
        return g.bfloat16().to(g.dtype)


class Round(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Round.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class RoundedPaired(Paired):
    """What goes from the layer "two" to the layer "three" is rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.tanh = Round()

    def forward(self, x: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.two(torch.tanh(self.one(self.flatten(x)))))
        x = self.tanh(x)
        result: torch.Tensor = self.head(torch.tanh(self.three(x)) + self.words(word))
        return result


def make_rounded(case: Case) -> nn.Module:
    """The case's model, with rounding at its cuts."""
    if case.model == "paired":
        model = RoundedPaired().double()
        model.load_state_dict(make_paired().state_dict())
        return model
    rounded = OrderedDict[str, nn.Module]()
    for name, layer in make_sparse().named_children():
        if name in case.plan.cuts:
            rounded[f"before_{name}"] = Round()
        rounded[name] = layer
    return nn.Sequential(rounded)


_SPARSE = {2: ("soft",), 3: ("tanh", "two")}
ROUNDED = {
    "1-1 stash": Case(plan("1-1", _SPARSE), "stash", model="sparse"),
    "1-1 flush": Case(plan("1-1", _SPARSE), "flush", "adam", "sparse", 3),
    "1-1 paired": Case(plan("1-1", {2: ("three",)}), "stash", model="paired"),
    "1-1-1 vertical-sync": Case(plan("1-1-1", _SPARSE), "vertical-sync", model="sparse"),
    "2-1 2bw": Case(plan("2-1", _SPARSE), "2bw", model="sparse", microbatches=4),
}


DAILY_ROUNDED = {"1-1 stash", "1-1 paired", "2-1 2bw"}


@pytest.mark.parametrize("name", on_their_ranks(ROUNDED, DAILY_ROUNDED))
def test_bfloat16_on_the_wire_rounds_at_the_cuts(name: str) -> None:
    """Activations and their gradients, and nothing else: weights and their gradients are exact."""
    case = ROUNDED[name]
    everyone = gather(train(case, wire_dtype="bfloat16"))
    if hvd.rank() == 0:
        wanted = expected(case, make_rounded(case))
        for rank in everyone:
            np.testing.assert_allclose(rank.losses, wanted.losses, rtol=1e-12)
            for state, equation in zip(rank.states, wanted.states, strict=True):
                for key, value in equation.items():
                    np.testing.assert_allclose(
                        state[key], value, rtol=1e-12, atol=1e-12, err_msg=key
                    )
        assert not np.allclose(wanted.losses, expected(case).losses, rtol=1e-9)


def by_epoch(optimizer: Optimizer) -> LRScheduler:
    return StepLR(optimizer, 1, gamma=0.25)


def by_minibatch(optimizer: Optimizer) -> LRScheduler:
    return ExponentialLR(optimizer, 0.8)


OPTIONS: dict[str, tuple[Case, dict[str, Any]]] = {
    "1-2 not scaled": (Case(plan("1-2")), {"scale_lr": False}),
    "2-1 not scaled": (Case(plan("2-1")), {"scale_lr": False}),
    "1-1 by epoch": (Case(plan("1-1")), {"scheduler_fn": by_epoch}),
    "2-1 by epoch": (Case(plan("2-1"), "2bw", "adam", microbatches=4), {"scheduler_fn": by_epoch}),
    "1-1 by minibatch": (
        Case(plan("1-1"), optimizer="sgd"),
        {"scheduler_fn": by_minibatch, "schedule_by": "minibatch"},
    ),
    "2-1 by minibatch": (
        Case(plan("2-1"), optimizer="sgd"),
        {"scheduler_fn": by_minibatch, "schedule_by": "minibatch"},
    ),
    "1-1-1 flush by minibatch": (
        Case(plan("1-1-1"), "flush", microbatches=3),
        {"scheduler_fn": by_minibatch, "schedule_by": "minibatch"},
    ),
    "1-1 clipped": (Case(plan("1-1"), "flush", microbatches=3), {"max_grad_norm": 0.1}),
    "1-1-1 clipped": (Case(plan("1-1-1"), "gpipe", microbatches=3), {"max_grad_norm": 0.1}),
    "2-1 clipped": (Case(plan("2-1"), "flush", microbatches=4), {"max_grad_norm": 0.1}),
    "1-2 clipped": (Case(plan("1-2"), "gpipe", "adam", microbatches=4), {"max_grad_norm": 0.1}),
}
DAILY_OPTIONS = {
    *("1-2 not scaled", "1-1 by epoch", "2-1 by minibatch", "1-1-1 flush by minibatch"),
    *("1-1 clipped", "2-1 clipped"),
}


@pytest.mark.parametrize(
    "name", on_their_ranks({name: case for name, (case, _) in OPTIONS.items()}, DAILY_OPTIONS)
)
def test_options_are_in_the_equations(name: str) -> None:
    case, options = OPTIONS[name]
    found = train(case, **options)
    check(found, case, **options)
    if hvd.rank() == 0:
        assert not np.allclose(found.losses, expected(case).losses, rtol=1e-6)


RESUMED = {
    "1-1 stash": _dropping("1-1", "stash"),
    "2-1 stash": _dropping("2-1", "stash"),
    "1-2 vertical-sync": _dropping("1-2", "vertical-sync"),
    "1-1-1 2bw": dataclasses.replace(_dropping("1-1-1", "2bw", 3), optimizer="adam"),
    "1-1-1 flush": _dropping("1-1-1", "flush", 3),
}


@pytest.mark.parametrize("name", on_their_ranks(RESUMED, {"1-1 stash", "2-1 stash", "1-1-1 2bw"}))
def test_a_resumed_run_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    """With dropout and running statistics, in a new engine that has done something else."""
    case, folder = RESUMED[name], shared(tmp_path)
    torch.manual_seed(SEED + hvd.rank())
    whole = make_engine(case)
    whole.train_epoch(case.data(0))
    whole.save(folder)  # which averages running statistics over replicas
    last = whole.train_epoch(case.data(1)).loss
    torch.manual_seed(SEED + hvd.rank())
    first = make_engine(case)
    first.train_epoch(case.data(0))
    first.save(folder)
    torch.manual_seed(1)
    second = make_engine(case)
    second.train_epoch(case.data(4))  # which loading must undo
    second.load(folder)
    assert second.train_epoch(case.data(1)).loss == last
    assert_same(arrays(second.state_dict()), arrays(whole.state_dict()))


SAVED = {  # by the optimizer
    "momentum": Case(plan("2-1"), "stash"),
    "adam": Case(plan("1-1-1"), "2bw", "adam", microbatches=3),
    "grouped": Case(plan("2-1"), "stash", "grouped"),
}
MOVED = {
    "to 1": Case(plan("1")),
    "to 1-1": Case(plan("1-1")),
    "to 1-1 2bw": Case(plan("1-1"), "2bw", microbatches=3),
    "to 1-2": Case(plan("1-2")),
    "to 3-1": Case(plan("3-1")),
    "to 1-1-1-1": Case(plan("1-1-1-1"), "vertical-sync"),
}


def save(optimizer: str, folder: Path) -> State:
    engine = make_engine(SAVED[optimizer])
    engine.train_epoch(SAVED[optimizer].data(0))
    engine.save(folder)
    return arrays(engine.state_dict())


def check_moved(optimizer: str, name: str, folder: Path) -> None:
    """Go on with what another plan has saved, and compare with the serial reference."""
    case = dataclasses.replace(MOVED[name], optimizer=optimizer)
    engine = make_engine(case)
    engine.load(folder)
    loss = engine.train_epoch(case.data(1)).loss
    state = arrays(engine.state_dict())
    everyone = gather(Result([loss], [state], engine.evaluate(case.unseen()).loss, engine.stage))
    if hvd.rank() == 0:
        first, second = reference(SAVED[optimizer]), reference(case)
        first.train_epoch(SAVED[optimizer].data(0))
        second.take_over(first)
        loss = second.train_epoch(case.data(1))
        state = arrays(second.state_dict())
        wanted = Result([loss], [state], second.evaluate(case.unseen()), -1)
        for rank in everyone:
            assert_equal(rank, wanted)


@ON[3]
@pytest.mark.parametrize("optimizer", SAVED)
def test_another_plan_goes_on_with_a_checkpoint(optimizer: str, tmp_path: Path) -> None:
    """With another mode: momenta move with their parameters. The model loads without us, too."""
    folder = shared(tmp_path)
    state = save(optimizer, folder)
    model = make_mixed()
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    assert_same(state, arrays(model.state_dict()))
    check_moved(optimizer, "to 1-2", folder)


def save_all(folder: Path) -> None:
    pipedream.init()
    for optimizer in SAVED:
        save(optimizer, folder / optimizer)


def move_all(workers: int, folder: Path) -> None:
    pipedream.init()
    for optimizer in SAVED:
        for name, case in MOVED.items():
            if case.plan.workers == workers:
                check_moved(optimizer, name, folder / optimizer)


@pytest.mark.nightly  # as the test before it, with more launches
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_other_workers_go_on_with_a_checkpoint(workers: int, tmp_path: Path) -> None:
    run_ranks(3, save_all, tmp_path)
    run_ranks(workers, move_all, workers, tmp_path)


class Scale(nn.Module):
    """Multiplies by weights in bfloat16."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, n, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.to(x.dtype)


def make_formats(seed: int) -> nn.Module:
    """Weights in another memory format, and others that Horovod has no name for."""
    torch.manual_seed(seed)
    layers = OrderedDict[str, nn.Module](
        lift=nn.Unflatten(1, (2, 1)),
        conv=nn.Conv2d(2, 4, (1, 3), padding=(0, 1)).to(memory_format=torch.channels_last),
        flatten=nn.Flatten(),
        one=nn.Linear(24, 6),
        scale=Scale(6),
        head=nn.Linear(6, 3),
    )
    model = nn.Sequential(layers)
    for name, layer in model.named_children():
        if name != "scale":
            layer.double()
    with torch.no_grad():
        layers["scale"].weight.mul_(1 + seed)
    return model


FORMATS = Case(plan("1-1", {2: ("one",)}), "flush", "momentum", "formats", 3)


@ON[2]
def test_weights_in_bfloat16_and_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's own broadcast ended in a ValueError of one word, as the pipeline was built.

    The model is another one on each rank, of which rank 0's counts.
    """
    monkeypatch.setitem(MODELS, "formats", lambda: make_formats(hvd.rank()))
    engine = make_engine(FORMATS)
    loss = engine.train_epoch(FORMATS.data(0)).loss
    serial = reference(FORMATS, make_formats(0))
    assert loss == pytest.approx(serial.train_epoch(FORMATS.data(0)), rel=1e-6)
    wanted, found = serial.state_dict(), engine.state_dict()
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            found[name].double(), tensor.double(), rtol=0, atol=0.01, msg=name
        )
