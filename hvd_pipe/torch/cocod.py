"""CoCoD-SGD: the models of the round's start are averaged while k local steps run.

start of round s   snapshot x_i[s] is copied and sent            (start, average)
k local steps      the user's optimizer, on local gradients
end of round       x_i[s+1] = average + (x_i - start)            then the next round starts
"""

from __future__ import annotations

import torch

from hvd_pipe.strategy import CoCoD
from hvd_pipe.torch import in_flight
from hvd_pipe.torch.agree import check_alike
from hvd_pipe.torch.buckets import BucketSet
from hvd_pipe.torch.engine import DEFAULT_BUCKET_BYTES, Engine, Settings, State, kinds
from hvd_pipe.torch.model_buffers import ModelBuffers
from hvd_pipe.torch.plans import default_groups
from hvd_pipe.torch.reduction import Reduction

__all__ = ["CoCoDEngine"]


class CoCoDEngine(Engine):
    """Local steps, with the average of the round's start in flight behind them."""

    def __init__(self, settings: Settings, strategy: CoCoD) -> None:
        super().__init__(settings)
        self._period, self._warmup_steps = strategy.period, strategy.warmup_steps
        self._warmup: BucketSet | None = None
        if strategy.warmup_steps:
            groups = default_groups(settings, DEFAULT_BUCKET_BYTES)
            self._warmup = settings.make_buckets(groups, "warmup")
        self._models = [
            _Average(
                [settings.parameters[place] for place in places],
                settings.reduction,
                f"{settings.tag}.model.{i}",
            )
            for i, places in enumerate(kinds(settings.parameters))
        ]
        self._buffers = ModelBuffers(settings.parameters)
        self._local_steps = 0
        self._started = False

    @property
    def current(self) -> BucketSet | None:
        return self._warmup

    def prepare(self) -> bool:
        self._buffers.found()
        if self._warmup is not None:
            self._warmup.launch_rest()
            self._warmup.wait()
            self._warmup.show()
        elif not self._started:
            self._start()
        return True

    def after_update(self) -> None:
        super().after_update()
        if self._warmup is not None:
            if self.rounds >= self._warmup_steps:
                self._warmup = None
            return
        self._local_steps += 1
        if self._local_steps == self._period:
            for model in self._models:
                model.finish()
            self._start()

    def drain(self) -> None:
        """Make all replicas equal: the average of the models and buffers as they are now.

        With y the average in flight, mean_i (y + x_i - start_i) = mean_i x_i, so what is in flight
        need not be added.
        """
        steps = [("the number of steps", str(self.rounds))]
        reduction, tag = self.settings.reduction, self.settings.tag
        if not reduction.alone:
            check_alike(steps, f"{tag}.drain", reduction.process_set)
        for model in self._models:
            model.average_now()
        self._started = False
        self._local_steps = 0
        self._buffers.average(reduction, f"{tag}.buffers")

    def after_join(self) -> None:
        self.discard()
        self._warmup = None
        self.rounds = self._warmup_steps

    def discard(self) -> None:
        for model in self._models:
            model.discard()
        self._started = False
        self._local_steps = 0

    def state(self) -> State:
        return State({}, {})

    def load(self, state: State) -> None:
        pass

    def _start(self) -> None:
        for model in self._models:
            model.start()
        self._started = True
        self._local_steps = 0


class _Average:
    """Averages the parameters of one dtype and device, in flat buffers of their size.

    The message ends in a one that counts models: a rank that has left by ``hvd.join()`` sends
    zeros, which would else be averaged in as a model.
    """

    def __init__(self, parameters: list[torch.Tensor], reduction: Reduction, name: str) -> None:
        self._parameters = parameters
        self._reduction, self._name = reduction, name
        numel = sum(parameter.numel() for parameter in parameters)
        first = parameters[0]
        self._start = torch.empty(numel, dtype=first.dtype, device=first.device)
        self._message = torch.empty(numel + 1, dtype=first.dtype, device=first.device)
        self._average, self._count = self._message[:-1], self._message[-1:]
        self._handle: int | None = None

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = torch.split(flat, [parameter.numel() for parameter in self._parameters])
        return [part.view(p.size()) for part, p in zip(parts, self._parameters, strict=True)]

    def _values(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self._parameters]

    def start(self) -> None:
        """Take a snapshot and send it."""
        torch._foreach_copy_(self._views(self._start), self._values())
        self._average.copy_(self._start)
        self._launch()

    def finish(self) -> None:
        """x = average + (x - start)"""
        self._wait()
        torch._foreach_add_(self._values(), self._views(self._average.sub_(self._start)))

    def discard(self) -> None:
        """Wait for what is in flight and forget it."""
        self._wait()

    def average_now(self) -> None:
        """x = average of all ranks' x, bit for bit the same everywhere."""
        self._wait()
        torch._foreach_copy_(self._views(self._average), self._values())
        self._launch()
        self._wait()
        torch._foreach_copy_(self._values(), self._views(self._average))

    def _launch(self) -> None:
        self._count.fill_(1.0)
        if not self._reduction.alone:
            self._handle = self._reduction.launch(self._message, self._name)

    def _wait(self) -> None:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            in_flight.wait(handle)
            size = self._reduction.process_set.size()
            self._average.mul_(size / (self._count * size).round())  # by 1 where all take part
