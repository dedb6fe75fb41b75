"""What each method sends in a step: sizes, moments at which it may leave, seconds on the link."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvd_pipe.cocod import assign_fragments
from hvd_pipe.planning import merge
from hvd_pipe.planning.cluster import Network, allreduce
from hvd_pipe.planning.comm import CodecCost, CommModel, blocked_ends
from hvd_pipe.planning.methods import DEFAULT_BUCKET_BYTES, Conventional, LocalSGD, WidePipeSGD
from hvd_pipe.planning.overlap import Pass, TimedMessage, in_order, plan_overlap, timed_messages
from hvd_pipe.planning.plan import Plan
from hvd_pipe.planning.profile import FORWARD, ModelProfile
from hvd_pipe.strategy import CoCoD, MergedGradient, PipeSGD

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Messages:
    """Messages in the order in which the link carries them; delay and blocking of `CommModel`."""

    ready_s: FloatArray  # when each may leave, seconds after backward starts; not decreasing
    bytes: FloatArray  # uncompressed
    seconds: FloatArray  # how long the link carries each, codec included
    network_delay_s: float = 0.0
    blocking: bool = False

    @property
    def delay_s(self) -> float:
        """What messages that leave together take longer than the link; 0 where there is none."""
        return self.network_delay_s if len(self.seconds) else 0.0

    @property
    def arrival_s(self) -> float:
        """When the last message is known to have arrived, where the link is free at first."""
        finish = 0.0
        if self.blocking:
            ready, seconds = self.ready_s.tolist(), self.seconds.tolist()
            return max(blocked_ends(ready, seconds, self.network_delay_s), default=finish)
        for ready, seconds in zip(self.ready_s.tolist(), self.seconds.tolist(), strict=True):
            finish = max(finish, ready) + seconds
        return finish + self.delay_s


def gradient_messages(
    method: MergedGradient | Conventional | PipeSGD | WidePipeSGD,
    profile: ModelProfile,
    comm: CommModel,
) -> Messages:
    """The messages of a step's gradients; ``comm`` has the codec."""
    ready, bytes = profile.ready_times(), profile.gradient_bytes().astype(np.float64)
    if not len(bytes):
        return Messages(bytes, bytes, bytes)
    if isinstance(method, MergedGradient):
        plan = method.load_plan()
        if plan is not None:
            return _planned(plan, profile, comm)
        sizes = _merged_sizes(method, ready, bytes, comm)
    elif isinstance(method, Conventional):
        sizes = merge.wfbp(ready, bytes, comm)
    else:
        sizes = merge.by_bytes(bytes, method.bucket_bytes or DEFAULT_BUCKET_BYTES)
    ends = np.cumsum(sizes)
    carried = np.add.reduceat(bytes, ends - sizes)
    return Messages(ready[ends - 1], carried, comm(carried), comm.delay, comm.blocking)


def model_messages(
    method: LocalSGD | CoCoD, profile: ModelProfile, comm: CommModel, codec: CodecCost
) -> Messages:
    """The messages of a round that averages models: one vector, and one of averaged momenta.

    Momenta travel uncompressed, whatever the codec. ``ready_s`` is 0: all leave at once; but with
    fragments there is a message of each, which leaves at the start of its own turn.
    """
    total, coded = float(profile.gradient_bytes().sum()), comm.compressed(codec)
    carried, seconds = [], []
    if total and isinstance(method, CoCoD) and method.fragments > 1:
        sizes = profile.gradient_bytes().tolist()
        carried = [0.0] * method.fragments
        for size, fragment in zip(sizes, assign_fragments(sizes, method.fragments), strict=True):
            carried[fragment] += size
        seconds = [coded(fragment_bytes) for fragment_bytes in carried]
    elif total:
        carried, seconds = [total], [coded(total)]
        if isinstance(method, CoCoD) and method.momentum == "average":
            carried, seconds = [total, total], [*seconds, comm(total)]
    return Messages(np.zeros(len(carried)), np.array(carried), np.array(seconds), coded.delay)


def turns_of(method: CoCoD, sent: Messages) -> list[list[int]]:
    """The messages of each turn, by number: one fragment's; with one fragment, all of them."""
    numbers = list(range(len(sent.seconds)))
    if method.fragments == 1:
        return [numbers]
    return [[number] for number in numbers] or [[] for _ in range(method.fragments)]


