"""Which tensors share a fragment, where models are averaged in fragments."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["assign"]


def assign(nbytes: Sequence[int], count: int, taken: Sequence[int] = ()) -> list[int]:
    """Return the fragment of each tensor: the largest first, each into the smallest fragment.

    Args:
        nbytes: Sizes of the tensors, in bytes.
        count: How many fragments there are.
        taken: The fragments of the first tensors, which have one already.

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
    found, sizes = [*taken, *([0] * (len(nbytes) - len(taken)))], [0] * count
    for index, fragment in enumerate(taken):
        sizes[fragment] += nbytes[index]
    for index in sorted(range(len(taken), len(nbytes)), key=lambda i: (-nbytes[i], i)):
        fragment = min(range(count), key=sizes.__getitem__)
        found[index] = fragment
        sizes[fragment] += nbytes[index]
    return found
