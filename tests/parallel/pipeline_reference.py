"""A pipeline in one process: the equations, with all versions of all weights kept.

The model is never cut. Minibatches are taken in order; the gradient of each is that of the whole
model at the weights that the mode's equation names, a version for each stage::

    g[b] = grad f_b(w_1[v_1(b)], ..., w_n[v_n(b)])

with ``v_s(b)`` in closed form where every stage has one worker, and as the schedule says where
stages are replicated. Then every stage updates its newest weights with torch's own optimizer.
None of hvd_pipe's code but those schedules, which have tests of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from pipeline_versions import COALESCING, versions_of
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Tensors = dict[str, torch.Tensor]
Gradient = dict[str, torch.Tensor]  # only those parameters that have one


class Reference:
    """All workers of a pipeline; the plain model, which `stage_of` divides by name, is changed.

    Learning rates are multiplied by R_s / R_0 (`scale_lr`) where every stage has its own rounds,
    gradients of all stages are clipped together, and schedulers count epochs or minibatches.
    """

    def __init__(
        self,
        model: nn.Module,
        stage_of: Callable[[str], int],
        replicas: Sequence[int],
        mode: str,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        optimizer_fn: Callable[[list[nn.Parameter]], Optimizer],
        *,
        microbatches: int = 1,
        in_transit: int = 0,
        scale_lr: bool = True,
        max_grad_norm: float | None = None,
        scheduler_fn: Callable[[Optimizer], LRScheduler] | None = None,
        schedule_by: str = "epoch",
    ) -> None:
        self._model, self._loss = model, loss_fn
        self._replicas, self._mode, self._microbatches = tuple(replicas), mode, microbatches
        self._max_norm, self._in_transit = max_grad_norm, in_transit
        stages = range(len(self._replicas))
        self.names = [[n for n, _ in model.named_parameters() if stage_of(n) == s] for s in stages]
        parameters = dict(model.named_parameters())
        self.newest = [
            {
                n: nn.Parameter(parameters[n].detach().clone(), parameters[n].requires_grad)
                for n in one
            }
            for one in self.names
        ]
        """For each stage: the weights that its optimizer updates."""
        self._buffers = [
            [
                {n: b.clone() for n, b in model.named_buffers() if stage_of(n) == s}
                for _ in range(self._replicas[s])
            ]
            for s in stages
        ]
        self.optimizers: list[Optimizer | None] = []
        for s in stages:
            trained = [p for p in self.newest[s].values() if p.requires_grad]
            self.optimizers.append(optimizer_fn(trained) if trained else None)
        if scale_lr and mode not in COALESCING:
            for optimizer, width in zip(self.optimizers, self._replicas, strict=True):
                for group in optimizer.param_groups if optimizer else ():
                    group["lr"] *= width / self._replicas[0]
        self._by_epoch = schedule_by == "epoch"
        self._schedulers = [
            scheduler_fn(optimizer) if scheduler_fn and optimizer else None
            for optimizer in self.optimizers
        ]
        self.history: list[list[Tensors]] = []
        """For each stage: the versions of the last epoch."""

    def train_epoch(self, batches: Sequence[tuple[Any, Any]]) -> float:
        """Fill the pipeline, drain it, and return the mean loss of the minibatches."""
        stages = range(len(self._replicas))
        self.history = [[self._copy(s)] for s in stages]
        rounds: list[list[Gradient]] = [[] for _ in stages]
        versions = versions_of(
            self._mode, self._replicas, len(batches), self._microbatches, self._in_transit
        )
        total = 0.0
        for b, batch in enumerate(batches):
            at = [self.history[s][versions[s][b]] for s in stages]
            loss, gradient = self._minibatch(b, batch, at)
            total += loss
            for s in stages:
                rounds[s].append({n: g for n, g in gradient.items() if n in self.newest[s]})
            whole = 1 if self._mode in COALESCING else None
            due = [
                s
                for s in stages
                if len(rounds[s]) == (whole or self._replicas[s]) or b == len(batches) - 1
            ]
            means = {s: _mean(rounds[s]) for s in due}
            if self._max_norm is not None:
                _clip(list(means.values()), self._max_norm)
            for s in due:
                self._update(s, means[s], len(rounds[s]))
                rounds[s] = []
        if self._by_epoch:
            self._schedule(self._schedulers)
        return total / len(batches)

    def take_over(self, other: Reference) -> None:
        """Go on from where another has come: weights, and what optimizers know of each of them."""
        self._model.load_state_dict(other.state_dict())
        places = {name: (s, p) for s, one in enumerate(self.newest) for name, p in one.items()}
        for s, one in enumerate(other.newest):
            for name, p in one.items():
                stage, mine = places[name]
                mine.data.copy_(p.data)
                before, after = other.optimizers[s], self.optimizers[stage]
                if before is not None and after is not None and p in before.state:
                    after.state[mine] = copy.deepcopy(before.state[p])
        for replicas in self._buffers:
            for buffers in replicas:
                buffers.update({n: self._model.get_buffer(n).clone() for n in buffers})

    def evaluate(self, batches: Sequence[tuple[Any, Any]]) -> float:
        """The mean loss of all samples with the newest weights, in evaluation mode."""
        self._model.load_state_dict(self.state_dict())
        self._model.eval()
        with torch.no_grad():
            sums = [self._loss(self._output(x), y).item() * len(y) for x, y in batches]
        self._model.train()
        return sum(sums) / sum(len(y) for _, y in batches)

    def state_dict(self) -> Tensors:
        """The plain model's, with replicas' running statistics averaged."""
        for s, replicas in enumerate(self._buffers):
            for name in replicas[0]:
                values = [buffers[name] for buffers in replicas]
                if values[0].is_floating_point():
                    mean = torch.stack(values).mean(0)
                    for buffers in replicas:
                        buffers[name] = mean.clone()
            self._put([self._copy(s)])
            self._put_buffers(replicas[0])
        return {name: t.detach().clone() for name, t in self._model.state_dict().items()}

    def _minibatch(
        self, b: int, batch: tuple[Any, Any], at: Sequence[Tensors]
    ) -> tuple[float, Gradient]:
        """Loss and gradient: sum over microbatches u of (n_u / n) times those of u."""
        self._put(at)
        total, gradient = 0.0, dict[str, torch.Tensor]()
        size = len(batch[1])
        inputs = batch[0] if isinstance(batch[0], tuple) else (batch[0],)
        parts = [torch.tensor_split(tensor, self._microbatches) for tensor in (*inputs, batch[1])]
        for k, (*x, target) in enumerate(zip(*parts, strict=True)):
            unit = b * self._microbatches + k
            held = [self._buffers[s][unit % width] for s, width in enumerate(self._replicas)]
            for buffers in held:
                self._put_buffers(buffers)
            self._model.zero_grad()
            loss = self._loss(self._output(tuple(x)), target)
            loss = loss * (len(target) / size)
            loss.backward()  # type: ignore[no-untyped-call]
            for buffers in held:
                buffers.update({n: self._model.get_buffer(n).clone() for n in buffers})
            total += loss.item()
            for name, p in self._model.named_parameters():
                if p.grad is not None:
                    gradient[name] = gradient.get(name, torch.zeros_like(p)) + p.grad
        return total, gradient

    def _output(self, x: Any) -> Any:
        return self._model(*x) if isinstance(x, tuple) else self._model(x)

    def _update(self, s: int, gradient: Gradient, minibatches: int) -> None:
        for name, p in self.newest[s].items():
            p.grad = gradient.get(name)
        optimizer = self.optimizers[s]
        if optimizer is not None:
            optimizer.step()
        if not self._by_epoch:
            self._schedule(self._schedulers[s : s + 1] * minibatches)
        self.history[s].append(self._copy(s))

    @staticmethod
    def _schedule(schedulers: Iterable[LRScheduler | None]) -> None:
        for scheduler in schedulers:
            if scheduler is not None:
                scheduler.step()

    def _copy(self, s: int) -> Tensors:
        return {name: p.detach().clone() for name, p in self.newest[s].items()}

    def _put(self, stages: Iterable[Tensors]) -> None:
        """Copy these weights into the model."""
        with torch.no_grad():
            for weights in stages:
                for name, value in weights.items():
                    self._model.get_parameter(name).copy_(value)

    def _put_buffers(self, buffers: Tensors) -> None:
        with torch.no_grad():
            for name, value in buffers.items():
                self._model.get_buffer(name).copy_(value)


def _mean(gradients: Sequence[Gradient]) -> Gradient:
    """Of those minibatches that a round has; parameters have a gradient in all of them or none."""
    return {n: torch.stack([g[n] for g in gradients]).mean(0) for n in gradients[0]}


def _clip(gradients: Sequence[Gradient], most: float) -> None:
    """As `torch.nn.utils.clip_grad_norm_` does on one worker."""
    values = [g for gradient in gradients for g in gradient.values()]
    norm = torch.cat([g.flatten() for g in values]).norm()
    for g in values:
        g.mul_(min(1.0, most / (float(norm) + 1e-6)))
