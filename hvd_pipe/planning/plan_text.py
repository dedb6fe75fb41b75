"""The replicas of each stage as people write them: "15-1", "straight"."""

from __future__ import annotations

import re

__all__ = ["STRAIGHT", "parse_replicas"]

STRAIGHT = "straight"


def parse_replicas(text: str, workers: int | None = None) -> tuple[int, ...]:
    """Return the replicas of each stage, the first stage first.

    Args:
        text: numbers joined by "-", as the paper has them, or "straight" for one worker a stage.
        workers: how many there are; the replicas must add up to them. "straight" needs it.

    Raises:
        TypeError, ValueError: no such text, or another number of workers; says what would do.

    Example:
        >>> parse_replicas("3-1"), parse_replicas("straight", workers=3)
        ((3, 1), (1, 1, 1))
    """
    if not isinstance(text, str):
        raise TypeError(f'replicas are written "3-1" or "straight", got {text!r}')
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    written = text.strip()
    if written == STRAIGHT:
        if workers is None:
            raise ValueError('"straight" is one worker a stage: say how many workers there are')
        return (1,) * workers
    if not re.fullmatch(r"[0-9]+(-[0-9]+)*", written):
        raise ValueError(
            f"{text!r} is no plan: write the workers of each stage, the first stage first, as "
            '"3-1", or "straight" for one worker a stage'
        )
    replicas = tuple(map(int, written.split("-")))
    if 0 in replicas:
        raise ValueError(f"{text!r} has a stage without workers: each needs at least 1")
    if workers is not None and sum(replicas) != workers:
        raise ValueError(
            f"{text!r} is for {sum(replicas)} workers, but there are {workers}: "
            f"start {sum(replicas)}, or write a plan whose numbers add up to {workers}"
            + (f', such as "{workers - 1}-1"' if workers > 1 else "")
        )
    return replicas
