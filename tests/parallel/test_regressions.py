"""What was found broken once: each test opens with the story of its bug."""

from __future__ import annotations

import copy
import gc
import inspect
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from on_ranks import gather, on_ranks
from problem import OPTIMIZERS, Weights, loss_of, make_model, weights_of
from torch import nn

import hvd_pipe.torch as hvd
from hvd_pipe.errors import HvdPipeError, RanksDisagreeError
from hvd_pipe.planning.plan import Plan

STEPS = 6
STRATEGIES = ("merged-gradient", "pipe-sgd", "cocod:period=3")
LOSSY = (
    "merged-gradient:plan=single",
    *STRATEGIES[1:],
    "pipe-sgd:warmup_steps=2",
    "cocod:period=3,warmup_steps=2",
)
ROLLED_BACK = (*LOSSY, "pipe-sgd:warmup_steps=4", "cocod:period=3,warmup_steps=4")
REFUSING = ("merged-gradient:plan=wfbp", "pipe-sgd")

pytestmark = on_ranks(2, init=hvd.init)


def wrapped(model: nn.Module | None = None, strategy: str | None = None, **options: Any) -> Any:
    """A model and its optimizer, of SGD without momentum where the model is a test's own."""
    if model is None:
        model = make_model()
        plain = OPTIMIZERS["momentum"](model)
    else:
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"strategy": strategy, **options}
    return model, hvd.DistributedOptimizer(plain, model.named_parameters(), **options)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()


def assert_equal_on_ranks(values: Weights) -> None:
    first, second = gather(values)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("change", ["unfrozen", "copied"])
def test_batchnorm_is_averaged_after_a_change_of_parameters(change: str) -> None:
    """CoCoD looked for the model in the forward pass that was over when its engine was made."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    model[0].weight.requires_grad_(change == "copied")
    model, optimizer = wrapped(model, "cocod:period=2")
    train(model, optimizer, range(STEPS // 2))
    if change == "copied":
        model, optimizer = copy.deepcopy((model, optimizer))
    else:
        model[0].weight.requires_grad_(True)
    train(model, optimizer, range(STEPS // 2, STEPS))
    optimizer.synchronize()
    assert_equal_on_ranks(torch.cat([b.flatten().double() for b in model.buffers()]).numpy())


@pytest.mark.parametrize("strategy", REFUSING)
def test_a_parameter_frozen_on_one_rank(strategy: str) -> None:
    """That rank skipped the update that the other one made, and replicas went apart in silence."""
    model, optimizer = wrapped(strategy=strategy)
    train(model, optimizer, range(3))
    if hvd.rank() == 1:
        next(model.parameters()).requires_grad_(False)
    with pytest.raises(RanksDisagreeError, match=r"rank 1 has 0\.weight") as caught:
        train(model, optimizer, range(3, STEPS))
    assert "a frozen parameter" in str(caught.value)


def test_bfloat16_is_broadcast_and_gathered() -> None:
    """Horovod does not know the type: broadcasts and sparse gradients of it raised."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2)).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(hvd.rank())
    plain = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)
    for number in range(4):
        optimizer.zero_grad()
        model(torch.tensor([number, hvd.rank()])).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, 0)
    weights = torch.cat([p.detach().float().flatten() for p in model.parameters()]).numpy()
    assert np.isfinite(weights).all()
    assert_equal_on_ranks(weights)


def test_a_broadcast_of_unlike_models() -> None:
    """Horovod named no rank that had another shape, and waited for ever for a missing tensor."""
    two = {"weight": torch.zeros(1 + hvd.rank()), "bias": torch.zeros(3)}
    with pytest.raises(RanksDisagreeError, match=r"weight: torch\.float32 \[1\]; rank 1 has "):
        hvd.broadcast_parameters(two, root_rank=0)
    with pytest.raises(RanksDisagreeError, match="rank 1 has nothing more"):
        hvd.broadcast_parameters([torch.zeros(3), torch.zeros(3)][hvd.rank() :], root_rank=0)


