"""Each worker sees only some of the digits: CoCoD, with and without pull-back, and the exact way.

    horovodrun -np 2 python torch_examples/digits_noniid.py
    horovodrun -np 4 python torch_examples/digits_noniid.py --learning-rates 0.1 0.4

Of two workers, the first sees the digits 0 to 4 and the second 5 to 9. Local steps then lead each
worker somewhere else. CoCoD adds a worker's whole way to the mean of the models and, with large
steps, overshoots; Overlap-Local-SGD pulls every worker back to that mean.

With small steps CoCoD learns at least as well, so try them first: the table has both. A round
with pull-back moves the mean by (1 - alpha) / (1 - alpha beta), here 0.69, of the workers' way,
and CoCoD with a learning rate so much smaller comes close: what pull-back gives is room for error.
"""

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import hvd_pipe.torch as hvd
from data import Data, load
from report import picture, progress, say


class Run(NamedTuple):
    """One training; accuracy (0 to 1) and loss are the mean model's, of all classes."""

    strategy: str
    lr: float
    steps: list[int]
    accuracy: list[float]
    loss: list[float]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Strategies on workers that see different classes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument(
        "--evaluations", type=int, default=10, help="on the way, the last included"
    )
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker and step")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[0.05, 0.4])
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--period", type=int, default=8, help="local steps a round")
    parser.add_argument("--pull-back", type=float, default=0.6, help="alpha")
    parser.add_argument("--anchor-momentum", type=float, default=0.7, help="beta")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=picture, default="digits_noniid.png", help='"" for none')
    args = parser.parse_args()
    if args.evaluations < 1 or args.steps < args.evaluations:
        parser.error("--evaluations: from 1 to --steps")
    return args


def strategies(args: argparse.Namespace) -> dict[str, hvd.MergedGradient | hvd.CoCoD]:
    pull = {"pull_back": args.pull_back, "anchor_momentum": args.anchor_momentum}
    return {
        "merged-gradient": hvd.MergedGradient(),
        "cocod": hvd.CoCoD(args.period),
        "cocod + pull-back": hvd.CoCoD(args.period, **pull),
    }


def build_model(data: Data) -> nn.Sequential:
    """Without BatchNorm: its statistics, of some classes only, would be a trouble of their own."""
    channels, height, width = data.image
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * height * width, 64),
        nn.ReLU(),
        nn.Linear(64, data.num_classes),
    )


def batches(data: Data, args: argparse.Namespace) -> Iterator[Tensor]:
    """Minibatches of this worker's own classes, as indices."""
    owner = data.train_y * hvd.size() // data.num_classes
    mine = torch.nonzero(owner == hvd.rank()).flatten()
    if len(mine) == 0:
        raise ValueError(f"{data.num_classes} classes do not go round {hvd.size()} workers")
    generator = torch.Generator().manual_seed(args.seed * 1000 + hvd.rank())
    for _ in range(args.steps):
        yield mine[torch.randint(len(mine), (args.batch_size,), generator=generator)]


@torch.no_grad()
def evaluate(model: nn.Module, data: Data) -> tuple[float, float]:
    """Test accuracy and training loss over all classes; small enough for every rank to do it."""
    correct = model(data.test_x).argmax(1) == data.test_y
    return float(correct.float().mean()), float(
        nn.functional.cross_entropy(model(data.train_x), data.train_y)
    )


def train(
    name: str,
    strategy: hvd.MergedGradient | hvd.CoCoD,
    lr: float,
    data: Data,
    args: argparse.Namespace,
) -> Run:
    torch.manual_seed(args.seed)  # the same initial weights on every rank, for every strategy
    model = build_model(data)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=args.momentum)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), strategy=strategy)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    run = Run(name, lr, [], [], [])
    for step, index in enumerate(batches(data, args), 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data.train_x[index]), data.train_y[index]).backward()
        optimizer.step()
        if step * args.evaluations // args.steps > (step - 1) * args.evaluations // args.steps:
            optimizer.synchronize()  # the replicas become their mean
            accuracy, loss = evaluate(model, data)
            run.steps.append(step)
            run.accuracy.append(accuracy)
            run.loss.append(loss)
    return run


def table(runs: list[Run]) -> str:
    width = max(len(run.strategy) for run in runs)
    header = f"{'strategy':<{width}}  learning rate  final accuracy  final loss"
    lines = [header, "-" * len(header)]
    lines += [
        f"{run.strategy:<{width}}  {run.lr:>13g}  {run.accuracy[-1]:>14.2%}  {run.loss[-1]:>10.4f}"
        for run in runs
    ]
    return "\n".join(lines)


def plot(runs: list[Run], path: Path, title: str) -> None:
    """Accuracy over steps, one panel a learning rate, one line a strategy."""
    rates = list(dict.fromkeys(run.lr for run in runs))
    figure = Figure(figsize=(1 + 4.5 * len(rates), 4.5), layout="constrained")
    panels = figure.subplots(1, len(rates), sharey=True, squeeze=False)[0]
    for axes, lr in zip(panels, rates, strict=True):
        for run in (each for each in runs if each.lr == lr):
            label = f"{run.strategy}: {run.accuracy[-1]:.2%}"
            axes.plot(run.steps, [100 * value for value in run.accuracy], "o-", label=label)
        axes.set(title=f"learning rate {lr:g}", xlabel="steps", ylim=(0, 102))
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", title="strategy: final accuracy")
    panels[0].set_ylabel("test accuracy of the mean model (%)")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def main() -> None:
    args = arguments()
    hvd.init()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))
    data = load()
    jobs = [
        (name, strategy, lr)
        for lr in args.learning_rates
        for name, strategy in strategies(args).items()
    ]
    runs: list[Run] = []
    start = time.monotonic()
    for name, strategy, lr in jobs:
        run = train(name, strategy, lr, data, args)
        runs.append(run)
        bar = progress(len(runs), len(jobs), time.monotonic() - start)
        say(f"{name:<17}  learning rate {lr:<5g}  accuracy {run.accuracy[-1]:>7.2%}  {bar}")
    if hvd.rank() == 0:
        say(f"\n{table(runs)}")
        if args.plot:
            title = f"{hvd.size()} workers, each with its own digits; rounds of {args.period}"
            plot(runs, args.plot, title)
            say(f"picture: {args.plot}")


if __name__ == "__main__":
    main()
