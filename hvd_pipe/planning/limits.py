"""What no order, grouping or slicing of messages can beat on a given network."""

from __future__ import annotations

from typing import overload

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.profile import ModelProfile

__all__ = ["least_seconds", "synchronous_limit"]

FloatArray = npt.NDArray[np.float64]


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
        Seconds a step.

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
