"""CUDA streams beside Horovod's: what may read a reduced buffer, and when the host must wait.

Horovod reduces in a stream of its own, and says when a message is done::

    HOROVOD_ENABLE_ASYNC_COMPLETION=0, NCCL   its content is there: any stream may read it
    =1, or a message staged in the host       its thread's stream, the default one, waits for it

`follow_horovod` makes the second case like the first for the stream that computes. `host_values`
reads a few elements by a stream of its own: in the first case the host waits for no kernel that it
has launched, so Pipe-SGD's next backward pass may be in the queue already.
"""

from __future__ import annotations

import functools
import os

import torch
from horovod.torch import mpi_ops

__all__ = ["done_is_done", "follow_horovod", "host_values", "side_stream"]


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of a device in which hvd_pipe does its own work."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@functools.cache
def _reading_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def done_is_done() -> bool:
    """Whether what Horovod reports as done is there for every stream."""
    later = os.environ.get("HOROVOD_ENABLE_ASYNC_COMPLETION", "0") != "0"
    return bool(mpi_ops.nccl_built()) and not later


def follow_horovod(tensor: torch.Tensor) -> None:
    """Let this thread's stream wait until a tensor of a message that is done has its content."""
    if tensor.is_cuda and not done_is_done():
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_stream(torch.cuda.default_stream(tensor.device))


def host_values(tensor: torch.Tensor, settled: bool) -> list[float]:
    """Return the elements; the host waits for them, and for nothing that does not write them.

    Args:
        tensor: Part of a message's buffer.
        settled: Whether Horovod alone has written it: then no kernel of this stream has to run.
    """
    if not tensor.is_cuda:
        return [float(value) for value in tensor.tolist()]
    stream = _reading_stream(tensor.device)
    if not (settled and done_is_done()):
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        return [float(value) for value in tensor.tolist()]
