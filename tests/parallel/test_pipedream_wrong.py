"""Mistakes in PyTorch's PipeDream: each ends in a message on every rank, and none in a hang."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pipedream_faults
import pytest
import torch
from faults import NEVER_S, TIMEOUT_S, Job
from on_ranks import on_ranks
from pipeline_problem import MODELS, OPTIMIZERS, plan, squared
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch_pipelines import Case, check, layers_of, make_engine, partition_of, train

import hvd_pipe.torch as hvd
from hvd_pipe.errors import HvdPipeError, RanksDisagreeError
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.torch import pipedream

two = on_ranks(2, init=pipedream.init)
three = on_ranks(3, init=pipedream.init)
STRAIGHT = Case(plan("1-1"))


def make(options: dict[str, Any]) -> pipedream.PipeDream:
    """Make a pipeline with these options."""
    usual: dict[str, Any] = {
        "model": MODELS["mixed"](),
        "loss_fn": squared,
        "optimizer_fn": OPTIMIZERS["sgd"],
        "plan": partition_of("mixed", STRAIGHT.plan),
        "sample": STRAIGHT.data(0)[0],
        "progress": False,
    }
    return pipedream.PipeDream(**(usual | options))


class Wrong(NamedTuple):
    """Arguments that cannot be, and what every rank is told."""

    options: dict[str, Any]
    error: type[Exception]
    says: str


WRONG = {
    "mode": Wrong({"mode": "1f1b"}, ValueError, "mode must be one of stash"),
    "plan's workers": Wrong({"plan": "2-1"}, ValueError, "is for 3 workers"),
    "plan's zero": Wrong({"plan": "2-0"}, ValueError, "a stage without workers"),
    "plan's text": Wrong({"plan": "two"}, ValueError, "is no plan"),
    "plan's type": Wrong({"plan": 2}, TypeError, "plan must be 'auto'"),
    "plan's file": Wrong({"plan": "/nowhere/plan.json"}, FileNotFoundError, "/nowhere"),
    "microbatches of stash": Wrong({"microbatches": 2}, ValueError, "has no microbatches"),
    "no microbatches": Wrong(
        {"mode": "flush", "microbatches": 0}, ValueError, "must be at least 1"
    ),
    "microbatches' type": Wrong(
        {"mode": "flush", "microbatches": 1.5}, TypeError, "must be an integer"
    ),
    "too few for 2bw": Wrong(
        {"mode": "2bw", "microbatches": 1}, ValueError, "microbatches must be at least 2"
    ),
    "more than samples": Wrong(
        {"mode": "flush", "microbatches": 15}, ValueError, "cannot be cut into 15 microbatches"
    ),
    "transport": Wrong({"transport": "nccl"}, ValueError, "transport must be one of"),
    "meta": Wrong({"model": nn.Linear(3, 3, device="meta")}, ValueError, "build the model anew"),
    "wire_dtype": Wrong({"wire_dtype": "int8"}, ValueError, "wire_dtype must be None or"),
    "schedule_by": Wrong({"schedule_by": "step"}, ValueError, "schedule_by must be 'epoch'"),
    "max_grad_norm": Wrong({"max_grad_norm": -1.0}, ValueError, "max_grad_norm must be finite"),
    "max_grad_norm's type": Wrong({"max_grad_norm": "1"}, TypeError, "must be a number"),
    "bandwidth": Wrong({"bandwidth": float("nan")}, ValueError, "bandwidth must be finite"),
    "memory_bytes": Wrong({"memory_bytes": 0}, ValueError, "memory_bytes must be finite"),
    "loss_fn": Wrong({"loss_fn": None}, TypeError, "loss_fn must be a function"),
    "optimizer_fn": Wrong({"optimizer_fn": 0.1}, TypeError, "optimizer_fn must be a function"),
    "scheduler_fn": Wrong({"scheduler_fn": 3}, TypeError, "scheduler_fn must be a function"),
    "metric_fn": Wrong({"metric_fn": "acc"}, TypeError, "metric_fn must be a function"),
    "model": Wrong({"model": [nn.Linear(2, 2), "x"]}, TypeError, "model must be an nn.Module"),
    "no model": Wrong({"model": []}, TypeError, "an empty list"),
    "nothing to train": Wrong({"model": nn.ReLU()}, ValueError, "no parameters"),
    "sample": Wrong({"sample": torch.zeros(3)}, TypeError, "must yield (inputs, targets)"),
    "no optimizer": Wrong({"optimizer_fn": lambda _: 0.1}, TypeError, "torch.optim.Optimizer"),
    "plateau": Wrong({"scheduler_fn": ReduceLROnPlateau}, TypeError, "without a metric"),
    "no tensors": Wrong({"sample": ("x", torch.zeros(3))}, TypeError, "inputs must be tensors"),
}


@two
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_on_every_rank(name: str) -> None:
    """With a reason; a rank that hears of it from rank 0 gets that reason, too."""
    options, error, says = WRONG[name]
    with pytest.raises(error if hvd.rank() == 0 else (error, HvdPipeError)) as raised:
        make(options)
    assert raised.type in {error, *([HvdPipeError] if hvd.rank() else [])}
    assert says in str(raised.value)


UNLIKE = {
    "one stranger": [
        {},
        {"optimizer_fn": lambda _: torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)},
    ],
    "one wrong": [{}, {"loss_fn": None}],
    "one optimizer": [{}, {"optimizer_fn": lambda _: 0.1}],
}


@two
@pytest.mark.parametrize("name", UNLIKE)
def test_ranks_with_other_arguments_are_told(name: str) -> None:
    own = {"one stranger": ValueError}.get(name, TypeError)
    error = (RanksDisagreeError, own)[hvd.rank()]
    with pytest.raises(error) as raised:
        make(UNLIKE[name][hvd.rank()])
    assert raised.type is error


@two
@pytest.mark.parametrize(
    ("loader", "error", "says"),
    [
        pytest.param(iter(()), TypeError, r"has no len\(\)", id="no len"),
        pytest.param([], ValueError, "no minibatches", id="empty"),
    ],
)
def test_loaders_that_cannot_be(loader: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make_engine(STRAIGHT).train_epoch(loader)


@three
def test_loaders_of_unlike_lengths() -> None:
    """The rank between the first and the last stage, which read minibatches, has one fewer."""
    case = Case(plan("1-1-1"))
    says = "the number of minibatches: rank 0 has 7; rank 1 has 6"
    with pytest.raises(RanksDisagreeError, match=says):
        make_engine(case).train_epoch(case.data(0)[: 6 if hvd.rank() == 1 else 7])


def given_profile() -> ModelProfile:
    """Times by which the mixed model is cut before the LSTM, and bytes that forbid replicas."""
    layers = layers_of("mixed")
    before = next(at for at, layer in enumerate(layers) if "lstm" in layer.name)
    share = {True: 1.0 / before, False: 1.0 / (len(layers) - before)}
    times = [share[at < before] for at in range(len(layers))]
    return ModelProfile(
        tuple(
            LayerProfile(layer.name, 2**30, seconds, seconds / 2, 800)
            for layer, seconds in zip(layers, times, strict=True)
        )
    )


@two
@pytest.mark.parametrize("what", ["straight", "1-1", "auto", "saved"])
def test_plans_by_name(what: str, tmp_path: Path) -> None:
    """The profile's times cut the model before the LSTM, as the plan that is given does."""
    if what == "saved":
        partition_of("mixed", STRAIGHT.plan).save(tmp_path / "plan.json")
        what = str(tmp_path / "plan.json")
    check(train(STRAIGHT, plan=what, profile=given_profile(), bandwidth=1e9), STRAIGHT)


