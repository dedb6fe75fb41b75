"""What the threads of this process wait for, when that is another rank: a registry.

Whoever waits says so, around the call that does::

    with waiting_for("gradients of bucket 3"):
        done.wait()

A rank ends itself for a lost one only while it waits, so a wait that is not registered lets a job
hang, and a computation that is registered may be ended. It costs a microsecond.
"""

from __future__ import annotations

import itertools
import threading
import time
from types import TracebackType
from typing import NamedTuple

__all__ = ["Wait", "of_thread", "sleep_between_polls", "waiting_for"]


class Wait(NamedTuple):
    """One wait of one thread.

    Args:
        message: What for; no two waits have equal ones.
        joined: Whether other ranks get on meanwhile, as they do during ``hvd.join()``.
    """

    message: tuple[object, ...]
    joined: bool = False


_numbers = itertools.count()
_waits: dict[int, list[Wait]] = {}  # by thread; each changes its own entry alone


class waiting_for:  # noqa: N801 - reads as what it is: `with waiting_for(...)`
    """Register that this thread waits for other ranks.

    Args:
        what: The message, say.
        joined: Whether other ranks get on meanwhile.

    Example:
        >>> with waiting_for("an all-reduce"):
        ...     of_thread(threading.get_ident()).message[0]
        'an all-reduce'
        >>> of_thread(threading.get_ident()) is None
        True
    """

    __slots__ = ("_wait",)

    def __init__(self, what: str, joined: bool = False) -> None:
        self._wait = Wait((what, next(_numbers)), joined)

    def __enter__(self) -> None:
        _waits.setdefault(threading.get_ident(), []).append(self._wait)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        thread = threading.get_ident()
        stack = _waits[thread]
        stack.remove(self._wait)
        if not stack:
            del _waits[thread]


def of_thread(thread: int) -> Wait | None:
    """Return what a thread waits for: the innermost wait, within all that are around it."""
    stack = list(_waits.get(thread, ()))
    if not stack:
        return None
    return Wait(stack[-1].message, any(wait.joined for wait in stack))


def sleep_between_polls(begun: float) -> None:
    """Leave the processor to others for a tenth of the wait so far, 20 us to 0.5 ms.

    Args:
        begun: ``time.monotonic()`` when the wait began.
    """
    time.sleep(min(max(0.1 * (time.monotonic() - begun), 2e-5), 5e-4))
