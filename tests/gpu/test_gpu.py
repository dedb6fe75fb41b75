"""Is it right on a GPU: the equations of every strategy and codec, and training as scripts do it.

The expected weights come from the tests' serial reference: plain torch on the CPU, and none of
hvd_pipe's code.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import horovod.torch as stock
import numpy as np
import numpy.typing as npt
import psutil
import pytest
import torch
from cells import CELLS, STOCK, Cell
from codec_reference import emulated
from problem import OPTIMIZERS, STEPS, batch, loss_of, make_model, train
from serial import Vectors, make_workers
from torch import nn

import hvd_pipe.torch as hvd
from hvd_pipe.torch.compression import BF16, Codec, Int8
from hvd_pipe.torch.messages.allreduce import Reduction
from hvd_pipe.torch.messages.compressed_allreduce import CompressedAllReduce
from hvd_pipe.torch.messages.pending import done_on_all_streams

pytestmark = pytest.mark.cuda
Record = Callable[[str, object], None]

EXACT = 1e-12
STRATEGIES = ("merged-gradient", "pipe-sgd", "cocod:period=4")
streams = pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
strategies = pytest.mark.parametrize("strategy", STRATEGIES)


def stream(device: torch.device, side: bool) -> AbstractContextManager[object]:
    """What a script enters to compute in a stream of its own, or nothing."""
    if side and device.type == "cuda":
        return torch.cuda.stream(torch.cuda.Stream(device))
    return contextlib.nullcontext()


def loss_on(device: torch.device) -> Callable[[nn.Module, int, int], torch.Tensor]:
    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        x, y = (tensor.to(device) for tensor in batch(rank, step))
        return nn.functional.mse_loss(model(x), y)

    return loss


def compare(
    found: npt.NDArray[np.float64],
    expected: npt.NDArray[np.float64],
    limit: float,
    record: Record,
    judged: bool = True,
) -> None:
    """Compare with the equation; a rounding may make a difference of ``limit``."""
    assert found.shape == expected.shape
    away = float(np.abs(found - expected).max())
    record("text", f"{away:.1e} from the equation, of {limit:.1e}")
    record("away", away)
    record("judged", judged)
    if judged:
        assert np.allclose(found, expected, rtol=limit if limit == EXACT else 0.0, atol=limit)


def one_code(codec: Codec, values: Sequence[npt.NDArray[np.float32]]) -> float:
    """What one code more is worth, at most: a GPU divides otherwise, and may round to it."""
    largest = float(max(np.abs(value).max() for value in values))
    return largest * (2.0**-7 if isinstance(codec, BF16) else 1 / 127) * 1.01


def test_probe(device: torch.device, record_property: Record) -> None:
    """Whether ranks can talk on this device at all."""
    values = torch.full((1000,), float(hvd.rank() + 1), dtype=torch.float64, device=device)
    total = hvd.allreduce(values, op=hvd.Sum)
    record_property("text", f"the sum of {hvd.size()} ranks")
    assert (total == hvd.size() * (hvd.size() + 1) / 2).all()


@streams
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_equation(cell: Cell, side: bool, device: torch.device, record_property: Record) -> None:
    if side and device.type == "cpu" and cell.optimizer != "momentum":
        pytest.skip("a CPU has no streams: no need to do it all again")
    with stream(device, side):
        model = make_model().to(device)
        module = stock if cell.strategy == STOCK else hvd
        optimizer = module.DistributedOptimizer(
            OPTIMIZERS[cell.optimizer](model),
            model.named_parameters(),
            backward_passes_per_step=cell.passes,
            **({} if module is stock else {"strategy": cell.strategy}),
        )
        drains = {*cell.drains, STEPS - 1}
        loss = loss_on(device)
        weights = train(model, optimizer, hvd.rank(), loss=loss, passes=cell.passes, drains=drains)
    # Stock Horovod has the default stream wait for its messages, and no other one.
    judged = module is hvd or not side or done_on_all_streams()
    compare(weights, cell.expected(hvd.size())[hvd.rank()], EXACT, record_property, judged)


@streams
@pytest.mark.parametrize("codec", [BF16(), Int8(), Int8(error_feedback=True)], ids=repr)
def test_equation_of_an_exchange(
    codec: Codec, side: bool, device: torch.device, record_property: Record
) -> None:
    if hvd.size() == 1:
        pytest.skip("one process exchanges nothing")
    noise = [np.random.default_rng(rank) for rank in range(hvd.size())]
    values = [generator.standard_normal(100_003).astype(np.float32) for generator in noise]
    with stream(device, side):
        flat = torch.from_numpy(values[hvd.rank()].copy()).to(device)
        exchange = CompressedAllReduce(Reduction(), flat, f"exchange.{codec!r}.{side}", codec)
        exchange.launch()
        exchange.wait()
        found = flat.cpu().numpy()
    expected = emulated(codec, values)
    limit = one_code(codec, values) if device.type == "cuda" else 0.0
    compare(found.astype(np.float64), expected.astype(np.float64), limit, record_property)
    record_property("equal", float(np.mean(found == expected)))


def one_matrix() -> nn.Module:
    """One parameter: a codec's blocks are then those of its gradient, whatever the plan."""
    torch.manual_seed(11)
    return nn.Linear(6, 100, bias=False).double()


