"""Ranks that send each other messages in the order of a pipeline's schedule.

``python workers_pipeline_transport.py FOLDER TRANSPORT [WRONG]`` does so until something happens.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cases import Raised, run_cases
from horovod.common.exceptions import HorovodInternalError
from publish import end_late_over_gloo, publish

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.pipeline.build import open_transport
from hvd_pipe.pipeline.transport import Channel, Kind, Layout, Transport
from hvd_pipe.pipeline.wire import Bytes, Format, Header
from hvd_pipe.planning.instructions import (
    Backward,
    Forward,
    Instruction,
    RecvActivation,
    RecvGradient,
    SendActivation,
    SendGradient,
)
from hvd_pipe.planning.schedule import schedule
from hvd_pipe.runtime.watch import watchdog

BATCH, WIDTH = 6, 50
FORMAT = Format(((BATCH, WIDTH), (3,)), (8, 4), stages=4)
MESSAGES = SendActivation | SendGradient | RecvActivation | RecvGradient
LARGE = 50_000_000
DEADLINE_S = 120  # no rank outlives its test
LATE, SOON = 1, 30


class Job:
    """Horovod of a framework, and a transport's other needs."""

    def __init__(self, framework: str = "torch") -> None:
        self.hvd = importlib.import_module(f"hvd_pipe.{framework}")
        self.agreement = importlib.import_module(f"hvd_pipe.{framework}.agree").agreement
        self.start = importlib.import_module(f"hvd_pipe.{framework}.pipedream.tensors").start
        self.hvd.init()
        self.rank: int = self.hvd.rank()

    def open(self, channels: Sequence[Channel], transport: str) -> Transport:
        world = self.hvd.global_process_set
        return open_transport(channels, transport, self.hvd, self.agreement, world, self.start)

    def meet(self, value: object = None) -> list[Any]:
        return self.agreement.gather(value, "test.meet", self.hvd.global_process_set)


def kind_of(step: Instruction) -> Kind:
    return Kind.ACTIVATION if isinstance(step, SendActivation | RecvActivation) else Kind.GRADIENT


def message_of(sender: int, kind: Kind, minibatch: int, last: bool) -> Bytes:
    """What anyone can make who knows its words."""
    random = np.random.default_rng([sender, kind, minibatch])
    x = random.standard_normal((BATCH - 2 * last, WIDTH))
    y = random.standard_normal(3).astype(np.float32)
    norms = tuple(random.standard_normal(4).tolist())
    header = Header(minibatch, 0, int(random.integers(1 << 62)), norms, (x.shape, y.shape))
    return FORMAT.pack(header, [x, y])


def channels_of(program: Sequence[Instruction], layout: Layout) -> list[Channel]:
    found = {
        (layout.rank(step.peer), kind_of(step), isinstance(step, SendActivation | SendGradient))
        for step in program
        if isinstance(step, MESSAGES)
    }
    return [Channel(*one, FORMAT.capacity) for one in sorted(found)]


def run_schedule(
    framework: str, transport: str, replicas: Sequence[int], minibatches: int, runs: int = 1
) -> tuple[str, int, int, list[str]]:
    """Return what carried how many messages of how many bytes, and which were not as sent."""
    job = Job(framework)
    layout = Layout(tuple(replicas))
    program = schedule("1f1b", replicas, minibatches).programs[layout.worker(job.rank)]
    random = np.random.default_rng(job.rank)
    wrong: list[str] = []
    carried = sent = 0
    for _ in range(runs):
        wire = job.open(channels_of(program, layout), transport)
        coming = Counter(
            (layout.rank(step.peer), kind_of(step))
            for step in program
            if isinstance(step, RecvActivation | RecvGradient)
        )
        for (peer, kind), count in coming.items():
            wire.expect(peer, kind, count)
        for step in program:
            if isinstance(step, Forward | Backward):
                time.sleep(float(random.exponential(0.002)))
            if not isinstance(step, MESSAGES):
                continue
            peer, kind = layout.rank(step.peer), kind_of(step)
            last = step.minibatch == minibatches - 1
            if isinstance(step, SendActivation | SendGradient):
                wire.send(peer, kind, message_of(job.rank, kind, step.minibatch, last))
                continue
            buffer = wire.receive(peer, kind)
            expected = message_of(peer, kind, step.minibatch, last)
            FORMAT.unpack(buffer)
            if not np.array_equal(buffer[: expected.size], expected):
                wrong.append(str(step))
            wire.recycle(buffer)
            carried += 1
        wire.flush()
        sent += wire.sent_bytes
        wire.close()
    return type(wire).__name__, carried, sent, wrong


