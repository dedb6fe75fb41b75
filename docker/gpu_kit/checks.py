"""Is it right: the equations of every strategy and codec, and training as scripts do it.

Each section is a function of a `rank.Place` that returns named jobs. The expected weights come
from the tests' serial reference: plain torch on the CPU, and none of hvd_pipe's code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import horovod.torch as stock
import hvd_pipe.torch as hvd
import numpy as np
import numpy.typing as npt
import torch
from cells import CELLS, STOCK, Cell
from codec_reference import emulated
from hvd_pipe.torch.compression import BF16, Codec, Int8
from hvd_pipe.torch.messages.allreduce import Reduction
from hvd_pipe.torch.messages.compressed_allreduce import CompressedAllReduce
from hvd_pipe.torch.messages.pending import done_is_done
from problem import OPTIMIZERS, STEPS, batch, loss_of, make_model, train
from serial import CoCoD, PipeSGD, Synchronous, Vectors, Workers
from torch import nn

from rank import Found, Job, Place

EXACT = 1e-12
STRATEGIES = ("merged-gradient", "pipe-sgd", "cocod:period=4")


def in_stream(place: Place, side: bool) -> AbstractContextManager[object]:
    """Return what a script enters to compute in a stream of its own, or nothing."""
    if side and place.cuda:
        return torch.cuda.stream(torch.cuda.Stream(place.device))
    return contextlib.nullcontext()


def on_device(place: Place) -> Callable[[nn.Module, int, int], torch.Tensor]:
    """Return `problem.loss_of` for a model on a device."""

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        x, y = (each.to(place.device) for each in batch(rank, step))
        return nn.functional.mse_loss(model(x), y)

    return loss


def probe(place: Place) -> dict[str, Job]:
    """One all-reduce, to see whether ranks can talk on this device at all."""

    def job() -> Found:
        mine = torch.full((1000,), float(hvd.rank() + 1), dtype=torch.float64, device=place.device)
        total = hvd.allreduce(mine, op=hvd.Sum)
        wanted = hvd.size() * (hvd.size() + 1) / 2
        return Found(bool((total == wanted).all()), f"the sum of {hvd.size()} ranks")

    return {"all-reduce": job}


def equations(place: Place) -> dict[str, Job]:
    """Every strategy with every optimizer, then every codec, in the default and a side stream."""
    jobs: dict[str, Job] = {}
    for side in (False, True):
        where = "side stream" if side else "default stream"
        for cell in CELLS:
            if side and place.small and cell.optimizer != "momentum":
                continue  # a CPU has no streams: no need to do it all again
            jobs[f"{cell} ({where})"] = partial(_equation, place, cell, side)
        # One process exchanges nothing.
        for codec in (BF16(), Int8(), Int8(error_feedback=True)) if hvd.size() > 1 else ():
            jobs[f"exchange of {codec!r} ({where})"] = partial(_exchange, place, codec, side)
        for strategy in ("merged-gradient:plan=single", "pipe-sgd:bucket_bytes=1000000"):
            for codec in (BF16(), Int8()):
                job = partial(_coded, place, strategy, codec, side)
                jobs[f"{strategy} with {codec!r} ({where})"] = job
    return jobs


def _compared(mine: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> Found:
    away = float(np.abs(mine - wanted).max()) if mine.shape == wanted.shape else float("inf")
    good = mine.shape == wanted.shape and bool(
        np.allclose(mine, wanted, rtol=EXACT, atol=EXACT, equal_nan=False)
    )
    return Found(good, f"{away:.1e} from the equation", {"away": away})


def _equation(place: Place, cell: Cell, side: bool) -> Found:
    with in_stream(place, side):
        model = make_model().to(place.device)
        plain, named = OPTIMIZERS[cell.optimizer](model), model.named_parameters()
        if cell.strategy == STOCK:
            optimizer = stock.DistributedOptimizer(
                plain, named, backward_passes_per_step=cell.passes
            )
        else:
            optimizer = hvd.DistributedOptimizer(
                plain, named, backward_passes_per_step=cell.passes, strategy=cell.strategy
            )
        drains = {*cell.drains, STEPS - 1}
        records = train(
            model, optimizer, hvd.rank(), loss=on_device(place), passes=cell.passes, drains=drains
        )
    found = _compared(records, cell.expected(hvd.size())[hvd.rank()])
    if cell.strategy == STOCK and side and not done_is_done():
        # Stock Horovod has the default stream wait for its messages, and no other one.
        return Found(None, f"{found.text} (not judged)", found.numbers)
    return found


def _near(
    place: Place, mine: npt.NDArray[np.float32], wanted: npt.NDArray[np.float32], step: float
) -> Found:
    """Equal to the last bit on a CPU; a GPU divides otherwise, and may round to the next code."""
    away = np.abs(mine.astype(np.float64) - wanted)
    equal = float(np.mean(mine == wanted))
    good = bool(np.all(away <= step * 1.01)) if place.cuda else equal == 1.0
    found = {"equal": equal, "away": float(away.max()), "step": step}
    return Found(good, f"{equal:.2%} of the values equal, {away.max():.1e} away", found)


def _step_of(codec: Codec, values: Sequence[npt.NDArray[np.float32]]) -> float:
    """What one code more is worth, at most."""
    most = float(max(np.abs(each).max() for each in values))
    return most * (2.0**-7 if isinstance(codec, BF16) else 1 / 127)


def _exchange(place: Place, codec: Codec, side: bool, numel: int = 100_003) -> Found:
    noise = [np.random.default_rng(rank) for rank in range(hvd.size())]
    values = [each.standard_normal(numel).astype(np.float32) for each in noise]
    with in_stream(place, side):
        flat = torch.from_numpy(values[hvd.rank()].copy()).to(place.device)
        exchange = CompressedAllReduce(Reduction(), flat, f"exchange.{codec!r}.{side}", codec)
        exchange.launch()
        exchange.wait()
        mine = flat.cpu().numpy()
    return _near(place, mine, emulated(codec, values), _step_of(codec, values))


def _one_matrix(dtype: torch.dtype = torch.float64) -> nn.Module:
    """One parameter: a codec's blocks are then those of its gradient, whatever the plan."""
    torch.manual_seed(11)
    return nn.Linear(6, 100, bias=False).to(dtype)


