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


def test_people_write_clusters_in_words() -> None:
    text = """{
      "schema": "hvd_pipe.cluster/1", "workers": 16, "memory_bytes": "16GiB", "speeds": null,
      "network": {
        "link": {"bandwidth": "10gbit", "latency": "30us"},
        "per_node": 4, "inside": {"bandwidth": "12GB/s"}, "measured": null
      }
    }"""
    inside = Link.of(12e9, 0.0)
    expected = Network(Link(3e-5, 8e-10), per_node=4, inside=inside)
    assert Cluster.from_json(text) == Cluster(16, expected, memory_bytes=16 * 2**30)


def test_with_workers() -> None:
    assert Cluster(8, DEEP, jitter=0.1).with_workers(64) == Cluster(64, DEEP, jitter=0.1)
    uneven = Cluster(2, ETHERNET, speeds=(1, 2))
    assert uneven.with_workers(2) is uneven
    with pytest.raises(ValueError, match=r"names the speeds of its 2 workers, .* about 4: use"):
        uneven.with_workers(4)


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
    ],
)
def test_bad_arguments(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
