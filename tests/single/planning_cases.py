"""Random models, networks and methods, for the tests of what is planned from them."""

from __future__ import annotations

from hypothesis import strategies as st

from hvd_pipe.planning.comm import CODECS, CodecCost, CommModel
from hvd_pipe.planning.methods import (
    Conventional,
    HorovodFusion,
    LocalSGD,
    Method,
    WidePipeSGD,
)
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.strategy import CoCoD, MergedGradient, PipeSGD

__all__ = ["ALL", "codecs", "comm_models", "forward_overlaps", "methods", "profiles"]

ALL: tuple[Method, ...] = (
    Conventional(),
    MergedGradient(plan="wfbp"),
    MergedGradient(plan="single"),
    MergedGradient(plan="greedy"),
    MergedGradient(),
    HorovodFusion(),
    PipeSGD(),
    WidePipeSGD(4),
    LocalSGD(4),
    CoCoD(period=4),
)
"""One of each."""


@st.composite
def comm_models(draw: st.DrawFn) -> CommModel:
    """Up to five segments with bends and jumps; some networks cost nothing, or only latency."""
    numbers = st.integers(0, 9)
    starts, intercepts = [0.0], [draw(numbers) * 0.25]
    slopes = [draw(numbers) * 2.0**-6]
    for gap in draw(st.lists(st.integers(1, 200), max_size=4)):
        start, slope = starts[-1] + gap, draw(numbers) * 2.0**-6
        before = intercepts[-1] + slopes[-1] * start
        starts.append(start)
        intercepts.append(before + draw(numbers) * 0.25 - slope * start)
        slopes.append(slope)
    return CommModel(
        tuple(starts),
        tuple(intercepts),
        tuple(slopes),
        draw(numbers) * 0.25,
        blocking=draw(st.booleans()),
    )


@st.composite
def profiles(draw: st.DrawFn) -> ModelProfile:
    """Up to eight layers, some without a gradient; now and then nothing is sent at all."""
    seconds = st.floats(0.0, 4.0, allow_subnormal=False).map(lambda x: round(x, 3))
    layers = st.tuples(st.integers(0, 300), seconds, seconds)
    made = [
        LayerProfile(f"layer{i}", size, backward, forward)
        for i, (size, backward, forward) in enumerate(
            draw(st.lists(layers, min_size=1, max_size=8))
        )
    ]
    return ModelProfile(tuple(made), update_s=draw(seconds))


def methods() -> st.SearchStrategy[Method]:
    """Every method with every option that changes its time."""
    sizes, periods = st.integers(1, 400), st.integers(1, 5)
    merged = [MergedGradient(plan=plan) for plan in ("auto", "greedy", "wfbp", "single")]
    return st.one_of(
        st.just(Conventional()),
        st.sampled_from(merged),
        sizes.map(lambda size: MergedGradient(bucket_bytes=size)),
        st.builds(HorovodFusion, st.integers(0, 400), st.sampled_from([0.0, 1e-3, 0.7, 3.0])),
        st.builds(
            PipeSGD,
            bucket_bytes=st.none() | sizes,
            prediction=st.sampled_from(["none", "local", "previous"]),
        ),
        st.builds(WidePipeSGD, st.integers(1, 5), sizes),
        st.builds(LocalSGD, periods),
        st.builds(CoCoD, periods, momentum=st.sampled_from(["local", "average"])),
    )


def forward_overlaps() -> st.SearchStrategy[MergedGradient]:
    """Messages behind the next forward pass, with every way to divide the gradients."""
    return st.one_of(
        st.sampled_from(
            [
                MergedGradient(plan=plan, overlap="forward")
                for plan in ("auto", "greedy", "wfbp", "single")
            ]
        ),
        st.integers(1, 400).map(lambda n: MergedGradient(bucket_bytes=n, overlap="forward")),
    )


def codecs() -> st.SearchStrategy[CodecCost]:
    """None, the project's own, and one that takes long."""
    return st.sampled_from([*CODECS.values(), CodecCost("slow", 0.5, 2.0**-7)])
