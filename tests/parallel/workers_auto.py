"""``strategy="auto"`` case by case; test_auto.py says what must come of it."""

from __future__ import annotations

import copy
import gc
import importlib
import io
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import horovod.torch as stock
import numpy as np
import torch
from cases import Raised, run_cases
from logged import Lines
from problem import OPTIMIZERS, Loss, Weights, loss_of, make_model, train, weights_of
from serial import make_workers
from torch import nn
from workers_overlap_forward import Clipping, Sparse, pending, read_all
from workers_pipe_sgd import DEFAULT_BYTES, race

import hvd_pipe.torch as hvd
from hvd_pipe.errors import RanksDisagreeError
from hvd_pipe.planning import choice
from hvd_pipe.planning.choice import OwnTimes, predict
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.trials import SETTLE_STEPS, TRIAL_STEPS
from hvd_pipe.runtime import bucket_planner
from hvd_pipe.runtime.bucket_planner import SKIP_STEPS
from hvd_pipe.torch import auto_choice, overlap_start
from hvd_pipe.torch.measuring import step_times
from hvd_pipe.torch.strategies.forward_overlap import ForwardOverlapEngine

STEPS = 4  # measured
SWITCH = 3 + STEPS  # the step after which the choice is made
LONG = SWITCH + 30  # long enough for the report of what was reached
SLEEP = 0.02
FORWARD = "merged-gradient:overlap=forward"
EXACT = f"merged-gradient/{FORWARD}"
ALL_BUT_COCOD = f"{EXACT}/pipe-sgd"
TRIALS = overlap_start.TRIALS  # of plans without the barrier
TRIAL = overlap_start.SETTLE_STEPS + overlap_start.TIMED_STEPS + 1  # steps; the last one waits
DEFERS = SWITCH + overlap_start.WATCH_STEPS  # the first step that defers its update
TRIED = DEFERS + TRIALS * TRIAL  # the first with the plan that stays
# Steps in which all is tried, however many of merged-gradient's plans, four at most, come before.
ALL_TRIED = (
    SKIP_STEPS + 4 * (SETTLE_STEPS + TRIAL_STEPS) + overlap_start.WATCH_STEPS + TRIALS * TRIAL
)


class Run(NamedTuple):
    """A run of auto, and what it is to be like."""

    weights: Weights
    expected: Weights
    chosen: str | None


def wrap(model: nn.Module, allow: str, optimizer: str = "momentum", **arguments: Any) -> Any:
    return hvd.DistributedOptimizer(
        OPTIMIZERS[optimizer](model),
        model.named_parameters(),
        strategy=f"auto:allow={allow},steps={STEPS}",
        **arguments,
    )


def chosen_of(optimizer: Any) -> str | None:
    return optimizer.state_dict()["hvd_pipe"].get("chosen")


def slow(model: nn.Module, rank: int) -> None:
    """One rank computes for longer than the others."""
    if hvd.rank() == rank:
        for p in model.parameters():
            p.register_hook(lambda _: time.sleep(0.002))


def serial(strategy: str, steps: int, optimizer: str = "momentum", drains: bool = True) -> Weights:
    workers = make_workers(strategy, hvd.size(), make_model, OPTIMIZERS[optimizer])
    for step in range(steps):
        workers.backward(loss_of, step)
        workers.step()
        workers.record()
    if drains:
        workers.synchronize()
        workers.record()
    return workers.trajectory[hvd.rank()]


def as_merged_gradient(slow_rank: int | None) -> Run:
    runs = []
    for strategy in ("auto", "merged-gradient"):
        model = make_model(torch.float32)
        plain = OPTIMIZERS["momentum"](model)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), strategy=strategy)
        if slow_rank is not None:
            slow(model, slow_rank)
        runs.append(train(model, optimizer, hvd.rank()))
        if strategy == "auto":
            chosen = chosen_of(optimizer)
    return Run(runs[0], runs[1], chosen)


