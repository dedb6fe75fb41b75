"""What codecs make of values, in NumPy and from their definitions; none of hvd_pipe's code.

test_exchange.py holds exchanges to it, and tests/gpu those on a GPU.
"""

from __future__ import annotations

import numpy as np

from hvd_pipe.runtime.codec_format import BF16Format, Int8Format

F32 = np.float32

Codec = BF16Format | Int8Format


def carried(codec: Codec, x: np.ndarray) -> np.ndarray:
    """What a codec makes of float32 values, from its definition."""
    if isinstance(codec, BF16Format):
        bits = x.view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) & np.uint64(0xFFFF0000)
        return rounded.astype(np.uint32).view(F32)
    assert isinstance(codec, Int8Format)
    rows = -(-x.size // codec.chunk)
    padded = np.zeros(rows * codec.chunk, F32)
    padded[: x.size] = x
    padded = padded.reshape(rows, codec.chunk)
    scale = np.maximum(np.abs(padded).max(1, keepdims=True) / F32(127), F32(2.0**-126))
    return (np.rint(padded / scale) * scale).reshape(-1)[: x.size]


def emulated(
    codec: Codec, mine: list[np.ndarray], average: bool = True, lost: np.ndarray | None = None
) -> np.ndarray:
    """Both phases in one process; ``lost`` holds the residuals of all ranks, and of the sums."""
    whole = [x if lost is None else lost[rank] + x for rank, x in enumerate(mine)]
    arrived = [carried(codec, x) for x in whole]
    total = arrived[0].copy()
    for other in arrived[1:]:
        total += other
    if average:
        total /= F32(len(mine))
    if lost is not None:
        total = lost[-1] + total
    result = carried(codec, total)
    if lost is not None:
        lost[:-1] = [x - y for x, y in zip(whole, arrived, strict=True)]
        lost[-1] = total - result
    return result