def test_weights_that_are_changed_while_they_are_ahead() -> None:
    """As in a Wasserstein GAN: the way back to the true weights undid the change in silence."""
    model, optimizer = wrapped(strategy="pipe-sgd:prediction=previous")
    said = r"call optimizer\.synchronize\(\) before changing them"
    with pytest.raises(HvdPipeError, match=said):  # noqa: PT012
        for step in range(STEPS):
            train(model, optimizer, range(step, step + 1))
            with torch.no_grad():
                next(model.parameters()).clamp_(-0.1, 0.1)
    optimizer.synchronize()


def test_adasum_on_channels_last() -> None:
    """The update has the weight's strides, and Horovod wants contiguous tensors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2))
    model, optimizer = wrapped(model.to(memory_format=torch.channels_last), op=hvd.Adasum)
    torch.manual_seed(hvd.rank())
    for _ in range(3):
        optimizer.zero_grad()
        images = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
        model(images).square().mean().backward()
        optimizer.step()
    assert_equal_on_ranks(weights_of(model))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_inspects_the_optimizer(strategy: str) -> None:
    """`_step_supports_amp_scaling` averaged gradients for any reader: a debugger hung the job."""
    model, optimizer = wrapped(strategy=strategy)

    def look() -> None:
        if hvd.rank() == 0:
            assert "_step_supports_amp_scaling" in dict(inspect.getmembers(optimizer))
        hvd.allreduce(torch.zeros(1), name="all have looked")

    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        look()
        optimizer.step()
        look()
    optimizer.synchronize()
    assert_equal_on_ranks(weights_of(model))


def test_residuals_move_to_who_encodes_a_sum_next() -> None:
    """Each rank took along what it had left over, also of sums that others encode from then on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 30))  # of several chunks
    model, optimizer = wrapped(
        model, compression=hvd.Int8(error_feedback=True), groups=[list(model.parameters())]
    )
    torch.manual_seed(hvd.rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()
    engine = optimizer._hvd_pipe

    def residuals(name: str) -> Weights:
        """Of sums, where the coming messages will look for them."""
        views = {}
        for group, bucket in zip(engine.current.groups, engine.current.buckets, strict=True):
            own = bucket.message._slices[hvd.rank()]
            used = torch.zeros_like(bucket.message.feedback.reduced)
            used[own] = bucket.message.feedback.reduced[own]
            views |= dict(zip(group, bucket.views_of(used), strict=True))
        whole = torch.cat([views[place].flatten() for place in sorted(views)])
        return hvd.allreduce(whole, name=name, op=hvd.Sum).numpy()

    before = residuals("before")
    engine._replace_buckets(Plan(tuple((name,) for name in engine.settings.names), "given"))
    np.testing.assert_array_equal(before, residuals("after"))
    assert before.any()


def test_an_optimizer_that_was_replaced_updates_no_more() -> None:
    """hvd.join() applied the pending gradient of the optimizer that another had replaced."""
    model, first = wrapped(strategy="pipe-sgd")
    train(model, first, range(3))
    second = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy="pipe-sgd"
    )
    before = weights_of(model)
    hvd.join()
    del first, second
    np.testing.assert_array_equal(before, weights_of(model))


def test_an_optimizer_that_awaits_collection_refuses_no_join() -> None:
    """With a codec it refused on the rank that had not collected it, and the others waited."""
    gc.disable()
    model, optimizer = wrapped(compression=hvd.Compression.int8)
    train(model, optimizer, range(1))
    left = weakref.ref(optimizer)
    if hvd.rank() == 0:
        optimizer.owner = [optimizer]
    del optimizer
    waits = left() is not None
    try:
        hvd.join()
    finally:
        gc.enable()
    assert (waits and left() is None) == (hvd.rank() == 0)


