"""Train for a long time and watch what must not grow: memory, tensors, threads, files, drift.

    python benchmarks/soak.py --workers 4 --steps 20000
    python benchmarks/soak.py --strategy cocod:period=4 --strategy pipe-sgd+int8 --launcher gloo

Each strategy trains in a job of its own. At fifty moments every rank counts what it holds, and
ranks compare their weights, after ``synchronize()`` where replicas differ or are updated late. A
``+int8`` or ``+bf16`` behind a strategy is compression with error feedback. What grows, or is not
alike, is named at the end, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import run_here, write_json

from hvd_pipe.strategy import parse

DEFAULTS = (
    "merged-gradient",
    "merged-gradient:overlap=forward",
    "pipe-sgd",
    "pipe-sgd+int8",
    "cocod:period=4",
    "cocod:period=8,fragments=4",
    "cocod:period=8,fragments=4,outer=nesterov,outer_lr=0.2",
    "cocod:period=8,fragments=4,within=node",
)
PER_NODE = 2  # workers, for within=node
MOMENTS = 50
SETTLED = 0.2  # of a run, after which nothing may grow: caches are full, plans are made
MOST_MB = 1.0  # resident memory may grow all the same: allocators keep pages (0.2 were measured)


@dataclass(frozen=True)
class Moment:
    """What a rank holds, and what ranks find together; counts are the largest of all ranks."""

    step: int
    rss_mb: float  # resident memory
    tensors: int  # that Python holds
    threads: int
    files: int
    handles: int  # messages that nobody has waited for yet
    spread: float  # the largest difference between two ranks' weights
    alike: bool  # whether all ranks' weights have one checksum
    loss: float  # the mean over ranks of the mean since the last moment


@dataclass(frozen=True)
class Run:
    """One strategy's run."""

    strategy: str
    workers: int
    step_ms: float
    moments: list[Moment]

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Run:
        return cls(**{**data, "moments": [Moment(**moment) for moment in data["moments"]]})

    def settled(self) -> list[Moment]:
        """Return the moments at which nothing should grow any more."""
        return self.moments[int(SETTLED * len(self.moments)) :]

    def faults(self) -> list[str]:
        """Return what has grown, and whether replicas were unlike."""
        first, last = self.settled()[0], self.moments[-1]
        grown = [
            f"{name} grew from {getattr(first, name)} to {getattr(last, name)}"
            for name in COUNTS
            if getattr(last, name) > getattr(first, name)
        ]
        if last.rss_mb > first.rss_mb + MOST_MB:
            grown.append(f"memory grew from {first.rss_mb} to {last.rss_mb} MB")
        unlike = [str(moment.step) for moment in self.moments if not moment.alike]
        if unlike:
            grown.append(f"replicas were unlike at step {', '.join(unlike)}")
        return [f"{self.strategy}: {each}" for each in grown]

    def row(self) -> tuple[str, ...]:
        """Return the run's line of the table."""
        first, last = self.settled()[0], self.moments[-1]
        counts = [f"{getattr(first, name)} -> {getattr(last, name)}" for name in COUNTS]
        worst = max(moment.spread for moment in self.moments)
        unlike = sum(not moment.alike for moment in self.moments)
        return (
            self.strategy,
            str(last.step),
            f"{self.step_ms:.2f}",
            f"{first.rss_mb:.1f} -> {last.rss_mb:.1f}",
            *counts,
            f"{worst:.1e}" if unlike else "none",
            f"{self.moments[0].loss:.4f} -> {last.loss:.4f}",
        )


COUNTS = ("tensors", "threads", "files", "handles")
HEADER = ("strategy", "steps", "step ms", "RSS MB", *COUNTS, "drift", "loss")


