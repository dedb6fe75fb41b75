"""What the demo's workers do in both frameworks: limit their link, train by turns, and report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

BATCH, LR, MOMENTUM = 32, 0.01, 0.9
WIDTHS = (32, 64, 128, 128, 192, 192)  # of the net's convolutions, on images of 24 x 24
ROWS = {
    "stock Horovod": "",
    "PyTorch DDP": "",
    "merged-gradient": "merged-gradient",
    "overlap=forward": "merged-gradient:overlap=forward",
    "pipe-sgd": "pipe-sgd:warmup_steps=20",
    "cocod": "cocod:period=8",
}
# Until plans of messages are there, and `warmup_steps` are over.
SETTLE_STEPS = {"merged-gradient": 65, "overlap=forward": 65, "pipe-sgd": 25}

# Another process looks at the link and at the main thread of this one, every two milliseconds.
WATCH = """
import sys, time
out, task, until = sys.argv[1:]
link, stat = open("/proc/net/dev", "rb", 0), open(task, "rb", 0)
rows = []
while open(until).read() == "":
    link.seek(0); stat.seek(0)
    counters = next(line for line in link.read().splitlines() if b"lo:" in line)
    sent = counters.split(b":")[1].split()[8].decode()
    state = stat.read().rpartition(b") ")[2][:1].decode()
    rows.append(f"{time.perf_counter()} {sent} {state}")
    if len(rows) == 1: print(flush=True)
    time.sleep(2e-3)
open(out, "w").write("\\n".join(rows))
"""


@dataclass(frozen=True)
class Job:
    """What a framework knows of the job."""

    folder: Path
    is_limited: bool
    is_first: bool
    nbytes: int  # of all gradients
    steps: int  # an epoch
    mean: Callable[[float], float]  # over all ranks, which wait for each other here
    all_reduce: Callable[[], object]  # of all gradients
    computing_s: Callable[[], float]  # of a step that sends nothing

    def all_reduce_s(self) -> float:
        """Return the seconds of one all-reduce of all gradients."""
        times = []
        for _ in range(5):
            self.mean(0.0)
            begun = time.perf_counter()
            self.all_reduce()
            times.append(time.perf_counter() - begun)
        return self.mean(median(times))

    def limit(self, bits: float) -> None:
        """Limit what all workers of this network namespace send to each other."""
        if self.is_first:
            burst = max(131072, round(bits / 8 * 1e-3))
            shaper = f"tbf rate {round(bits)}bit burst {burst}b latency 100ms"
            subprocess.run(f"tc qdisc replace dev lo root {shaper}".split(), check=True)
        self.mean(0.0)

    def run(self, rows: Sequence[Any], shown: Callable[[], dict[str, Any]]) -> None:
        """Find the link's rate, train all rows by turns, and write the result.

        An epoch of each row comes in turn, so that whatever else the machine does slows all of
        them alike.
        """
        report = Reporter(self.folder, self.is_first)
        result: dict[str, Any] = {"nbytes": self.nbytes}
        result["compute_s"] = compute_s = self.computing_s()
        if self.is_limited:
            found = find_rate(self.nbytes, compute_s, self.limit, self.all_reduce_s)
            result["bits"], result["all_reduce_s"] = found
        else:
            result["all_reduce_s"] = self.all_reduce_s()
        epochs = epochs_that_fit(compute_s * self.steps)
        settle = {row.name: SETTLE_STEPS.get(row.name, 5) for row in rows}
        total = sum(settle.values()) + epochs * self.steps * len(rows)
        report("link", total=total, **result)
        for row in rows:
            row.settle(settle[row.name])
            report(steps=settle[row.name])
        curves: dict[str, list[dict[str, float]]] = {row.name: [] for row in rows}
        for epoch in range(epochs):
            turn = epoch % len(rows)
            for row in [*rows[turn:], *rows[:turn]]:
                self.mean(0.0)
                begun = time.perf_counter()
                row.train(epoch + 1, LR * (1 - epoch / epochs))
                seconds = time.perf_counter() - begun
                curves[row.name].append({"seconds": seconds, "accuracy": row.accuracy()})
                report("train", steps=self.steps)
        result["compute_s"] = (compute_s + self.computing_s()) / 2
        result |= {"steps": self.steps, "images": 2 * BATCH * self.steps, "rows": curves}
        result["shown"] = shown()
        if self.is_first:
            (self.folder / "result.json").write_text(json.dumps(result))
        self.mean(0.0)


def find_rate(
    nbytes: int, compute_s: float, limit: Callable[[float], None], measure: Callable[[], float]
) -> tuple[float, float]:
    """Limit the link so that an all-reduce takes as long as a step computes.

    Returns:
        The rate in bit/s, and the seconds that the all-reduce takes then.
    """
    bits = 2 * 8 * nbytes / compute_s  # two workers send all of it over the same loopback
    tried: list[tuple[float, float]] = []
    for _ in range(3):
        limit(bits)
        tried.append((bits, measure()))
        bits = min(bits * tried[-1][1] / compute_s, 1e11)
    best = min(tried, key=lambda one: abs(one[1] / compute_s - 1))
    limit(best[0])
    return best


def epochs_that_fit(compute_s: float) -> int:
    """Return how many epochs of all rows take about a minute, where one computes for so long."""
    return min(6, max(2, int(45 / (10 * compute_s))))


class Reporter:
    """Tells `demo.py` how far training is, in lines of JSON; on rank 0."""

    def __init__(self, folder: Path, is_first: bool) -> None:
        self._file = (folder / "progress").open("w") if is_first else None
        self._done = 0

    def __call__(self, say: str = "", steps: int = 0, **more: Any) -> None:
        self._done += steps
        if self._file is not None:
            self._file.write(json.dumps({"done": self._done, "say": say, **more}) + "\n")
            self._file.flush()


@contextmanager
def watched(folder: Path, is_first: bool) -> Iterator[list[str]]:
    """Yield a list, which gets what was seen of the link and of this thread meanwhile."""
    samples: list[str] = []
    if not is_first:
        yield samples
        return
    out, until = folder / "samples", folder / "until"
    until.write_text("")
    task = f"/proc/{os.getpid()}/task/{os.getpid()}/stat"
    words = [sys.executable, "-S", "-c", WATCH, str(out), task, str(until)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()  # it has begun
            yield samples
        finally:
            until.write_text("end")
            process.wait()
    samples += out.read_text().splitlines()
