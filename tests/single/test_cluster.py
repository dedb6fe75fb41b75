"""Clusters: what their networks cost, where that is known from, and the files that say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_pipe.planning.cluster import (
    ALGORITHMS,
    PUBLISHED,
    Cluster,
    Link,
    Network,
    allreduce,
    hierarchical,
    rescale,
)
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.fit import measured

ETHERNET = Network(Link(3e-5, 8e-10))
DEEP = Network(Link(3e-5, 8e-10), "double-binary-tree", 1e-11, 8, Link(5e-6, 1e-11))
JUMP = CommModel((0, 8192, 524288), (8e-5, 9e-4, 1e-3), (1.5e-8, 3e-9, 3.4e-9), error=0.03)
UNEVEN = Cluster(2, ETHERNET, speeds=(1, 2))
MEASURED = Network(None, measured=JUMP, measured_workers=8)


@pytest.mark.parametrize(
    ("name", "latency", "per_byte"),
    [
        ("k80-10gbe", 9.72e-4, 1.97e-9),
        ("v100-10gbe", 9.08e-4, 7.4e-10),
        ("v100-56gbib", 2.36e-4, 4.06e-10),
    ],
)
def test_published_clusters_give_back_what_was_published(
    name: str, latency: float, per_byte: float
) -> None:
    cluster = PUBLISHED[name]
    assert (cluster.name, cluster.workers) == (name, 16)
    assert cluster.comm().latency == pytest.approx(latency, rel=1e-12)
    assert cluster.comm().slopes[0] == pytest.approx(per_byte, rel=1e-12)
    link = cluster.network.link_time
    assert link.alpha == pytest.approx(latency / 30)
    assert link.beta == pytest.approx(per_byte / (2 * 15 / 16))
    assert cluster.with_workers(64).comm() == allreduce(64, link.alpha, link.beta)
    assert len(PUBLISHED) == 3


def test_an_allreduce_follows_from_the_links() -> None:
    assert ETHERNET.comm(16) == allreduce(16, 3e-5, 8e-10)
    assert ETHERNET.comm(1)(1e9) == 0.0
    assert DEEP.inside is not None
    assert DEEP.link is not None
    expected = hierarchical(4, 8, DEEP.inside, DEEP.link, "double-binary-tree", 1e-11)
    assert DEEP.comm(32) == expected
    # Within one machine there is a ring over the fast links, and nothing else.
    assert DEEP.comm(8)(1e6) == pytest.approx(allreduce(8, 5e-6, 1e-11, 1e-11)(1e6))
    assert DEEP.comm(3)(1e6) == pytest.approx(allreduce(3, 5e-6, 1e-11, 1e-11)(1e6))
    assert DEEP.comm(1)(1e6) == 0.0


def test_a_measured_allreduce_counts() -> None:
    assert MEASURED.comm(8) is JUMP
    assert MEASURED.comm(64) == rescale(JUMP, 8, 64)
    both = Network(Link(1.0, 1.0), measured=JUMP, measured_workers=8)
    assert both.comm(8) is JUMP
    assert both.link_time == Link(1.0, 1.0)


def test_levels() -> None:
    ethernet, fast = 1 / 8e-10, 1 / 1e-11
    assert ETHERNET.levels(16) == [(16, ethernet)]
    assert DEEP.levels(32) == [(8, fast), (4, ethernet)]
    assert DEEP.levels(8) == [(8, fast)]
    assert DEEP.levels(2) == [(2, fast)]
    assert Network(Link(1e-5, 0.0)).levels(4) == [(4, float("inf"))]
    ((count, bandwidth),) = MEASURED.levels(16)
    assert count == 16
    assert bandwidth == MEASURED.link_time.bandwidth


@given(
    st.sampled_from(ALGORITHMS),
    st.integers(2, 512),
    st.floats(1e-7, 1e-3),
    st.floats(1e-12, 1e-7),
    st.floats(0, 1e-10),
)
def test_formulas_are_inverted(
    algorithm: str, workers: int, alpha: float, beta: float, gamma: float
) -> None:
    comm = allreduce(workers, alpha, beta, gamma, algorithm)
    network = Network(None, algorithm, gamma, measured=comm, measured_workers=workers)
    assert network.link_time.alpha == pytest.approx(alpha, rel=1e-9)
    assert network.link_time.beta == pytest.approx(beta, rel=1e-9)


def test_a_link_is_estimated_from_real_measurements() -> None:
    """10 Gbit/s Ethernet moves 1.25 GB/s; the all-reduce was measured on 2 and 8 nodes."""
    for nodes in (2, 8):
        path = Path(__file__).parent.parent / f"data/osu_allreduce_10gbe_{nodes}nodes.csv"
        rows = np.loadtxt(path, delimiter=",", comments="#", skiprows=2)
        comm = measured(rows[:, 0], rows[:, 1] * 1e-6)
        link = Network(None, measured=comm, measured_workers=nodes).link_time
        assert 0.3e9 < link.bandwidth < 1.5e9
        assert 5e-6 < link.alpha < 1e-4


CLUSTERS = [
    Cluster(1, ETHERNET),
    Cluster(32, DEEP, memory_bytes=16 * 2**30, jitter=0.1, name="deep"),
    Cluster(3, MEASURED, speeds=(1.0, 1 / 3, 2.0)),
    Cluster(4, Network(None, measured=JUMP, measured_workers=4, measured_per_node=4)),
    Cluster(4, Network(Link(0, 0), measured=JUMP, measured_workers=2, per_node=2)),
    *PUBLISHED.values(),
]


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_json_comes_back_exactly(cluster: Cluster, tmp_path: Path) -> None:
    assert Cluster.from_json(cluster.to_json()) == cluster
    path = tmp_path / "cluster.json"
    cluster.save(path)
    back = Cluster.load(path)
    assert back == cluster
    assert hash(back) == hash(cluster)
    if cluster.network.measured is not None:
        assert back.network.measured is not None
        assert back.network.measured.error == cluster.network.measured.error


def test_with_workers() -> None:
    assert Cluster(8, DEEP, jitter=0.1).with_workers(64) == Cluster(64, DEEP, jitter=0.1)
    assert UNEVEN.with_workers(2) is UNEVEN


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Link(0.0, float("inf")), ValueError, r"link's beta must be finite.*got inf"),
        (lambda: Link("1", 0.0), TypeError, r"link's alpha must be a number .*, got '1'"),
        (lambda: Link.of(0.0, 1e-5), ValueError, r"bandwidth is a positive number of bytes a sec"),
        (lambda: Network((1, 2)), TypeError, r"link must be a Link, got \(1, 2\)"),
        (lambda: Network(Link(0, 0), gamma=-1), ValueError, r"gamma must be finite and not neg"),
        (lambda: Network(Link(0, 0), per_node=2.0), TypeError, r"per_node must be an int, got 2"),
        (lambda: Network(Link(0, 0), measured_workers=3), ValueError, r"go together.*None and 3"),
        (lambda: Network(Link(0, 0), measured_per_node=4), ValueError, r"4 belongs to measured"),
        (lambda: Network(None, measured=3, measured_workers=2), TypeError, r"be a CommModel"),
        (lambda: ETHERNET.comm(0), ValueError, r"workers must be at least 1, got 0"),
        (lambda: DEEP.comm(12), ValueError, r"12 workers do not fill .* take 8 or 16 workers, or"),
        (lambda: Cluster(True, ETHERNET), TypeError, r"workers must be an int, got True"),
        (lambda: Cluster(2, JUMP), TypeError, r"network must be a Network"),
        (lambda: Cluster(1, ETHERNET, speeds=(0,)), ValueError, r"speed must be positive, got 0"),
        (lambda: Cluster(1, ETHERNET, memory_bytes=0), ValueError, r"memory_bytes must be at l"),
        (lambda: Cluster(1, ETHERNET, jitter=1e308), ValueError, r"must be at most 10 .*308"),
        (lambda: allreduce(4, 1, 1, 0, "star"), ValueError, r"one of ring, .*-tree; got 'star'"),
        (lambda: hierarchical(2, 0, *(Link(1, 1),) * 2), ValueError, r"per_node must be at lea"),
        (lambda: hierarchical(0, 2, *(Link(1, 1),) * 2), ValueError, r"workers must be at leas"),
        (lambda: UNEVEN.with_workers(4), ValueError, r"speeds of its 2 workers, .* about 4: use"),
        (lambda: rescale(JUMP, 1, 4), ValueError, r"from_workers must be at least 2, got 1: a"),
    ],
)
def test_bad_arguments(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


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
