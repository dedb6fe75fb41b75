"""Timelines: events, Chrome traces, the files of several ranks on one clock."""

from __future__ import annotations

import doctest
import json
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_pipe import timeline as module
from hvd_pipe.timeline import CATEGORIES, CLOCK, MARK, Event, Timeline

STEP = Timeline(
    (
        Event("step 0", "forward", 0, "compute", 0.0, 0.010, {"step": 0}),
        Event("step 0", "backward", 0, "compute", 0.010, 0.020),
        Event("bucket 0", "ready", 0, "compute", 0.015, 0.0),
        Event("bucket 0", "allreduce", 0, "network", 0.015, 0.020, {"bytes": 4096}),
        Event("bucket 1", "allreduce", 0, "network", 0.030, 0.010),
        Event("step 0", "forward", 1, "compute", 0.0, 0.030),
    ),
    title="a step",
)


@st.composite
def events(draw: st.DrawFn) -> Event:
    category = draw(st.sampled_from(CATEGORIES))
    duration = 0 if category == "ready" else draw(st.integers(0, 50))
    worker, start = draw(st.integers(0, 2)), draw(st.integers(0, 100))
    lane = draw(st.sampled_from(("compute", "network", "disk")))
    return Event(f"e{start}", category, worker, lane, start * 1e-3, duration * 1e-3)


def test_doctests() -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"category": "fwd"}, "category must be one of forward, backward.* got 'fwd'"),
        ({"lane": ""}, "lane must name a resource"),
        ({"start_s": math.nan}, "start_s must be finite"),
        ({"duration_s": -1.0}, "at least 0 seconds, got 0.0 and -1.0"),
        ({"duration_s": math.inf}, "duration_s finite"),
    ],
)
def test_an_event_that_cannot_be_is_refused(change: dict[str, Any], words: str) -> None:
    good = {"name": "a", "category": "wait", "worker": 0, "lane": "compute"}
    good |= {"start_s": 0.0, "duration_s": 1.0}
    with pytest.raises(ValueError, match=words):
        Event(**(good | change))


def test_spans_and_busy_time() -> None:
    assert STEP.span_s == pytest.approx(0.040)
    assert STEP.busy_s(0, "compute") == pytest.approx(0.030)
    assert STEP.busy_s(0, "network") == pytest.approx(0.025)  # overlap counts once
    assert STEP.busy_s(1, "network") == 0.0
    assert STEP.workers == (0, 1)
    assert STEP.lanes(0) == ("compute", "network")
    assert Timeline(()).span_s == 0.0


def test_a_part_has_what_lies_or_reaches_into_it() -> None:
    spans = [(10.0, 11.0), (10.5, 14.0), (11.0, 11.0), (12.0, 12.5), (13.0, 14.0), (13.0, 13.0)]
    events = [Event("", "wait", 0, "compute", start, end - start) for start, end in spans]
    whole = Timeline(tuple(events), "job")
    part = whole.between(1.0, 3.0)  # from the first event on: 11 to 13
    assert [(e.start_s, e.end_s) for e in part.events] == spans[1:4]
    assert part.title == "job"
    assert whole.between(0.0, float("inf")) == whole
    assert not whole.between(5.0, 6.0).events


@pytest.mark.parametrize("part", [(1.0, 1.0), (2.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0)])
def test_an_empty_part_is_refused(part: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="must begin at 0 s or later and end after that"):
        STEP.between(*part)


def test_a_trace_is_what_perfetto_reads() -> None:
    document = json.loads(json.dumps(STEP.to_chrome()))
    records = document["traceEvents"]
    names = {
        (r["pid"], r["tid"]): r["args"]["name"] for r in records if r["name"] == "thread_name"
    }
    # The two messages overlap, so each is in a thread of its own.
    assert names == {(0, 0): "compute", (0, 1): "network", (0, 2): "network 2", (1, 0): "compute"}
    backward = next(r for r in records if r.get("cat") == "backward")
    assert backward | {"ts": 10_000.0, "dur": 20_000.0, "ph": "X", "pid": 0, "tid": 0} == backward
    ready = next(r for r in records if r.get("cat") == "ready")
    assert (ready["ph"], ready["s"], "dur" in ready) == ("i", "t", False)


