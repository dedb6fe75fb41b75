"""Gradients after ``backward()``: whoever reads or changes one meets what ``step()`` applies."""

from __future__ import annotations

import contextlib
import copy
import threading
from typing import Any

import pytest
import torch
from horovod.common.exceptions import HorovodInternalError
from on_ranks import gather, on_ranks
from pending_problem import (
    EXACT,
    LR,
    PIPE,
    RANKS,
    SENDING,
    STEPS,
    Change,
    assert_equal_on_ranks,
    batch,
    check,
    clip,
    distributed,
    gradients_of,
    leave,
    loss_of,
    make_model,
    out_of_memory_at,
    raises_on_all,
    sgd,
    train,
    trained_alone,
    weights_of,
)
from torch import nn

import hvd_pipe.torch as hvd
from hvd_pipe.errors import HvdPipeError, RanksDisagreeError
from hvd_pipe.strategy import MergedGradient
from hvd_pipe.torch.messages.buckets import BucketSet

pytestmark = on_ranks(2, init=hvd.init)


def clip_listed(model: nn.Module, step: int) -> None:
    gradients = [p.grad for p in model.parameters()]
    norm = torch.stack([g.norm() for g in gradients if g is not None]).norm()
    for gradient in gradients:
        assert gradient is not None
        gradient.mul_(torch.clamp(0.05 / norm, max=1.0))


