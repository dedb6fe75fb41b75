"""CoCoD's fragments and nodes in plans: sizes, closed forms against simulated runs, limits."""

from __future__ import annotations

import doctest
import math
from fractions import Fraction
from itertools import product

import closed_forms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import codecs, comm_models

from hvd_pipe import cocod
from hvd_pipe.cocod import assign_fragments, split_batch
from hvd_pipe.planning.advise import advise
from hvd_pipe.planning.cluster import Cluster, Link, Network
from hvd_pipe.planning.comm import CodecCost, CommModel
from hvd_pipe.planning.messages import node_comm
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.planning.simulate import simulate
from hvd_pipe.planning.timing import step_time
from hvd_pipe.strategy import CoCoD, parse

# Forward 2, backward 4, update 1; the fragments have 10 and 2 bytes, T(10) = 3, T(2) = 1.
MODEL = ModelProfile(
    (LayerProfile("conv", 2, 3.0, 1.0), LayerProfile("fc", 10, 1.0, 1.0)), update_s=1.0
)
NET = CommModel.linear(0.5, 0.25)


def test_doctests() -> None:
    result = doctest.testmod(cocod, extraglobs={"parse": parse})
    assert result.failed == 0
    assert result.attempted > 0


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12), st.data())
def test_every_tensor_has_a_fragment_and_none_is_much_larger(
    sizes: list[int], data: st.DataObject
) -> None:
    """At most a mean and the largest tensor, as Graham has shown."""
    count = data.draw(st.integers(1, len(sizes)))
    found = assign_fragments(sizes, count)
    loads = np.bincount(found, weights=sizes, minlength=count)
    assert loads.sum() == sum(sizes)
    assert loads.max() <= sum(sizes) / count + max(sizes)
    assert set(found) == set(range(count))  # empty tensors, too, have a fragment


@given(st.lists(st.integers(1, 50), min_size=2, max_size=9), st.integers(1, 2), st.data())
def test_tensors_that_have_a_fragment_stay_in_it(
    sizes: list[int], count: int, data: st.DataObject
) -> None:
    known = data.draw(st.integers(count, len(sizes)))
    taken = assign_fragments(sizes[:known], count)
    assert assign_fragments(sizes, count, taken)[:known] == taken


def nodes(comm: CommModel, inside: Link, count: int, per_node: int) -> Cluster:
    """Workers whose all-reduce takes what a model says, over machines that a link joins inside."""
    workers = count * per_node
    network = Network(
        None, measured=comm, measured_workers=workers, per_node=per_node, inside=inside
    )
    return Cluster(workers, network)


@st.composite
def models(draw: st.DrawFn) -> ModelProfile:
    """From four to eight layers, each with a gradient."""
    seconds = st.integers(0, 16).map(lambda x: x / 8)
    layers = [
        LayerProfile(f"layer {i}", draw(st.integers(1, 64)), draw(seconds), draw(seconds))
        for i in range(draw(st.integers(4, 8)))
    ]
    return ModelProfile(tuple(layers), update_s=draw(seconds))


CUT = [
    CoCoD(period=period, fragments=count, within=within)
    for period, count, within in product((4, 8), (1, 2, 4), ("none", "node"))
]


@given(st.sampled_from(CUT), models(), comm_models(), codecs(), st.integers(1, 3))
def test_without_jitter_it_is_the_closed_form(
    method: CoCoD, profile: ModelProfile, comm: CommModel, codec: CodecCost, per_node: int
) -> None:
    cluster = nodes(comm, Link(0.125, 2.0**-7), 2, per_node)
    node = node_comm(method, cluster.network)
    assert (node is None) == (per_node == 1 or method.within == "none")
    expected = closed_forms.step(method, profile, comm, codec, node)
    found = simulate(profile, cluster, method, codec, iterations=40)
    assert found.step_s == pytest.approx(expected.total_s, rel=1e-9, abs=1e-12)
    assert found.comm_s == pytest.approx(expected.comm_s, rel=1e-9, abs=1e-12)
    time = step_time(method, profile, comm, codec, node)
    assert time.total_s == pytest.approx(expected.total_s, rel=1e-9, abs=1e-12)
    assert time.limit_s <= time.total_s * (1 + 1e-9)


def test_one_message_would_stop_what_a_node_sends() -> None:
    """m = 3.5 of c = 7: behind forward and half of backward nothing waits for it; m = 10 does."""
    inside = CommModel.linear(0.25, 0.0)
    method = CoCoD(period=2, within="node")
    short = step_time(method, MODEL, NET, node=inside)
    assert short.total_s == 7.25  # the last of a node's messages begins as backward ends
    slow = CommModel.linear(10.0, 0.0)
    long = step_time(method, MODEL, slow, node=inside)
    assert long.total_s == (10 + inside(1.0) + 1 + 7.25) / 2


def test_a_network_must_say_what_joins_a_node() -> None:
    cluster = Cluster(4, Network(None, measured=NET, measured_workers=4, per_node=2))
    with pytest.raises(ValueError, match=r"within=node needs the link within a machine"):
        simulate(MODEL, cluster, "cocod:within=node")
    with pytest.raises(ValueError, match=r"within=node needs the link within a machine"):
        advise(MODEL, cluster, ["cocod:within=node"])


SPEEDS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12)
WILD = st.lists(st.floats(5e-324, 1.7e308), min_size=1, max_size=12)


@st.composite
def batches(draw: st.DrawFn, of: st.SearchStrategy[list[float]]) -> tuple[int, list[float]]:
    speeds = draw(of)
    return draw(st.integers(len(speeds), 10_000)), speeds


@given(batches(SPEEDS) | batches(WILD))
def test_all_of_the_batch_and_at_least_one_each(case: tuple[int, list[float]]) -> None:
    batch, speeds = case
    split = split_batch(batch, speeds)
    assert len(split) == len(speeds)
    assert sum(split) == batch
    assert min(split) >= 1


@given(batches(SPEEDS))
def test_within_one_of_the_exact_share(case: tuple[int, list[float]]) -> None:
    """Of what those get who are not lifted to one; the lifted ones get less than that exactly."""
    batch, speeds = case
    split = split_batch(batch, speeds)
    exact = [Fraction(batch) * Fraction(s) / sum(map(Fraction, speeds)) for s in speeds]
    if min(exact) >= 1:
        for share, wanted in zip(split, exact, strict=True):
            assert abs(share - wanted) < 1 + 1e-9
    for share, wanted in zip(split, exact, strict=True):
        assert share <= math.floor(wanted) + 1 + 1e-9  # nobody pays in for others and gets more


@pytest.mark.parametrize(
    ("batch", "speeds", "error", "answer"),
    [
        (3, [1.0] * 4, ValueError, "less than one sample for each of 4 workers: raise it to 4"),
        (8, [], ValueError, "speeds is empty"),
        (8, [1.0, 0.0], ValueError, r"speeds\[1\] is 0.0: speeds must be positive"),
        (8, [-1.0, 1.0], ValueError, r"speeds\[0\] is -1.0"),
        (8, [1.0, math.inf], ValueError, r"speeds\[1\] is inf"),
        (8.0, [1.0], TypeError, "batch must be an int, got 8.0"),
    ],
)
def test_errors(batch: int, speeds: list[float], error: type[Exception], answer: str) -> None:
    with pytest.raises(error, match=answer):
        split_batch(batch, speeds)
