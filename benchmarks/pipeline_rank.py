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
from hvd_pipe.torch.pipedream.graph import trace
from hvd_pipe.torch.pipedream.measure import profile as measure_profile

Network = pipeline_models.EmulatedPipeline | pipeline_models.SmallNetwork


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
        self._pipelines: dict[str, tuple[Any, Network, int]] = {}

    def profile(self, model: str) -> dict[str, Any]:
        """Measure a small network's layers while all ranks do, for the batch of a worker."""
        network = pipeline_models.on_cpu(model)
        inputs, _ = network.minibatch()
        self.barrier()
        traced = trace(network, (inputs,))
        return {"profile": measure_profile(traced, (inputs,), name=model).to_json()}

    def build(  # type: ignore[override]
        self,
        name: str,
        model: str,
        profile: str | None,
        settle: int,
        plan: str | None = None,
        mode: str = "stash",
        microbatches: int = 1,
    ) -> dict[str, Any]:
        """Make a contestant and let it begin."""
        network: Network
        if profile is None:
            network = pipeline_models.on_cpu(model)
        else:
            network = pipeline_models.EmulatedPipeline(ModelProfile.from_json(profile))
        if plan is None:
            made = contestants.make(name, network, network.loss)
            nbytes = sum(4 * p.numel() for p in network.parameters())
            return self._started(name, made, nbytes, settle)
        engine = self._pipedream.PipeDream(
            network,
            network.loss_fn,
            partial(torch.optim.SGD, lr=contestants.LR),
            plan=Partition.from_json(plan),
            mode=mode,
            microbatches=microbatches if microbatches > 1 else None,
            sample=network.minibatch(microbatches),
            progress=False,
        )
        self._pipelines[name] = engine, network, microbatches
        engine.train_epoch(self._loader(name, settle))
        return {}

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
        for engine, _, _ in self._pipelines.values():
            engine.close()
        self._pipelines.clear()
        return super().drop()

    def _loader(self, name: str, minibatches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        _, network, microbatches = self._pipelines[name]
        return [network.minibatch(microbatches)] * minibatches

    def _epoch(self, name: str, minibatches: int) -> dict[str, float]:
        engine, network, _ = self._pipelines[name]
        loader = self._loader(name, minibatches)
        self.barrier()
        before, sent = resource.getrusage(resource.RUSAGE_SELF), bytes_sent()
        device = getattr(network, "device", None)  # an emulated one knows how long it worked
        worked = device.busy_s if device else 0.0
        start = time.perf_counter()
        stats = engine.train_epoch(loader)
        self.barrier()  # until the last worker has drained
        seconds = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "seconds": seconds,
            "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "sent_bytes": bytes_sent() - sent,
            "busy_s": device.busy_s - worked if device else stats.compute_s[self.rank],
        }


def main() -> None:
    """Be a rank of the team that the command line names."""
    directory, team = Path(sys.argv[1]), sys.argv[2]
    answer_orders(PipelineRank(team, directory / "ddp.store"), directory, team)


if __name__ == "__main__":
    main()
