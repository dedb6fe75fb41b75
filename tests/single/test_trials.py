"""Plans that are tried in training: what their waits say of messages, and which one stays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_pipe.planning import merge
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.plan import Plan
from hvd_pipe.planning.tuner import (
    TRIAL_STEPS,
    Gradients,
    Trial,
    Tuner,
    fitted_to_waits,
    next_given,
    next_plan,
)

COMPUTE_S = 1.0


class Job:
    """Training with gradients in order of readiness, on a link that the planner does not know."""

    def __init__(self, ready: list[float], sizes: list[float], link: CommModel) -> None:
        names = [f"g{i}" for i in range(len(ready))]
        self.gradients = Gradients(names, np.array(ready), np.array(sizes))
        self.link = link

    def find(self, comm: CommModel, method: str, limit: int | None) -> Plan:
        names, ready, sizes = self.gradients.names, self.gradients.ready_s, self.gradients.bytes
        return merge.plan(names, ready, sizes, comm, method, limit)

    def trial(self, plan: Plan) -> Trial:
        counts = [len(bucket) for bucket in plan.buckets]
        ready, sizes = self.gradients.ready_s, self.gradients.bytes
        wait = merge.finish_times(counts, ready, sizes, self.link)[-1] - ready[-1]
        return Trial(plan, COMPUTE_S + wait, wait)

    def run(self, first: Plan, **options: object) -> tuple[list[Trial], Plan]:
        tried = [self.trial(first)]
        while True:
            plan, stays = next_plan(tried, self.gradients, self.find, **options)  # type: ignore[arg-type]
            if stays:
                return tried, plan
            tried.append(self.trial(plan))


def resnet(link: CommModel) -> Job:
    """160 gradients, small ones first computed last, all within 0.7 of a step."""
    sizes = np.geomspace(4e5, 1e3, 160)
    return Job(np.linspace(0.0, 0.7, 160).tolist(), sizes.tolist(), link)


TOTAL = float(np.geomspace(4e5, 1e3, 160).sum())
LINKS = [
    CommModel.linear(alpha, r * COMPUTE_S / TOTAL)
    for alpha in (0.0, 0.001, 0.01, 0.05)
    for r in (0.5, 1.0, 4.0)
]


@pytest.mark.parametrize("link", LINKS, ids=lambda link: f"{link.latency}-{link(TOTAL):.2f}")
def test_the_plan_that_stays_is_as_good_as_if_the_link_were_known(link: CommModel) -> None:
    job = resnet(link)
    tried, plan = job.run(job.find(link, "bytes", 2_000_000))
    best = job.trial(job.find(link, "exact", None))
    assert job.trial(plan).step_s <= 1.01 * best.step_s
    assert len(tried) <= 4
    assert plan.tried == tuple((len(each.plan.buckets), each.step_s) for each in tried)
    assert job.trial(plan).step_s == min(each.step_s for each in tried)


@given(
    st.floats(0.0, 0.1),
    st.floats(0.01, 10.0),
    st.lists(st.tuples(st.floats(0.0, 0.2), st.floats(1.0, 100.0)), min_size=3, max_size=9),
)
def test_waits_tell_what_a_message_costs(
    latency: float, seconds: float, drawn: list[tuple[float, float]]
) -> None:
    gaps, sizes = zip(*drawn, strict=True)
    job = Job(np.cumsum(gaps).tolist(), list(sizes), CommModel.linear(0.0, 0.0))
    job.link = CommModel.linear(latency, seconds / sum(sizes))
    tried = [job.trial(job.find(job.link, method, None)) for method in ("single", "wfbp")]
    found = fitted_to_waits(tried, job.gradients)
    for each in tried:
        counts = [len(bucket) for bucket in each.plan.buckets]
        times = merge.finish_times(counts, job.gradients.ready_s, job.gradients.bytes, found)
        assert times[-1] - job.gradients.ready_s[-1] == pytest.approx(each.wait_s, rel=0.04)
    # A single message waits a + b * sum of bytes, whatever a is.
    assert found(sum(sizes)) == pytest.approx(tried[0].wait_s, rel=1e-6)


@pytest.mark.parametrize("count", [1, 5, 6, 11, 13, 24, 25, 80])
def test_the_second_plan_is_unlike_the_first(count: int) -> None:
    """Two plans of about as many messages cannot tell latency from bandwidth."""
    job = Job(np.linspace(0.0, 0.6, 240).tolist(), [1e6] * 240, CommModel.linear(0.005, 4e-9))
    first = job.trial(job.find(job.link, "bytes", int(240e6 / count)))
    plan, stays = next_plan([first], job.gradients, job.find)
    assert not stays
    ratio = len(plan.buckets) / len(first.plan.buckets)
    assert ratio <= 0.5 or ratio >= 2


def test_the_first_plan_stays_where_others_are_faster_by_chance() -> None:
    job = resnet(LINKS[4])
    _, wanted = job.run(job.find(job.link, "bytes", 2_000_000))
    assert len(wanted.tried) > 2
    for error_s, first_stays in ((0.0, False), (1.0, True)):
        tried = [job.trial(job.find(job.link, "bytes", 2_000_000))]
        while True:
            plan, stays = next_plan(tried, job.gradients, job.find)
            if stays:
                break
            tried.append(replace(job.trial(plan), error_s=error_s))
        assert (len(plan.buckets) == len(tried[0].plan.buckets)) == first_stays


def test_many_messages_are_merged_at_once() -> None:
    """Without latency the best plan has a message a tensor, and pair by pair would take long."""
    ready = np.linspace(0.0, 0.7, 900).tolist()
    job = Job(ready, np.linspace(1e3, 2e5, 900).tolist(), CommModel.linear(0.0, 1.2e-8))
    tried = [job.trial(job.find(job.link, "single", None))]
    tried += [job.trial(job.find(job.link, "bytes", 10_000_000))]
    tried += [job.trial(job.find(job.link, "wfbp", None))]
    plan, stays = next_plan(tried, job.gradients, job.find)
    assert not stays
    assert len(plan.buckets) < 0.75 * 900


def test_a_burst_and_a_message_alone_are_told_apart() -> None:
    """Ten messages that follow each other pay the latency ten times."""
    ready = np.linspace(0.0, 1e-6, 10).tolist()
    job = Job(ready, [1e6] * 10, CommModel.linear(0.02, 1e-8))
    tried = [job.trial(job.find(job.link, method, None)) for method in ("single", "wfbp")]
    found = fitted_to_waits(tried, job.gradients)
    assert found.latency == pytest.approx(0.02, rel=0.1)


def test_where_nothing_waits_nothing_is_tried() -> None:
    job = resnet(CommModel.linear(0.0, 0.02 * COMPUTE_S / TOTAL))
    first = job.find(job.link, "bytes", 2_000_000)
    tried, plan = job.run(first)
    assert len(tried) == 1
    assert plan.buckets == first.buckets
    assert [count for count, _ in plan.tried] == [len(first.buckets)]
    assert plan.exposed_s == tried[0].wait_s


def test_a_plan_that_the_user_wants_needs_two_trials_and_stays() -> None:
    job = resnet(LINKS[4])
    tried, plan = job.run(job.find(job.link, "bytes", 2_000_000), method="greedy")
    assert (len(tried), plan.method) == (2, "greedy")
    comm = fitted_to_waits(tried, job.gradients)
    assert plan.buckets == job.find(comm, "greedy", None).buckets


def test_where_trials_are_dear_the_best_plan_is_the_last_to_be_tried() -> None:
    """A step of a graph is traced anew for each plan."""
    job = resnet(LINKS[4])
    tried, plan = job.run(job.find(job.link, "bytes", 2_000_000), most=3)
    assert (len(tried), plan.method) == (3, "exact")
    assert plan.tried == tuple((len(each.plan.buckets), each.step_s) for each in tried)
    assert job.trial(plan).step_s <= 1.01 * job.trial(job.find(job.link, "exact", None)).step_s


def test_the_buckets_that_stay_are_in_the_order_in_which_they_leave() -> None:
    """Training begins in reverse order of the parameters; gradients may come in another one."""
    job = Job([0.0, 0.4, 0.8], [1e6, 1e6, 1e6], CommModel.linear(1.0, 0.0))
    backwards = Plan((("g2",), ("g1",), ("g0",)), "bytes")
    tried = [Trial(backwards, 1.0, 0.001)]  # hidden
    plan, stays = next_plan(tried, job.gradients, job.find)
    assert stays
    assert plan.buckets == (("g0",), ("g1",), ("g2",))


@pytest.mark.parametrize("fastest", [0, 1, 2])
def test_the_fastest_stays_whatever_was_expected_of_it(fastest: int) -> None:
    job = resnet(LINKS[4])
    plan, stays = job.find(job.link, "bytes", 2_000_000), False
    tried: list[Trial] = []
    while not stays:
        tried.append(Trial(plan, 0.9 if len(tried) == fastest else 1.0, 0.5))
        plan, stays = next_plan(tried, job.gradients, job.find)
    assert len(tried) > fastest
    wanted = tried[fastest].plan.buckets
    assert set(map(frozenset, plan.buckets)) == set(map(frozenset, wanted))


def merged_into(count: int) -> Plan:
    """Twelve gradients in so many messages."""
    size = 12 // count
    buckets = tuple(tuple(f"g{i}" for i in range(k, k + size)) for k in range(0, 12, size))
    return Plan(buckets, "bytes")


@pytest.mark.parametrize(
    ("seen", "stays"),
    [
        ({12: (1.2, 0.0), 3: (1.1, 0.0), 1: (1.0, 0.0)}, 1),
        ({12: (1.0, 0.0), 3: (1.0, 0.0), 1: (1.1, 0.0)}, 3),
        ({12: (1.0, 0.0), 3: (1.2, 0.0), 1: (1.1, 0.0)}, 12),
        # No difference that can be told from noise is worth a message.
        ({12: (1.0, 0.03), 3: (1.2, 0.03), 1: (1.04, 0.03)}, 1),
        ({12: (1.0, 0.03), 3: (1.2, 0.03), 1: (1.05, 0.03)}, 12),
    ],
)
def test_the_fewest_messages_win_a_race_within_the_error(
    seen: dict[int, tuple[float, float]], stays: int
) -> None:
    plans, tried = [merged_into(count) for count in seen], list[Trial]()
    for plan, (step_s, error_s) in zip(plans, seen.values(), strict=True):
        assert next_given(plans, tried) == (plan, False)
        tried.append(Trial(plan, step_s, 0.0, error_s))
    plan, over = next_given(plans, tried)
    assert over
    assert plan.buckets == merged_into(stays).buckets
    assert plan.tried == tuple((count, step_s) for count, (step_s, _) in seen.items())


def test_a_plan_is_timed_anew_where_that_is_told() -> None:
    """Steps after the last one that was needed push the first ones out."""
    tuner = Tuner(list, lambda find: find(), begin=2)
    assert not any(tuner.end_step(step, 100.0 * step) for step in range(2 + TRIAL_STEPS))
    tuner.begin(50)
    assert not any(tuner.end_step(step, 2.0 * step) for step in range(40, 50 + TRIAL_STEPS))
    assert tuner.end_step(50 + TRIAL_STEPS, 2.0 * (50 + TRIAL_STEPS))
    assert tuner.end_step(51 + TRIAL_STEPS, 2.0 * (51 + TRIAL_STEPS))
    tuner.seen(merged_into(3), waits=[3.0, 1.0, 2.0])
    assert tuner.tried == [Trial(merged_into(3), 2.0, 2.0, 0.0)]
