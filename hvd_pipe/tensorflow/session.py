"""One list of variables, and the engine that distributes their gradients, alike on all ranks.

What an optimizer or a tape distributes shows when gradients come for the first time, mostly while
the step is traced. There ranks compare their variables, and agree on which gradients there are:
one that a rank lacks travels as zeros, as others may have it.
"""

from __future__ import annotations

import dataclasses
import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import allreduce
from horovod.tensorflow.mpi_ops import Average, Sum

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.runtime import check_mode
from hvd_pipe.runtime.arguments import user_groups
from hvd_pipe.runtime.consensus import Description, members
from hvd_pipe.strategy import MergedGradient, Method, PipeSGD
from hvd_pipe.tensorflow.agree import checked, gather
from hvd_pipe.tensorflow.arguments import Arguments, shapes_of
from hvd_pipe.tensorflow.checking import delayed
from hvd_pipe.tensorflow.graphs import identity, raw
from hvd_pipe.tensorflow.strategies.base import Engine, Gradients, Momentum, Settings
from hvd_pipe.tensorflow.strategies.cocod import CoCoDEngine
from hvd_pipe.tensorflow.strategies.forward_overlap import (
    ForwardOverlapEngine,
    MergedGradientEngine,
)
from hvd_pipe.tensorflow.strategies.pipe_sgd import PipeSGDEngine

_NONE, _DENSE, _SPARSE = "none", "dense", "sparse"

FindMomenta = Callable[[Sequence[Any]], Sequence[Momentum]]

_log = logging.getLogger("hvd_pipe")