def into_pipe_sgd(optimizer: str, slow_rank: int | None = None) -> Run:
    """From the switch on it is Pipe-SGD after so many warm-up steps, and the end drains."""
    model = make_model()
    wrapped = wrap(model, "pipe-sgd", optimizer)
    if slow_rank is not None:
        slow(model, slow_rank)
    weights = train(model, wrapped, hvd.rank(), steps=LONG, drains=[LONG - 1])
    expected = serial(f"pipe-sgd:warmup_steps={SWITCH}", LONG, optimizer)
    return Run(weights, expected, chosen_of(wrapped))


class Raced(NamedTuple):
    """A run of auto that has chosen pipe-sgd, whose plans were tried; its plan after each step."""

    run: Run
    plans: list[hvd.Plan]
    said_after: list[int]
    """The steps after which auto said something."""


def into_a_race() -> Raced:
    """Larger buckets are predicted to be faster, and each rank by itself would keep others."""
    heard, model, steps = Lines(), make_model(), SWITCH + 60
    plans: list[hvd.Plan] = []
    said: list[int] = []

    def slow_messages(method: Any, profile: Any, *_: object) -> choice.Prediction:
        return predict(method, profile, CommModel.linear(10.0, 0.0))

    def training(optimizer: Any) -> Weights:
        def step() -> None:
            before = len(heard.lines)
            optimizer.step()
            plans.append(optimizer.plan)
            if any(line.startswith("auto") for line in heard.lines[before:]):
                said.append(len(plans))

        watched = mock.Mock(step=step, zero_grad=optimizer.zero_grad)
        watched.synchronize = optimizer.synchronize
        return train(model, watched, hvd.rank(), steps=steps, drains=[steps - 1])

    clock = race(1)
    with (
        mock.patch.object(choice, "DEFAULT_BUCKET_BYTES", DEFAULT_BYTES),
        mock.patch.object(auto_choice, "predict", slow_messages),
    ):
        weights = clock.run(
            training,
            model,
            OPTIMIZERS["momentum"](model),
            strategy=f"auto:allow=pipe-sgd,steps={STEPS}",
        )
    expected = serial(f"pipe-sgd:warmup_steps={SWITCH}", steps)
    heard.taken()
    return Raced(Run(weights, expected, chosen_of(clock.optimizer)), plans, said)


def with_feedback() -> Run:
    """What the codec has left over of the synchronous steps goes along."""
    runs = []
    for strategy in (f"auto:allow=pipe-sgd,steps={STEPS}", f"pipe-sgd:warmup_steps={SWITCH}"):
        model = make_model(torch.float32)
        wrapped = hvd.DistributedOptimizer(
            OPTIMIZERS["momentum"](model),
            model.named_parameters(),
            compression=hvd.Int8(error_feedback=True),
            strategy=strategy,
        )
        runs.append(train(model, wrapped, hvd.rank(), steps=20, drains=[19]))
        if strategy.startswith("auto"):
            chosen = chosen_of(wrapped)
    return Run(runs[0], runs[1], chosen)


def with_groups() -> Run:
    model = make_model()
    wrapped = wrap(model, "pipe-sgd", groups=2)
    weights = train(model, wrapped, hvd.rank(), steps=20, drains=[19])
    return Run(weights, serial(f"pipe-sgd:warmup_steps={SWITCH}", 20), chosen_of(wrapped))


def with_grad_scaler() -> Run:
    model = make_model()
    wrapped = wrap(model, "pipe-sgd")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    records = []
    for step in range(20):
        wrapped.zero_grad()
        scaler.scale(loss_of(model, hvd.rank(), step)).backward()
        scaler.step(wrapped)
        scaler.update()
        records.append(weights_of(model))
    wrapped.synchronize()
    records.append(weights_of(model))
    expected = serial(f"pipe-sgd:warmup_steps={SWITCH}", 20)
    return Run(np.array(records), expected, chosen_of(wrapped))


