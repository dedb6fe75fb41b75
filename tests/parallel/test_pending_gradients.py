"""Gradients after ``backward()``: whoever reads or changes one meets what ``step()`` applies."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from horovod.common.exceptions import HorovodInternalError
from on_ranks import gather, on_ranks
from pending_problem import (
    EXACT,
    LR,
    PIPE,
    SENDING,
    STEPS,
    Change,
    assert_equal_on_ranks,
    batch,
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
from hvd_pipe.measuring.step_times import FirstUses
from hvd_pipe.strategy import MergedGradient
from hvd_pipe.torch.messages.buckets import BucketSet

pytestmark = on_ranks(2, init=hvd.init)

EVERY = (*EXACT, *PIPE)


def cells(rows: Any) -> pytest.MarkDecorator:
    """Parametrize by the rows of a table, and by the strategies of each."""
    return pytest.mark.parametrize(
        ("row", "name"),
        [
            pytest.param(row, name, id=f"{key}-{name}")
            for key, row in rows.items()
            for name in row.names
        ],
    )


def backward(model: nn.Module, step: int, part: float = 1.0) -> None:
    (loss_of(model, step, hvd.rank()) * part).backward()


def scale(model: nn.Module, factor: float) -> None:
    for gradient in gradients_of(model):
        gradient.mul_(factor)


# What a script does to gradients.


def clip_listed(model: nn.Module, step: int) -> None:
    gradients = gradients_of(model)
    norm = torch.stack([g.norm() for g in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(torch.clamp(0.05 / norm, max=1.0))


def halve(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5


def halve_data(model: nn.Module, step: int) -> None:
    for gradient in gradients_of(model):
        gradient.data.mul_(0.5)


def drop_one(model: nn.Module, step: int) -> None:
    next(model.parameters()).grad = None


def read_in_turn(model: nn.Module, step: int) -> None:
    """One rank reads and the other does not."""
    if hvd.rank() == step % 2:
        assert all(float(each.norm()) >= 0 for each in gradients_of(model))


def branch_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """On rank 1, a loss that does not use the middle layer in two steps of three."""
    x = batch(step, rank)
    hidden = torch.tanh(model[0](x))  # type: ignore[index]
    if rank == 0 or step % 3 == 0:
        hidden = torch.tanh(model[2](hidden))  # type: ignore[index]
    loss: torch.Tensor = (model[4](hidden) ** 2).mean()  # type: ignore[index]
    return loss


# How it computes and applies them: each is what a script does in a step, with its step().


def clip_branches(model: nn.Module, optimizer: Any, step: int) -> None:
    """Lists of gradients are as long on all ranks: one that a rank lacks is there, as zeros."""
    branch_of(model, step, hvd.rank()).backward()
    assert all(p.grad is not None for p in model.parameters())
    clip(model, step)
    optimizer.step()


def halves(model: nn.Module, optimizer: Any, step: int) -> None:
    with optimizer.no_sync():
        backward(model, step, 0.5)
    backward(model, step, 0.5)
    optimizer.step()


def local_alone(model: nn.Module, optimizer: Any, step: int) -> None:
    with optimizer.no_sync():
        backward(model, step)
    optimizer.step()


def short_accumulation(no_sync: bool) -> Script:
    """As trainers do where an epoch has an odd number of batches; the last pass never comes."""

    def run(model: nn.Module, optimizer: Any, step: int) -> None:
        short = step % 3 == 2
        with optimizer.no_sync() if no_sync else contextlib.nullcontext():
            backward(model, step, 1.0 if short else 0.5)
        if not short:
            backward(model, step, 0.5)
        clip(model, step)
        optimizer.step()

    return run


def read_between(model: nn.Module, optimizer: Any, step: int) -> None:
    """The average of the first pass; the second one is added to it, and that is averaged."""
    for _ in range(2):
        backward(model, step, 0.5)
        norms = gather(float(nn.utils.get_total_norm(gradients_of(model))))
        assert norms[0] == norms[1]
    optimizer.step()


def halve_between(model: nn.Module, optimizer: Any, step: int) -> None:
    """As under DDP: the mean of a sum of means is the sum."""
    backward(model, step, 0.5)
    halve(model, step)
    backward(model, step, 0.5)
    optimizer.step()


def give_up(model: nn.Module, optimizer: Any, step: int) -> None:
    """A GAN's generator computes the discriminator's gradients, which are cleared."""
    backward(model, 50 + step)
    model.zero_grad()
    backward(model, step, 0.5)
    backward(model, step, 0.5)
    optimizer.step()


def drop_unlike(model: nn.Module, optimizer: Any, step: int) -> None:
    """All ranks clear what they have computed: it is nobody's business what that was."""
    if step == 4 and hvd.rank() == 1:
        model[4](torch.ones(1, 9, dtype=torch.float64)).sum().backward()  # type: ignore[index]
        model.zero_grad()
    elif step == 4:
        backward(model, 50)
        model.zero_grad()
    backward(model, step)
    optimizer.step()


