"""A loader's minibatches, cut into microbatches."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from hvd_pipe.pipeline.feed import Piece

__all__ = ["split"]


def split(batch: Any, pieces: int) -> list[Piece]:
    """Cut a minibatch into microbatches along the first dimension, as `torch.tensor_split` does.

    Args:
        batch: (inputs, targets); inputs are a tensor, or a tuple of what the model is called with.
        pieces: How many microbatches; no more than there are samples.

    Raises:
        TypeError, ValueError: No such pair, or too few samples.

    Example:
        >>> first, last = split((torch.zeros(3, 2), torch.tensor([0, 1, 2])), 2)
        >>> first.inputs[0].shape, last.targets, last.samples
        (torch.Size([2, 2]), tensor([2]), 1)
    """
    if not isinstance(batch, Sequence) or isinstance(batch, str) or len(batch) != 2:
        what = f"{len(batch)} items" if isinstance(batch, Sequence) else type(batch).__name__
        raise TypeError(
            f"the loader must yield (inputs, targets), got {what}: give several inputs as a "
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
    if samples < pieces:
        raise ValueError(
            f"a minibatch of {samples} samples cannot be cut into {pieces} microbatches: give the "
            "loader a larger batch_size, or drop_last=True, or ask for fewer microbatches."
        )

    def part(at: int) -> Piece:
        def cut(x: Any) -> Any:
            whole = not isinstance(x, torch.Tensor) or not x.dim() or x.shape[0] != samples
            return x if whole or pieces == 1 else x.tensor_split(pieces)[at]

        count = samples // pieces + (at < samples % pieces)
        own = tree_map(cut, targets)
        return Piece(tree_map(cut, inputs), own, count, count / samples, _digest(own))

    return [part(at) for at in range(pieces)]


def _digest(targets: Any) -> int:
    """Return a checksum of all tensors among the targets."""
    digest = 0
    for leaf in tree_leaves(targets):
        if isinstance(leaf, torch.Tensor):
            flat = leaf.detach().cpu().contiguous().view(-1)
            digest = zlib.crc32(flat.view(torch.uint8).numpy().data, digest)
    return digest
