"""What a method needs of a worker's memory, besides activations."""

from __future__ import annotations

from hvd_pipe.planning.codec import NONE, CodecCost
from hvd_pipe.planning.methods import HorovodFusion, LocalSGD, Method, WidePipeSGD
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.strategy import CoCoD, PipeSGD

__all__ = ["memory_bytes"]


def memory_bytes(
    method: Method, profile: ModelProfile, codec: CodecCost = NONE, optimizer_ratio: float = 1.0
) -> int:
    """Weights, gradients, optimizer state and the method's buffers on one worker.

    In copies of the model, besides weights and the optimizer's state::

        merged-gradient, conventional   1    gradients, which are views into the buckets
        horovod                         1    and the fusion buffer, as large as the threshold
        pipe-sgd                        2    two sets of buckets; prediction=previous: 3, of the
                                             true weights; local: 5, of own gradients as well
        wide-pipe-sgd                   K    a set of buckets for each step in flight
        local-sgd                       2    gradients, and the vector that travels
        cocod                           3    gradients, the vector, the models of the round's start
                                             (pull_back: no start, but 2 for the anchor where it
                                             has momentum; a codec: 1 for the last mean; averaged
                                             momentum: the vector and start of momenta, too)

    Args:
        method: any.
        profile: the model; its gradients are as large as its weights.
        codec: compression; its own small buffers are not counted.
        optimizer_ratio: bytes of optimizer state a byte of weights: 1 with momentum, 2 with Adam.

    Raises:
        ValueError: a negative ratio.

    Example:
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> model = ModelProfile((LayerProfile("fc", 1000, 0.1),))
        >>> memory_bytes(PipeSGD(), model), memory_bytes(CoCoD(), model, optimizer_ratio=2.0)
        (4000, 6000)
    """
    if not optimizer_ratio >= 0.0:
        raise ValueError(
            "the optimizer's bytes a byte of weights must be at least 0 (0 plain SGD, 1 momentum, "
            f"2 Adam), got {optimizer_ratio}"
        )
    copies, extra = 1.0, 0
    if isinstance(method, PipeSGD):
        copies = {"none": 2.0, "previous": 3.0, "local": 5.0}[method.prediction]
    elif isinstance(method, WidePipeSGD):
        copies = float(method.width)
    elif isinstance(method, LocalSGD):
        copies = 2.0
    elif isinstance(method, CoCoD):
        averaged = 2.0 if method.pull_back is None else 1.0  # the vector, and the start
        copies += averaged + (codec.ratio != 1.0) + (2.0 if method.anchor_momentum else 0.0)
        copies += averaged * optimizer_ratio if method.momentum == "average" else 0.0
    elif isinstance(method, HorovodFusion):
        extra = method.threshold_bytes
    model = int(profile.gradient_bytes().sum())
    return round(model * (1.0 + optimizer_ratio + copies)) + extra
