"""Adasum: every rank makes its own update, and the updates are summed by Horovod's rule.

    x = start + adasum_i(update_i)

The rule weighs two updates by the angle between them, tensor by tensor, so tensors travel by
themselves: merging them would change the numbers. Source: Maleki et al., "Scaling Distributed
Training with Adaptive Summation" (2020); as Horovod's ``op=hvd.Adasum``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from horovod.torch.mpi_ops import Adasum, allreduce_async_, poll

from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.messages import pending
from hvd_pipe.torch.messages.allreduce import Message
from hvd_pipe.torch.messages.compressed_allreduce import message_for
from hvd_pipe.torch.strategies.base import Engine
from hvd_pipe.torch.strategies.settings import Settings


class AdasumEngine(Engine):
    """Local updates of every step, combined before the next one."""

    name = "adasum"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.build()

    @property
    def next_messages(self) -> list[Message]:
        return [message_for(self.reduction, self._start[0].new_zeros(1), self._name_of(0))]

    def build(self) -> None:
        self._start = [torch.empty_like(p) for p in self.settings.parameters]

    def prepare(self, shown_in: Mapping[int, torch.Tensor]) -> bool:
        torch._foreach_copy_(self._start, self._values())
        return True

    def after_update(self) -> None:
        super().after_update()
        if self.reduction.alone:
            return
        compression, deltas = self.reduction.compression, []
        trace, operations = timeline.active, []
        for index, (value, start) in enumerate(zip(self._values(), self._start, strict=True)):
            wire, context = compression.compress(value.sub_(start).contiguous())
            name, begun = self._name_of(index), trace.now()
            with pending.explaining():
                handle = allreduce_async_(wire, name=name, op=Adasum)
            self.reduction.traffic.add(wire.nbytes, self.reduction.workers)
            deltas.append((pending.sent(handle), context))
            operations.append(
                trace.launched(name, wire.nbytes, partial(poll, handle), begun=begun)
            )
        waiting = trace.now()
        for value, start, (handle, context) in zip(
            self._values(), self._start, deltas, strict=True
        ):
            value.copy_(start + compression.decompress(pending.wait(handle), context))
        for operation in operations:
            operation.complete()
        trace.waited(waiting, f"{self.settings.tag}.deltas")

    def _values(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.settings.parameters]

    def _name_of(self, index: int) -> str:
        return f"{self.settings.tag}.delta.{index}"