def list_before_synchronize(model: nn.Module, optimizer: Any, step: int) -> None:
    """With two passes a step none is complete here."""
    backward(model, step)
    listed = gradients_of(model)
    optimizer.synchronize()
    norm = torch.stack([each.norm() for each in listed]).norm()
    torch._foreach_mul_(listed, torch.clamp(0.05 / (norm + 1e-6), max=1.0))
    with optimizer.skip_synchronize():
        optimizer.step()


def other_threads(model: nn.Module, optimizer: Any, step: int) -> None:
    """``torch.autograd.grad`` fills no ``p.grad``; a backward pass may run in any thread."""
    thread = threading.Thread(target=loss_of(model, step, hvd.rank()).backward)
    thread.start()
    thread.join()
    torch.autograd.grad(loss_of(model, 50, hvd.rank()), list(model.parameters()))
    optimizer.step()


def changed_by(change: Change) -> Script:
    def run(model: nn.Module, optimizer: Any, step: int) -> None:
        backward(model, step)
        change(model, step)
        optimizer.step()

    return run


Script = Callable[[nn.Module, Any, int], object]


@dataclass(frozen=True)
class Row:
    """A script, and what it comes to in one process: a change of the means, and a loss."""

    script: Script
    change: Change = leave
    passes: int = 1
    names: Sequence[str] = EVERY
    loss: Callable[[nn.Module, int, int], torch.Tensor] = loss_of


STEPPED = {
    **{
        each.__name__: Row(changed_by(each), each)
        for each in (clip, clip_listed, halve, halve_data, leave, read_in_turn)
    },
    "drop_one": Row(changed_by(drop_one), drop_one, names=tuple(EXACT)),
    "clip_branches": Row(clip_branches, clip, loss=branch_of),
    "halves": Row(halves),
    "local_alone": Row(local_alone),
    "short, passes": Row(short_accumulation(no_sync=False), clip, passes=2),
    "short, no_sync": Row(short_accumulation(no_sync=True), clip),
    "read_between": Row(read_between, passes=2, names=tuple(EXACT)),
    "halve_between": Row(
        halve_between, lambda model, _: scale(model, 0.75), names=("merged-gradient",)
    ),
    "give_up": Row(give_up, passes=2),
    "drop_unlike": Row(drop_unlike),
    "list_before_synchronize": Row(list_before_synchronize, clip),
    "list_before_synchronize, passes": Row(list_before_synchronize, clip, passes=2),
    "other_threads": Row(other_threads),
}


@cells(STEPPED)
def test_steps_are_those_of_one_process(row: Row, name: str) -> None:
    model = make_model()
    optimizer = distributed(model, name, backward_passes_per_step=row.passes)
    for step in range(STEPS):
        optimizer.zero_grad()
        row.script(model, optimizer, step)
    optimizer.synchronize()
    wanted = trained_alone(row.change, late=name in PIPE, loss=row.loss)
    torch.testing.assert_close(weights_of(model), wanted, rtol=0, atol=1e-15)


# What one rank alone does.


