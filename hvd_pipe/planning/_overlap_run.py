"""Simulate steps whose messages travel behind the next forward pass, too.

::

    worker  | forward t  (wait)  forward t | backward t     | forward t+1
    link        messages of step t-1       |     b   c  c   | a   b  ...   in the plan's order

Each bucket has a gate: the moment of the forward pass at which one of its weights is first used.
There a worker waits until the bucket's last piece has arrived, and each later moment of its pass
is as much later. The updates of the layers are parts of the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning._training_run import TrainingRun, latest
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.overlap import Pass, TimedMessage

__all__ = ["run_overlapped"]

FloatArray = npt.NDArray[np.float64]


def run_overlapped(
    run: TrainingRun, work: Pass, sent: Sequence[TimedMessage], comm: CommModel
) -> None:
    """Run steps in which every worker waits at each gate for messages of the step before."""
    ready = np.array([each.ready_s for each in sent])
    carried = [comm(each.bytes) for each in sent]
    names = _names(sent)
    gates = _gates(sent)
    arrived = [0.0] * len(sent)
    for step in range(run.iterations):
        run.trace.begin(len(sent), len(gates))
        factors, begin = run.factors(), run.begin
        late = np.zeros(len(begin))
        for message in gates:
            late = np.maximum(late, arrived[message] - (begin + factors * sent[message].needed_s))
        forward = begin + work.forward_s * factors + late
        for worker in run.trace.now:
            times = [(sent[i].needed_s, arrived[i], f"bucket {sent[i].bucket}") for i in gates]
            _trace_forward(run, step, worker, float(factors[worker]), times, work.forward_s)
        link = run.free
        for i, leaves in enumerate(latest(forward, factors, ready).tolist()):
            start = max(link, leaves)
            run.send(step, names[i], sent[i].bytes, start, start + carried[i])
            link = arrived[i] = start + sent[i].seconds
        backward = forward + work.backward_s * factors
        run.work[step] = (work.forward_s + work.backward_s) * float(factors.mean())
        _trace_backward(run, step, forward, backward, factors, [sent[i] for i in gates])
        run.finished(step, backward)


def _gates(sent: Sequence[TimedMessage]) -> list[int]:
    """The last message of each bucket, in the order of need."""
    last = {each.bucket: i for i, each in enumerate(sent)}
    return sorted(last.values(), key=lambda i: sent[i].needed_s)


def _names(sent: Sequence[TimedMessage]) -> list[str]:
    """What messages are called: the bucket, and the piece's number where it travels in pieces."""
    buckets = [each.bucket for each in sent]
    return [
        f"bucket {bucket}" + (f"-{buckets[:i].count(bucket)}" if buckets.count(bucket) > 1 else "")
        for i, bucket in enumerate(buckets)
    ]


def _trace_forward(
    run: TrainingRun,
    step: int,
    worker: int,
    factor: float,
    gates: Sequence[tuple[float, float, str]],
    forward_s: float,
) -> None:
    """Note a worker's forward pass, cut where it waits for what has not arrived at a gate."""
    begin = since = float(run.begin[worker])
    late = 0.0
    name = f"forward {step}"
    for needed_s, arrived, bucket in gates:
        at = begin + factor * needed_s + late
        if arrived > at:
            run.trace.note(name, "forward", worker, "compute", since, at, step=step)
            wait = f"wait for {bucket}"
            run.trace.note(wait, "wait", worker, "compute", at, arrived, step=step)
            since, late = arrived, late + arrived - at
    end = begin + factor * forward_s + late
    run.trace.note(name, "forward", worker, "compute", since, end, step=step)


def _trace_backward(
    run: TrainingRun,
    step: int,
    forward: FloatArray,
    backward: FloatArray,
    factors: FloatArray,
    buckets: Sequence[TimedMessage],
) -> None:
    run.trace.add(f"backward {step}", "backward", "compute", forward, backward, step=step)
    for each in buckets:
        at = forward + factors * each.ready_s
        run.trace.add(f"bucket {each.bucket}", "ready", "compute", at, at, step=step)