def resumed(saved: int, strategy: str, copied: bool) -> Run:
    """Saved after some steps and resumed (or copied), against a run without a break."""
    model = make_model()
    optimizer = wrap(model, "pipe-sgd")
    unbroken = []
    for step in range(20):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        unbroken.append(weights_of(model))
        if step + 1 == saved:
            file = io.BytesIO()
            torch.save((model.state_dict(), optimizer.state_dict()), file)
            if copied:
                other_model, other = copy.deepcopy((model, optimizer))
    if not copied:
        file.seek(0)
        model_state, optimizer_state = torch.load(file)
        other_model = make_model()
        plain = OPTIMIZERS["momentum"](other_model)
        other = hvd.DistributedOptimizer(plain, other_model.named_parameters(), strategy=strategy)
        other_model.load_state_dict(model_state)
        other.load_state_dict(optimizer_state)
    records = []
    for step in range(saved, 20):
        other.zero_grad()
        loss_of(other_model, hvd.rank(), step).backward()
        other.step()
        records.append(weights_of(other_model))
    return Run(np.array(records), np.array(unbroken[saved:]), chosen_of(other))


def resumed_on_rank_0() -> tuple[Weights, str | None]:
    """Rank 0 alone has the checkpoint; the others get the choice from it."""
    model = make_model()
    optimizer = wrap(model, "pipe-sgd")
    train(model, optimizer, hvd.rank(), steps=SWITCH + 2)
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model = make_model()
    optimizer = wrap(model, "merged-gradient/pipe-sgd")
    if hvd.rank() == 0:
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    chosen = chosen_of(optimizer)
    train(model, optimizer, hvd.rank(), steps=5)
    optimizer.synchronize()
    return weights_of(model), chosen


def any_of_all(slow_rank: int | None) -> tuple[Weights, str | None, list[str]]:
    """All methods are allowed: whatever is chosen, ranks agree on it and end equal."""
    heard = Lines()
    model = make_model()
    optimizer = wrap(model, "merged-gradient/pipe-sgd/cocod", "adam")
    if slow_rank is not None:
        slow(model, slow_rank)
    train(model, optimizer, hvd.rank(), steps=SWITCH + 200)
    optimizer.synchronize()
    return weights_of(model), chosen_of(optimizer), heard.taken()


def into_cocod() -> tuple[Weights, Weights, str | None]:
    """Ranks part after the switch, and are equal at the end."""
    model = make_model()
    optimizer = wrap(model, "cocod")
    train(model, optimizer, hvd.rank(), steps=SWITCH + 1)
    apart = weights_of(model)
    train(model, optimizer, hvd.rank(), steps=8)
    optimizer.synchronize()
    return apart, weights_of(model), chosen_of(optimizer)


def joining(at: int) -> tuple[Weights, str | None]:
    """Parameters join before the choice or after it, and train from then on."""
    model = make_model()
    layers = list(model)
    first = nn.Sequential(*layers[2:])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(first.parameters(), lr=0.05),
        first.named_parameters(),
        strategy=f"auto:allow=pipe-sgd,steps={STEPS}",
    )
    for step in range(30):
        if step == at:
            optimizer.add_param_group({"params": list(layers[0].parameters())})
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        for p in layers[0].parameters():
            if step < at:
                p.grad = None
    optimizer.synchronize()
    return weights_of(model), chosen_of(optimizer)


def joined(before: int) -> tuple[Weights, str | None]:
    """Rank 0 has fewer steps, and waits for the others; then all go on together."""
    model = make_model()
    optimizer = wrap(model, "pipe-sgd")
    train(model, optimizer, hvd.rank(), steps=before - 2 * (hvd.rank() == 0))
    hvd.join()
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    train(model, optimizer, hvd.rank(), steps=SWITCH + 8)
    optimizer.synchronize()
    return weights_of(model), chosen_of(optimizer)


def lines_and_refusals() -> tuple[list[str], list[str]]:
    """What is logged where a method is left out; what is raised where none is left."""
    heard, raised = Lines(), []
    model = make_model()
    optimizer = wrap(model, "merged-gradient/cocod", op=hvd.Sum)
    train(model, optimizer, hvd.rank(), steps=LONG)
    for allow, arguments in (("cocod", {"op": hvd.Sum}), ("pipe-sgd", {"op": hvd.Adasum})):
        try:
            wrap(make_model(), allow, **arguments)
        except ValueError as error:
            raised.append(str(error))
    return heard.taken(), raised