def square(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, _ = batch(rank, step)
    return model(x.to(next(model.parameters()).device)).square().mean()


@streams
@pytest.mark.parametrize("codec", [BF16(), Int8()], ids=repr)
@pytest.mark.parametrize(
    "strategy", ["merged-gradient:plan=single", "pipe-sgd:bucket_bytes=1000000"]
)
def test_equation_with_a_codec(
    strategy: str, codec: Codec, side: bool, device: torch.device, record_property: Record
) -> None:
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
        return [torch.from_numpy(emulated(codec, flats)).double().view(100, 6)]

    workers = make_workers(strategy, n, one_matrix, make, reduce)
    for step in range(steps):
        workers.backward(square, step)
        workers.step()
        workers.record()
    workers.synchronize()
    workers.record()
    with stream(device, side):
        model = one_matrix().to(device)
        optimizer = hvd.DistributedOptimizer(
            make(model), model.named_parameters(), compression=codec, strategy=strategy
        )
        drains = {steps - 1}
        weights = train(model, optimizer, hvd.rank(), loss=square, steps=steps, drains=drains)
    expected = workers.trajectory[hvd.rank()]
    rounds = device.type == "cuda" and n > 1
    limit = one_code(codec, [expected.astype(np.float32)]) if rounds else EXACT
    compare(np.array([*weights[:steps], weights[-1]]), expected, limit, record_property)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()),
            nn.Linear(16 * 64, 10),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


@strategies
@pytest.mark.parametrize("kind", ["GradScaler", "bfloat16 parameters", "bfloat16 autocast"])
def test_training(kind: str, strategy: str, device: torch.device, record_property: Record) -> None:
    """The loss falls and ranks stay alike, also after an overflow on one rank alone."""
    dtype = torch.bfloat16 if kind == "bfloat16 parameters" else torch.float32
    autocast = {"GradScaler": torch.float16, "bfloat16 autocast": torch.bfloat16}.get(kind)
    scaled = kind == "GradScaler"
    torch.manual_seed(3)
    model = Net().to(device, dtype)
    plain = torch.optim.SGD(model.parameters(), lr=0.02)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), strategy=strategy)
    scaler = torch.amp.GradScaler(
        device.type, init_scale=2.0**10, growth_interval=1000, enabled=scaled
    )
    torch.manual_seed(100 + hvd.rank())
    x = torch.randn(16, 3, 8, 8).to(device, dtype)
    y = torch.randint(10, (16,)).to(device)
    losses = []
    for step in range(24):
        optimizer.zero_grad()
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        overflows = scaled and step == 12 and hvd.rank() == hvd.size() - 1
        (scaler.scale(loss) * (float("inf") if overflows else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    optimizer.synchronize()
    flat = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    replicas = hvd.allgather(flat.unsqueeze(0).cpu())
    record_property("text", f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    assert torch.isfinite(replicas).all()
    assert (replicas == replicas[0]).all()
    assert losses[-1] < losses[0]
    if scaled and ("cocod" not in strategy or hvd.rank() == hvd.size() - 1):
        assert scaler.get_scale() < 2.0**10  # under cocod, each rank has a scale of its own


@strategies
def test_training_of_a_compiled_model(
    strategy: str, device: torch.device, record_property: Record
) -> None:
    steps = 12
    workers = make_workers(strategy, hvd.size(), make_model, OPTIMIZERS["momentum"])
    for step in range(steps):
        workers.backward(loss_of, step)
        workers.step()
    workers.synchronize()
    workers.record()
    model = make_model().to(device)
    plain = OPTIMIZERS["momentum"](model)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), strategy=strategy)
    compiled = torch.compile(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss_on(device)(compiled, hvd.rank(), step).backward()
        optimizer.step()
    optimizer.synchronize()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu().numpy()
    compare(weights, workers.trajectory[hvd.rank()][-1], EXACT, record_property)


def held_bytes(device: torch.device) -> tuple[int, int]:
    """What is allocated now (of a CPU, the resident set), and the allocator's retries."""
    gc.collect()
    if device.type == "cpu":
        return int(psutil.Process().memory_info().rss), 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), int(torch.cuda.memory_stats()["num_alloc_retries"])


@pytest.mark.parametrize(
    ("strategy", "codec"),
    [*((strategy, None) for strategy in STRATEGIES), ("pipe-sgd", hvd.Compression.int8)],
)
def test_memory_does_not_grow(
    strategy: str, codec: object, device: torch.device, record_property: Record
) -> None:
    steps, settled = (200, 100) if device.type == "cpu" else (1000, 200)
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).to(device)
    plain = torch.optim.SGD(model.parameters(), lr=1e-4)
    more = {} if codec is None else {"compression": codec}
    named = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(plain, named, strategy=strategy, **more)
    x = torch.randn(32, 256, device=device)
    before = held_bytes(device)
    for step in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if step + 1 == settled:
            optimizer.synchronize()  # what is in flight holds memory, more or less of it
            before = held_bytes(device)
    optimizer.synchronize()
    grown, retries = np.subtract(held_bytes(device), before).tolist()
    text = f"{grown:+d} bytes and {retries:+d} retries, steps {settled} to {steps}"
    record_property("text", text)
    # The resident set of a process moves by the allocator's own habits; a GPU's count is exact.
    assert grown <= (16 * 2**20 if device.type == "cpu" else 0)
    assert retries == 0
