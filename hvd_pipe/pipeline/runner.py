"""Runs epochs of a schedule on this worker, and gathers what all workers report of them."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from hvd_pipe.pipeline.build import Connections
from hvd_pipe.pipeline.executor import Times, evaluation_program, execute
from hvd_pipe.pipeline.plans import Assignment
from hvd_pipe.pipeline.stage import Stage, Tally
from hvd_pipe.planning.schedule import Backward, Instruction, Worker, program
from hvd_pipe.runtime.timeline import Recorder


@dataclass(frozen=True)
class EpochStats:
    """What all workers together did in a run; the same on every rank.

    Args:
        loss: Mean over the minibatches; in an evaluation, over the samples.
        metric: Likewise, of the engine's ``metric_fn``; None without one.
        minibatches: How many there were.
        samples: How many they held.
        seconds: From the first forward pass to the last update of the slowest worker.
        compute_s: Seconds in which each worker, by rank, computed.
        wait_s: Seconds in which it waited for others.
        utilisation: The part of the steady state, after the pipeline has filled and before it
            drains, in which it computed.
        period_s: Seconds a minibatch in the steady state; 0 where there was none.
        sent_bytes: Payload that it sent to other stages; gradients among replicas not included.
    """

    loss: float
    metric: float | None
    minibatches: int
    samples: int
    seconds: float
    compute_s: tuple[float, ...]
    wait_s: tuple[float, ...]
    utilisation: tuple[float, ...]
    period_s: float
    sent_bytes: tuple[int, ...]

    def __str__(self) -> str:
        metric = "" if self.metric is None else f"  metric {self.metric:.4f}"
        return (
            f"loss {self.loss:.4f}{metric}  {self.samples / self.seconds:.1f} samples/s  "
            f"{self.seconds:.2f} s"
        )


@dataclass(kw_only=True)
class BuiltPipeline(ABC):
    """A worker's part of a pipeline; `most_samples` are those that a message has room for."""

    connections: Connections
    stage: Stage
    most_samples: int
    recorder: Recorder
    has_metric: bool
    _sent_before: int = 0

    @property
    def assignment(self) -> Assignment:
        """The stage and the schedule of this worker."""
        return self.connections.assignment

    @abstractmethod
    def average_statistics(self) -> None:
        """Average what is not trained, as BatchNorm's statistics, over the stage's replicas."""

    def train(self, minibatches: int, *, progress: bool) -> EpochStats:
        """Train on an epoch of minibatches: fill the pipeline, run it, and drain it."""
        assignment = self.assignment
        steps = program(
            assignment.mode.method,
            assignment.layout.replicas,
            assignment.worker,
            minibatches,
            assignment.microbatches,
            assignment.partition.in_transit,
        )
        return self._run(list(steps), minibatches, training=True, progress=progress)

    def evaluate(self, minibatches: int, microbatches: int) -> EpochStats:
        """Run all minibatches forward, each in so many microbatches, with the newest weights."""
        assignment = self.assignment
        steps = evaluation_program(assignment.layout, assignment.worker, minibatches, microbatches)
        return self._run(steps, minibatches, training=False, progress=False)

    def _run(
        self, steps: Sequence[Instruction], minibatches: int, *, training: bool, progress: bool
    ) -> EpochStats:
        assignment, passes = self.assignment, sum(isinstance(x, Backward) for x in steps)
        self.stage.begin(training)
        # To mpirun's ranks standard output is a terminal, but what they draw there is kept back.
        shown = progress and assignment.worker == (0, 0) and sys.stderr.isatty()
        with _bar(minibatches, passes, shown) as advance:
            times = execute(
                steps,
                self.stage,
                self.connections.transport,
                assignment.layout,
                cut=assignment.microbatches > 1,
                recorder=self.recorder,
                progress=advance,
            )
        return self._stats(times, minibatches, training)

    def _stats(self, times: Times, minibatches: int, training: bool) -> EpochStats:
        transport, framework = self.connections.transport, self.connections.framework
        report = {
            "tally": self.stage.tally(),
            "times": [times.total_s, times.compute_s, times.wait_s, times.utilisation],
            "period_s": self._period_s(times.backward_ends) if training else 0.0,
            "sent": transport.sent_bytes - self._sent_before,
            "norm": self.stage.norms.squared[self.assignment.worker.stage],
        }
        self._sent_before = transport.sent_bytes
        reports: list[dict[str, Any]] = framework.agreement.gather(
            report, "hvd_pipe.pipeline.stats", framework.ranks
        )
        layout = self.assignment.layout
        firsts = (layout.rank(Worker(s, 0)) for s in range(layout.stages))
        self.stage.norms.squared = tuple(reports[first]["norm"] for first in firsts)
        tally = Tally(*map(sum, zip(*(one["tally"] for one in reports), strict=True)))
        total, compute, wait, used = zip(*(one["times"] for one in reports), strict=True)
        return EpochStats(
            loss=tally.loss / tally.weight,
            metric=tally.metric / tally.weight if self.has_metric else None,
            minibatches=minibatches,
            samples=int(tally.samples),
            seconds=max(total),
            compute_s=compute,
            wait_s=wait,
            utilisation=used,
            period_s=reports[-1]["period_s"],
            sent_bytes=tuple(one["sent"] for one in reports),
        )

    def _period_s(self, ends: Sequence[float]) -> float:
        """Return the seconds a minibatch over the second half of this worker's minibatches."""
        assignment = self.assignment
        width = assignment.layout.replicas[assignment.worker.stage]
        share = max(1, assignment.microbatches // width)  # backward passes of a minibatch here
        done = ends[share - 1 :: share]
        half = len(done) // 2
        if len(done) - 1 - half < 1:
            return 0.0
        every = width if assignment.microbatches == 1 else 1
        return (done[-1] - done[half]) / (len(done) - 1 - half) / every


@contextmanager
def _bar(minibatches: int, passes: int, shown: bool) -> Iterator[Callable[[], object] | None]:
    """Show how far this worker is, in minibatches of all workers."""
    if not shown:
        yield None
        return
    columns = "training", BarColumn(), MofNCompleteColumn(), "minibatches", TimeRemainingColumn()
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("training", total=minibatches)
        done = 0

        def advance() -> None:
            nonlocal done
            done += 1
            bar.update(task, completed=minibatches * done // passes)

        yield advance
