"""Predicted against measured step time of every method, on the ranks at hand.

    horovodrun -np 2 python benchmarks/prediction.py

The model takes a profile's layer times without using the processor and has gradients of its
sizes (`benchmarks/emulated.py`), scaled so that communication takes ``--ratio`` of the
computation. First the model is profiled and the all-reduce is measured, as ``hvd-pipe profile``
and ``hvd-pipe bench`` do; the predictions follow from these two alone. Then all methods train,
interleaved in rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import horovod.torch as stock
import torch
from emulated import EmulatedModel
from tqdm import tqdm

import hvd_pipe.torch as hvd
from hvd_pipe.planning import methods
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.timing import step_time
from hvd_pipe.torch.agree import largest
from hvd_pipe.torch.layer_times import measure_profile
from hvd_pipe.torch.measuring.probes import measure_comm

DEFAULT_METHODS = (
    "merged-gradient",
    "greedy",
    "wfbp",
    "single",
    "horovod",
    "pipe-sgd",
    "cocod:period=2",
    "cocod:period=8",
)
SETTLE_STEPS = 28  # merged-gradient tries plans for 26
BYTES_PER_MODEL = 2**20


def main() -> None:
    """Measure, predict, train, compare."""
    options = parse_arguments()
    hvd.init()
    torch.set_num_threads(1)
    published = ModelProfile.read(options.profile)
    comm = measure_comm(options.gradient_bytes, torch.device("cpu"), WORLD, "prediction")
    compute_s = comm(float(options.gradient_bytes)) / options.ratio
    profile = measured_profile(published, compute_s, options.gradient_bytes)
    trained = {
        name: training(name, published, compute_s, options.gradient_bytes)
        for name in options.methods
    }
    times = race(trained, options.rounds, options.steps)
    rows = [row(name, times[name], profile, comm) for name in options.methods]
    if hvd.rank() == 0:
        report(rows, options)


WORLD = hvd.global_process_set


def measured_profile(published: ModelProfile, compute_s: float, size: int) -> ModelProfile:
    """The emulated model's own profile, as this machine runs it, of the slowest rank."""
    model = EmulatedModel(published, compute_s, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model.step()
        optimizer.step()

    stock.barrier()
    return measure_profile(model, step, steps=10, skip=3, name=published.name)


def training(
    name: str, published: ModelProfile, compute_s: float, size: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Functions that make one training step with the method, and that end its training."""
    model = EmulatedModel(published, compute_s, size)
    plain = torch.optim.SGD(model.parameters(), lr=1e-3)
    if name == "horovod":
        optimizer = stock.DistributedOptimizer(plain, model.named_parameters())
    else:
        optimizer = hvd.DistributedOptimizer(
            plain, model.named_parameters(), strategy=methods.spell(methods.parse(name))
        )

    def step() -> None:
        optimizer.zero_grad()
        model.step()
        optimizer.step()

    return step, optimizer.synchronize


def race(
    trained: dict[str, tuple[Callable[[], None], Callable[[], None]]], rounds: int, steps: int
) -> dict[str, list[float]]:
    """Seconds a step of each method, one number a round; the slowest rank's."""
    for step, _ in trained.values():
        for _ in range(SETTLE_STEPS):
            step()
    times: dict[str, list[float]] = {name: [] for name in trained}
    hidden = hvd.rank() != 0 or not sys.stderr.isatty()
    for _ in tqdm(range(rounds), desc="rounds", disable=hidden):
        for name, (step, _) in trained.items():
            step()  # what the round before left in flight has arrived
            stock.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                step()
            mine = (time.perf_counter() - start) / steps
            times[name].append(largest([mine], f"prediction.{name}", WORLD)[0])
    for _, finish in trained.values():
        finish()
    return times


def row(name: str, times: list[float], profile: ModelProfile, comm: CommModel) -> dict[str, Any]:
    """Predicted and measured seconds of a method."""
    found = step_time(name, profile, comm)
    measured = median(times)
    return {
        "method": name,
        "predicted_s": found.total_s,
        "measured_s": measured,
        "fastest_s": min(times),
        "slowest_s": max(times),
        "error": found.total_s / measured - 1.0,
        "compute_s": found.compute_s,
        "comm_s": found.comm_s,
    }


def report(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the table; write JSON where asked."""
    print(
        f"{hvd.size()} workers, {Path(options.profile).name}, "
        f"{options.gradient_bytes / 2**20:.1f} MiB of gradients, r = {options.ratio}: a worker "
        f"computes {rows[0]['compute_s'] * 1e3:.1f} ms"
    )
    print(f"{'method':<18}{'predicted ms':>14}{'measured ms':>14}{'min .. max':>20}{'error':>9}")
    for each in rows:
        spread = f"{each['fastest_s'] * 1e3:.1f} .. {each['slowest_s'] * 1e3:.1f}"
        print(
            f"{each['method']:<18}{each['predicted_s'] * 1e3:>14.1f}"
            f"{each['measured_s'] * 1e3:>14.1f}{spread:>20}{each['error']:>+9.1%}"
        )
    print(f"median error {median(abs(each['error']) for each in rows):.1%}")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    data = Path(__file__).parent.parent / "tests" / "data"
    parser.add_argument("--profile", default=str(data / "resnet50.graph.txt"))
    parser.add_argument("--gradient-bytes", type=int, default=16 * BYTES_PER_MODEL)
    parser.add_argument("--ratio", type=float, default=1.0, help="communication / computation")
    parser.add_argument("--methods", nargs="+", default=DEFAULT_METHODS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8, help="of a method, in each round")
    parser.add_argument("--json", help="write the rows to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
