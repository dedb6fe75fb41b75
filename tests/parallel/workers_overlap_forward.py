"""Training whose updates wait for the next forward pass: test_overlap_forward.py looks at it."""

from __future__ import annotations

import copy
import gc
import io
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import horovod.torch as stock
import torch
from cases import Raised, run_cases
from problem import OPTIMIZERS, Loss, Weights, batch, loss_of, make_model, weights_of
from torch import nn
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

import hvd_pipe.torch as hvd
from hvd_pipe.errors import HvdPipeError
from hvd_pipe.torch import overlap_start
from hvd_pipe.torch.messages.ordered import OrderedMessage

PLANNED = "merged-gradient:overlap=forward"
ALONE = "merged-gradient:plan=wfbp,overlap=forward"
FILLED = "merged-gradient:bucket_bytes=64,overlap=forward"
BARRIER = "merged-gradient:plan=wfbp"

LONG = 68  # with all plans that are tried, first with the barrier
SHORT = 16
BEGUN = 6  # updates are deferred by then where the plan is given
RACED = 31  # and by then where merged-gradient's plans are tried before
ODD = 11  # the step in which ranks do something unlike
EVERY = 7  # steps between two records of the weights

R = TypeVar("R")
Look = Callable[[Any, Any], list[torch.Tensor]]
Make = Callable[[], nn.Module]
MakeOptimizer = Callable[[nn.Module], Optimizer]


class Run(NamedTuple):
    """What a rank has seen.

    Args:
        losses: Of every step.
        weights: Now and then, and at the end.
        looked: What a look has seen, step by step.
        deferred: The steps whose ``step()`` left messages to be waited for later.
        messages: Of the last step; 0 where nothing was deferred.
    """

    losses: list[float]
    weights: list[Weights]
    looked: list[list[torch.Tensor]]
    deferred: list[int]
    messages: int


# Models; all are called with a batch, and know the step and the rank.


class Attention(nn.Module):
    """``out_proj`` is read by its parent, and never called; dropout draws numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.grow = nn.Linear(6, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.encoder(self.grow(inputs)[None])[0])
        return result


class Tied(nn.Module):
    """The head has the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 10)
        self.head.weight = self.embedding.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        tokens = (inputs.abs().sum(1) * 7).long() % 10
        result: torch.Tensor = self.head(torch.tanh(self.middle(self.embedding(tokens))))
        return result[:, :3]


class Reader(nn.Module):
    """Reads the weights of a child that it never calls, and has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 0.7))
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.linear(inputs * self.scale, self.first.weight, self.first.bias)
        result: torch.Tensor = self.second(torch.tanh(hidden))
        return result


class Skipping(nn.Module):
    """Leaves layers out in some steps, not the same on all ranks; has an early exit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.early = nn.Linear(6, 3)
        self.number = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        if self.number % 5 == 4:
            return self.early(hidden)  # type: ignore[no-any-return]
        if self.number % 3 != 2:
            hidden = torch.tanh(self.middle(hidden))
        return self.last(hidden)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """An LSTM hands its weights to one function."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(6, 5, 2), nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.lstm(inputs)[0])
        return result


class Wandering(nn.Module):
    """From some step on, a weight is used by a function, and its layer is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.number = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        if self.number < ODD:
            return self.second(hidden)  # type: ignore[no-any-return]
        return nn.functional.linear(hidden, self.second.weight)


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(10, 6, sparse=True), nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        tokens = (inputs.abs().sum(1) * 7).long() % 10
        result: torch.Tensor = self.out(self.embedding(tokens))
        return result


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def sequential() -> nn.Module:
    return make_model(torch.float32)