def _square(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, _ = batch(rank, step)
    return model(x.to(next(model.parameters()).device)).square().mean()


def _coded(place: Place, strategy: str, codec: Codec, side: bool) -> Found:
    """A strategy's equation with the codec's two roundings in the place of the mean."""
    n, steps = hvd.size(), 10

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def reduce(vectors: Sequence[Vectors]) -> Vectors:
        flats = [
            vector[0].flatten().float().numpy() for vector in vectors if vector[0] is not None
        ]
        if n == 1:
            return vectors[0]
        result = torch.from_numpy(emulated(codec, flats)).double()
        return [result.view(100, 6)]

    kind: type[Workers] = PipeSGD if strategy.startswith("pipe-sgd") else Synchronous
    workers = kind(n, _one_matrix, make, reduce)
    for step in range(steps):
        workers.backward(_square, step)
        workers.step()
        workers.record()
    workers.synchronize()
    workers.record()
    with in_stream(place, side):
        model = _one_matrix().to(place.device)
        optimizer = hvd.DistributedOptimizer(
            make(model), model.named_parameters(), compression=codec, strategy=strategy
        )
        drains = {steps - 1}
        mine = train(model, optimizer, hvd.rank(), loss=_square, steps=steps, drains=drains)
    wanted = workers.trajectory[hvd.rank()]
    records = [*mine[:steps], mine[-1]]
    if place.cuda and n > 1:
        away = float(np.abs(np.array(records) - wanted).max())
        limit = _step_of(codec, [wanted.astype(np.float32)])
        return Found(away <= limit, f"{away:.1e} away, a code is {limit:.1e}", {"away": away})
    return _compared(np.array(records), wanted)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()),
            nn.Linear(16 * 64, 10),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


