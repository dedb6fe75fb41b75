"""Runs that are saved and resumed: a model and its optimizer, and what a script does to them."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from problem import OPTIMIZERS as COMMON
from problem import loss_of, make_model, weights_of
from torch import nn
from torch.optim import SGD, Optimizer

import hvd_pipe.torch as hvd

SAVED, STEPS = 7, 13
PLANNED = 66  # steps after which merged-gradient has tried its plans

Array = npt.NDArray[Any]

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    **COMMON,
    "sgd": lambda model: SGD(model.parameters(), lr=0.05),
}
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
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS[self.optimizer](model),
            model.named_parameters(),
            strategy=self.strategy,
            compression=hvd.Int8(error_feedback=True) if lossy else hvd.Compression.none,
        )
        return model, optimizer


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


def loaded(content: bytes) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
    return checkpoint


def load(model: nn.Module, optimizer: Any, content: bytes) -> list[str]:
    """Load a checkpoint; return what was warned of."""
    checkpoint = loaded(content)
    model.load_state_dict(checkpoint["model"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(checkpoint["optimizer"])
    return [str(one.message) for one in caught if "optimizer state" in str(one.message)]


def assert_equal(resumed: Sequence[Array], whole: Sequence[Array]) -> None:
    """Bit for bit."""
    assert len(resumed) == len(whole)
    wrong = [
        place
        for place, (one, other) in enumerate(zip(resumed, whole, strict=True))
        if not np.array_equal(one, other)
    ]
    assert not wrong, f"rows {wrong} of {len(whole)} differ"


def broadcast_from_rank_0(
    case: Case, library: Any, before: int, drain: bool
) -> tuple[list[Array], list[Array], bytes]:
    """A run beside one that rank 0 alone saves and loads; all have stepped ``before`` times."""
    model, optimizer = case.start()
    advance(model, optimizer, range(case.saved))
    if drain:
        optimizer.synchronize()
    content = saved(model, optimizer) if hvd.rank() == 0 else b""
    whole = finish(case, model, optimizer)
    model, optimizer = case.start(seed=8 + hvd.rank())
    library.broadcast_parameters(model.state_dict(), root_rank=0)
    advance(model, optimizer, range(50, 50 + before))
    if hvd.rank() == 0:
        load(model, optimizer, content)
    library.broadcast_parameters(model.state_dict(), root_rank=0)
    library.broadcast_optimizer_state(optimizer, root_rank=0)
    return whole, finish(case, model, optimizer), library.broadcast_object(content, 0)