@two
def test_a_closed_pipeline_says_so_and_another_one_runs() -> None:
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        engine = make_engine(STRAIGHT)
        losses.append(engine.train_epoch(STRAIGHT.data(0)).loss)
        engine.close()
        engine.close()
    assert losses[0] == losses[1]
    with pytest.raises(ValueError, match="closed: make another"):
        engine.evaluate(STRAIGHT.data(0))


def alone(what: str) -> pytest.MarkDecorator:
    """Ranks of a launch of its own, as Horovod ends in it."""
    return on_ranks(3, init=pipedream.init, env={"WHAT": what})


@pytest.mark.parametrize(
    ("what", "rank", "says"),
    [
        pytest.param(
            "order",
            2,
            "the first and the last stage read different minibatches",
            marks=three,  # the last test there
        ),
        # nightly: other words of the same way to end
        pytest.param(
            "shape",
            0,
            "stage 0 replica 0: tensor 'tanh' was planned as float64 (14, 4, 6)",
            marks=[alone("shape"), pytest.mark.nightly],
        ),
        pytest.param("dtype", 0, "", marks=[alone("dtype"), pytest.mark.nightly]),  # torch's words
    ],
)
def test_minibatches_that_cannot_be(what: str, rank: int, says: str) -> None:
    """The rank that sees it says why; no other waits for ever."""
    case = Case(plan("1-1-1"))
    engine, batches = make_engine(case), case.data(0)
    if what == "order" and hvd.rank() == 2:
        batches = batches[::-1]
    if what == "shape":
        batches[3] = (torch.zeros(14, 2, 5, dtype=torch.float64), batches[3][1])
    if what == "dtype":
        batches[3] = (batches[3][0].float(), batches[3][1])
    with pytest.raises(Exception, match=re.escape(says) if hvd.rank() == rank else ""):
        engine.train_epoch(batches)
    hvd.shutdown()  # as a script's end does; it ends the others' waits


SCRIPT = Path(pipedream_faults.__file__)
# nightly: the same by other launchers, in other modes and elsewhere


@pytest.mark.parametrize(
    ("launcher", "wrong", "culprit"),
    [
        ("mpi", "loss", 2),
        pytest.param("mpi", "loader", 0, marks=pytest.mark.nightly),
        pytest.param("gloo", "loss", 2, marks=pytest.mark.nightly),
        pytest.param("gloo", "loader", 0, marks=pytest.mark.nightly),
    ],
)
def test_a_rank_raises_in_an_epoch(launcher: str, wrong: str, culprit: int) -> None:
    """Horovod's end ends the others' waits over MPI; over Gloo the watch does, before Gloo."""
    limit_s = NEVER_S if launcher == "mpi" else TIMEOUT_S
    with Job(launcher, "stash", wrong, timeout_s=limit_s, ranks=3, script=SCRIPT) as job:
        job.started()
        job.ended()
        assert job.launched.returncode != 0
        job.told_who_raised(culprit, "ValueError: bad sample 17")


@pytest.mark.parametrize(
    ("launcher", "mode"),
    [
        ("gloo", "stash"),
        pytest.param("mpi", "stash", marks=pytest.mark.nightly),
        pytest.param("mpi", "flush", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_is_stopped(launcher: str, mode: str) -> None:
    """Over process sets, rank 0 may stand still in a call that keeps Python's interpreter lock.

    It could not say that it was alive, and the last rank took it for the one that was stopped.
    """
    with Job(launcher, mode, timeout_s=TIMEOUT_S, ranks=3, script=SCRIPT) as job:
        job.started()
        os.kill(job.pid(1), signal.SIGSTOP)
        job.ended()
        assert job.launched.returncode != 0
        job.told_who_is_lost(1)
        assert "has been silent" in job.output
