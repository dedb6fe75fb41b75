"""Counts the functions of hvd_pipe that a piece of work passes through, by a profiler."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import hvd_pipe

ROOT = str(Path(hvd_pipe.__file__).parent)


class Hop(NamedTuple):
    """A function, by its file below hvd_pipe, and the thread that called it first."""

    function: str
    file: str
    thread: str


@contextmanager
def hops_between(border: CodeType, first: int, last: int) -> Iterator[list[Hop]]:
    """Note the functions that are called from one call of a function until a later one of it.

    Threads count that are started within the context. Comprehensions and generator expressions
    are parts of the functions that they stand in.
    """
    found: dict[CodeType, Hop] = {}
    calls = -1

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(ROOT):
            return
        calls += code is border
        if first <= calls < last and code.co_name[0] != "<" and code not in found:
            thread = threading.current_thread().name
            file = code.co_filename.removeprefix(ROOT + "/")
            found[code] = Hop(code.co_qualname, file, thread)

    hops: list[Hop] = []
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield hops
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        hops += found.values()
