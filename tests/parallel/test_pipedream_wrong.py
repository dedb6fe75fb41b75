"""Mistakes in PyTorch's PipeDream: each ends in a message on every rank, and none in a hang."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import workers_pipedream_wrong
from cases import of_case
from faults import NEVER_S, TIMEOUT_S, Job
from pipeline_problem import plan
from ranks import once, run_ranks
from test_pipedream import assert_equal
from workers_pipedream import Case, expected
from workers_pipedream_wrong import NAMED, UNLIKE, WRONG

SCRIPT = Path(workers_pipedream_wrong.__file__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where plans are saved."""
    return tmp_path_factory.mktemp("plans")


@once
def wrong(folder: Path) -> list[Any]:
    return run_ranks(2, workers_pipedream_wrong.run_wrong, folder)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_on_every_rank(name: str, folder: Path) -> None:
    """With a reason; a rank that hears of it from rank 0 gets that reason, too."""
    first, second = of_case(wrong(folder), f"wrong {name}")
    assert first[0] == WRONG[name].error, first
    assert second[0] in {WRONG[name].error, "HvdPipeError"}, second
    for _, text in (first, second):
        assert WRONG[name].says in text


@pytest.mark.parametrize("name", UNLIKE)
def test_ranks_with_other_arguments_are_told(name: str, folder: Path) -> None:
    errors = [error for error, _ in of_case(wrong(folder), f"unlike {name}")]
    own = {"one stranger": "ValueError"}.get(name, "TypeError")
    own = own if name.startswith("one ") else "RanksDisagreeError"
    assert errors == ["RanksDisagreeError", own]


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [("no len", "TypeError", "has no len()"), ("empty", "ValueError", "no minibatches")],
)
def test_loaders_that_cannot_be(name: str, error: str, says: str, folder: Path) -> None:
    for kind, text in of_case(wrong(folder), name):
        assert kind == error
        assert says in text


@pytest.mark.parametrize("what", NAMED)
def test_plans_by_name(what: str, folder: Path) -> None:
    """The profile's times cut the model before the LSTM, as the plan that is given does."""
    for rank in of_case(wrong(folder), f"plan {what}"):
        assert_equal(rank, expected(Case(plan("1-1"))))


def test_a_closed_pipeline_says_so_and_another_one_runs(folder: Path) -> None:
    for (first, second), said in of_case(wrong(folder), "closed"):
        assert first == second
        assert "closed: make another" in said


def test_loaders_of_unlike_lengths() -> None:
    for kind, text in run_ranks(3, workers_pipedream_wrong.unlike, "length"):
        assert kind == "RanksDisagreeError"
        assert "the number of minibatches: rank 0 has 7; rank 1 has 6" in text


@pytest.mark.parametrize(
    ("what", "rank", "says"),
    [
        ("order", 2, "the first and the last stage read different minibatches"),
        ("shape", 0, "stage 0 replica 0: tensor 'tanh' was planned as float64 (14, 4, 6)"),
        ("dtype", 0, ""),  # the words are torch's
    ],
)
def test_minibatches_that_cannot_be(what: str, rank: int, says: str) -> None:
    """The rank that sees it says why; no other waits for ever."""
    told = run_ranks(3, workers_pipedream_wrong.unlike, what)
    assert says in told[rank][1]
    assert all(kind for kind, _ in told), told


@pytest.mark.parametrize(("wrong", "culprit"), [("loss", 2), ("loader", 0)])
@pytest.mark.parametrize("launcher", ["mpi", "gloo"])
def test_a_rank_raises_in_an_epoch(launcher: str, wrong: str, culprit: int) -> None:
    """Horovod's end ends the others' waits over MPI; over Gloo the watch does, before Gloo."""
    limit_s = NEVER_S if launcher == "mpi" else TIMEOUT_S
    with Job(launcher, "stash", wrong, timeout_s=limit_s, ranks=3, script=SCRIPT) as job:
        job.started()
        job.ended()
        assert job.launched.returncode != 0
        job.told_who_raised(culprit, "ValueError: bad sample 17")


@pytest.mark.parametrize("mode", ["stash", "flush"])
def test_a_rank_is_stopped(mode: str) -> None:
    with Job("mpi", mode, timeout_s=TIMEOUT_S, ranks=3, script=SCRIPT) as job:
        job.started()
        os.kill(job.pid(1), signal.SIGSTOP)
        job.ended()
        assert job.launched.returncode != 0
        assert "lost: rank 1 on " in job.output, job.output
