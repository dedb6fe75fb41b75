"""Steps of all methods: worked by hand, against their limits, and against published figures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import ALL, codecs, comm_models, forward_overlaps, methods, profiles

from hvd_pipe.planning.cluster import Cluster, Network, allreduce
from hvd_pipe.planning.comm import CODECS, NONE, CodecCost, CommModel
from hvd_pipe.planning.merge import exact
from hvd_pipe.planning.methods import Method
from hvd_pipe.planning.overlap import Pass, plan_overlap
from hvd_pipe.planning.plan import Plan
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.planning.simulate import simulate
from hvd_pipe.planning.timing import StepTime, least_seconds, step_time, synchronous_limit
from hvd_pipe.strategy import MergedGradient

DATA = Path(__file__).parent.parent / "data"

# Forward 2, gradients at 1 (10 bytes) and 4 (2 bytes) of backward, update 1: c = 7.
MODEL = ModelProfile(
    (LayerProfile("conv", 2, 3.0, 1.0), LayerProfile("fc", 10, 1.0, 1.0)), update_s=1.0
)
NET = CommModel.linear(0.5, 0.25)  # T(2) = 1, T(10) = 3, T(12) = 3.5


@pytest.mark.parametrize(
    ("method", "total", "comm", "count", "limit"),
    [
        # Limit of synchronous SGD: 2 + max(1 + T(12), 4 + T(2)) + 1 = 8.
        ("conventional", 7 + 4, 4, 2, 8),
        ("wfbp", 2 + 5 + 1, 4, 2, 8),
        ("greedy", 2 + 5 + 1, 4, 2, 8),
        ("merged-gradient", 2 + 5 + 1, 4, 2, 8),
        ("merged-gradient:bucket_bytes=12", 2 + 4 + 3.5 + 1, 3.5, 1, 8),
        ("single", 2 + 4 + 3.5 + 1, 3.5, 1, 8),
        # conv is needed first, and arrives 5 after backward starts, when 4 of it have passed.
        ("merged-gradient:overlap=forward,plan=wfbp", 7 + 1, 4, 2, 7),
        ("merged-gradient:overlap=forward,bucket_bytes=11", 7 + 1, 4, 2, 7),
        ("merged-gradient:overlap=forward,plan=single", 7 + 3.5, 3.5, 1, 7),
        ("horovod:cycle=1s", 2 + 5 + 1, 4, 2, 8),
        ("horovod:cycle=4s", 8 + 1 + 1, 4, 2, 8),  # fc from 4 to 7, conv from 8
        ("horovod:cycle=8s", 8 + 3.5 + 1, 3.5, 1, 8),  # both from 8
        ("horovod:cycle=8s,threshold=11", 8 + 4 + 1, 4, 2, 8),
        ("pipe-sgd", 7, 3.5, 1, 7),
        ("pipe-sgd:bucket_bytes=10", 7, 4, 2, 7),
        ("pipe-sgd:prediction=local", 8, 3.5, 1, 8),
        ("wide-pipe-sgd:width=1", 10.5, 3.5, 1, 8),
        ("wide-pipe-sgd:width=3", 7, 3.5, 1, 7),
        ("local-sgd:period=2", 7 + 1.75, 1.75, 0.5, (7 + 8) / 2),
        ("cocod:period=2", 7, 1.75, 0.5, 7),
        ("cocod:period=2,momentum=average", 7, 3.5, 1, 7),
        ("cocod:period=2,fragments=2", 7, 2, 1, 7),
    ],
)
def test_worked_by_hand(
    method: str, total: float, comm: float, count: float, limit: float
) -> None:
    time = step_time(method, MODEL, NET)
    compute = 8.0 if "prediction" in method else 7.0
    assert time == StepTime(time.method, compute, comm, total, limit, count)
    assert time.exposed_s == total - compute
    assert time.of_limit == limit / total


@pytest.mark.parametrize(
    ("method", "total"),
    [
        # fc is ready at 1 and negotiated until 1.5; conv is ready at 4, while it is carried.
        ("wfbp", 2 + (1 + 0.5 + 3 + 0.5 + 1) + 1),
        ("single", 2 + (4 + 0.5 + 3.5) + 1),
        ("conventional", 7 + 0.5 + 4),  # a burst has the delay once
        ("horovod:cycle=4s", 8 + 0.5 + 1 + 1),  # fc from 4.5 to 7.5, conv from 8.5
        ("pipe-sgd:bucket_bytes=10", 7),
        ("local-sgd:period=2", 7 + (3.5 + 0.5) / 2),
        ("cocod:period=1", 7),
    ],
)
def test_where_one_thread_negotiates_and_carries(method: str, total: float) -> None:
    net = dataclasses.replace(NET, delay=0.5, blocking=True)
    assert step_time(method, MODEL, net).total_s == total
    cluster = Cluster(2, Network(None, measured=net, measured_workers=2))
    assert simulate(MODEL, cluster, method).step_s == pytest.approx(total, rel=1e-12)


@given(methods(), profiles(), comm_models(), codecs())
def test_no_method_beats_its_limit(
    method: Method, profile: ModelProfile, comm: CommModel, codec: CodecCost
) -> None:
    time = step_time(method, profile, comm, codec)
    assert time.limit_s <= time.total_s * (1 + 1e-12)
    assert time.compute_s <= time.total_s * (1 + 1e-12)
    assert time.limit_s >= profile.compute_s * (1 - 1e-12)
    assert 0.0 <= time.of_limit <= 1.0


@given(forward_overlaps(), profiles(), comm_models(), codecs())
def test_overlap_forward_is_between_its_limit_and_no_overlap(
    method: MergedGradient, profile: ModelProfile, comm: CommModel, codec: CodecCost
) -> None:
    time = step_time(method, profile, comm, codec)
    assert time.limit_s <= time.total_s * (1 + 1e-9)
    assert time.compute_s <= time.total_s * (1 + 1e-9)
    delays = comm.compressed(codec).delay * time.messages
    assert time.total_s <= (time.compute_s + time.comm_s + delays) * (1 + 1e-9)


@given(profiles(), comm_models())
def test_overlap_forward_takes_what_its_plan_predicts(
    profile: ModelProfile, comm: CommModel
) -> None:
    """Also where that plan, with its order and pieces, is given."""
    profile, layers = dataclasses.replace(profile, update_s=0.0), profile.layers
    needed = np.cumsum([0.0, *(layer.forward_s for layer in layers)])[:-1]
    sends = [layer.gradient_bytes > 0 for layer in layers]
    if not any(sends):
        return
    ready, bytes = profile.ready_times(), profile.gradient_bytes().astype(np.float64)
    work = Pass(ready, needed[sends][::-1], bytes, profile.forward_s, profile.backward_s)
    plan = plan_overlap(profile.gradient_order(), work, comm)
    for given_plan in ("auto", plan):
        time = step_time(MergedGradient(plan=given_plan, overlap="forward"), profile, comm)
        assert time.total_s == pytest.approx(plan.predicted_s, rel=1e-9, abs=1e-12)
        assert time.messages == len(plan.order or ())


def test_overlap_forward_updates_layers_one_by_one() -> None:
    """The update of a layer whose gradient arrives late does not delay those before it."""
    layers = (LayerProfile("a", 1, 1.0, 1.0), LayerProfile("b", 1, 1.0, 1.0))
    model = ModelProfile(layers, update_s=4.0)
    plan = Plan((("b",), ("a",)), "given", order=(1, 0))
    # a leaves at 2, arrives at 5; b arrives at 8, and is needed after a's update and forward.
    time = step_time(MergedGradient(plan=plan, overlap="forward"), model, CommModel.linear(3, 0))
    assert time.total_s == 2 + 3 + (2 + 1) + (2 + 1)


@given(comm_models(), st.lists(st.integers(1, 300), min_size=1, max_size=9))
def test_no_messages_take_less_than_the_least(comm: CommModel, sizes: list[int]) -> None:
    """However many bytes are cut into messages, also where many short ones are cheaper."""
    spent = sum(comm(size) for size in sizes)
    assert least_seconds(comm, float(sum(sizes))) <= spent * (1 + 1e-12)
    many = least_seconds(comm, np.array([[1.0, float(sum(sizes))]]))
    assert many.shape == (1, 2)
    assert many[0, 1] == least_seconds(comm, float(sum(sizes)))


@given(profiles(), st.integers(0, 8), st.integers(0, 8))
def test_the_limit_is_reached_where_it_can_be(profile: ModelProfile, a: int, b: int) -> None:
    """With a line and one gradient, the one message is as fast as the limit says."""
    comm = CommModel.linear(a / 4, b / 4)
    if len(profile.gradient_bytes()) == 1:
        time = step_time("merged-gradient", profile, comm)
        assert time.total_s == pytest.approx(time.limit_s, rel=1e-12)
    for name in ("pipe-sgd", "cocod"):
        assert step_time(name, profile, comm).of_limit == pytest.approx(1.0)


@pytest.mark.parametrize("method", [*ALL, MergedGradient(overlap="forward")])
def test_a_model_without_gradients_sends_nothing(method: Method) -> None:
    frozen = ModelProfile((LayerProfile("conv", 0, 1.0, 1.0),))
    time = step_time(method, frozen, NET, CODECS["int8"])
    assert (time.total_s, time.comm_s, time.messages, time.limit_s) == (2.0, 0.0, 0.0, 2.0)


def test_compression_changes_sizes_and_adds_its_own_time() -> None:
    half = CodecCost("half", ratio=0.5, seconds_per_byte=0.125)
    time = step_time("single", MODEL, NET, half)
    assert time.comm_s == 0.5 + 0.25 * 6 + 0.125 * 12
    assert step_time("single", MODEL, NET, NONE) == step_time("single", MODEL, NET)
    # Averaged momenta go uncompressed.
    both = step_time("cocod:period=1,momentum=average", MODEL, NET, half)
    assert both.comm_s == time.comm_s + NET(12)


def test_a_given_plan_is_carried_out() -> None:
    plan = Plan((("fc",), ("conv",)), "given")
    for overlap in ("backward", "forward"):
        time = step_time(MergedGradient(plan=plan, overlap=overlap), MODEL, NET)
        assert (time.total_s, time.messages) == (8.0, 2)
        other = MergedGradient(plan=Plan((("fc",),), "given"), overlap=overlap)
        with pytest.raises(ValueError, match=r"1 names against 2, 'conv' is in one of them only"):
            step_time(other, MODEL, NET)


@pytest.mark.parametrize(
    ("workers", "exposed_ms", "groups"),
    [  # wfbp, single, greedy, exact; groups of the last two
        (32, ("32.6", "111.0", "2.09", "2.09"), (21, 25)),
        (64, ("167.1", "114.8", "4.16", "4.16"), (4, 15)),
        (128, ("433", "119.8", "88.03", "8.31"), (2, 9)),
        (256, ("965", "128.5", "105.06", "17.57"), (2, 5)),
    ],
)
def test_googlenet_on_a_k80(
    workers: int, exposed_ms: tuple[str, ...], groups: tuple[int, int]
) -> None:
    """MG-WFBP's trace and constants: at 128 workers its greedy rule exposes 88 ms, the best 8."""
    comm = allreduce(workers, alpha=9.72e-4 / 30, beta=1.97e-9 / (2 * 15 / 16))
    model = ModelProfile.from_csv(DATA / "googlenet_k80_backward.csv")
    times = [step_time(m, model, comm) for m in ("wfbp", "single", "greedy", "merged-gradient")]
    for time, printed in zip(times, exposed_ms, strict=True):
        digits = len(printed.partition(".")[2])
        assert f"{time.exposed_s * 1e3:.{digits}f}" == printed, time.method
    assert times[2].messages == groups[0]
    assert len(exact(model.ready_times(), model.gradient_bytes(), comm)) == groups[1]
    assert times[3].messages <= groups[1]
    assert synchronous_limit(model, comm) <= times[3].total_s * (1 + 1e-12)
