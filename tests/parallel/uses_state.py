"""Uses of state: parameters that come and go, sparse gradients, checkpoints, copies and hooks."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import horovod.torch as stock
import numpy as np
import torch
from checkpoints import advance
from problem import batch, loss_of, make_model, train, weights_of
from torch import nn
from torch.optim import SGD, Optimizer, SparseAdam
from uses import Use
from uses_common import (
    FORWARD,
    MERGED,
    PIPE,
    PLAIN,
    STEPS,
    Array,
    MakeOptimizer,
    Pair,
    Script,
    at,
    make_momentum,
    make_sgd,
    wrap,
)

import hvd_pipe.torch as hvd
from hvd_pipe.torch.distributed import DistributedMixin

SAVED = 5  # steps before a checkpoint or a copy, in the middle of a round

# Gradients that are not computed.


def a_part(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    """Rank 0 leaves the first layer out in the first steps and later, all do so in two steps."""
    assert isinstance(model, nn.Sequential)
    inputs, targets = batch(rank, number)
    if number in (6, 7) or (rank == 0 and number in (0, 1, 4)):
        return nn.functional.mse_loss(model[2:](inputs[:, :5]), targets)
    return nn.functional.mse_loss(model(inputs), targets)


def not_on_rank_1(model: nn.Module, rank: int, number: int) -> torch.Tensor | None:
    """Rank 1 has an empty batch in two steps."""
    return None if rank == 1 and number in (0, 4) else loss_of(model, rank, number)


class Tokens(nn.Module):
    """An embedding of twenty tokens, with two dense layers beside it."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(15)
        self.table = nn.Embedding(20, 4, sparse=sparse).double()
        self.hidden = nn.Linear(4, 5).double()
        self.last = nn.Linear(5, 3).double()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.hidden(rows)))


def tokens_of(rank: int, number: int) -> torch.Tensor | None:
    """Of a batch: none on rank 0 in three steps, the first included, and none at all in one."""
    if number == 7 or (rank == 0 and number in (0, 3)):
        return None
    return (batch(rank, number)[0][:, 0].abs() * 10).long() % 20