class Session:
    """One list of variables, and the engine that distributes their gradients.

    Args:
        arguments: As the user passed them.
        method: What distributes the gradients at first.
        tag: Begins the names of all messages.
        variables, gradients, local, momenta: As `Sessions.of`.
    """

    number = 0
    """Counts the sessions of their owner."""
    _began_unlike = False

    def __init__(
        self,
        arguments: Arguments,
        method: Method,
        tag: str,
        variables: Sequence[Any],
        gradients: Sequence[Any],
        local: set[int],
        momenta: FindMomenta | None,
    ) -> None:
        self.variables = list(variables)
        self._arguments, self.tag, self._momenta = arguments, tag, momenta
        self._shapes = shapes_of(variables)
        shared = [index for index, each in enumerate(variables) if identity(each) not in local]
        self._agreed, self.has_local = self._agree(shared, gradients)
        self._sent = [index for index in shared if self._agreed[index] != _NONE]
        self._kept = sorted(set(range(len(self.variables))) - set(self._sent))
        self.adopt(method)

    def adopt(self, method: Method) -> None:
        """Let an engine of this method distribute the gradients; nothing is in flight."""
        arguments = self._arguments
        sparse_travels = isinstance(method, MergedGradient) and not arguments.sparse_as_dense
        self._layouts = {
            index: _DENSE if layout == _SPARSE and not sparse_travels else layout
            for index, layout in self._agreed.items()
        }
        sparse = frozenset(
            i for i, index in enumerate(self._sent) if self._layouts[index] == _SPARSE
        )
        mine = [self.variables[index] for index in self._sent]
        shapes = shapes_of(mine)
        dense = [i for i in range(len(mine)) if i not in sparse]
        groups = None
        if arguments.groups is not None and dense:
            found = user_groups(arguments.groups, mine, dense)
            groups = [same for group in found for same in shapes.dtype_groups(group)]
        settings = Settings(
            shapes,
            [raw(each) for each in mine],
            arguments.reduction(),
            self.tag,
            sparse,
            groups,
            self._momenta(mine) if self._momenta is not None else (),
        )
        self.engine: Engine = _make_engine(settings, method)

    @property
    def workers(self) -> int:
        """How many ranks distribute these gradients."""
        return len(members(self._arguments.process_set))

    @property
    def refuses_join(self) -> bool:
        """Whether zeros in place of a rank that has left would be wrong, or cannot be had."""
        reduction = self.engine.settings.reduction
        if reduction.alone:
            return False
        travels_apart = reduction.codec is not None or bool(self.engine.settings.sparse)
        return travels_apart or self.engine.is_local

    # Architecture: K5
    def outgoing(self, gradients: Sequence[Any]) -> Gradients:
        """Return what the engine is given: one gradient for each variable that is sent."""
        found: dict[int, Any] = {}
        for i, index in enumerate(self._sent):
            gradient = gradients[index]
            if not isinstance(gradient, tf.Tensor) or self._layouts[index] == _SPARSE:
                gradient = self._as_agreed(index, gradient)
            found[i] = gradient
        if check_mode.active.on:
            found = {i: delayed(each) for i, each in found.items()}
        for index in self._kept:
            if self._layouts.get(index) == _NONE and gradients[index] is not None:
                raise HvdPipeError(
                    f"{self._shapes.names[index]!r} has a gradient now, and had none on any rank "
                    "when training began: compile the model with a new DistributedOptimizer when "
                    "other layers are trained."
                )
        return found

    # Architecture: K9
    def incoming(self, due: Gradients, gradients: Sequence[Any]) -> list[Any]:
        """Return one gradient a variable: what is due, and this rank's own for local ones.

        It is None where nothing is due.
        """
        found = list(gradients)
        if self._arguments.scale_local_gradients:
            for index in self._kept:
                if found[index] is not None:
                    workers = self.engine.settings.reduction.workers
                    found[index] = _scaled(found[index], 1.0 / workers)
        for i, index in enumerate(self._sent):
            found[index] = due.get(i)
        return found

    @property
    def sends(self) -> bool:
        """Whether any gradient travels; the same on all ranks."""
        return bool(self._sent)

    def own(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients with None for those that travel."""
        return [each if i in self._kept else None for i, each in enumerate(gradients)]

    def warn_of_unlike_replicas(self) -> None:
        """Say so where ranks that have trained with the same gradients have other weights."""
        process_set = self._arguments.process_set
        if not process_set.included():
            return
        if check_mode.active.on:
            self._compare_replicas()
            return
        self._began_unlike = self._are_unlike()
        if self._began_unlike and process_set.rank() == 0:
            _log.warning(
                "replicas differ after training with the same gradients: they began differently. "
                "Pass callbacks=[BroadcastGlobalVariablesCallback(0)] of "
                "hvd_pipe.tensorflow.keras.callbacks to fit, or call hvd_pipe.tensorflow."
                "broadcast_variables(model.variables + optimizer.variables, root_rank=0) "
                "before the first step."
            )

    def end_fit(self) -> bool:
        """Have equal replicas where callbacks have set unlike weights at the end of ``fit``.

        Returns whether that is CoCoD's affair, which averages statistics as well.
        """
        process_set = self._arguments.process_set
        if not process_set.included() or self._began_unlike or not self._are_unlike():
            return False
        if isinstance(self.engine, CoCoDEngine):
            return True
        if process_set.rank() == 0:
            _log.warning(
                "a callback has set weights at the end of fit, and they differ between ranks: the "
                "weights are their mean now. EarlyStopping(restore_best_weights=True) chooses by "
                "the metrics of one rank, unless MetricAverageCallback() stands before it."
            )
        for index in self._sent:
            variable, name = raw(self.variables[index]), f"{self.tag}.end.{index}"
            variable.assign(allreduce(variable, op=Average, name=name, process_set=process_set))
        return False

    def _are_unlike(self) -> bool:
        crc = 0
        for index in self._sent:
            crc = zlib.crc32(raw(self.variables[index]).numpy().tobytes(), crc)
        return len(set(gather(crc, f"{self.tag}.replicas", self._arguments.process_set))) > 1

    def _compare_replicas(self) -> None:
        values = [np.asarray(raw(self.variables[index])) for index in self._sent]
        names = [self._shapes.names[index] for index in self._sent]
        sums = [check_mode.checksum(value.tobytes()) for value in values]

        def detail(index: int) -> str:
            norm = float(np.linalg.norm(values[index].astype(np.float64)))
            return f"checksum {sums[index]}, norm {norm:.9g}"

        lines = [(f"the weight of {name!r}", crc) for name, crc in zip(names, sums, strict=True)]
        name, process_set = f"{self.tag}.checked", self._arguments.process_set
        check_mode.compare(lines, detail, "after synchronize()", gather, name, process_set)

    def finite_everywhere(self, finite: tf.Tensor) -> tf.Tensor:
        """Return whether gradients are finite on all ranks: of averages, each rank knows."""
        reduction = self.engine.settings.reduction
        if reduction.alone or not (self.has_local or self.engine.is_local):
            return finite
        votes = dataclasses.replace(reduction.lossless(), op=Sum, gradient_predivide_factor=1.0)
        total = votes.reduce(tf.cast(finite, tf.float32)[None], f"{self.tag}.finite")
        return tf.equal(total[0], float(reduction.workers))

    def _as_agreed(self, index: int, gradient: Any) -> Any:
        shape, dtype = self._shapes.shapes[index], self._shapes.dtypes[index]
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        if self._layouts[index] == _DENSE:
            if gradient is None:
                return tf.zeros(shape, dtype)
            return tf.convert_to_tensor(gradient) if is_sparse else gradient
        if gradient is None:
            nothing = tf.zeros([0, *shape[1:]], dtype)
            return tf.IndexedSlices(nothing, tf.zeros([0], tf.int64), tf.constant(shape))
        if not is_sparse:
            rows = tf.range(shape[0], dtype=tf.int64)
            return tf.IndexedSlices(gradient, rows, tf.constant(shape))
        # Ranks must send indices of one dtype.
        return tf.IndexedSlices(
            gradient.values, tf.cast(gradient.indices, tf.int64), gradient.dense_shape
        )

    # Architecture: K3
    def _agree(
        self, shared: Sequence[int], gradients: Sequence[Any]
    ) -> tuple[dict[int, str], bool]:
        """Compare the variables that are shared with those of the other ranks."""
        process_set = self._arguments.process_set
        variables = [self.variables[index] for index in shared]
        shapes = shapes_of(variables)
        by_hand = self._arguments.groups
        if isinstance(by_hand, list):
            index_of = {id(each): i for i, each in enumerate(variables)}
            by_hand = [[index_of.get(id(each)) for each in group] for group in by_hand]

        def check() -> tuple[None, Description]:
            count = ("the number of variables that are not local", str(len(variables)))
            named = [
                (f"the variable {name}", f"{shapes.dtypes[i].name}{shapes.shapes[i]}")
                for i, name in enumerate(shapes.names)
            ]
            return None, [
                count,
                *named,
                ("groups (by the indices of their variables)", str(by_hand)),
            ]

        checked(check, f"{self.tag}.variables", process_set)
        mine = [_layout_of(gradients[index]) for index in shared]
        has_local = len(shared) < len(self.variables)
        if not process_set.included():
            return dict(zip(shared, mine, strict=True)), has_local
        everyone = gather([has_local, mine], f"{self.tag}.gradients.layouts", process_set)
        layouts = [
            _together(each) for each in zip(*(layouts for _, layouts in everyone), strict=True)
        ]
        return dict(zip(shared, layouts, strict=True)), any(each for each, _ in everyone)


def _make_engine(settings: Settings, strategy: Method) -> Engine:
    """Return the engine for arguments that all ranks have found good."""
    if isinstance(strategy, MergedGradient):
        made = ForwardOverlapEngine if strategy.overlaps_forward else MergedGradientEngine
        return made(settings, strategy, strategy.load_plan())
    if isinstance(strategy, PipeSGD):
        return PipeSGDEngine(settings, strategy)
    return CoCoDEngine(settings, strategy)


def _layout_of(gradient: Any) -> str:
    if gradient is None:
        return _NONE
    return _SPARSE if isinstance(gradient, tf.IndexedSlices) else _DENSE


def _together(layouts: Sequence[str]) -> str:
    """Return what a gradient is on all ranks together.

    >>> _together(("none", "sparse")), _together(("sparse", "dense")), _together(("none", "none"))
    ('sparse', 'dense', 'none')
    """
    there = {layout for layout in layouts if layout != _NONE}
    if not there:
        return _NONE
    return _SPARSE if there == {_SPARSE} else _DENSE


def _scaled(gradient: Any, factor: float) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor
