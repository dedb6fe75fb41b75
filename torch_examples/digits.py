"""Handwritten digits under one strategy, or under all of them in turn.

    horovodrun -np 2 python torch_examples/digits.py --compare
    horovodrun -np 2 python torch_examples/digits.py --strategy cocod:period=4

Each strategy starts from the same weights and sees the same images in the same order. Lines marked
"hvd_pipe:" are all that hvd_pipe asks for; those marked "Horovod:" are in every Horovod script.
"""

import argparse
import os
import time
from collections.abc import Iterator

import horovod.torch as stock  # only to measure Horovod itself beside us
import torch
from torch import Tensor, nn
from tqdm import tqdm

import hvd_pipe.torch as hvd  # hvd_pipe: was "import horovod.torch as hvd"
from data import Data, load
from models import DigitsNet
from report import (
    Epoch,
    Run,
    epoch_header,
    epoch_line,
    picture,
    plot,
    progress,
    require_positive,
    say,
    table,
)

# pipe-sgd applies gradients that are one step old. While the weights still move fast that can
# diverge (with momentum m it asks for lr * curvature < 1 - m), so its first steps are synchronous.
COMPARED = ("horovod", "merged-gradient", "pipe-sgd:warmup_steps=20", "cocod:period=4")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small convolutional net on handwritten digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--strategy",
        help="merged-gradient, pipe-sgd, cocod:period=4, ... or horovod for stock Horovod; "
        "without it HVD_PIPE_STRATEGY decides, else merged-gradient",
    )
    which.add_argument(
        "--compare",
        nargs="*",
        metavar="STRATEGY",
        help=f"train under each of these in turn (none named: {' '.join(COMPARED)})",
    )
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker and step")
    # 95 % shall take some epochs, or there is nothing to compare; so a small lr. It is not scaled
    # by the workers: all accuracies here are reached without, on 1, 2 and 4 of them.
    parser.add_argument("--lr", type=float, default=0.0005)
    parser.add_argument("--momentum", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", metavar="DIR", help="MNIST's files (default: built-in digits)")
    parser.add_argument(
        "--plot", type=picture, default="digits.png", help='accuracy over time; "" for none'
    )
    args = parser.parse_args()
    require_positive(parser, args, "epochs", "batch_size")
    return args


def build_optimizer(
    model: nn.Module, strategy: str | None, args: argparse.Namespace
) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    if strategy == "horovod":
        return stock.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    return hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        strategy=strategy,  # hvd_pipe: the only new argument
    )


def batches(n: int, size: int, epoch: int, seed: int) -> Iterator[Tensor]:
    """This rank's minibatches of an epoch, as indices.

    Every rank draws the same permutation and takes its own column of it, so no image is seen twice
    and every rank takes the same number of steps; the few images left over wait for another epoch.
    """
    steps = n // (size * hvd.size())
    if steps == 0:
        raise ValueError(
            f"{n} images do not fill one step of {hvd.size()} workers x {size} images: "
            f"--batch-size {max(1, n // hvd.size())} or less"
        )
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed * 1000 + epoch))
    yield from order[: steps * hvd.size() * size].view(steps, hvd.size(), size)[:, hvd.rank()]


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Data, steps: list[Tensor], title: str
) -> float:
    """One epoch; returns this rank's mean loss."""
    model.train()
    total = torch.zeros(())
    # This bar is for `python digits.py`: horovodrun keeps lines back until they end.
    for index in tqdm(steps, title, leave=False, disable=None if hvd.rank() == 0 else True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data.train_x[index]), data.train_y[index])
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return float(total) / len(steps)


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, loss: float) -> tuple[float, float]:
    """Test accuracy over all test images, a share on each rank, and the mean training loss."""
    model.eval()
    x, y = data.test_x[hvd.rank() :: hvd.size()], data.test_y[hvd.rank() :: hvd.size()]
    correct = sum(
        int((model(a).argmax(1) == b).sum())
        for a, b in zip(x.split(500), y.split(500), strict=True)
    )
    # Shares can differ by one image, so count, then divide: a mean of means would be a bit off.
    mine = torch.tensor([correct, len(y), loss, 1.0], dtype=torch.float64)
    correct, images, loss, ranks = hvd.allreduce(mine, op=hvd.Sum, name="evaluation").tolist()
    return correct / images, loss / ranks


