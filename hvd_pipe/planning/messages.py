"""What each method sends in a step: sizes, moments at which it may leave, seconds on the link."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning import merge
from hvd_pipe.planning.codec import CodecCost
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.methods import (
    DEFAULT_BUCKET_BYTES,
    Conventional,
    LocalSGD,
    WidePipeSGD,
)
from hvd_pipe.planning.plan import Plan
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.strategy import CoCoD, MergedGradient, PipeSGD

__all__ = ["Messages", "gradient_messages", "model_messages"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Messages:
    """Messages in the order in which the link carries them.

    Args:
        ready_s: when each may leave, seconds after backward starts; 1-D, not decreasing.
        bytes: uncompressed sizes, 1-D.
        seconds: how long the link carries each, codec included, 1-D.
        network_delay_s: what passes beside (:class:`hvd_pipe.planning.comm.CommModel`).
    """

    ready_s: FloatArray
    bytes: FloatArray
    seconds: FloatArray
    network_delay_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds that the link is busy with all of them."""
        return float(self.seconds.sum())

    @property
    def delay_s(self) -> float:
        """Seconds from the end of the last message to its being known; 0 where there is none."""
        return self.network_delay_s if len(self.seconds) else 0.0

    @property
    def arrival_s(self) -> float:
        """When the last message is known to have arrived, where the link is free at first.

        ``finish_i = max(finish_{i-1}, R_i) + T_i``: a message waits for the link or its gradients.
        """
        finish = 0.0
        for ready, seconds in zip(self.ready_s.tolist(), self.seconds.tolist(), strict=True):
            finish = max(finish, ready) + seconds
        return finish + self.delay_s


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
        sizes = _merged(method, ready, bytes, comm)
    elif isinstance(method, Conventional):
        sizes = merge.wfbp(ready, bytes, comm)
    else:
        sizes = merge.by_bytes(bytes, method.bucket_bytes or DEFAULT_BUCKET_BYTES)
    ends = np.cumsum(sizes)
    carried = np.add.reduceat(bytes, ends - sizes)
    return Messages(ready[ends - 1], carried, comm(carried), comm.delay)


def model_messages(
    method: LocalSGD | CoCoD, profile: ModelProfile, comm: CommModel, codec: CodecCost
) -> Messages:
    """The messages of a round that averages models: one vector, and one of averaged momenta.

    Momenta travel uncompressed, whatever the codec. ``ready_s`` is 0: all leave at once.

    Example:
        >>> from hvd_pipe.planning.codec import NONE
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> model, net = ModelProfile((LayerProfile("a", 4, 1.0),)), CommModel.linear(0.0, 1.0)
        >>> model_messages(CoCoD(momentum="average"), model, net, NONE).bytes.tolist()
        [4.0, 4.0]
    """
    total, coded = float(profile.gradient_bytes().sum()), comm.compressed(codec)
    carried, seconds = [], []
    if total:
        carried, seconds = [total], [coded(total)]
        if isinstance(method, CoCoD) and method.momentum == "average":
            carried, seconds = [total, total], [*seconds, comm(total)]
    return Messages(np.zeros(len(carried)), np.array(carried), np.array(seconds), coded.delay)


def _merged(
    method: MergedGradient, ready: FloatArray, bytes: FloatArray, comm: CommModel
) -> IntArray:
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
    return Messages(np.maximum.accumulate(moments), carried, comm(carried), comm.delay)