def raises_in(no_sync: bool) -> Misdeed:
    """A backward pass raises on rank 1: the whole one, or the first one of two."""

    def run(model: nn.Module, optimizer: Any) -> None:
        with (
            optimizer.no_sync() if no_sync else contextlib.nullcontext(),
            out_of_memory_at(model.get_parameter("2.weight")),
        ):
            backward(model, 3)

    return run


def sets_on_rank_0(gradient: Callable[[torch.Tensor], Any]) -> Misdeed:
    def run(model: nn.Module, optimizer: Any) -> None:
        backward(model, 3)
        if hvd.rank() == 0:
            parameter = model.get_parameter("2.weight")
            parameter.grad = gradient(parameter)

    return run


def triples_unseen(model: nn.Module, optimizer: Any) -> None:
    """Code in C++ on rank 0 changes a gradient that is on its way."""
    backward(model, 3)
    if hvd.rank() == 0:
        with torch._C.DisableTorchFunctionSubclass():
            model.get_parameter("4.weight").grad.mul_(3.0)  # type: ignore[union-attr]


Misdeed = Callable[[nn.Module, Any], object]


@dataclass(frozen=True)
class Told:
    """What one rank alone does in a step, and what all of them are told."""

    does: Misdeed
    says: str
    names: Iterable[str] = EVERY
    passes: int = 1


TOLD = {
    "raises": Told(raises_in(no_sync=False), r"backward\(\) raised on rank 1"),
    "raises, passes": Told(raises_in(no_sync=False), r"backward\(\) raised on rank 1", passes=2),
    "raises, no_sync": Told(raises_in(no_sync=True), r"backward\(\) raised on rank 1"),
    "cleared": Told(
        sets_on_rank_0(lambda _: None), "'2.weight' was cleared.* on rank 0, and not on all", EXACT
    ),
    "replaced": Told(
        sets_on_rank_0(torch.zeros_like),
        "'2.weight' was replaced.* on rank 0, and not on all",
        EXACT,
    ),
    "not seen": Told(triples_unseen, "was changed while it was being sent.*on rank 0"),
}


@cells(TOLD)
def test_what_one_rank_alone_does_is_told_on_all(row: Told, name: str) -> None:
    """No weight moves, neither by a second step; the next step is as it should be."""
    model = make_model()
    optimizer = distributed(model, name, backward_passes_per_step=row.passes)
    before = weights_of(model).clone()
    row.does(model, optimizer)
    with raises_on_all(RanksDisagreeError, row.says):
        optimizer.step()
        optimizer.synchronize()
    assert torch.equal(weights_of(model), before)
    if name in EXACT:
        optimizer.step()
        assert torch.equal(weights_of(model), before)
    train(model, optimizer, range(4, STEPS))
    optimizer.synchronize()
    assert not torch.equal(weights_of(model), before)
    assert_equal_on_ranks(model)