def tokens_loss(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    assert isinstance(model, Tokens)
    (inputs, targets), tokens = batch(rank, number), tokens_of(rank, number)
    rows = inputs[:, :4] if tokens is None else model.table(tokens)
    return nn.functional.mse_loss(model(rows), targets)


def sparse_gradients(as_dense: bool) -> dict[str, Any]:
    """The ranks' table is sparse, the reference's is dense: SGD makes the same of both."""
    ours, dense = (
        Script(
            make=partial(Tokens, sparse),
            make_optimizer=make_sgd,
            loss=tokens_loss,
            arguments=given,
        )
        for sparse, given in ((True, {"sparse_as_dense": as_dense}), (False, {}))
    )
    return {"run": ours.run, "expected": dense.expected}


def make_table(sparse: bool) -> nn.Embedding:
    return Tokens(sparse).table


def make_layers() -> nn.Module:
    model = Tokens(sparse=False)
    return nn.Sequential(model.hidden, nn.Tanh(), model.last)


class DenseSparseAdam(SparseAdam):
    """For the reference: takes dense gradients, whose rows of zeros nobody has looked up."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.grad = None if p.grad is None else p.grad.to_sparse(1)
        return super().step(closure)


def lookup_loss(table: nn.Module, layers: nn.Module, rank: int, number: int) -> torch.Tensor:
    (inputs, targets), tokens = batch(rank, number), tokens_of(rank, number)
    rows = inputs[:, :4] if tokens is None else table(tokens)
    return nn.functional.mse_loss(layers(rows), targets)


def sparse_adam(kind: type[SparseAdam]) -> MakeOptimizer:
    return lambda table: kind(list(table.parameters()), lr=0.01)


# Parameters that come and go.


def freeze(model: nn.Sequential, optimizer: Any, number: int) -> None:
    model[0].weight.requires_grad_(False)


def unfreeze(model: nn.Sequential, optimizer: Any, number: int) -> None:
    assert model[0].weight.grad is None, "a frozen parameter has a gradient"
    model[0].weight.requires_grad_(True)


def make_upper(model: nn.Module) -> Optimizer:
    """An optimizer of all layers but the first."""
    assert isinstance(model, nn.Sequential)
    return SGD(model[2:].parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def add_lower(model: nn.Sequential, optimizer: Any, number: int) -> None:
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.02})


def make_lower_frozen() -> nn.Module:
    model = make_model()
    model[0].requires_grad_(False)
    return model


def unfreeze_and_add_lower(model: nn.Sequential, optimizer: Any, number: int) -> None:
    model[0].requires_grad_(True)
    add_lower(model, optimizer, number)


# Checkpoints and copies.


def finish(model: nn.Module, optimizer: Any) -> list[Array]:
    """The steps after `SAVED` ones."""
    records = advance(model, optimizer, range(SAVED, STEPS))
    optimizer.synchronize()
    return [*records, weights_of(model)]


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(strategy: str, *, before_loading: int = 0, **arguments: Any) -> tuple[Array, Array]:
    """A run, and one that another process could have gone on with from a checkpoint.

    Each rank has a checkpoint of its own; the optimizer that loads it may have stepped before.
    """
    model = make_model()
    optimizer = wrap(model, make_momentum(model), strategy, **arguments)
    begun = advance(model, optimizer, range(SAVED))
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    whole = [*begun, *finish(model, optimizer)]
    other = make_model()
    second = wrap(other, make_momentum(other), strategy, **arguments)
    advance(other, second, range(before_loading))
    other.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    return np.array(whole), np.array([*begun, *finish(other, second)])


def checkpointed(strategy: str, **arguments: Any) -> Array:
    whole, again = resumed(strategy, **arguments)
    assert np.array_equal(whole, again), "the resumed run differs"
    return again


def with_feedback(strategy: str) -> Array:
    """How far a resumed run is from the whole one, as there is no exact reference."""
    # Encoded gradients depend on the buckets, so these are given.
    joint = "," if ":" in strategy else ":"
    given = f"{strategy}{joint}plan=wfbp" if strategy.startswith(MERGED) else strategy
    whole, again = resumed(given, compression=hvd.Int8(error_feedback=True))
    return np.abs(whole - again)


def no_difference(strategy: str, n: int) -> Array:
    return np.zeros((n, STEPS + 1, weights_of(make_model()).size))


def copied(strategy: str, make_copy: Callable[[Any], Any]) -> Array:
    """The rows of a run, and those that its copy makes after it, in one array."""
    model = make_model()
    optimizer = wrap(model, make_momentum(model), strategy)
    begun = advance(model, optimizer, range(SAVED))
    twin, second = make_copy((model, optimizer))
    return np.array([*begun, *finish(model, optimizer), *finish(twin, second)])


def simulate_copies(strategy: str, n: int) -> Array:
    rows = PLAIN.expected(strategy, n)
    return np.concatenate([rows, rows[:, SAVED:]], axis=1)


def state_dict_on_rank_0(model: nn.Module, optimizer: Any, number: int) -> None:
    if hvd.is_initialized() and hvd.rank() == 0 and number > 0:
        optimizer.state_dict()


# Gradients that are changed.


def halve(model: nn.Module, optimizer: Any, number: int) -> None:
    """Put new tensors in the places of the gradients."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad * 0.5


def clip(model: nn.Module, optimizer: Any, number: int) -> None:
    """Change gradients in place."""
    nn.utils.clip_grad_value_(model.parameters(), 0.02)


def clear(model: nn.Module, optimizer: Any, number: int) -> None:
    model.zero_grad()


# Hooks and optimizers of the user's.


def count_steps(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.steps_seen = 0

    def hook(*_: Any) -> None:
        optimizer.steps_seen += 1

    optimizer.register_step_post_hook(hook)


def listen(model: nn.Module) -> nn.Module:
    """Have a hook clip every gradient of a backward pass in place."""
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(_clip_one)
    return model


def _clip_one(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad.clamp_(-0.02, 0.02)


def listen_late(model: nn.Module, optimizer: Any, number: int) -> None:
    listen(model)


def count_gradients(model: nn.Module, optimizer: Any, number: int) -> None:
    """A hook that only looks: how many gradients this optimizer's parameters got."""
    optimizer.gradients_seen = 0

    def hook(p: torch.Tensor) -> None:
        assert p.grad is not None
        optimizer.gradients_seen += 1

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)


class Signs(Optimizer):
    """An optimizer with a step of its own: momentum of a bounded gradient, and a counter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.updates = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        self.updates += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    average.mul_(0.8).add_(torch.tanh(p.grad))
                    p.sub_(average, alpha=group["lr"] / self.updates)


def make_trained(model: nn.Module) -> Optimizer:
    """A plain optimizer that has made steps, alike on all ranks."""
    optimizer = make_momentum(model)
    train(model, optimizer, rank=0, steps=3)
    return optimizer


def by_horovod(model: nn.Module, optimizer: Any, number: int) -> None:
    """On a rank: only rank 0 has a state, and Horovod's own functions hand it on."""
    if isinstance(optimizer, DistributedMixin):
        if hvd.rank() != 0:
            optimizer.state.clear()
        stock.broadcast_parameters(model.state_dict(), root_rank=0)
        stock.broadcast_optimizer_state(optimizer, root_rank=0)


USES: list[Use] = [
    Use(
        "`horovod.torch.broadcast_optimizer_state`, rank 0 alone has a state",
        **Script(make_optimizer=make_trained, setup=by_horovod).sides,
    ),
    Use("sparse gradients", **sparse_gradients(as_dense=False)),
    Use("sparse gradients, `sparse_as_dense=True`", **sparse_gradients(as_dense=True)),
    Use(
        "SparseAdam for an embedding, another optimizer for the rest",
        **Pair(
            (partial(make_table, sparse=True), make_layers),
            (partial(make_table, sparse=False), make_layers),
            ((sparse_adam(SparseAdam), sparse_adam(DenseSparseAdam)), (make_momentum,) * 2),
            ((lookup_loss, [0, 1]),),
        ).sides,
    ),
    Use("parameters without a gradient on some ranks or steps", **Script(loss=a_part).sides),
    Use("a rank that skips `backward()` in some steps", **Script(loss=not_on_rank_1).sides),
    Use(
        "`requires_grad_(False)`, and `True` again later",
        **Script(before=at({3: freeze, 7: unfreeze})).sides,
    ),
    Use(
        "layers that are unfrozen and added by `add_param_group()`",
        **Script(
            make=make_lower_frozen,
            make_optimizer=make_upper,
            before=at({5: unfreeze_and_add_lower}),
        ).sides,
    ),
    Use(
        "a checkpoint: `state_dict()`, saved and loaded with `weights_only=True`",
        run=checkpointed,
        expected=PLAIN.expected,
    ),
    Use(
        "a checkpoint that an optimizer loads after some steps",
        run=partial(checkpointed, before_loading=2),
        expected=PLAIN.expected,
    ),
    Use(
        "a checkpoint with `hvd.Int8(error_feedback=True)`",
        run=with_feedback,
        expected=no_difference,
        tolerance=0.0,
        replicas=(),
    ),
    Use("`state_dict()` on rank 0 alone", **Script(before=state_dict_on_rank_0).sides),
    Use(
        "`copy.deepcopy((model, optimizer))`; both train on",
        run=partial(copied, make_copy=copy.deepcopy),
        expected=simulate_copies,
    ),
    Use(
        "`pickle` of (model, optimizer)",
        run=partial(copied, make_copy=lambda pair: pickle.loads(pickle.dumps(pair))),
        expected=simulate_copies,
    ),
    Use(
        "new gradients between `backward()` and `step()`",
        run=Script(between=at({4: halve})).run,
        expected=Script(prepared=at({4: halve})).expected,
    ),
    Use(
        "clipping without `synchronize()`",
        run=Script(between=at({4: clip})).run,
        expected=Script(prepared=at({4: clip})).expected,
    ),
    Use(
        "`model.zero_grad()` between `backward()` and `step()`",
        **Script(between=at({4: clear})).sides,
    ),
    Use("momentum from before wrapping", **Script(make_optimizer=make_trained).sides),
    Use(
        "`register_step_post_hook()`: once an update",
        **Script(setup=count_steps, column=lambda optimizer: optimizer.steps_seen).sides,
    ),
    Use(
        "a hook on gradients that looks at them",
        **Script(setup=count_gradients, column=lambda each: each.gradients_seen).sides,
    ),
    Use(
        "a hook that changes gradients, made before wrapping",
        **Script(make=lambda: listen(make_model())).sides,
    ),
    Use(
        "a hook that changes gradients, made after wrapping",
        **Script(setup=listen_late).sides,
        refused=dict.fromkeys((MERGED, FORWARD, PIPE), "was read or changed within backward()"),
    ),
    Use(
        "an optimizer of the user's own",
        **Script(
            make_optimizer=lambda model: Signs(model.parameters(), lr=0.05),
            column=lambda optimizer: optimizer.updates,
        ).sides,
    ),
]