def nothing_to_choose() -> list[str]:
    """Adasum and LBFGS go with merged-gradient alone."""
    model = make_model()
    adasum = wrap(model, "merged-gradient/pipe-sgd", op=hvd.Adasum)
    train(model, adasum, hvd.rank(), steps=2)
    model = make_model()
    lbfgs = hvd.DistributedOptimizer(
        torch.optim.LBFGS(model.parameters()), model.named_parameters(), strategy="auto"
    )

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = loss_of(model, hvd.rank(), 0)
        loss.backward()
        return loss

    lbfgs.step(closure)
    return [one.state_dict()["hvd_pipe"]["strategy"] for one in (adasum, lbfgs)]


def nothing_measured() -> tuple[str | None, list[str]]:
    """Every measured step overflows, so that none has an update.

    A fused optimizer has its ``step()`` called all the same, to leave the update out by itself.
    """
    lines, model = Lines(), make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, fused=True),
        model.named_parameters(),
        strategy=f"auto:allow=merged-gradient/pipe-sgd/cocod,steps={STEPS}",
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, backoff_factor=0.999)
    for step in range(SWITCH + 2):
        optimizer.zero_grad()
        (scaler.scale(loss_of(model, hvd.rank(), step)) * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
    return chosen_of(optimizer), lines.taken()


def resumed_where_the_choice_is_not_allowed() -> tuple[str | None, str | None]:
    """A plan that comes with a choice that is not allowed must not keep auto from measuring."""
    model = make_model()
    optimizer = wrap(model, "merged-gradient")
    train(model, optimizer, 0, steps=SWITCH + 3)
    saved = optimizer.state_dict()
    again = wrap(model, "pipe-sgd")
    again.load_state_dict(saved)
    train(model, again, 0, steps=SWITCH + 3)
    found = chosen_of(again)
    again.synchronize()
    return saved["hvd_pipe"].get("chosen"), found


def resumed_from(changes: dict[str, Any]) -> tuple[str | None, str | None, list[str]]:
    """The choices after loading a state with changes, and after measuring anew."""
    model = make_model()
    optimizer = wrap(model, "pipe-sgd")
    train(model, optimizer, hvd.rank(), steps=SWITCH + 3)
    saved = optimizer.state_dict()
    optimizer.synchronize()
    saved["hvd_pipe"] = {**saved["hvd_pipe"], **changes}
    again, lines = wrap(model, "pipe-sgd"), Lines()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that what is in flight is lost
        again.load_state_dict(saved)
    loaded = chosen_of(again)
    train(model, again, hvd.rank(), steps=SWITCH)
    again.synchronize()
    return loaded, chosen_of(again), lines.taken()


def failing(where: str, rank: int, error: Exception) -> str:
    """One rank alone fails as all measure, plan and choose."""
    model = make_model()
    optimizer = wrap(model, "merged-gradient/pipe-sgd")
    train(model, optimizer, hvd.rank(), steps=SWITCH - 1)
    try:
        if hvd.rank() == rank:
            with mock.patch(where, side_effect=error):
                train(model, optimizer, hvd.rank(), steps=1)
        else:
            train(model, optimizer, hvd.rank(), steps=1)
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return ""


def seen_by_rank_0() -> tuple[list[float], float] | None:
    """What rank 0 plans and predicts from: rank 1 is slow before its last gradient."""
    model = make_model()
    optimizer = wrap(model, "merged-gradient/pipe-sgd")
    if hvd.rank() == 1:
        model[0].weight.register_hook(lambda _: time.sleep(SLEEP))
    planned = mock.Mock(wraps=bucket_planner.plan_dtype_groups)
    predicted = mock.Mock(wraps=auto_choice.predict)
    with (
        mock.patch.object(auto_choice, "predict", predicted),
        mock.patch.object(bucket_planner, "plan_dtype_groups", planned),
    ):
        train(model, optimizer, hvd.rank(), steps=SWITCH)
    optimizer.synchronize()
    if hvd.rank() != 0:
        assert not planned.called
        assert not predicted.called
        return None
    profile = predicted.call_args.args[1]
    return planned.call_args.args[1].tolist(), float(profile.ready_times()[-1])


def hooks_of_optimizers_that_are_gone() -> int:
    model = make_model()
    for _ in range(3):
        optimizer = wrap(model, "pipe-sgd")
        train(model, optimizer, hvd.rank(), steps=2)
        del optimizer
        gc.collect()
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def from_the_environment() -> str | None:
    os.environ["HVD_PIPE_STRATEGY"] = f"auto:steps={STEPS}"
    model = make_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](model), model.named_parameters())
    del os.environ["HVD_PIPE_STRATEGY"]
    train(model, optimizer, hvd.rank(), steps=SWITCH)
    return chosen_of(optimizer)


