"""What grows with the number of ranks in one job: start, agreement, plan, steps, memory, files.

    python benchmarks/scale.py --ranks 2 4 8 16 32 64 --json scale.json

Each size is a job of its own over Gloo, with one thread a rank, all ranks on this machine. The
model has 160 tensors, as a ResNet-50 has, and 23 KB of them: it is the number of messages that
counts here. Ranks share the cores, so times grow with their number for that alone: counts
(bytes, collectives, files, threads, memory) say what one rank of a real cluster has.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import markdown, run_here, write_json

STRATEGIES = ("merged-gradient", "pipe-sgd", "cocod:period=4")
LAYERS = 80  # of a weight and a bias each
LABELS = {
    "rss_mb": "resident MB",
    "own_mb": "MB of its own",
    "files": "open files",
    "threads": "threads",
}
WARM_UP = 28  # merged-gradient tries plans for 26 steps
LEAST = 10
START_S = 900
TIMEOUTS = ("HVD_PIPE_TIMEOUT", "HOROVOD_START_TIMEOUT", "HOROVOD_GLOO_TIMEOUT_SECONDS")


# A rank ---------------------------------------------------------------------------------------


def work(steps: int, seconds: float, output: Path) -> None:
    """Train under each strategy; the first rank writes what all have found."""
    import torch  # noqa: PLC0415 - the launching side needs none of this

    import hvd_pipe.torch as hvd  # noqa: PLC0415

    torch.set_num_threads(1)
    alone = holds()
    begun = time.perf_counter()
    hvd.init()
    found: dict[str, Any] = {"init_s": time.perf_counter() - begun, "alone": alone}
    found |= {"init": holds(), "strategies": {}}
    counted = count_agreements()
    for strategy in STRATEGIES:
        found["strategies"][strategy] = train(strategy, steps, seconds, counted)
    everyone = hvd.allgather_object(found)
    if hvd.rank() == 0:
        output.write_text(json.dumps({"ranks": hvd.size(), **gather(everyone)}))
    hvd.shutdown()


def train(strategy: str, steps: int, seconds: float, counted: dict[str, int]) -> dict[str, Any]:
    """Construct, broadcast, plan, and train so many steps, or for so long."""
    import torch  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    import hvd_pipe.torch as hvd  # noqa: PLC0415

    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(8, 8), nn.Tanh())]
    model = nn.Sequential(*layers)
    data, sgd = torch.randn(4, 8), torch.optim.SGD(model.parameters(), lr=1e-3)
    counted.update(collectives=0, received=0)
    begun = [time.perf_counter()]
    if strategy == "merged-gradient":
        strategy += ":overlap=backward"  # WARM_UP steps are its trials
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), strategy=strategy)
    begun.append(time.perf_counter())
    found: dict[str, Any] = {"agreement": dict(counted)}
    hvd.broadcast_parameters(model.state_dict(), 0)
    begun.append(time.perf_counter())

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().sum().backward()
        optimizer.step()

    for _ in range(WARM_UP):
        step()
    begun.append(time.perf_counter())
    for _ in range(LEAST):
        step()
    mine = (time.perf_counter() - begun[3]) / LEAST
    slowest = hvd.allreduce(torch.tensor([mine]), op=hvd.Max, name=f"{strategy}.step").item()
    more = max(0, min(steps - WARM_UP - LEAST, int(seconds / slowest) - LEAST))
    for _ in range(more):
        step()
    optimizer.synchronize()
    seconds_of = [after - before for before, after in pairwise(begun)]
    found |= dict(zip(("construct_s", "broadcast_s", "plan_s"), seconds_of, strict=True))
    found |= {"step_s": (time.perf_counter() - begun[3]) / (LEAST + more)}
    return found | {"steps": WARM_UP + LEAST + more, "holds": holds()}


def holds() -> dict[str, float]:
    """Return what this process holds now, and the small process of its watch."""
    import psutil  # noqa: PLC0415

    own = psutil.Process()
    memory = own.memory_full_info()  # uss: without the pages of libraries that ranks share
    found = {"rss_mb": memory.rss / 1e6, "own_mb": memory.uss / 1e6, "files": float(own.num_fds())}
    found["threads"] = float(own.num_threads())
    children = own.children()
    found["child_mb"] = sum(one.memory_info().rss for one in children) / 1e6
    found["child_files"] = float(sum(one.num_fds() for one in children))
    return found


def count_agreements() -> dict[str, int]:
    """Count the all-gathers by which ranks agree, and the bytes that a rank gets by them."""
    from hvd_pipe.torch import agree  # noqa: PLC0415

    counted, real = {"collectives": 0, "received": 0}, agree.allgather

    def allgather(*arguments: Any, **options: Any) -> Any:
        result = real(*arguments, **options)
        counted["collectives"] += 1
        counted["received"] += result.numel() * result.element_size()
        return result

    agree.allgather = allgather  # type: ignore[assignment]
    return counted


def gather(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """Join what ranks have found: the longest times, the first rank and the others."""
    strategies = {}
    for name, first in everyone[0]["strategies"].items():
        parts = [one["strategies"][name] for one in everyone]
        times = [key for key in first if key.endswith("_s")]
        strategies[name] = {key: max(part[key] for part in parts) for key in times}
        strategies[name] |= {"steps": first["steps"], "agreement": first["agreement"]}
        strategies[name]["holds"] = apart(parts, lambda part: part["holds"])
    return {
        "init_s": max(one["init_s"] for one in everyone),
        "alone": apart(everyone, lambda one: one["alone"]),
        "init": apart(everyone, lambda one: one["init"]),
        "strategies": strategies,
    }


def apart(
    everyone: list[dict[str, Any]], of: Callable[[dict[str, Any]], dict[str, float]]
) -> dict[str, list[float]]:
    """Return, by kind, what the first rank holds, and the most that another does."""
    return {
        kind: [of(everyone[0])[kind], max((of(one)[kind] for one in everyone[1:]), default=0.0)]
        for kind in of(everyone[0])
    }


# The launching side -----------------------------------------------------------------------------


def launch(ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one job and return what its first rank has written."""
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        output = Path(folder) / "found.json"
        words = [__file__, "--steps", str(options.steps), "--seconds", str(options.seconds)]
        before = os.getloadavg()[0]
        begun = time.perf_counter()
        run_here(
            [*words, "--worker", str(output)], ranks, env=dict.fromkeys(TIMEOUTS, str(START_S))
        )
        found: dict[str, Any] = json.loads(output.read_text())
        return found | {"job_s": time.perf_counter() - begun, "load_before": before}


