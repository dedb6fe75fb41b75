"""PyTorch's tensors in a pipeline: microbatches, messages between stages, broadcasts."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from horovod.torch.mpi_ops import ProcessSet, broadcast_async_, poll, synchronize
from torch.utils._pytree import tree_leaves, tree_map

from hvd_pipe.pipeline.messages import ITEM_BYTES, Bytes, Messages, Part, TensorSpec
from hvd_pipe.pipeline.stage import Buffer, Microbatch
from hvd_pipe.runtime.watch.waits import sleep_between_polls


def split(batch: Any, microbatches: int) -> list[Microbatch]:
    """Cut a minibatch into microbatches along the first dimension, as `torch.tensor_split` does.

    Example:
        >>> first, last = split((torch.zeros(3, 2), torch.tensor([0, 1, 2])), 2)
        >>> first.inputs[0].shape, last.targets, last.samples
        (torch.Size([2, 2]), tensor([2]), 1)
    """
    if not isinstance(batch, Sequence) or isinstance(batch, str) or len(batch) != 2:
        got = f"{len(batch)} items" if isinstance(batch, Sequence) else type(batch).__name__
        raise TypeError(
            f"the loader must yield (inputs, targets), got {got}: give several inputs as a "
            "tuple, ((ids, mask), targets), by the loader's collate_fn if need be."
        )
    inputs, targets = batch
    inputs = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    tensors = [x for x in inputs if isinstance(x, torch.Tensor) and x.dim()]
    if not tensors:
        raise TypeError(
            f"the model's inputs must be tensors with a batch dimension, got "
            f"{', '.join(type(x).__name__ for x in inputs) or 'none'}."
        )
    samples = tensors[0].shape[0]
    if samples < microbatches:
        raise ValueError(
            f"a minibatch of {samples} samples cannot be cut into {microbatches} microbatches: "
            "give the loader a larger batch_size, or drop_last=True, or ask for fewer "
            "microbatches."
        )

    def part(at: int) -> Microbatch:
        def cut(x: Any) -> Any:
            whole = not isinstance(x, torch.Tensor) or not x.dim() or x.shape[0] != samples
            return x if whole or microbatches == 1 else x.tensor_split(microbatches)[at]

        count = samples // microbatches + (at < samples % microbatches)
        sliced = tree_map(cut, targets)
        return Microbatch(tree_map(cut, inputs), sliced, count, count / samples, _digest(sliced))

    return [part(at) for at in range(microbatches)]


def _digest(targets: Any) -> int:
    """Return a checksum of all tensors among the targets."""
    digest = 0
    for leaf in tree_leaves(targets):
        if isinstance(leaf, torch.Tensor):
            flat = leaf.detach().cpu().contiguous().view(-1)
            digest = zlib.crc32(flat.view(torch.uint8).numpy().data, digest)
    return digest


_DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}


class TorchMessages(Messages):
    """See :class:`hvd_pipe.pipeline.messages.Messages`."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        stages: int,
        where: str,
        short: bool,
        device: torch.device,
    ) -> None:
        super().__init__(_DTYPES, specs, stages, where, short)
        self._device = device

    def _bytes(self, tensor: torch.Tensor, dtype: torch.dtype) -> Part:
        data = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
        return data.view(-1).view(torch.uint8).numpy()

    def _tensor(
        self, part: Buffer, shape: tuple[int, ...], dtype: torch.dtype, wanted: torch.dtype
    ) -> torch.Tensor:
        tensor = torch.from_numpy(part).view(dtype).view(shape)
        return tensor.to(device=self._device, dtype=wanted)


class Broadcast:
    """A broadcast that is pending."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def wait(self) -> None:
        """Block until it is done; Horovod's own wait would take a core."""
        begun = time.monotonic()
        while not poll(self._handle):
            sleep_between_polls(begun)
        synchronize(self._handle)


def start(buffer: Bytes, root_rank: int, name: str, process_set: ProcessSet) -> Broadcast:
    """Start a broadcast; see :class:`hvd_pipe.pipeline.process_sets.Start`."""
    tensor = torch.from_numpy(buffer)
    return Broadcast(broadcast_async_(tensor, root_rank, name=name, process_set=process_set))