# overlap=forward among the choices.


class Forward(NamedTuple):
    """A run whose choice may be overlap=forward.

    Args:
        weights: Now and then, and at the end.
        expected: The same, of stock Horovod or another strategy.
        chosen: What a checkpoint holds.
        deferred: The steps whose ``step()`` left messages to be waited for later.
        lines: What was said.
    """

    weights: list[Weights]
    expected: list[Weights]
    chosen: str | None
    deferred: list[int]
    lines: list[str]


@contextmanager
def forced_times(all_reduce_s: float = 4.0) -> Iterator[None]:
    """Let the last rank compute for 4 s and the others for 0.04 s, and messages take so long.

    With the last rank's times, overlap=forward is faster than plain merged-gradient by far, and
    pipe-sgd hardly faster: the small gradients are ready last. With the first rank's own times, a
    step takes as long as its messages under any method.
    """
    compute = 4.0 if hvd.rank() == hvd.size() - 1 else 0.04
    close = step_times.JobTimes.close

    def closed(times: step_times.JobTimes) -> OwnTimes:
        close(times)
        last = max(1, times.count - 1)
        ready = [compute / 2 * index / last for index in range(times.count)]
        return OwnTimes(compute / 2, ready, 0.0)

    def predicted(method: Any, profile: Any, comm: CommModel, codec: Any) -> Any:
        total = float(profile.gradient_bytes().sum())
        return predict(method, profile, CommModel.linear(0.0, all_reduce_s / total), codec)

    with (
        mock.patch.object(step_times.JobTimes, "close", closed),
        mock.patch.object(auto_choice, "predict", predicted),
    ):
        yield


def looped(
    model: nn.Module,
    optimizer: Any,
    steps: range,
    loss: Loss = loss_of,
    after: Callable[[Any, Any, int], object] = lambda model, optimizer, step: None,
) -> tuple[list[Weights], list[int]]:
    """A loop that seldom looks at the weights; also the steps that deferred updates."""
    weights, deferred = [], []
    for step in steps:
        optimizer.zero_grad()
        loss(model, hvd.rank(), step).backward()
        optimizer.step()
        engine = getattr(optimizer, "_hvd_pipe", None)
        if isinstance(engine, ForwardOverlapEngine) and pending(optimizer):
            deferred.append(step)
        after(model, optimizer, step)
        if step % 10 == 9:
            weights.append(weights_of(model))
    return [*weights, weights_of(model)], deferred


def into_forward(
    make: Callable[[], nn.Module] = make_model,
    make_optimizer: Callable[[nn.Module], Any] = OPTIMIZERS["momentum"],
    allow: str = ALL_BUT_COCOD,
    steps: int = TRIED + 30,
    arguments: dict[str, Any] | None = None,
    against: str | None = None,
    **script: Any,
) -> Forward:
    """Train by auto and, to compare, by stock Horovod or another strategy."""
    heard, arguments = Lines(), arguments or {}
    strategy = f"auto:allow={allow},steps={STEPS}"
    runs = []
    other = (stock, {}) if against is None else (hvd, {"strategy": against})
    for module, given in ((hvd, {"strategy": strategy}), other):
        torch.manual_seed(1)
        model = make()
        optimizer: Any = module.DistributedOptimizer(
            make_optimizer(model), model.named_parameters(), **given, **arguments
        )
        with forced_times():
            runs.append(looped(model, optimizer, range(steps), **script))
        if len(runs) == 1:
            chosen = chosen_of(optimizer)
    (weights, deferred), (expected, _) = runs
    return Forward(weights, expected, chosen, deferred, heard.taken())