def numbered_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Early exits at the same steps on all ranks, skipped layers one step apart."""
    inputs, targets = batch(rank, step, next(model.parameters()).dtype)
    model.number = step + (rank if step % 5 < 3 else 0)  # type: ignore[assignment]
    return nn.functional.mse_loss(model(inputs), targets)


def alike_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step, next(model.parameters()).dtype)
    model.number = step  # type: ignore[assignment]
    return nn.functional.mse_loss(model(inputs), targets)


def in_float64(make: Make) -> nn.Module:
    return make().double()


class Clipping(SGD):
    """Clips by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        super().step()


momentum = OPTIMIZERS["momentum"]


# A script.


def scripted(
    strategy: str | None,
    make: Make = sequential,
    make_optimizer: MakeOptimizer = momentum,
    loss: Loss = loss_of,
    steps: int = SHORT,
    look: Look | None = None,
    before: Callable[[Any, Any, int], object] = lambda model, optimizer, step: None,
    after: Callable[[Any, Any, int], object] = lambda model, optimizer, step: None,
    schedule: bool = False,
    backward: Callable[[int], bool] = lambda step: True,
    options: Callable[[ModuleType], dict[str, Any]] = lambda module: {},
    passes: int = 1,
) -> Run:
    """Train; by stock Horovod where no strategy is given.

    Args:
        look: What looks at something early, from step ``BEGUN`` on.
        before, after: What else the script does before and after each ``step()``.
        schedule: Whether a scheduler changes learning rates after each step.
        backward: Whether a step has a backward pass.
        options: More arguments of the optimizer.
        passes: Backward passes a step.
    """
    module: ModuleType = stock if strategy is None else hvd
    torch.manual_seed(1)
    model = make()
    given = options(module) | ({} if strategy is None else {"strategy": strategy})
    if passes > 1:
        given["backward_passes_per_step"] = passes
    optimizer: Any = module.DistributedOptimizer(
        make_optimizer(model), model.named_parameters(), **given
    )
    scheduler = StepLR(optimizer, 1, 0.9) if schedule else None
    torch.manual_seed(50 + module.rank())
    losses, weights, looked, deferred = [], [], [], []
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(passes * backward(step)):
            found = loss(model, module.rank(), passes * step + number)
            losses.append(found.item())
            found.backward()
        before(model, optimizer, step)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if pending(optimizer):
            deferred.append(step)
        after(model, optimizer, step)
        if look is not None and step >= BEGUN:
            looked.append(look(model, optimizer))
        if step % EVERY == EVERY - 1:
            weights.append(weights_of(model))
    weights.append(weights_of(model))
    return Run(losses, weights, looked, deferred, messages(optimizer))


def pending(optimizer: Any) -> list[int]:
    """The buckets that are not applied yet."""
    return list(getattr(getattr(optimizer, "_hvd_pipe", None), "_pending", ()))


def messages(optimizer: Any) -> int:
    plan = getattr(optimizer, "plan", None)
    order = None if plan is None else plan.order
    return 0 if order is None else len(order)


def both(strategy: str, against: str | None = None, **script: Any) -> tuple[Run, Run]:
    return scripted(against, **script), scripted(strategy, **script)


@contextmanager
def slow_network() -> Iterator[None]:
    """No message is there before it is waited for: a gate updates what it must, and no more."""
    plain = OrderedMessage.arrived
    OrderedMessage.arrived = property(lambda message: False)  # type: ignore[assignment]
    try:
        yield
    finally:
        OrderedMessage.arrived = plain  # type: ignore[method-assign]


def slowly(function: Callable[..., R], *arguments: Any, **options: Any) -> R:
    with slow_network():
        return function(*arguments, **options)


def decided(forward: bool, function: Callable[..., R], *arguments: Any, **options: Any) -> R:
    """Let the barrier lose or win the race of plans, whatever steps take."""
    seconds = 0.0 if forward else 1e3
    with mock.patch.object(overlap_start, "median", return_value=seconds):
        return function(*arguments, **options)


def compiled() -> nn.Module:
    found: nn.Module = torch.compile(sequential(), backend="eager")  # type: ignore[assignment]
    return found


