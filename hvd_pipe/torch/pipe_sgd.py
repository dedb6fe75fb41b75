"""Pipe-SGD: this step's all-reduce travels behind the next step; two sets of buffers, no clone.

    step t-1:  backward -> set A leaves, bucket by bucket
    step t:    backward -> set B leaves; wait for A; update with A's average; A is free again
    step t+1:  backward -> set A leaves; wait for B; ...

The first pipelined step has nothing to apply and makes no update, so after ``synchronize()`` there
were as many updates as steps and every gradient was applied exactly once.
"""

from __future__ import annotations

import warnings

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.strategy import PipeSGD
from hvd_pipe.torch.buckets import BucketSet
from hvd_pipe.torch.engine import DEFAULT_BUCKET_BYTES, Engine, Settings, State
from hvd_pipe.torch.plans import default_groups

__all__ = ["PipeSGDEngine"]


class PipeSGDEngine(Engine):
    """Staleness one on every rank: an update applies the average of the step before."""

    def __init__(self, settings: Settings, strategy: PipeSGD) -> None:
        super().__init__(settings)
        groups, method = settings.groups, "given"
        if groups is None:
            limit = strategy.bucket_bytes or DEFAULT_BUCKET_BYTES
            groups, method = default_groups(settings, limit), "bytes"
        self.plan = settings.as_plan(groups, method)
        self._warmup_steps = strategy.warmup_steps
        self._sets = [settings.make_buckets(groups, suffix) for suffix in ("even", "odd")]
        self._filling = self._sets[0]
        self._pending: BucketSet | None = None
        self._drains = 0
        self._sent: dict[BucketSet, float] = {}

    @property
    def current(self) -> BucketSet:
        return self._filling

    def prepare(self) -> bool:
        self._sent[self._filling] = float(self._drains % 2)
        self._filling.launch_rest(control=self._sent[self._filling])
        if self.rounds < self._warmup_steps:
            self._wait(self._filling)
            return True
        due, self._pending = self._pending, self._filling
        if due is None:
            # Nothing to apply yet. What was just sent is on its way: p.grad must not lead to it.
            self._filling = self._sets[self._filling is self._sets[0]]
            self._filling.zero()
            self._filling.show()
            return False
        self._wait(due)
        self._filling = due
        return True

    def drain(self) -> None:
        if self._pending is not None:
            due, self._pending = self._pending, None
            self._wait(due)
            self._drains += 1
            self.settings.update()

    def state(self) -> State:
        return State({}, {})

    def load(self, state: State) -> None:
        pass

    def after_join(self) -> None:
        self.drain()
        self._filling = self._sets[0]
        self._drains = 0
        self.rounds = self._warmup_steps

    def discard(self) -> None:
        if self._pending is not None:
            due, self._pending = self._pending, None
            due.wait()
            warnings.warn("the gradient in flight is dropped: a state was loaded", stacklevel=3)

    def _wait(self, due: BucketSet) -> None:
        """Wait for an average and make it the gradient.

        A rank on which no gradient was computed takes synchronize() before step() for the end of
        training, and drains. Each rank sends whether it has, so that none goes on unequal.
        """
        due.wait()
        due.show()
        if not due.all_sent(self._sent[due]):
            raise HvdPipeError(
                "ranks have not drained at the same steps: on some rank synchronize() came before "
                "any gradient was computed in its step. Call backward() on every rank before "
                "synchronize(), on an empty batch too (a loss times zero will do)."
            )
