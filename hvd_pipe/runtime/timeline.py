"""Record what this process does and when, whatever its framework.

``HVD_PIPE_TIMELINE=dir`` asks for it; each rank writes ``dir/rank{N}.json``, in the form that
`hvd_pipe.timeline` reads. Where the variable is not set, a recorder that notes nothing stands in.

A file is an array of events, one a line, which is closed when the process ends. Viewers and
`hvd_pipe.timeline` also read the file of a job that runs or was killed, whose array has no end.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from horovod.common.process_sets import ProcessSet

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.runtime.consensus import Description, members
from hvd_pipe.timeline import CLOCK, MARK

DIRECTORY = "HVD_PIPE_TIMELINE"
MEGABYTES = "HVD_PIPE_TIMELINE_MB"
DEFAULT_MEGABYTES = "64"

COMPUTE, CODEC, SENDS, NETWORK = 0, 2, 3, 4
_LANES = {COMPUTE: "compute", CODEC: "codec", SENDS: "network 0"}

_FLUSH_EVENTS = 512  # at most so many wait in memory
_MARKER_BYTES = 512
_CLOCK_ROUNDS = 12
_POLL_S = 2e-4
_POLL_SHARE = 0.02  # of a message's age: old ones are asked for less often

_log = logging.getLogger("hvd_pipe")


@dataclass(eq=False)
class PendingOperation:
    """A message on its way; ``slot`` is the lowest that no other pending message has."""

    message: str
    nbytes: int
    start: float
    recorder: Recorder | None = None
    slot: int = 0
    end_s: float | None = None

    def complete(self) -> None:
        """Note that the message has arrived, unless that is known."""
        if self.recorder is not None:
            self.recorder.completed(self)


NOT_SHOWN = PendingOperation("", 0, 0.0)
"""Stands for a message that no timeline shows."""


class Recorder:
    """Writes what this process does, by the host's clock, to its one file; or, without, nothing.

    Where nobody hears of an arrival without asking, a thread asks: every 0.2 ms for a new message,
    every fiftieth of its age for an old one.
    """

    def __init__(self, path: Path | None = None, max_bytes: int = 0, worker: int = 0) -> None:
        self.is_on = path is not None
        self.worker = worker
        self.is_told = False
        self.steps = 0
        self._file = None if path is None else TraceFile(path, max_bytes, self._marker)
        self._zero: float | None = None
        self._lanes: set[int] = set()
        self._texts: dict[str, tuple[str, str]] = {}
        self._changed = threading.Condition()
        self._used: list[bool] = []
        self._asked: list[tuple[PendingOperation, int]] = []
        self._thread: threading.Thread | None = None
        self._halting = False

    def set_clock(self, clock: Clock) -> None:
        """Take the first clock that is agreed on; later ones are of other optimizers."""
        if self._zero is not None:
            return
        self._zero = clock.zero
        self._metadata("process_name", 0, name=f"worker {self.worker}")
        self._metadata("process_sort_index", 0, sort_index=self.worker)
        about = {"zero_unix_ns": clock.zero_unix_ns, "clock_error_s": clock.error_s}
        self._metadata(CLOCK, 0, **about)

    def now(self) -> float:
        """Return the host's seconds since zero."""
        return time.perf_counter() - (self._zero or 0.0)

    def ready(self, message: str) -> None:
        """Note that what a message carries is complete."""
        self.span("ready", message, self.now(), None)

    def waited(self, begun: float, message: str) -> None:
        """Note that the host was blocked from ``begun`` until now."""
        if not self.is_told:
            self.span("wait", message, begun, self.now())

    def begin_backward(self) -> None:
        """Note that gradients are computed from here on."""

    def gradient(self) -> None:
        """Note that a gradient is complete."""

    def end_backward(self) -> None:
        """Note that the last gradient was the last one of the pass."""

    def update(self, begun: float) -> None:
        """Note that the user's optimizer has moved the weights, from ``begun`` until now."""
        if not self.is_told:
            self.span("update", "update", begun, self.now())

    def codec(self, begun: float, message: str) -> None:
        """Note that a message was worked on, from ``begun`` until now."""
        self.span("codec", message, begun, self.now(), CODEC)

    def end_step(self) -> None:
        """Close a step that an optimizer has made, and bring it to the disk."""
        if self.is_on and not self.is_told:
            self.next_step()

    def next_step(self) -> None:
        """Close a step."""
        self.steps += 1
        self.flush()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Record passes, waits and updates by `record_external` only, not by a replica's hooks."""
        self.is_told = self.is_on
        try:
            yield
        finally:
            self.is_told = False
            self.flush()

    def record_external(self, category: str, name: str, start: float) -> None:
        """Record what a pipeline has done from ``start``, by ``time.perf_counter``, until now."""
        lane = SENDS if category == "send" else COMPUTE
        self.span(category, name, start - (self._zero or 0.0), self.now(), lane)
        if category == "update":
            self.next_step()

    # Messages.

    def launched(
        self, message: str, nbytes: int, handle: int | None = None, *, begun: float | None = None
    ) -> PendingOperation:
        """Note that a message leaves, or was given to Horovod at the moment ``begun``.

        It ends when it is completed or, where it has a handle, when Horovod says so.
        """
        if not self.is_on:
            return NOT_SHOWN
        start = self.now() if begun is None else begun
        with self._changed:
            slot = self._used.index(False) if False in self._used else len(self._used)
            self._used[slot : slot + 1] = [True]
            operation = PendingOperation(message, nbytes, start, self, slot)
            if handle is not None:
                self._asked.append((operation, handle))
                if self._thread is None:
                    name = "hvd_pipe timeline"
                    self._thread = threading.Thread(target=self._ask, name=name, daemon=True)
                    self._thread.start()
                self._changed.notify()
        return operation

    def completed(self, operation: PendingOperation) -> None:
        """Write a message that has arrived, unless that was known."""
        with self._changed:
            if operation.end_s is not None:
                return
            operation.end_s = self.now()
            self._used[operation.slot] = False
        lane, size = NETWORK + operation.slot, f',"bytes":{operation.nbytes}'
        self.span("allreduce", operation.message, operation.start, operation.end_s, lane, size)

    def halt(self) -> None:
        """End the thread: it must not be inside Horovod when that ends."""
        if self._thread is None:
            return
        with self._changed:
            self._halting = True
            self._changed.notify()
        self._thread.join()
        self._thread, self._halting, self._asked = None, False, []

    def _poll(self, handle: int) -> bool:
        """Return whether the message of a handle has arrived, in a framework with handles."""
        return False

    def _ask(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._halting)
                if self._halting:
                    return
                asked = list(self._asked)
            pending = [entry for entry in asked if not self._is_over(*entry)]
            with self._changed:
                self._asked[: len(asked)] = pending
                if self._asked and not self._halting:
                    age = self.now() - max(operation.start for operation, _ in self._asked)
                    self._changed.wait(max(_POLL_S, _POLL_SHARE * age))

    def _is_over(self, operation: PendingOperation, handle: int) -> bool:
        if operation.end_s is not None:
            return True
        try:
            if not self._poll(handle):
                return False
        except Exception:
            return True  # somebody has waited for it already, and completes it
        operation.complete()
        return True

    # The file.

    def flush(self) -> None:
        """Bring all to the disk."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Write what waits and close the file."""
        if self._file is not None:
            self._file.close()

    def span(
        self,
        category: str,
        name: str,
        start: float,
        end: float | None,
        lane: int = COMPUTE,
        more: str = "",
    ) -> None:
        """Write an event of this step; one without an end is an instant."""
        if self._file is None or self._file.full:
            return
        if lane not in self._lanes:
            self._lanes.add(lane)
            thread = _LANES.get(lane) or f"network {lane - NETWORK + 1}".removesuffix(" 1")
            self._metadata("thread_name", lane, name=thread)
            self._metadata("thread_sort_index", lane, sort_index=lane)
        if name not in self._texts:
            short = re.sub(r"^hvd_pipe\.(tf\.\d+\.)?\d+\.\d+\.", "", name)
            whole = "" if short == name else f',"message":{json.dumps(name)}'
            self._texts[name] = json.dumps(short), whole
        short, whole = self._texts[name]
        kind = '"i","s":"t"' if end is None else f'"X","dur":{max(end - start, 0.0) * 1e6:.3f}'
        self._file.add(
            f'{{"name":{short},"cat":"{category}","ph":{kind},"pid":{self.worker},"tid":{lane},'
            f'"ts":{start * 1e6:.3f},"args":{{"step":{self.steps}{whole}{more}}}}}'
        )

    def _metadata(self, kind: str, lane: int, **args: object) -> None:
        event = {"name": kind, "ph": "M", "pid": self.worker, "tid": lane, "args": args}
        if self._file is not None:
            self._file.add(json.dumps(event))

    def _marker(self) -> str:
        name = f"the trace ends here: raise {MEGABYTES}"
        return (
            f'{{"name":"{name}","cat":"{MARK}","ph":"i","s":"p","pid":{self.worker},'
            f'"tid":{COMPUTE},"ts":{self.now() * 1e6:.3f}}}'
        )