def forward_resumed(saved: int, copied: bool, steps: int = 50) -> tuple[Forward, list[Any]]:
    """Saved after some steps and resumed (or copied), against a run without a break.

    Also the plans: when it was saved, after the first step from there, and at the end.
    """
    model = make_model()
    optimizer = wrap(model, ALL_BUT_COCOD)
    with forced_times():
        looped(model, optimizer, range(saved))
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        plans = [optimizer.plan]
        if copied:
            other_model, other = copy.deepcopy((model, optimizer))
        else:
            file.seek(0)
            states = torch.load(file)
            other_model = make_model()
            other = wrap(other_model, ALL_BUT_COCOD)
            other_model.load_state_dict(states[0])
            other.load_state_dict(states[1])
        expected, _ = looped(model, optimizer, range(saved, saved + steps))
    heard = Lines()
    first, _ = looped(other_model, other, range(saved, saved + 1))
    plans.append(other.plan)
    weights, deferred = looped(other_model, other, range(saved + 1, saved + steps))
    plans.append(other.plan)
    if (saved + 1) % 10 == 0:
        weights = [*first[:-1], *weights]
    run = Forward(weights, expected, chosen_of(other), deferred, heard.taken())
    return run, plans


def loaded_over(first: str, second: str) -> tuple[str | None, list[Weights], list[Weights]]:
    """A run loads the state of another one that has chosen otherwise, and goes on as that one."""
    runs = []
    for allow in (first, second):
        model = make_model()
        optimizer = wrap(model, ALL_BUT_COCOD)
        with (
            forced_times(),
            mock.patch.object(auto_choice, "choose", lambda found, a=allow: by_kind(found, a)),
        ):
            looped(model, optimizer, range(TRIED + 5))
        runs.append((model, optimizer))
    (model, optimizer), (other_model, other) = runs
    states = copy.deepcopy((other_model.state_dict(), other.state_dict()))
    expected, _ = looped(other_model, other, range(100, 120))
    other.synchronize()
    optimizer.synchronize()
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    weights, _ = looped(model, optimizer, range(100, 120))
    found = chosen_of(optimizer)
    optimizer.synchronize()
    return found, weights, expected


def forward_shut_down() -> Forward:
    """Horovod ends and begins again; nothing is measured or tried anew."""
    importlib.import_module("mpi4py.MPI")  # it finalises MPI, so that Horovod does not
    hvd.init()
    heard, model = Lines(), make_model()
    with forced_times():
        optimizer: Any = wrap(model, EXACT)
        looped(model, optimizer, range(TRIED + 5))
    plan = optimizer.plan
    hvd.shutdown()
    hvd.init()
    weights, deferred = looped(model, optimizer, range(TRIED + 5, TRIED + 35))
    assert (optimizer.plan.buckets, optimizer.plan.order) == (plan.buckets, plan.order)
    chosen, lines = chosen_of(optimizer), heard.taken()
    model = make_model()
    optimizer = stock.DistributedOptimizer(OPTIMIZERS["momentum"](model), model.named_parameters())
    looped(model, optimizer, range(TRIED + 5))
    expected, _ = looped(model, optimizer, range(TRIED + 5, TRIED + 35))
    return Forward(weights, expected, chosen, deferred, lines)


def forward_not_allowed() -> tuple[str | None, str | None, str | None]:
    """A choice and its plan are not taken where it is not allowed any more."""
    model = make_model()
    with forced_times():
        optimizer = wrap(model, EXACT)
        looped(model, optimizer, range(TRIED))
        saved = optimizer.state_dict()
        again = wrap(model, "merged-gradient")
        again.load_state_dict(saved)
        loaded = chosen_of(again)
        looped(model, again, range(SWITCH))
    assert again.plan.order is None
    return saved["hvd_pipe"].get("chosen"), loaded, chosen_of(again)


