"""Pending operations: what this rank has sent and not yet waited for.

A rank must not leave while others need what it has sent: one that exits after its last Pipe-SGD or
CoCoD step shuts Horovod down under a slower one, which is about to send the same message.
Module-wide, because the optimizer that sent a message may be gone when the script ends.

On CUDA, Horovod reduces in a stream of its own, and says when a message is done::

    HOROVOD_ENABLE_ASYNC_COMPLETION=0, NCCL   its content is there: any stream may read it
    =1, or a message staged in the host       its thread's stream, the default one, waits for it

`follow_horovod` makes the second case like the first for the stream that computes. `host_values`
reads a few elements by a stream of its own: in the first case the host waits for no kernel that it
has launched, so Pipe-SGD's next backward pass may be in the queue already.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import poll
from horovod.torch.mpi_ops import synchronize as _synchronize

from hvd_pipe.errors import HvdPipeError, is_failing
from hvd_pipe.runtime.consensus import shutdown_is_told
from hvd_pipe.runtime.restarts import is_elastic
from hvd_pipe.runtime.watch.waits import sleep_between_polls, waiting_for

PATIENCE_S = 30.0

_handles: set[int] = set()


class Operation(Protocol):
    """What is not over before it has arrived."""

    @property
    def arrived(self) -> bool:
        """Whether it is over."""


operations: set[Operation] = set()
"""What was not waited for, beside Horovod's own messages."""
_endings: list[Callable[[], None]] = []


def sent(handle: int) -> int:
    """Remember a handle until it is waited for."""
    _handles.add(handle)
    return handle


# Architecture: G9
def wait(handle: int) -> Any:
    """Block until the message has arrived and return it."""
    _handles.discard(handle)
    try:
        with waiting_for(f"message {handle}"):
            _sleep_until_arrived(handle)
            return _synchronize(handle)
    except HorovodInternalError as error:
        mismatch = error if _MISMATCH in str(error) else _unraised_mismatch()
        forget()
        if mismatch is None:
            raise
        raise HvdPipeError(_APART.format(mismatch)) from mismatch


def has_arrived(handle: int) -> bool:
    """Return whether `wait` would return, or raise, at once."""
    try:
        return bool(poll(handle))
    except Exception:
        return True  # Horovod does not know the handle any more; `wait` says so


@contextmanager
def explaining() -> Iterator[None]:
    """Raise why a message cannot be sent, where ranks have gone apart."""
    try:
        yield
    except (HorovodInternalError, ValueError):
        mismatch = _unraised_mismatch()
        if mismatch is not None:
            raise HvdPipeError(_APART.format(mismatch)) from mismatch
        with shutdown_is_told():
            raise


def _unraised_mismatch() -> HorovodInternalError | None:
    """Return Horovod's error for ranks that have gone apart, if it has not been raised yet."""
    for handle in () if is_elastic() else tuple(_handles):
        if poll(handle):
            _handles.discard(handle)
            try:
                _synchronize(handle)
            except HorovodInternalError as error:
                if _MISMATCH in str(error):
                    return error
    return None


_MISMATCH = "ismatched"  # in Horovod's words
APART = (
    "ranks have sent different things at the same step: on one of them alone synchronize() was "
    "called, parameters have joined (add_param_group, requires_grad), a state was loaded, or all "
    "gradients were set to zero in place. Do the same on every rank."
)
_APART = f"{APART} Horovod says: {{}}"


def _sleep_until_arrived(handle: int) -> None:
    """Sleep a tenth of the wait so far, again and again: Horovod's own wait takes a core."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    begun = time.monotonic()
    while handle in mpi_ops._handle_map and not poll(handle):
        sleep_between_polls(begun)


def known() -> tuple[int, ...]:
    """Return the handles of all messages that were not waited for, also users' own."""
    return tuple(mpi_ops._handle_map)


def forget() -> None:
    """Forget all that was sent: after a failure it may never arrive."""
    _handles.clear()
    operations.clear()


def before_shutdown(end: Callable[[], None]) -> None:
    """Have `settle` call ``end`` when nothing more can arrive, also after an exception."""
    _endings.append(end)


def complete_all(limit_s: float = float("inf")) -> None:
    """Block until all that was sent has been reduced, or the time is over."""
    end = time.monotonic() + limit_s
    with waiting_for("all that was sent"):
        while (_handles or operations) and time.monotonic() < end:
            # Another thread, in `wait`, may take from these sets meanwhile, or clear them.
            _handles.difference_update([handle for handle in tuple(_handles) if poll(handle)])
            operations.difference_update([one for one in tuple(operations) if one.arrived])
            time.sleep(0.001)


def settle() -> bool:
    """Before Horovod shuts down, let others send what this rank has sent; not after a failure."""
    if (_handles or operations) and not is_failing():
        if not is_elastic():  # there, workers that change are no end
            warnings.warn(
                "training ended with averages in flight: call optimizer.synchronize() after the "
                "last step, or Pipe-SGD loses its last gradient and CoCoD leaves unequal "
                "replicas.",
                stacklevel=2,
            )
        complete_all(PATIENCE_S)
    whole = not (_handles or operations)
    forget()
    for end in _endings:
        end()
    return whole


@functools.cache
def side_stream(device: torch.device, reads: bool = False) -> torch.cuda.Stream:
    """Return the one stream of a device in which hvd_pipe does its own work, or reads."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def done_on_all_streams() -> bool:
    """Return whether every stream may read what Horovod reports as done."""
    later = os.environ.get("HOROVOD_ENABLE_ASYNC_COMPLETION", "0") != "0"
    return bool(mpi_ops.nccl_built()) and not later


def follow_horovod(tensor: torch.Tensor) -> None:
    """Let this thread's stream wait until a tensor of a message that is done has its content."""
    if tensor.is_cuda and not done_on_all_streams():
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_stream(torch.cuda.default_stream(tensor.device))


def host_values(tensor: torch.Tensor, settled: bool) -> list[float]:
    """Return the elements; the host waits for them, and for nothing that does not write them."""
    if not tensor.is_cuda:
        return [float(value) for value in tensor.tolist()]
    stream = side_stream(tensor.device, reads=True)
    if not (settled and done_on_all_streams()):
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        return [float(value) for value in tensor.tolist()]
