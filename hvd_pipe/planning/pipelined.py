"""The buckets of pipe-sgd: the fewest messages that keep its step at max(c, m).

Gradients of a step are applied at the end of the next one, so all of them may leave as late as at
the end of backward. Let a step begin at x, and the link be done with the messages before at y. A
worker needs forward f, backward b and update u, ``c = f + b + u``, and p times as long in this
step. The messages take m in all and have arrived a delay d after they end::

    x' = max(x + p c,  y + d + p u)      waits for the average of the step before, then updates
    y' = max(y + m,    x + a(p))         one message at a time, first in, first out
    a(p) = max over messages i of p (f + R_i) + T_i + T_i+1 + ... + T_last

These are two rows of a matrix in (max, +), so a step takes its eigenvalue: the largest of ``c``,
``m`` and ``(a + d + u) / 2``. Where steps take 1 + e and 1 - e in turn, the matrix is a product of
two. One message, which leaves as backward ends, then has no slack where m is about c. Messages
that leave earlier have, as the link has work while backward goes on.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.dtype_groups import plan_dtype_groups
from hvd_pipe.planning.plan import Plan
from hvd_pipe.planning.trials import Gradients

__all__ = ["Work", "pipelined_step", "plan_pipelined"]

FloatArray = npt.NDArray[np.float64]

MARGIN = 0.005
"""A plan with fewer messages may be this part slower."""
UNEVEN = 0.05
"""By how much the steps of a job are longer and shorter than their mean, at the least."""

_MOST = 256
_LIMITS_PER_OCTAVE = 4


class Work(NamedTuple):
    """A worker's own work in a step, in seconds."""

    forward_s: float
    backward_s: float
    update_s: float


def pipelined_step(
    ready: npt.ArrayLike,
    seconds: npt.ArrayLike,
    work: Work,
    delay: float = 0.0,
    uneven: float = 0.0,
) -> float:
    """The seconds of a step that applies the average of the step before.

    Args:
        ready: 1-D, when each message may leave, seconds after backward starts; in the order of
            sending.
        seconds: 1-D, how long the link is busy with each.
        work: Of a worker.
        delay: Seconds from the end of the last message to its being known.
        uneven: How much longer and shorter steps are in turn, as a part.

    Example:
        >>> work = Work(forward_s=1.0, backward_s=2.0, update_s=0.0)
        >>> pipelined_step([2.0], [3.0], work), pipelined_step([1.0, 2.0], [2.0, 1.0], work)
        (3.0, 3.0)
        >>> round(pipelined_step([2.0], [3.0], work, uneven=0.1), 6)
        3.15
        >>> pipelined_step([1.0, 2.0], [2.0, 1.0], work, uneven=0.1)
        3.0
    """
    released = work.forward_s + np.asarray(ready, dtype=np.float64)
    behind = np.cumsum(np.asarray(seconds, dtype=np.float64)[::-1])[::-1]
    compute, busy = sum(work), float(behind[0])

    def matrix(pace: float) -> FloatArray:
        last = float((pace * released + behind).max())
        return np.array([[pace * compute, delay + pace * work.update_s], [last, busy]])

    one, other = matrix(1.0 + uneven), matrix(1.0 - uneven)
    both = (one[:, :, None] + other[None, :, :]).max(axis=1)
    return float(max(both[0, 0], both[1, 1], (both[0, 1] + both[1, 0]) / 2)) / 2


def plan_pipelined(gradients: Gradients, comm: CommModel, work: Work) -> Plan:
    """The fewest messages with which a step of pipe-sgd takes no longer than with any number.

    Buckets are filled up to sizes from all bytes down to a 256th part; the best plan with a
    barrier is tried, too, so that no step is longer than merged-gradient's. Of the plans whose
    steps are within `MARGIN` of the least, the result has the fewest messages that are as good
    where steps are uneven. Where ``comm`` is ``blocking``, each message counts as one by itself.

    Args:
        gradients: In the order in which they are ready.
        comm: All-reduce time of a message.
        work: Of a worker.

    Example:
        >>> found = Gradients("cba", np.array([0.0, 1.0, 2.0]), np.array([4.0, 4.0, 4.0]))
        >>> work = Work(forward_s=1.0, backward_s=2.0, update_s=0.0)
        >>> plan_pipelined(found, CommModel.linear(0.5, 0.1), work).buckets
        (('c', 'b', 'a'),)
        >>> plan_pipelined(found, CommModel.linear(0.01, 0.24), work).buckets
        (('c', 'b'), ('a',))
    """
    comm = comm.each_alone()
    found = [
        _Option(plan, *_steps(plan, gradients, comm, work)) for plan in _plans(gradients, comm)
    ]
    least = min(each.step_s for each in found)
    found = [each for each in found if each.step_s <= (1.0 + MARGIN) * least]
    least = min(each.uneven_s for each in found)
    found = [each for each in found if each.uneven_s <= (1.0 + MARGIN) * least]
    best = min(found, key=lambda each: (len(each.plan.buckets), each.uneven_s))
    return best.plan


class _Option(NamedTuple):
    plan: Plan
    step_s: float
    uneven_s: float


def _steps(plan: Plan, gradients: Gradients, comm: CommModel, work: Work) -> tuple[float, float]:
    messages = gradients.messages(plan)
    ready = [each.ready_s for each in messages]
    seconds = comm(np.array([each.bytes for each in messages]))
    return (
        pipelined_step(ready, seconds, work, comm.delay),
        pipelined_step(ready, seconds, work, comm.delay, UNEVEN),
    )


def _plans(gradients: Gradients, comm: CommModel) -> list[Plan]:
    """Plans to choose from, no two alike; their times are of a barrier, and are left out."""

    def plan(method: str, limit: int | None = None) -> Plan:
        kinds = gradients.kinds or [None] * len(gradients.names)
        times = gradients.ready_s, gradients.bytes
        found = plan_dtype_groups(gradients.names, *times, kinds, comm, method, limit)
        return replace(found, predicted_s=None, exposed_s=None)

    total, found = float(gradients.bytes.sum()), [plan("exact")]
    for i in range(_LIMITS_PER_OCTAVE * int(math.log2(_MOST)) + 1):
        found.append(plan("bytes", max(1, math.ceil(total * 2.0 ** (-i / _LIMITS_PER_OCTAVE)))))
        if len(found[-1].buckets) == len(gradients.names):
            break
    return list({each.buckets: each for each in found}.values())