class TraceFile:
    """Writes events, given as JSON text, to a Chrome trace: an array with one event a line.

    A full file drops events: a marker in it and one line in the log of ``hvd_pipe`` say so. A
    write that fails ends the file in the same way, and not the job. Any thread may add events.
    """

    def __init__(self, path: Path, max_bytes: int, marker: Callable[[], str]) -> None:
        self.path = path
        self.full = False
        self._max_bytes, self._room = max_bytes, max_bytes - _MARKER_BYTES
        self._marker = marker
        # Re-entrant: a signal's handler may add an event while its own thread is adding one.
        self._lock = threading.RLock()
        self._writing = False
        self._waiting: list[str] = []
        self._pid = os.getpid()
        self._file: BinaryIO | None = self.path.open("wb", buffering=0)
        self._before = "[\n"
        atexit.register(self.close)

    def add(self, event: str) -> None:
        """Take one event, a JSON object as text; it is on disk after the next `flush`."""
        if self.full:
            return
        with self._lock:
            self._waiting.append(event)
            if len(self._waiting) >= _FLUSH_EVENTS:
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
                if not self.full:
                    self._append(waiting)
            finally:
                self._writing = False

    def close(self) -> None:
        """Write what waits and close the array; the file takes no more events."""
        with self._lock:
            self.flush()
            self.full = True
            if self._file is not None:
                if os.getpid() == self._pid and self._before == ",\n":
                    self._write("\n]\n")
                self._file.close()
                self._file = None
        atexit.unregister(self.close)

    def _append(self, events: list[str]) -> None:
        sizes = [len(event.encode()) + len(",\n") for event in events]
        while sum(sizes) > self._room:
            self.full = True
            sizes.pop()
        if self.full:
            _log.warning("%s is full (%d bytes): raise %s", self.path, self._max_bytes, MEGABYTES)
            events = [*events[: len(sizes)], self._marker()]
        self._room -= sum(sizes)
        self._write(self._before + ",\n".join(events) + "\n]\n" * self.full)
        self._before = "" if self.full else ",\n"

    def _write(self, text: str) -> None:
        data = text.encode()
        try:
            while data and self._file is not None:  # one turn, unless a disk is full
                data = data[self._file.write(data) :]
        except OSError as error:  # a full disk must not end the job
            self.full = True
            _log.warning("%s ends here: %s", self.path, error)


OFF = Recorder()
"""Notes nothing."""


def open_recorder(
    active: Recorder, make: Callable[[Path, int, int], Recorder], rank: int, size: int
) -> tuple[Recorder, Description]:
    """Open this rank's file, if that is asked for, and return what all ranks must have alike."""
    alike = [(DIRECTORY, "set")]
    name = os.environ.get(DIRECTORY)
    if active.is_on or not name:
        return active, alike if active.is_on else []
    text = os.environ.get(MEGABYTES, DEFAULT_MEGABYTES)
    try:
        limit = round(float(text) * 1e6)
        if limit < 1e4:
            raise ValueError
    except (ValueError, OverflowError):
        raise ValueError(
            f"{MEGABYTES} must be a number of megabytes of at least 0.01, got {text!r}"
        ) from None
    directory = Path(name)
    path = directory / f"rank{rank}.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for older in directory.glob("rank*.json"):  # of a run on more ranks
            number = older.stem.removeprefix("rank")
            if number.isdecimal() and int(number) >= size:
                older.unlink(missing_ok=True)  # every rank does this: hosts may not share a disk
        return make(path, limit, rank), alike
    except OSError as error:
        raise HvdPipeError(
            f"{DIRECTORY}={directory}: {path} cannot be written ({error.strerror}): name a "
            f"directory that this user can write on every host, or unset {DIRECTORY}."
        ) from error


class Clock(NamedTuple):
    """Zero by this process's ``perf_counter``, in Unix time, and how far off that may be."""

    zero: float
    zero_unix_ns: int
    error_s: float | None
    """None where it was compared with no other rank's."""


def agree_on_clock(
    meet: Callable[[], object],
    gather: Callable[[Any, str, ProcessSet], list[Any]],
    name: str,
    process_set: ProcessSet,
) -> Clock:
    """Return the zero of the process set's first rank.

    On one host all processes read the same clock. Between hosts, some all-reduces (``meet``) bound
    the difference of two clocks. While that leaves room for synchronised clocks (NTP, PTP), the
    clocks are believed; else they are put right by the middle of the bounds.
    """
    entered, left = [], []
    for _ in range(_CLOCK_ROUNDS if len(members(process_set)) > 1 else 0):
        entered.append(time.time_ns())
        meet()
        left.append(time.time_ns())
    here = [_host(), time.time_ns(), entered, left]
    host, zero_unix_ns, first_entered, first_left = gather(here, f"{name}.gather", process_set)[0]
    offset_ns, error_ns = 0, 0
    if host != here[0]:
        offset_ns, error_ns = bound_offset(entered, left, first_entered, first_left)
    wall_ns, seconds = _both_clocks()
    zero = seconds - (wall_ns - offset_ns - zero_unix_ns) / 1e9
    return Clock(zero, zero_unix_ns, error_ns / 1e9)


def own_clock() -> Clock:
    """Return a zero of this rank alone: now, by its host's clock."""
    wall_ns, seconds = _both_clocks()
    return Clock(seconds, wall_ns, None)


def bound_offset(
    entered: Sequence[int], left: Sequence[int], others: Sequence[int], others_left: Sequence[int]
) -> tuple[int, int]:
    """Return by how many ns this clock is ahead of another, and how far off that can be.

    No rank leaves an all-reduce before all have entered it. ``entered`` and ``left`` are when this
    rank did so, by its clock; the others are another rank's, by its own.

    Example:
        >>> bound_offset([100, 200], [130, 240], [110, 190], [140, 230])  # may well be equal
        (0, 30)
        >>> bound_offset([1100, 1200], [1130, 1240], [110, 190], [140, 230])  # cannot be
        (995, 25)
    """
    low = max(a - b for a, b in zip(entered, others_left, strict=True))
    high = min(a - b for a, b in zip(left, others, strict=True))
    if low <= 0 <= high:
        return 0, max(high, -low)
    return (low + high) // 2, abs(high - low) // 2


def _host() -> str:
    """Return what tells this host from others, also where containers bear one name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return socket.gethostname()


def _both_clocks() -> tuple[int, float]:
    """Return Unix time in ns and ``perf_counter``, read at one moment as nearly as can be."""
    readings = []
    for _ in range(5):  # the thread may lose its core between the two
        before = time.perf_counter()
        wall_ns = time.time_ns()
        after = time.perf_counter()
        readings.append((after - before, wall_ns, (before + after) / 2))
    return min(readings)[1:]
