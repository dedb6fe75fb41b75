"""Minibatches in proportion to what each worker can do, so that all finish a step together.

CoCoD-SGD calls this proportional sampling: worker i's share of the batch is M_i / M, M_i being its
speed and M the sum, and its model counts as much in the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def split_batch(batch: int, speeds: Sequence[float]) -> list[int]:
    """Split a batch over workers in proportion to their speeds, by the largest remainder.

    With M the sum of the speeds, worker i gets ``batch * speeds[i] / M``, rounded down; what is
    left goes, one each, to those who lost most by rounding. Every worker gets at least one: where
    its share is below, the others split what remains.

    Args:
        batch: Samples per step, all workers together.
        speeds: Positive, one a worker, in any unit: samples/s, or 1 / seconds per step.

    Raises:
        TypeError, ValueError: Too small a batch, no workers, or a speed that is not positive.

    Example:
        >>> split_batch(10, [1.0, 1.0, 1.0]), split_batch(4, [1.0, 100.0])
        ([4, 3, 3], [1, 3])

    Source: Shen et al., "CoCoD-SGD" (IJCAI 2019), proportional sampling.
    """
    if isinstance(batch, bool) or not isinstance(batch, int):
        raise TypeError(f"batch must be an int, got {batch!r}: int(batch) makes it one.")
    if not speeds:
        raise ValueError("speeds is empty: give one positive speed a worker.")
    for worker, speed in enumerate(speeds):
        if not 0 < speed < math.inf:
            raise ValueError(
                f"speeds[{worker}] is {speed!r}: speeds must be positive and finite; leave a "
                "worker that does nothing out of the process set."
            )
    if batch < len(speeds):
        raise ValueError(
            f"batch={batch} is less than one sample for each of {len(speeds)} workers: raise it "
            f"to {len(speeds)} or more, or use fewer workers."
        )
    exact = _shares(batch, speeds)
    result = [math.floor(share) for share in exact]
    # Rounding errors of the shares may lie on either side, by less than one sample a worker.
    by_loss = sorted(range(len(exact)), key=lambda i: (result[i] - exact[i], i))
    for i in by_loss[: batch - sum(result)]:
        result[i] += 1
    return result


def _shares(batch: int, speeds: Sequence[float]) -> list[float]:
    """Return what each worker gets before rounding: its part, or one where that would be less."""
    largest = max(speeds)
    parts = [speed / largest for speed in speeds]  # so that no sum of them overflows
    ones: set[int] = set()
    while True:
        others = [i for i in range(len(parts)) if i not in ones]
        whole = math.fsum(parts[i] for i in others)
        rest = batch - len(ones)
        shares = {i: rest * (parts[i] / whole) for i in others}
        few = {i for i, share in shares.items() if share < 1}
        if not few or len(few) == len(others):
            return [max(1.0, shares.get(i, 1.0)) for i in range(len(parts))]
        ones |= few
