"""Which messages a step leaves to the next one, where a step is one call of a graph."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_pipe.planning.overlap import Pass, plan_overlap
from hvd_pipe.planning.plan import Plan
from hvd_pipe.planning.trials import HIDDEN, Gradients, Trial, fitted_to_waits

__all__ = ["deferring_plan", "first_deferred"]


def first_deferred(plan: Plan) -> int:
    """How many messages of a plan's order must have arrived when the next forward pass begins.

    Buckets stand in the order in which they are ready, so the last one has what is needed first.
    All that is sent up to its last message arrives before that one, in any case.

    Args:
        plan: With an ``order``.

    Example:
        >>> first_deferred(Plan((("c",), ("b",), ("a",)), "overlap", order=(0, 1, 0, 2, 1, 0)))
        4
    """
    assert plan.order is not None
    return len(plan.order) - plan.order[::-1].index(len(plan.buckets) - 1)


def deferring_plan(tried: Sequence[Trial], gradients: Gradients) -> Plan | None:
    """The plan without the barrier that follows from plans with it, tried in training.

    A message costs what their waits show. Forward is taken to be all of a step that is no backward
    and no wait, spread over the parameters as backward is, in reverse order.

    Args:
        tried: Plans with the barrier; one at least.
        gradients: What they send.

    Returns:
        A plan with an ``order``; None where the fastest plan hardly waits, or where all messages
        must have arrived when the next forward pass begins.

    Example:
        >>> import numpy as np
        >>> ready, sizes = np.array([0.0, 1.0, 2.0]), np.array([6.0, 2.0, 1.0])
        >>> gradients = Gradients("cba", ready, sizes)
        >>> tried = [Trial(Plan((("c",), ("b",), ("a",)), "wfbp"), 7.5, 2.5)]
        >>> plan = deferring_plan(tried, gradients)
        >>> plan.buckets, plan.order[first_deferred(plan):]
        ((('c',), ('b',), ('a',)), (1, 0, 0))
    """
    best, backward_s = min(tried, key=lambda each: each.step_s), float(gradients.ready_s.max())
    if best.wait_s <= HIDDEN * best.step_s:
        return None
    forward_s = max(0.0, best.step_s - best.wait_s - backward_s)
    needed_s = forward_s * (1.0 - gradients.ready_s / max(backward_s, 1e-9))
    work = Pass(gradients.ready_s, needed_s, gradients.bytes, forward_s, backward_s)
    comm = fitted_to_waits(tried, gradients)
    plan = plan_overlap(gradients.names, work, comm, gradients.kinds)
    assert plan.order is not None
    return plan if first_deferred(plan) < len(plan.order) else None
