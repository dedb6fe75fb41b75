"""Gradients of several dtype groups on one link, against all plans and each group alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, combinations, permutations, product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import comm_models

from hvd_pipe.planning import merge
from hvd_pipe.planning import merge as module
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.merge import plan_dtype_groups
from hvd_pipe.planning.plan import Plan

FloatArray = npt.NDArray[np.float64]
Case = tuple[list[str], FloatArray, FloatArray, list[str]]


@st.composite
def cases(draw: st.DrawFn, most: int = 6) -> Case:
    """Names, ready times in quarters, sizes, and a group for each."""
    tensor = st.tuples(st.integers(0, 8), st.integers(0, 200), st.sampled_from("abc"))
    tensors = draw(st.lists(tensor, min_size=1, max_size=most))
    ready = np.array(list(accumulate(gap * 0.25 for gap, _, _ in tensors)))
    sizes = np.array([float(size) for _, size, _ in tensors])
    return [f"t{i}" for i in range(len(tensors))], ready, sizes, [group for *_, group in tensors]


def finish(plan: Plan, case: Case, comm: CommModel) -> float:
    """Carry the plan out, bucket by bucket, in its order."""
    names, ready, sizes, _ = case
    place = {name: i for i, name in enumerate(names)}
    last = 0.0
    for bucket in plan.buckets:
        at = [place[name] for name in bucket]
        last = max(last, float(ready[at].max())) + comm(float(sizes[at].sum()))
    return last


def runs(places: list[int]) -> list[list[list[int]]]:
    """Every way to cut a group's tensors into buckets."""
    cuts = range(1, len(places))
    return [
        [places[a:b] for a, b in zip((0, *chosen), (*chosen, len(places)), strict=True)]
        for count in range(len(places))
        for chosen in combinations(cuts, count)
    ]


def best_of_all(case: Case, comm: CommModel) -> float:
    """The earliest finish over all buckets and all orders of sending them."""
    names, _, _, groups = case
    own = [
        [i for i, group in enumerate(groups) if group == label] for label in sorted(set(groups))
    ]
    best = float("inf")
    for chosen in product(*map(runs, own)):
        buckets = [tuple(names[i] for i in bucket) for groups in chosen for bucket in groups]
        for order in permutations(buckets):
            best = min(best, finish(Plan(order, "given"), case, comm))
    return best


@given(cases(most=5), comm_models())
def test_no_buckets_in_no_order_are_faster(case: Case, comm: CommModel) -> None:
    comm = replace(comm, blocking=False)  # else a plan is for an upper bound
    plan = plan_dtype_groups(*case, comm)
    assert finish(plan, case, comm) == pytest.approx(best_of_all(case, comm), rel=1e-12)


@given(cases(12), comm_models(), st.sampled_from(["exact", "greedy", "wfbp", "single", "bytes"]))
def test_plans_are_plans(case: Case, comm: CommModel, method: str) -> None:
    names, ready, _, groups = case
    limit = 100 if method == "bytes" else None
    plan = plan_dtype_groups(*case, comm, method, bucket_bytes=limit)
    group_of = dict(zip(names, groups, strict=True))
    assert sorted(plan.names) == sorted(names)
    assert all(len({group_of[name] for name in bucket}) == 1 for bucket in plan.buckets)
    arrival = finish(plan, case, comm) + comm.delay
    blocking, comm = comm.blocking, replace(comm, blocking=False)
    if blocking:  # messages that are negotiated together have the delay once, not never or each
        assert plan.predicted_s is not None
        bound = finish(plan, case, replace(comm, blocking=True).each_alone())
        assert arrival * (1 - 1e-12) <= plan.predicted_s <= bound * (1 + 1e-12)
        return
    assert plan.predicted_s == pytest.approx(arrival, rel=1e-12)
    assert plan.exposed_s == pytest.approx(arrival - ready[-1])
    exact = plan_dtype_groups(*case, comm)
    assert finish(exact, case, comm) <= finish(plan, case, comm) * (1 + 1e-9)


@given(cases(12), comm_models())
def test_one_kind_is_the_plain_problem(case: Case, comm: CommModel) -> None:
    names, ready, sizes, _ = case
    assert plan_dtype_groups(names, ready, sizes, ["x"] * len(names), comm) == merge.plan(
        names, ready, sizes, comm
    )


def mixed(count: int, seed: int = 0) -> Case:
    """Half precision for most of the bytes, full precision for every third, small tensor."""
    rng = np.random.default_rng(seed)
    ready = np.cumsum(rng.exponential(1e-3, count))
    groups = ["full" if i % 3 == 2 else "half" for i in range(count)]
    large = np.floor(rng.lognormal(12, 1.5, count))
    sizes = np.where(np.array(groups) == "full", 2048.0, large)
    return [f"t{i}" for i in range(count)], ready, sizes, groups


def each_alone(case: Case, comm: CommModel) -> Plan:
    """What planning each group as if it had the link leads to, sent by readiness."""
    names, ready, sizes, groups = case
    buckets: list[tuple[str, ...]] = []
    for group in dict.fromkeys(groups):
        at = [i for i, other in enumerate(groups) if other == group]
        own = merge.plan([names[i] for i in at], ready[at], sizes[at], comm)
        buckets += own.buckets
    moment = dict(zip(names, ready.tolist(), strict=True))
    return Plan(tuple(sorted(buckets, key=lambda b: max(moment[n] for n in b))), "each")


@pytest.mark.parametrize("latency", [1e-5, 1e-3, 1e-2])
def test_too_many_for_the_programme_lose_little(
    latency: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above MAX_STATES runs of tensors count as one: at most their span is lost."""
    case, comm = mixed(90), CommModel.linear(latency, 1e-9)
    best = finish(plan_dtype_groups(*case, comm), case, comm)
    monkeypatch.setattr(module, "MAX_STATES", 200)
    coarse = finish(plan_dtype_groups(*case, comm), case, comm)
    assert best <= coarse * (1 + 1e-12)
    assert coarse <= finish(each_alone(case, comm), case, comm) * (1 + 1e-12)
    longest = 0.0
    for label in ("half", "full"):
        own = case[1][[group == label for group in case[3]]]
        ends = module._within(own, 0.02)
        assert len(ends) <= len(own)
        starts = np.concatenate(([0], ends[:-1]))
        longest = max(longest, float((own[ends - 1] - own[starts]).max()))
    assert longest <= 0.02
    assert coarse <= best + 0.03


def test_margin_and_bad_arguments() -> None:
    case, comm = mixed(60), CommModel.linear(1e-3, 1e-9)
    slow = comm.scaled(1.0, 1.25)
    safe = plan_dtype_groups(*case, comm, margin=0.25)
    assert finish(safe, case, slow) == pytest.approx(
        finish(plan_dtype_groups(*case, slow), case, slow)
    )
    assert safe.predicted_s == pytest.approx(finish(safe, case, comm))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": ["a"]}, r"2 names, 1 groups, 2 times"),
        ({"names": ["a"]}, r"1 names, 2 groups, 2 times"),
        ({"method": "bytes"}, r"bucket_bytes belongs to the method 'bytes'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "names": ["a", "b"],
        "ready": [1.0, 2.0],
        "bytes": [8, 8],
        "groups": ["half", "full"],
        "comm": CommModel.linear(1.0, 1.0),
    }
    with pytest.raises(ValueError, match=message):
        plan_dtype_groups(**{**good, **arguments})
