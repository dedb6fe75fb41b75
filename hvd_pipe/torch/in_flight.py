"""What this rank has sent and not yet waited for: it must not leave while others need it.

Without this, a rank that takes its last Pipe-SGD or CoCoD step and exits shuts Horovod down under
a slower rank that is about to send the same message:

    rank 0   ... send g_t, end of script, Horovod shuts down
    rank 1   ............................................... send g_t -> HorovodInternalError

Module-wide, because the optimizer that sent a message may be gone when the script ends.
"""

from __future__ import annotations

import sys
import time
import warnings

from horovod.torch.mpi_ops import poll
from horovod.torch.mpi_ops import synchronize as _synchronize

__all__ = ["arrive", "sent", "settle", "wait"]

PATIENCE_S = 30.0

_handles: set[int] = set()


def sent(handle: int) -> int:
    """Remember a handle until it is waited for."""
    _handles.add(handle)
    return handle


def wait(handle: int) -> None:
    """Block until the message has been reduced."""
    _handles.discard(handle)
    _synchronize(handle)


def arrive(limit_s: float = float("inf")) -> None:
    """Block until all that was sent has been reduced, or the time is over."""
    end = time.monotonic() + limit_s
    while _handles and time.monotonic() < end:
        _handles.difference_update([handle for handle in _handles if poll(handle)])
        time.sleep(0.001)


def settle() -> None:
    """Before Horovod shuts down, give the other ranks time to send what this one has sent.

    Not after an exception: the others then wait for this rank, which must go.
    """
    if not _handles or _failing():
        return
    warnings.warn(
        "training ended with averages in flight: call optimizer.synchronize() after the last "
        "step, or Pipe-SGD loses its last gradient and CoCoD leaves unequal replicas.",
        stacklevel=2,
    )
    arrive(PATIENCE_S)
    _handles.clear()


def _failing() -> bool:
    return getattr(sys, "last_value", None) is not None or sys.exc_info()[0] is not None
