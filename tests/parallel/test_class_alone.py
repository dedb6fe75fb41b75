"""A script that changes nothing but the class of its optimizer: all else is Horovod's own."""

from __future__ import annotations

import numpy as np
import pytest
import workers_class_alone as job
from cases import of_case
from ranks import once, run_ranks
from workers_resume import Case

results = once(lambda: run_ranks(2, job.run, timeout=150))
restarts = once(lambda: run_ranks(2, job.run_restarts, timeout=120))


def assert_equal(one: list[job.Array], other: list[job.Array]) -> None:
    """Bit for bit."""
    assert len(one) == len(other)
    wrong = [
        i for i, (x, y) in enumerate(zip(one, other, strict=True)) if not np.array_equal(x, y)
    ]
    assert not wrong, f"rows {wrong} of {len(one)} differ"


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("case", job.RESUMED, ids=str)
def test_a_state_that_rank_0_alone_has_loaded(case: Case, before: int) -> None:
    """Horovod's broadcast made a step on the ranks without a state, and on those only: a hang.

    It does not know of a gradient in flight or of a plan either, which rank 0 then had alone.
    """
    for whole, resumed in of_case([each for _, each in results()], f"{before} before: {case}"):
        assert_equal(resumed, whole)


@pytest.mark.parametrize("name", ["adamw-groups", "sgd"])
def test_a_broadcast_before_the_first_step(name: str) -> None:
    """Horovod's broadcast called step() for a state, which averaged zeros and decayed weights."""
    ranks = of_case([each for _, each in results()], ("fresh", name))
    for before, after, rate, trained in ranks:
        np.testing.assert_array_equal(before, after)
        assert rate == 0.125
        assert not np.array_equal(trained, after)
        np.testing.assert_array_equal(trained, ranks[0][-1])


def test_names_of_parameters() -> None:
    """Scripts read them from ``_parameter_names``, which ours lacked."""
    first, second = of_case([each for _, each in results()], "names")
    assert first == second
    assert len(set(first[0])) == 6
    assert first[1]


def test_step_after_synchronize_is_told_in_horovods_words() -> None:
    """Scripts look for Horovod's words, which ours did not have."""
    for texts in of_case([each for _, each in results()], "warned"):
        assert "optimizer.step() called without optimizer.skip_synchronize()" in texts[0]


@pytest.mark.parametrize("strategy", job.STRATEGIES)
def test_ranks_that_join_after_unlike_steps(strategy: str) -> None:
    """Horovod's join left Pipe-SGD's pending gradient to be waited for, and plans out of step."""
    first, second = (
        tuple(-w / job.LR for w in weights)
        for weights in of_case([each for _, each in results()], ("joined", strategy))
    )
    alone = (job.LATE - job.EARLY) * (1.0 if strategy.startswith("cocod") else 0.5)
    more = float(job.MORE)
    if strategy.startswith("cocod"):
        assert first[1] == second[1]
    else:
        assert first[:2] == (job.EARLY, job.EARLY)
        assert second[:2] == (job.EARLY + alone, job.EARLY + alone)
    assert first[2] == first[1] + more
    assert second[2] == second[1] + more


def test_messages_of_the_scripts_own() -> None:
    for total, weight in of_case([each for _, each in results()], "mixed"):
        assert total == 5 * (1.0 + 1.0)
        assert -weight / job.LR == 5


def test_init_once_more() -> None:
    assert of_case([each for _, each in results()], "init again") == [-6 * job.LR] * 2


def test_ranks_watch_each_other_from_the_first_optimizer_on() -> None:
    """hvd_pipe.torch.init() began to watch, which such a script does not call."""
    assert all(watches for watches, _ in results())


@pytest.mark.parametrize("case", job.RESTARTED, ids=str)
def test_horovod_may_end_and_start_again(case: Case) -> None:
    """An optimizer went on with messages of a Horovod that had ended."""
    for whole, rows in of_case(restarts(), str(case)):
        assert_equal(rows, whole)


def test_ranks_watch_each_other_again() -> None:
    assert all(result["watched"] for result in restarts())
