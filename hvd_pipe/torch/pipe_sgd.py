"""Pipe-SGD: this step's all-reduce travels behind the next step; two sets of buffers, no clone.

    step t-1:  backward -> set A leaves, bucket by bucket
    step t:    backward -> set B leaves; wait for A; update with A's average; A is free again
    step t+1:  backward -> set A leaves; wait for B; ...

The first pipelined step has nothing to apply and makes no update, so after ``synchronize()`` there
were as many updates as steps and every gradient was applied exactly once.
"""

from __future__ import annotations

from hvd_pipe.strategy import PipeSGD
from hvd_pipe.torch.buckets import BucketSet
from hvd_pipe.torch.engine import DEFAULT_BUCKET_BYTES, Engine, Settings
from hvd_pipe.torch.merged_gradient import default_groups

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

    @property
    def current(self) -> BucketSet:
        return self._filling

    def prepare(self) -> bool:
        self._filling.launch_rest()
        if self.rounds < self._warmup_steps:
            self._filling.wait()
            self._filling.show()
            return True
        due, self._pending = self._pending, self._filling
        if due is None:
            # Nothing to apply yet. What was just sent is on its way: p.grad must not lead to it.
            self._filling = self._sets[self._filling is self._sets[0]]
            self._filling.zero()
            self._filling.show()
            return False
        due.wait()
        due.show()
        self._filling = due
        return True

    def drain(self) -> None:
        if self._pending is not None:
            due, self._pending = self._pending, None
            due.wait()
            due.show()
            self.settings.update()
