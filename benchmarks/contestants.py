"""What the throughput benchmark compares: one way to train a model, by its name.

single               one worker by itself: no communication
conventional         all gradients in one all-reduce after the backward pass
horovod              stock Horovod
horovod:asleep       the same; its main thread sleeps while it waits, and does not poll
engine:buckets=4 ... Horovod's engine by itself: buckets of equal bytes, each sent when it is full
ddp, ddp+fp16        PyTorch DistributedDataParallel over Gloo, with its fp16 hook
ddp:buckets=8 ...    the same with buckets of an 8th of all gradients (bucket_cap_mb), not a 4th
ddp:post-local       PyTorch's PostLocalSGD: models averaged every 4 steps
pipe-sgd+int8 ...    hvd_pipe: a strategy's spelling, and a compression
pipe-sgd@torch ...   hvd_pipe: a strategy's spelling, and what carries its messages
tf:...               TensorFlow: see contestants_tf.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import horovod.torch as stock
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import hvd_pipe.torch as hvd
from hvd_pipe.runtime.watch.waits import sleep_between_polls
from hvd_pipe.strategy import CoCoD, parse

DDP_BUCKETS = ("ddp:buckets=1", "ddp:buckets=8")  # beside PyTorch's own 25 MiB
ENGINE = tuple(f"engine:buckets={count}" for count in (1, 2, 3, 4, 6, 8, 12))
"""The best of them is what Horovod's engine allows who sends by the order of backward."""
PEERS = (
    *("single", "conventional", "horovod", "horovod:asleep", *ENGINE),
    *("ddp", "ddp+fp16", "ddp:post-local", *DDP_BUCKETS),
)
TENSORFLOW = "tf:"  # begins the names of contestants_tf.py
REAL_MODEL_BYTES = 100e6
DDP_BUCKET_BYTES = 25 * 2**20
POST_LOCAL_PERIOD = 4
LR = 1e-3
CODECS = {
    "": hvd.Compression.none,
    "fp16": hvd.Compression.fp16,
    "bf16": hvd.Compression.bf16,
    "int8": hvd.Compression.int8,
}


@dataclass
class Contestant:
    """One training: a step of it, and its orderly end."""

    step: Callable[[], None]
    finish: Callable[[], None] = lambda: None


def make(name: str, model: nn.Module, loss: Callable[[], torch.Tensor]) -> Contestant:
    """Return a contestant that trains ``model``, whose minibatch has this ``loss``.

    Horovod, or torch.distributed for ``ddp``, must have been initialised.
    """
    if name in PEERS:
        if name.startswith("ddp"):
            return _ddp(name, model, loss)
        if name in ENGINE:
            return _engine(int(name.partition("=")[2]), model, loss)
        makers = {"single": _single, "conventional": _conventional, "horovod": _horovod}
        return {**makers, "horovod:asleep": _horovod_asleep}[name](model, loss)
    kind, compression, carrier = parts_of(name)
    if kind in PEERS or compression not in CODECS:
        raise ValueError(f"{name}: not one of {', '.join(PEERS)}, or a strategy[+codec][@carrier]")
    return _ours(kind, compression, carrier, model, loss)


def parts_of(name: str) -> tuple[str, str, str]:
    """Return the strategy, the codec and the carrier that a contestant's name has.

    >>> parts_of("pipe-sgd+int8@torch")
    ('pipe-sgd', 'int8', 'torch')
    """
    rest, _, carrier = name.partition("@")
    kind, _, compression = rest.partition("+")
    return kind, compression, carrier


def period_of(name: str) -> int:
    """Return after how many steps a contestant averages models; 1 where it averages gradients."""
    if name == "ddp:post-local":
        return POST_LOCAL_PERIOD
    kind, _, _ = parts_of(name.removeprefix(TENSORFLOW))
    if kind in PEERS:
        return 1
    strategy = parse(kind)
    return strategy.period if isinstance(strategy, CoCoD) else 1


def _steps(
    optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]
) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def _single(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Contestant:
    return Contestant(_steps(SGD(model.parameters(), LR), loss))


def _conventional(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Contestant:
    optimizer = SGD(model.parameters(), LR)
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))
    views = [
        piece.view_as(p)
        for piece, p in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True)
    ]

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        torch._foreach_copy_(views, [p.grad for p in parameters])
        stock.allreduce_(flat, name="conventional")
        torch._foreach_copy_([p.grad for p in parameters], views)
        optimizer.step()

    return Contestant(step)


