"""Checkpoints, case by case: test_resume.py says what must come of them."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import horovod.torch as stock
import numpy as np
import numpy.typing as npt
import torch
from cases import Raised, run_cases
from problem import OPTIMIZERS as COMMON
from problem import loss_of, make_model, weights_of
from torch import nn
from torch.optim import SGD, Optimizer

import hvd_pipe.torch as hvd

SAVED, STEPS = 7, 13
PLANNED = 28  # steps after which merged-gradient has tried its plans

Array = npt.NDArray[Any]
Checkpoint = dict[str, Any]

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    **COMMON,
    "sgd": lambda model: SGD(model.parameters(), lr=0.05),
}
STRATEGIES = ("merged-gradient", "pipe-sgd", "cocod:period=4")
FEEDBACK = "int8 with feedback"


@dataclass(frozen=True)
class Case:
    """One run, which is saved after ``saved`` steps and has six more."""

    strategy: str
    optimizer: str = "momentum"
    compression: str = "none"
    saved: int = SAVED

    def __str__(self) -> str:
        parts = [self.strategy, self.optimizer, self.compression, f"saved after {self.saved}"]
        return ", ".join(parts)

    @property
    def steps(self) -> int:
        return self.saved + STEPS - SAVED

    def start(self, seed: int = 7) -> tuple[nn.Module, Any]:
        """A model, of other weights with another seed, and its wrapped optimizer."""
        model = make_model()
        if seed != 7:
            torch.manual_seed(seed)
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(torch.randn_like(p))
        lossy = self.compression == FEEDBACK
        compression = hvd.Int8(error_feedback=True) if lossy else hvd.Compression.none
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS[self.optimizer](model),
            model.named_parameters(),
            strategy=self.strategy,
            compression=compression,
        )
        return model, optimizer


CASES = [
    *(
        Case(strategy, optimizer)
        for strategy in (
            "merged-gradient",
            "pipe-sgd",
            "pipe-sgd:warmup_steps=9",
            "pipe-sgd:prediction=local",
            "pipe-sgd:prediction=previous",
            "cocod:period=4",
            "cocod:period=4,warmup_steps=9",
            "cocod:period=4,momentum=average",
            "cocod:period=4,pull_back=0.6,anchor_momentum=0.7",
        )
        for optimizer in ("momentum", "adam")
    ),
    *(
        Case(strategy, optimizer, FEEDBACK)
        for strategy in (
            "merged-gradient:plan=single",  # another plan would mean other roundings
            *STRATEGIES[1:],
            "pipe-sgd:warmup_steps=9",
            "cocod:period=4,warmup_steps=9",
        )
        for optimizer in ("momentum", "adam")
    ),
    Case("merged-gradient", saved=PLANNED),
    Case("merged-gradient", compression=FEEDBACK, saved=PLANNED),
    Case("cocod:period=4", saved=8),  # at the border of two rounds
    Case("pipe-sgd", saved=1),  # before the first update: the optimizer has no state
    Case("pipe-sgd:prediction=local", saved=1),
]

ON_RANK_0 = [
    *(
        Case(strategy, optimizer)
        for strategy in (
            "merged-gradient",
            "pipe-sgd",
            "pipe-sgd:warmup_steps=9",
            "pipe-sgd:prediction=previous",
        )
        for optimizer in ("momentum", "adam")
    ),
    Case("merged-gradient", saved=PLANNED),
]
"""Saved and loaded on rank 0 alone, and broadcast."""

LED = [Case("pipe-sgd:prediction=local", optimizer) for optimizer in ("momentum", "adam")]
"""The same, where each rank's model leads elsewhere: one gradient is computed at rank 0's."""

DRAINED = [
    Case("cocod:period=4", "sgd"),
    Case("cocod:period=4,momentum=average", "momentum"),
    Case("cocod:period=4", "momentum"),
]
"""The same after ``synchronize()``; the last one's momenta are rank 0's from then on."""

MOVED = [
    *(Case(strategy, optimizer) for strategy in STRATEGIES[:2] for optimizer in COMMON),
    Case("pipe-sgd:warmup_steps=9"),
    Case("pipe-sgd:prediction=previous"),
    Case("cocod:period=4"),
    Case("cocod:period=4", "adam"),
]
"""Saved on two ranks (CoCoD: after ``synchronize()``), resumed on others."""


def runs_on(case: Case, n: int) -> bool:
    """Three ranks share two cores: they run what is most likely to differ there."""
    return n == 2 or case.optimizer != "adam"


def run(n: int) -> dict[str, Any | Raised]:
    """All cases that are saved and resumed on as many ranks."""
    hvd.init()
    cases: dict[str, Callable[[], Any]] = {}
    for case in CASES:
        if runs_on(case, n):
            cases[f"own file: {case}"] = partial(own_file, case)
    for case in [*ON_RANK_0, *LED, *DRAINED]:
        for before in (0, 3):
            if runs_on(case, n):
                cases[f"{before} before: {case}"] = partial(broadcast, case, before)
    for strategy in STRATEGIES:
        cases[f"from stock: {strategy}"] = partial(from_stock, strategy)
        cases[f"into stock: {strategy}"] = partial(into_stock, strategy)
        for other in STRATEGIES:
            if other != strategy:
                cases[f"{strategy} into {other}"] = partial(into_other, strategy, other)
    for case in MOVED if n == 2 else []:
        cases[f"to move: {case}"] = partial(to_move, case)
    return run_cases(cases)


def run_moved(files: dict[str, bytes]) -> dict[str, Any | Raised]:
    """All cases that were saved on two ranks."""
    hvd.init()
    return run_cases({f"{case}": partial(go_on, case, files[str(case)]) for case in MOVED})


# What a script does.


def advance(model: nn.Module, optimizer: Any, numbers: Sequence[int]) -> list[Array]:
    """The weights after each of these steps."""
    records = []
    for number in numbers:
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), number).backward()
        optimizer.step()
        records.append(weights_of(model))
    return records


def finish(case: Case, model: nn.Module, optimizer: Any) -> list[Array]:
    """The weights in the steps after a checkpoint, and what the optimizer holds at the end."""
    records = advance(model, optimizer, range(case.saved, case.steps))
    optimizer.synchronize()
    return [*records, weights_of(model), *state_of(optimizer)]


def state_of(optimizer: Optimizer) -> list[Array]:
    """All tensors of an optimizer's state, in the order of its parameters."""
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        np.asarray(torch.as_tensor(value).detach()).copy().ravel()
        for p in owned
        for _, value in sorted(optimizer.state.get(p, {}).items())
        if value is not None
    ]