def read_all(model: nn.Module, _: Any, step: int) -> None:
    """A script that logs the norm of its weights."""
    assert sum(float(p.detach().norm()) for p in model.parameters()) > 0


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "attention": {"make": Attention},
    "tied": {"make": Tied},
    "reader": {"make": Reader},
    "skipping": {"make": Skipping, "loss": numbered_loss},
    "recurrent": {"make": Recurrent},
    "batch norm": {"make": normed},
    "wandering": {"make": Wandering, "loss": alike_loss},
    "compiled": {"make": compiled},
    "weights that are read": {"after": read_all},
    "fp16": {"make": Reader, "options": lambda module: {"compression": module.Compression.fp16}},
    "sum, two passes": {
        "make": Tied,
        "options": lambda module: {"op": module.Sum},
        "passes": 2,
    },
    "groups and a scheduler": {
        "make": Attention,
        "make_optimizer": OPTIMIZERS["adamw-groups"],
        "schedule": True,
    },
}

AGAINST_STOCK: dict[str, Callable[[], tuple[Run, Run]]] = {
    f"{name}, {how}": partial(run, strategy, steps=steps, **script)
    for name, script in MODELS.items()
    for how, run, strategy, steps in (
        ("planned", partial(decided, True, both), PLANNED, LONG),
        ("wfbp", both, ALONE, SHORT),
        ("wfbp, slow network", partial(slowly, both), ALONE, SHORT),
        ("bytes, slow network", partial(slowly, both), FILLED, SHORT),
    )
}


# Who looks early.