def send_large(transport: str, count: int = 3) -> list[bool]:
    """Return which large messages have arrived as sent, before anyone has asked for them."""
    job = Job()
    outgoing = job.rank == 0
    channel = Channel(1 - job.rank, Kind.GRADIENT, outgoing, LARGE)
    wire = job.open([channel], transport)
    messages = [
        np.random.default_rng(number).integers(0, 256, LARGE - 64 * number, np.uint8)
        for number in range(count)
    ]
    good: list[bool] = []
    if outgoing:
        for message in messages[:2]:  # as many as are received ahead
            wire.send(1, Kind.GRADIENT, message)
        job.meet()  # a send that waited for the other rank would never come here
        wire.flush()
        job.meet()  # nor would one that moved only while the other rank waits for it
        wire.send(1, Kind.GRADIENT, messages[2])
        wire.flush()
    else:
        job.meet()
        wire.expect(0, Kind.GRADIENT, count)
        time.sleep(0.5)
        job.meet()
        for message in messages:
            buffer = wire.receive(0, Kind.GRADIENT)
            good.append(np.array_equal(buffer[: message.size], message))
            wire.recycle(buffer)
    wire.close()
    return good


def told(function: Callable[[], object]) -> str:
    try:
        function()
    except (HvdPipeError, HorovodInternalError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def wrong_calls(transport: str) -> dict[str, str | Raised]:
    """Return what each mistake is told, on this rank."""
    job = Job()
    rank, other, kind = job.rank, 1 - job.rank, Kind.ACTIVATION

    def refused(name: str, *channels: Channel) -> str:
        return told(lambda: job.open(channels, name))

    def of(capacity: int, peer: int = other) -> Channel:
        return Channel(peer, kind, rank == 0, capacity)

    def after_open(use: Callable[[Transport], object]) -> str:
        wire = job.open([of(64)], transport)
        try:
            return told(lambda: use(wire))
        finally:
            wire.close()

    def recycle_twice(wire: Transport) -> None:
        if rank == 0:
            wire.send(1, kind, bytes(64))
            wire.flush()
            raise ValueError("sent")
        wire.expect(0, kind, 1)
        buffer = wire.receive(0, kind)
        wire.recycle(buffer)
        wire.recycle(buffer)

    def use_closed(wire: Transport) -> None:
        wire.close()
        wire.flush()

    def too_large(wire: Transport) -> None:
        if rank == 0:
            wire.send(1, kind, bytes(65))
        raise ValueError("not my turn")

    found = run_cases(
        {
            "unknown": lambda: refused("carrier-pigeon"),
            "one rank alone chooses": lambda: refused("auto" if rank else "tcp"),
            "capacities": lambda: refused(transport, of(64 + rank)),
            "one side": lambda: refused(transport, *([of(64)] if rank else [])),
            "itself": lambda: refused(transport, of(64, peer=rank)),
            "twice": lambda: refused(transport, of(64), of(64)),
            "empty": lambda: refused(transport, of(0)),
            "huge": lambda: refused(transport, of(1 << 31)),
            "no such channel": lambda: after_open(
                lambda wire: wire.send(other, Kind.GRADIENT, b"")
            ),
            "too large": lambda: after_open(too_large),
            "not expected": lambda: after_open(
                lambda wire: wire.send(1, kind, b"") if rank == 0 else wire.receive(0, kind)
            ),
            "recycled twice": lambda: after_open(recycle_twice),
            "closed": lambda: after_open(use_closed),
        }
    )
    job.hvd.barrier()  # the rank that ends first shuts Horovod down, and the other hears of that
    return found


def refusal(transport: str, without: str = "") -> str:
    """Return what a rank is told when it opens a transport; ``without`` lacks on one of them."""
    job = Job()
    if without and job.rank == LATE:
        sys.modules[without] = None  # type: ignore[assignment]
    channel = Channel(job.rank ^ 1, Kind.ACTIVATION, job.rank % 2 == 0, 64)
    return told(lambda: job.open([channel], transport))


def truncated() -> str:
    """Send more than the plan says, past the check of the sender."""
    job = Job()
    wire: Any = job.open([Channel(1 - job.rank, Kind.GRADIENT, job.rank == 0, 64)], "mpi")
    said = "sent"
    if job.rank == 0:
        wire._comm.Send(bytes(100), 1, int(Kind.GRADIENT))
    else:
        wire.expect(0, Kind.GRADIENT, 1)
        said = told(lambda: wire.receive(0, Kind.GRADIENT))
        assert said == told(wire.flush)
    job.meet()  # a rank that left would shut Horovod, and the transport, down under the other
    return said


def finalised() -> tuple[int, str]:
    """Horovod ends MPI while a message waits: its length, and what the next receive says."""
    job = Job()
    wire: Any = job.open([Channel(1 - job.rank, Kind.GRADIENT, job.rank == 0, 64)], "mpi")
    size, said = 0, ""
    if job.rank == 0:
        wire.send(1, Kind.GRADIENT, bytes(8))
        wire.flush()
        job.meet()
    else:
        wire.expect(0, Kind.GRADIENT, 1 << 20)
        while not wire._incoming[0, Kind.GRADIENT].arrived:
            time.sleep(0.01)
        job.meet()
        wire._finalize()  # from now on a call of MPI would end the process
        wire._comm = None
        size = len(wire.receive(0, Kind.GRADIENT))
        said = told(lambda: wire.receive(0, Kind.GRADIENT))
        assert said == told(wire.flush)
    return size, said


def idle() -> tuple[int, int]:
    """Return how often the thread looks while nothing is on its way, and while something is."""
    job = Job()
    wire: Any = job.open([Channel(1 - job.rank, Kind.GRADIENT, job.rank == 0, 64)], "mpi")
    used = []
    looks = 0
    look = wire._look

    def counted() -> bool:
        nonlocal looks
        looks += 1
        return bool(look())

    def in_a_while(enough: Callable[[int], bool], limit_s: float) -> int:
        """Return how often it looks in 0.3 s: again until that is enough, or time is over."""
        deadline = time.monotonic() + limit_s
        while True:
            before = looks
            time.sleep(0.3)
            looked = looks - before
            if enough(looked) or time.monotonic() > deadline:
                return looked

    wire._look = counted
    for _ in range(2):
        if job.rank == 0:
            wire.send(1, Kind.GRADIENT, bytes(64))
            wire.flush()
        else:
            wire.expect(0, Kind.GRADIENT, 1)
            wire.receive(0, Kind.GRADIENT)
        job.meet()
        in_a_while(lambda looked: looked == 0, limit_s=3.0)
        used.append(in_a_while(lambda _: True, limit_s=0.0))  # and it stays asleep
    if job.rank == 1:
        wire.expect(0, Kind.GRADIENT, 1)
    busy = in_a_while(lambda looked: looked > 10, limit_s=20.0) if job.rank == 1 else 0
    job.meet()
    if job.rank == 0:
        wire.send(1, Kind.GRADIENT, bytes(64))
        wire.flush()
    else:
        wire.receive(0, Kind.GRADIENT)
    wire.close()
    return sum(used), busy


def main(folder: Path, transport: str, wrong: str = "") -> None:
    """Pass messages along a chain and back until something happens."""
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    framework, _, name = transport.rpartition(":")
    if wrong:
        end_late_over_gloo()
    job = Job(framework or "torch")
    if framework == "tensorflow":  # begins to watch when it makes an optimizer
        watchdog.start(importlib.import_module("hvd_pipe.tensorflow.workers").JOB)
    rank, last = job.rank, job.hvd.size() - 1
    forth, back = Kind.ACTIVATION, Kind.GRADIENT
    channels = []
    if rank < last:
        channels += [Channel(rank + 1, forth, True, 4096), Channel(rank + 1, back, False, 4096)]
    if rank > 0:
        channels += [Channel(rank - 1, forth, False, 4096), Channel(rank - 1, back, True, 4096)]
    wire = job.open(channels, name)
    for channel in channels:
        if not channel.outgoing:
            wire.expect(channel.peer, channel.kind, 1 << 40)
    publish(folder / f"pid.{rank}", str(os.getpid()))
    step = 0
    while True:
        if rank > 0:
            wire.recycle(wire.receive(rank - 1, forth))
        if rank < last:
            wire.send(rank + 1, forth, bytearray(4096))
            wire.recycle(wire.receive(rank + 1, back))
        if rank > 0:
            wire.send(rank - 1, back, bytearray(4096))
        publish(folder / f"step.{rank}", str(step))
        if step == SOON and rank == LATE and wrong == "raise":
            raise ValueError("bad sample 17")
        step += 1
        time.sleep(0.002)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