def saved(model: nn.Module, optimizer: Any) -> bytes:
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return file.getvalue()


def loaded(content: bytes) -> Checkpoint:
    checkpoint: Checkpoint = torch.load(io.BytesIO(content), weights_only=True)
    return checkpoint


def load(model: nn.Module, optimizer: Any, content: bytes) -> list[str]:
    """Load a checkpoint; return what was warned of."""
    checkpoint = loaded(content)
    model.load_state_dict(checkpoint["model"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(checkpoint["optimizer"])
    return [str(one.message) for one in caught if "optimizer state" in str(one.message)]


def rank_0s(content: bytes) -> bytes:
    result: bytes = hvd.broadcast_object(content, 0)
    return result


# The cases.


def undisturbed(case: Case) -> list[Array]:
    model, optimizer = case.start()
    begun = advance(model, optimizer, range(case.saved))
    return [*begun, *finish(case, model, optimizer)]


def own_file(case: Case) -> tuple[list[Array], list[Array], list[Array]]:
    """An undisturbed run, one that goes on from each rank's own file, and one with states.

    Two runs may measure other plans: after that, the run that is saved is the undisturbed one.
    """
    planned = case.saved == PLANNED
    whole = [] if planned else undisturbed(case)
    model, optimizer = case.start()
    begun = advance(model, optimizer, range(case.saved))
    content = saved(model, optimizer)
    if planned:
        whole = [*begun, *finish(case, model, optimizer)]
    model, optimizer = case.start(seed=8)
    assert load(model, optimizer, content) == []
    again = [*begun, *finish(case, model, optimizer)]
    return whole, again, whole if planned else saving(case)


def saving(case: Case) -> list[Array]:
    """A run in which rank 0 alone makes a state after every step."""
    model, optimizer = case.start()
    rows = []
    for number in range(case.steps):
        rows += advance(model, optimizer, [number])
        if hvd.rank() == 0:
            saved(model, optimizer)
    optimizer.synchronize()
    return [*rows, weights_of(model), *state_of(optimizer)]


def broadcast(case: Case, before: int) -> tuple[list[Array], list[Array], bytes]:
    """A run beside one that rank 0 alone saves and loads; all have stepped ``before`` times."""
    model, optimizer = case.start()
    advance(model, optimizer, range(case.saved))
    if case in DRAINED:
        optimizer.synchronize()
    content = saved(model, optimizer) if hvd.rank() == 0 else b""
    whole = finish(case, model, optimizer)
    model, optimizer = case.start(seed=8 + hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), 0)
    advance(model, optimizer, range(50, 50 + before))
    if hvd.rank() == 0:
        load(model, optimizer, content)
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    return whole, finish(case, model, optimizer), rank_0s(content)


def start_stock() -> tuple[nn.Module, Any]:
    model = make_model()
    plain = OPTIMIZERS["momentum"](model)
    return model, stock.DistributedOptimizer(plain, model.named_parameters())


def from_stock(strategy: str) -> tuple[bytes, list[str], list[Array], list[Array]]:
    """Stock Horovod's checkpoint, what loading it warned of, its own run's rows and ours."""
    case = Case(strategy)
    model, optimizer = start_stock()
    advance(model, optimizer, range(SAVED))
    content = saved(model, optimizer)
    theirs = advance(model, optimizer, range(SAVED, STEPS))
    model, optimizer = case.start(seed=8)
    warned = load(model, optimizer, content)
    rows = advance(model, optimizer, range(SAVED, STEPS))
    optimizer.synchronize()
    return content, warned, theirs, [*rows, weights_of(model)]


def into_stock(strategy: str) -> tuple[bytes, list[list[str]], list[Array]]:
    """Rank 0's checkpoint of ours, what differs in others that loaded it, and stock's rows."""
    model, optimizer = Case(strategy).start()
    advance(model, optimizer, range(SAVED))
    content = rank_0s(saved(model, optimizer))
    want = loaded(content)["optimizer"]
    model, theirs = start_stock()
    model.load_state_dict(loaded(content)["model"])
    theirs.load_state_dict(loaded(content)["optimizer"])
    plain = OPTIMIZERS["momentum"](make_model())
    plain.load_state_dict(loaded(content)["optimizer"])
    unlike = [differences(want, other.state_dict()) for other in (theirs, plain)]
    return content, unlike, advance(model, theirs, range(SAVED, STEPS))


def differences(want: Checkpoint, got: Checkpoint) -> list[str]:
    """In which places two states of optimizers differ, beside ours having one more key."""
    found = [] if set(want) - set(got) == {"hvd_pipe"} else [f"keys {sorted(got)}"]
    if want["param_groups"] != got["param_groups"]:
        found.append("param_groups")
    if want["state"].keys() != got["state"].keys():
        return [*found, "whose state there is"]
    for number, values in want["state"].items():
        for key, value in values.items():
            other = got["state"][number][key]
            alike = torch.equal(value, other) if torch.is_tensor(value) else value == other
            found += [] if alike else [f"{number}.{key}"]
    return found


def into_other(strategy: str, other: str) -> tuple[bytes, list[str], list[Array]]:
    """Rank 0's checkpoint, what another strategy warned of that loaded it, and its rows."""
    model, optimizer = Case(strategy).start()
    advance(model, optimizer, range(SAVED))
    content = rank_0s(saved(model, optimizer))
    model, optimizer = Case(other).start(seed=8)
    warned = load(model, optimizer, content)
    rows = advance(model, optimizer, range(SAVED, STEPS))
    optimizer.synchronize()
    return content, warned, [*rows, weights_of(model)]


def to_move(case: Case) -> bytes:
    """Rank 0's checkpoint."""
    model, optimizer = case.start()
    advance(model, optimizer, range(case.saved))
    if case.strategy.startswith("cocod"):
        optimizer.synchronize()
    return rank_0s(saved(model, optimizer))


def go_on(case: Case, content: bytes) -> list[Array]:
    """The rows of a run that loads it on every rank."""
    model, optimizer = case.start(seed=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(model, optimizer, content)
    rows = advance(model, optimizer, range(case.saved, case.steps))
    optimizer.synchronize()
    return [*rows, weights_of(model)]
