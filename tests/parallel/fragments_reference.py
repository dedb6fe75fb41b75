"""Which tensors share a fragment, for the references of both frameworks; not hvd_pipe's code."""

from __future__ import annotations


def fragments_of(sizes: list[int], count: int) -> list[list[int]]:
    """The indices of each fragment's tensors: the largest first, each into the smallest so far."""
    found: list[list[int]] = [[] for _ in range(count)]
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        min(found, key=lambda own: sum(sizes[j] for j in own)).append(i)
    return [sorted(own) for own in found]
