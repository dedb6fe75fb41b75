"""What each method sends in a step: sizes, moments at which it may leave, seconds on the link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from hvd_pipe.cocod import assign_fragments
from hvd_pipe.planning import merge
from hvd_pipe.planning.codec import CodecCost
from hvd_pipe.planning.comm import CommModel, blocked_ends
from hvd_pipe.planning.methods import Conventional, LocalSGD, WidePipeSGD
from hvd_pipe.planning.pipelined import Work, plan_pipelined
from hvd_pipe.planning.plan import Plan
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.trials import Gradients
from hvd_pipe.strategy import CoCoD, MergedGradient, PipeSGD

__all__ = [
    "Messages",
    "gradient_messages",
    "least_busy_s",
    "least_seconds",
    "merged_sizes",
    "model_messages",
    "synchronous_limit",
]


FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_SETTLED = 100  # steps, after which a step takes as long as those that follow


@dataclass(frozen=True, eq=False)
class Messages:
    """Messages in the order in which the link carries them.

    Args:
        ready_s: when each may leave, seconds after backward starts; 1-D, not decreasing.
        bytes: uncompressed sizes, 1-D.
        seconds: how long the link carries each, codec included, 1-D.
        network_delay_s: what passes beside (:class:`hvd_pipe.planning.comm.CommModel`).
        blocking: whether it passes before messages and keeps the link idle, as there.
    """

    ready_s: FloatArray
    bytes: FloatArray
    seconds: FloatArray
    network_delay_s: float = 0.0
    blocking: bool = False

    @property
    def total_s(self) -> float:
        """Seconds that the link is busy with all of them."""
        return float(self.seconds.sum())

    @property
    def delay_s(self) -> float:
        """What messages that leave together take longer than the link; 0 where there is none."""
        return self.network_delay_s if len(self.seconds) else 0.0

    @property
    def arrival_s(self) -> float:
        """When the last message is known to have arrived, where the link is free at first.

        ``finish_i = max(finish_{i-1}, R_i) + T_i``: a message waits for the link or its gradients.
        Where it is `blocking`, `hvd_pipe.planning.comm.blocked_ends` says how.
        """
        finish = 0.0
        if self.blocking:
            ready, seconds = self.ready_s.tolist(), self.seconds.tolist()
            return max(blocked_ends(ready, seconds, self.network_delay_s), default=finish)
        for ready, seconds in zip(self.ready_s.tolist(), self.seconds.tolist(), strict=True):
            finish = max(finish, ready) + seconds
        return finish + self.delay_s

    def settled_s(self, profile: ModelProfile, compute_s: float, lag: int) -> float:
        """Seconds of a step that ends with the messages of ``lag`` steps before, where `blocking`.

        No formula is known, as what is negotiated together changes from step to step: so steps
        are followed, and this is their mean once they have settled.

        Args:
            profile: Of the model whose messages these are.
            compute_s: Of a step; what it has more than the profile's passes are updates.
            lag: How many steps they have to arrive.
        """
        begins, ends = [0.0], [0.0] * lag
        update_s = compute_s - profile.forward_s - profile.backward_s
        for step in range(2 * _SETTLED):
            backward = begins[-1] + profile.forward_s
            ready, seconds = (backward + self.ready_s).tolist(), self.seconds.tolist()
            ends.append(blocked_ends(ready, seconds, self.network_delay_s, ends[-1])[-1])
            begins.append(max(backward + profile.backward_s, ends[step]) + update_s)
        return (begins[-1] - begins[_SETTLED]) / _SETTLED


def gradient_messages(
    method: MergedGradient | Conventional | PipeSGD | WidePipeSGD,
    profile: ModelProfile,
    comm: CommModel,
) -> Messages:
    """The messages of a step's gradients.

    Args:
        method: one that averages gradients every step.
        profile: the model.
        comm: all-reduce time of a message, codec included.

    Raises:
        ValueError: a given plan is not about this profile's gradients.

    Example:
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> model = ModelProfile((LayerProfile("a", 4, 1.0), LayerProfile("b", 8, 1.0)))
        >>> net = CommModel.linear(0.0, 1.0)
        >>> gradient_messages(MergedGradient(plan="wfbp"), model, net).bytes.tolist()
        [8.0, 4.0]
    """
    ready, bytes = profile.ready_times(), profile.gradient_bytes().astype(np.float64)
    if not len(bytes):
        return Messages(bytes, bytes, bytes)
    if isinstance(method, MergedGradient):
        plan = method.load_plan()
        if plan is not None:
            return _planned(plan, profile, comm)
        sizes = merged_sizes(method, ready, bytes, comm)
    elif isinstance(method, Conventional):
        sizes = merge.wfbp(ready, bytes, comm)
    elif method.bucket_bytes is not None:
        sizes = merge.by_bytes(bytes, method.bucket_bytes)
    else:
        predicts = isinstance(method, PipeSGD) and method.prediction != "none"
        return _planned(pipelined_plan(profile, comm, predicts), profile, comm)
    ends = np.cumsum(sizes)
    carried = np.add.reduceat(bytes, ends - sizes)
    return Messages(ready[ends - 1], carried, comm(carried), comm.delay, comm.blocking)


def pipelined_plan(profile: ModelProfile, comm: CommModel, predicts: bool = False) -> Plan:
    """The plan of pipe-sgd, as :func:`hvd_pipe.planning.pipelined.plan_pipelined` makes it.

    Args:
        profile: the model.
        comm: all-reduce time of a message, codec included.
        predicts: whether a second update a step predicts the weights.
    """
    ready, bytes = profile.ready_times(), profile.gradient_bytes().astype(np.float64)
    work = Work(profile.forward_s, profile.backward_s, profile.update_s * (1 + predicts))
    return plan_pipelined(Gradients(profile.gradient_order(), ready, bytes), comm, work)


def model_messages(
    method: LocalSGD | CoCoD, profile: ModelProfile, comm: CommModel, codec: CodecCost
) -> Messages:
    """The messages of a round that averages models: one vector, and one of averaged momenta.

    Momenta travel uncompressed, whatever the codec. ``ready_s`` is 0: all leave at once; but with
    fragments there is a message of each, which leaves at the start of its own turn.

    Example:
        >>> from hvd_pipe.planning.codec import NONE
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> model, net = ModelProfile((LayerProfile("a", 4, 1.0),)), CommModel.linear(0.0, 1.0)
        >>> model_messages(CoCoD(momentum="average"), model, net, NONE).bytes.tolist()
        [4.0, 4.0]
    """
    total, coded = float(profile.gradient_bytes().sum()), comm.compressed(codec)
    carried, seconds = [], []
    if total and isinstance(method, CoCoD) and method.fragments > 1:
        sizes = profile.gradient_bytes().tolist()
        carried = [0.0] * method.fragments
        for size, fragment in zip(sizes, assign_fragments(sizes, method.fragments), strict=True):
            carried[fragment] += size
        seconds = [coded(each) for each in carried]
    elif total:
        carried, seconds = [total], [coded(total)]
        if isinstance(method, CoCoD) and method.momentum == "average":
            carried, seconds = [total, total], [*seconds, comm(total)]
    return Messages(np.zeros(len(carried)), np.array(carried), np.array(seconds), coded.delay)


def merged_sizes(
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


@overload
def least_seconds(comm: CommModel, bytes: float) -> float: ...
@overload
def least_seconds(comm: CommModel, bytes: FloatArray) -> FloatArray: ...
def least_seconds(comm: CommModel, bytes: float | FloatArray) -> float | FloatArray:
    """A lower bound of the time that one link needs for X bytes, in messages of any sizes.

    ``X * min over 0 < x <= X of T(x) / x``: messages of x_1 + ... + x_n = X bytes are none longer
    than X, so each takes at least x_i times that rate. For ``T(x) = a + b x`` it is T(X), as one
    message is best; where T jumps, several short ones may be cheaper, and the bound allows that.

    Args:
        comm: all-reduce time of a message.
        bytes: X, a number or an array of any shape; positive.

    Returns:
        Seconds; a float for a number, float64 of the same shape for an array.

    Example:
        >>> least_seconds(CommModel.linear(1.0, 0.5), 8.0)
        5.0
        >>> jump = CommModel((0, 10), (1.0, 100.0), (0.0, 0.0))
        >>> least_seconds(jump, 20.0)  # two messages of 10 bytes less a hair, at 1 s each
        2.0
    """
    # T / x is monotone within a segment: its lowest values are at X and where segments end.
    ends, k = np.array(comm.starts[1:]), np.arange(len(comm.starts) - 1)
    before = (np.array(comm.intercepts)[k] + np.array(comm.slopes)[k] * ends) / ends
    rates = np.minimum.accumulate(np.concatenate(([np.inf], before)))
    sizes = np.asarray(bytes, dtype=np.float64)
    passed = np.searchsorted(ends, sizes, side="right")
    best = np.minimum(comm(sizes), rates[passed] * sizes)
    return best if isinstance(bytes, np.ndarray) else float(best)


def least_busy_s(profile: ModelProfile, comm: CommModel) -> float:
    """A lower bound of the seconds in which the link carries a step's gradients."""
    total = float(profile.gradient_bytes().sum())
    return least_seconds(comm, total) if total else 0.0


def synchronous_limit(profile: ModelProfile, comm: CommModel) -> float:
    """A lower bound of a step of synchronous SGD in which all gradients cross one link.

    The gradients that become ready at R_j or later cross the link after R_j (seconds after
    backward starts), whatever they share a message with, and T never decreases, so what travels
    after R_j takes at least ``least_seconds`` of their bytes. So the last message ends no earlier
    than ``max over j of R_j + least_seconds(P_L - P_{j-1})``; forward comes before, the
    update after.

    Args:
        profile: the model.
        comm: all-reduce time of a message, codec included.

    Returns:
        Seconds per step.

    Example:
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> layers = (LayerProfile("conv", 2, 3.0, 1.0), LayerProfile("fc", 10, 1.0, 1.0))
        >>> synchronous_limit(ModelProfile(layers), CommModel.linear(0.5, 1.0))
        15.5
    """
    finish, sizes = profile.backward_s, profile.gradient_bytes()
    if sizes.size:
        behind = np.cumsum(sizes[::-1].astype(np.float64))[::-1]
        bound = profile.ready_times() + least_seconds(comm, behind)
        finish = max(finish, float(bound.max()))
    return profile.forward_s + finish + profile.update_s
