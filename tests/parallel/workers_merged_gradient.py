"""Side by side with stock Horovod, in float32: test_merged_gradient.py looks at the results."""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

import horovod.torch as stock
import torch
from cases import Raised, run_cases
from horovod.torch import mpi_ops
from problem import STEPS, Loss, Weights, batch, loss_of, make_model, train
from torch import nn

import hvd_pipe.torch as hvd
from hvd_pipe.torch.messages import buckets
from hvd_pipe.torch.strategies import base

SWITCH = 40  # the step after which the branches of `Branches` change places


class Both(NamedTuple):
    """The weights after every step."""

    stock: Weights
    ours: Weights


class Hop(NamedTuple):
    """A function of ours, and its file below hvd_pipe."""

    function: str
    file: str


class Hops(NamedTuple):
    """From the hook of a gradient that completes its bucket to the parameters' update.

    Args:
        way: The functions that hand the gradient on, in the order of their first calls: they are
            on the stack when it is copied, sent, waited for, made ``p.grad``, and applied.
        called: All functions that are called, these among them.
    """

    way: list[Hop]
    called: list[Hop]


class Heads(nn.Module):
    """Two heads, of which a forward pass uses those that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = (nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3))

    def forward(self, inputs: torch.Tensor, left: bool, right: bool) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(inputs))
        return sum(
            (head(hidden) for head, used in ((self.left, left), (self.right, right)) if used),
            start=hidden[:, :3],
        )


class Branches(nn.Module):
    """Two layers, either of which may come first; gradients come in the opposite order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor, a_first: bool) -> torch.Tensor:
        first, second = (self.a, self.b) if a_first else (self.b, self.a)
        hidden: torch.Tensor = self.out(torch.tanh(second(torch.tanh(first(inputs)))))
        return hidden


def heads_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The right head: used by all ranks, by rank 0 only, by rank 1 only, by none, and so on."""
    inputs, targets = batch(rank, step, torch.float32)
    users: tuple[tuple[int, ...], ...] = ((0, 1), (0,), (1,), ())
    right = rank in users[step % len(users)]
    return nn.functional.mse_loss(model(inputs, left=True, right=right), targets)


def never_right_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """A parameter without a gradient on any rank at any step, as in a model partly in use."""
    inputs, targets = batch(rank, step, torch.float32)
    return nn.functional.mse_loss(model(inputs, left=True, right=False), targets)


def branches_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step, torch.float32)
    return nn.functional.mse_loss(model(inputs, a_first=step < SWITCH), targets)


def opposite_branches_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """On no step do the two ranks' gradients come in the same order."""
    inputs, targets = batch(rank, step, torch.float32)
    return nn.functional.mse_loss(model(inputs, a_first=rank == 0), targets)


def mixed_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step, torch.float32)
    head, tail = model.children()
    return nn.functional.mse_loss(tail(torch.tanh(head(inputs)).double()), targets.double())


def mixed_dtypes() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3).double())


def compare(
    make: Callable[[], nn.Module],
    loss: Loss = loss_of,
    options: Callable[[ModuleType], dict[str, Any]] = lambda _: {},
    steps: int = STEPS,
    **strategy: str,
) -> Both:
    """Train by stock Horovod, then by us, from the same weights on the same data."""
    both = []
    for module in (stock, hvd):
        torch.manual_seed(1)
        model = make()
        plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        given = options(module)
        optimizer = module.DistributedOptimizer(
            plain, model.named_parameters(), **given, **(strategy if module is hvd else {})
        )
        passes = given.get("backward_passes_per_step", 1)
        both.append(train(model, optimizer, module.rank(), loss=loss, steps=steps, passes=passes))
    return Both(*both)


class MaxScaled:
    """A compressor of a user's own: 127 levels up to a message's largest value.

    It stays float32, so that values can be summed on the wire.
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        scale = tensor.abs().max() / 127
        return (tensor / scale).round() * scale if scale > 0 else tensor.clone(), None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: None) -> torch.Tensor:
        return tensor


def small_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Gradients that are far below the control words, which are ones."""
    return loss_of(model, rank, step) * 1e-3


