"""Which messages a step leaves to the next one."""

from __future__ import annotations

import doctest

import numpy as np

from hvd_pipe.planning import deferral
from hvd_pipe.planning.deferral import deferring_plan, first_deferred
from hvd_pipe.planning.plan import Plan
from hvd_pipe.planning.trials import Gradients, Trial


def test_doctests() -> None:
    tried = doctest.testmod(deferral)
    assert tried.attempted
    assert not tried.failed


def test_what_may_arrive_after_the_next_forward_pass_has_begun() -> None:
    def late(count: int, *order: int) -> tuple[int, ...]:
        plan = Plan(tuple((str(i),) for i in range(count)), "given", order=order)
        return order[first_deferred(plan) :]

    assert late(3, 0, 1, 2) == ()
    assert late(3, 2, 1, 0) == (1, 0)
    assert late(3, 0, 1, 0, 2, 1, 2, 1, 0) == (1, 0)
    assert late(1, 0, 0, 0) == ()


def trials_of(forward_s: float, wait_s: float) -> tuple[list[Trial], Gradients]:
    names = [f"layer {i}" for i in reversed(range(8))]
    gradients = Gradients(names, np.arange(8.0), np.arange(8.0, 0.0, -1.0))
    single = Plan((tuple(names),), "single")
    backward_s = 7.0
    return [Trial(single, forward_s + backward_s + wait_s, wait_s)], gradients


def test_a_deferring_plan_follows_from_what_trials_have_shown() -> None:
    """One message that is sent when all is ready waits for as long as it takes."""
    tried, gradients = trials_of(forward_s=6.0, wait_s=24.0)
    plan = deferring_plan(tried, gradients)
    assert plan is not None
    assert plan.order is not None
    assert sorted(plan.names) == sorted(gradients.names)
    assert plan.predicted_s is not None
    assert plan.predicted_s < tried[0].step_s
    late = {plan.buckets[i] for i in plan.order[first_deferred(plan) :]}
    first_needed = max(zip(gradients.ready_s, gradients.names, strict=True))[1]
    assert late
    assert not any(first_needed in bucket for bucket in late)


def test_no_plan_defers_where_little_waits_or_no_forward_is_left() -> None:
    assert deferring_plan(*trials_of(forward_s=6.0, wait_s=0.1)) is None
    assert deferring_plan(*trials_of(forward_s=0.0, wait_s=7.0)) is None
