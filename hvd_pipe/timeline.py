"""Timelines of simulated and of measured steps: what each worker did, and when.

A `Timeline` is saved as Chrome trace JSON, which https://ui.perfetto.dev opens, and as a picture::

    process   "worker 0"       one a worker
      thread  "compute"        one a lane: forward, backward, wait, update, ready (instants)
      thread  "network"        messages; "network 2" and so on hold those that overlap

The files that a job writes under ``HVD_PIPE_TIMELINE=dir`` have the same form, one a rank;
``Timeline.load(dir)`` puts them together.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

CATEGORIES = (
    "forward",
    "backward",
    "ready",
    "allreduce",
    "wait",
    "update",
    "send",
    "recv",
    "codec",
)
"""What an event can be; ``ready`` is an instant, of no duration."""

LANES = ("compute", "network")
"""The lanes that are drawn first, in this order."""

CLOCK = "hvd_pipe.runtime.timeline.clock"
"""The name of the metadata event that says which moment is zero in the file of a rank."""

MARK = "hvd_pipe"
"""The category of an instant that is about the file itself and no event of the job."""


@dataclass(frozen=True)
class Event:
    """Something that a worker does for a while, or at an instant.

    Args:
        name: What a viewer shows: a stage, a bucket, a minibatch.
        category: One of `CATEGORIES`.
        worker: The worker's rank.
        lane: ``"compute"``, ``"network"``, or another resource of the worker.
        start_s: Seconds since the timeline's zero.
        duration_s: Seconds; 0 for an instant.
        args: Facts that a viewer shows with it: bytes, the number of the step.

    Raises:
        ValueError: An unknown category, an empty lane, or a time that is not finite.

    Example:
        >>> Event("step 0", "forward", worker=0, lane="compute", start_s=0.5, duration_s=1.0).end_s
        1.5
    """

    name: str
    category: str
    worker: int
    lane: str
    start_s: float
    duration_s: float
    args: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.category not in CATEGORIES:
            raise ValueError(
                f"event {self.name!r}: category must be one of {', '.join(CATEGORIES)}, "
                f"got {self.category!r}"
            )
        if not self.lane:
            raise ValueError(f"event {self.name!r}: lane must name a resource, got {self.lane!r}")
        if not (math.isfinite(self.start_s) and 0.0 <= self.duration_s < math.inf):
            raise ValueError(
                f"event {self.name!r}: start_s must be finite and duration_s finite and at least "
                f"0 seconds, got {self.start_s} and {self.duration_s}"
            )

    @property
    def end_s(self) -> float:
        """When it ends, in seconds since the timeline's zero."""
        return self.start_s + self.duration_s


