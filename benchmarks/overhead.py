"""What hvd_pipe itself adds to a step, in the first steps and once the plan is made.

    horovodrun --gloo -np 1 python benchmarks/overhead.py
    horovodrun --gloo -np 1 python benchmarks/overhead.py --compute-ms 120   # emulated, 3 MiB

Two figures a strategy, both on rank 0, in medians:

- own code: the time of ``zero_grad()``, ``step()`` and the gradients' hooks, without the user's
  optimizer's own update and without waiting for messages;
- plan: what of it keeps the plan up to date (order of gradients, control words, planning anew),
  which MergedGradient's other plans do not do.

They are sums of the functions' own times, as differences between whole steps drown in noise. Own
code copies each gradient once, and takes some microseconds a tensor, so its share depends on the
model: here ResNet-50 on images of ImageNet's size, or its tensors, scaled, on an emulated
accelerator (`emulated.py`), which leaves the processor to the rest. With one rank it should stay
below a hundredth of a step: the exit status is 1 where it does not.
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

MOST = 0.01
PLAN = ("_check_order", "after_update")


class Clock:
    """Adds up the seconds inside of functions; nested ones count once, waiting not at all."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._waited = 0.0

    def watch(self, owner: Any, name: str, label: str | None = None) -> None:
        """Time every call of ``owner.name``; without a label it is waiting."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            waited, start = self._waited, time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                spent = time.perf_counter() - start - (self._waited - waited)
                if label is None:
                    self._waited += spent
                else:
                    self.seconds[label] += spent

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        """Return the sums since the last call."""
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


def build(options: argparse.Namespace) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Return the model, and the loss of its minibatch."""
    if options.compute_ms:
        emulation = emulated(options.model, options.compute_ms / 1e3, options.gradient_bytes)
        return emulation, emulation.loss
    model = zoo.build(options.model)
    inputs = torch.randn(options.batch, 3, options.pixels, options.pixels)
    return model, lambda: model(inputs).pow(2).mean()


def step_s(optimizer: Any, loss: Callable[[], torch.Tensor]) -> float:
    """Train for a step and return its seconds."""
    start = time.perf_counter()
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
    return time.perf_counter() - start


def plain_step(options: argparse.Namespace) -> float:
    """Return the seconds of a step that is not distributed."""
    model, loss = build(options)
    optimizer = SGD(model.parameters(), lr=0.001)
    steps = [step_s(optimizer, loss) for _ in range(options.steps - options.early)]
    if hvd.rank() == 0:
        print(f"{'not distributed':18} {median(steps) * 1e3:9.2f}", flush=True)
    return median(steps)


def measure(strategy: str, options: argparse.Namespace) -> dict[str, float]:
    """Train with one strategy, print its line, and return it; ``own`` is its own code's share."""
    model, loss = build(options)
    optimizer = hvd.DistributedOptimizer(
        SGD(model.parameters(), lr=0.001), model.named_parameters(), strategy=strategy
    )
    engine, clock = optimizer._hvd_pipe, Clock()
    wait, update = Bucket.wait, SGD.step
    clock.watch(Bucket, "wait")
    clock.watch(SGD, "step")
    clock.watch(engine, "on_gradient", "own")
    clock.watch(optimizer, "zero_grad", "own")
    clock.watch(optimizer, "step", "own")
    if strategy == "merged-gradient":
        for name in PLAN:
            clock.watch(engine, name, "plan")
    early, late = [], []
    for step in range(options.steps):
        whole = step_s(optimizer, loss)
        (early if step < options.early else late).append((whole, clock.take()))
    optimizer.synchronize()
    Bucket.wait, SGD.step = wait, update  # type: ignore[method-assign]
    whole = median(step for step, _ in late)
    own, plan = (
        median(sums.get(label, 0.0) for _, sums in late) / whole for label in ("own", "plan")
    )
    if hvd.rank() == 0:
        first = sum(step for step, _ in early) - options.early * whole
        print(
            f"{strategy:18} {whole * 1e3:9.2f} {own:10.2%} {plan:10.3%} {first * 1e3:14.1f}",
            flush=True,
        )
    return {"step_s": whole, "own": own, "plan": plan}


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
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--early", type=int, default=28, help="of these, until the plan is made")
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
        print("strategy             step ms   own code       plan     early: + ms", flush=True)
    load, plain = os.getloadavg()[0], plain_step(options)
    lines = {name: measure(name, options) for name in ("merged-gradient", "pipe-sgd", "cocod")}
    if options.json and hvd.rank() == 0:
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        found = {"date": datetime.date.today().isoformat(), "load_at_start": load, **settings}
        found |= {"not_distributed_s": plain, "lines": lines}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(hvd.size() == 1 and max(line["own"] for line in lines.values()) > MOST)


if __name__ == "__main__":
    sys.exit(main())