@given(st.lists(events(), max_size=30))
def test_saved_timelines_come_back_and_nothing_overlaps_in_a_thread(some: list[Event]) -> None:
    document = json.loads(json.dumps(Timeline(tuple(some)).to_chrome()))
    loaded = Timeline.from_chrome(document)

    def key(event: Event) -> tuple[object, ...]:
        times = round(event.start_s * 1e9), round(event.duration_s * 1e9)
        return (event.worker, event.lane, *times, event.category, event.name)

    assert sorted(map(key, loaded.events)) == sorted(map(key, some))
    threads: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for record in document["traceEvents"]:
        if record["ph"] == "X" and record["dur"] > 0:
            threads.setdefault((record["pid"], record["tid"]), []).append(record)
    for records in threads.values():
        ordered = sorted(records, key=lambda record: record["ts"])
        for before, after in pairwise(ordered):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3


def test_saving_by_suffix(tmp_path: Path) -> None:
    STEP.save(tmp_path / "a.json")
    loaded = Timeline.load(tmp_path / "a.json")
    assert loaded.title == STEP.title
    assert sorted(loaded.events, key=repr) == sorted(STEP.events, key=repr)
    for suffix in (".svg", ".PNG"):
        STEP.save(tmp_path / f"a{suffix}")
        assert (tmp_path / f"a{suffix}").stat().st_size > 1000
    with pytest.raises(ValueError, match=r"\.json .*\.png or \.svg, got 'a\.txt'"):
        STEP.save(tmp_path / "a.txt")


def rank_file(path: Path, rank: int, zero_unix_ns: int, ts: float) -> None:
    records = [
        {"name": CLOCK, "ph": "M", "pid": rank, "tid": 0, "args": {"zero_unix_ns": zero_unix_ns}},
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": 4, "args": {"name": "network 2"}},
        {"name": "b", "cat": "allreduce", "ph": "X", "pid": rank, "tid": 4, "ts": ts, "dur": 5.0},
        {"name": "the end", "cat": MARK, "ph": "i", "s": "p", "pid": rank, "tid": 0, "ts": 9.0},
    ]
    path.write_text(json.dumps({"traceEvents": records}))


def test_a_directory_of_ranks_is_put_on_one_clock(tmp_path: Path) -> None:
    rank_file(tmp_path / "rank10.json", 10, 1_700_000_000_000_000_000, ts=7.0)
    rank_file(tmp_path / "rank2.json", 2, 1_700_000_000_000_002_000, ts=3.0)  # zero is 2 us later
    (tmp_path / "other.json").write_text("not of us")
    timeline = Timeline.load(tmp_path)
    assert [(e.worker, e.lane) for e in timeline.events] == [(2, "network"), (10, "network")]
    assert [e.start_s for e in timeline.events] == pytest.approx([5e-6, 7e-6])
    assert timeline.title == tmp_path.name
    assert Timeline.load(tmp_path / "rank2.json").events[0].start_s == pytest.approx(3e-6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", r"bad\.json is no JSON \(line 1"),
        ("[1]", "event 0 is not one that hvd_pipe writes"),
        ('{"traceEvents": 3}', 'lacks the list "traceEvents"'),
        ('{"traceEvents": [{"ph": "X", "name": "a"}]}', "event 0 .*KeyError"),
        (
            '{"traceEvents": [{"ph":"X","name":"a","cat":"cpu","pid":0,"tid":0,"ts":0,"dur":1}]}',
            "category must be one of",
        ),
        ("\xff\xfe", "no JSON"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        Timeline.load(tmp_path / "bad.json")


def test_binary_files_and_empty_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no rank\*\.json: run the job with HVD_PIPE"):
        Timeline.load(tmp_path)
    (tmp_path / "rank0.json").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(ValueError, match=r"rank0\.json is no JSON"):
        Timeline.load(tmp_path)