def table(runs: list[Run]) -> str:
    """Return the runs side by side; an arrow goes from the settled job to its end."""
    rows = [HEADER, *(run.row() for run in runs)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


# A worker -------------------------------------------------------------------------------------


def work(strategy: str, steps: int, output: Path) -> None:
    """Train on this rank; the first rank writes the run."""
    import torch  # noqa: PLC0415 - the launching side needs none of this
    from torch import nn  # noqa: PLC0415

    import hvd_pipe.torch as hvd  # noqa: PLC0415

    hvd.init(process_sets="dynamic")
    os.environ["HOROVOD_HOSTNAME"] = f"node-{hvd.rank() // PER_NODE}"
    torch.set_num_threads(1)
    torch.manual_seed(1)
    name, _, codec = strategy.partition("+")
    codecs = {"": hvd.Compression.none, "int8": hvd.Int8(error_feedback=True)}
    codecs["bf16"] = hvd.BF16(error_feedback=True)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32)
    ).append(nn.ReLU())
    model.append(nn.Linear(32, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5),
        model.named_parameters(),
        compression=codecs[codec],
        strategy=name,
    )
    hvd.broadcast_parameters(model.state_dict(), 0)
    teacher = torch.randn(64, 10)
    images = torch.randn(4096, 1, 8, 8)
    labels = (images.flatten(1) @ teacher).argmax(1)
    mine = slice(hvd.rank(), None, hvd.size())
    images, labels = images[mine], labels[mine]
    loss_of = nn.CrossEntropyLoss()
    due = {round((i + 1) * steps / MOMENTS) for i in range(MOMENTS)}
    moments: list[Moment] = []
    total, count = 0.0, 0
    begun = time.perf_counter()
    for step in range(1, steps + 1):
        at = 16 * step % (len(images) - 16)
        optimizer.zero_grad()
        loss = loss_of(model(images[at : at + 16]), labels[at : at + 16])
        loss.backward()
        optimizer.step()
        total, count = total + float(loss.detach()), count + 1
        if step not in due:
            continue
        if name.startswith("cocod") or "forward" in name:
            optimizer.synchronize()
        del loss
        moments.append(_moment(step, total / count, list(model.parameters())))
        total, count = 0.0, 0
        if hvd.rank() == 0 and len(moments) % 10 == 0:
            last = moments[-1]
            print(
                f"{strategy}: {step}/{steps} steps, loss {last.loss:.4f}, {last.rss_mb:.1f} MB",
                flush=True,
            )
    step_ms = (time.perf_counter() - begun) / steps * 1e3
    optimizer.synchronize()
    if hvd.rank() == 0:
        output.write_text(json.dumps(asdict(Run(strategy, hvd.size(), step_ms, moments))))


def _moment(step: int, loss: float, parameters: list[Any]) -> Moment:
    import torch  # noqa: PLC0415
    from horovod.torch import mpi_ops  # noqa: PLC0415

    import hvd_pipe.torch as hvd  # noqa: PLC0415

    gc.collect()
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    own = [
        pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()),
        sum(1 for _ in Path("/proc/self/task").iterdir()),
        sum(1 for _ in Path("/proc/self/fd").iterdir()),
        len(mpi_ops._handle_map),
    ]
    checksum = float(zlib.crc32(flat.numpy().tobytes()))
    numbers = torch.tensor([*own, checksum, -checksum], dtype=torch.float64)
    most = hvd.allreduce(numbers, op=hvd.Max, name="soak.most").tolist()
    high = hvd.allreduce(flat, op=hvd.Max, name="soak.high")
    low = hvd.allreduce(flat, op=hvd.Min, name="soak.low")
    mean = hvd.allreduce(torch.tensor(loss, dtype=torch.float64), name="soak.loss")
    tensors, threads, files, handles = (int(value) for value in most[1:5])
    return Moment(
        step,
        round(most[0], 2),
        tensors,
        threads,
        files,
        handles,
        spread=float((high - low).max()),
        alike=most[5] == -most[6],
        loss=float(mean),
    )


# The launching side -----------------------------------------------------------------------------


def launch(strategy: str, options: argparse.Namespace) -> Run:
    """Run one strategy's job and return what its first rank has written."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        output = Path(folder) / "run.json"
        words = [__file__, "--strategy", strategy, "--steps", str(options.steps)]
        env = {"HOROVOD_CYCLE_TIME": "0.1"}
        run_here([*words, "--worker", str(output)], options.workers, options.launcher, env)
        return Run.read(json.loads(output.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20000, help="of each strategy")
    parser.add_argument("--strategy", action="append", help=f"default: {', '.join(DEFAULTS)}")
    parser.add_argument("--launcher", choices=("mpi", "gloo"), default="mpi")
    parser.add_argument("-o", "--output", type=Path, default=Path("soak.json"))
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.strategy[0], options.steps, options.worker)
        return 0
    for strategy in options.strategy or ():
        parse(strategy.partition("+")[0])
    if options.steps < MOMENTS:
        parser.error(f"--steps must be at least {MOMENTS}, a step a moment; got {options.steps}")
    runs = []
    for strategy in options.strategy or DEFAULTS:
        runs.append(launch(strategy, options))
        write_json(options.output, [asdict(run) for run in runs])
    print(table(runs))
    faults = [fault for run in runs for fault in run.faults()]
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
