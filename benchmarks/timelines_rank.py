"""One rank of a job of the benchmark of timelines: takes steps, and says what it did when.

Messages are what Horovod's own timeline says (``HOROVOD_TIMELINE``, which rank 0 writes). What the
worker did is measured around the calls of stock Horovod's script, as forward, backward, wait and
update follow each other there. Under hvd_pipe waits and updates lie within forward, and
``HVD_PIPE_TIMELINE`` has them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import contestants
import horovod.torch as stock
import models
from throughput_rank import Rank, answer_orders
from torch.optim import SGD

import hvd_pipe.torch as hvd
from hvd_pipe.timeline import CLOCK, Event, Timeline

__all__ = ["TimelineRank", "messages"]

MESSAGE = "GLOO_ALLREDUCE"  # Horovod's name for the time in which a message travels


class TimelineRank(Rank):
    """A rank that trains one contestant, and answers with its last steps' events."""

    def record(
        self, name: str, model: str, compute_s: float, gradient_bytes: int, settle: int, steps: int
    ) -> dict[str, Any]:
        """Take steps, and return rank 0's events in the last ones; this ends Horovod."""
        network = models.emulated(model, compute_s, gradient_bytes)
        own: list[Event] = []
        if name == "horovod":
            step, finish = _timed(network, own)
        else:
            contestant = contestants.make(name, network, network.loss)
            step, finish = contestant.step, contestant.finish
        for _ in range(settle):
            step()
        self.barrier()
        begun = time.time()
        for _ in range(steps):
            step()
        ended = time.time()
        finish()
        self.barrier()  # Horovod may drop the last events of its file: no message is among them
        hvd.shutdown()
        if self.rank:
            return {"events": []}
        if name != "horovod":
            own += _of_hvd_pipe(Path(os.environ["HVD_PIPE_TIMELINE"], "rank0.json"))
        records = json.loads(Path(os.environ["HOROVOD_TIMELINE"]).read_text())
        own += messages(records, steps + 1)  # at the end, to synchronize sends once more
        return {
            "events": [
                {
                    "name": event.name,
                    "category": event.category,
                    "lane": event.lane,
                    "start_s": event.start_s - begun,
                    "duration_s": event.duration_s,
                    "args": event.args,
                }
                for event in own
                if event.end_s > begun and event.start_s < ended
            ]
        }


def _timed(network: Any, events: list[Event]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a step under stock Horovod that notes what it does, and its end."""
    optimizer = stock.DistributedOptimizer(
        SGD(network.parameters(), contestants.LR), network.named_parameters()
    )

    @contextmanager
    def noted(category: str) -> Iterator[None]:
        begun = time.time()
        yield
        events.append(Event(category, category, 0, "compute", begun, time.time() - begun))

    def step() -> None:
        optimizer.zero_grad()
        with noted("forward"):
            loss = network.loss()
        with noted("backward"):
            loss.backward()
        with noted("wait"):
            optimizer.synchronize()
        with noted("update"), optimizer.skip_synchronize():
            optimizer.step()

    return step, optimizer.synchronize


def _of_hvd_pipe(path: Path) -> list[Event]:
    """Return what a rank under ``HVD_PIPE_TIMELINE`` did, but for messages, in Unix time."""
    document = json.loads(path.read_text())
    clock = next(each for each in document["traceEvents"] if each["name"] == CLOCK)
    zero = clock["args"]["zero_unix_ns"] / 1e9
    return [
        replace(e, start_s=e.start_s + zero, args={})
        for e in Timeline.from_chrome(document, str(path)).events
        if e.category in ("forward", "backward", "wait", "update")
    ]


def messages(records: Sequence[Mapping[str, Any]], steps: int) -> list[Event]:
    """Return the messages of a timeline of Horovod's, in Unix time, with their step's number.

    It has a process a tensor. Tensors that travel together, fused, are one message.

    Args:
        records: The timeline's.
        steps: The number of steps that end it: they count from 0, those before from -1 down.
    """
    about = [record["args"] for record in records if record.get("name") == "process_name"]
    zero = about[0]["start_time_since_epoch_in_micros"]
    names = ["", *(each["name"] for each in about[1:])]  # by the number of the process
    activities: dict[int, list[tuple[str, int]]] = {}
    travels = []
    for record in records:
        mine = activities.setdefault(record["pid"], [])
        if record["ph"] == "B":
            mine.append((record["name"], record["ts"]))
        elif record["ph"] == "E" and mine:  # a barrier ends once more than it begins
            activity, begun = mine.pop()
            if activity == MESSAGE:
                travels.append((begun, record["ts"], names[record["pid"]]))
    found: list[tuple[int, int, list[str]]] = []
    for begun, ended, name in sorted(travels):
        if found and begun < found[-1][1]:  # Horovod sends one message at a time
            before = found.pop()
            found.append((before[0], max(ended, before[1]), [*before[2], name]))
        else:
            found.append((begun, ended, [name]))
    left: Counter[str] = Counter()  # a tensor travels once a step
    events = []
    for begun, ended, tensors in reversed(found):
        left.update(tensors)
        name = tensors[0] if len(tensors) == 1 else f"{tensors[0]} and {len(tensors) - 1} more"
        seconds = (zero + begun) / 1e6, (ended - begun) / 1e6
        step = steps - left[tensors[0]]
        events.append(Event(name, "allreduce", 0, "network", *seconds, {"step": step}))
    return events[::-1]


def main() -> None:
    """Be a rank of the team that the command line names."""
    directory, team = Path(sys.argv[1]), sys.argv[2]
    answer_orders(TimelineRank(team, directory / "ddp.store"), directory, team)


if __name__ == "__main__":
    main()
