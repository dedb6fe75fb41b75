"""Pipe-SGD's plans under a clock that goes as the plan in use wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from unittest import mock

from torch import nn

import hvd_pipe.torch as hvd
from hvd_pipe.runtime import gradient_index
from hvd_pipe.torch.strategies import pipe_sgd

R = TypeVar("R")

DEFAULT_BYTES = 64  # with which the model has six messages, then four, then one
RACED = (6, 4, 1)
SECONDS: dict[int, tuple[tuple[float, ...], tuple[float, ...]]] = {
    6: ((1.0, 2.0, 3.0), (1.0, 1.5, 2.0)),
    4: ((3.0, 1.0, 1.5), (3.0, 1.0, 1.5)),
    # Each rank by itself would keep another plan: the slowest rank's steps count.
    1: ((1.0, 2.0, 3.0), (4.0, 3.5, 1.0)),
}
"""By the plan that stays, the seconds of a step with each plan, on both ranks."""


class Race:
    """Plans of small messages, timed by a clock that goes as the plan in use wants."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._seconds, self._now = seconds, 0.0
        self.optimizer: Any = None

    def perf_counter(self) -> float:
        self._now += self._seconds.get(len(self.optimizer.plan.buckets), 1.0)
        return self._now

    def run(self, train: Callable[[Any], R], model: nn.Module, plain: Any, **options: Any) -> R:
        """Train with a distributed optimizer whose plans are timed by this."""
        small = mock.patch.object(gradient_index, "DEFAULT_BUCKET_BYTES", DEFAULT_BYTES)
        with small, mock.patch.object(pipe_sgd, "time", self):
            self.optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), **options)
            return train(self.optimizer)


def race(stays: int) -> Race:
    return Race(dict(zip(RACED, SECONDS[stays][hvd.rank()], strict=True)))