@SENDING
def test_a_first_pass_that_raises_on_every_rank_is_warned_of(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No gradient is complete by then."""
    model = make_model()
    optimizer = distributed(model, name, backward_passes_per_step=2)
    before = weights_of(model).clone()
    with out_of_memory_at(model.get_parameter("2.weight"), (0, 1)):
        backward(model, 0)
    optimizer.step()
    optimizer.synchronize()
    assert "backward() raised on every rank" in caplog.text
    assert torch.equal(weights_of(model), before)


@SENDING
@pytest.mark.parametrize("clear", ["optimizer", "model"])
def test_a_pass_that_raises_before_a_bucket_is_full_is_forgotten(name: str, clear: str) -> None:
    """Its gradients are in no bucket yet; the next pass counts its own alone."""
    model = make_model()
    optimizer = distributed(model, name)
    train(model, optimizer, range(3))
    optimizer.zero_grad()
    with out_of_memory_at(model.get_parameter("2.bias"), (0, 1)):
        backward(model, 3)
    (model if clear == "model" else optimizer).zero_grad()
    backward(model, 3)
    optimizer.step()
    train(model, optimizer, range(4, STEPS))
    optimizer.synchronize()
    wanted = trained_alone(leave, late=name in PIPE)
    torch.testing.assert_close(weights_of(model), wanted, rtol=0, atol=1e-15)


@SENDING
def test_a_rank_alone_takes_gradients_one_by_one(name: str) -> None:
    """Another hook could read them there; the other rank takes several at a time."""
    model = make_model()
    optimizer = distributed(model, name)
    if hvd.rank() == 1:
        model.get_parameter("2.weight").register_post_accumulate_grad_hook(lambda _: None)
    train(model, optimizer, range(STEPS))
    optimizer.synchronize()
    wanted = trained_alone(leave, late=name in PIPE)
    torch.testing.assert_close(weights_of(model), wanted, rtol=0, atol=1e-15)


@SENDING
def test_a_pass_that_raises_after_it_has_dropped_gradients_is_told(name: str) -> None:
    """Its round was ended within it."""
    model = make_model()
    optimizer = distributed(model, name)
    train(model, optimizer, range(2))
    model.zero_grad()
    backward(model, 2)
    model.zero_grad()
    before = weights_of(model).clone()
    with out_of_memory_at(model.get_parameter("0.weight")):
        backward(model, 3)
    with raises_on_all(RanksDisagreeError, r"backward\(\) raised on rank 1"):
        optimizer.step()
        optimizer.synchronize()
    if name in EXACT:
        assert torch.equal(weights_of(model), before)


@pytest.mark.parametrize("name", EXACT)
def test_one_rank_that_reads_too_early_is_told_before_a_weight_moves(name: str) -> None:
    """Under overlap=forward the first weights had moved by then."""
    model = make_model()
    optimizer = distributed(model, name, backward_passes_per_step=2)
    before = weights_of(model).clone()
    loss_of(model, 0, hvd.rank()).backward()
    with raises_on_all(RanksDisagreeError, "before their last backward pass on some ranks"):
        if hvd.rank() == 0:
            float(gradients_of(model)[0].norm())
        else:
            loss_of(model, 0, 1).backward()
            optimizer.step()
        loss_of(model, 1, hvd.rank())
    assert torch.equal(weights_of(model), before)
    assert not gradients_of(model)


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


# Other optimizers, other ranks.


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


def test_a_gradient_after_another_optimizers_step_is_refused() -> None:
    """The message had zeros for it, and its weight moved by the local gradient."""
    first, second = make_model(), make_model()
    one, two = distributed(first, "merged-gradient"), distributed(second, "merged-gradient")
    for step in range(2):
        one.zero_grad()
        two.zero_grad()
        (loss_of(first, step, 0) + second[0](torch.ones(1, 5).double()).sum()).backward()
        one.step()
        two.step()
    two.zero_grad()
    before = weights_of(second).clone()
    (loss_of(first, 2, 0) + second[0](torch.ones(1, 5).double()).sum()).backward()
    one.step()
    with raises_on_all(HvdPipeError, "was computed after another optimizer's step"):
        loss_of(second, 2, hvd.rank()).backward()
    assert torch.equal(weights_of(second), before)
    train(second, two, range(3, STEPS))
    assert_equal_on_ranks(second)


# Passes.


@pytest.mark.parametrize("name", EXACT)
def test_a_rank_may_step_after_fewer_passes(name: str) -> None:
    """As under stock Horovod: its last batches do not fill an accumulation."""
    model = make_model()
    optimizer = distributed(model, name, backward_passes_per_step=2)
    for rank in range(hvd.rank() + 1):
        loss_of(model, 0, rank).backward()
    optimizer.step()
    optimizer.synchronize()
    wanted = make_model()
    for rank in (0, 0, 1):  # rank 0 computes the first alone, rank 1 both
        (loss_of(wanted, 0, rank) / 2).backward()
    sgd(wanted).step()
    torch.testing.assert_close(weights_of(model), weights_of(wanted), rtol=0, atol=1e-15)


def test_averages_cannot_be_added_up_where_their_sum_is_another() -> None:
    model = make_model()
    optimizer = distributed(model, "merged-gradient", op=hvd.Sum)
    loss_of(model, 0, hvd.rank()).backward()
    clip(model, 0)
    with pytest.raises(HvdPipeError, match="a sum of averages cannot be sent again"):
        loss_of(model, 1, hvd.rank()).backward()
    model.zero_grad()
    optimizer.step()


@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
def test_a_gradient_that_is_read_within_backward(bucket_bytes: int) -> None:
    """One that is on its way is nobody's; one that has not left is this rank's own."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        sgd(model), model.named_parameters(), strategy=MergedGradient(bucket_bytes=bucket_bytes)
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


@SENDING
def test_a_local_gradient_may_be_copied(name: str) -> None:
    """Copies asked the class for what it had overridden, without an end."""
    model = make_model()
    optimizer = distributed(model, name)
    with optimizer.no_sync():
        loss_of(model, 0, hvd.rank()).backward()
        [gradient, *_] = gradients_of(model)
        own = torch.autograd.grad(loss_of(model, 0, hvd.rank()), list(model.parameters()))[0]
        for found in (
            copy.deepcopy(gradient),
            pickle.loads(pickle.dumps(gradient)),
            torch.vmap(lambda row: row * 1.0)(gradient),
        ):
            assert type(found) is torch.Tensor
            torch.testing.assert_close(found, own, rtol=0, atol=1e-15)
    loss_of(model, 1, hvd.rank()).backward()
    optimizer.step()
    optimizer.synchronize()
    assert_equal_on_ranks(model)


def test_pipe_sgd_lets_no_gradient_lead_to_what_is_in_flight_after_an_error() -> None:
    model = make_model()
    optimizer = distributed(model, "pipe-sgd")
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    loss_of(model, 2, hvd.rank()).backward()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # the refusal comes with the average
    optimizer.zero_grad()
    loss_of(model, 3, hvd.rank()).backward()
    with raises_on_all(HvdPipeError, "was replaced by another tensor"):
        optimizer.step()
    assert not gradients_of(model)


# Scalers.


@SENDING
def test_a_fused_optimizer_under_a_gradient_scaler(name: str) -> None:
    """An overflow on rank 1 is one on all; scales and weights stay equal on both ranks."""
    model = make_model().float()
    plain = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    optimizer = hvd.DistributedOptimizer(
        plain, model.named_parameters(), strategy={**EXACT, **PIPE}[name]
    )
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = scaler.scale((model(batch(step, hvd.rank()).float()) ** 2).mean())
        (loss * torch.inf if (step, hvd.rank()) == (4, 1) else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    optimizer.synchronize()
    assert torch.isfinite(weights_of(model)).all()
    assert_equal_on_ranks(model)
    assert gather(scales) == [scales] * 2
    assert min(scales) < 8.0 or max(scales) > 8.0


@pytest.mark.parametrize("says", [False, True], ids=["reads", "says the scale"])
def test_pipe_sgd_knows_the_scale_after_a_read(says: bool) -> None:
    """Who logs a norm before ``unscale_`` had the step's scale taken for that of the average.

    Who says the scale had the average divided by the ratio of the two twice.
    """
    model = make_model()
    optimizer = distributed(model, "pipe-sgd")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, hvd.rank())).backward()
        if says:
            optimizer.synchronize(loss_scale=scaler.get_scale())
        seen.append(float(gradients_of(model)[0].norm()))
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize() if says else contextlib.nullcontext():
            scaler.step(optimizer)
        scaler.update()
    assert len(seen) == STEPS
    optimizer.synchronize()
    wanted = trained_alone(leave, late=True)
    torch.testing.assert_close(weights_of(model), wanted, rtol=0, atol=1e-12)


