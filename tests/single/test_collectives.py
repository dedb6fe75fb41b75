"""All-reduce formulas, hierarchies of them, and what was measured on another number of workers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_pipe.planning.cluster import ALGORITHMS, Link, allreduce, hierarchical, rescale, terms
from hvd_pipe.planning.comm import CommModel

algorithms = st.sampled_from(ALGORITHMS)


@pytest.mark.parametrize(
    ("algorithm", "latency", "per_byte"),
    [
        ("ring", 14 * 1e-5, 2 * 7 / 8 * 1e-9 + 7 / 8 * 1e-10),
        ("recursive-doubling", 3 * 1e-5, 3 * 1.1e-9),
        ("halving-doubling", 6 * 1e-5, 2 * 7 / 8 * 1e-9 + 7 / 8 * 1e-10),
        ("binary-tree", 6 * 1e-5, 3 * 2.1e-9),
        ("double-binary-tree", 6 * 1e-5, 1.1e-9),
    ],
)
def test_formulas_for_eight_workers(algorithm: str, latency: float, per_byte: float) -> None:
    model = allreduce(8, 1e-5, 1e-9, 1e-10, algorithm)
    assert model.latency == pytest.approx(latency)
    assert model.slopes[0] == pytest.approx(per_byte)
    assert allreduce(1, 1e-5, 1e-9, 1e-10, algorithm)(1e9) == 0.0


@given(algorithms, st.integers(1, 4096), st.integers(1, 4096))
def test_more_workers_take_no_less(algorithm: str, p: int, q: int) -> None:
    few, many = sorted((p, q))
    assert all(a <= b for a, b in zip(terms(few, algorithm), terms(many, algorithm), strict=True))


def test_a_hierarchy_by_hand() -> None:
    """4 machines of 8: 1 MB becomes 8 parts of 125 kB, which share a machine's link."""
    inside, between, gamma, x = Link(5e-6, 1e-11), Link(3e-5, 8e-10), 1e-11, 1e6
    scatter = 7 * 5e-6 + 7 / 8 * x * (1e-11 + gamma)
    outer = 6 * 3e-5 + (x / 8) * (2 * 3 / 4 * 8 * 8e-10 + 3 / 4 * gamma)
    gather = 7 * 5e-6 + 7 / 8 * x * 1e-11
    model = hierarchical(4, 8, inside, between, gamma=gamma)
    assert model(x) == pytest.approx(scatter + outer + gather, rel=1e-12)
    tree = hierarchical(4, 8, inside, between, "double-binary-tree", gamma)
    assert tree(x) == pytest.approx(
        scatter + 4 * 3e-5 + (x / 8) * (8 * 8e-10 + gamma) + gather, rel=1e-12
    )


@given(algorithms, st.integers(1, 100), st.floats(0, 1e-3), st.floats(0, 1e-8))
def test_hierarchies_of_one_level_are_flat(
    algorithm: str, n: int, alpha: float, beta: float
) -> None:
    link, other = Link(alpha, beta), Link(1.0, 1.0)
    flat = allreduce(n, alpha, beta, 1e-11, algorithm)
    assert hierarchical(n, 1, other, link, algorithm, 1e-11) == flat
    one = hierarchical(1, n, link, other, algorithm, 1e-11)
    ring = allreduce(n, alpha, beta, 1e-11)
    assert (one.latency, one.slopes[0]) == pytest.approx((ring.latency, ring.slopes[0]))


@given(algorithms, st.integers(2, 2048), st.integers(2, 2048), st.floats(0, 1e9))
def test_rescaled_formulas_are_formulas(algorithm: str, p: int, q: int, x: float) -> None:
    before, after = (allreduce(n, 3e-5, 8e-10, 1e-10, algorithm) for n in (p, q))
    assert rescale(before, p, q, algorithm)(x) == pytest.approx(after(x), rel=1e-12)


@given(algorithms, st.integers(2, 2048), st.integers(2, 2048), st.integers(0, 99))
def test_there_and_back(algorithm: str, p: int, q: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = np.sort(rng.choice(10**7, 12, replace=False))
    model = CommModel.table(x, rng.exponential(1e-3, 12))
    back = rescale(rescale(model, p, q, algorithm), q, p, algorithm)
    assert back.starts == pytest.approx(model.starts, rel=1e-12)
    assert back.intercepts == pytest.approx(model.intercepts, rel=1e-12)
    assert back.slopes == pytest.approx(model.slopes, rel=1e-12)


def test_a_ring_jumps_at_a_size_of_its_chunks() -> None:
    """Hops that jump at chunks of 1 KiB make a ring of p jump at messages of p KiB."""

    def ring(p: int, x: float) -> float:
        chunk = x / p
        return 2 * (p - 1) * (1e-5 + 1e-9 * chunk if chunk < 1024 else 8e-5 + 4e-10 * chunk)

    four = CommModel((0, 4096), (6 * 1e-5, 6 * 8e-5), (6 / 4 * 1e-9, 6 / 4 * 4e-10))
    for q in (2, 3, 4, 64):
        other = rescale(four, 4, q)
        assert other.starts == pytest.approx((0.0, 1024.0 * q))
        for x in (0.0, 100.0, 1000.0 * q, 1100.0 * q, 1e7):
            assert other(x) == pytest.approx(ring(q, x), rel=1e-12)
    doubling = rescale(four, 4, 64, "recursive-doubling")
    assert doubling.starts == pytest.approx(four.starts)  # whole messages, however many workers
    assert doubling(1e6) == pytest.approx(3 * four(1e6))


def test_rescaling_nothing() -> None:
    model = CommModel((0.0,), (1e-3,), (1e-9,), error=0.05)
    assert rescale(model, 4, 4) is model
    assert rescale(model, 4, 1)(1e9) == 0.0
    assert rescale(model, 4, 8).error is None


def test_bad_arguments() -> None:
    model, link = CommModel.linear(1, 1), Link(1, 1)
    with pytest.raises(ValueError, match=r"one of ring, .*double-binary-tree; got 'star'"):
        allreduce(4, 1, 1, algorithm="star")
    with pytest.raises(ValueError, match=r"workers must be at least 1, got 0"):
        allreduce(0, 1, 1)
    with pytest.raises(ValueError, match=r"per_node must be at least 1, got 0"):
        hierarchical(2, 0, link, link)
    with pytest.raises(ValueError, match=r"workers must be at least 1, got 0"):
        hierarchical(0, 2, link, link)
    with pytest.raises(ValueError, match=r"from_workers must be at least 2, got 1: a single work"):
        rescale(model, 1, 4)
    with pytest.raises(ValueError, match=r"workers must be at least 1, got 0"):
        rescale(model, 4, 0)
    with pytest.raises(ValueError, match=r"got 'star'"):
        rescale(model, 4, 4, "star")
    assert math.isclose(rescale(model, 2, 4, "halving-doubling").latency, 2.0)
