"""PyTorch's tensors as messages between stages, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_pipe.pipeline import messages
from hvd_pipe.pipeline.spec import TensorSpec
from hvd_pipe.pipeline.stage import Buffer
from hvd_pipe.pipeline.wire import Part

__all__ = ["Messages"]


class Messages(messages.Messages):
    """See :class:`hvd_pipe.pipeline.messages.Messages`.

    Args:
        specs, stages, where, short: As there.
        device: Where tensors are wanted.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        stages: int,
        where: str,
        short: bool,
        device: torch.device,
    ) -> None:
        super().__init__(specs, stages, where, short)
        self._device = device

    def _name(self, tensor: torch.Tensor) -> str:
        return str(tensor.dtype).removeprefix("torch.")

    def _bytes(self, tensor: torch.Tensor, dtype: str) -> Part:
        data = tensor.detach().to(device="cpu", dtype=_dtype(dtype)).contiguous()
        return data.view(-1).view(torch.uint8).numpy()

    def _tensor(
        self, part: Buffer, dtype: str, shape: tuple[int, ...], wanted: str
    ) -> torch.Tensor:
        tensor = torch.from_numpy(part).view(_dtype(dtype)).view(shape)
        return tensor.to(device=self._device, dtype=_dtype(wanted))


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)  # type: ignore[no-any-return]
