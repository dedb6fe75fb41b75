"""How the examples report: lines of rank 0, a line per epoch, a table, a picture."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

import hvd_pipe.torch as hvd

TARGET = 0.95  # test accuracy that the table and the picture ask about


@dataclass(frozen=True)
class Epoch:
    loss: float
    accuracy: float  # of the test images, 0 to 1
    images: int  # trained on, all workers together
    seconds: float  # training only, evaluation left out


@dataclass
class Run:
    """One training under one strategy."""

    strategy: str
    epochs: list[Epoch] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        return self.epochs[-1].accuracy

    @property
    def images_per_second(self) -> float:
        return sum(e.images for e in self.epochs) / sum(e.seconds for e in self.epochs)

    @property
    def times(self) -> list[float]:
        """Training seconds at the end of each epoch."""
        return np.cumsum([e.seconds for e in self.epochs]).tolist()

    def seconds_to(self, target: float) -> float | None:
        """Training seconds until an evaluation first reached ``target``; None if none did."""
        reached = (t for t, e in zip(self.times, self.epochs, strict=True) if e.accuracy >= target)
        return next(reached, None)


def say(text: str) -> None:
    """Print on rank 0; in one write, which horovodrun's prefixes leave in one piece."""
    if hvd.rank() == 0:
        tqdm.write(f"{text}\n", end="")


def require_positive(
    parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str
) -> None:
    """End with the parser's error where one of these options is below 1."""
    for name in names:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: 1 or more")


def epoch_header(width: int) -> str:
    columns = (
        f"{'epoch':>7}  {'loss':>7}  {'accuracy':>8}  {'images/s':>8}  {'seconds':>7}  progress"
    )
    return f"{'strategy':<{width}}  {columns}"


def epoch_line(run: Run, epochs: int, width: int) -> str:
    e = run.epochs[-1]
    return (
        f"{run.strategy:<{width}}  {len(run.epochs):>3}/{epochs:<3}  {e.loss:>7.4f}"
        f"  {e.accuracy:>8.2%}  {e.images / e.seconds:>8,.0f}  {e.seconds:>7.2f}"
    )


def progress(done: int, total: int, seconds: float) -> str:
    """A bar with elapsed and remaining time, for the end of a line."""
    parts = "{percentage:3.0f}% |{bar:16}| {elapsed}<{remaining}"
    return tqdm.format_meter(done, total, seconds, ascii=" #", bar_format=parts)


def table(runs: Sequence[Run]) -> str:
    width = max(len("strategy"), *(len(run.strategy) for run in runs))
    to_target = f"seconds to {TARGET:.0%}"
    lines = [f"{'strategy':<{width}}  {'images/s':>8}  {'final accuracy':>14}  {to_target}"]
    for run in runs:
        seconds = run.seconds_to(TARGET)
        reached = "not reached" if seconds is None else f"{seconds:.2f}"
        lines.append(
            f"{run.strategy:<{width}}  {run.images_per_second:>8,.0f}  {run.accuracy:>14.2%}"
            f"  {reached:>{len(to_target)}}"
        )
    rule = "-" * len(lines[0])
    return "\n".join([lines[0], rule, *lines[1:]])


def picture(path: str) -> Path | None:
    """For argparse: refuses a file that cannot be written before the training, not after it."""
    if not path:
        return None
    kinds = (".png", ".svg", ".pdf")
    if Path(path).suffix not in kinds:
        raise argparse.ArgumentTypeError(f"{path!r} must end in one of {', '.join(kinds)}")
    if not Path(path).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"no folder {Path(path).parent}: make it first")
    return Path(path)


def plot(runs: Sequence[Run], path: Path, title: str) -> None:
    """Test accuracy over training seconds, one line a strategy."""
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        label = f"{run.strategy}: {run.accuracy:.2%}, {run.images_per_second:,.0f} images/s"
        axes.plot(run.times, [100 * e.accuracy for e in run.epochs], "o-", label=label)
    axes.axhline(100 * TARGET, color="grey", linestyle="--")
    axes.set(title=title, xlabel="training time (s), without evaluation", xlim=(0, None))
    axes.set(ylabel="test accuracy (%)", ylim=(None, 100))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", title="strategy: final accuracy, speed")
    figure.savefig(path, dpi=120)
