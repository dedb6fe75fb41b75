"""How CoCoD's fragments take turns on the link, and what averaging within a node costs a step."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_pipe.planning.cluster import Network
from hvd_pipe.planning.codec import CodecCost
from hvd_pipe.planning.collectives import allreduce
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.messages import Messages, gradient_messages, least_busy_s, model_messages
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.strategy import CoCoD, MergedGradient

__all__ = ["NodeWork", "averaged_behind", "node_comm", "turns_of", "within_node"]


@dataclass(frozen=True)
class NodeWork:
    """What a step of synchronous training within a node adds to one worker's own.

    Args:
        exposed_s: what backward does not hide of its messages.
        busy_s: how long these take.
    """

    exposed_s: float
    busy_s: float


def node_comm(method: object, network: Network) -> CommModel | None:
    """All-reduce time within one machine, where a method is synchronous there.

    Args:
        method: any; of CoCoD, ``within`` counts.
        network: with the link within a machine.

    Returns:
        The time; None where a method sends nothing within nodes, or each has one worker.

    Raises:
        ValueError: it is not known what joins the workers of a machine.

    Example:
        >>> from hvd_pipe.planning.collectives import Link
        >>> nvlink = Network(Link(1e-5, 1e-9), per_node=4, inside=Link(1e-6, 1e-11))
        >>> node_comm(CoCoD(within="node"), nvlink) == allreduce(4, 1e-6, 1e-11)
        True
    """
    if not isinstance(method, CoCoD) or method.within == "none" or network.per_node == 1:
        return None
    if network.inside is None:
        raise ValueError(
            "within=node needs the link within a machine: give the cluster's network one (inside)"
        )
    link = network.inside
    return allreduce(network.per_node, link.alpha, link.beta, network.gamma, network.algorithm)


def within_node(profile: ModelProfile, node: CommModel | None) -> NodeWork | None:
    """What merged-gradient's messages within a node cost a step; None where there are none."""
    if node is None:
        return None
    sent = gradient_messages(MergedGradient(), profile, node)
    return NodeWork(max(0.0, sent.arrival_s - profile.backward_s), sent.total_s)


def turns_of(method: CoCoD, sent: Messages) -> list[list[int]]:
    """The messages of each turn, by number: one fragment's; all that there are with one fragment.

    >>> import numpy as np
    >>> one = Messages(np.zeros(2), np.ones(2), np.ones(2))
    >>> turns_of(CoCoD(momentum="average"), one), turns_of(CoCoD(fragments=2), one)
    ([[0, 1]], [[0], [1]])
    """
    numbers = list(range(len(sent.seconds)))
    if method.fragments == 1:
        return [numbers]
    return [[number] for number in numbers] or [[] for _ in range(method.fragments)]


def averaged_behind(
    method: CoCoD,
    profile: ModelProfile,
    comm: CommModel,
    codec: CodecCost,
    node: CommModel | None = None,
) -> tuple[Messages, float, float]:
    """The messages of a round of CoCoD, seconds of a step, and a lower bound of these.

    Fragments travel behind ``tau = period / fragments`` steps each. With c a step's computation
    and m_p what fragment p takes::

        period * step = sum over p of max(tau c, m_p)

    Within a node of several workers c grows by what their messages take longer than backward.
    They queue behind the models' message that has left before, so the first step of a turn takes
    at least ``m_p + (the node's messages) + (the update)``.

    Example:
        >>> from hvd_pipe.planning.codec import NONE
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> model = ModelProfile((LayerProfile("a", 6, 1.0), LayerProfile("b", 10, 1.0)))
        >>> halves = CoCoD(period=4, fragments=2)
        >>> averaged_behind(halves, model, CommModel.linear(0.0, 0.5), NONE)[1]
        2.25
    """
    sent, work = model_messages(method, profile, comm, codec), within_node(profile, node)
    least = least_busy_s(profile, comm.compressed(codec))
    if method.momentum == "average":
        least += least_busy_s(profile, comm)
    limit = max(profile.compute_s, least / method.period)
    if method.fragments == 1 and work is None:
        # Written so that nothing is lost where m is far below k c.
        return sent, max(profile.compute_s, sent.arrival_s / method.period), limit
    compute, total = profile.compute_s + (work.exposed_s if work else 0.0), 0.0
    for turn in turns_of(method, sent):
        arrival = float(sent.seconds[turn].sum()) + sent.delay_s
        if work is None:
            total += max(method.turn * compute, arrival)
        else:
            first = max(compute, arrival + work.busy_s + profile.update_s)
            total += first + (method.turn - 1) * compute
    return sent, total / method.period, limit
