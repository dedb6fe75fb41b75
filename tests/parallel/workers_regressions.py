"""What was found broken once, case by case, on two ranks, for test_regressions.py."""

from __future__ import annotations

import copy
import gc
import inspect
import time
import warnings
import weakref
from functools import partial
from typing import Any

import torch
from cases import run_cases
from problem import OPTIMIZERS, Weights, loss_of, make_model, weights_of
from torch import nn

import hvd_pipe.torch as hvd
from hvd_pipe.planning.plan import Plan
from hvd_pipe.torch.messages.buckets import BucketSet

STEPS = 6


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, hvd.rank(), number).backward()
    optimizer.step()


def normed(grow: bool) -> Weights:
    """Statistics of BatchNorm after a parameter was unfrozen, or the optimizer was copied."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    assert isinstance(model[0], nn.Linear)
    model[0].weight.requires_grad_(not grow)
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(
        plain, model.named_parameters(), strategy="cocod:period=2"
    )
    for number in range(STEPS):
        if number == STEPS // 2:
            if grow:
                model[0].weight.requires_grad_(True)
            else:
                model, optimizer = copy.deepcopy((model, optimizer))
        step(model, optimizer, number)
    optimizer.synchronize()
    return torch.cat([b.flatten().double() for b in model.buffers()]).numpy()


def frozen_alone(strategy: str) -> str:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
    )
    try:
        for number in range(STEPS):
            if (hvd.rank(), number) == (1, 3):
                next(model.parameters()).requires_grad_(False)
            step(model, optimizer, number)
    except hvd.RanksDisagreeError as error:
        return str(error)
    return "nothing was raised"


def in_bfloat16() -> Weights:
    """A model that starts unlike on rank 1, with a sparse table, broadcast and trained."""
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
    return torch.cat([p.detach().float().flatten() for p in model.parameters()]).numpy()


def added_and_copied() -> Weights:
    """The optimizer is copied right after add_param_group, and goes on as the copy."""
    model = make_model()
    first, second = model[0], model[2]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(first.parameters(), lr=0.1), first.named_parameters()
    )
    for number in range(STEPS):
        if number == 2:
            optimizer.add_param_group({"params": list(second.parameters())})
            if hvd.size() > 1:
                model, optimizer = copy.deepcopy((model, optimizer))
        step(model, optimizer, number)
    return weights_of(model)


def clamped() -> str:
    """Weights are clamped between steps, as in a Wasserstein GAN, while they are ahead."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model),
        model.named_parameters(),
        strategy="pipe-sgd:prediction=previous",
    )
    try:
        for number in range(STEPS):
            step(model, optimizer, number)
            with torch.no_grad():
                next(model.parameters()).clamp_(-0.1, 0.1)
    except hvd.HvdPipeError as error:
        optimizer.synchronize()
        return str(error)
    return "nothing was raised"


def goes_on(strategy: str) -> tuple[str, Weights]:
    """A step with gradients that were changed too early is refused; all go back to a state.

    They are changed by tensors that share their memory, which are not pending.
    """
    model, said = make_model(), ""
    kept: list[torch.Tensor] = []
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
    )
    for number in range(STEPS):
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), number).backward()
        if number == 3:
            torch._foreach_mul_(kept, 0.5)
        try:
            optimizer.step()
        except hvd.HvdPipeError as error:
            said = str(error)
            optimizer.load_state_dict(state)
        if number < 3:
            kept += [p.grad.detach() for p in model.parameters() if p.grad is not None]
    optimizer.synchronize()
    return said, weights_of(model)


def adasum_channels_last() -> Weights:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2))
    model = model.to(memory_format=torch.channels_last)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), op=hvd.Adasum
    )
    torch.manual_seed(hvd.rank())
    for _ in range(3):
        optimizer.zero_grad()
        images = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
        model(images).square().mean().backward()
        optimizer.step()
    return weights_of(model)


def inspected(strategy: str) -> Weights:
    """Rank 0 looks at all attributes of the optimizer, as a debugger does, and then they go on."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
    )
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), number).backward()
        look(optimizer)
        optimizer.step()
        look(optimizer)
    optimizer.synchronize()
    return weights_of(model)


def look(optimizer: Any) -> None:
    if hvd.rank() == 0:
        assert "_step_supports_amp_scaling" in dict(inspect.getmembers(optimizer))
    hvd.allreduce(torch.zeros(1), name="all have looked")


def own_scaler() -> tuple[Weights, Weights]:
    """A scaler of the user's own, which divides gradients one by one, and no scaler."""
    found = []
    for scale in (4.0, 1.0):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](model))
        for number in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, hvd.rank(), number) * scale
            if (hvd.rank(), number) == (1, 3):
                loss = loss * torch.inf
            loss.backward()
            for p in model.parameters():
                assert p.grad is not None
                p.grad.div_(scale)
            if all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters()):
                optimizer.step()
        optimizer.synchronize()
        found.append(weights_of(model))
    first, second = found
    return first, second


