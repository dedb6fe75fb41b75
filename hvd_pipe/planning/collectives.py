"""All-reduce algorithms: their time from the cost of a link, and from one size of job to another.

Everywhere, p workers; a message of one byte or more between two of them takes ``alpha`` seconds
to start and ``beta`` seconds per byte; adding up takes ``gamma`` seconds per byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from hvd_pipe.planning._checks import check_number
from hvd_pipe.planning.comm import CommModel

ALGORITHMS = (
    "ring",
    "recursive-doubling",
    "halving-doubling",
    "binary-tree",
    "double-binary-tree",
)


@dataclass(frozen=True)
class Link:
    """A link between two workers: a message of x bytes takes ``alpha + beta * x``.

    Args:
        alpha, beta: seconds per message and per byte, finite and not negative.

    Example:
        >>> Link.of(bandwidth=1.25e9, latency=30e-6)
        Link(alpha=3e-05, beta=8e-10)
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        for name, unit in (("alpha", "seconds a message"), ("beta", "seconds a byte")):
            value = check_number(f"a link's {name}", getattr(self, name), unit)
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, bandwidth: float, latency: float) -> Link:
        """The link of a bandwidth in bytes per second and a latency in seconds."""
        if not (math.isfinite(bandwidth) and bandwidth > 0.0):
            raise ValueError(
                f"a link's bandwidth is a positive number of bytes a second, got {bandwidth}"
            )
        return cls(latency, 1.0 / bandwidth)

    @property
    def bandwidth(self) -> float:
        """Bytes per second; infinite where a byte costs nothing."""
        return 1.0 / self.beta if self.beta else math.inf


class Terms(NamedTuple):
    """How often an algorithm pays each cost: ``latency alpha + (bytes beta + sums gamma) x``."""

    latency: float
    bytes: float
    sums: float


