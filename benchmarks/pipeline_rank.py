"""One rank of a team of the pipeline benchmark: as `throughput_rank`, and PipeDream beside it.

Data parallelism takes steps of one minibatch a worker; a pipeline trains epochs. What an epoch's
start and end take is left out: of a short and a long epoch, the difference counts.
"""

from __future__ import annotations

import importlib
import resource
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import contestants
import horovod.torch as stock
import pipeline_models
import torch
from throughput_rank import Rank, answer_orders, bytes_sent

from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.stages import Partition

__all__ = ["PipelineRank", "main"]


class PipelineRank(Rank):
    """A rank that also knows PipeDream."""

    def __init__(self, team: str, store: Path) -> None:
        if team == "pipeline":
            torch.set_num_threads(1)
            self.contestants = {}
            self._pipedream = importlib.import_module("hvd_pipe.torch.pipedream")
            self._pipedream.init()
            self.rank, self.barrier = stock.rank(), stock.barrier
        else:
            super().__init__(team, store)
        self._pipelines: dict[str, tuple[Any, pipeline_models.EmulatedPipeline, int]] = {}

    def build(  # type: ignore[override]
        self,
        name: str,
        profile: str,
        settle: int,
        plan: str | None = None,
        mode: str = "stash",
        microbatches: int = 1,
    ) -> dict[str, Any]:
        """Make a contestant and let it begin.

        Args:
            name: Its own, of `contestants`; of a pipeline, any.
            profile: The emulated model's, as JSON, for the batch of a worker.
            settle: Steps, or minibatches, to take.
            plan: A pipeline's `Partition`, as JSON.
            mode: A pipeline's.
            microbatches: Of a minibatch, each a worker's batch.
        """
        model = pipeline_models.EmulatedPipeline(ModelProfile.from_json(profile))
        if plan is None:
            made = contestants.make(name, model, model.loss)
            nbytes = sum(4 * p.numel() for p in model.parameters())
            return self._started(name, made, nbytes, settle)
        engine = self._pipedream.PipeDream(
            model,
            lambda output, _: output.sum(),
            partial(torch.optim.SGD, lr=contestants.LR),
            plan=Partition.from_json(plan),
            mode=mode,
            microbatches=microbatches if microbatches > 1 else None,
            sample=_minibatch(model, microbatches),
            progress=False,
        )
        self._pipelines[name] = engine, model, microbatches
        engine.train_epoch(self._loader(name, settle))
        return {"planned_exposed_s": None}

    def race(self, name: str, steps: int) -> dict[str, Any]:
        """Train together, and say what it costs by the worker's batch."""
        if name not in self._pipelines:
            workers = 1 if name == "single" else stock.size()
            found = super().race(name, steps)
            return {key: value / workers for key, value in found.items()}
        short, long = (self._epoch(name, count) for count in (steps, 2 * steps))
        batches = steps * self._pipelines[name][2]
        return {key: (long[key] - short[key]) / batches for key in long}

    def drop(self) -> dict[str, Any]:
        """End all contestants."""
        self._pipelines.clear()
        return super().drop()

    def _loader(self, name: str, minibatches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        _, model, microbatches = self._pipelines[name]
        return [_minibatch(model, microbatches)] * minibatches

    def _epoch(self, name: str, minibatches: int) -> dict[str, float]:
        engine, model, _ = self._pipelines[name]
        loader = self._loader(name, minibatches)
        self.barrier()
        before, sent = resource.getrusage(resource.RUSAGE_SELF), bytes_sent()
        busy, start = model.device.busy_s, time.perf_counter()
        engine.train_epoch(loader)
        self.barrier()  # until the last worker has drained
        seconds = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "seconds": seconds,
            "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "sent_bytes": bytes_sent() - sent,
            "busy_s": model.device.busy_s - busy,
        }


def _minibatch(
    model: pipeline_models.EmulatedPipeline, microbatches: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of as many workers' batches as there are microbatches."""
    rows = model.batch * microbatches
    return torch.zeros(rows, 1), torch.zeros(rows, 1)


def main() -> None:
    """Be a rank of the team that the command line names."""
    directory, team = Path(sys.argv[1]), sys.argv[2]
    answer_orders(PipelineRank(team, directory / "ddp.store"), directory, team)


if __name__ == "__main__":
    main()
