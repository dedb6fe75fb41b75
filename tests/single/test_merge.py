"""Plans: the exact dynamic program against all plans there are, and against the published rule."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, combinations, pairwise, permutations, product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import comm_models

from hvd_pipe.planning import merge
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.merge import (
    by_bytes,
    coalesce,
    exact,
    finish_times,
    greedy,
    plan,
    plan_dtype_groups,
    single,
    sizes_of,
    wfbp,
)
from hvd_pipe.planning.plan import Plan

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def finish(sizes: IntArray, ready: FloatArray, nbytes: FloatArray, comm: CommModel) -> float:
    return float(finish_times(sizes, ready, nbytes, comm)[-1])


def runs(places: list[int]) -> list[list[list[int]]]:
    """Every way to cut a group's tensors into buckets."""
    return [
        [places[a:b] for a, b in pairwise((0, *chosen, len(places)))]
        for count in range(len(places))
        for chosen in combinations(range(1, len(places)), count)
    ]


def random_table(rng: np.random.Generator, segments: int, last: float) -> CommModel:
    """A model with jumps, flat parts and bends, as real networks have them."""
    starts = np.concatenate(([0], np.sort(rng.choice(int(last), segments - 1, replace=False)) + 1))
    slopes = rng.choice([0.0, 1.0, 5.0], segments) * rng.random(segments) * 1e-9
    intercepts = [float(rng.random() * 1e-3)]
    for k in range(1, segments):
        jump = rng.choice([0.0, 5e-4]) * rng.random()
        before = intercepts[-1] + slopes[k - 1] * starts[k]
        intercepts.append(float(before + jump - slopes[k] * starts[k]))
    return CommModel(tuple(starts), tuple(intercepts), tuple(slopes))


@st.composite
def tied_models(draw: st.DrawFn) -> CommModel:
    """Lines and tables in small integers, so that ties are frequent and sums are exact."""
    units = st.integers(0, 5)
    starts, intercepts, slopes = [0], [draw(units)], [draw(units)]
    for gap in draw(st.lists(st.integers(1, 6), max_size=4)):
        start, slope = starts[-1] + gap, draw(units)
        before = intercepts[-1] + slopes[-1] * start
        starts.append(start)
        intercepts.append(before + draw(units) - slope * start)
        slopes.append(slope)
    return CommModel(tuple(starts), tuple(intercepts), tuple(slopes))


@st.composite
def instances(draw: st.DrawFn) -> tuple[FloatArray, FloatArray, CommModel]:
    tensors = draw(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), min_size=1, max_size=8)
    )
    gaps, nbytes = np.array(tensors, dtype=np.float64).T
    return np.cumsum(gaps), nbytes, draw(tied_models())


@given(instances())
def test_exact_is_the_best_of_all_plans(case: tuple[FloatArray, FloatArray, CommModel]) -> None:
    plans = ([len(bucket) for bucket in cut] for cut in runs(list(range(len(case[0])))))
    best = min(finish(np.array(sizes), *case) for sizes in plans)
    assert finish(exact(*case), *case) == best
    for other in (greedy, wfbp, single):
        assert finish(other(*case), *case) >= best


@given(instances())
def test_coalescing_costs_nothing(case: tuple[FloatArray, FloatArray, CommModel]) -> None:
    for rule in (exact, wfbp, greedy):
        sizes = rule(*case)
        fewer = coalesce(sizes, *case)
        assert finish(fewer, *case) <= finish(sizes, *case)
        assert set(np.cumsum(fewer)) <= set(np.cumsum(sizes))


def quadratic(ready: FloatArray, nbytes: FloatArray, comm: CommModel) -> float:
    """The recurrence as it is written, over every i."""
    total = np.concatenate(([0.0], np.cumsum(nbytes)))
    f = np.zeros(len(ready) + 1)
    for j in range(1, len(f)):
        f[j] = np.min(np.maximum(f[:j], ready[j - 1]) + comm(total[j] - total[:j]))
    return float(f[-1])


@pytest.mark.parametrize("pace", [0.0, 1e-5, 1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("segments", [1, 3, 18, 200])
def test_exact_skips_nothing_that_matters(pace: float, segments: int) -> None:
    """From communication-bound to compute-bound, where whole slices are never looked at."""
    rng = np.random.default_rng(segments)
    for _ in range(4):
        ready = np.cumsum(rng.exponential(pace, 300))
        nbytes = np.floor(rng.lognormal(9, 2, 300))
        comm = random_table(rng, segments, last=2e6)
        found = finish(exact(ready, nbytes, comm), ready, nbytes, comm)
        assert found == pytest.approx(quadratic(ready, nbytes, comm), rel=1e-12)


def algorithm_1(ready: FloatArray, nbytes: FloatArray, a: float, b: float) -> list[int]:
    """The paper's Algorithm 1 as printed, O(L^2), layers l = L..1 in the order of backward."""
    count = len(ready)
    p, merged = nbytes.copy(), np.zeros(count, dtype=bool)  # index 0 is layer L

    def starts() -> FloatArray:
        time = np.where(merged, 0.0, a + b * p)
        tau = np.zeros(count)
        tau[0] = ready[0]
        for at in range(1, count):
            tau[at] = max(tau[at - 1] + time[at - 1], ready[at])
        return tau

    tau = starts()
    for at in range(count - 1):
        if ready[at + 1] < tau[at] + a:
            merged[at] = True
            p[at + 1] += p[at]
            p[at] = 0.0
            tau = starts()
    ends = [0, *(int(at) + 1 for at in np.flatnonzero(~merged))]
    return [end - start for start, end in pairwise(ends)]


@given(instances(), st.integers(0, 5), st.integers(0, 5))
def test_greedy_is_the_papers_algorithm(
    case: tuple[FloatArray, FloatArray, CommModel], a: int, b: int
) -> None:
    ready, nbytes, _ = case
    found = greedy(ready, nbytes, CommModel.linear(a, b))
    assert found.tolist() == algorithm_1(ready, nbytes, float(a), float(b))


@given(instances(), st.sampled_from([0.05, 0.25, 1.0]), st.sampled_from([0.0, 0.5, 1.0]))
def test_a_margin_holds_on_every_link_up_to_it(
    case: tuple[FloatArray, FloatArray, CommModel], margin: float, part: float
) -> None:
    """No later than what is best on the slowest such link is there."""
    ready, nbytes, comm = case
    sizes = sizes_of(ready, nbytes, comm, margin=margin)
    slowest, between = comm.scaled(1.0, 1 + margin), comm.scaled(1.0, 1 + part * margin)
    best = finish(exact(ready, nbytes, slowest), ready, nbytes, slowest)
    assert finish(sizes, ready, nbytes, between) <= best * (1 + 1e-12)


@pytest.mark.parametrize(
    ("nbytes", "limit", "sizes"),
    [
        ([4, 4, 4], 12, [3]),
        ([4, 4, 4], 11, [2, 1]),
        ([20, 1, 1, 20, 1], 8, [1, 2, 1, 1]),
        ([0, 0, 8, 0], 8, [4]),
    ],
)
def test_by_bytes(nbytes: list[int], limit: int, sizes: list[int]) -> None:
    assert by_bytes(nbytes, limit).tolist() == sizes


LINE = CommModel.linear(1.0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"names": ["a"]}, r"names, ready and bytes must agree: 1 names, 2 times"),
        ({"bytes": [1]}, r"of one length and not empty, got shapes \(2,\) and \(1,\)"),
        ({"ready": [], "bytes": []}, r"not empty"),
        ({"ready": [2, 1]}, r"tensor 0 is ready at 2 s and tensor 1 at 1 s; sort the tensors"),
        ({"ready": [-1, 1]}, r"finite and not negative, got -1 s"),
        ({"bytes": [1, -8]}, r"bytes must be finite and not negative, got -8"),
        ({"method": "magic"}, r"one of exact, greedy, wfbp, single, bytes; got 'magic'"),
        ({"method": "bytes"}, r"belongs to the method 'bytes', got method 'bytes' and .* None"),
        ({"bucket_bytes": 8}, r"belongs to the method 'bytes', got method 'exact' and .* 8"),
        ({"method": "bytes", "bucket_bytes": 0}, r"bucket_bytes must be at least 1, got 0"),
        ({"margin": -0.1}, r"margin must be finite and at least 0, .* got -0.1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"names": ["a", "b"], "ready": [1, 2], "bytes": [1, 2], "comm": LINE}
    with pytest.raises(ValueError, match=message):
        plan(**{**good, **arguments})


@given(instances(), st.integers(0, 36).map(lambda quarters: quarters / 4))
def test_no_message_ends_later_than_with_the_delay_in_each(
    case: tuple[FloatArray, FloatArray, CommModel], delay: float
) -> None:
    """What plans for a blocking backend count on is an upper bound, with every plan."""
    ready, nbytes, comm = case
    blocking = replace(comm, delay=delay, blocking=True)
    for sizes in (wfbp(ready, nbytes, comm), sizes_of(ready, nbytes, blocking)):
        found = finish_times(sizes, ready, nbytes, blocking)
        bound = finish_times(sizes, ready, nbytes, blocking.each_alone())
        assert (found <= bound).all()
        assert (found >= finish_times(sizes, ready, nbytes, comm) + delay).all()


def test_a_blocking_delay_is_in_every_message_of_a_plan() -> None:
    """Fewer messages where they would queue, and no fewer where one would wait for the next."""
    ready, nbytes, net = [1.0, 2.0], [4.0, 4.0], CommModel((0.0,), (0.0,), (0.5,), delay=2.0)
    assert sizes_of(ready, nbytes, net).tolist() == [1, 1]
    blocking = replace(net, blocking=True)
    assert sizes_of(ready, nbytes, blocking).tolist() == [2]
    made = plan("ab", ready, nbytes, blocking)
    assert (made.predicted_s, made.exposed_s) == (8.0, 6.0)  # 2 + 2 + 4
    assert finish_times([1, 1], ready, nbytes, blocking).tolist() == [5.0, 9.0]
    apart = replace(blocking, delay=3.0)
    assert sizes_of([0.0, 10.0], nbytes, apart).tolist() == [1, 1]  # ends at 15, else at 17


Case = tuple[list[str], FloatArray, FloatArray, list[str]]


@st.composite
def cases(draw: st.DrawFn, most: int = 6) -> Case:
    """Names, ready times in quarters, sizes, and a group for each."""
    tensor = st.tuples(st.integers(0, 8), st.integers(0, 200), st.sampled_from("abc"))
    tensors = draw(st.lists(tensor, min_size=1, max_size=most))
    ready = np.array(list(accumulate(gap * 0.25 for gap, _, _ in tensors)))
    sizes = np.array([float(size) for _, size, _ in tensors])
    return [f"t{i}" for i in range(len(tensors))], ready, sizes, [group for *_, group in tensors]


def carried_out(plan: Plan, case: Case, comm: CommModel) -> float:
    """Carry the plan out, bucket by bucket, in its order."""
    names, ready, sizes, _ = case
    place = {name: i for i, name in enumerate(names)}
    last = 0.0
    for bucket in plan.buckets:
        at = [place[name] for name in bucket]
        last = max(last, float(ready[at].max())) + comm(float(sizes[at].sum()))
    return last


def best_of_all(case: Case, comm: CommModel) -> float:
    """The earliest carried_out over all buckets and all orders of sending them."""
    names, _, _, groups = case
    own = [
        [i for i, group in enumerate(groups) if group == label] for label in sorted(set(groups))
    ]
    best = float("inf")
    for chosen in product(*map(runs, own)):
        buckets = [tuple(names[i] for i in bucket) for groups in chosen for bucket in groups]
        for order in permutations(buckets):
            best = min(best, carried_out(Plan(order, "given"), case, comm))
    return best


@given(cases(most=5), comm_models())
def test_no_buckets_in_no_order_are_faster(case: Case, comm: CommModel) -> None:
    comm = replace(comm, blocking=False)  # else a plan is for an upper bound
    plan = plan_dtype_groups(*case, comm)
    assert carried_out(plan, case, comm) == pytest.approx(best_of_all(case, comm), rel=1e-12)


@given(cases(12), comm_models(), st.sampled_from(["exact", "greedy", "wfbp", "single", "bytes"]))
def test_plans_are_plans(case: Case, comm: CommModel, method: str) -> None:
    names, ready, _, groups = case
    limit = 100 if method == "bytes" else None
    plan = plan_dtype_groups(*case, comm, method, bucket_bytes=limit)
    group_of = dict(zip(names, groups, strict=True))
    assert sorted(plan.names) == sorted(names)
    assert all(len({group_of[name] for name in bucket}) == 1 for bucket in plan.buckets)
    arrival = carried_out(plan, case, comm) + comm.delay
    blocking, comm = comm.blocking, replace(comm, blocking=False)
    if blocking:  # messages that are negotiated together have the delay once, not never or each
        assert plan.predicted_s is not None
        bound = carried_out(plan, case, replace(comm, blocking=True).each_alone())
        assert arrival * (1 - 1e-12) <= plan.predicted_s <= bound * (1 + 1e-12)
        return
    assert plan.predicted_s == pytest.approx(arrival, rel=1e-12)
    assert plan.exposed_s == pytest.approx(arrival - ready[-1])
    exact = plan_dtype_groups(*case, comm)
    assert carried_out(exact, case, comm) <= carried_out(plan, case, comm) * (1 + 1e-9)


def mixed(count: int, seed: int = 0) -> Case:
    """Half precision for most of the bytes, full precision for every third, small tensor."""
    rng = np.random.default_rng(seed)
    ready = np.cumsum(rng.exponential(1e-3, count))
    groups = ["full" if i % 3 == 2 else "half" for i in range(count)]
    large = np.floor(rng.lognormal(12, 1.5, count))
    sizes = np.where(np.array(groups) == "full", 2048.0, large)
    return [f"t{i}" for i in range(count)], ready, sizes, groups


@pytest.mark.parametrize("latency", [1e-5, 1e-3, 1e-2])
def test_too_many_for_the_programme_lose_little(
    latency: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above MAX_STATES runs of tensors count as one: at most their span is lost."""
    case, comm = mixed(90), CommModel.linear(latency, 1e-9)
    best = carried_out(plan_dtype_groups(*case, comm), case, comm)
    monkeypatch.setattr(merge, "MAX_STATES", 200)
    coarse = carried_out(plan_dtype_groups(*case, comm), case, comm)
    assert best <= coarse * (1 + 1e-12)
    assert coarse <= best + 0.002


def test_a_plan_with_a_margin_is_the_best_on_the_slower_link() -> None:
    case, comm = mixed(60), CommModel.linear(1e-3, 1e-9)
    slow = comm.scaled(1.0, 1.25)
    safe = plan_dtype_groups(*case, comm, margin=0.25)
    best = carried_out(plan_dtype_groups(*case, slow), case, slow)
    assert carried_out(safe, case, slow) == pytest.approx(best)
    assert safe.predicted_s == pytest.approx(carried_out(safe, case, comm))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": ["a"]}, r"2 names, 1 groups, 2 times"),
        ({"names": ["a"]}, r"1 names, 2 groups, 2 times"),
        ({"method": "bytes"}, r"bucket_bytes belongs to the method 'bytes'"),
    ],
)
def test_bad_groups(arguments: dict[str, Any], message: str) -> None:
    good = {"names": "ab", "ready": [1.0, 2.0], "bytes": [8, 8], "groups": "hf", "comm": LINE}
    with pytest.raises(ValueError, match=message):
        plan_dtype_groups(**{**good, **arguments})
