"""What hvd_pipe itself adds to a step, in the first steps and once the plan is made.

    horovodrun --gloo -np 1 python benchmarks/overhead.py
    horovodrun --gloo -np 1 python benchmarks/overhead.py --compute-ms 120   # emulated, 3 MiB

A line a strategy, on rank 0, in medians of milliseconds a step:

- hook: the gradients' hooks, without what they copy and send;
- copy: of gradients into their buckets, which is the memory's time;
- launch: handing buckets over to be sent;
- step: ``step()`` and ``zero_grad()``, without waiting and without the user's own update;
- plan: what of it keeps the plan up to date (order of gradients, planning anew);
- wait, update: for messages, and the user's optimizer's own; they are not own code.

``own`` is the processor time that a step takes above one that is not distributed, by turns in one
run, as a share of the step; the parts are measured after that, and take some of it themselves. All
depend on the model: here ResNet-50 on images of ImageNet's size, or its tensors, scaled, on an
emulated accelerator (`emulated.py`), which leaves the processor to the rest. With one rank, own
code should stay below a hundredth of a real step, and below a fiftieth of an emulated one of
120 ms: the exit status is 1 where it does not.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from models import emulated
from torch import nn
from torch.optim import SGD

import hvd_pipe.torch as hvd
from hvd_pipe.torch.messages.buckets import Bucket

sys.path.append(str(Path(__file__).resolve().parent.parent))
from torch_examples import models as zoo

MOST = {"real": 0.01, "emulated": 0.02}
LABELS = ("hook", "copy", "launch", "step", "plan", "wait", "update")


class Clock:
    """Adds up the seconds inside of functions, without those that they call and it watches."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._nested = 0.0
        self._watched: list[tuple[Any, str, Any]] = []

    def watch(self, owner: Any, name: str, label: str) -> None:
        """Time every call of ``owner.name``, until `close`."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, self._nested = self._nested, 0.0
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                spent = time.perf_counter() - start
                self.seconds[label] += spent - self._nested
                self._nested = outer + spent

        setattr(owner, name, timed)
        self._watched.append((owner, name, inner))

    def take(self) -> dict[str, float]:
        """Return the sums since the last call."""
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken

    def close(self) -> None:
        """Put the functions back."""
        for owner, name, inner in self._watched:
            setattr(owner, name, inner)


def build(options: argparse.Namespace) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Return the model, and the loss of its minibatch."""
    if options.compute_ms:
        emulation = emulated(options.model, options.compute_ms / 1e3, options.gradient_bytes)
        return emulation, emulation.loss
    model = zoo.build(options.model)
    inputs = torch.randn(options.batch, 3, options.pixels, options.pixels)
    return model, lambda: model(inputs).pow(2).mean()


class Training:
    """A model, its optimizer, and the times of its steps."""

    def __init__(self, options: argparse.Namespace, strategy: str | None) -> None:
        model, self._loss = build(options)
        self.optimizer: Any = SGD(model.parameters(), lr=0.001)
        if strategy is not None:
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer, model.named_parameters(), strategy=strategy
            )

    def step(self) -> tuple[float, float]:
        """Train for a step; return its seconds, and this thread's on the processor."""
        start, busy = time.perf_counter(), time.thread_time()
        self.optimizer.zero_grad()
        self._loss().backward()
        self.optimizer.step()
        return time.perf_counter() - start, time.thread_time() - busy


def measure(strategy: str, options: argparse.Namespace) -> dict[str, float]:
    """Train with one strategy, print its line, and return it; ``own`` is its own code's share."""
    plain, training = Training(options, None), Training(options, strategy)
    early = [training.step()[0] - plain.step()[0] for _ in range(options.early)]
    late = [(*plain.step(), *training.step()) for _ in range(options.steps)]
    plain_s, plain_busy, whole_s, busy = (median(column) for column in zip(*late, strict=True))
    line = {"plain_s": plain_s, "step_s": whole_s, "own": (busy - plain_busy) / whole_s}
    line |= parts_of(training, strategy, options.steps)
    if hvd.rank() == 0:
        first = 1e3 * (sum(early) - options.early * (whole_s - plain_s))
        times = f"{plain_s * 1e3:8.2f}{whole_s * 1e3:8.2f}{line['own']:8.2%}"
        parts = "".join(f"{line[label] * 1e3:8.2f}" for label in LABELS)
        print(f"{strategy:16} {times}{parts} {first:10.1f}", flush=True)
    return line


def parts_of(training: Training, strategy: str, steps: int) -> dict[str, float]:
    """Return the medians of what a step's parts take, in seconds."""
    optimizer, clock = training.optimizer, Clock()
    clock.watch(Bucket, "wait", "wait")
    clock.watch(Bucket, "launch", "launch")
    clock.watch(torch, "_foreach_copy_", "copy")
    clock.watch(SGD, "step", "update")
    for name in ("on_gradient", "collect"):
        clock.watch(optimizer._hvd_pipe, name, "hook")
    for name in ("zero_grad", "step"):
        clock.watch(optimizer, name, "step")
    if strategy == "merged-gradient":
        for name in ("_check_order", "after_update"):
            clock.watch(optimizer._hvd_pipe, name, "plan")
    sums = []
    for _ in range(steps):
        training.step()
        sums.append(clock.take())
    optimizer.synchronize()
    clock.close()
    return {label: median(row.get(label, 0.0) for row in sums) for label in LABELS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50", help="of torch_examples/models.py")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument(
        "--compute-ms", type=float, help="of an emulated step; default: a real one"
    )
    parser.add_argument(
        "--gradient-bytes", type=int, default=3 * 2**20, help="of an emulated step"
    )
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--early", type=int, default=28, help="before these, until plans are made")
    parser.add_argument("--json", type=Path, help="write the settings and all lines here")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    if hvd.rank() == 0:
        kind = (
            f"emulated {options.compute_ms:g} ms"
            if options.compute_ms
            else f"batch {options.batch}"
        )
        print(f"{options.model}, {kind}, {hvd.size()} ranks", flush=True)
        columns = "".join(f"{label:>8}" for label in ("plain", "ms", "own", *LABELS))
        print(f"{'strategy':16} {columns} early: +ms", flush=True)
    load = os.getloadavg()[0]
    lines = {name: measure(name, options) for name in ("merged-gradient", "pipe-sgd", "cocod")}
    if options.json and hvd.rank() == 0:
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        found = {"date": datetime.date.today().isoformat(), "load_at_start": load, **settings}
        options.json.write_text(json.dumps(found | {"lines": lines}, indent=1) + "\n")
    most = MOST["emulated" if options.compute_ms else "real"]
    return int(hvd.size() == 1 and max(line["own"] for line in lines.values()) > most)


if __name__ == "__main__":
    sys.exit(main())
