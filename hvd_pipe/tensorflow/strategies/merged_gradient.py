"""Merged-gradient: synchronous SGD whose gradients travel in buckets. The default engine."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning.plan import Plan
from hvd_pipe.strategy import MergedGradient
from hvd_pipe.tensorflow.graphs import Arrays, restore
from hvd_pipe.tensorflow.measuring.ready_times import ReadyTimes
from hvd_pipe.tensorflow.messages.buckets import Packing, Residuals
from hvd_pipe.tensorflow.strategies.base import Due, Engine, Gradients, OptimizerAccess, Settings

_log = logging.getLogger("hvd_pipe")


class MergedGradientEngine(Engine):
    """Synchronous SGD: all buckets of a step are averaged before its update."""

    name = MergedGradient.name

    def __init__(self, settings: Settings, strategy: MergedGradient, plan: Plan | None) -> None:
        super().__init__(settings)
        self.times: ReadyTimes | None = None
        """Set while times are recorded, by graphs that are traced meanwhile."""
        if plan is None and len(settings.shapes):
            sent = settings.dense or [0]  # a plan has one name at least
            plan = settings.shapes.first_plan(strategy, settings.groups, sent[::-1])
        self.adopt(plan)

    def adopt(self, plan: Plan | None) -> None:
        """Make the plan's buckets, with new residuals; graphs that were traced before keep theirs.

        None is for no gradients.
        """
        settings = self.settings
        groups = []
        if plan is not None and settings.dense:
            groups = settings.shapes.plan_groups(plan, settings.dense)
        self.plan, self._packing = plan, Packing(settings.shapes, groups)
        self._residuals = Residuals(settings.reduction, self._packing)

    @property
    def wire_bytes(self) -> npt.NDArray[np.float64]:
        """The size of each gradient as it is sent, by index."""
        shapes, ratio = self.settings.shapes, self.settings.reduction.ratio
        return np.array(
            [n * ratio(dtype) for n, dtype in zip(shapes.nbytes, shapes.dtypes, strict=True)]
        )

    # Architecture: K6
    def exchange(self, gradients: Gradients) -> Due:
        reduction, tag = self.settings.reduction, self.settings.tag
        if self.times is not None:
            gradients = self.times.watched(gradients)
        flats = self._packing.pack(gradients)
        reduced = reduction.reduce_all(flats, f"{tag}.gradients", self._residuals.feedbacks)
        averages = self._packing.unpack(reduced)
        for index in self.settings.sparse:
            averages[index] = reduction.gather(gradients[index], f"{tag}.sparse.{index}")
        return Due(averages if self.times is None else self.times.arrived(averages))

    def after_step(self, access: OptimizerAccess | None = None) -> None:
        if self.times is not None:
            self.times.updated(self.settings.variables)

    def drain(self, update: Callable[[Gradients], None]) -> None:
        """Nothing is ever in flight between two steps."""

    def state(self) -> Arrays:
        return {name: residual.numpy() for name, residual in self._residuals.named.items()}

    def load(self, state: Arrays) -> None:
        if any(name.startswith("gradient.") for name in state):
            _log.warning(
                "the checkpoint has updates that were still to come, which are lost: load it with "
                "strategy='merged-gradient:overlap=forward', or call optimizer.synchronize() on "
                "all ranks before saving"
            )
        restore(self._residuals.named, state)