# Sparse gradients.


def table_loss(table: nn.Embedding, step: int, rank: int) -> torch.Tensor:
    rows = torch.tensor([(step + rank) % 5, 4 - rank])
    return table(rows).square().sum() / 2.0


@SENDING
@pytest.mark.parametrize("reads", ["all", "rank 0"])
def test_a_sparse_gradient_can_be_read(name: str, reads: str) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(5, 3, sparse=True).double()
    wanted = copy.deepcopy(table)
    plain = torch.optim.SGD(wanted.parameters(), lr=LR)
    strategy = {**EXACT, **PIPE}[name]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=LR), table.named_parameters(), strategy=strategy
    )
    norms, late = [], None
    for step in range(STEPS):
        optimizer.zero_grad()
        table_loss(table, step, hvd.rank()).backward()
        if reads == "all" or hvd.rank() == 0:
            assert table.weight.grad is not None
            norms.append(float(table.weight.grad.to_dense().norm()))
        optimizer.step()
        mean = torch.stack(
            [
                torch.autograd.grad(table_loss(wanted, step, rank), [wanted.weight])[0].to_dense()
                for rank in range(2)
            ]
        ).mean(0)
        due, late = (late, mean) if name == "pipe-sgd" else (mean, None)
        if norms:
            applied = torch.zeros(()) if due is None else due
            assert norms[-1] == pytest.approx(float(applied.norm()), abs=1e-12)
        if due is not None:
            wanted.weight.grad = due
            plain.step()
    optimizer.synchronize()
    if late is not None:
        wanted.weight.grad = late
        plain.step()
    torch.testing.assert_close(weights_of(table), weights_of(wanted), rtol=0, atol=1e-12)


