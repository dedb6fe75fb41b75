"""What a value that travels between stages looks like, as planned from the sample minibatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ITEM_BYTES", "TensorSpec"]

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of an element by the plain name of its dtype: the dtypes that can travel."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that crosses a cut between stages.

    Args:
        name: Unique in its model.
        shape: With the sample minibatch.
        dtype: Its plain name, one of :data:`ITEM_BYTES`.
        dynamic: Dimensions that follow the batch size, which a last minibatch makes smaller.
        gradient: Whether a gradient of its shape and dtype comes back.

    Raises:
        ValueError: An empty name, an unknown dtype, or a shape or dimension that cannot be.

    Example:
        >>> spec = TensorSpec("relu", (32, 10), "float32", dynamic=(0,), gradient=True)
        >>> spec.nbytes
        1280
        >>> spec.check((7, 10), "float32", "stage 1")
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    dynamic: tuple[int, ...]
    gradient: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "dynamic", tuple(self.dynamic))
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a tensor needs a non-empty string as its name, got {self.name!r}")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(
                f"tensor {self.name!r}: dtype must be one of {', '.join(ITEM_BYTES)}; "
                f"got {self.dtype!r}"
            )
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in self.shape):
            raise ValueError(
                f"tensor {self.name!r}: a shape has integers of at least 0, got {self.shape}"
            )
        if any(at not in range(len(self.shape)) for at in self.dynamic):
            raise ValueError(
                f"tensor {self.name!r}: dynamic = {self.dynamic} must number dimensions of the "
                f"shape {self.shape}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes with the sample minibatch."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def check(self, shape: Sequence[int], dtype: str, where: str) -> None:
        """Check that a tensor is as planned; dimensions in ``dynamic`` may be smaller, not larger.

        Args:
            shape: Of the tensor at hand.
            dtype: Of the tensor at hand, its plain name.
            where: Who has it, for the message: "stage 1 replica 0".

        Raises:
            ValueError: It differs; names the stage, the tensor, the plan and what was found.
        """
        found = tuple(shape)
        what = f"{where}: tensor {self.name!r}"
        plan = f"was planned as {self.dtype} {self.shape}, but is {dtype} {found}"
        if dtype != self.dtype:
            raise ValueError(
                f"{what} {plan}: minibatches must have the dtypes of the sample; convert them in "
                "the loader, or plan with a sample that has this dtype"
            )
        if len(found) != len(self.shape):
            raise ValueError(
                f"{what} {plan}: it must have {len(self.shape)} dimensions; plan with a sample "
                "that is shaped like the minibatches"
            )
        for at, (planned, now) in enumerate(zip(self.shape, found, strict=True)):
            if at in self.dynamic and now > planned:
                raise ValueError(
                    f"{what} {plan}: dimension {at} follows the batch and may be smaller than "
                    "planned, never larger; plan with the largest minibatch as the sample"
                )
            if at not in self.dynamic and now != planned:
                raise ValueError(
                    f"{what} {plan}: dimension {at} does not follow the batch, so it must be "
                    f"{planned} in every minibatch; pad or crop the data to one size"
                )