def _horovod(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Contestant:
    optimizer = stock.DistributedOptimizer(SGD(model.parameters(), LR), model.named_parameters())
    return Contestant(_steps(optimizer, loss), optimizer.synchronize)


def _horovod_asleep(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Contestant:
    optimizer = stock.DistributedOptimizer(SGD(model.parameters(), LR), model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        begun = time.monotonic()
        for handle, _ in optimizer._handles.values():
            while not stock.poll(handle):
                sleep_between_polls(begun)
        optimizer.step()

    return Contestant(step, optimizer.synchronize)


def _engine(count: int, model: nn.Module, loss: Callable[[], torch.Tensor]) -> Contestant:
    """Nothing but hooks that copy, all-reduces, and a wait that sleeps."""
    optimizer, parameters = SGD(model.parameters(), LR), list(model.parameters())[::-1]
    size = sum(p.numel() for p in parameters)
    groups: list[list[torch.Tensor]] = [[] for _ in range(count)]
    begun = 0
    for parameter in parameters:  # in the order of backward, as every profile here has it
        groups[begun * count // size].append(parameter)
        begun += parameter.numel()
    groups = [group for group in groups if group]
    flats = [torch.zeros(sum(p.numel() for p in group)) for group in groups]
    handles: list[int] = []
    left = [0] * len(groups)

    def hook(number: int, view: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def filled(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            left[number] -= 1
            if left[number] == 0:
                handles.append(stock.allreduce_async_(flats[number], name=f"engine.{number}"))

        return filled

    views: dict[torch.Tensor, torch.Tensor] = {}
    for number, group in enumerate(groups):
        pieces = flats[number].split([p.numel() for p in group])
        for parameter, piece in zip(group, pieces, strict=True):
            views[parameter] = piece.view_as(parameter)
            parameter.register_post_accumulate_grad_hook(hook(number, views[parameter]))

    def step() -> None:
        optimizer.zero_grad()
        left[:] = map(len, groups)
        loss().backward()
        for parameter in parameters:
            parameter.grad = views[parameter]
        started = time.monotonic()
        for handle in handles:
            while not stock.poll(handle):
                sleep_between_polls(started)
            stock.synchronize(handle)
        handles.clear()
        optimizer.step()

    return Contestant(step)


def _ours(
    kind: str,
    compression: str,
    carrier: str,
    model: nn.Module,
    loss: Callable[[], torch.Tensor],
) -> Contestant:
    optimizer = hvd.DistributedOptimizer(
        SGD(model.parameters(), LR),
        model.named_parameters(),
        compression=CODECS[compression],
        strategy=kind,
        carrier=carrier or None,
    )
    return Contestant(_steps(optimizer, loss), optimizer.synchronize)


def _ddp(name: str, model: nn.Module, loss: Callable[[], torch.Tensor]) -> Contestant:
    # The models are small ones, and so must be DDP's buckets, which it fills by size.
    size = 4.0 * sum(p.numel() for p in model.parameters())
    bucket_mib = DDP_BUCKET_BYTES / 2**20 * min(1.0, size / REAL_MODEL_BYTES)
    if name in DDP_BUCKETS:
        bucket_mib = size / 2**20 / int(name.partition("=")[2])
    optimizer: Any = SGD(model.parameters(), LR)
    wrapped = DistributedDataParallel(
        _Pass(model, loss), bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True
    )
    if name == "ddp+fp16":  # PyTorch's bf16 hook asks for NCCL
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if name == "ddp:post-local":
        alone, _ = dist.new_subgroups(group_size=1)
        state = post_localSGD_hook.PostLocalSGDState(
            process_group=None, subgroup=alone, start_localSGD_iter=0
        )
        wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        averager = PeriodicModelAverager(period=POST_LOCAL_PERIOD, warmup_steps=0)
        optimizer = PostLocalSGDOptimizer(optimizer, averager)

    def step() -> None:
        optimizer.zero_grad()
        wrapped().backward()
        optimizer.step()

    return Contestant(step)


class _Pass(nn.Module):
    """A model whose call is the loss of its minibatch, as DDP wants it."""

    def __init__(self, model: nn.Module, loss: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self) -> torch.Tensor:
        return self.loss()