# Updates that are left to the next forward pass.


def deferring(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), strategy=EXACT["overlap"])


def test_an_update_that_runs_out_of_memory_in_the_forward_pass_leaves_the_rest_due() -> None:
    """The round was never completed, and the next step applied local gradients."""
    model = make_model()

    class Optimizer(torch.optim.SGD):
        updates_each_parameter = True
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                self.fails = False
                raise MemoryError("out of memory")
            return super().step(closure)

    optimizer = deferring(model, Optimizer(model.parameters(), lr=LR))
    train(model, optimizer, range(3))
    assert optimizer._hvd_pipe.is_due
    optimizer.fails = True
    with pytest.raises(MemoryError):
        loss_of(model, 3, hvd.rank())
    train(model, optimizer, range(3, STEPS))
    optimizer.synchronize()
    assert_equal_on_ranks(model)


def test_a_state_of_all_parameters_in_param_groups_is_refused() -> None:
    """Each partial update counted a step of its own, in a copy that was thrown away."""
    model = make_model()

    class Counting(torch.optim.SGD):
        updates_each_parameter = True

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
            return super().step(closure)

    optimizer = deferring(model, Counting(model.parameters(), lr=LR))
    train(model, optimizer, range(1))
    loss_of(model, 1, hvd.rank()).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="writes 'k' of its param_groups"):
        loss_of(model, 2, hvd.rank())


def test_an_update_that_writes_into_gradients_leaves_none_to_be_sent() -> None:
    """`synchronize()` took them for gradients that were set by hand."""
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, nesterov=True, foreach=True)
    optimizer = deferring(model, inner)
    train(model, optimizer, range(4))
    loss_of(model, 4, 0)  # an evaluation
    optimizer.synchronize()
    assert not optimizer._hvd_pipe.has_new_gradients
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_updates_wait_in_step_while_uses_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward pass that waits for messages does not tell when it would use its weights."""
    model, used = make_model(), []
    use = FirstUses.use

    def noted(self: FirstUses, indices: Any) -> None:
        used.append(sorted(indices))
        use(self, indices)

    monkeypatch.setattr(FirstUses, "use", noted)
    strategy = MergedGradient(overlap="forward")
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), strategy=strategy)
    watched = 0
    for step in range(60):
        train(model, optimizer, range(step, step + 1))
        engine = optimizer._hvd_pipe
        if isinstance(engine.ready_times, FirstUses):
            assert not engine.is_due
            watched += 1
    assert watched == 3
    assert used == [[0, 1], [2, 3], [4, 5]] * 2  # the model is found in the first pass
    optimizer.synchronize()
