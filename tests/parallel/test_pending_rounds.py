"""Rounds of pending gradients that do not go as usual: reads, failures, other optimizers."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from pending_problem import (
    EXACT,
    LR,
    PIPE,
    SENDING,
    STEPS,
    assert_equal_on_ranks,
    check,
    clip,
    distributed,
    gradients_of,
    leave,
    loss_of,
    make_model,
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
from hvd_pipe.torch.measuring.step_times import FirstUses

pytestmark = on_ranks(2, init=hvd.init)


def deferring(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), strategy=EXACT["overlap"])


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


# Updates that fail, or come to something unlike.


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


# Who holds a gradient.


@SENDING
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_that_are_listed_before_synchronize_show_the_averages(
    name: str, passes: int
) -> None:
    """With two passes a step none is complete here."""
    model = make_model()
    optimizer = distributed(model, name, backward_passes_per_step=passes)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        listed = gradients_of(model)
        optimizer.synchronize()
        norm = torch.stack([each.norm() for each in listed]).norm()
        torch._foreach_mul_(listed, torch.clamp(0.05 / (norm + 1e-6), max=1.0))
        with optimizer.skip_synchronize():
            optimizer.step()
    check(model, optimizer, clip, name)


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


def test_after_an_error_a_second_step_applies_nothing() -> None:
    model = make_model()
    optimizer = distributed(model, "merged-gradient")
    before = weights_of(model).clone()
    loss_of(model, 0, hvd.rank()).backward()
    if hvd.rank() == 0:
        model[2].weight.grad = None
    with raises_on_all(RanksDisagreeError, "on rank 0, and not on all"):
        optimizer.step()
    optimizer.step()
    assert torch.equal(weights_of(model), before)


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


# Other optimizers, other ranks.


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
