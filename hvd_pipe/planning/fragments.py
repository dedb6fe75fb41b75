"""Which tensors share a fragment, where models are averaged in fragments."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["assign"]


def assign(nbytes: Sequence[int], count: int, taken: Sequence[int | None] = ()) -> list[int]:
    """Return the fragment of each tensor: the largest first, each into the smallest fragment.

    Args:
        nbytes: Sizes of the tensors, in bytes.
        count: How many fragments there are.
        taken: The fragments of the first tensors; None for one that has none yet.

    Raises:
        ValueError: More fragments than tensors: some would be empty.

    Example:
        >>> assign([4, 1, 2, 3], 2)
        [0, 0, 1, 1]
        >>> assign([4, 1, 2, 3, 9], 2, taken=[0, 0, 1, 1])
        [0, 0, 1, 1, 0]

    Source: Graham, "Bounds on multiprocessing timing anomalies" (1969).
    """
    if count > len(nbytes):
        raise ValueError(
            f"fragments={count}, and the model has {len(nbytes)} tensors that train: a fragment "
            f"has whole tensors, so give at most {len(nbytes)} fragments."
        )
    known = {i: fragment for i, fragment in enumerate(taken) if fragment is not None}
    found, loads = [0] * len(nbytes), [(0, 0)] * count  # bytes, then tensors, as some are empty
    for i in sorted(range(len(nbytes)), key=lambda i: (i not in known, -nbytes[i], i)):
        found[i] = known[i] if i in known else min(range(count), key=loads.__getitem__)
        size, tensors = loads[found[i]]
        loads[found[i]] = size + nbytes[i], tensors + 1
    return found