def weights_in(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def by_state_dict(model: nn.Module, _: Any) -> list[torch.Tensor]:
    return [each.clone() for each in model.state_dict().values()]


def by_part(model: nn.Module, _: Any) -> list[torch.Tensor]:
    part = list(model.children())[-1]
    return [each.clone() for each in part.state_dict().values()]


def by_optimizer(_: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return [state[i]["momentum_buffer"].clone() for i in range(6)]


def by_copy(model: nn.Module, _: Any) -> list[torch.Tensor]:
    return weights_in(copy.deepcopy(model))


def by_copy_of_part(model: nn.Module, _: Any) -> list[torch.Tensor]:
    return weights_in(copy.deepcopy(list(model.children())[-1]))


def by_copy_of_both(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    other, copied = copy.deepcopy((model, optimizer))
    owned = [p for group in copied.param_groups for p in group["params"]]
    assert all(any(p is each for each in owned) for p in other.parameters())
    return weights_in(other)


def by_pickle(model: nn.Module, _: Any) -> list[torch.Tensor]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return weights_in(torch.load(file, weights_only=False))


def by_broadcast(model: nn.Module, _: Any) -> list[torch.Tensor]:
    hvd.broadcast_parameters(model.named_parameters(), root_rank=1)
    return weights_in(model)


def by_broadcast_of_state(model: nn.Module, _: Any) -> list[torch.Tensor]:
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return weights_in(model)


def by_synchronize(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    optimizer.synchronize()
    return weights_in(model)


def evaluated(model: nn.Module, _: Any, mode: Any, train: bool = False) -> list[torch.Tensor]:
    model.train(train)
    random_state = torch.get_rng_state()
    with mode():
        found = model(batch(0, 999, torch.float32)[0])
    torch.set_rng_state(random_state)
    model.train()
    return [found.clone()]


def evaluated_in_part(model: nn.Module, _: Any) -> list[torch.Tensor]:
    """A part that does not run by itself in training, and has a fast path without gradients."""
    layer = model.get_submodule("encoder.layers.1").eval()
    with torch.no_grad():
        found = layer(torch.ones(1, 3, 8))
    layer.train()
    return [found.clone()]


def loaded(model: nn.Module, _: Any) -> list[torch.Tensor]:
    """Other weights: what is pending must not be added to them."""
    state = {name: torch.full_like(each, 0.125) for name, each in model.named_parameters()}
    model.load_state_dict(state)
    return weights_in(model)


LOOKS: dict[str, tuple[Look, Make]] = {
    "state dict": (by_state_dict, Reader),
    "state dict of a part": (by_part, sequential),
    "optimizer's state dict": (by_optimizer, sequential),
    "copy": (by_copy, sequential),
    "copy of a model with its own parameters": (by_copy, Reader),
    "copy of a part": (by_copy_of_part, sequential),
    "copy of both": (by_copy_of_both, Reader),
    "pickle": (by_pickle, Reader),
    "broadcast": (by_broadcast, Reader),
    "broadcast of a state dict": (by_broadcast_of_state, Reader),
    "synchronize": (by_synchronize, Reader),
    "no_grad": (partial(evaluated, mode=torch.no_grad), Attention),
    "inference_mode": (partial(evaluated, mode=torch.inference_mode), Attention),
    "inference_mode in train mode": (
        partial(evaluated, mode=torch.inference_mode, train=True),
        Attention,
    ),
    "a part with no_grad": (evaluated_in_part, Attention),
    "load_state_dict": (loaded, sequential),
}


def looked(look: Look, make: Make) -> tuple[Run, Run]:
    return slowly(both, ALONE, BARRIER, make=make, look=look)


# Where updates stay in step().


@contextmanager
def warned() -> Iterator[list[str]]:
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                lines.append(record.getMessage())

    handler, log = Handler(), logging.getLogger("hvd_pipe")
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


FALLBACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "sparse": (
        "is sparse",
        {"make": Sparse, "make_optimizer": lambda m: SGD(m.parameters(), 0.1)},
    ),
    "not separable": (
        "`optimizer.updates_each_parameter = True`",
        {"make_optimizer": lambda m: Clipping(m.parameters(), lr=0.1)},
    ),
}


def fallen_back(**script: Any) -> tuple[Run, Run, list[str]]:
    with warned() as lines:
        return *both(ALONE, BARRIER, **script), lines


def refused(kind: Callable[..., Any], **options: Any) -> str:
    model = sequential()
    try:
        hvd.DistributedOptimizer(
            kind(model.parameters()), model.named_parameters(), strategy=PLANNED, **options
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


REFUSALS: dict[str, tuple[str, Callable[[], str]]] = {
    "LBFGS": ("leave overlap='forward' out", partial(refused, LBFGS)),
    "Adasum": ("Adasum", partial(refused, partial(SGD, lr=0.1), op=hvd.Adasum)),
}


def clip_always(model: nn.Module, optimizer: Any, step: int) -> None:
    clip(model, optimizer, 1)


# Ranks that differ.


def slow_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    time.sleep(0.02 * (rank == step % 2))
    return loss_of(model, rank, step)


def clip(model: nn.Module, optimizer: Any, step: int) -> None:
    """As scripts do that clip; every third step."""
    if step % 3 == 1:
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def hook_on_one(_: nn.Module, optimizer: Any, step: int) -> None:
    if (hvd.rank(), step) == (1, ODD):
        optimizer.register_step_pre_hook(lambda *_: None)


def save_on_one(model: nn.Module, optimizer: Any, step: int) -> None:
    if hvd.rank() == 0 and step > BEGUN:
        assert model.state_dict()
        assert optimizer.state_dict()


def has_gradient(step: int) -> bool:
    return (hvd.rank(), step) != (1, ODD)


SAID: dict[str, Callable[[Any, Any, int], object]] = {
    "nothing": lambda *_: None,
    "clipping now and then": clip,
    "clipping": clip_always,
    "one has a hook": hook_on_one,
}


def freeze(model: nn.Module, _: Any, step: int) -> None:
    next(model.parameters()).requires_grad_(step not in (2, 3, 4, 5))


UNLIKE: dict[str, dict[str, Any]] = {
    "one is slower": {"loss": slow_loss},
    "one has no gradient": {"backward": has_gradient},
    "clipping": {"before": clip},
    "one has a hook": {"before": hook_on_one},
    "one saves": {"after": save_on_one},
    "frozen for some steps": {"before": freeze},
}


def joined(strategy: str) -> tuple[Weights, int, int]:
    """Rank 1 makes three steps less; the others go on without it."""
    torch.manual_seed(1)
    model = sequential()
    optimizer = hvd.DistributedOptimizer(
        momentum(model), model.named_parameters(), strategy=strategy
    )
    deferred = 0
    for step in range(SHORT - 3 * (hvd.rank() == 1)):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        deferred += bool(pending(optimizer))
    last = hvd.join()
    return torch.cat([p.flatten() for p in weights_in(model)]).numpy(), deferred, int(last)


def joined_in_a_trial(strategy: str) -> int:
    """Epochs of unlike lengths, the first of which ends while plans are tried."""
    torch.manual_seed(1)
    model = sequential()
    optimizer = hvd.DistributedOptimizer(
        momentum(model), model.named_parameters(), strategy=strategy
    )
    steps = 0
    for epoch in range(6):
        for step in range(9 + 2 * (hvd.rank() == 1) + 24 * (epoch == 5)):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
            optimizer.step()
            steps += bool(pending(optimizer))
        hvd.join()
    return steps


class Back(NamedTuple):
    """A run whose steps with the barrier were faster, and one that goes on from its state.

    Args:
        runs: Stock Horovod's and ours.
        plans: At the end, and at the end of the run that goes on.
        went_on: The steps of that one which left messages to be waited for later.
    """

    runs: tuple[Run, Run]
    plans: tuple[hvd.Plan, hvd.Plan]
    went_on: list[int]


def barrier_wins() -> Back:
    kept: list[Any] = []

    def keep(model: nn.Module, optimizer: Any, step: int) -> None:
        kept[:] = [model, optimizer]

    runs = both(PLANNED, steps=LONG, after=keep)
    model, before = kept
    optimizer = hvd.DistributedOptimizer(
        momentum(model), model.named_parameters(), strategy=PLANNED
    )
    optimizer.load_state_dict(before.state_dict())
    went_on = []
    for step in range(LONG):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        if pending(optimizer):
            went_on.append(step)
    return Back(runs, (before.plan, optimizer.plan), went_on)


def loaded_later() -> dict[str, tuple[bool, bool]]:
    """States of every phase are loaded in turn by a run that defers.

    Returns:
        By state, whether the last step was deferred, and whether the plan has an order.
    """

    def trained(optimizer: Any, model: nn.Module) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for step in range(LONG):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
            optimizer.step()
            state = {} if step % 2 else optimizer.state_dict()  # which makes the updates
            plan = state.get("hvd_pipe", {}).get("counters", {}).get("plan")
            kind = "none" if plan is None else "ordered" if '"order"' in plan else "barrier"
            if state and kind not in found:
                found[kind] = copy.deepcopy(state)
        return found

    def run(forward: bool, strategy: str = PLANNED) -> tuple[Any, nn.Module, dict[str, Any]]:
        torch.manual_seed(1)
        model = sequential()
        optimizer = hvd.DistributedOptimizer(
            momentum(model), model.named_parameters(), strategy=strategy
        )
        return optimizer, model, decided(forward, trained, optimizer, model)

    *_, barrier = run(False, "merged-gradient")
    back, *_ = run(False)
    optimizer, model, states = run(True)
    states["barrier"] = barrier["barrier"]
    states["back"] = copy.deepcopy(back.state_dict())
    result = {}
    for name in ("barrier", "ordered", "back", "barrier", "none", "back", "ordered"):
        optimizer.load_state_dict(states[name])
        decided(True, trained, optimizer, model)
        result[name] = bool(pending(optimizer)), optimizer.plan.order is not None
    return result


class Tried(NamedTuple):
    """The plans as their trials end, the plan that stays, and the weights at the end."""

    tried: list[hvd.Plan]
    kept: hvd.Plan
    weights: Weights


UNLIKE_S = ((1e-9, 3e-9, 4e-9, 5e-9), (4e-9, 3e-9, 1e-9, 2e-9))
"""By rank, the seconds of a step with each plan; each by itself would keep another plan."""


def timed_unlike() -> Tried:
    """Both are faster than the barrier."""
    torch.manual_seed(1)
    model = sequential()
    optimizer = hvd.DistributedOptimizer(
        momentum(model), model.named_parameters(), strategy=PLANNED
    )
    tried: list[hvd.Plan] = []

    def seconds(steps: Iterator[float]) -> float:
        tried.append(optimizer.plan)
        return UNLIKE_S[hvd.rank()][len(tried) - 1]

    with mock.patch.object(overlap_start, "median", seconds):
        for step in range(LONG):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
            optimizer.step()
    kept = optimizer.plan
    optimizer.synchronize()
    return Tried(tried, kept, weights_of(model))


def joined_while_watched(strategy: str) -> tuple[Weights, int]:
    """A parameter joins while uses are watched: it is watched anew."""
    torch.manual_seed(1)
    model = sequential()
    parameters = list(model.parameters())
    plain = SGD(parameters[:-1], lr=0.05)
    optimizer = hvd.DistributedOptimizer(plain, strategy=strategy)
    deferred = 0
    for step in range(SHORT):
        if step == 2:
            optimizer.add_param_group({"params": parameters[-1:]})
        model.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        deferred += bool(pending(optimizer))
    return torch.cat([p.flatten() for p in by_state_dict(model, optimizer)]).numpy(), deferred


def adds_alone() -> str:
    """Rank 0 alone adds parameters."""
    hvd.init()
    torch.manual_seed(1)
    model, more = sequential(), nn.Linear(3, 3)
    optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters(), strategy=ALONE)
    try:
        for step in range(SHORT):
            if step == SHORT - 3 and hvd.rank() == 0:
                optimizer.add_param_group({"params": list(more.parameters())})
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
            optimizer.step()
    except HvdPipeError as error:
        return str(error)
    return "nobody was told"


def let_go(strategy: str) -> tuple[Weights, bool]:
    """The optimizer is gone when its function has returned; another takes the next steps."""
    torch.manual_seed(1)
    model = sequential()

    def trained(steps: range, lr: float) -> bool:
        optimizer = hvd.DistributedOptimizer(
            SGD(model.parameters(), lr=lr), model.named_parameters(), strategy=strategy
        )
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
            optimizer.step()
        return bool(pending(optimizer))

    deferred = trained(range(SHORT), 0.1)
    gc.collect()
    deferred &= trained(range(SHORT, 2 * SHORT), 0.03) or strategy == BARRIER
    gc.collect()
    return weights_of(model), deferred


def replaced(strategy: str) -> tuple[list[float], Weights, bool]:
    """Another optimizer of the same weights is made after a step; the first is kept."""
    torch.manual_seed(1)
    model, losses, kept = sequential(), [], []
    deferred = True
    for lr in (0.1, 0.03):
        optimizer = hvd.DistributedOptimizer(
            SGD(model.parameters(), lr=lr), model.named_parameters(), strategy=strategy
        )
        kept.append(optimizer)
        for step in range(SHORT):
            optimizer.zero_grad()
            loss = loss_of(model, hvd.rank(), step)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
        deferred &= bool(pending(optimizer))
    return losses, weights_of(model), deferred


def gone_apart() -> tuple[int, str]:
    """Rank 0 alone calls ``synchronize()`` after a step, as before an evaluation of its own."""
    torch.manual_seed(1)
    model = sequential()
    optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters(), strategy=ALONE)
    step = 0
    try:
        for step in range(SHORT):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
            optimizer.step()
            if (hvd.rank(), step) == (0, ODD):
                optimizer.synchronize()
        optimizer.synchronize()
    except hvd.HvdPipeError as error:
        return step, str(error)
    return step, "nothing was raised"


def at_two() -> dict[Any, Any]:
    hvd.init()
    cases: dict[Any, Callable[[], Any]] = dict(AGAINST_STOCK)
    cases |= {("look", name): partial(looked, *each) for name, each in LOOKS.items()}
    cases |= {
        ("fallback", name): partial(fallen_back, **each) for name, (_, each) in FALLBACKS.items()
    }
    cases |= {("refusal", name): each for name, (_, each) in REFUSALS.items()}
    cases |= {
        ("unlike", name): partial(both, ALONE, BARRIER, **each) for name, each in UNLIKE.items()
    }
    cases |= {("said", name): partial(fallen_back, before=each) for name, each in SAID.items()}
    joins: dict[Any, Callable[[], Any]] = {
        ("join", each): partial(joined, each) for each in (ALONE, BARRIER)
    }
    joins |= {
        (job.__name__, each): partial(slowly, job, each)
        for job in (let_go, replaced)
        for each in (ALONE, BARRIER)
    }
    joins |= {
        ("joined while watched", each): partial(joined_while_watched, each)
        for each in (ALONE, BARRIER)
    }
    joins["joined in a trial"] = partial(decided, True, joined_in_a_trial, PLANNED)
    joins["loaded later"] = loaded_later
    joins["timed unlike"] = timed_unlike
    joins["barrier wins"] = partial(decided, False, barrier_wins)
    return run_cases({**cases, **joins, "apart": gone_apart})


# At three ranks, against one process.


SERIAL: dict[str, dict[str, Any]] = {
    name: {**script, "make": partial(in_float64, script.get("make", sequential))}
    for name, script in MODELS.items()
    if name in ("plain", "tied", "reader", "skipping")
}


def at_three() -> dict[str, Run | Raised]:
    """The last steps are left to what ends the script."""
    hvd.init()
    return run_cases(
        {
            (name, strategy): partial(decided, True, scripted, strategy, steps=steps, **script)
            for name, script in SERIAL.items()
            for strategy, steps in ((PLANNED, LONG), (ALONE, SHORT))
        }
    )


def serial(
    workers: int,
    make: Make,
    loss: Loss = loss_of,
    make_optimizer: MakeOptimizer = momentum,
    steps: int = LONG,
) -> list[Weights]:
    """The weights as one process computes them, which has all gradients."""
    torch.manual_seed(1)
    model = make()
    optimizer = make_optimizer(model)
    found = []
    for step in range(steps):
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(workers):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            for total, p in zip(sums, model.parameters(), strict=True):
                if p.grad is not None:
                    total.add_(p.grad)
        for total, p in zip(sums, model.parameters(), strict=True):
            p.grad = total / workers
        optimizer.step()
        if step % EVERY == EVERY - 1:
            found.append(weights_of(model))
    return [*found, weights_of(model)]


# Ends of scripts.


def ends_without_waiting() -> bool:
    """The last thing that a script does is a step; returns whether it was deferred."""
    hvd.init()
    model = sequential()
    optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters(), strategy=ALONE)
    for step in range(SHORT):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
    return bool(pending(optimizer))


def shut_down() -> tuple[Weights, Weights, bool]:
    """The weights after ``shutdown()``, which are read as they are, and those of one process."""
    hvd.init()
    workers, rank = hvd.size(), hvd.rank()
    torch.manual_seed(1)
    model = in_float64(sequential)
    optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters(), strategy=ALONE)
    for step in range(SHORT):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    deferred = bool(pending(optimizer))
    hvd.shutdown()
    ours = torch.cat(list(map(torch.flatten, weights_in(model)))).numpy()
    return ours, serial(workers, partial(in_float64, sequential), steps=SHORT)[-1], deferred