def by_kind(found: Any, kind: str) -> Any:
    return next(each for each in found if auto_choice.kind_of(each.method) == kind)


def refused_on_one_rank() -> tuple[str | None, list[int], list[str]]:
    """Rank 1 alone finds that its updates cannot be deferred."""
    model, heard = make_model(), Lines()
    optimizer = wrap(model, EXACT)
    why = "of this test" if hvd.rank() == 1 else None
    with forced_times(), mock.patch.object(auto_choice, "refusal", return_value=why):
        _, deferred = looped(model, optimizer, range(SWITCH + 10))
    return chosen_of(optimizer), deferred, heard.taken()


def joined_around_the_choice(before: int) -> tuple[int, str | None]:
    """Rank 0 has fewer steps, and joins before the choice, or as overlap=forward begins."""
    model = make_model()
    optimizer = wrap(model, EXACT)
    with forced_times():
        looped(model, optimizer, range(before + 2 * (hvd.rank() == 1)))
        hvd.join()
        hvd.broadcast_parameters(model.state_dict(), 0)
        _, deferred = looped(model, optimizer, range(TRIED + 10))
    optimizer.synchronize()
    return len(deferred), chosen_of(optimizer)


def forward_left_out() -> list[str]:
    """What is known of the arguments: lines, and what is raised where nothing is left."""
    heard = Lines()
    wrap(make_model(), EXACT, op=hvd.Adasum)
    for allow in (EXACT, FORWARD):
        model = make_model()
        try:
            hvd.DistributedOptimizer(
                torch.optim.LBFGS(model.parameters()),
                model.named_parameters(),
                strategy=f"auto:allow={allow}",
            )
        except ValueError as error:
            logging.getLogger("hvd_pipe").info("auto raised: %s", error)
    return heard.taken()


FORWARDS: dict[str, Callable[[], Any]] = {
    "forward": into_forward,
    "forward, adamw in groups": partial(into_forward, make_optimizer=OPTIMIZERS["adamw-groups"]),
    "forward, groups": partial(into_forward, allow=EXACT, arguments={"groups": 3}),
    "forward alone": partial(into_forward, allow=FORWARD),
    "forward, weights that are read": partial(into_forward, after=read_all),
    "forward, sparse": partial(
        into_forward,
        make=Sparse,
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1),
        allow=EXACT,
        against="merged-gradient",
    ),
    "forward, not separable": partial(
        into_forward,
        make_optimizer=lambda model: Clipping(model.parameters(), lr=0.1),
        allow=EXACT,
    ),
    "forward, refused on one rank": refused_on_one_rank,
    "forward, resumed": partial(forward_resumed, TRIED + 5, False),
    "forward, copied": partial(forward_resumed, TRIED + 5, True),
    "forward, resumed in a trial": partial(forward_resumed, SWITCH + 12, False, ALL_TRIED + 10),
    "forward, loads pipe-sgd": partial(loaded_over, FORWARD, "pipe-sgd"),
    "forward, loads merged-gradient": partial(loaded_over, FORWARD, "merged-gradient"),
    "pipe-sgd, loads forward": partial(loaded_over, "pipe-sgd", FORWARD),
    "forward, not allowed": forward_not_allowed,
    "forward left out": forward_left_out,
    "forward, joined before": partial(joined_around_the_choice, SWITCH - 1),
    "forward, joined at the choice": partial(joined_around_the_choice, SWITCH),
    "forward, joined after": partial(joined_around_the_choice, SWITCH + 1),
    "forward, joined in a trial": partial(joined_around_the_choice, DEFERS + 6),
}


def profiled(path: str) -> Run:
    """``HVD_PIPE_PROFILE`` changes nothing that is computed."""
    runs = []
    for one in (path, ""):
        os.environ["HVD_PIPE_PROFILE"] = one
        model = make_model()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["momentum"](model), model.named_parameters(), strategy="pipe-sgd"
        )
        runs.append(train(model, optimizer, hvd.rank(), steps=20))
        optimizer.synchronize()
    del os.environ["HVD_PIPE_PROFILE"]
    return Run(runs[0], runs[1], None)


