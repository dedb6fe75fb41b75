"""A Chrome trace that grows while a job runs: bounded, and valid JSON whenever the job ends.

    {"displayTimeUnit":"ms", ... "traceEvents":[     written once
    {event},
    {event}                                          a flush writes from the end of this line on:
    ]}                                               a comma, new events, and these brackets anew

A flush is one write, so the file is a whole document before and after it, whatever ends the
process: an exception, SIGINT, SIGKILL. One gap is left: the kernel copies a write page by page
(4 KiB), and a SIGKILL that comes in the microsecond between two pages of one flush cuts it there.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["TraceFile"]

FLUSH_EVENTS = 512
"""So many events wait in memory at most."""

_MARKER_BYTES = 512

_HEAD = '{"displayTimeUnit":"ms","otherData":{"producer":"hvd_pipe"},"traceEvents":[\n'
_TAIL = "\n]}\n"
_BETWEEN = ",\n"

LEAST_BYTES = 4096
"""The least limit: a file must hold its metadata and the marker of its end."""

_log = logging.getLogger("hvd_pipe")


class TraceFile:
    """Writes events, given as JSON text, to a file that is always a whole Chrome trace.

    Events that a full file does not take are dropped: a marker in the file and one line in the
    log of ``hvd_pipe`` say so. A write that fails ends the file in the same way, and not the job.
    Any thread may add events. What waits is written at exit.

    Args:
        path: The file, written anew; its directory must exist.
        max_bytes: The file's limit in bytes, at least 4096.
        marker: Returns the event that ends a full file, as JSON text of at most 512 bytes.
        advice: Ends the line in the log: what raises the limit.

    Raises:
        ValueError: ``max_bytes`` is too small.
        OSError: The file cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        max_bytes: int,
        marker: Callable[[], str] | None = None,
        advice: str = "raise max_bytes",
    ) -> None:
        if max_bytes < LEAST_BYTES:
            raise ValueError(
                f"a trace file needs a limit of at least {LEAST_BYTES} bytes, got {max_bytes}: "
                f"{advice}"
            )
        self.path = Path(path)
        self.full = False
        """Whether the file takes no more events."""
        self._max_bytes, self._marker, self._advice = max_bytes, marker, advice
        # Re-entrant: a signal's handler may add an event while its own thread is adding one.
        self._lock = threading.RLock()
        self._writing = False
        self._waiting: list[str] = []
        self._pid = os.getpid()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._file: int | None = os.open(self.path, flags, 0o644)
        self._end = len(_HEAD)
        """Where the end of the document begins."""
        _write(self._file, _HEAD + _TAIL, 0)
        atexit.register(self.close)

    def add(self, event: str) -> None:
        """Take one event, a JSON object as text; it is on disk after the next `flush`."""
        if self.full:
            return
        with self._lock:
            self._waiting.append(event)
            if len(self._waiting) >= FLUSH_EVENTS:
                self.flush()

    def flush(self) -> None:
        """Write what waits."""
        with self._lock:
            # A forked child has its own copy of what waits; the parent writes it.
            if self._writing or not self._waiting or os.getpid() != self._pid:
                return
            self._writing = True
            try:
                waiting, self._waiting = self._waiting, []
                if self._file is not None and not self.full:
                    self._append(self._file, waiting)
            finally:
                self._writing = False

    def close(self) -> None:
        """Write what waits and close the file; it takes no more events."""
        with self._lock:
            self.flush()
            self.full = True
            if self._file is not None:
                os.close(self._file)
                self._file = None
        atexit.unregister(self.close)

    def _append(self, file: int, events: list[str]) -> None:
        text = self._after_first(_BETWEEN.join(events))
        room = self._max_bytes - self._end - len(_TAIL) - _MARKER_BYTES
        if len(text.encode()) > room:
            text = self._last_text(events, room)
        try:
            _write(file, text + _TAIL, self._end)
        except OSError as error:  # a full disk must not end the job
            self.full = True
            with contextlib.suppress(OSError):
                _write(file, _TAIL, self._end)
                os.ftruncate(file, self._end + len(_TAIL))
            _log.warning("%s ends here: %s", self.path, error)
            return
        self._end += len(text.encode())

    def _last_text(self, events: list[str], room: int) -> str:
        """Return as many events as fit, and the marker."""
        self.full = True
        _log.warning("%s is full (%d bytes): %s", self.path, self._max_bytes, self._advice)
        kept: list[str] = []
        for event in events:
            room -= len(event.encode()) + len(_BETWEEN)
            if room < 0:
                break
            kept.append(event)
        if self._marker is not None:
            kept.append(self._marker())
        return self._after_first(_BETWEEN.join(kept)) if kept else ""

    def _after_first(self, text: str) -> str:
        return text if self._end == len(_HEAD) else _BETWEEN + text


def _write(file: int, text: str, offset: int) -> None:
    data = text.encode()
    while data:  # one turn, unless a disk is full or a signal has come
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written
