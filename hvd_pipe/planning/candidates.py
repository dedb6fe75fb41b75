"""hvd_pipe's strategies with the options that a model and a network ask for."""

from __future__ import annotations

import math
from dataclasses import replace

from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.methods import DEFAULT_BUCKET_BYTES
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.timing import step_time
from hvd_pipe.strategy import CoCoD, MergedGradient, PipeSGD

__all__ = ["candidates", "fitted_buckets", "fitted_period"]

WORTH = 0.01
"""Larger buckets have to save this part of a step, as they cost a user an option."""


def candidates(
    profile: ModelProfile, comm: CommModel, compute_s: float | None = None
) -> tuple[MergedGradient, PipeSGD, CoCoD]:
    """One of each strategy, as it fits.

    Args:
        profile: the model on one worker.
        comm: all-reduce time of a message.
        compute_s: a worker's own work a step, in seconds; None: the profile's.

    Example:
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> model = ModelProfile((LayerProfile("fc", 1000, backward_s=0.01),))
        >>> for method in candidates(model, CommModel.linear(0.035, 0.0)):
        ...     print(method)
        MergedGradient(plan='auto', bucket_bytes=None)
        PipeSGD(warmup_steps=0, bucket_bytes=None, prediction='none')
        CoCoD(period=4, warmup_steps=0, weights=None, momentum='local', pull_back=None, \
anchor_momentum=0.0)
    """
    period = fitted_period(profile, comm, profile.compute_s if compute_s is None else compute_s)
    return MergedGradient(), fitted_buckets(PipeSGD(), profile, comm), CoCoD(period=period)


def fitted_period(profile: ModelProfile, comm: CommModel, compute_s: float) -> int:
    """CoCoD's period that just hides its all-reduce: ``max(2, ceil((m + delay) / c))``.

    A longer one buys no time and lets the replicas drift further apart.
    """
    average = step_time(CoCoD(period=1), profile, comm).comm_s + comm.delay
    # Rounding must not make a step of what is a whole number of them.
    return max(2, math.ceil(average / compute_s - 1e-9)) if compute_s > 0.0 else 2


def fitted_buckets(method: PipeSGD, profile: ModelProfile, comm: CommModel) -> PipeSGD:
    """Pipe-SGD with larger buckets where the latencies of the usual ones would stick out.

    Its messages have the whole next step to travel in, so nothing is lost by sending fewer: the
    least doubling of the usual size that hides all of them, else the last that gains a part of
    `WORTH`.
    """
    best, least = method, step_time(method, profile, comm)
    size, total = DEFAULT_BUCKET_BYTES, int(profile.gradient_bytes().sum())
    while least.exposed_s > 0.0 and size < total:
        size *= 2
        wider = replace(method, bucket_bytes=size)
        time = step_time(wider, profile, comm)
        if time.total_s < (1.0 - WORTH) * least.total_s:
            best, least = wider, time
    return best
