"""What a worker of a pipeline holds in memory, measured while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

__all__ = ["ActivationMeter", "StageMemory"]


@dataclass(frozen=True)
class StageMemory:
    """Bytes that a worker holds at the most.

    Args:
        weights: Parameters, in all versions.
        gradients: As large as the parameters that are trained.
        optimizer: Its state.
        activations: What forward passes keep for backward, received inputs among it, of all
            microbatches in flight.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of it.

        Example:
            >>> StageMemory(weights=8, gradients=4, optimizer=4, activations=2).total
            18
        """
        return self.weights + self.gradients + self.optimizer + self.activations


class ActivationMeter:
    """Counts what autograd keeps for microbatches in flight, each memory once.

    A pipeline holds the most before its first backward pass, so that is when it measures.
    """

    def __init__(self) -> None:
        self.most_bytes = 0
        self._kept: dict[int, torch.UntypedStorage] = {}  # which live on, so addresses are theirs
        self._done = False

    @contextmanager
    def noting(
        self, inputs: tuple[object, ...], weights: list[torch.nn.Parameter]
    ) -> Iterator[None]:
        """Note what a forward pass keeps, but for its weights.

        Args:
            inputs: What it is called with.
            weights: The stage's parameters.
        """
        if self._done:
            yield
            return
        own = {x.untyped_storage().data_ptr() for x in weights}
        # Inputs may be parts of a message, or of a whole data set.
        for x in inputs:
            if isinstance(x, torch.Tensor):
                own.add(x.untyped_storage().data_ptr())
                self.most_bytes += x.nbytes

        def note(x: torch.Tensor) -> torch.Tensor:
            if x.untyped_storage().data_ptr() not in own:
                self._count(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            yield

    def note(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """Note results, which live until their gradients come."""
        if not self._done:
            for x in outputs:
                self._count(x)

    def _count(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._kept:
            self._kept[storage.data_ptr()] = storage
            self.most_bytes += storage.nbytes()

    def end(self) -> None:
        """Measure no more."""
        self._done = True
        self._kept.clear()
