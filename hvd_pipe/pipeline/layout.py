"""Which rank is which replica of which stage: ranks are counted stage by stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hvd_pipe.planning.instructions import Worker

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """The workers of a pipeline, by rank.

    Args:
        replicas: R, workers of each stage.

    Example:
        >>> layout = Layout((2, 1))
        >>> [str(layout.worker(rank)) for rank in range(layout.size)]
        ['stage 0 replica 0', 'stage 0 replica 1', 'stage 1 replica 0']
        >>> layout.rank(Worker(1, 0)), layout.ranks(0)
        (2, (0, 1))
        >>> list(layout.neighbours())
        [(0, 2), (1, 2)]
    """

    replicas: tuple[int, ...]

    @property
    def size(self) -> int:
        """Workers of all stages together."""
        return sum(self.replicas)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.replicas)

    def worker(self, rank: int) -> Worker:
        """Return what this rank is."""
        left = rank
        for stage, width in enumerate(self.replicas):
            if left < width:
                return Worker(stage, left)
            left -= width
        raise ValueError(f"rank {rank} is outside of a pipeline of {self.size} workers")

    def rank(self, worker: Worker) -> int:
        """Return the rank of a worker."""
        return sum(self.replicas[: worker.stage]) + worker.replica

    def ranks(self, stage: int) -> tuple[int, ...]:
        """Return the ranks of a stage's replicas."""
        first = sum(self.replicas[:stage])
        return tuple(range(first, first + self.replicas[stage]))

    def neighbours(self) -> Iterator[tuple[int, int]]:
        """Yield the pairs of ranks that ever exchange messages, alike on every rank."""
        for stage in range(self.stages - 1):
            seen = set()
            # Microbatch u is the work of replica u mod R of both stages.
            for u in range(self.replicas[stage] * self.replicas[stage + 1]):
                left = self.rank(Worker(stage, u % self.replicas[stage]))
                right = self.rank(Worker(stage + 1, u % self.replicas[stage + 1]))
                seen.add((left, right))
            yield from sorted(seen)
