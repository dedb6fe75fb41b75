"""Broadcasts of torch's Horovod, as :mod:`hvd_pipe.pipeline.process_sets` starts them."""

from __future__ import annotations

import time

import torch
from horovod.torch.mpi_ops import ProcessSet, broadcast_async_, poll, synchronize

from hvd_pipe.pipeline.wire import Bytes

__all__ = ["Broadcast", "start"]

PAUSE = 0.1  # of the wait so far
LEAST_PAUSE_S, MOST_PAUSE_S = 2e-5, 5e-4


class Broadcast:
    """One that is on its way."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def wait(self) -> None:
        """Block until it is done; Horovod's own wait would take a core."""
        begun = time.monotonic()
        while not poll(self._handle):
            time.sleep(min(max(PAUSE * (time.monotonic() - begun), LEAST_PAUSE_S), MOST_PAUSE_S))
        synchronize(self._handle)


def start(buffer: Bytes, root_rank: int, name: str, process_set: ProcessSet) -> Broadcast:
    """Start a broadcast in place and return at once.

    Args:
        buffer: What the root sends, or room for it.
        root_rank: Its number in the job.
        name: The same on both ranks.
        process_set: They.
    """
    tensor = torch.from_numpy(buffer)
    return Broadcast(broadcast_async_(tensor, root_rank, name=name, process_set=process_set))