def exploded(strategy: str, loaded: str) -> tuple[Weights, Weights]:
    """Back to a state after a step that explodes, and a run that loads it and nothing before."""
    runs = []
    for explodes in (True, False):
        model = make_model(torch.float32)
        plain = OPTIMIZERS["momentum"](model)
        optimizer = hvd.DistributedOptimizer(
            plain,
            model.named_parameters(),
            strategy=strategy,
            compression=hvd.Int8(error_feedback=True),
        )
        state = optimizer.state_dict()
        if loaded == "plain":
            del state["hvd_pipe"]
        state = hvd.broadcast_object(copy.deepcopy(state), 0)
        weights = copy.deepcopy(model.state_dict())
        for number in range(3 if explodes else 0):
            optimizer.zero_grad()
            (loss_of(model, hvd.rank(), number) * 1000.0).backward()
            optimizer.step()
        model.load_state_dict(weights)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a plain state holds nothing in flight
            optimizer.load_state_dict(copy.deepcopy(state))
        for number in range(STEPS):
            step(model, optimizer, number)
        optimizer.synchronize()
        runs.append(weights_of(model))
    return runs[0], runs[1]


def rolled_back(strategy: str, drains: int) -> tuple[Weights, Weights]:
    """A run, and the same steps again from a state that was saved on the way."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
    )
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    runs = []
    for _ in range(2):
        for number in range(2, STEPS):
            step(model, optimizer, number)
        optimizer.synchronize()
        runs.append(weights_of(model))
        for number in range(2 * drains):
            step(model, optimizer, number)
            if number % 2:
                optimizer.synchronize()
        step(model, optimizer, STEPS)
        step(model, optimizer, STEPS + 1)
        model.load_state_dict(copy.deepcopy(state[0]))
        optimizer.load_state_dict(copy.deepcopy(state[1]))
    return runs[0], runs[1]


def replanned() -> tuple[Weights, Weights]:
    """Residuals of sums where the coming messages will look for them, before and after a plan."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 30))  # of several chunks
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model),
        model.named_parameters(),
        compression=hvd.Int8(error_feedback=True),
        groups=[list(model.parameters())],
    )
    torch.manual_seed(hvd.rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()
    engine = optimizer._hvd_pipe

    def residuals(name: str) -> Weights:
        found = {}
        for group, bucket in zip(engine.current.groups, engine.current.buckets, strict=True):
            own = bucket.message._slices[hvd.rank()]
            used = torch.zeros_like(bucket.message.feedback.reduced)
            own.of(used).copy_(own.of(bucket.message.feedback.reduced))
            found |= dict(zip(group, bucket.views_of(used), strict=True))
        whole = torch.cat([found[place].flatten() for place in sorted(found)])
        return hvd.allreduce(whole, name=name, op=hvd.Sum).numpy()

    before = residuals("before")
    engine._replace_buckets(Plan(tuple((name,) for name in engine.settings.names), "given"))
    return before, residuals("after")


def superseded() -> tuple[Weights, Weights]:
    """Pipe-SGD is wrapped again while a gradient is in flight, and all ranks join."""
    model = make_model()
    plain = OPTIMIZERS["momentum"](model)
    first = hvd.DistributedOptimizer(plain, model.named_parameters(), strategy="pipe-sgd")
    for number in range(3):
        step(model, first, number)
    second = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy="pipe-sgd"
    )
    before = weights_of(model)
    hvd.join()
    del first, second
    return before, weights_of(model)


def abandoned() -> tuple[Weights, Weights]:
    """The optimizer is gone, and on rank 0 its engine is not yet, when all ranks join."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy="pipe-sgd"
    )
    for number in range(3):
        step(model, optimizer, number)
    engine = optimizer._hvd_pipe if hvd.rank() == 0 else None
    before = weights_of(model)
    del optimizer
    gc.collect()
    hvd.join()
    del engine
    return before, weights_of(model)


def dropped() -> bool:
    """An optimizer with a codec waits for Python's collector, on rank 0, when all ranks join."""
    gc.disable()
    model = make_model()
    optimizer: Any = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model),
        model.named_parameters(),
        compression=hvd.Compression.int8,
    )
    step(model, optimizer, 0)
    left = weakref.ref(optimizer)
    if hvd.rank() == 0:
        optimizer.owner = [optimizer]
    del optimizer
    waits = left() is not None
    try:
        hvd.join()
    finally:
        gc.enable()
    return waits and left() is None