def profiled_lbfgs(path: str) -> list[str]:
    """What is warned of, over two optimizers."""
    step_times._started = False
    os.environ["HVD_PIPE_PROFILE"] = path
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model = make_model()
            hvd.DistributedOptimizer(
                torch.optim.LBFGS(model.parameters()), model.named_parameters()
            )
    del os.environ["HVD_PIPE_PROFILE"]
    return [str(one.message) for one in caught if one.filename == __file__]


def a_newcomer_that_cannot_travel(on_rank: int | None) -> str:
    model = make_model()
    plain = OPTIMIZERS["momentum"](model)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    train(model, optimizer, hvd.rank(), steps=2)
    strange = on_rank in (None, hvd.rank())
    dtype = torch.complex64 if strange else torch.float32
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, dtype=dtype))]})
    try:
        train(model, optimizer, hvd.rank(), steps=1)
    except (ValueError, RanksDisagreeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


CASES: dict[str, Callable[[], Any]] = {
    "as merged-gradient": partial(as_merged_gradient, None),
    "as merged-gradient, a slow rank": partial(as_merged_gradient, 1),
    "pipe-sgd, momentum": partial(into_pipe_sgd, "momentum"),
    "pipe-sgd, adam, a slow rank": partial(into_pipe_sgd, "adam", 0),
    "race": into_a_race,
    "feedback": with_feedback,
    "groups": with_groups,
    "scaler": with_grad_scaler,
    "resumed after": partial(resumed, SWITCH + 3, "auto:allow=merged-gradient/pipe-sgd", False),
    "resumed after, as pipe-sgd": partial(resumed, SWITCH + 3, "pipe-sgd", False),
    "copied after": partial(resumed, SWITCH + 3, "", True),
    "resumed before": partial(resumed, 4, "auto:steps=30", False),
    "resumed on rank 0": resumed_on_rank_0,
    "any": partial(any_of_all, None),
    "any, a slow rank": partial(any_of_all, 1),
    "cocod": into_cocod,
    "joining before": partial(joining, 5),
    "joining after": partial(joining, SWITCH + 3),
    "joined before": partial(joined, 5),
    "joined after": partial(joined, SWITCH + 5),
    "lines": lines_and_refusals,
    "nothing to choose": nothing_to_choose,
    "nothing measured": nothing_measured,
    "resumed, not allowed": resumed_where_the_choice_is_not_allowed,
    "resumed, other workers": partial(resumed_from, {"workers": 3}),
    "resumed, another version": partial(
        resumed_from, {"version": 9, "chosen": 5, "workers": None, "counters": None}
    ),
    "rank 0 cannot choose": partial(
        failing, "hvd_pipe.torch.auto_choice.predict", 0, ValueError("no choice")
    ),
    "rank 0 cannot plan": partial(
        failing,
        "hvd_pipe.runtime.bucket_planner.plan_dtype_groups",
        0,
        ValueError("no plan"),
    ),
    "no memory": partial(failing, "torch.zeros", 1, torch.OutOfMemoryError("too little")),
    "seen by rank 0": seen_by_rank_0,
    "gone": hooks_of_optimizers_that_are_gone,
    "environment": from_the_environment,
    "newcomer": partial(a_newcomer_that_cannot_travel, None),
}


def run(path: str) -> dict[str, Any | Raised]:
    hvd.init()
    profiles = {
        "profile": partial(profiled, path),
        "profile, lbfgs": partial(profiled_lbfgs, f"{path}.lbfgs"),
    }
    return run_cases({**CASES, **FORWARDS, **profiles})


def one_strange_newcomer() -> str:
    hvd.init()
    return a_newcomer_that_cannot_travel(1)


def alone() -> str | None:
    """One worker has nothing to choose and nothing to wait for."""
    hvd.init()
    model = make_model()
    optimizer = wrap(model, "merged-gradient/pipe-sgd")
    train(model, optimizer, 0, steps=LONG)
    return chosen_of(optimizer)
