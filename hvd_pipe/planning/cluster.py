"""A cluster: how many workers there are, how fast, and what joins them.

Everywhere, p workers; a message of one byte or more between two of them takes ``alpha`` seconds
to start and ``beta`` seconds per byte; adding up takes ``gamma`` seconds per byte.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from hvd_pipe import units
from hvd_pipe.planning import fit
from hvd_pipe.planning._checks import Document, check_count, check_keys, check_number, read_object
from hvd_pipe.planning.comm import CommModel

__all__ = ["PUBLISHED", "Cluster", "Link", "Network"]


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

    The m messages between the n machines leave each through its one link at the same time, so
    that each sees m times its ``beta``:

        reduce-scatter   ``(m-1) alpha_in + (m-1)/m x (beta_in + gamma)``
        all-reduce       ``L alpha_out + (B m beta_out + S gamma) x/m``   (L, B, S = terms(n))
        all-gather       ``(m-1) alpha_in + (m-1)/m x beta_in``

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

    With l and b the ratios of the algorithm's latency and byte :func:`terms`, it is
    ``T'(x) = l T(x b/l)``, which moves a start s to s l/b: a ring sends chunks of ``x/p``, and a
    network changes its protocol at a size of chunks. The ``delay``, which is the software's,
    stays. How well it extrapolates is not known: ``error`` is None.

    Example:
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


SCHEMA = "hvd_pipe.cluster/1"

# What jobs send: the sizes at which a measured all-reduce is asked what one link would cost.
_SIZES = 2.0 ** np.arange(10, 27)  # 1 KiB to 64 MiB

_MOST_JITTER = 10.0


@dataclass(frozen=True)
class Network:
    """What joins the workers: a link and an all-reduce algorithm, or a measured all-reduce.

    Args:
        link: of one machine to the others, shared by its workers; None where only ``measured``
            is known.
        algorithm: of the all-reduce; one of :data:`hvd_pipe.planning.cluster.ALGORITHMS`.
        gamma: seconds to add up one byte.
        per_node, inside: workers of one machine, and a worker's link within it, which several
            need, except beside ``measured``.
        measured, measured_workers: an all-reduce on so many workers, which is then what counts.
        measured_per_node: how many of them one machine had, or None where that is unknown.

    Raises:
        ValueError: neither a link nor a measurement, or parts that do not fit together.

    Example:
        >>> ethernet = Network(Link.of(bandwidth=1.25e9, latency=30e-6))
        >>> round(ethernet.comm(16)(1_000_000), 6)
        0.0024
    """

    link: Link | None
    algorithm: str = "ring"
    gamma: float = 0.0
    per_node: int = 1
    inside: Link | None = None
    measured: CommModel | None = None
    measured_workers: int | None = None
    measured_per_node: int | None = None

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(
                f"algorithm must be one of {', '.join(ALGORITHMS)}; got {self.algorithm!r}"
            )
        object.__setattr__(self, "gamma", check_number("gamma", self.gamma, "seconds a byte"))
        check_count("per_node", self.per_node)
        for name, kind in (("link", Link), ("inside", Link), ("measured", CommModel)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name} must be a {kind.__name__}, got {value!r}")
        if self.link is None and self.measured is None:
            raise ValueError(
                "a network needs a link (its bandwidth and latency) or a measured all-reduce"
            )
        if (self.measured is None) != (self.measured_workers is None):
            raise ValueError(
                "measured and measured_workers go together: an all-reduce, and on how many "
                f"workers it was measured; got {self.measured} and {self.measured_workers}"
            )
        if self.measured_workers is not None:
            check_count("measured_workers", self.measured_workers, least=2)
        if self.measured_per_node is not None:
            if self.measured is None:
                raise ValueError(
                    f"measured_per_node = {self.measured_per_node} belongs to measured, and there "
                    "is none"
                )
            check_count("measured_per_node", self.measured_per_node)
        if self.per_node > 1 and self.inside is None and self.measured is None:
            raise ValueError(
                f"per_node = {self.per_node} workers a machine need inside, the link within a "
                "machine; or per_node=1 for a network that is equally fast everywhere"
            )

    def comm(self, workers: int) -> CommModel:
        """All-reduce time over some of the workers.

        A measured one is rescaled to their number (:func:`rescale`), as if more workers were
        joined by the links that were measured. Otherwise it follows from the links: within one
        machine over ``inside``, over several hierarchically (:func:`hierarchical`).

        Raises:
            ValueError: no workers, or more than a machine has that do not fill machines.
        """
        nodes, per_node = self._nodes(workers)
        if self.measured is not None and self.measured_workers is not None:
            return rescale(self.measured, self.measured_workers, workers, self.algorithm)
        link = self.link_time
        if self.inside is None:
            return allreduce(workers, link.alpha, link.beta, self.gamma, self.algorithm)
        return hierarchical(nodes, per_node, self.inside, link, self.algorithm, self.gamma)

    def levels(self, workers: int) -> list[tuple[int, float]]:
        """How the workers are joined: (components, bandwidth in bytes/s), innermost level first.

        Raises:
            ValueError: no workers, or more than a machine has that do not fill machines.
        """
        nodes, per_node = self._nodes(workers)
        if self.per_node == 1 or self.inside is None:
            return [(workers, self.link_time.bandwidth)]
        levels = [(per_node, self.inside.bandwidth)]
        return levels if nodes == 1 else [*levels, (nodes, self.link_time.bandwidth)]

    @property
    def link_time(self) -> Link:
        """The link over which two workers of different machines exchange messages.

        Where only an all-reduce was measured, the formula of its algorithm is inverted for the
        line that fits it best from 1 KiB to 64 MiB.
        """
        if self.link is not None:
            return self.link
        assert self.measured is not None  # checked at construction, as there is no link
        assert self.measured_workers is not None
        return _inverted(self.measured, self.measured_workers, self.algorithm, self.gamma)

    def _nodes(self, workers: int) -> tuple[int, int]:
        """Machines that so many workers fill, and workers of each."""
        check_count("workers", workers)
        if workers <= self.per_node:
            return 1, workers
        if workers % self.per_node:
            full = workers // self.per_node * self.per_node
            raise ValueError(
                f"{workers} workers do not fill machines of {self.per_node}: take {full} or "
                f"{full + self.per_node} workers, or another per_node"
            )
        return workers // self.per_node, self.per_node


@dataclass(frozen=True)
class Cluster(Document):
    """Workers, the network between them, and what sets one worker apart from another.

    Args:
        workers, network: how many, at least 1, and what joins them.
        speeds: of each worker, relative, positive; None where all are equally fast.
        memory_bytes: of one worker; None where it is no limit.
        jitter: standard deviation of a worker's step time over its mean, at most 10.
        name: what people call it.

    Raises:
        ValueError: numbers out of their range, or speeds of another number of workers.

    Example:
        >>> cluster = Cluster(16, Network(Link.of(bandwidth=1.25e9, latency=30e-6)))
        >>> cluster.with_workers(64).comm().latency
        0.00378
    """

    _BINARY = "this is no text file, so no cluster"

    workers: int
    network: Network
    speeds: tuple[float, ...] | None = None
    memory_bytes: int | None = None
    jitter: float = 0.0
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.network, Network):
            raise TypeError(f"network must be a Network, got {self.network!r}")
        self.network._nodes(self.workers)
        if self.speeds is not None:
            speeds = tuple(
                check_number("a worker's speed", speed, "relative") for speed in self.speeds
            )
            object.__setattr__(self, "speeds", speeds)
            if len(speeds) != self.workers:
                raise ValueError(
                    f"speeds has {len(speeds)} numbers for {self.workers} workers: give one each"
                )
            if min(speeds) <= 0.0:
                raise ValueError(f"a worker's speed must be positive, got {min(speeds)}")
        if self.memory_bytes is not None:
            check_count("memory_bytes", self.memory_bytes)
        object.__setattr__(
            self, "jitter", check_number("jitter", self.jitter, "deviation over mean")
        )
        if self.jitter > _MOST_JITTER:
            raise ValueError(
                f"jitter must be at most {_MOST_JITTER:g} (deviation over mean), got {self.jitter}"
            )
        if not isinstance(self.name, str):
            raise TypeError(f"name must be a text, got {self.name!r}")

    def comm(self) -> CommModel:
        """All-reduce time over all workers."""
        return self.network.comm(self.workers)

    def with_workers(self, workers: int) -> Cluster:
        """The same cluster with another number of workers.

        Raises:
            ValueError: the workers have speeds of their own, so more or fewer are not defined.
        """
        if workers == self.workers:
            return self
        if self.speeds is not None:
            raise ValueError(
                f"this cluster names the speeds of its {self.workers} workers, which says nothing "
                f"about {workers}: use dataclasses.replace(cluster, workers=..., speeds=...)"
            )
        return replace(self, workers=workers)

    def to_json(self) -> str:
        """The cluster as a JSON text; :meth:`from_json` reads it back exactly."""
        data: dict[str, Any] = {"schema": SCHEMA, "workers": self.workers}
        data["network"] = _network_to_json(self.network)
        for key in ("speeds", "memory_bytes", "jitter", "name"):
            value = getattr(self, key)
            if value not in (None, 0.0, ""):
                data[key] = list(value) if isinstance(value, tuple) else value
        return json.dumps(data, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Cluster:
        """The cluster of a JSON text: :meth:`to_json` writes it, and people may.

        A link is ``{"alpha": seconds, "beta": seconds per byte}`` or, in words,
        ``{"bandwidth": "10gbit", "latency": "30us"}``; memory may be ``"16GB"``.

        Raises:
            ValueError: no such text; says the key.

        Example:
            >>> text = '''{"schema": "hvd_pipe.cluster/1", "workers": 8, "memory_bytes": "16GB",
            ...   "network": {"link": {"bandwidth": "10gbit", "latency": "30us"}}}'''
            >>> Cluster.from_json(text).network.link
            Link(alpha=3e-05, beta=8e-10)
        """
        data = read_object(text, SCHEMA, {"workers", "network"}, optional=_OPTIONAL)
        data.pop("schema")
        data["network"] = _network_from_json(data["network"])
        speeds = data.get("speeds")
        if speeds is not None:
            if not isinstance(speeds, list):
                raise ValueError(f"speeds is a list of numbers, got {speeds!r}")
            data["speeds"] = tuple(speeds)
        if isinstance(data.get("memory_bytes"), str):
            data["memory_bytes"] = units.parse_bytes(data["memory_bytes"])
        try:
            return cls(**data)
        except TypeError as error:
            raise ValueError(f"a {SCHEMA!r}: {error}") from error


_OPTIONAL = ("speeds", "memory_bytes", "jitter", "name")


def _inverted(comm: CommModel, workers: int, algorithm: str, gamma: float) -> Link:
    """The link whose all-reduce by the algorithm's formula is nearest to the one measured."""
    cost = terms(workers, algorithm)
    if len(comm.starts) > 1 and comm(float(_SIZES[0])) > 0.0:
        comm = fit.fit(_SIZES, comm(_SIZES))
    per_byte = comm.slopes[-1] - cost.sums * gamma
    return Link(comm.latency / cost.latency, max(0.0, per_byte / cost.bytes))