def terms(workers: int, algorithm: str = "ring") -> Terms:
    """The terms of an all-reduce over p workers, each one 0 for a single worker.

    ==================== ================ ============== ==============
    algorithm            latency          bytes          sums
    ==================== ================ ============== ==============
    ring                 ``2 (p-1)``      ``2 (p-1)/p``  ``(p-1)/p``
    recursive-doubling   ``log2(p)``      ``log2(p)``    ``log2(p)``
    halving-doubling     ``2 log2(p)``    ``2 (p-1)/p``  ``(p-1)/p``
    binary-tree          ``2 log2(p)``    ``2 log2(p)``  ``log2(p)``
    double-binary-tree   ``2 log2(p)``    ``1``          ``1``
    ==================== ================ ============== ==============

    ``log2(p)`` is rounded up where p is no power of two.

    Raises:
        ValueError: no workers, or an algorithm that is none of :data:`ALGORITHMS`.

    Example:
        >>> terms(16)
        Terms(latency=30, bytes=1.875, sums=0.9375)

    Source: MG-WFBP, arXiv 1912.09268, table 2, where the double binary tree lacks its alpha.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}; got {algorithm!r}")
    if workers == 1:
        return Terms(0, 0, 0)
    steps = math.ceil(math.log2(workers))
    share = (workers - 1) / workers
    return {
        "ring": Terms(2 * (workers - 1), 2 * share, share),
        "recursive-doubling": Terms(steps, steps, steps),
        "halving-doubling": Terms(2 * steps, 2 * share, share),
        "binary-tree": Terms(2 * steps, 2 * steps, steps),
        "double-binary-tree": Terms(2 * steps, 1, 1),
    }[algorithm]


def allreduce(
    workers: int, alpha: float, beta: float, gamma: float = 0.0, algorithm: str = "ring"
) -> CommModel:
    """All-reduce time from the cost of one hop, with the :func:`terms` of the algorithm.

    One worker sends nothing: T = 0. Arguments and errors are those of :func:`terms`.

    Example:
        >>> allreduce(16, alpha=9.72e-4 / 30, beta=1e-9).latency
        0.000972

    Source: MG-WFBP, arXiv 1912.09268, table 2.
    """
    cost = terms(workers, algorithm)
    return CommModel.linear(cost.latency * alpha, cost.bytes * beta + cost.sums * gamma)


def hierarchical(
    nodes: int,
    per_node: int,
    inside: Link,
    between: Link,
    algorithm: str = "ring",
    gamma: float = 0.0,
) -> CommModel:
    """All-reduce on machines of several workers: fast inside a machine, slow between machines.

    A ring reduce-scatter inside each of the n machines leaves every one of its m workers a sum of
    ``x/m`` bytes; the m workers of the same place then all-reduce theirs between the machines; a
    ring all-gather inside hands the parts out. All m messages leave a machine through its one
    link at the same time, so that each sees m times its ``beta``:

        reduce-scatter   ``(m-1) alpha_in + (m-1)/m x (beta_in + gamma)``
        all-reduce       ``L alpha_out + (B m beta_out + S gamma) x/m``   (L, B, S = terms(n))
        all-gather       ``(m-1) alpha_in + (m-1)/m x beta_in``

    Raises:
        ValueError: no machines, no workers or an unknown algorithm.

    Example:
        >>> model = hierarchical(4, 8, inside=Link(5e-6, 1e-11), between=Link(3e-5, 8e-10))
        >>> f"{model.latency * 1e6:.0f} us, {model.slopes[0] * 1e9:.4f} ns a byte"
        '250 us, 1.2175 ns a byte'

    Source: the hierarchical all-reduce of Horovod (NCCL inside, MPI between); sharing is ours.
    """
    if per_node < 1:
        raise ValueError(f"per_node must be at least 1, got {per_node}")
    outer = allreduce(nodes, between.alpha, per_node * between.beta, gamma, algorithm)
    if per_node == 1:
        return outer
    inner = allreduce(per_node, inside.alpha, inside.beta, gamma)  # its two halves together
    return inner + outer.scaled(1 / per_node)


def rescale(
    comm: CommModel, from_workers: int, to_workers: int, algorithm: str = "ring"
) -> CommModel:
    """What was measured on some workers, for another number of them on the same kind of network.

    With l and b the ratios of the algorithm's latency and byte :func:`terms`, every intercept is
    multiplied by l and every slope by b, ``T'(x) = l T(x b/l)``, which moves a start s to s l/b:
    a ring sends chunks of ``x/p``, and a network changes its protocol at a size of chunks.
    Recursive doubling and the binary tree send whole messages, l = b, and starts stay. So does the
    ``delay``, which is the software's. How well a formula extrapolates is not known: ``error`` is
    None.

    Raises:
        ValueError: fewer than 2 workers measured, none wanted, or an unknown algorithm.

    Example:
        >>> eight = allreduce(8, alpha=1e-5, beta=1e-9)
        >>> rescale(eight, 8, 64) == allreduce(64, alpha=1e-5, beta=1e-9)
        True
        >>> rescale(CommModel((0, 8192), (1e-4, 8e-4), (1e-8, 3e-9)), 8, 64).starts
        (0.0, 65536.0)

    Source: MG-WFBP, arXiv 1912.09268, extrapolates its constants so; the starts are ours.
    """
    if from_workers < 2:
        raise ValueError(
            f"from_workers must be at least 2, got {from_workers}: a single worker sends nothing, "
            "so nothing follows from its all-reduce; measure on 2 workers or more"
        )
    before, after = terms(from_workers, algorithm), terms(to_workers, algorithm)
    if to_workers == 1:
        return CommModel.linear(0.0, 0.0)
    if from_workers == to_workers:
        return comm
    latency, size = after.latency / before.latency, after.bytes / before.bytes
    scaled = comm.scaled(size / latency, latency)
    return replace(scaled, error=None)
