"""Record what this process does and when, whatever its framework.

``HVD_PIPE_TIMELINE=dir`` asks for it; each rank writes ``dir/rank{N}.json``, in the form that
`hvd_pipe.timeline` reads. Where the variable is not set, a recorder that notes nothing stands in.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from horovod.common.process_sets import ProcessSet

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.runtime.consensus import Description
from hvd_pipe.timeline import CLOCK, MARK, PASSES, metadata

DIRECTORY = "HVD_PIPE_TIMELINE"
MEGABYTES = "HVD_PIPE_TIMELINE_MB"
DEFAULT_MEGABYTES = "64"

COMPUTE, CODEC, SENDS, NETWORK = 0, 2, 3, 4
_LANES = {COMPUTE: "compute", CODEC: "codec", SENDS: "network 0"}

_MARKER_BYTES = 512
_CLOCK_ROUNDS = 12
_POLL_S = 2e-4
_POLL_SHARE = 0.02  # of a message's age: old ones are asked for less often

_log = logging.getLogger("hvd_pipe")


@dataclass(eq=False)
class PendingOperation:
    """A message on its way; ``slot`` is the lowest that no other pending message has."""

    recorder: Recorder
    message: str
    nbytes: int
    start: float
    slot: int
    arrived: Callable[[], bool] | None = None

    def complete(self) -> None:
        """Note that the message has arrived, unless that is known."""
        if self.recorder.is_on:
            self.recorder.completed(self)


class Recorder:
    """Writes this process's events to a file, by the host's clock; without a file, nothing.

    Where nobody hears of an arrival without asking, a thread asks: every 0.2 ms for a new message,
    every fiftieth of its age for an old one.
    """

    def __init__(self, path: Path | None = None, max_bytes: int = 0, worker: int = 0) -> None:
        self.is_on = path is not None
        self.worker, self.steps = worker, 0
        self._file = None if path is None else TraceFile(path, max_bytes, self._marker)
        self.in_pipeline = False
        self._zero: float | None = None
        self._lanes: set[int] = set()
        self._backward: float | None = None
        self._last_gradient: float | None = None
        self._changed = threading.Condition()
        self._pending: dict[int, PendingOperation] = {}
        self._thread: threading.Thread | None = None

    def now(self) -> float:
        """Return the host's seconds since zero."""
        return time.perf_counter() - (self._zero or 0.0)

    def ready(self, message: str) -> None:
        """Note that what a message carries is complete."""
        self.span("ready", message, self.now(), None)

    def waited(self, begun: float, message: str) -> None:
        """Note that the host was blocked from ``begun`` until now."""
        self.span("wait", message, begun, self.now())

    def codec(self, begun: float, message: str) -> None:
        """Note that a message was worked on, from ``begun`` until now."""
        self.span("codec", message, begun, self.now(), CODEC)

    @contextmanager
    def during(self, category: str) -> Iterator[None]:
        """Show what is done within this as a pass or an update, unless it fails."""
        begun = self.now()
        yield
        self.span(category, category, begun, self.now())

    def begin_backward(self) -> None:
        """Note that gradients are computed from here on."""
        if self._last_gradient is None:
            self._backward = self.now()

    def gradient(self) -> None:
        """Note that a gradient is complete."""
        if self.is_on:
            self._last_gradient = self.now()
            if self._backward is None:
                self._backward = self._last_gradient

    def end_backward(self) -> None:
        """Note that the last gradient was the last one of the pass."""
        if self._backward is not None and self._last_gradient is not None:
            self.span("backward", "backward", self._backward, self._last_gradient)
            self._backward = self._last_gradient = None

    def end_step(self) -> None:
        """Close a step that an optimizer has made."""
        if self.is_on and not self.in_pipeline:
            self.next_step()

    def next_step(self) -> None:
        """Close a step."""
        self.steps += 1

    def record_external(self, category: str, name: str, start: float) -> None:
        """Record what a pipeline has done from ``start``, by ``time.perf_counter``, until now."""
        lane, begun = SENDS if category == "send" else COMPUTE, start - (self._zero or 0.0)
        self.span(category, name, begun, self.now(), lane, by_pipeline=True)
        if category == "update":
            self.next_step()

    # Messages.

    def launched(
        self,
        message: str,
        nbytes: int,
        arrived: Callable[[], bool] | None = None,
        *,
        begun: float | None = None,
    ) -> PendingOperation:
        """Note that a message leaves, or was launched at the moment ``begun``.

        It ends when it is completed or, where that is given, when it has ``arrived``.
        """
        if not self.is_on:
            return NOT_SHOWN
        start = self.now() if begun is None else begun
        with self._changed:
            slot = next(slot for slot in itertools.count() if slot not in self._pending)
            operation = PendingOperation(self, message, nbytes, start, slot, arrived)
            self._pending[slot] = operation
            if arrived is not None and self._thread is None:
                name = "hvd_pipe timeline"
                self._thread = threading.Thread(target=self._ask, name=name, daemon=True)
                self._thread.start()
            self._changed.notify()
        return operation

    def completed(self, operation: PendingOperation) -> None:
        """Write a message that has arrived, unless that was known."""
        with self._changed:
            if self._pending.get(operation.slot) is not operation:
                return
            end, _ = self.now(), self._pending.pop(operation.slot)
        lane, size = NETWORK + operation.slot, f',"bytes":{operation.nbytes}'
        self.span("allreduce", operation.message, operation.start, end, lane, size)

    def halt(self) -> None:
        """End the thread: it must not be inside Horovod when that ends."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._pending.clear()
            self._changed.notify()
        if thread is not None:
            thread.join()

    def _ask(self) -> None:
        with self._changed:
            while self._thread is threading.current_thread():
                asked = [each for each in self._pending.values() if each.arrived is not None]
                for operation in asked:
                    with suppress(Exception):  # somebody has waited for it, and completes it
                        if operation.arrived is not None and operation.arrived():
                            operation.complete()
                ages = [self.now() - operation.start for operation in asked]
                self._changed.wait(max(_POLL_S, _POLL_SHARE * min(ages)) if asked else None)

    # The file.

    def set_clock(
        self, gather: Callable[[Any, str, ProcessSet], list[Any]], name: str, ranks: ProcessSet
    ) -> None:
        """Take the zero of the process set's first rank; later ones are of other optimizers.

        On one host all processes read the same clock. Between hosts, meetings of all ranks bound
        the difference of two clocks. While that leaves room for synchronised clocks (NTP, PTP),
        the clocks are believed; else they are put right by the middle of the bounds. A rank
        outside of the process set may come first: it shows its own steps, by its own clock.
        """
        here_ns, seconds = _both_clocks()
        zero_ns, offset_ns, error_s = here_ns, 0, None
        if ranks.included():
            entered, left = [], []
            for _ in range(_CLOCK_ROUNDS):
                entered.append(time.time_ns())
                gather(None, name, ranks)
                left.append(time.time_ns())
            clocks, error_s = [_host(), here_ns, entered, left], 0.0
            host, zero_ns, first_entered, first_left = gather(clocks, name, ranks)[0]
            if host != clocks[0]:
                offset_ns, error_ns = bound_offset(entered, left, first_entered, first_left)
                error_s = error_ns / 1e9
        if self._zero is None:
            self._zero = seconds - (here_ns - offset_ns - zero_ns) / 1e9
            self._metadata("process_name", name=f"worker {self.worker}")
            self._metadata("process_sort_index", sort_index=self.worker)
            self._metadata(CLOCK, zero_unix_ns=zero_ns, clock_error_s=error_s)

    def close(self) -> None:
        """Close the file."""
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
        by_pipeline: bool = False,
    ) -> None:
        """Write an event of this step; one without an end is an instant."""
        if self._file is None or self._file.full:
            return
        if self.in_pipeline and category in PASSES and not by_pipeline:
            return
        if lane not in self._lanes:
            thread = _LANES.get(lane) or f"network {lane - NETWORK + 1}".removesuffix(" 1")
            self._metadata("thread_name", lane, name=thread)
            self._metadata("thread_sort_index", lane, sort_index=lane)
            self._lanes.add(lane)
        short = re.sub(r"^hvd_pipe\.(tf\.\d+\.)?\d+\.\d+\.", "", name)
        whole = "" if short == name else f',"message":{json.dumps(name)}'
        kind = '"i","s":"t"' if end is None else f'"X","dur":{max(end - start, 0.0) * 1e6:.3f}'
        self._file.add(
            f'{{"name":{json.dumps(short)},"cat":"{category}","ph":{kind},"pid":{self.worker},'
            f'"tid":{lane},"ts":{start * 1e6:.3f},"args":{{"step":{self.steps}{whole}{more}}}}}'
        )

    def _metadata(self, kind: str, lane: int = 0, **args: object) -> None:
        if self._file is not None:
            self._file.add(json.dumps(metadata(kind, self.worker, lane, **args)))

    def _marker(self) -> str:
        name = f"the trace ends here: raise {MEGABYTES}"
        about = {"name": name, "cat": MARK, "ph": "i", "s": "p", "ts": self.now() * 1e6}
        return json.dumps({**about, "pid": self.worker, "tid": COMPUTE})


OFF = Recorder()
"""Notes nothing."""

NOT_SHOWN = PendingOperation(OFF, "", 0, 0.0, 0)
"""Stands for a message that no timeline shows."""


class TraceFile:
    """Writes events to a Chrome trace as they come: an array with one a line, closed at the end.

    A full file drops events: a marker in it and one line in the log of ``hvd_pipe`` say so. A
    write that fails ends the file in the same way, and not the job. Any thread may add events.
    """

    def __init__(self, path: Path, max_bytes: int, marker: Callable[[], str]) -> None:
        self.path, self.full = path, False
        self._max_bytes, self._room = max_bytes, max_bytes - _MARKER_BYTES
        self._marker = marker
        # Re-entrant: a signal's handler may add an event while its own thread is adding one.
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._file: BinaryIO = path.open("wb", buffering=0)
        self._write("[\n")
        atexit.register(self.close)

    def add(self, event: str) -> None:
        """Write one event, a JSON object as text."""
        with self._lock:
            if self.full or os.getpid() != self._pid:  # a forked child shares the parent's file
                return
            self._room -= len(event.encode()) + len(",\n")
            if self._room >= 0:
                self._write(f"{event},\n")
                return
            self.full = True
            self._write(f"{self._marker()}\n]\n")
        _log.warning("%s is full (%d bytes): raise %s", self.path, self._max_bytes, MEGABYTES)

    def close(self) -> None:
        """Close the array; the file takes no more events."""
        with self._lock:
            if not self.full and os.getpid() == self._pid and self._file.tell() > len("[\n"):
                self._file.seek(-len(",\n"), os.SEEK_CUR)
                self._write("\n]\n")
            self.full = True
            self._file.close()
        atexit.unregister(self.close)

    def _write(self, text: str) -> None:
        data = text.encode()
        try:
            while data:  # one turn, unless a disk is full
                data = data[self._file.write(data) :]
        except OSError as error:  # a full disk must not end the job
            self.full = True
            _log.warning("%s ends here: %s", self.path, error)


def open_recorder(
    active: Recorder, make: Callable[[Path, int, int], Recorder], rank: int, size: int
) -> tuple[Recorder, Description]:
    """Open this rank's file, if that is asked for, and return what all ranks must have alike."""
    name = os.environ.get(DIRECTORY)
    if active.is_on or not name:
        return active, [(DIRECTORY, "set")] if active.is_on else []
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
        return make(path, limit, rank), [(DIRECTORY, "set")]
    except OSError as error:
        raise HvdPipeError(
            f"{DIRECTORY}={directory}: {path} cannot be written ({error.strerror}): name a "
            f"directory that this user can write on every host, or unset {DIRECTORY}."
        ) from error


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
        before, wall_ns, after = time.perf_counter(), time.time_ns(), time.perf_counter()
        readings.append((after - before, wall_ns, (before + after) / 2))
    return min(readings)[1:]
