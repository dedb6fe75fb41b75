"""Handwritten digits on workers that Ray places and Horovod's RayExecutor starts.

    python torch_examples/ray_digits.py --strategy cocod:period=4
    python torch_examples/ray_digits.py --workers 8 --address auto  # a Ray cluster that is up

horovodrun has no part in it: see `on_workers`. Lines marked "hvd_pipe:" are all that hvd_pipe asks
for.
"""

import argparse
import hashlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import ray
import torch
from horovod.ray import RayExecutor
from torch import nn

import hvd_pipe.torch as hvd  # hvd_pipe: was "import horovod.torch as hvd"
from data import load
from models import DigitsNet
from report import progress, require_positive


class Result(NamedTuple):
    """What a worker returns to the driver."""

    rank: int
    accuracy: float  # of all test images, 0 to 1
    weights: str  # a hash: equal replicas have equal ones


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small convolutional net on handwritten digits, on Ray.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--strategy",
        help="merged-gradient, pipe-sgd:warmup_steps=20, cocod:period=4, ...; without it "
        "HVD_PIPE_STRATEGY decides, else merged-gradient",
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--address", help="of a Ray cluster; without it, Ray starts on this machine alone"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker and step")
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--momentum", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    require_positive(parser, args, "workers", "epochs", "batch_size")
    return args


def train(args: argparse.Namespace) -> Result:
    """Run on each worker; what it prints reaches the driver's terminal."""
    hvd.init()
    rank = hvd.rank()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    data = load()
    model = DigitsNet(data.num_classes, data.image[0])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum),
        named_parameters=model.named_parameters(),
        strategy=args.strategy,  # hvd_pipe: the only new argument
    )
    mine = slice(rank, None, hvd.size())
    steps = len(data.train_x) // (args.batch_size * hvd.size())
    start = time.monotonic()
    for epoch in range(1, args.epochs + 1):
        model.train()
        order = torch.randperm(len(data.train_x))[mine]  # the same permutation on all ranks
        for index in order.split(args.batch_size)[:steps]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(data.train_x[index]), data.train_y[index])
            loss.backward()
            optimizer.step()
        optimizer.synchronize()  # hvd_pipe: what is in flight under pipe-sgd and cocod
        model.eval()
        with torch.no_grad():
            correct = (model(data.test_x).argmax(1) == data.test_y).float().mean().item()
        if rank == 0:
            bar = progress(epoch, args.epochs, time.monotonic() - start)
            print(f"epoch {epoch}  loss {loss.item():.4f}  accuracy {correct:.2%}  {bar}")
    values = torch.cat([value.detach().flatten() for value in model.parameters()])
    hvd.shutdown()  # Ray kills the workers: others must not take that for a failure
    return Result(rank, correct, hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16])


def on_workers(
    number: int, address: str | None, function: Callable[..., Any], *args: object
) -> list[Any]:
    """Call ``function(*args)`` on each worker; return their results, or raise what one raised."""
    # A cluster of this machine alone has a CPU for each worker, whatever it really has.
    here = {} if address else {"num_cpus": number, "include_dashboard": False}
    ray.init(address or "local", **here)
    executor = RayExecutor(RayExecutor.create_settings(), num_workers=number)
    try:
        executor.start()
        return executor.run(function, args=args)
    finally:
        executor.shutdown()


def main() -> None:
    args = arguments()
    for result in on_workers(args.workers, args.address, train, args):
        print(f"rank {result.rank}  accuracy {result.accuracy:.2%}  weights {result.weights}")


if __name__ == "__main__":
    main()
