"""What takes a running job's timeline down, whatever its framework.

``HVD_PIPE_TIMELINE=dir`` asks for it; each rank writes ``dir/rank{N}.json``, in the form that
`hvd_pipe.timeline` reads. A framework's recorder adds how its moments are found.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.runtime.consensus import Description
from hvd_pipe.runtime.timeline.clock import Clock
from hvd_pipe.runtime.timeline.pending import NOT_SHOWN, PendingOperation, PendingOperations
from hvd_pipe.runtime.timeline.trace_file import TraceFile
from hvd_pipe.timeline import CLOCK, MARK

__all__ = [
    "COMPUTE",
    "DIRECTORY",
    "HOST",
    "MEGABYTES",
    "OFF",
    "Recorder",
    "TraceRecorder",
    "open_recorder",
]

DIRECTORY = "HVD_PIPE_TIMELINE"
MEGABYTES = "HVD_PIPE_TIMELINE_MB"
DEFAULT_MEGABYTES = "64"

COMPUTE, HOST, CODEC, SENDS, NETWORK = 0, 1, 2, 3, 4
_LANES = {COMPUTE: "compute", HOST: "host", CODEC: "codec", SENDS: "network 0"}


class Recorder:
    """Notes what this process does, for a timeline.

    This one notes nothing: it stands where no timeline is asked for, so that callers note without
    asking. `TraceRecorder` writes a file.
    """

    is_on = False
    """Whether anything is noted, for what costs much to find out."""

    def now(self) -> float:
        """Return the host's seconds since zero."""
        return 0.0

    def moment(self) -> Any:
        """Return this moment, as `span` takes it."""
        return 0.0

    def ready(self, message: str) -> None:
        """Note that what a message carries is complete."""

    def launched(
        self, message: str, nbytes: int, handle: int | None = None, *, begun: Any = None
    ) -> PendingOperation:
        """Note that a message leaves, or was given to Horovod at the moment ``begun``.

        Its end is when it is completed, or when Horovod says so.
        """
        return NOT_SHOWN

    def waited(self, begun: float, message: str) -> None:
        """Note that the host was blocked from ``begun`` until now."""

    def begin_backward(self) -> None:
        """Note that gradients are computed from here on."""

    def gradient(self) -> None:
        """Note that a gradient is complete."""

    def end_backward(self) -> None:
        """Note that the last gradient was the last one."""

    def update(self, begun: Any) -> None:
        """Note that the user's optimizer has moved the weights, from ``begun`` until now."""

    def codec(self, begun: float, message: str) -> None:
        """Note that a message was worked on, from ``begun`` until now."""

    def end_step(self) -> None:
        """Close a step that an optimizer has made, and bring it to the disk."""

    def telling(self) -> AbstractContextManager[object]:
        """Return a context in which passes, waits and updates are told by `told` alone.

        A pipeline tells them. A stage's replicas have a distributed optimizer, by whose hooks the
        same passes would be found once more.
        """
        return nullcontext()

    def told(self, category: str, name: str, start: float) -> None:
        """Note what a pipeline has done from ``start``, by ``time.perf_counter``, until now."""


OFF = Recorder()
"""Notes nothing."""