def _network_to_json(network: Network) -> dict[str, Any]:
    data: dict[str, Any] = {"algorithm": network.algorithm}
    for key in ("link", "inside"):
        link = getattr(network, key)
        if link is not None:
            data[key] = {"alpha": link.alpha, "beta": link.beta}
    if network.gamma:
        data["gamma"] = network.gamma
    if network.per_node != 1:
        data["per_node"] = network.per_node
    if network.measured is not None:
        data["measured"] = network.measured.to_json()
        data["measured_workers"] = network.measured_workers
    if network.measured_per_node is not None:
        data["measured_per_node"] = network.measured_per_node
    return data


def _network_from_json(data: Any) -> Network:
    keys = [field.name for field in fields(Network)]
    check_keys(data, (), "a network", optional=keys)
    values = {key: value for key, value in data.items() if value is not None}
    values.setdefault("link", None)
    for key in ("link", "inside"):
        if values.get(key) is not None:
            values[key] = _link_from_json(key, values[key])
    if "measured" in values:
        values["measured"] = CommModel.from_json(values["measured"])
    try:
        return Network(**values)
    except TypeError as error:
        raise ValueError(f"a network: {error}") from error


def _link_from_json(name: str, data: Any) -> Link:
    if isinstance(data, Mapping) and "bandwidth" in data:
        check_keys(data, ("bandwidth",), f"a network's {name} with a bandwidth", ("latency",))
        for key, value in data.items():
            if not isinstance(value, str):
                raise ValueError(
                    f'a network\'s {name}: {key} is a text with a unit, such as "10gbit" or '
                    f'"30us", got {value!r}'
                )
        return Link.of(
            units.parse_bandwidth(data["bandwidth"]),
            units.parse_seconds(data.get("latency", "0s")),
        )
    check_keys(data, ("alpha", "beta"), f"a network's {name} (or bandwidth and latency)")
    try:
        return Link(data["alpha"], data["beta"])
    except TypeError as error:
        raise ValueError(f"a network's {name}: {error}") from error


def _published(name: str, latency: float, per_byte: float) -> Cluster:
    """16 workers whose ring all-reduce takes the published line ``latency + per_byte * x``."""
    ring = CommModel.linear(latency, per_byte)
    return Cluster(16, Network(_inverted(ring, 16, "ring", 0.0)), name=name)


PUBLISHED: Mapping[str, Cluster] = MappingProxyType(
    {
        cluster.name: cluster
        for cluster in (
            _published("k80-10gbe", 9.72e-4, 1.97e-9),
            _published("v100-10gbe", 9.08e-4, 7.4e-10),
            _published("v100-56gbib", 2.36e-4, 4.06e-10),
        )
    }
)
"""Three clusters of 16 GPUs, whose all-reduce ``a + b x`` MG-WFBP measured.

The links are what a ring of 16 makes of it: ``alpha = a / 30``, ``beta = b / (2 * 15/16)``.

Source: MG-WFBP, arXiv 1912.09268v2 (its clusters 1 to 3): K80 on 10 Gbit/s Ethernet, V100 on the
same, V100 on 56 Gbit/s InfiniBand.
"""
