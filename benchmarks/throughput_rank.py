"""One rank of a team of the throughput benchmark: does what the referee asks, and answers.

A team is one job with settings of its own (such as Horovod's). The referee (`throughput.py`)
gives one team at a time the turn and stops the others, by files on the disk that all hosts share:

    DIRECTORY/TEAM.order          {"number": 7, "do": "race", ...}
    DIRECTORY/TEAM.RANK.answer    {"number": 7, ...}
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import contestants
import horovod.torch as stock
import models
import torch
import torch.distributed as dist

import hvd_pipe.torch as hvd
from hvd_pipe.torch.messages.group import THREADS

POLL_S = 0.01
LEAD_STEPS = 2  # after a barrier, until each step waits for what one after it has sent


class _WithThreads(dist.ProcessGroupGloo):
    """DDP's messages travel at once as ours do: `dist.init_process_group` has no option for it."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout, options._threads = timeout, THREADS
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
        super().__init__(store, rank, size, options)


class Rank:
    """What a rank has built, and how it does each thing that the referee can ask."""

    def __init__(self, team: str, store: Path) -> None:
        torch.set_num_threads(1)
        self.contestants: dict[str, Any] = {}
        self.rank: int
        self.barrier: Callable[[], Any]
        if team.startswith("tf-"):
            self._tensorflow = importlib.import_module("contestants_tf")
            self.rank, self.barrier = self._tensorflow.start(team == "tf-ours")
        elif team == "ddp":
            self.rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
            dist.distributed_c10d.ProcessGroupGloo = _WithThreads
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=self.rank,
                world_size=int(os.environ["OMPI_COMM_WORLD_SIZE"]),
            )
            self.barrier = dist.barrier
        else:
            (hvd if team == "ours" else stock).init()  # ours makes settings of its own
            self.rank = stock.rank()
            self.barrier = stock.barrier

    def measure(self, kind: str, sizes: list[int], samples: int) -> dict[str, float]:
        """Seconds that a message of each size, in bytes, keeps the links busy.

        Several are sent at once, and follow each other: what passes before the first has arrived
        is not counted. An exchange is what a codec sends: an all-to-all, and an all-gather.
        """
        if kind == "exchange":
            parts = [self.measure(each, sizes, samples) for each in ("all-to-all", "all-gather")]
            return {size: sum(part[size] for part in parts) for size in parts[0]}
        found = {}
        for size in sizes:
            self.barrier()
            waiting = [self._send(kind, size, number) for number in range(1 + samples)]
            arrived = []
            while waiting:  # in whichever order: Horovod has one of its own
                for handle in [each for each in waiting if stock.poll(each)]:
                    stock.synchronize(handle)
                    waiting.remove(handle)
                    arrived.append(time.perf_counter())
                time.sleep(POLL_S / 20)
            found[str(size)] = (arrived[-1] - arrived[0]) / samples
        return found

    def _send(self, kind: str, size: int, number: int) -> Any:
        name, share = f"measure.{kind}.{size}.{number}", max(1, size // stock.size())
        if kind == "all-to-all":
            return stock.alltoall_async(
                torch.zeros(stock.size(), share, dtype=torch.uint8), name=name
            )
        if kind == "all-gather":
            return stock.allgather_async(torch.zeros(1, share, dtype=torch.uint8), name)
        return stock.allreduce_async_(
            torch.zeros(max(1, size // 4)),
            name=name,
            op=stock.Sum,
            prescale_factor=1.0 + number,  # Horovod does not fuse messages that differ in it
        )

    def build(
        self, name: str, model: str, compute_s: float | None, gradient_bytes: int, settle: int
    ) -> dict[str, Any]:
        """Make a contestant and let it take its first steps.

        ``compute_s`` is an emulated step's seconds; None computes on the processor.
        """
        if name.startswith(contestants.TENSORFLOW):
            assert compute_s is not None
            made, nbytes = self._tensorflow.build(
                name, models.profile(model), compute_s, gradient_bytes
            )
            return self._started(name, made, nbytes, settle)
        if compute_s is None:
            network, loss = models.on_cpu(model)
        else:
            network = models.emulated(model, compute_s, gradient_bytes)
            loss = network.loss
        nbytes = sum(4 * p.numel() for p in network.parameters())
        return self._started(name, contestants.make(name, network, loss), nbytes, settle)

    def _started(self, name: str, contestant: Any, nbytes: int, settle: int) -> dict[str, Any]:
        for _ in range(settle):
            contestant.step()
        self.contestants[name] = contestant
        # A collection that walks over all contestants would stop one of them for 0.3 s.
        gc.collect()
        gc.freeze()
        return {"gradient_bytes": nbytes}

    def race(self, name: str, steps: int) -> dict[str, Any]:
        """Take steps together and say what they cost."""
        step = self.contestants[name].step
        step()  # what the round before left in flight has arrived
        self.barrier()
        for _ in range(max(LEAD_STEPS, contestants.period_of(name))):
            step()
        before, sent = resource.getrusage(resource.RUSAGE_SELF), bytes_sent()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        seconds = (time.perf_counter() - start) / steps
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {
            "seconds": seconds,
            "cpu_s": cpu / steps,
            "sent_bytes": (bytes_sent() - sent) / steps,
        }

    def drop(self) -> dict[str, Any]:
        """End all contestants."""
        for name in list(self.contestants):
            self.contestants.pop(name).finish()
        gc.unfreeze()
        gc.collect()
        return {}


def bytes_sent() -> int:
    """Return what this host has sent over its link; 0 where all ranks share a machine."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("eth0:"):
            return int(line.split()[9])
    return 0


def write(path: Path, answer: Any) -> None:
    """Write JSON that a reader sees whole or not at all."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(json.dumps(answer))
    part.rename(path)


def answer_orders(rank: Rank, directory: Path, team: str) -> None:
    """Answer orders until the referee ends this process."""
    number = 0
    while True:
        try:
            order = json.loads((directory / f"{team}.order").read_text())
        except FileNotFoundError:
            order = {"number": 0}
        if order.pop("number") != number + 1:
            time.sleep(POLL_S)
            continue
        number += 1
        what = order.pop("do")
        try:
            answer = getattr(rank, what)(**order)
        except Exception:
            where = f"rank {rank.rank} on {socket.gethostname()}"
            answer = {"error": f"{where}:\n{traceback.format_exc()}"}
        write(directory / f"{team}.{rank.rank}.answer", {"number": number, **answer})


def main() -> None:
    """Be a rank of the team that the command line names."""
    directory, team = Path(sys.argv[1]), sys.argv[2]
    answer_orders(Rank(team, directory / "ddp.store"), directory, team)


if __name__ == "__main__":
    main()