def sparse_sets() -> int:
    """How many sets of buckets there are when all know what is sparse."""
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        strategy="pipe-sgd",
    )
    for number in range(STEPS):
        optimizer.zero_grad()
        model(torch.tensor([number, hvd.rank()])).sum().backward()
        optimizer.step()
    optimizer.synchronize()
    parameters = list(model.parameters())
    gc.collect()
    found = [o for o in gc.get_objects() if isinstance(o, BucketSet)]
    return sum(o.parameters[0] is parameters[0] for o in found)


def loaded_alone(strategy: str, before: int, pause_s: float = 0.0) -> str:
    """Rank 0 alone loads a state, and nobody broadcasts it; rank 1 pauses before each step."""
    hvd.init()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
    )
    for number in range(4):
        step(model, optimizer, number)
    state = copy.deepcopy(optimizer.state_dict())
    if not before:
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
        )
    for number in range(before):
        step(model, optimizer, number)
    if hvd.rank() == 0:
        optimizer.load_state_dict(state)
    try:
        for number in range(STEPS):
            time.sleep(pause_s * hvd.rank())
            step(model, optimizer, number)
        optimizer.synchronize()
    except hvd.HvdPipeError as error:
        return str(error)
    return "nothing was raised"


def loaded_alone_among_trials(strategy: str, saved: int, before: int) -> str:
    """Rank 0 alone loads a state of so many steps, while others measure or try plans."""
    hvd.init()

    def made() -> tuple[nn.Module, Any]:
        model = make_model()
        plain = OPTIMIZERS["momentum"](model)
        return model, hvd.DistributedOptimizer(plain, model.named_parameters(), strategy=strategy)

    model, optimizer = made()
    for number in range(saved):
        step(model, optimizer, number)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.synchronize()
    model, optimizer = made()
    for number in range(before):
        step(model, optimizer, number)
    if hvd.rank() == 0:
        optimizer.load_state_dict(state)
    try:
        for number in range(60):
            step(model, optimizer, number)
        optimizer.synchronize()
    except hvd.HvdPipeError as error:
        return str(error)
    return "nothing was raised"


STRATEGIES = ("merged-gradient", "pipe-sgd", "cocod:period=3")
LOSSY = (
    "merged-gradient:plan=single",
    *STRATEGIES[1:],
    "pipe-sgd:warmup_steps=2",
    "cocod:period=3,warmup_steps=2",
)
ROLLED_BACK = (*LOSSY, "pipe-sgd:warmup_steps=4", "cocod:period=3,warmup_steps=4")
REFUSING = ("merged-gradient:plan=wfbp", "pipe-sgd")


def run() -> dict[Any, Any]:
    hvd.init()
    cases: dict[Any, Any] = {
        "unfrozen": partial(normed, True),
        "copied": partial(normed, False),
        "bfloat16": in_bfloat16,
        "added and copied": added_and_copied,
        "clamped": clamped,
        "adasum": adasum_channels_last,
        "own scaler": own_scaler,
        "replanned": replanned,
        "superseded": superseded,
        "abandoned": abandoned,
        "dropped": dropped,
        "sparse sets": sparse_sets,
    }
    for strategy in LOSSY:
        for loaded in ("plain", "rank 0's"):
            cases["exploded", strategy, loaded] = partial(exploded, strategy, loaded)
    for strategy in ROLLED_BACK:
        for drains in (1, 2):
            cases["rolled back", strategy, drains] = partial(rolled_back, strategy, drains)
    for strategy in REFUSING:
        cases["goes on", strategy] = partial(goes_on, strategy)
        cases["frozen alone", strategy] = partial(frozen_alone, strategy)
    for strategy in STRATEGIES:
        cases["inspected", strategy] = partial(inspected, strategy)
    return run_cases(cases)


def joined(strategy: str, compression: str, sparse: bool) -> str:
    """Uneven steps and hvd.join() where the other ranks' messages are no plain all-reduces."""
    hvd.init()
    model = nn.Sequential(nn.Embedding(6, 4, sparse=sparse), nn.Linear(4, 2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        compression=getattr(hvd.Compression, compression),
        strategy=strategy,
    )
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    try:
        hvd.join()
    except hvd.HvdPipeError as error:
        optimizer.synchronize()
        return str(error)
    return "nothing was raised"
