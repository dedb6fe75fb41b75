"""The kill loop's verdict: a wrong weight, an orphan, or a message that names nobody, fails it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from kill_loop_check import (
    KINDS,
    Outcome,
    Run,
    misnamed,
    named_by_launcher,
    named_by_ranks,
    schedule,
    unequal_digests,
)

GOOD = Outcome("stop", [1], 2.5, 40, 8.4, by_ranks=[1], by_launcher=[2])
RUN = Run("restart, mpi, pipe-sgd", {"seed": 1}, [GOOD] * 3, 12, [])
HOSTS = ["h1", "h2", "h3"]


def test_a_seed_gives_one_schedule_and_each_run_its_own() -> None:
    first = schedule(1, "pipe-sgd", 20, KINDS, 3, (2.0, 6.0))
    assert first == schedule(1, "pipe-sgd", 20, KINDS, 3, (2.0, 6.0))
    assert first != schedule(2, "pipe-sgd", 20, KINDS, 3, (2.0, 6.0))
    assert first != schedule(1, "cocod", 20, KINDS, 3, (2.0, 6.0))
    assert all(2.0 <= fault.after_s <= 6.0 for fault in first)
    assert {fault.rank for fault in first} == {0, 1, 2}
    for turn in range(0, 20, 5):  # each kind as often as any other
        assert {fault.kind for fault in first[turn : turn + 5]} == set(KINDS)


@pytest.mark.parametrize(
    ("said", "pairs"),
    [
        (
            "hvd_pipe: rank 2 failed because of another: rank 1 on h2 (pid 42) raised Value",
            [(2, 1)],
        ),
        (
            "[0]<stderr>:hvd_pipe: rank 0 ends, as it waits for a rank that is lost: rank 1 on h2 "
            "(pid 42) has been silent for 9 s",
            [(0, 1)],
        ),
        (
            "hvd_pipe: rank 0 waits for a rank that is lost: rank 2 on h3 (pid 7) ended without a "
            "word. It ends when other threads",
            [(0, 2)],
        ),
        (
            "hvd_pipe: rank 1 failed because of another: the others have given this rank up: "
            "rank 1 on h2 (pid 42) has been silent",
            [(1, 1)],
        ),
        ("hvd_pipe: rank 1 on h2 (pid 42) has been silent for 4 s: a warning ends nobody", []),
        ("horovod.common.exceptions.HorovodInternalError: rank 1 on h2 is not named by us", []),
    ],
)
def test_what_ranks_say(said: str, pairs: list[tuple[int, int]]) -> None:
    assert named_by_ranks(said) == pairs


@pytest.mark.parametrize(
    ("said", "ranks"),
    [
        ("mpirun noticed that process rank 2 with PID 0 on node h3 exited on signal 9", {2}),
        ("  Process name: [[35003,1],2]\n  Exit code:    1", {2}),
        ("The first process to do so was:\nProcess name: 1\nExit code: 137\n", {1}),
        ("Process 2 exit with status code 137.\n", {2}),
        ("Process 2 exit with status code 0.\n", set()),
        ("Connection to h2 closed by remote host.\n", {1}),
        ("  HNP daemon   : [[1,0],0] on node h1\n  Remote daemon: [[1,0],2] on node h3\n", {2}),
        ("ORTE was unable to reliably start one or more daemons.", set()),
    ],
)
def test_what_launchers_say(said: str, ranks: set[int]) -> None:
    assert named_by_launcher(said, HOSTS) == ranks


def test_behind_a_cut_link_each_side_names_the_other() -> None:
    pairs = [(0, 1), (2, 1), (1, 0)]
    assert misnamed(pairs, [1], is_cut=True) == []
    assert misnamed([*pairs, (2, 0)], [1], is_cut=True) == [(2, 0)]
    assert misnamed(pairs[:2], [1], is_cut=False) == []
    assert misnamed([(0, 2)], [1], is_cut=False) == [(0, 2)]
    assert misnamed([(1, 0)], [1], is_cut=False) == [(1, 0)]


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"ended_s": None}, "had not ended"),
        ({"by_ranks": [], "by_launcher": []}, "no message named"),
        ({"by_ranks": [2]}, "no message named"),
        ({"by_ranks": [], "by_launcher": [0, 1]}, "no message named"),
        ({"misnamed": [[0, 2]]}, "named another"),
        ({"left": ["4242: python train.py"]}, "4242: python train.py"),
        ({"kind": "none"}, "nothing had happened"),
    ],
)
def test_a_bad_outcome_is_named(changed: dict[str, Any], word: str) -> None:
    run = replace(RUN, outcomes=[GOOD, replace(GOOD, **changed)])
    (wrong,) = run.wrong()
    assert wrong.startswith(f"{RUN.name}: fault 2 (")
    assert word in wrong


def test_weights_that_differ_and_weights_that_nobody_compared_are_named() -> None:
    assert RUN.wrong() == []
    assert replace(RUN, unequal=["rank 1, step 40"]).wrong() == [
        f"{RUN.name}: weights differ: rank 1, step 40"
    ]
    assert replace(RUN, compared=0).wrong() == [f"{RUN.name}: no weights were compared"]


def test_digests() -> None:
    whole = "10 a\n20 b\n30 c\nend-31 d\n"
    again = "10 a\n20 b\n20 b\n30 c\nend-31 d\n"  # a step that was taken again
    assert unequal_digests(again, whole) == (5, [])
    assert unequal_digests(again.replace("20 b\n30", "20 x\n30"), whole) == (5, ["20"])
    assert unequal_digests("10 a\n", whole) == (1, ["end-31"])
    assert unequal_digests(again + "40 e\n", whole) == (6, ["40"])