class TraceRecorder(Recorder):
    """Writes what this process does to a file; one a process, whatever its optimizers.

    Args:
        path: The file.
        max_bytes: Its limit.
        worker: This rank.
    """

    is_on = True

    wait_lane = COMPUTE
    """Where the host's waits are drawn."""

    is_told = False
    """Whether passes, waits and updates are told, as a pipeline does, and not found by hooks."""

    def __init__(self, path: Path, max_bytes: int, worker: int) -> None:
        self.file = TraceFile(path, max_bytes, self._marker, f"raise {MEGABYTES}")
        self.worker = worker
        self._zero: float | None = None
        self._step = 0
        self._named: set[int] = set()
        self._texts: dict[str, tuple[str, str]] = {}
        self._operations = PendingOperations(self.now, self._completed, self._poll)

    _poll: Callable[[int], bool] | None = None
    """Says whether the message of a handle has arrived, in a framework that has handles."""

    def set_clock(self, clock: Clock) -> None:
        """Take the first clock that is agreed on; later ones are of other optimizers."""
        if self._zero is not None:
            return
        self._zero = clock.zero
        self.file.add(_metadata("process_name", self.worker, 0, name=f"worker {self.worker}"))
        self.file.add(_metadata("process_sort_index", self.worker, 0, sort_index=self.worker))
        about = {"zero_unix_ns": clock.zero_unix_ns, "clock_error_s": clock.error_s}
        self.file.add(_metadata(CLOCK, self.worker, 0, **about))

    def now(self) -> float:
        return time.perf_counter() - (self._zero or 0.0)

    def moment(self) -> Any:
        return self.now()

    def ready(self, message: str) -> None:
        self.span("ready", message, self.moment(), None)

    def launched(
        self, message: str, nbytes: int, handle: int | None = None, *, begun: Any = None
    ) -> PendingOperation:
        start = self.moment() if begun is None else begun
        return self._operations.launch(message, nbytes, start, handle)

    def waited(self, begun: float, message: str) -> None:
        if not self.is_told:
            self.span("wait", message, begun, self.now(), self.wait_lane)

    def update(self, begun: Any) -> None:
        if not self.is_told:
            self.span("update", "update", begun, self.moment())

    def codec(self, begun: float, message: str) -> None:
        self.span("codec", message, begun, self.now(), CODEC)

    def end_step(self) -> None:
        if not self.is_told:
            self.next_step()

    @contextmanager
    def telling(self) -> Iterator[None]:
        self.is_told = True
        try:
            yield
        finally:
            self.is_told = False
            self.file.flush()

    def told(self, category: str, name: str, start: float) -> None:
        lane = {"send": SENDS, "wait": self.wait_lane}.get(category, COMPUTE)
        self.span(category, name, start - (self._zero or 0.0), self.now(), lane)
        if category == "update":
            self.next_step()

    def next_step(self) -> None:
        """Close a step, and bring it to the disk."""
        self._step += 1
        self.file.flush()

    def span(
        self,
        category: str,
        name: str,
        start: Any,
        end: Any,
        tid: int = COMPUTE,
        more: str = "",
    ) -> None:
        """Write an event; one without an end is an instant."""
        if not self.file.full:
            self._write(category, name, tid, self._args(), more, start, end)

    def _args(self) -> str:
        return f'{{"step":{self._step}'

    def _write(
        self,
        category: str,
        name: str,
        tid: int,
        args: str,
        more: str,
        start: float,
        end: float | None,
    ) -> None:
        if tid not in self._named:
            self._named.add(tid)
            slot = tid - NETWORK
            lane = _LANES.get(tid) or ("network" if slot == 0 else f"network {slot + 1}")
            self.file.add(_metadata("thread_name", self.worker, tid, name=lane))
            self.file.add(_metadata("thread_sort_index", self.worker, tid, sort_index=tid))
        shown, full = self._text(name)
        kind = '"i","s":"t"' if end is None else f'"X","dur":{max(end - start, 0.0) * 1e6:.3f}'
        self.file.add(
            f'{{"name":{shown},"cat":"{category}","ph":{kind},"pid":{self.worker},"tid":{tid},'
            f'"ts":{start * 1e6:.3f},"args":{args}{full}{more}}}}}'
        )

    def _text(self, name: str) -> tuple[str, str]:
        """Return a message's name, short and whole, as JSON."""
        text = self._texts.get(name)
        if text is None:
            short = re.sub(r"^hvd_pipe\.(tf\.\d+\.)?\d+\.\d+\.", "", name)
            whole = "" if short == name else f',"message":{json.dumps(name)}'
            text = self._texts[name] = json.dumps(short), whole
        return text

    def _completed(self, operation: PendingOperation) -> None:
        tid, size = NETWORK + operation.slot, f',"bytes":{operation.nbytes}'
        self.span("allreduce", operation.message, operation.start, operation.end_s, tid, size)

    def _marker(self) -> str:
        """Return the event that ends a full file."""
        name = f"the trace ends here: raise {MEGABYTES}"
        return (
            f'{{"name":"{name}","cat":"{MARK}","ph":"i","s":"p","pid":{self.worker},'
            f'"tid":{COMPUTE},"ts":{self.now() * 1e6:.3f}}}'
        )


def open_recorder(
    active: Recorder, make: Callable[[Path, int, int], Recorder], rank: int, size: int
) -> tuple[Recorder, Description]:
    """Open this rank's file, if that is asked for, and return what all ranks must have alike."""
    alike = [(DIRECTORY, "set")]
    if active.is_on:
        return active, alike
    name = os.environ.get(DIRECTORY)
    if not name:
        return active, []
    directory = Path(name)
    text = os.environ.get(MEGABYTES, DEFAULT_MEGABYTES)
    try:
        limit = round(float(text) * 1e6)
        if limit < 1e4:
            raise ValueError
    except (ValueError, OverflowError):
        raise ValueError(
            f"{MEGABYTES} must be a number of megabytes of at least 0.01, got {text!r}"
        ) from None
    path = directory / f"rank{rank}.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_older(directory, size)
        return make(path, limit, rank), alike
    except OSError as error:
        raise HvdPipeError(
            f"{DIRECTORY}={directory}: {path} cannot be written ({error.strerror}): name a "
            f"directory that this user can write on every host, or unset {DIRECTORY}."
        ) from error


def _remove_older(directory: Path, size: int) -> None:
    """Remove what an older run on more ranks has left; the others write their files anew."""
    for path in directory.glob("rank*.json"):
        number = path.stem.removeprefix("rank")
        if number.isdecimal() and int(number) >= size:
            path.unlink(missing_ok=True)  # every rank does this: hosts may not share a disk


def _metadata(what: str, worker: int, tid: int, **args: object) -> str:
    return json.dumps({"name": what, "ph": "M", "pid": worker, "tid": tid, "args": args})