def training(place: Place) -> dict[str, Job]:
    """GradScaler with an overflow on one rank, bfloat16, and torch.compile."""
    jobs: dict[str, Job] = {}
    for strategy in STRATEGIES:
        jobs[f"GradScaler, float16, {strategy}"] = partial(_scaled, place, strategy)
        jobs[f"bfloat16 parameters, {strategy}"] = partial(_bf16, place, strategy)
        jobs[f"bfloat16 autocast, {strategy}"] = partial(_autocast, place, strategy)
    for strategy in STRATEGIES:
        jobs[f"torch.compile, {strategy}"] = partial(_compiled, place, strategy)
    return jobs


def _images(place: Place, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(100 + hvd.rank())
    x = torch.randn(16, 3, 8, 8).to(place.device, dtype)
    return x, torch.randint(10, (16,)).to(place.device)


def _start(
    place: Place, strategy: str, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = _Net().to(place.device, dtype)
    plain = torch.optim.SGD(model.parameters(), lr=0.02)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), strategy=strategy)
    return model, optimizer


def _alike(model: nn.Module) -> bool:
    """Whether all ranks have the same parameters."""
    flat = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    every = hvd.allgather(flat.unsqueeze(0).cpu())
    return bool((every == every[0]).all()) and bool(torch.isfinite(every).all())


def _judged(model: nn.Module, losses: Sequence[float], more: str = "") -> Found:
    alike, learned = _alike(model), losses[-1] < losses[0]
    text = f"loss {losses[0]:.3f} to {losses[-1]:.3f}, ranks {'alike' if alike else 'APART'}{more}"
    return Found(alike and learned, text, {"first": losses[0], "last": losses[-1]})


def _scaled(place: Place, strategy: str) -> Found:
    model, optimizer = _start(place, strategy)
    scaler = torch.amp.GradScaler(place.device.type, init_scale=2.0**10, growth_interval=1000)
    x, y = _images(place)
    losses = []
    for step in range(24):
        optimizer.zero_grad()
        with torch.autocast(place.device.type, torch.float16):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        scale = scaler.scale(loss)
        if step == 12 and hvd.rank() == hvd.size() - 1:
            scale = scale * float("inf")
        scale.backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    optimizer.synchronize()
    found = _judged(model, losses, f", scale {scaler.get_scale():g}")
    return Found(bool(found.good) and scaler.get_scale() < 2.0**10, found.text, found.numbers)


def _bf16(place: Place, strategy: str) -> Found:
    model, optimizer = _start(place, strategy, torch.bfloat16)
    x, y = _images(place, torch.bfloat16)
    return _learn(model, optimizer, x, y, contextlib.nullcontext)


def _autocast(place: Place, strategy: str) -> Found:
    model, optimizer = _start(place, strategy)
    x, y = _images(place)
    context = partial(torch.autocast, place.device.type, torch.bfloat16)
    return _learn(model, optimizer, x, y, context)


def _learn(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
    context: Callable[[], AbstractContextManager[object]],
) -> Found:
    losses = []
    for _ in range(24):
        optimizer.zero_grad()
        with context():
            loss = nn.functional.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    optimizer.synchronize()
    return _judged(model, losses)


def _compiled(place: Place, strategy: str) -> Found:
    """A compiled model's weights beside the serial reference's."""
    n, steps = hvd.size(), 12
    kinds: Mapping[str, Callable[..., Workers]] = {
        "merged-gradient": Synchronous,
        "pipe-sgd": PipeSGD,
        "cocod:period=4": partial(CoCoD, period=4),
    }
    workers = kinds[strategy](n, make_model, OPTIMIZERS["momentum"])
    for step in range(steps):
        workers.backward(loss_of, step)
        workers.step()
    workers.synchronize()
    workers.record()
    model = make_model().to(place.device)
    plain = OPTIMIZERS["momentum"](model)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), strategy=strategy)
    compiled = torch.compile(model)
    for step in range(steps):
        optimizer.zero_grad()
        on_device(place)(compiled, hvd.rank(), step).backward()
        optimizer.step()
    optimizer.synchronize()
    mine = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu().numpy()
    return _compared(mine, workers.trajectory[hvd.rank()][-1])


SECTIONS = {"probe": probe, "equations": equations, "training": training}