MLP = partial(make_model, torch.float32)

CASES: dict[str, Callable[[], Both]] = {
    "as it is": partial(compare, MLP),
    "two passes": partial(compare, MLP, options=lambda _: {"backward_passes_per_step": 2}),
    "sum": partial(compare, MLP, options=lambda module: {"op": module.Sum}),
    "predivide": partial(compare, MLP, options=lambda _: {"gradient_predivide_factor": 2.0}),
    "fp16": partial(compare, MLP, options=lambda module: {"compression": module.Compression.fp16}),
    "a compressor of the user's own": partial(
        compare,
        MLP,
        small_loss,
        options=lambda _: {"compression": MaxScaled},
        strategy="merged-gradient:plan=wfbp",
    ),
    "groups": partial(compare, MLP, options=lambda _: {"groups": 2}),
    "a head that only some ranks use": partial(compare, Heads, heads_loss),
    "a head that only some ranks use, one message a tensor": partial(
        compare, Heads, heads_loss, strategy="merged-gradient:plan=wfbp"
    ),
    "a head that nobody uses": partial(compare, Heads, never_right_loss),
    "two dtypes": partial(compare, mixed_dtypes, mixed_loss),
    "two dtypes, one message": partial(
        compare, mixed_dtypes, mixed_loss, strategy="merged-gradient:plan=single"
    ),
    "branches that change places": partial(compare, Branches, branches_loss, steps=3 * SWITCH),
    "ranks with opposite orders": partial(
        compare, Branches, opposite_branches_loss, steps=2 * STEPS
    ),
}


HOPS = "hops"


def hops() -> Hops:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), strategy="merged-gradient:plan=wfbp"
    )
    root = str(Path(hvd.__file__).parents[1])
    hook = base._hook(weakref.ref(base.Engine), 0).__code__  # type: ignore[arg-type]
    update = inspect.unwrap(torch.optim.SGD.step).__code__
    moments = {
        buckets.copy_in.__code__,
        mpi_ops.allreduce_async_.__code__,
        mpi_ops.synchronize.__code__,
        buckets.BucketSet.bind_gradients.__code__,
        update,
    }
    called: dict[CodeType, Hop] = {}
    passed: set[CodeType] = set()
    gradients, over = 0, False

    def note(frame: FrameType | None, event: str, _: Any) -> None:
        nonlocal gradients, over
        assert frame is not None
        code = frame.f_code
        if event != "call" or over:
            return
        gradients += code is hook
        if gradients < 2:  # a step's first gradient does more: it begins the step
            return
        if code.co_filename.startswith(root) and not code.co_name.startswith("<"):
            file = code.co_filename.removeprefix(f"{root}/")
            called.setdefault(code, Hop(code.co_qualname, file))
        over = code is update
        while code in moments and frame is not None:
            passed.add(frame.f_code)
            frame = frame.f_back

    for _ in range(2):
        loss_of(model, hvd.rank(), 0).backward()
        optimizer.step()
    gc.collect()
    gc.disable()  # what earlier cases left would be called, too
    sys.setprofile(note)
    try:
        loss_of(model, hvd.rank(), 0).backward()
        optimizer.step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return Hops([hop for code, hop in called.items() if code in passed], list(called.values()))


def against_stock() -> dict[str, Both | Hops | Raised]:
    hvd.init()
    return run_cases({**CASES, HOPS: hops})


def in_a_process_set() -> Both:
    """Ranks 0 and 2 of three together; rank 1 is outside and trains alone, as with Horovod."""
    hvd.init()
    some = hvd.add_process_set([0, 2])
    both = compare(MLP, options=lambda _: {"process_set": some})
    # Rank 1 waits for nobody; a rank that left now would shut Horovod down under the others.
    hvd.barrier()
    return both
