"""The time of a step of every method where all workers are alike, and what no method can beat.

Source: MG-WFBP, arXiv 1912.09268; Pipe-SGD, arXiv 1811.03619; CoCoD-SGD, arXiv 1906.12043.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning.comm import NONE, CodecCost, CommModel
from hvd_pipe.planning.methods import LocalSGD, Method, WidePipeSGD, parse
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.simulate import Links, Workers, simulate_workers
from hvd_pipe.strategy import CoCoD, MergedGradient, PipeSGD

__all__ = ["StepTime", "step_time"]

FloatArray = npt.NDArray[np.float64]

_STEPS = 100
_ROUNDING = 1e-12  # relative


@dataclass(frozen=True)
class StepTime:
    """What a step takes once the method has settled; means over a round where there are rounds.

    Args:
        method: as :func:`hvd_pipe.planning.methods.label` writes it.
        compute_s: seconds of a worker's own work: forward, backward, update (two with prediction).
        comm_s: seconds in which the link is busy.
        total_s, limit_s: seconds of a step, and a lower bound of it: the method's physical limit.
        messages: how many a step.
    """

    method: str
    compute_s: float
    comm_s: float
    total_s: float
    limit_s: float
    messages: float

    @property
    def exposed_s(self) -> float:
        """Seconds per step in which computation waits for the network."""
        return max(0.0, self.total_s - self.compute_s)

    @property
    def of_limit(self) -> float:
        """Limit over total: 1.0 is as fast as the method can be on this network."""
        return min(1.0, self.limit_s / self.total_s) if self.total_s > 0.0 else 1.0

    def speedup(self, workers: int) -> float:
        """Samples per second over those of one worker that computes alone."""
        return workers * self.compute_s / self.total_s if self.total_s > 0.0 else float(workers)


def step_time(
    method: Method | str,
    profile: ModelProfile,
    comm: CommModel,
    codec: CodecCost = NONE,
    node: CommModel | None = None,
) -> StepTime:
    """The time of a step on workers that are alike, simulated until it has settled.

    Args:
        method: a method or its string, such as ``"cocod:period=8"``.
        profile: the model on one worker.
        comm, codec: all-reduce time of an uncompressed message, and compression of what travels.
        node: all-reduce time within a node, for ``within=node``.

    Raises:
        TypeError, ValueError: an unknown method, or a plan of another model.

    Example:
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> layers = (LayerProfile("conv", 2, 3.0, 1.0), LayerProfile("fc", 10, 1.0, 1.0))
        >>> net = CommModel.linear(0.5, 1.0)
        >>> for name in ("conventional", "wfbp", "pipe-sgd", "cocod"):
        ...     print(name, step_time(name, ModelProfile(layers), net).total_s)
        conventional 19.0
        wfbp 16.0
        pipe-sgd 12.5
        cocod 6.0
    """
    method = parse(method)
    alike = Workers(np.ones(1), 0.0, np.random.default_rng(0))
    run = simulate_workers(profile, Links(comm, node), alike, method, codec, _STEPS)
    compute = profile.compute_s
    if isinstance(method, PipeSGD) and method.prediction != "none":
        compute += profile.update_s  # one more update, with the guess
    # Sums over many steps round: what is hidden takes no longer than computing.
    total = compute if abs(run.step_s - compute) <= _ROUNDING * compute else run.step_s
    limit = _limit_s(method, compute, profile, comm, codec)
    return StepTime(run.method, compute, run.comm_s, total, limit, run.messages)


def _limit_s(
    method: Method, compute: float, profile: ModelProfile, comm: CommModel, codec: CodecCost
) -> float:
    """What no order, grouping or slicing of a method's messages beats."""
    net = comm.compressed(codec)
    if isinstance(method, CoCoD):
        least = least_busy_s(profile, net)
        if method.momentum == "average":
            least += least_busy_s(profile, comm)
        return max(compute, least / method.period)
    if isinstance(method, MergedGradient) and method.overlaps_forward:
        return max(compute, least_busy_s(profile, net))
    synchronous = synchronous_limit(profile, net)
    if isinstance(method, LocalSGD):
        return compute + (synchronous - compute) / method.period
    if isinstance(method, PipeSGD | WidePipeSGD):
        width = method.width if isinstance(method, WidePipeSGD) else 2
        return max(compute, least_busy_s(profile, net), synchronous / width)
    return synchronous


@overload
def least_seconds(comm: CommModel, bytes: float) -> float: ...
@overload
def least_seconds(comm: CommModel, bytes: FloatArray) -> FloatArray: ...
def least_seconds(comm: CommModel, bytes: float | FloatArray) -> float | FloatArray:
    """A lower bound of the time that one link needs for X bytes, in messages of any sizes.

    ``X * min over 0 < x <= X of T(x) / x``: messages of x_1 + ... + x_n = X bytes are none longer
    than X, so each takes at least x_i times that rate. For ``T(x) = a + b x`` it is T(X), as one
    message is best; where T jumps, several short ones may be cheaper, and the bound allows that.

    Example:
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
    """
    finish, sizes = profile.backward_s, profile.gradient_bytes()
    if sizes.size:
        behind = np.cumsum(sizes[::-1].astype(np.float64))[::-1]
        bound = profile.ready_times() + least_seconds(comm, behind)
        finish = max(finish, float(bound.max()))
    return profile.forward_s + finish + profile.update_s