@pytest.mark.parametrize("drains", [1, 2])
@pytest.mark.parametrize("strategy", ROLLED_BACK)
def test_the_same_steps_again_from_a_state(strategy: str, drains: int) -> None:
    """Pipe-SGD kept control words of the steps that were undone: "have not drained at the same
    steps". CoCoD had no warm-up when it went back into it.
    """
    model, optimizer = wrapped(strategy=strategy)
    train(model, optimizer, range(2))
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    runs = []
    for _ in range(2):
        train(model, optimizer, range(2, STEPS))
        optimizer.synchronize()
        runs.append(weights_of(model))
        for _ in range(drains):
            train(model, optimizer, range(2))
            optimizer.synchronize()
        train(model, optimizer, range(STEPS, STEPS + 2))
        model.load_state_dict(copy.deepcopy(state[0]))
        optimizer.load_state_dict(copy.deepcopy(state[1]))
    np.testing.assert_array_equal(*runs)


@pytest.mark.parametrize(
    ("strategy", "compression", "sparse"),
    [("merged-gradient", "int8", False), ("pipe-sgd", "none", True)],
)
def test_join_is_refused_where_horovod_would_crash(
    strategy: str, compression: str, sparse: bool
) -> None:
    """Horovod segfaulted in the rank that joined, or left the others waiting."""
    model = nn.Sequential(nn.Embedding(6, 4, sparse=sparse), nn.Linear(4, 2))
    codec = getattr(hvd.Compression, compression)
    model, optimizer = wrapped(model, strategy, compression=codec)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    with pytest.raises(HvdPipeError, match=r"hvd\.join\(\) needs dense gradients"):
        hvd.join()
    optimizer.synchronize()


# Ranks that have gone apart: each in a launch of its own -----------------------------------------


def alone(*values: object) -> Any:
    ranks = on_ranks(2, init=hvd.init, env={"LAUNCH": str(values)})
    return pytest.param(*values, marks=ranks)


@pytest.mark.parametrize(
    ("strategy", "saved", "before", "pause_s"),
    [
        # The slow rank raised HorovodInternalError: the fast one had shut Horovod down.
        alone("pipe-sgd", 4, 3, 2.0),
        alone("cocod:period=3", 4, 0, 0.0),
        # While the others try plans: it measured no more, or began anew, and they waited for it.
        alone("merged-gradient", 45, 5, 0.0),
        alone("merged-gradient:overlap=forward", 5, 33, 0.0),
        alone("auto:steps=9", 20, 5, 0.0),
    ],
)
def test_a_state_that_one_rank_alone_has_loaded(
    strategy: str, saved: int, before: int, pause_s: float
) -> None:
    """Pipe-SGD sent its odd set where others sent the even one, and the job hung; CoCoD's rounds
    ended at different steps on each rank.
    """
    model, optimizer = wrapped(strategy=strategy)
    train(model, optimizer, range(saved))
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.synchronize()
    model, optimizer = wrapped(strategy=strategy)
    train(model, optimizer, range(before))
    if hvd.rank() == 0:
        optimizer.load_state_dict(state)
    with pytest.raises(HvdPipeError, match="ranks have sent different things"):  # noqa: PT012
        for step in range(60):
            time.sleep(pause_s * hvd.rank())
            train(model, optimizer, range(step, step + 1))
        optimizer.synchronize()
    hvd.shutdown()  # as a rank that ends; the other may wait for it


@pytest.mark.parametrize("strategy", REFUSING)
def test_training_goes_on_after_a_refused_step(strategy: str) -> None:
    """After that error every call was refused for ever.

    Gradients are changed too early, by tensors that share their memory, which are not pending;
    all ranks go back to a state.
    """
    model, optimizer = wrapped(strategy=strategy)
    kept: list[torch.Tensor] = []
    said = ""
    for step in range(STEPS):
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        if step == 3:
            torch._foreach_mul_(kept, 0.5)
        try:
            optimizer.step()
        except HvdPipeError as error:
            said = str(error)
            optimizer.load_state_dict(state)
        if step < 3:
            kept += [p.grad.detach() for p in model.parameters() if p.grad is not None]
    assert "was changed while it was being sent" in said
    optimizer.synchronize()
    assert_equal_on_ranks(weights_of(model))
    assert not np.array_equal(weights_of(model), weights_of(make_model()))
