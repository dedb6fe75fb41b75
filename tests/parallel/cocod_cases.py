"""CoCoD's options: runs by case, and their equations, carried out for n workers in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from fragments_reference import fragments_of
from problem import OPTIMIZERS as COMMON
from problem import STEPS, Weights, loss_of, make_model
from reference import Trajectory, Vectors, Workers
from torch import nn
from torch.optim import Adam, Optimizer

import hvd_pipe.torch as hvd
from hvd_pipe.strategy import CoCoD
from hvd_pipe.torch.compression import Compression, Int8

PER_NODE = 2
"""Ranks of a node, of which the last may have fewer."""


def _hasty_adam(model: nn.Module) -> Optimizer:
    """Second moments that fall quickly, so that mean + (end - start) can be below zero."""
    return Adam(model.parameters(), lr=0.01, betas=(0.9, 0.2), eps=1e-3)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {**COMMON, "hasty adam": _hasty_adam}


@dataclass(frozen=True)
class Case:
    """One run; ``weights`` beyond the number of ranks are left out."""

    options: CoCoD
    optimizer: str = "momentum"
    drains: tuple[int, ...] = ()
    compression: str = "none"
    dtype: torch.dtype = torch.float64

    def strategy(self, n: int) -> CoCoD:
        weights = self.options.weights
        return CoCoD(**{**vars(self.options), "weights": weights and weights[:n]})

    def __str__(self) -> str:
        what = [f"{k}={v}" for k, v in vars(self.options).items() if v != getattr(CoCoD(), k)]
        what += [self.optimizer, self.compression, str(self.dtype).removeprefix("torch.")]
        return ", ".join([*what, *([f"drained after {self.drains}"] if self.drains else [])])


COMPRESSIONS: dict[str, Any] = {
    "none": Compression.none,
    "fp16": Compression.fp16,
    "bf16": Compression.bf16,
    "int8": Compression.int8,
    "int8 with feedback": Int8(error_feedback=True),
}

WEIGHTS = (3.0, 1.0, 2.5, 1.5)
PULL = {"pull_back": 0.6, "anchor_momentum": 0.7}
OUTER = {"outer": "nesterov", "outer_lr": 0.3, "outer_momentum": 0.6}

EXACT = [
    Case(CoCoD(weights=WEIGHTS)),
    Case(CoCoD(weights=WEIGHTS), "adam", drains=(13, 14)),
    Case(CoCoD(3, 4, weights=WEIGHTS)),
    Case(CoCoD(3, 4, weights=WEIGHTS), "adam", drains=(2, 13)),
    Case(CoCoD(momentum="average")),
    Case(CoCoD(momentum="average"), "adam"),
    Case(CoCoD(momentum="average"), "hasty adam", drains=(13, 14)),
    Case(CoCoD(3, 4, momentum="average", weights=WEIGHTS), "adam", drains=(2, 13)),
    Case(CoCoD(pull_back=0.6)),
    Case(CoCoD(pull_back=0.6), "adam", drains=(13, 14)),
    Case(CoCoD(**PULL)),
    Case(CoCoD(2, 5, **PULL), "adam", drains=(2, 13)),
    Case(CoCoD(momentum="average", weights=WEIGHTS, **PULL), "momentum", drains=(13,)),
    Case(CoCoD(**OUTER)),
    Case(CoCoD(2, 5, **OUTER), "adam", drains=(2, 13, 14)),
    Case(CoCoD(momentum="average", weights=WEIGHTS, **OUTER), "adam", drains=(13,)),
    Case(CoCoD(fragments=2)),
    Case(CoCoD(6, 4, fragments=3), "adam", drains=(2, 13, 14)),
    Case(CoCoD(fragments=4, weights=WEIGHTS), "adam", drains=(13,)),
    Case(CoCoD(fragments=2, **PULL), "adam", drains=(15,)),
    Case(CoCoD(4, 3, fragments=4, **OUTER), drains=(12,)),
]
WITHIN = [
    Case(CoCoD(within="node")),
    Case(CoCoD(3, 4, within="node", weights=WEIGHTS), "adam", drains=(13,)),
    Case(CoCoD(fragments=4, within="node", **OUTER), "adam", drains=(2, 14)),
    Case(CoCoD(2, within="node", momentum="average"), drains=(7,)),
]
COMPRESSED = [
    Case(CoCoD(), compression="fp16", drains=(13,)),
    Case(CoCoD(3, 4), "adam", compression="fp16"),
    Case(CoCoD(weights=WEIGHTS), compression="fp16"),
    Case(CoCoD(momentum="average", **PULL), "adam", compression="fp16"),
    Case(CoCoD(2, **OUTER), compression="fp16", drains=(13,)),
    Case(CoCoD(fragments=4), compression="fp16", drains=(14,)),
]
CODED = [
    Case(CoCoD(), compression="bf16", drains=(13,)),
    Case(CoCoD(), compression="int8"),
    Case(CoCoD(weights=WEIGHTS), compression="int8 with feedback", drains=(13,)),
    Case(CoCoD(fragments=2), compression="int8 with feedback", drains=(13,)),
]
HALF = [
    Case(CoCoD(), dtype=torch.float16),
    Case(CoCoD(weights=WEIGHTS, momentum="average"), dtype=torch.float16),
    Case(CoCoD(pull_back=0.6), dtype=torch.float16),
    Case(CoCoD(), dtype=torch.bfloat16),
]


# On a rank ---------------------------------------------------------------------------------------


def wrap(
    model: nn.Module, case: Case, *, n: int | None = None, plain: Optimizer | None = None
) -> Any:
    """Wrap an optimizer; ``n`` is how many ranks there are to be."""
    return hvd.DistributedOptimizer(
        plain or OPTIMIZERS[case.optimizer](model),
        model.named_parameters(),
        compression=COMPRESSIONS[case.compression],
        strategy=case.strategy(n or hvd.size()),
    )


@cache
def trajectory(case: Case) -> Weights:
    """As `problem.train` does it, also for a dtype that numpy lacks."""
    model = make_model(case.dtype)
    optimizer, records = wrap(model, case), []

    def record() -> None:
        wide = torch.promote_types(case.dtype, torch.float32)
        records.append(torch.cat([p.detach().flatten() for p in model.parameters()]).to(wide))

    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        record()
        if step in case.drains or step == STEPS - 1:
            optimizer.synchronize()
            record()
    return torch.stack(records).numpy()


# The reference -----------------------------------------------------------------------------------

NONNEGATIVE = ("exp_avg_sq",)
Named = dict[str, torch.Tensor]  # one tensor a parameter and, with momentum="average", a moment


class Reference:
    """The strategy's docstring, with Python loops in the place of messages."""

    def __init__(self, case: Case, n: int, leaves_after: int | None = None) -> None:
        self.case, self.options = case, case.strategy(n)
        self.workers = Workers(n, OPTIMIZERS[case.optimizer])
        self.weights = self.options.weights or (1.0,) * n
        self.rounds = case.compression == "fp16" and n > 1
        self.leaves_after = leaves_after
        self.base: Named = {}
        self.anchor: Named = {}
        self.velocity: Named = {}
        self.clamped = 0
        sizes = [p.numel() for p in self.workers.models[0].parameters()]
        self.fragments = fragments_of(sizes, self.options.fragments)

    def run(self, steps: int = STEPS) -> Trajectory:
        options, workers = self.options, self.workers
        local_steps, fragment, start, mean = 0, 0, [], {}
        for step in range(steps):
            gradients = workers.gradients(step)
            if step < options.warmup_steps:
                average = self._rounded if self.rounds else self._weighted
                workers.update([average(gradients, step) for _ in gradients])
            else:
                if local_steps == 0:
                    start = self._values(fragment)
                    mean = self._mean(start, step)
                workers.update(self._within_nodes(gradients))
                local_steps += 1
                if local_steps == options.period // options.fragments:
                    self._finish(start, mean, fragment)
                    local_steps, fragment = 0, (fragment + 1) % options.fragments
            workers.record()
            if step in self.case.drains or step == steps - 1:
                values = self._values()
                self.base = self._exact_mean(values, step)
                self._set([self.base for _ in values])
                local_steps, fragment = 0, 0
                workers.record()
        return workers.trajectory

    def _within_nodes(self, gradients: list[Vectors]) -> list[Vectors]:
        """What each worker applies: its own gradient, or the mean of those of its node."""
        if self.options.within == "none":
            return gradients
        found = []
        for worker in range(len(gradients)):
            node = [i for i in range(len(gradients)) if i // PER_NODE == worker // PER_NODE]
            total = sum(self.weights[i] for i in node)
            columns = zip(*(gradients[i] for i in node), strict=True)
            found.append(
                [
                    torch.stack(
                        [self.weights[i] / total * x for i, x in zip(node, column, strict=True)]
                    ).sum(0)
                    for column in columns
                ]
            )
        return found

    def _outer_model(self, mean: Named) -> Named:
        """The outer model after DiLoCo's outer step; momenta keep their mean."""
        lr, mu = self.options.outer_lr, self.options.outer_momentum
        weights = {name: m for name, m in mean.items() if "." not in name}
        for name, m in weights.items():
            change = self.anchor.get(name, m) - m
            self.velocity[name] = mu * self.velocity.get(name, torch.zeros_like(m)) + change
            self.anchor[name] = m + change - lr * (change + mu * self.velocity[name])
        return {**mean, **{name: self.anchor[name] for name in weights}}

    def _finish(self, start: list[Named], mean: Named, fragment: int) -> None:
        alpha, beta = self.options.pull_back, self.options.anchor_momentum
        if self.options.outer != "none":
            mean = self._outer_model(mean)
        self.base |= mean
        z = dict(mean)
        if beta:
            for name, m in ((name, m) for name, m in mean.items() if "." not in name):
                moved_by = beta * self.velocity.get(name, torch.zeros_like(m))
                self.velocity[name] = moved_by + (m - self.anchor.get(name, m))
                z[name] = self.anchor[name] = self.anchor.get(name, m) + self.velocity[name]
        moved = []
        for end, begin in zip(self._values(fragment), start, strict=True):
            new = {}
            for name in begin:
                x, progress = end[name], end[name] - begin[name]
                x = mean[name] + progress if alpha is None else x - alpha * (x - z[name])
                if name.endswith(NONNEGATIVE):
                    self.clamped += int((x < 0).sum())
                    x = x.clamp(min=0)
                new[name] = x
            moved.append(new)
        self._set(moved)

    def _mean(self, values: list[Named], step: int) -> Named:
        exact = self._exact_mean(values, step)
        if not self.rounds or not {name for name in exact if "." not in name} <= set(self.base):
            return exact
        for name in (name for name in exact if "." not in name):  # momenta travel uncompressed
            differences = [[value[name] - self.base[name]] for value in values]
            exact[name] = self.base[name] + self._rounded(differences, step)[0]
        return exact

    def _exact_mean(self, values: list[Named], step: int) -> Named:
        return {
            name: self._weighted([[value[name]] for value in values], step)[0]
            for name in values[0]
        }

    def _weighted(self, vectors: list[Vectors], step: int) -> Vectors:
        present = range(len(vectors))
        if self.leaves_after is not None and step >= self.leaves_after:
            present = range(len(vectors) - 1)
        total = sum(self.weights[i] for i in present)
        columns = [[self.weights[i] / total * x for x in vectors[i]] for i in present]
        return [torch.stack(column).sum(0) for column in zip(*columns, strict=True)]

    def _rounded(self, vectors: list[Vectors], _: int) -> Vectors:
        """As `_weighted`, with numbers that are float16 on their way."""
        size, total = len(vectors), sum(self.weights)
        result = []
        for column in zip(*vectors, strict=True):
            whole = torch.zeros_like(column[0], dtype=torch.float16)
            for x, weight in zip(column, self.weights, strict=True):
                whole += (x * (weight * size / total)).to(torch.float16)
            result.append((whole / size).double())
        return result

    def _live(self, worker: int) -> Named:
        model, optimizer = self.workers.models[worker], self.workers.optimizers[worker]
        found: Named = {}
        for number, p in enumerate(model.parameters()):
            found[str(number)] = p.data
            if self.options.momentum == "average":
                for key, value in optimizer.state[p].items():
                    if isinstance(value, torch.Tensor) and value.shape == p.shape:
                        found[f"{number}.{key}"] = value
        return found

    def _values(self, fragment: int | None = None) -> list[Named]:
        """What is averaged, of all fragments or of one; momenta belong to the only one."""
        return [
            {
                name: tensor.clone()
                for name, tensor in self._live(i).items()
                if fragment is None or int(name.split(".")[0]) in self.fragments[fragment]
            }
            for i in range(len(self.workers.models))
        ]

    def _set(self, values: list[Named]) -> None:
        for worker, own in enumerate(values):
            live = self._live(worker)
            for name, value in own.items():
                live[name].copy_(value)


@cache
def expected(case: Case, n: int) -> Trajectory:
    return Reference(case, n).run()