class Training:
    """A model, its optimizer and what came of them under one strategy."""

    def __init__(self, strategy: str | None, data: Data, args: argparse.Namespace) -> None:
        self.stock = strategy == "horovod"
        self.run = Run(strategy or os.environ.get("HVD_PIPE_STRATEGY") or "merged-gradient")
        torch.manual_seed(args.seed)  # the same initial weights for every strategy
        self.model = DigitsNet(data.num_classes, data.image[0])
        self.optimizer = build_optimizer(self.model, strategy, args)
        # Horovod: every rank starts from rank 0's weights. (The optimizer has no state yet.)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)

    def epoch(self, data: Data, args: argparse.Namespace) -> None:
        number = len(self.run.epochs)
        steps = list(batches(len(data.train_x), args.batch_size, number, args.seed))
        hvd.barrier()  # every rank's clock starts now
        start = time.perf_counter()
        title = f"{self.run.strategy} {number + 1}/{args.epochs}"
        loss = train_epoch(self.model, self.optimizer, data, steps, title)
        if not self.stock:
            # hvd_pipe: before the model is evaluated or saved, take in what is still in flight:
            # pipe-sgd's last gradient; cocod's replicas become one model. It costs training time.
            self.optimizer.synchronize()
        seconds = time.perf_counter() - start

        accuracy, loss = evaluate(self.model, data, loss)
        images = len(steps) * args.batch_size * hvd.size()
        self.run.epochs.append(Epoch(loss, accuracy, images, seconds))


def warm_up(data: Data, args: argparse.Namespace) -> None:
    """Steps nobody counts, or the first strategy would pay for what is set up once a process."""
    model = DigitsNet(data.num_classes, data.image[0])
    optimizer = build_optimizer(model, "horovod", args)
    for _ in range(20):
        optimizer.zero_grad()
        index = torch.arange(args.batch_size) % len(data.train_x)
        nn.functional.cross_entropy(model(data.train_x[index]), data.train_y[index]).backward()
        optimizer.step()


def main() -> None:
    args = arguments()
    compare = args.compare is not None
    strategies = (args.compare or COMPARED) if compare else [args.strategy]
    if "horovod" in strategies:
        # hvd_pipe sends whole buckets and so switches off the fusion buffer of Horovod, for this
        # process. Stock Horovod is measured in it too, and must have its own default: 128 MiB.
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(128 * 2**20))
    hvd.init()  # Horovod: finds the other ranks
    # Ranks on one machine share its cores.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))

    data = load(args.data)
    warm_up(data, args)
    trainings = [Training(strategy, data, args) for strategy in strategies]
    runs = [training.run for training in trainings]
    width = max(len(run.strategy) for run in runs)
    say(epoch_header(width))
    start, total, done = time.monotonic(), args.epochs * len(trainings), 0
    # An epoch of each in turn, each time from another one on: what else the machine does in
    # between slows all of them alike.
    for epoch in range(args.epochs):
        first = epoch % len(trainings)
        for training in trainings[first:] + trainings[:first]:
            training.epoch(data, args)
            done += 1
            bar = progress(done, total, time.monotonic() - start)
            say(f"{epoch_line(training.run, args.epochs, width)}  {bar}")

    if hvd.rank() == 0:
        say(f"\n{table(runs)}")
        if args.plot:
            workers = f"{hvd.size()} worker{'s' if hvd.size() > 1 else ''}"
            title = f"{len(data.train_x):,} images, {workers}, batch size {args.batch_size}"
            plot(runs, args.plot, f"{title}, lr {args.lr:g}, momentum {args.momentum:g}")
            say(f"accuracy over time: {args.plot.resolve()}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
