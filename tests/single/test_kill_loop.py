"""The kill loop's verdict: a wrong weight, an orphan, or a message that names nobody, fails it."""

from __future__ import annotations

import copy
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from kill_loop_check import (
    KINDS,
    Outcome,
    Reference,
    Run,
    grown_files,
    misnamed,
    named_by_launcher,
    named_by_ranks,
    schedule,
    unequal_commits,
    unequal_digests,
)

GOOD = Outcome("stop", [1], 2.5, 40, 8.4, by_ranks=[1], by_launcher=[2])
RUN = Run("restart, mpi, pipe-sgd", {"seed": 1}, [GOOD] * 3, 12, [], 0.0, [], 60.0)
HOSTS = ["h1", "h2", "h3"]
LR = 2.0**-6
NUMEL = 5


def test_a_seed_gives_one_schedule_and_each_run_its_own() -> None:
    first = schedule(1, "pipe-sgd", 20, KINDS["restart"], 3, (2.0, 6.0))
    assert first == schedule(1, "pipe-sgd", 20, KINDS["restart"], 3, (2.0, 6.0))
    assert first != schedule(2, "pipe-sgd", 20, KINDS["restart"], 3, (2.0, 6.0))
    assert first != schedule(1, "cocod", 20, KINDS["restart"], 3, (2.0, 6.0))
    assert all(2.0 <= fault.after_s <= 6.0 for fault in first)
    assert {fault.rank for fault in first} == {0, 1, 2}
    for turn in range(0, 20, 5):  # each kind as often as any other
        assert {fault.kind for fault in first[turn : turn + 5]} == set(KINDS["restart"])


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


def test_a_good_run_has_nothing_wrong() -> None:
    assert RUN.wrong() == []
    assert Run.read(asdict(RUN)) == RUN


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
    assert replace(RUN, unequal=["rank 1, step 40"]).wrong() == [
        f"{RUN.name}: weights differ: rank 1, step 40"
    ]
    assert replace(RUN, compared=0).wrong() == [f"{RUN.name}: no weights were compared"]
    assert replace(RUN, grown=["files: 8, 9, 10"]).wrong() == [f"{RUN.name}: files: 8, 9, 10"]


def test_digests() -> None:
    whole = "10 a\n20 b\n30 c\nend-31 d\n"
    again = "10 a\n20 b\n20 b\n30 c\nend-31 d\n"  # a step that was taken again
    assert unequal_digests(again, whole) == (5, [])
    assert unequal_digests(again.replace("20 b\n30", "20 x\n30"), whole) == (5, ["20"])
    assert unequal_digests("10 a\n", whole) == (1, ["end-31"])
    assert unequal_digests(again + "40 e\n", whole) == (6, ["40"])


# Elastic logs ---------------------------------------------------------------------------------


def elastic_log(strategy: str) -> list[dict[str, Any]]:
    """Two workers; one is lost after a commit at 10, and one comes at the commit at 20."""
    one = Reference(strategy, 1, 2, NUMEL, LR)
    log: list[dict[str, Any]] = []

    def note(who: str, rank: int, size: int, **what: Any) -> None:
        log.append({"who": who, "rank": rank, "size": size, **what})

    def train(first: int, last: int, **note_as: int) -> None:
        for step in range(first, last):
            one.step(step)
        note("b" if first else "a", 0, len(one.x), **note_as)
        log[-1]["weights"] = one.x[0].tolist()

    def start(who: str, step: int, rank: int = 0) -> None:
        note(who, rank, len(one.x), start=step, files=19, weights=one.x[0].tolist())

    start("b", 0, rank=1)
    start("a", 0)
    train(0, 10, commit=10)
    one.move(1, 1)  # "a" is lost, and "b" is the first rank from now on
    start("b", 10)
    train(10, 20, commit=20)
    note("b", 0, 1, planned=20)
    one.drain()
    one.move(0, 2)
    start("b", 20)
    start("c", 20, rank=1)
    for step in range(20, 25):
        one.step(step)
    one.drain()
    note("b", 0, 2, end=25, files=19, weights=one.x[0].tolist())
    return log


STRATEGIES = ("merged-gradient:plan=wfbp", "pipe-sgd", "cocod:period=4")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_elastic_log_is_computed_again(strategy: str) -> None:
    log = elastic_log(strategy)
    compared, wrong, largest = unequal_commits(log, strategy, 1, LR)
    assert wrong == []
    assert compared == sum("weights" in line and line["rank"] == 0 for line in log)
    assert largest < 1e-15


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_wrong_weight_in_an_elastic_log_is_named(strategy: str) -> None:
    log = elastic_log(strategy)
    for number, line in enumerate(log):
        if "weights" in line and line["rank"] == 0 and "start" not in line:
            bad = copy.deepcopy(log)
            bad[number]["weights"][3] += 1e-9
            assert len(unequal_commits(bad, strategy, 1, LR)[1]) == 1, line
    assert unequal_commits(log, strategy, 2, LR)[1]  # the data of another seed
    assert unequal_commits(log[:-1], strategy, 1, LR)[1] == ["the job had no end"]
    early = [{**line, "start": 7} if line.get("start") == 10 else line for line in log]
    assert unequal_commits(early, strategy, 1, LR)[1] == [
        "a start at step 7, after commits at [0, 10]"
    ]


def test_a_commit_of_the_others_counts_though_the_first_rank_is_lost_in_it() -> None:
    log = elastic_log("pipe-sgd")
    said = [line for line in log if line.get("commit") != 10]
    compared, wrong, _ = unequal_commits(said, "pipe-sgd", 1, LR)
    assert wrong == []
    assert compared == unequal_commits(log, "pipe-sgd", 1, LR)[0] - 1


def test_commits_that_are_lost_are_named() -> None:
    """One may be, which a first rank has noted before it was lost, or stopped, in it; no more."""
    first = {"who": "a", "rank": 0, "size": 1, "weights": [0.0]}
    log = [{**first, "start": 0}, *({**first, "commit": step} for step in (10, 20, 30))]
    stopped = [{**first, "broken": 30}]
    for who, more, newest in (("a", [], [30]), ("a", stopped, [20, 30]), ("b", [], [20, 30])):
        for start in (0, 10, 20, 30):
            again = {**first, "who": who, "start": start}
            _, wrong, _ = unequal_commits([*log, *more, again], "pipe-sgd", 1, LR)
            lost = f"a start at step {start}, after commits at [0, 10, 20, 30]"
            assert (lost in wrong) == (start not in newest), (who, start)


def test_descriptors_that_go_on_growing_are_named() -> None:
    starts = [
        {"start": 0, "who": "h1-7", "size": size, "files": files}
        for size, files in [(3, 19), (2, 15), (3, 20), (2, 15), (3, 20), (2, 16), (3, 20)]
    ]
    assert grown_files(starts) == [
        "h1-7: open descriptors at its starts among 2 workers: [15, 15, 16]"
    ]
    assert grown_files(starts[:5]) == []
