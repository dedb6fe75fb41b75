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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

PASSES = ("forward", "backward", "wait", "update")
CATEGORIES = (*PASSES, "ready", "allreduce", "send", "recv", "codec")
"""What an event can be; ``ready`` is an instant, of no duration."""

LANES = ("compute", "network")
"""The lanes that are drawn first, in this order."""

CLOCK = "hvd_pipe.runtime.timeline.clock"
"""The name of the metadata event that says which moment is zero in the file of a rank."""

MARK = "hvd_pipe"
"""The category of an instant that is about the file itself and no event of the job."""

_TOUCH_S = 1e-9  # what two events may overlap by: a trace has whole nanoseconds


@dataclass(frozen=True)
class Event:
    """Something that a worker does for a while, or at an instant, of 0 seconds.

    ``lane`` is a resource of the worker; ``args`` are facts that a viewer shows with it.

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
    """Events of one or more workers on one clock, in any order, with a title for pictures.

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
        """Return what lies or reaches into a part of the time, counted from the first event.

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
        by_lane: dict[tuple[int, str], list[Event]] = {}
        for event in self.events:
            by_lane.setdefault((event.worker, event.lane), []).append(event)
        records: list[dict[str, Any]] = []
        for worker in self.workers:
            records.append(metadata("process_name", worker, name=f"worker {worker}"))
            records.append(metadata("process_sort_index", worker, sort_index=worker))
            tid = 0
            for lane in self.lanes(worker):
                # Perfetto drops what overlaps within a thread.
                for number, row in enumerate(stack(by_lane[worker, lane]), 1):
                    name = lane if number == 1 else f"{lane} {number}"
                    records.append(metadata("thread_name", worker, tid, name=name))
                    records.append(metadata("thread_sort_index", worker, tid, sort_index=tid))
                    records += [_record(event, tid) for event in row]
                    tid += 1
        return {
            "traceEvents": records,
            "displayTimeUnit": "ms",
            "otherData": {"title": self.title, "producer": "hvd_pipe"},
        }

    def save(self, path: str | Path, whole: bool = False) -> None:
        """Write the timeline; the suffix says how: .json (Chrome trace), .png or .svg.

        A picture of very many steps has some from the middle, unless the ``whole`` is asked for.
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
        """Read a Chrome trace that hvd_pipe has written, or a directory with one a rank."""
        path = Path(path)
        if not path.is_dir():
            return cls.from_chrome(_read(path), source=str(path))
        parsed = {file: _parse(_read(file), str(file)) for file in sorted(path.glob("rank*.json"))}
        if not parsed:
            raise ValueError(
                f"{path} has no rank*.json: run the job with HVD_PIPE_TIMELINE={path} first"
            )
        first = min((zero for _, zero in parsed.values() if zero is not None), default=0)
        events = [
            replace(event, start_s=event.start_s + ((zero or first) - first) / 1e9)
            for of_rank, zero in parsed.values()
            for event in of_rank
        ]
        return cls(tuple(sorted(events, key=lambda event: event.start_s)), path.name)

    @classmethod
    def from_chrome(cls, document: object, source: str = "the trace") -> Timeline:
        """Return the timeline of a Chrome trace that `to_chrome` or a job has made."""
        events, _ = _parse(document, source)
        other = document.get("otherData") if isinstance(document, dict) else None
        return cls(tuple(events), str(other.get("title", "")) if isinstance(other, dict) else "")


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


def metadata(kind: str, worker: int, tid: int = 0, **args: object) -> dict[str, Any]:
    """Return an event of a Chrome trace that says something about a process or a thread."""
    return {"name": kind, "ph": "M", "pid": worker, "tid": tid, "args": args}


def _record(event: Event, tid: int) -> dict[str, Any]:
    record: dict[str, Any] = {
        "name": event.name,
        "cat": event.category,
        "pid": event.worker,
        "tid": tid,
        "ts": round(event.start_s * 1e6, 3),
    }
    if event.category == "ready":
        record |= {"ph": "i", "s": "t"}
    else:
        record |= {"ph": "X", "dur": round(event.duration_s * 1e6, 3)}
    return record | ({"args": dict(event.args)} if event.args else {})


def _parse(document: object, source: str) -> tuple[list[Event], int | None]:
    """Return the events of a trace, and the Unix time of its zero in ns, if it says that."""
    records = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(records, list):
        raise ValueError(f'{source} is no Chrome trace: it lacks the list "traceEvents"')
    lanes: dict[object, str] = {}
    events: list[Event] = []
    zero_ns: int | None = None
    for number, record in enumerate(records):
        try:
            thread = record["pid"], record["tid"]
            if record["name"] == CLOCK:
                zero_ns = int(record["args"]["zero_unix_ns"])
            elif record["name"] == "thread_name":
                lanes[thread] = re.sub(r" \d+$", "", record["args"]["name"])
            elif record["ph"] in ("X", "i") and record["cat"] != MARK:
                start_s, duration_s = record["ts"] / 1e6, record.get("dur", 0.0) / 1e6
                name, category, args = str(record["name"]), record["cat"], record.get("args", {})
                lane = lanes.get(thread, "compute")
                events.append(
                    Event(name, category, int(record["pid"]), lane, start_s, duration_s, args)
                )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{source}: event {number} is not one that hvd_pipe writes "
                f"({type(error).__name__}: {error}): {str(record)[:200]}"
            ) from None
    return events, zero_ns


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
