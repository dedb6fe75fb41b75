"""Ranks of a pipeline that pass messages along a chain and back until something happens.

``python pipeline_faults.py FOLDER TRANSPORT [WRONG]``; TRANSPORT may be ``tensorflow:mpi``, too.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from publish import end_late_over_gloo, publish

from hvd_pipe.pipeline.build import open_transport
from hvd_pipe.pipeline.transport import Channel, Kind, Transport
from hvd_pipe.runtime.watch import rank_side

DEADLINE_S = 120  # no rank outlives its test
LATE, SOON = 1, 30
SIZE = 4096


class Wires:
    """A framework's Horovod, initialised, and its transports."""

    def __init__(self, framework: str) -> None:
        self.hvd = importlib.import_module(f"hvd_pipe.{framework}")
        self.framework = importlib.import_module(f"hvd_pipe.{framework}.pipedream.build").FRAMEWORK
        self.hvd.init()
        self.rank: int = self.hvd.rank()

    def open(self, channels: Sequence[Channel], transport: str) -> Transport:
        """Connect the ranks; all of them call this."""
        return open_transport(channels, transport, self.framework)

    def meet(self, value: object = None) -> list[Any]:
        """Return the values of all ranks."""
        return self.framework.agreement.gather(value, "test.meet", self.hvd.global_process_set)


@functools.cache
def wires(framework: str = "torch") -> Wires:
    """Return what opens transports, with Horovod initialised."""
    return Wires(framework)


def main(folder: Path, transport: str, wrong: str = "") -> None:
    """Pass messages along the chain until something happens."""
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    framework, _, name = transport.rpartition(":")
    if wrong:
        end_late_over_gloo()
    ours = wires(framework or "torch")
    if framework == "tensorflow":  # begins to watch when it makes an optimizer
        rank_side.start(importlib.import_module("hvd_pipe.tensorflow.workers").JOB)
    rank, last = ours.rank, ours.hvd.size() - 1
    forth, back = Kind.ACTIVATION, Kind.GRADIENT
    channels = []
    if rank < last:
        channels += [Channel(rank + 1, forth, True, SIZE), Channel(rank + 1, back, False, SIZE)]
    if rank > 0:
        channels += [Channel(rank - 1, forth, False, SIZE), Channel(rank - 1, back, True, SIZE)]
    wire = ours.open(channels, name)
    for channel in channels:
        if not channel.outgoing:
            wire.expect(channel.peer, channel.kind, 1 << 40)
    publish(folder / f"pid.{rank}", str(os.getpid()))
    step = 0
    while True:
        if rank > 0:
            wire.recycle(wire.receive(rank - 1, forth))
        if rank < last:
            wire.send(rank + 1, forth, bytearray(SIZE))
            wire.recycle(wire.receive(rank + 1, back))
        if rank > 0:
            wire.send(rank - 1, back, bytearray(SIZE))
        publish(folder / f"step.{rank}", str(step))
        if step == SOON and rank == LATE and wrong == "raise":
            raise ValueError("bad sample 17")
        step += 1
        time.sleep(0.002)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
