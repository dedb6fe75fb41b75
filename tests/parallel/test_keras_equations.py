"""Each strategy under Keras 3 is its equation: every weight after every batch."""

from __future__ import annotations

from typing import Any

import keras_reference
import numpy as np
import numpy.typing as npt
import pytest
import workers_keras_equations
from cases import of_case
from ranks import once, run_ranks

TOLERANCE = 1e-10
STRATEGIES = (
    "merged-gradient",
    "merged-gradient:plan=wfbp",
    "merged-gradient:bucket_bytes=64",
    "pipe-sgd",
    "pipe-sgd:warmup_steps=5",
    "pipe-sgd:prediction=local",
    "pipe-sgd:prediction=previous,warmup_steps=3",
    "cocod:period=1",
    "cocod:period=4",
    "cocod:period=3,warmup_steps=4",
    "cocod:period=4,momentum=average",
    "cocod:period=3,pull_back=0.6,anchor_momentum=0.7",
    "cocod:period=3,outer=nesterov,outer_lr=0.3,outer_momentum=0.6",
    "cocod:period=2,momentum=average,outer=nesterov,outer_lr=0.5,warmup_steps=3",
    "cocod:period=2,momentum=average,pull_back=0.6,anchor_momentum=0.5,warmup_steps=3",
    "cocod:period=4,fragments=2",
    "cocod:period=4,fragments=4,outer=nesterov,outer_lr=0.3,outer_momentum=0.6",
    "cocod:period=4,fragments=2,pull_back=0.6,anchor_momentum=0.7,warmup_steps=3",
)
# A step outside of fit differs by what a strategy keeps in graphs, not by its options.
FAMILIES = tuple(
    name
    for name in STRATEGIES
    if name in ("merged-gradient", "pipe-sgd") or "warmup_steps" in name or "fragments=4" in name
)
CASES: list[workers_keras_equations.Case] = [
    *(("fit", strategy, "momentum") for strategy in STRATEGIES),
    *((mode, name, "momentum") for mode in ("function", "eager") for name in FAMILIES),
]
CASES += [
    ("fit", strategy, optimizer)
    for strategy in ("merged-gradient", "pipe-sgd", "cocod:period=4")
    for optimizer in ("sgd", "adam", "clipped", "scheduled", "averaged", "accumulating")
]
MOMENTS = "cocod:period=5,momentum=average"
CASES += [
    *((mode, MOMENTS, "forgetful") for mode in ("fit", "function", "eager")),
    ("fit", "cocod:period=2,momentum=average", "accumulating"),
    ("fit", "cocod:period=3,momentum=average,pull_back=0.4,anchor_momentum=0.5", "adam"),
]

# On one rank and on four, the families: what options change does not depend on how many there are,
# and each of these traces takes a second or more of a rank.
ON_RANKS = [(2, case) for case in CASES]
ON_RANKS += [(n, ("fit", strategy, "momentum")) for n in (1, 4) for strategy in FAMILIES]
ON_RANKS += [(4, ("fit", "cocod:period=4", "accumulating")), (4, ("fit", MOMENTS, "forgetful"))]
# Batches of unlike size: the warm-up took a plain mean of the gradients.
WEIGHTED = "cocod:period=3,warmup_steps=4,weights=3/1"
ON_RANKS += [(2, ("fit", WEIGHTED, "momentum"))]
# Two nodes of two ranks.
WITHIN = "cocod:period=4,fragments=4,within=node"
ON_RANKS += [(4, (mode, WITHIN, "momentum")) for mode in ("fit", "eager")]
ON_RANKS += [
    (4, ("fit", "cocod:period=3,within=node,warmup_steps=4,weights=3/1/1/2", "momentum")),
    (4, ("fit", f"{WITHIN},outer=nesterov,outer_lr=0.3", "accumulating")),
    (2, ("fit", "cocod:period=3,within=node", "momentum")),
    (1, ("fit", "cocod:period=4,fragments=2,within=node", "momentum")),
]

expected = keras_reference.trajectory
in_nodes = once(
    lambda n, nodes: run_ranks(
        n,
        workers_keras_equations.trajectories,
        [case for ranks, case in ON_RANKS if ranks == n and has_nodes(case) == nodes],
        timeout=400,
    )
)


def has_nodes(case: workers_keras_equations.Case) -> bool:
    return "within=node" in case[1]


def trajectories(n: int, case: workers_keras_equations.Case) -> list[Any]:
    """What each rank's run of a case came to; those that need process sets have their own job."""
    return of_case(in_nodes(n, has_nodes(case)), case)


def name_of(value: Any) -> str:
    return "-".join(value) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize(("n", "case"), ON_RANKS, ids=name_of)
def test_trajectory(n: int, case: workers_keras_equations.Case) -> None:
    _, strategy, optimizer = case
    wanted = expected(n, strategy, optimizer)
    for rank, actual in enumerate(trajectories(n, case)):
        assert actual.shape == wanted[rank].shape
        errors = np.abs(actual - wanted[rank]).max(axis=1)
        wrong = np.flatnonzero(~(errors <= TOLERANCE))  # ~(<=): a NaN is wrong, too
        assert not len(wrong), (
            f"rank {rank}: {len(wrong)} of {len(errors)} records differ, first record {wrong[0]} "
            f"by {errors[wrong[0]]:.3g}, at most by {np.nanmax(errors):.3g}"
        )


@pytest.mark.parametrize(("n", "case"), [each for each in ON_RANKS if each[0] > 1], ids=name_of)
def test_replicas_are_equal_bit_for_bit(n: int, case: workers_keras_equations.Case) -> None:
    """After training; where all ranks update alike, after every batch.

    Stock Horovod under Keras 3 fails this: ``fit`` calls ``apply`` alone, which it does not know,
    so nothing is ever averaged, and nobody is told.
    """
    first, *others = trajectories(n, case)
    local = case[1].startswith("cocod") or "prediction=local" in case[1]
    records = slice(-1, None) if local else slice(None)
    for other in others:
        assert np.array_equal(other[records], first[records])


def test_the_equations_can_be_told_apart() -> None:
    """A tolerance of 1e-10 shows something only where a wrong strategy is off by far more."""

    def spread(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
        return float(np.abs(a - b).max())

    found = [
        expected(2, name, "momentum") for name in ("merged-gradient", *STRATEGIES[3:], WEIGHTED)
    ]
    assert spread(expected(4, WITHIN, "momentum"), expected(4, "cocod", "momentum")) > 1e-3
    for i, one in enumerate(found):
        for other in found[i + 1 :]:
            assert spread(one[:, :-1], other[:, :-1]) > 1e-3
    assert spread(expected(2, "pipe-sgd", "sgd")[0], expected(1, "pipe-sgd", "sgd")[0]) > 1e-3


def test_second_moments_would_have_become_negative() -> None:
    """Else nothing above shows that they are kept from it: a root of them would be NaN."""
    assert keras_reference.values_clamped(2, MOMENTS, "forgetful") > 0