def growth(sizes: list[int], values: list[float]) -> str:
    """Say how values grow with sizes: of the laws, the one whose line is closest.

    >>> growth([2, 4, 8, 16], [5.0, 5.0, 5.0, 5.1])
    'O(1)'
    >>> growth([2, 4, 8, 16], [10.0, 12.0, 16.0, 24.0])
    'O(n)'
    >>> growth([2, 4, 8, 16], [1.0, 2.0, 3.0, 4.0])
    'O(log n)'
    """
    import numpy as np  # noqa: PLC0415

    found = np.asarray(values)
    if found.max() <= 1.1 * max(found.min(), 1e-12):
        return "O(1)"
    misses = {}
    for law, scale in (("O(log n)", np.log2(sizes)), ("O(n)", np.asarray(sizes, dtype=float))):
        line = np.polyval(np.polyfit(scale, found, 1), scale)
        misses[law] = float(np.abs(line - found).sum())
    return min(misses, key=lambda law: misses[law])


def table(found: list[dict[str, Any]]) -> str:
    """Return the table: a line for each figure, a column for each size, and how it grows."""
    sizes = [job["ranks"] for job in found]
    rows: list[list[str]] = []

    def add(label: str, of: Callable[[dict[str, Any]], float], digits: int | None = None) -> None:
        values = [of(one) for one in found]
        # Times grow as ranks share the cores, and steps are as many as there was time for.
        law = growth(sizes, values) if len(sizes) > 2 and digits is None else ""
        digits = digits or 0
        rows.append([label, *(f"{value:.{digits}f}" for value in values), law])

    first, second = STRATEGIES[:2]  # the first constructor waits for ranks that import torch
    add("`hvd.init()`, s", lambda one: one["init_s"], 2)
    add("constructor, s", lambda one: one["strategies"][second]["construct_s"], 2)
    add("its collectives", lambda one: one["strategies"][first]["agreement"]["collectives"])
    add("its bytes a rank", lambda one: one["strategies"][first]["agreement"]["received"])
    add("broadcast, s", lambda one: one["strategies"][second]["broadcast_s"], 2)
    add(f"{WARM_UP} steps with trials, s", lambda one: one["strategies"][first]["plan_s"], 1)
    for name in STRATEGIES:
        add(
            f"ms a step, `{name}`",
            lambda one, name=name: 1e3 * one["strategies"][name]["step_s"],
            0,
        )
        add(f"steps, `{name}`", lambda one, n=name: one["strategies"][n]["steps"], 0)

    def held(one: dict[str, Any]) -> dict[str, list[float]]:
        holds: dict[str, list[float]] = one["strategies"][STRATEGIES[-1]]["holds"]
        return holds

    for at, who in enumerate(("rank 0", "another rank")):
        for kind, label in LABELS.items():
            add(f"{label}, {who}", lambda one, k=kind, i=at: held(one)[k][i])
    add("MB, small process of rank 0", lambda one: one["init"]["child_mb"][0])
    add("open files, small process of rank 0", lambda one: one["init"]["child_files"][0])
    add("MB, small process of another", lambda one: one["init"]["child_mb"][1])
    return markdown(["", *map(str, sizes), "grows"], rows)


def main() -> int:
    """Run a job of each size, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--steps", type=int, default=200, help="of each strategy, at most")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each strategy, about")
    parser.add_argument("--json", type=Path, help="write the results here, and add to them")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.steps, options.seconds, options.worker)
        return 0
    if min(options.ranks) < 1:
        parser.error(f"--ranks must be at least 1, got {min(options.ranks)}")
    found: list[dict[str, Any]] = []
    if options.json is not None and options.json.exists():
        found = json.loads(options.json.read_text())
    for ranks in options.ranks:
        one = launch(ranks, options)
        found = sorted([*(o for o in found if o["ranks"] != ranks), one], key=lambda o: o["ranks"])
        print(f"{ranks} ranks: {one['job_s']:.0f} s", flush=True)
        if options.json is not None:
            write_json(options.json, found)
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