def overlapped_messages(
    method: MergedGradient, profile: ModelProfile, comm: CommModel
) -> tuple[Pass, list[TimedMessage]]:
    """What a worker computes under ``overlap="forward"``, and its messages in the link's order.

    Each layer is updated just before its forward pass. The time of all updates is divided among
    the layers by their bytes. A running job's profile (`choice.profile_of`) has one number for the
    whole forward pass, which is assumed to be spread as backward is, in reverse order.
    """
    names, work, plan = profile.gradient_order(), _work(profile), method.load_plan()
    if plan is not None:
        _planned(plan, profile, comm)  # raises where the plan is another model's
    elif method == MergedGradient(overlap="forward"):
        plan = plan_overlap(names, work, comm)
    else:
        ends = np.cumsum(_merged_sizes(method, work.ready_s, work.bytes, comm)).tolist()
        buckets = [names[begin:end] for begin, end in itertools.pairwise([0, *ends])]
        plan = Plan(tuple(buckets), str(method.plan))
    if plan.order is None:
        plan = in_order(plan, names, work)
    assert plan.order is not None
    index = {name: i for i, name in enumerate(names)}
    partition = [
        ([index[name] for name in bucket], plan.order.count(number))
        for number, bucket in enumerate(plan.buckets)
    ]
    of_bucket = {message.bucket: message for message in timed_messages(work, comm, partition)}
    return work, [of_bucket[number] for number in plan.order]


@dataclass(frozen=True)
class NodeWork:
    """Seconds that synchronous training within a node adds to a worker's step."""

    exposed_s: float  # what backward does not hide of its messages
    busy_s: float  # how long these take


def node_comm(method: object, network: Network) -> CommModel | None:
    """All-reduce time within one machine, where a method is synchronous there, else None."""
    if not isinstance(method, CoCoD) or method.within == "none" or network.per_node == 1:
        return None
    if network.inside is None:
        raise ValueError(
            "within=node needs the link within a machine: give the cluster's network one (inside)"
        )
    link = network.inside
    return allreduce(network.per_node, link.alpha, link.beta, network.gamma, network.algorithm)


def within_node(profile: ModelProfile, node: CommModel) -> NodeWork:
    """What merged-gradient's messages within a node cost a step."""
    sent = gradient_messages(MergedGradient(), profile, node)
    return NodeWork(max(0.0, sent.arrival_s - profile.backward_s), float(sent.seconds.sum()))


def _merged_sizes(
    method: MergedGradient, ready: FloatArray, bytes: FloatArray, comm: CommModel
) -> IntArray:
    """How many gradients each bucket has, where no plan is given."""
    if method.bucket_bytes is not None:
        return merge.by_bytes(bytes, method.bucket_bytes)
    rule = "exact" if method.plan == "auto" else str(method.plan)
    return merge.sizes_of(ready, bytes, comm, rule)


def _planned(plan: Plan, profile: ModelProfile, comm: CommModel) -> Messages:
    names = profile.gradient_order()
    if set(plan.names) != set(names):
        odd = sorted(set(plan.names) ^ set(names))
        raise ValueError(
            f"the plan is about other gradients than the profile: {len(plan.names)} names against "
            f"{len(names)}, {odd[0]!r} is in one of them only; profile the model that was planned"
        )
    ready = dict(zip(names, profile.ready_times().tolist(), strict=True))
    size = dict(zip(names, profile.gradient_bytes().tolist(), strict=True))
    moments = np.array([max(ready[name] for name in bucket) for bucket in plan.buckets])
    carried = np.array([float(sum(size[name] for name in bucket)) for bucket in plan.buckets])
    # The link carries them in the plan's order: none leaves before those in front of it.
    ready_s = np.maximum.accumulate(moments)
    return Messages(ready_s, carried, comm(carried), comm.delay, comm.blocking)


def _work(profile: ModelProfile) -> Pass:
    bytes = profile.gradient_bytes().astype(np.float64)
    update_s = {
        name: profile.update_s * size / bytes.sum()
        for name, size in zip(profile.gradient_order(), bytes.tolist(), strict=True)
    }
    needed_s, now = [], 0.0
    for layer, forward_s in zip(profile.layers, _forward_s(profile), strict=True):
        if layer.gradient_bytes:
            needed_s.append(now)
        now += forward_s + update_s.get(layer.name, 0.0)
    return Pass(profile.ready_times(), np.array(needed_s[::-1]), bytes, now, profile.backward_s)


def _forward_s(profile: ModelProfile) -> list[float]:
    """Seconds of each layer's forward pass; a running job's are assumed."""
    seconds = [layer.forward_s for layer in profile.layers]
    if profile.layers[0].name != FORWARD:
        return seconds
    parts = [layer.backward_s for layer in profile.layers]
    if not any(parts):
        parts = [float(layer.gradient_bytes > 0) for layer in profile.layers]
    return [sum(seconds) * part / sum(parts) for part in parts]