def halve(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5


def halve_data(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.mul_(0.5)


def drop_one(model: nn.Module, step: int) -> None:
    next(model.parameters()).grad = None


CHANGES = [clip, clip_listed, halve, halve_data, leave]


CELLS = [(change, name) for change in CHANGES for name in [*EXACT, *PIPE]]
CELLS += [(drop_one, name) for name in EXACT]


@pytest.mark.parametrize(
    ("change", "name"), CELLS, ids=lambda each: each if isinstance(each, str) else each.__name__
)
def test_changes_are_those_of_one_process(change: Change, name: str) -> None:
    model = make_model()
    optimizer = distributed(model, name)
    train(model, optimizer, range(STEPS), change)
    check(model, optimizer, change, name)


def branch_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """On rank 1, a loss that does not use the middle layer in two steps of three."""
    x = batch(step, rank)
    hidden = torch.tanh(model[0](x))
    if rank == 0 or step % 3 == 0:
        hidden = torch.tanh(model[2](hidden))
    loss: torch.Tensor = (model[4](hidden) ** 2).mean()
    return loss


@SENDING
def test_ranks_clip_alike_where_one_lacks_a_gradient(name: str) -> None:
    """It is there, as zeros, before it is read: lists of gradients are as long on all ranks."""
    model = make_model()
    optimizer = distributed(model, name)
    for step in range(STEPS):
        optimizer.zero_grad()
        branch_of(model, step, hvd.rank()).backward()
        assert all(p.grad is not None for p in model.parameters())
        clip(model, step)
        optimizer.step()
    optimizer.synchronize()
    wanted = trained_alone(clip, late=name in PIPE, loss=branch_of)
    torch.testing.assert_close(weights_of(model), wanted, rtol=0, atol=1e-15)


def test_a_layer_that_thaws_is_clipped_alike_under_pipe_sgd() -> None:
    """What is applied has no gradient of it yet, and this rank's own is nobody's."""
    model = make_model()
    model[2].requires_grad_(False)
    optimizer = distributed(model, "pipe-sgd")
    for step in range(STEPS):
        if step == 4:
            model[2].requires_grad_(True)
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        norms = gather(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        assert norms[0] == norms[1]
        optimizer.step()
    optimizer.synchronize()
    assert_equal_on_ranks(model)


@SENDING
def test_one_rank_reads_and_the_other_does_not(name: str) -> None:
    model, norms = make_model(), []
    optimizer = distributed(model, name)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        if hvd.rank() == step % 2:
            norms.append(
                sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
            )
        optimizer.step()
    check(model, optimizer, leave, name)
    assert len(norms) == STEPS // 2


@SENDING
def test_who_reads_nothing_waits_for_nothing(name: str) -> None:
    """Clearing, shapes and hooks read no value."""
    model = make_model()
    optimizer = distributed(model, name)
    loss_of(model, 0, hvd.rank()).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
        assert parameter.grad.dtype == torch.float64
        assert not parameter.grad.is_sparse
    engine = optimizer._hvd_pipe
    assert not engine.synchronized
    assert hvd.allreduce(torch.ones(1)) == 1.0  # the other rank has come as far
    gradient = next(model.parameters()).grad
    assert gradient is not None
    float(gradient.norm())
    assert engine.synchronized
    # Pipe-SGD goes on to look for a scaler, whose scale it must know.
    assert (type(gradient) is torch.Tensor) == (name != "pipe-sgd")
    optimizer.step()
    optimizer.synchronize()


@SENDING
def test_a_backward_pass_that_raises_on_one_rank_is_told_on_all(name: str) -> None:
    """No weight moves, and the next step is as it should be."""
    model = make_model()
    optimizer = distributed(model, name)

    train(model, optimizer, range(3))
    optimizer.synchronize()
    before = weights_of(model).clone()
    optimizer.zero_grad()
    with out_of_memory_at(list(model.parameters())[2]):
        loss_of(model, 3, hvd.rank()).backward()
    with raises_on_all(RanksDisagreeError, "backward\\(\\) raised on rank 1"):
        optimizer.step()
        optimizer.synchronize()
    assert torch.equal(weights_of(model), before)
    train(model, optimizer, range(4, 8))
    optimizer.synchronize()
    assert_equal_on_ranks(model)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("did", ["cleared", "replaced"])
def test_what_one_rank_alone_does_to_a_gradient_is_told_on_all(name: str, did: str) -> None:
    model = make_model()
    optimizer = distributed(model, name)
    before = weights_of(model).clone()
    loss_of(model, 0, hvd.rank()).backward()
    if hvd.rank() == 0:
        parameter = model[2].weight
        parameter.grad = None if did == "cleared" else torch.zeros_like(parameter)
    with raises_on_all(RanksDisagreeError, f"'2.weight' was {did}.* on rank 0, and not on all"):
        optimizer.step()
        optimizer.synchronize()
    assert torch.equal(weights_of(model), before)


@SENDING
@pytest.mark.parametrize("how", ["passes", "no_sync"])
@pytest.mark.parametrize("ranks", [(1,), (0, 1)], ids=["one rank", "all ranks"])
def test_a_first_pass_that_raises_is_told(
    name: str, how: str, ranks: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """No gradient is complete by then."""
    model = make_model()
    passes = {"backward_passes_per_step": 2} if how == "passes" else {}
    optimizer = distributed(model, name, **passes)
    before = weights_of(model).clone()

    with (
        optimizer.no_sync() if how == "no_sync" else contextlib.nullcontext(),
        out_of_memory_at(list(model.parameters())[2], ranks),
    ):
        loss_of(model, 0, hvd.rank()).backward()
    if len(ranks) == 1:
        with raises_on_all(RanksDisagreeError, "backward\\(\\) raised on rank 1"):
            optimizer.step()
            optimizer.synchronize()
    else:
        optimizer.step()
        optimizer.synchronize()
        assert "backward() raised on every rank" in caplog.text
    assert torch.equal(weights_of(model), before)


@SENDING
def test_a_change_that_is_not_seen_is_told_on_all(name: str) -> None:
    """Code in C++ on rank 0 changes a gradient that is on its way; the next step is right."""
    model = make_model()
    optimizer = distributed(model, name)

    def triple(model: nn.Module, step: int) -> None:
        if hvd.rank() == 0:
            gradient = model.get_parameter("4.weight").grad
            with torch._C.DisableTorchFunctionSubclass():
                gradient.mul_(3.0)  # type: ignore[union-attr]

    train(model, optimizer, range(3))
    optimizer.synchronize()
    before = weights_of(model).clone()
    with raises_on_all(RanksDisagreeError, "was changed while it was being sent.*on rank 0"):
        train(model, optimizer, range(3, 4), triple)
        optimizer.synchronize()
    assert torch.equal(weights_of(model), before)
    train(model, optimizer, range(4, 5))
    optimizer.synchronize()
    assert not torch.equal(weights_of(model), before)
    assert_equal_on_ranks(model)


@SENDING
def test_ranks_that_drop_unlike_gradients(name: str) -> None:
    """All ranks clear what they have computed: it is nobody's business what that was."""
    model = make_model()
    optimizer = distributed(model, name)
    for step in range(STEPS):
        optimizer.zero_grad()
        if step == 4 and hvd.rank() == 1:
            model[4](torch.ones(1, 9, dtype=torch.float64)).sum().backward()
            model.zero_grad()
        elif step == 4:
            loss_of(model, 50, 0).backward()
            model.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        optimizer.step()
    check(model, optimizer, leave, name)


def test_two_optimizers_of_one_backward_pass_in_two_orders() -> None:
    """Each rank waits for another optimizer first."""
    model = make_model()
    layers = [model[0], model[2], model[4]]
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(layer.parameters(), lr=LR, momentum=0.9),
            [(f"{i}.{key}", p) for key, p in layer.named_parameters()],
            strategy="merged-gradient",
            groups=1,  # ranks agree on a measured plan in step(), in one order
        )
        for i, layer in enumerate(layers)
    ]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        for optimizer in optimizers if hvd.rank() == 0 else reversed(optimizers):
            optimizer.step()
    for optimizer in optimizers:
        optimizer.synchronize()
    torch.testing.assert_close(weights_of(model), trained_alone(leave), rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("did", ["read", "cleared", "replaced"])
def test_what_is_done_after_another_optimizers_step(name: str, did: str) -> None:
    """That step has sent all gradients: what was told of them is told."""
    model = make_model()
    first, second = (
        hvd.DistributedOptimizer(
            torch.optim.SGD(part.parameters(), lr=LR, momentum=0.9),
            [(f"{label}.{key}", p) for key, p in part.named_parameters()],
            strategy=EXACT[name],
        )
        for label, part in (("a", model[:2]), ("b", model[2:]))
    )

    def train(step: int) -> None:
        loss_of(model, step, hvd.rank()).backward()
        first.step()
        if did == "read" or step < 3:
            halve(model[2:], step)
        elif did == "cleared":
            model[2].weight.grad = None
        else:
            model[2].weight.grad = torch.zeros_like(model[2].weight)
        second.step()
        first.zero_grad()
        second.zero_grad()

    for step in range(3):
        train(step)
    before = weights_of(model[2:]).clone()
    if did == "read":
        train(3)
        wanted = trained_alone(lambda model, step: halve(model[2:], step), steps=4)
        torch.testing.assert_close(weights_of(model), wanted, rtol=0, atol=1e-15)
        return
    with raises_on_all(HvdPipeError, "'b.2.weight' was cleared or replaced after another"):
        train(3)
    assert torch.equal(weights_of(model[2:]), before)
    second.zero_grad()
    loss_of(model, 4, hvd.rank()).backward()
    first.step()
    second.step()
    assert_equal_on_ranks(model)


@SENDING
def test_no_sync_gathers_gradients_locally(name: str) -> None:
    """A step of two halves is one of both."""
    model = make_model()
    optimizer = distributed(model, name)
    for step in range(STEPS):
        optimizer.zero_grad()
        with optimizer.no_sync():
            (loss_of(model, step, hvd.rank()) * 0.5).backward()
        (loss_of(model, step, hvd.rank()) * 0.5).backward()
        optimizer.step()
    check(model, optimizer, leave, name)


@SENDING
def test_no_sync_alone_sends_in_step(name: str) -> None:
    model = make_model()
    optimizer = distributed(model, name)
    for step in range(STEPS):
        optimizer.zero_grad()
        with optimizer.no_sync():
            loss_of(model, step, hvd.rank()).backward()
        optimizer.step()
    check(model, optimizer, leave, name)


@SENDING
@pytest.mark.parametrize("how", ["passes", "no_sync"])
def test_a_short_last_accumulation_may_be_clipped(name: str, how: str) -> None:
    """As trainers do where an epoch has an odd number of batches; the last pass never comes."""
    model = make_model()
    arguments = {"backward_passes_per_step": 2} if how == "passes" else {}
    optimizer = distributed(model, name, **arguments)
    for step in range(STEPS):
        optimizer.zero_grad()
        if step % 3 == 2:
            with optimizer.no_sync() if how == "no_sync" else contextlib.nullcontext():
                loss_of(model, step, hvd.rank()).backward()
        else:
            with optimizer.no_sync() if how == "no_sync" else contextlib.nullcontext():
                (loss_of(model, step, hvd.rank()) * 0.5).backward()
            (loss_of(model, step, hvd.rank()) * 0.5).backward()
        clip(model, step)
        optimizer.step()
    check(model, optimizer, clip, name)


@pytest.mark.parametrize("name", EXACT)
def test_gradients_may_be_read_between_passes(name: str) -> None:
    """The average of the first pass; the second one is added to it, and that is averaged."""
    model = make_model()
    optimizer = distributed(model, name, backward_passes_per_step=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            (loss_of(model, step, hvd.rank()) * 0.5).backward()
            norms = gather(float(nn.utils.get_total_norm(gradients_of(model))))
            assert norms[0] == norms[1]
        optimizer.step()
    check(model, optimizer, leave, name)


@SENDING
def test_a_first_pass_that_is_given_up_is_not_counted(name: str) -> None:
    """A GAN's generator computes the discriminator's gradients, which are cleared."""
    model = make_model()
    optimizer = distributed(model, name, backward_passes_per_step=2)
    for step in range(STEPS):
        loss_of(model, 50 + step, hvd.rank()).backward()
        model.zero_grad()
        for _ in range(2):
            (loss_of(model, step, hvd.rank()) * 0.5).backward()
        optimizer.step()
        model.zero_grad()
    check(model, optimizer, leave, name)


def test_averages_may_be_added_up() -> None:
    """As under DDP: the mean of a sum of means is the sum."""
    model = make_model()
    optimizer, plain = distributed(model, "merged-gradient"), make_model()
    loss_of(model, 0, hvd.rank()).backward()
    clip(model, 0)
    loss_of(model, 1, hvd.rank()).backward()
    optimizer.step()
    total = []
    for rank in range(RANKS):
        loss_of(plain, 0, rank).backward()
    for parameter in plain.parameters():
        assert parameter.grad is not None
        parameter.grad /= RANKS
    clip(plain, 0)
    for rank in range(RANKS):
        again = copy.deepcopy(plain)
        again.zero_grad()
        loss_of(again, 1, rank).backward()
        total.append([p.grad for p in again.parameters()])
    for parameter, *each in zip(plain.parameters(), *total, strict=True):
        assert parameter.grad is not None
        parameter.grad += sum(each) / RANKS
    sgd(plain).step()
    torch.testing.assert_close(weights_of(model), weights_of(plain), rtol=0, atol=1e-15)


def test_averages_cannot_be_added_up_where_their_sum_is_another() -> None:
    model = make_model()
    optimizer = distributed(model, "merged-gradient", op=hvd.Sum)
    loss_of(model, 0, hvd.rank()).backward()
    clip(model, 0)
    with pytest.raises(HvdPipeError, match="a sum of averages cannot be sent again"):
        loss_of(model, 1, hvd.rank()).backward()
    model.zero_grad()
    optimizer.step()


def test_a_gradient_that_is_read_within_backward() -> None:
    """One that is on its way is nobody's; one that has not left is this rank's own."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        sgd(model), model.named_parameters(), strategy=MergedGradient(bucket_bytes=1)
    )
    # What the step before had tells nothing of this one.
    model[4](torch.ones(1, 9, dtype=torch.float64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model[2].weight.register_post_accumulate_grad_hook(lambda p: p.grad.norm())
    with pytest.raises(HvdPipeError, match=r"'2.weight' was read or changed within backward"):
        loss_of(model, 0, hvd.rank()).backward()
    del optimizer


@SENDING
def test_gradients_of_other_losses_and_of_other_threads(name: str) -> None:
    """``torch.autograd.grad`` fills no ``p.grad``; a backward pass may run in any thread."""
    model = make_model()
    optimizer = distributed(model, name)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step, hvd.rank())
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        torch.autograd.grad(loss_of(model, 50, hvd.rank()), list(model.parameters()))
        optimizer.step()
    check(model, optimizer, leave, name)


@SENDING
def test_lost_messages_are_the_readers_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elastic training must see the type."""
    model = make_model()
    optimizer = distributed(model, name)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    loss_of(model, 2, hvd.rank()).backward()

    def lost(buckets: object) -> None:
        raise HorovodInternalError("a worker is gone")

    with monkeypatch.context() as patched:
        patched.setattr(BucketSet, "wait", lost)
        with pytest.raises(HorovodInternalError, match="a worker is gone"):
            float(gradients_of(model)[0].norm())


def train_scaled(model: nn.Module, optimizer: Any, overflow: int, unscales: bool) -> list[float]:
    """Mixed precision's loop, in float32; an overflow on rank 1. Return the scales."""
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = scaler.scale((model(batch(step, hvd.rank()).float()) ** 2).mean())
        if (overflow, 1) == (step, hvd.rank()):
            loss = loss * torch.inf
        loss.backward()
        if unscales:
            scaler.unscale_(optimizer)
            clip(model, step)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    optimizer.synchronize()
    assert torch.isfinite(weights_of(model)).all()
    assert_equal_on_ranks(model)
    return scales


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("unscales", [False, True], ids=["step", "unscale and clip"])
@SENDING
def test_a_gradient_scaler_meets_averages(name: str, unscales: bool, fused: bool) -> None:
    """An overflow on rank 1 is one on all; scales and weights stay equal on both ranks."""
    model = make_model().float()
    strategy = {**EXACT, **PIPE}[name]
    plain = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), strategy=strategy)
    scales = train_scaled(model, optimizer, 4, unscales)
    assert gather(scales) == [scales] * 2
    assert min(scales) < 8.0 or max(scales) > 8.0
