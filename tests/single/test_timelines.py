"""The benchmark that draws two timelines: its reading and its picture; the jobs need root."""

from __future__ import annotations

import doctest
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import timelines
from timelines_rank import messages

from hvd_pipe.timeline import Event, Timeline


def test_doctests() -> None:
    assert doctest.testmod(timelines).failed == 0


def horovods(*sends: tuple[int, int, tuple[str, ...]]) -> list[dict[str, Any]]:
    """A timeline as Horovod writes it: messages from a microsecond to another, of tensors."""
    about: dict[str, Any] = {"start_time_since_epoch_in_micros": 5_000_000}
    records = [{"name": "process_name", "ph": "M", "pid": 0, "args": about}]
    places = {"barrier.noname": 1}
    about = {"name": "barrier.noname"}
    records.append({"name": "process_name", "ph": "M", "pid": 1, "args": about})
    records.append({"ph": "B", "name": "NEGOTIATE_BARRIER", "ts": 10, "pid": 1})
    records += [{"ph": "E", "ts": at, "pid": 1} for at in (20, 30)]  # an end too many
    for begun, ended, tensors in sends:
        for tensor in tensors:
            if tensor not in places:
                place = places[tensor] = len(places) + 1
                about = {"name": tensor}
                records.append({"name": "process_name", "ph": "M", "pid": place, "args": about})
                about = {"sort_index": place}
                records.append(
                    {"name": "process_sort_index", "ph": "M", "pid": place, "args": about}
                )
        for number, tensor in enumerate(tensors):  # one after the other, some microseconds apart
            pid = places[tensor]
            for name, at in (
                ("NEGOTIATE_ALLREDUCE", begun - 90),
                ("0", begun - 80),
                (None, begun - 70),
                ("ALLREDUCE", begun - 60),
                ("MEMCPY_IN_FUSION_BUFFER", begun - 50),
                (None, begun - 40),
                ("GLOO_ALLREDUCE", begun + number),
                (None, ended + number),
                (None, ended + 20),
            ):
                phase = "E" if name is None else "X" if name == "0" else "B"
                records.append(
                    {"ph": phase, "ts": at, "pid": pid} | ({"name": name} if name else {})
                )
    return records


def test_messages_of_horovods_timeline() -> None:
    records = horovods(
        (1_000, 3_000, ("a",)),  # of a step before
        (11_000, 12_000, ("c", "b")),
        (12_100, 15_000, ("a",)),
        (21_000, 24_000, ("c", "b", "a")),
    )
    found = [(e.name, e.start_s, e.duration_s, e.args["step"]) for e in messages(records, 2)]
    assert found == [
        ("a", pytest.approx(5.001), pytest.approx(2e-3), -1),
        ("c and 1 more", pytest.approx(5.011), pytest.approx(1.001e-3), 0),
        ("a", pytest.approx(5.0121), pytest.approx(2.9e-3), 0),
        ("c and 2 more", pytest.approx(5.021), pytest.approx(3.002e-3), 1),
    ]


def events(worker: int, step_s: float, wait_at: float, sent_at: float) -> list[Event]:
    """Steps of a worker: forward and its wait, then backward, and a message of 2 s."""
    found = []
    for step in range(5):
        at = 10.0 + step * step_s
        spans = [("forward", at, 1.0 if worker == 0 else 1.5), ("wait", at + wait_at, 0.5)]
        spans.append(("backward", spans[0][1] + spans[0][2], 1.0))
        found += [Event(what, what, worker, "compute", start, s) for what, start, s in spans]
        sent = at + sent_at
        found.append(Event("m", "allreduce", worker, "network", sent, 2.0, {"step": step}))
    return found


BOTH = Timeline((*events(0, 3.0, 2.0, 1.0), *events(1, 2.5, 0.5, 1.5)), "a title")


def parts(row: list[timelines.Bar]) -> list[tuple[float, float, str]]:
    return [(bar.start, bar.end, bar.text) for bar in row]


def test_a_worker_that_waits_in_forward_does_not_compute_meanwhile() -> None:
    rows = timelines.bars(BOTH, 1, 3.0)  # from the second of five steps on, which is number 1
    assert sorted(parts(rows["computation"])) == [
        (0.0, 0.5, "forward 1"),
        (1.0, 1.5, ""),
        (1.5, 2.5, "backward 1"),
        (2.5, 3.0, "forward 2"),
    ]
    assert parts(rows["wait, update"]) == [(0.5, 1.0, "wait")]
    # A message of the step before goes on at the left edge, and one is cut at the right.
    assert parts(rows["link"]) == [(0.0, 1.0, "0"), (1.5, 3.0, "1")]
    assert timelines.share(rows["link"], 3.0) == pytest.approx(2.5 / 3.0)


def test_a_worker_under_stock_horovod_waits_after_backward() -> None:
    rows = timelines.bars(BOTH, 0, 3.0)
    assert parts(rows["computation"]) == [(0.0, 1.0, "forward 1"), (1.0, 2.0, "backward 1")]
    assert parts(rows["wait, update"]) == [(2.0, 2.5, "wait")]
    assert parts(rows["link"]) == [(1.0, 3.0, "1")]


def test_both_are_drawn_from_the_file_that_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, picture = tmp_path / "kept.json", tmp_path / "both.svg"
    BOTH.save(kept)
    words = ["timelines.py", str(picture), "--draw", str(kept), "--steps", "2"]
    monkeypatch.setattr(sys, "argv", words)
    assert timelines.main() == 0
    drawn = picture.read_text()
    for text in (
        "a title",
        "stock Horovod: 3.00 s a step",
        "merged-gradient:overlap=forward: 2.50 s a step",
        "backward 2",
    ):
        assert f"<!-- {text} -->" in drawn
    assert "backward 3" not in drawn
