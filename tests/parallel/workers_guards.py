"""What would give wrong numbers or wait for ever, and must not, on two ranks."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import torch
from cases import run_cases
from problem import OPTIMIZERS, Weights, make_model, train, weights_of
from torch import nn

import hvd_pipe.torch as hvd

LR = 2.0**-6
EARLY, LATE = 5, 25  # steps of rank 0 and rank 1; a plan is due in between
MORE = 16  # after both have joined; a plan is due, if none was made

STRATEGIES = ("merged-gradient", "pipe-sgd", "cocod:period=2")

# After which step rank 0 alone calls synchronize(): without a plan to make, and around the steps
# in which merged-gradient starts to record, ends that, and plans.
EVALUATED = [(4, "merged-gradient:plan=wfbp")] + [
    (after, "merged-gradient") for after in (1, 2, 3, 11, 12, 13)
]


def one_weight(strategy: str, lr: float = LR) -> tuple[nn.Linear, Any]:
    """A model whose gradient is 1 on both ranks in every step."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    plain = torch.optim.SGD(model.parameters(), lr=lr)
    return model, hvd.DistributedOptimizer(plain, model.named_parameters(), strategy=strategy)


def step(model: nn.Linear, optimizer: Any) -> None:
    optimizer.zero_grad()
    model.weight.sum().backward()
    optimizer.step()


def joined(strategy: str) -> tuple[float, float, float]:
    """Uneven data: rank 0 has less. The weight after joining, synchronizing and going on."""
    model, optimizer = one_weight(strategy)
    for _ in range(LATE if hvd.rank() else EARLY):
        step(model, optimizer)
    hvd.join()
    before = model.weight.item()
    optimizer.synchronize()
    after = model.weight.item()
    for _ in range(MORE):
        step(model, optimizer)
    optimizer.synchronize()
    return before, after, model.weight.item()


def unlike_step(model: nn.Linear, optimizer: Any, gradient: float) -> None:
    """A step with this gradient on rank 0 and twice as much on rank 1."""
    optimizer.zero_grad()
    (model.weight.sum() * gradient * (1 + hvd.rank())).backward()
    optimizer.step()


def loaded(strategy: str, held: int, plain: bool = False) -> tuple[list[float], int]:
    """Save after ``held`` steps, go on, load: three more steps, in units of the learning rate.

    Gradients are 100 before saving, 10 in what loading forgets, and 1 after it, so that each
    number says what it is made of. Then what ``synchronize()`` adds, and the number of warnings.
    """
    model, optimizer = one_weight(strategy)
    for _ in range(held):
        unlike_step(model, optimizer, 100.0)
    weight, state = model.weight.detach().clone(), copy.deepcopy(optimizer.state_dict())
    if plain:
        del state["hvd_pipe"]
    for _ in range(3):
        unlike_step(model, optimizer, 10.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(state)
    with torch.no_grad():
        model.weight.copy_(weight)
    updates = []
    for _ in range(3):
        unlike_step(model, optimizer, 1.0)
        updates.append(-model.weight.item() / LR)
    optimizer.synchronize()
    return [*updates, -model.weight.item() / LR], len(caught)


def scaled() -> Weights:
    """Horovod's pattern for GradScaler."""
    model = make_model(torch.float32)
    optimizer: Any = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters()
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for number in range(4):
        optimizer.zero_grad()
        x = torch.full((2, 6), 1.0 + hvd.rank() + number)
        scaler.scale(model(x).pow(2).mean()).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    return weights_of(model)


class Old(torch.optim.SGD):
    """As people wrote optimizers before zero_grad() had an argument."""

    def zero_grad(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.zero_()


def old_zero_grad(strategy: str) -> Weights:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        Old(model.parameters(), lr=0.05), model.named_parameters(), strategy=strategy
    )
    return train(model, optimizer, hvd.rank(), steps=6)


def made_anew() -> Weights:
    """An optimizer for parameters that another one, still alive, has listened to."""
    model = make_model()
    first = hvd.DistributedOptimizer(OPTIMIZERS["adam"](model), model.named_parameters())
    second = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](model), model.named_parameters())
    weights = train(model, second, hvd.rank(), steps=6)
    del first
    return weights


def evaluated_on_rank_0(after: int, strategy: str) -> tuple[int, str]:
    """``if rank == 0: synchronize(); evaluate()`` after a step; where training ended, and how."""
    model, optimizer = one_weight(strategy)
    number = 0
    try:
        for number in range(after + 3):
            step(model, optimizer)
            if hvd.rank() == 0 and number == after:
                optimizer.synchronize()
    except hvd.HvdPipeError as error:
        return number, str(error)
    return number, "nothing was raised"


def clipped_with_empty_batches(strategy: str) -> list[float]:
    """The clipping pattern, where a rank in turn has an empty batch; ``synchronize()`` between.

    After step 6 all ranks give the gradients up that they have prepared.
    """
    model, optimizer = one_weight(strategy)
    weights = []
    for number in range(MORE):
        optimizer.zero_grad()
        if number % 3 != 1 + hvd.rank():
            model.weight.sum().backward()
        optimizer.synchronize()
        if number == 6:
            continue
        with optimizer.skip_synchronize():
            optimizer.step()
        weights.append(-model.weight.item() / LR)
        if number % 4 == 0:
            optimizer.synchronize()  # before an evaluation, on every rank
    return weights


def run() -> dict[Any, Any]:
    hvd.init()
    cases: dict[Any, Any] = {
        (name, strategy): partial(case, strategy)
        for strategy in STRATEGIES
        for name, case in (
            ("joined", joined),
            ("loaded, nothing in flight", partial(loaded, held=0)),
            ("loaded, in flight", partial(loaded, held=3)),
            ("loaded, plain", partial(loaded, held=3, plain=True)),
            ("old", old_zero_grad),
        )
    }
    apart: dict[Any, Any] = {
        ("evaluated on rank 0", after, strategy): partial(evaluated_on_rank_0, after, strategy)
        for after, strategy in EVALUATED
    }
    clipped = partial(clipped_with_empty_batches, "merged-gradient")
    others: dict[Any, Any] = {"scaled": scaled, "made anew": made_anew, "clipped": clipped}
    return run_cases({**cases, **others, **apart})


def clip_without_a_gradient(strategy: str) -> str:
    """Rank 1 has an empty batch in step 2 and skips backward(), under the clipping pattern."""
    hvd.init()
    model, optimizer = one_weight(strategy)
    try:
        for number in range(6):
            optimizer.zero_grad()
            if (hvd.rank(), number) != (1, 2):
                model.weight.sum().backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
    except hvd.HvdPipeError as error:
        return str(error)
    return "nothing was raised"


def refused_on_one_rank() -> str:
    """An error of any kind while rank 1 reads its arguments reaches rank 0."""
    hvd.init()

    def names() -> Any:
        if hvd.rank() == 1:
            raise KeyError("layer 7")
        return make_model().named_parameters()

    model = make_model()

    class Named:
        def __iter__(self) -> Any:
            return iter(model.named_parameters()) if hvd.rank() == 0 else names()

    try:
        hvd.DistributedOptimizer(OPTIMIZERS["adam"](model), Named())
    except (KeyError, hvd.HvdPipeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
