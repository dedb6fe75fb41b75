"""`PipeDream`: from a model to a running pipeline, the same script on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hvd_pipe.pipeline.pipedream import Loader, PipeDreamBase
from hvd_pipe.pipeline.runner import EpochStats
from hvd_pipe.pipeline.stage import Microbatch
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.stages import Partition
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.pipedream.build import FRAMEWORK, TorchOptions, TorchPipeline, build
from hvd_pipe.torch.pipedream.checkpoint import load, save, whole_state
from hvd_pipe.torch.pipedream.measure import StageMemory
from hvd_pipe.torch.pipedream.tensors import split


class PipeDream(PipeDreamBase[TorchPipeline]):
    """A pipeline of workers that each hold some layers of a model (PipeDream, SOSP 2019).

    Every rank runs the same script. With n stages of one worker each, ``w_s`` the weights of stage
    s, and f the loss of minibatch t::

        stash            w[t+1] = w[t] - lr * grad f(w_1[t-n+1], w_2[t-n+2], ..., w_n[t])
        vertical-sync    w[t+1] = w[t] - lr * grad f(w_1[t-n+1], w_2[t-n+1], ..., w_n[t-n+1])
        2bw              w[t+1] = w[t] - lr * grad f(w[t-1])
        flush, gpipe     w[t+1] = w[t] - lr * grad f(w[t]), as one worker

    The first three never wait for the pipeline to empty, and pay with staleness: with momentum mu,
    a stage d updates behind is stable only for learning rates well below those of one worker
    (d = 1: lr * curvature < 1 - mu). ``flush`` and ``gpipe`` are exact, and wait at the end of
    each minibatch. The last three modes cut a minibatch into microbatches and update once for all.

    A stage of R replicas takes every R-th minibatch and averages R gradients an update, by
    `MergedGradient` over the replicas. Where stages have unlike replicas, learning rates are
    scaled by R / R_1 (``scale_lr``), so that all stages move as far in an epoch.

    BatchNorm takes each microbatch's own statistics. Running statistics are the worker's own, and
    are averaged over the replicas for evaluation and checkpoints.

    The pipeline is built with its first minibatch, of ``sample``, ``train_epoch``, ``evaluate`` or
    ``load``: rank 0's weights are everybody's then, and each rank keeps the layers of its stage.
    All others of ``model`` are moved to the "meta" device, which frees their memory; `state_dict`
    has all layers.

    Args:
        model: A list of modules in order, the stages or finer pieces; an `nn.Sequential`; or any
            `nn.Module` that torch.fx can trace.
        loss_fn: ``loss_fn(output, targets)``, a scalar mean over the minibatch.
        optimizer_fn: Makes the optimizer of a stage from the list of its parameters.
        plan: "auto" (profile the model, measure the network, find the fastest stages), "straight"
            (every stage on one worker), replicas as in "3-1", a `Partition`, or the path of one.
        mode: "stash", "vertical-sync", "2bw", "flush" or "gpipe".
        microbatches: Of a minibatch, in the last three modes; None for the fewest that fill the
            pipeline.
        in_transit: Minibatches between two stages, besides one in each worker. They hide messages,
            at the price of memory and staleness. None for the plan's, or as many as it needs.
        sample: A minibatch as the loader yields, as large as any that comes; None for the first.
        transport: "mpi", "process-sets" (no MPI needed), or "auto".
        recompute: Keep no activations from forward to backward, but run forward again.
        wire_dtype: "bfloat16" to send activations and their gradients so.
        scale_lr: Scale learning rates by replicas in the first two modes.
        max_grad_norm: Clip gradients by their norm over all stages; exact in flush and gpipe, else
            with the newest norms that a stage has received.
        scheduler_fn: Makes a learning-rate scheduler from the optimizer.
        schedule_by: When the scheduler steps: after each "epoch" or "minibatch".
        metric_fn: ``metric_fn(output, targets)``, a mean to be reported, such as the accuracy.
        profile: A profile of the model; None: measured.
        bandwidth: Bytes/s between two workers; None: measured.
        memory_bytes: The memory of a worker in bytes; None for no limit.
        progress: Show what is chosen, and a progress bar, on rank 0.

    Raises:
        TypeError, ValueError: An argument that cannot be; on every rank, before anything is sent.

    Example:
        >>> from hvd_pipe.torch import pipedream
        >>> pipedream.init()
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> engine = pipedream.PipeDream(
        ...     model,
        ...     nn.functional.cross_entropy,
        ...     lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ...     progress=False,
        ... )
        >>> stats = engine.train_epoch([(torch.ones(3, 4), torch.tensor([0, 1, 1]))] * 2)
        >>> stats.minibatches, stats.samples
        (2, 6)

    Source: PipeDream, SOSP 2019; PipeDream-2BW, arXiv 2006.09503; GPipe, arXiv 1811.06965.
    """

    _options: TorchOptions

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        loss_fn: Callable[[Any, Any], torch.Tensor],
        optimizer_fn: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        plan: str | os.PathLike[str] | Partition = "auto",
        mode: str = "stash",
        *,
        microbatches: int | None = None,
        in_transit: int | None = None,
        sample: Any = None,
        transport: str = "auto",
        recompute: bool = False,
        wire_dtype: str | None = None,
        scale_lr: bool = True,
        max_grad_norm: float | None = None,
        scheduler_fn: Callable[[torch.optim.Optimizer], Any] | None = None,
        schedule_by: str = "epoch",
        metric_fn: Callable[[Any, Any], Any] | None = None,
        profile: ModelProfile | str | os.PathLike[str] | None = None,
        bandwidth: float | None = None,
        memory_bytes: float | None = None,
        progress: bool = True,
    ) -> None:
        options = TorchOptions(
            model=model,
            loss_fn=loss_fn,
            optimizer_fn=optimizer_fn,
            plan=plan,
            mode=mode,
            microbatches=microbatches,
            transport=transport,
            in_transit=in_transit,
            recompute=recompute,
            wire_dtype=wire_dtype,
            scale_lr=scale_lr,
            max_grad_norm=max_grad_norm,
            metric_fn=metric_fn,
            profile=profile,
            bandwidth=bandwidth,
            memory_bytes=memory_bytes,
            progress=progress,
            scheduler_fn=scheduler_fn,
            schedule_by=schedule_by,
        )
        super().__init__(options, FRAMEWORK, timeline.describe, sample)

    @property
    def module(self) -> nn.Module:
        """This worker's layers."""
        return self._ready.stage.module

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """This worker's optimizer; None for a stage without parameters."""
        return self._ready.updates.optimizer

    @property
    def memory(self) -> StageMemory:
        """The measured peak memory of this worker; ``partition`` has the predicted one."""
        return self._ready.stage.memory()

    def train_epoch(self, loader: Loader) -> EpochStats:
        """Train on all minibatches of a loader.

        Args:
            loader: Has a len() and yields (inputs, targets), the same minibatches in the same
                order on every rank; replicas of a stage share them out. One that shuffles by
                torch's default generator does so alike on all ranks.

        Returns:
            The mean loss, and what the workers did; the same on every rank.

        Raises:
            RanksDisagreeError: Loaders of unlike lengths.
            HvdPipeError, TypeError, ValueError: A loader or a model that cannot be; names it.
        """
        stats = super().train_epoch(loader)
        scheduler = self._ready.scheduler
        if scheduler is not None and self._options.schedule_by == "epoch":
            scheduler.step()
        return stats

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the whole model's state, on every rank; a plain model loads it."""
        return whole_state(self._ready)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write a checkpoint; rank 0 writes, and all ranks call this.

        ``model.pt`` is the plain model's ``state_dict()``, ``stage0.pt`` and so on hold the
        optimizers, schedulers and random states, and ``pipeline.json`` the stages. Between epochs
        nothing is in flight: the newest weights are all that there are.
        """
        save(self._ready, Path(directory), self.epoch)

    def _split(self, batch: Any, count: int) -> Sequence[Microbatch]:
        return split(batch, count)

    def _build_part(self, sample: Any) -> TorchPipeline:
        return build(self._options, sample)

    def _load_checkpoint(self, built: TorchPipeline, directory: Path) -> tuple[int, bool]:
        return load(built, directory)

    @contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield

    def _drawing_alike(self) -> AbstractContextManager[None]:
        # A loader that shuffles draws its order from the default generator, whose state differs by
        # rank once layers of some stages have drawn from it.
        drawn = int(torch.randint(2**31, ()).item())
        seed = self._agreement.from_first(drawn, "hvd_pipe.pipeline.seed", self._ranks)
        return self._seeded(seed)