@dataclass(frozen=True)
class Timeline:
    """Events of one or more workers on one clock.

    Args:
        events: In any order.
        title: What the picture and the trace are called.

    Example:
        >>> step = Timeline((
        ...     Event("forward", "forward", 0, "compute", 0.0, 0.010),
        ...     Event("backward", "backward", 0, "compute", 0.010, 0.020),
        ...     Event("bucket 0", "allreduce", 0, "network", 0.020, 0.015),
        ... ))
        >>> step.span_s, round(step.busy_s(0, "compute"), 3)
        (0.035, 0.03)
        >>> Timeline.from_chrome(step.to_chrome()) == step
        True
    """

    events: tuple[Event, ...]
    title: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(self.events))

    @property
    def workers(self) -> tuple[int, ...]:
        """The ranks that have events, in order."""
        return tuple(sorted({event.worker for event in self.events}))

    @property
    def span_s(self) -> float:
        """Seconds from the first start to the last end; 0 without events."""
        if not self.events:
            return 0.0
        start = min(event.start_s for event in self.events)
        return max(event.end_s for event in self.events) - start

    def busy_s(self, worker: int, lane: str) -> float:
        """Return the seconds in which a lane of a worker does anything; overlap counts once."""
        busy, reached = 0.0, -math.inf
        for event in sorted(self.events, key=lambda event: event.start_s):
            if (event.worker, event.lane) == (worker, lane) and event.end_s > reached:
                busy += event.end_s - max(event.start_s, reached)
                reached = event.end_s
        return busy

    def lanes(self, worker: int) -> tuple[str, ...]:
        """Return the lanes of a worker: compute, network, then others by their first event."""
        lanes = {event.lane for event in self.events if event.worker == worker}
        order = {lane: place for place, lane in enumerate(LANES)}
        return tuple(sorted(lanes, key=lambda lane: (order.get(lane, len(LANES)), lane)))

    def rows(self, worker: int, lane: str) -> list[list[Event]]:
        """Return the events of a lane in as few rows as hold no two that overlap."""
        return stack(e for e in self.events if (e.worker, e.lane) == (worker, lane))

    def between(self, start_s: float, end_s: float) -> Timeline:
        """Return the events that lie, or begin or end, in a part of the time.

        Args:
            start_s: Seconds since the first event's start.
            end_s: Likewise; inf for all to the end.

        Raises:
            ValueError: The part is empty, or begins before 0.

        Example:
            >>> events = [Event(str(at), "forward", 0, "compute", at, 1.0) for at in range(5)]
            >>> [event.name for event in Timeline(tuple(events)).between(1.5, 3.0).events]
            ['1', '2']
        """
        if not 0.0 <= start_s < end_s:
            raise ValueError(
                f"a part of a timeline must begin at 0 s or later and end after that, got "
                f"{start_s:g} to {end_s:g} s"
            )
        first = min((event.start_s for event in self.events), default=0.0)
        start_s, end_s = start_s + first, end_s + first
        kept = [
            event
            for event in self.events
            if event.start_s < end_s and (event.end_s > start_s or event.start_s >= start_s)
        ]
        return replace(self, events=tuple(kept))

    def to_chrome(self) -> dict[str, Any]:
        """Return the object form of a Chrome trace; times in it are in microseconds."""
        records: list[dict[str, Any]] = []
        by_lane: dict[tuple[int, str], list[Event]] = {}
        for event in self.events:
            by_lane.setdefault((event.worker, event.lane), []).append(event)

        def describe(what: str, worker: int, tid: int, key: str, value: object) -> None:
            about = {"name": what, "ph": "M", "pid": worker, "tid": tid, "args": {key: value}}
            records.append(about)

        for worker in self.workers:
            describe("process_name", worker, 0, "name", f"worker {worker}")
            describe("process_sort_index", worker, 0, "sort_index", worker)
            tid = 0
            for lane in self.lanes(worker):
                # Perfetto drops what overlaps within a thread.
                for number, row in enumerate(stack(by_lane[worker, lane]), 1):
                    name = lane if number == 1 else f"{lane} {number}"
                    describe("thread_name", worker, tid, "name", name)
                    describe("thread_sort_index", worker, tid, "sort_index", tid)
                    records += [_record(event, tid) for event in row]
                    tid += 1
        return {
            "traceEvents": records,
            "displayTimeUnit": "ms",
            "otherData": {"title": self.title, "producer": "hvd_pipe"},
        }

    def save(self, path: str | Path, whole: bool = False) -> None:
        """Write the timeline; the suffix says how: .json (Chrome trace), .png or .svg.

        Args:
            path: The file.
            whole: Draw all steps, where a picture has some from the middle of very many.

        Raises:
            ValueError: Another suffix.
            ImportError: A picture without matplotlib.
        """
        path = Path(path)
        if path.suffix.lower() == ".json":
            path.write_text(json.dumps(self.to_chrome(), separators=(",", ":")) + "\n")
        elif path.suffix.lower() in (".png", ".svg"):
            from hvd_pipe._pictures import draw_timeline  # noqa: PLC0415 - it needs matplotlib

            draw_timeline(self, path, whole)
        else:
            raise ValueError(
                f"a timeline is saved as .json (Chrome trace), .png or .svg, got {path.name!r}"
            )

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Read a Chrome trace that hvd_pipe has written, or a directory with one a rank.

        Raises:
            ValueError: No such trace, with the path and what is wrong with it.
            OSError: The path cannot be read.
        """
        path = Path(path)
        if not path.is_dir():
            return cls.from_chrome(_read(path), source=str(path))
        documents = {str(one): _read(one) for one in sorted(path.glob("rank*.json"))}
        if not documents:
            raise ValueError(
                f"{path} has no rank*.json: run the job with HVD_PIPE_TIMELINE={path} first"
            )
        zeros = [_zero_of(document) for document in documents.values()]
        first = min((zero for zero in zeros if zero is not None), default=0)
        events: list[Event] = []
        for (source, document), zero in zip(documents.items(), zeros, strict=True):
            shift_s = 0.0 if zero is None else (zero - first) / 1e9
            events += [
                replace(event, start_s=event.start_s + shift_s)
                for event in cls.from_chrome(document, source=source).events
            ]
        return cls(tuple(sorted(events, key=lambda event: event.start_s)), path.name)

    @classmethod
    def from_chrome(cls, document: object, source: str = "the trace") -> Timeline:
        """Return the timeline of a Chrome trace that `to_chrome` or a job has made.

        Raises:
            ValueError: It is none, with ``source`` and the first event that is wrong.
        """
        records = _records_of(document)
        if records is None:
            raise ValueError(f'{source} is no Chrome trace: it lacks the list "traceEvents"')
        lanes: dict[object, str] = {}
        for record in records:
            if isinstance(record, dict) and record.get("name") == "thread_name":
                with suppress(KeyError, TypeError):
                    thread = record["args"]["name"]
                    lanes[record["pid"], record["tid"]] = re.sub(r" \d+$", "", thread)
        events = []
        for number, record in enumerate(records):
            try:
                if record["ph"] in ("X", "i") and record["cat"] != MARK:
                    events.append(
                        Event(
                            name=str(record["name"]),
                            category=record["cat"],
                            worker=int(record["pid"]),
                            lane=lanes.get((record["pid"], record["tid"]), "compute"),
                            start_s=record["ts"] / 1e6,
                            duration_s=record.get("dur", 0.0) / 1e6,
                            args=record.get("args", {}),
                        )
                    )
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{source}: event {number} is not one that hvd_pipe writes "
                    f"({type(error).__name__}: {error}): {str(record)[:200]}"
                ) from None
        other = document.get("otherData") if isinstance(document, dict) else None
        title = other.get("title", "") if isinstance(other, dict) else ""
        return cls(tuple(events), str(title))


def stack(events: Iterable[Event]) -> list[list[Event]]:
    """Part events into as few rows as hold no two that overlap.

    Example:
        >>> a, b, c = (Event(n, "send", 0, "network", s, 2.0) for n, s in zip("abc", (0, 1, 2)))
        >>> [[event.name for event in row] for row in stack([a, b, c])]
        [['a', 'c'], ['b']]
    """
    rows: list[list[Event]] = []
    ends: list[float] = []  # of what each row has
    for event in sorted(events, key=lambda event: (event.start_s, event.end_s)):
        free = (row for row, end in enumerate(ends) if end <= event.start_s + _TOUCH_S)
        row = 0 if rows and event.duration_s == 0.0 else next(free, len(rows))
        if row == len(rows):
            rows.append([])
            ends.append(-math.inf)
        rows[row].append(event)
        ends[row] = max(ends[row], event.end_s)
    return rows


_TOUCH_S = 1e-9
"""What two events may overlap by, as a trace has whole nanoseconds."""


def _record(event: Event, tid: int) -> dict[str, Any]:
    record: dict[str, Any] = {
        "name": event.name,
        "cat": event.category,
        "ph": "X",
        "pid": event.worker,
        "tid": tid,
        "ts": round(event.start_s * 1e6, 3),
    }
    if event.category == "ready":
        record |= {"ph": "i", "s": "t"}
    else:
        record["dur"] = round(event.duration_s * 1e6, 3)
    if event.args:
        record["args"] = dict(event.args)
    return record


def _records_of(document: object) -> list[Any] | None:
    """Return the events of a trace, which is an object with a list, or the list alone."""
    records = document.get("traceEvents") if isinstance(document, dict) else document
    return records if isinstance(records, list) else None


def _read(path: Path) -> Any:
    try:
        text = path.read_text() or "[]"
        if text.startswith("[\n") and not text.endswith("\n]\n"):
            # The job runs, or was killed: its last line may be cut off.
            text = text[: text.rindex("\n")].rstrip(",") + "]"
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON (line {error.lineno}: {error.msg})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no JSON: it is not text") from None


def _zero_of(document: Any) -> int | None:
    """Return the Unix time of a file's zero in nanoseconds, if the file says it."""
    for record in _records_of(document) or ():
        if isinstance(record, dict) and record.get("name") == CLOCK:
            return int(record["args"]["zero_unix_ns"])
    return None
