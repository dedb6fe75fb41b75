"""The sessions of an optimizer or a tape, and their state in flight: made, resumed, replaced.

An optimizer or a tape may be given several lists of variables, each of which is a `Session`. They
show when gradients come for the first time, mostly while the step is traced. There ranks compare
their variables, and agree on which gradients there are: one that a rank lacks travels as zeros, as
others may have it.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import allreduce, mpi_ops
from horovod.tensorflow.mpi_ops import (
    Average,
    ProcessSet,
    Sum,
    global_process_set,
    is_initialized,
    rank,
)

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.runtime import check_mode
from hvd_pipe.runtime.arguments import user_groups
from hvd_pipe.runtime.consensus import Description, answer_with
from hvd_pipe.runtime.restarts import is_elastic
from hvd_pipe.strategy import Auto, CoCoD, MergedGradient, Method, PipeSGD, Strategy
from hvd_pipe.tensorflow import keras_patches, pending, workers
from hvd_pipe.tensorflow.agree import checked, gather
from hvd_pipe.tensorflow.arguments import Arguments, shapes_of
from hvd_pipe.tensorflow.checking import delayed
from hvd_pipe.tensorflow.graphs import Arrays, check_graph, identity, raw
from hvd_pipe.tensorflow.measuring import timeline
from hvd_pipe.tensorflow.messages.reduction import RESIDUAL
from hvd_pipe.tensorflow.strategies.base import Engine, Gradients, Momentum, Settings
from hvd_pipe.tensorflow.strategies.cocod import CoCoDEngine
from hvd_pipe.tensorflow.strategies.forward_overlap import ForwardOverlapEngine
from hvd_pipe.tensorflow.strategies.merged_gradient import MergedGradientEngine
from hvd_pipe.tensorflow.strategies.pipe_sgd import PipeSGDEngine

States = dict[int, Arrays]
"""The state of sessions in flight, by their number; by `OWNERS`, that of their owner."""

OWNERS = -1

_log = logging.getLogger("hvd_pipe")

# How many sessions have each description: a new worker takes over the states in the same order.
_made: Counter[str] = Counter()

# The states of another rank's sessions, for sessions that are still to be made here.
_inherited: dict[str, States] = {}

_NONE, _DENSE, _SPARSE = "none", "dense", "sparse"

FindMomenta = Callable[[Sequence[Any]], Sequence[Momentum]]


class Session:
    """Some variables, and the engine that distributes their gradients; see `Sessions.of`."""

    _began_unlike = False

    def __init__(
        self,
        arguments: Arguments,
        method: Method,
        tag: str,
        number: int,
        variables: Sequence[Any],
        gradients: Sequence[Any],
        local: set[int],
        momenta: FindMomenta | None,
    ) -> None:
        self.variables = list(variables)
        self._arguments, self.tag, self._momenta = arguments, f"{tag}.{number}", momenta
        self.number = number
        """Counts the sessions of their owner."""
        self._shapes = shapes_of(variables)
        shared = [i for i, variable in enumerate(variables) if identity(variable) not in local]
        self._agreed, self.has_local = self._agree(shared, gradients)
        self._sent = [index for index in shared if self._agreed[index] != _NONE]
        self._kept = sorted(set(range(len(self.variables))) - set(self._sent))
        self.sends = bool(self._sent)
        """Whether any gradient travels; the same on all ranks."""
        self.adopt(method)

    def adopt(self, method: Method) -> None:
        """Let an engine of this method distribute the gradients; nothing is in flight."""
        arguments = self._arguments
        sparse_travels = isinstance(method, MergedGradient) and not arguments.sparse_as_dense
        self._layouts = {
            index: _DENSE if layout == _SPARSE and not sparse_travels else layout
            for index, layout in self._agreed.items()
        }
        layouts = [self._layouts[index] for index in self._sent]
        sparse = frozenset(i for i, layout in enumerate(layouts) if layout == _SPARSE)
        sent = [self.variables[index] for index in self._sent]
        shapes, reduction = shapes_of(sent), arguments.reduction()
        dense = [i for i in range(len(sent)) if i not in sparse]
        groups = None
        if arguments.groups is not None and dense:
            by_hand = user_groups(arguments.groups, sent, dense)
            groups = [part for group in by_hand for part in shapes.dtype_groups(group)]
        momenta = self._momenta(sent) if self._momenta is not None else ()
        raws = [raw(variable) for variable in sent]
        settings = Settings(shapes, raws, reduction, self.tag, sparse, groups, momenta)
        self.engine: Engine
        if isinstance(method, PipeSGD):
            self.engine = PipeSGDEngine(settings, method)
        elif isinstance(method, CoCoD):
            self.engine = CoCoDEngine(settings, method)
        else:
            assert isinstance(method, MergedGradient)
            kind = ForwardOverlapEngine if method.overlaps_forward else MergedGradientEngine
            self.engine = kind(settings, method, method.load_plan())

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
        outgoing: dict[int, Any] = {}
        for i, index in enumerate(self._sent):
            gradient = gradients[index]
            if not isinstance(gradient, tf.Tensor) or self._layouts[index] == _SPARSE:
                gradient = self._as_agreed(index, gradient)
            outgoing[i] = gradient
        if check_mode.active.on:
            outgoing = {i: delayed(gradient) for i, gradient in outgoing.items()}
        for index in self._kept:
            if self._layouts.get(index) == _NONE and gradients[index] is not None:
                raise HvdPipeError(
                    f"{self._shapes.names[index]!r} has a gradient now, and had none on any rank "
                    "when training began: compile the model with a new DistributedOptimizer when "
                    "other layers are trained."
                )
        return outgoing

    # Architecture: K9
    def incoming(self, due: Gradients, gradients: Sequence[Any]) -> list[Any]:
        """Return one gradient a variable: what is due or None, and this rank's own where local."""
        incoming = list(gradients)
        factor = 1.0 / self.engine.settings.reduction.workers
        for index in self._kept if self._arguments.scale_local_gradients else ():
            own = incoming[index]
            if isinstance(own, tf.IndexedSlices):
                own = tf.IndexedSlices(own.values * factor, own.indices, own.dense_shape)
            elif own is not None:
                own = own * factor
            incoming[index] = own
        for i, index in enumerate(self._sent):
            incoming[index] = due.get(i)
        return incoming

    def own(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients with None for those that travel."""
        return [gradient if i in self._kept else None for i, gradient in enumerate(gradients)]

    def warn_of_unlike_replicas(self) -> None:
        """Say so where ranks that have trained with the same gradients have other weights."""
        process_set = self._arguments.process_set
        if not process_set.included():
            return
        if check_mode.active.on:
            values = [np.asarray(raw(self.variables[index])) for index in self._sent]
            sums = [check_mode.checksum(value.tobytes()) for value in values]
            labels = [f"the weight of {self._shapes.names[index]!r}" for index in self._sent]

            def detail(index: int) -> str:
                norm = float(np.linalg.norm(values[index].astype(np.float64)))
                return f"checksum {sums[index]}, norm {norm:.9g}"

            lines, name = [*zip(labels, sums, strict=True)], f"{self.tag}.checked"
            check_mode.compare(lines, detail, "after synchronize()", gather, name, process_set)
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
        if self.engine.is_local:
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

    def finite_everywhere(self, finite: tf.Tensor) -> tf.Tensor:
        """Return whether gradients are finite on all ranks."""
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
            index_of = {id(variable): i for i, variable in enumerate(variables)}
            by_hand = [[index_of.get(id(variable)) for variable in group] for group in by_hand]

        def check() -> tuple[None, Description]:
            return None, [
                ("the number of variables that are not local", str(len(variables))),
                *(
                    (f"the variable {name}", f"{shapes.dtypes[i].name}{shapes.shapes[i]}")
                    for i, name in enumerate(shapes.names)
                ),
                ("groups (by the indices of their variables)", str(by_hand)),
            ]

        checked(check, f"{self.tag}.variables", process_set)
        kinds = [
            _NONE if g is None else _SPARSE if isinstance(g, tf.IndexedSlices) else _DENSE
            for g in (gradients[index] for index in shared)
        ]
        has_local = len(shared) < len(self.variables)
        if not process_set.included():
            return dict(zip(shared, kinds, strict=True)), has_local
        everyone = gather([has_local, kinds], f"{self.tag}.gradients.layouts", process_set)
        agreed = {}
        for index, *row in zip(shared, *(layouts for _, layouts in everyone), strict=True):
            present = set(row) - {_NONE}
            agreed[index] = _DENSE if len(present) > 1 else (present or {_NONE}).pop()
        return agreed, any(has for has, _ in everyone)


class Sessions:
    """What one optimizer or tape distributes; it may be given several lists of variables.

    A session of a tape lasts as long as its variables, which keep it.
    """

    def __init__(self, arguments: Arguments, of_tapes: bool = False) -> None:
        if not is_initialized():
            raise ValueError("Horovod is not initialised: call hvd.init() before this.")
        check_graph()
        workers.begin()
        keras_patches.install()
        self.arguments = arguments
        self._tag: str | None = None
        self.owner: Callable[[], Any] = lambda: None
        """Returns what keeps more of the optimizer between two steps: its `Accumulation`."""
        self._of_tapes = of_tapes
        self._sessions: MutableMapping[Hashable, Session]
        self._sessions = weakref.WeakValueDictionary() if of_tapes else {}
        self._count = itertools.count()
        self._loaded: States = {}
        self._numbers: dict[Hashable, int] = {}
        """The numbers that sessions have on other workers, for sessions not made here yet."""
        # A worker that comes to an elastic job is here alone: there, ranks compare at a step.
        self.strategy = arguments.check_alone() if is_elastic() else self._start()
        auto = isinstance(self.strategy, Auto)
        self.method: Method = MergedGradient() if auto else self.strategy  # type: ignore[assignment]
        """The method in use: the strategy, or the one that ``auto`` uses now."""
        self.chosen: Method | None = None
        """What ``auto`` has chosen."""
        self.is_stale = False
        """Whether steps that were traced before are another method's."""
        self.fit_ended = False
        """Whether the call of ``fit`` that is running has finished what was in flight."""
        self.watcher: Any = None
        """The `strategies.replan.Replan` that sees the steps, if somebody drives it."""
        lines = arguments.describe(self.strategy)
        text = "; ".join(f"{label} {value}" for label, value in lines)
        self.label = f"{text}; {_made[text]}"
        _made[text] += 1
        workers.note(self)

    def _start(self) -> Strategy:
        """Compare the arguments with those of the other workers; all of them must come here."""
        arguments, process_set = self.arguments, self.arguments.process_set
        if not isinstance(process_set, ProcessSet) or process_set.process_set_id is None:
            process_set = global_process_set  # it is refused below, and all ranks must hear of it
        number = process_set.process_set_id
        count = workers.count(number)
        self._tag = f"hvd_pipe.tf.{number}.{count}"

        def check() -> tuple[Strategy, Description]:
            strategy = arguments.check()
            made = ("the number of distributed optimizers and tapes made before", str(count))
            checks = (check_mode.CHECK, str(int(check_mode.active.on)))
            files = [] if is_elastic() else timeline.describe()  # they are named after ranks
            return strategy, [made, checks, *arguments.describe(strategy), *files]

        # One name for all, so that ranks which have made different numbers still meet here.
        strategy = checked(check, f"hvd_pipe.tf.{number}.construction", process_set)
        if not is_elastic():
            timeline.start(process_set)
        if number == 0:
            workers.watch()
        return strategy

    @property
    def overlaps_forward(self) -> bool:
        """Whether steps may come to leave messages to the next one."""
        return isinstance(self.method, MergedGradient) and self.method.overlaps_forward

    @property
    def tag(self) -> str:
        """What begins the names of all messages; the first time, all ranks must come here."""
        if self._tag is None:
            self._start()
        assert self._tag is not None
        return self._tag

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    # Architecture: K2
    def of(
        self,
        key: Hashable,
        variables: Sequence[Any],
        gradients: Sequence[Any],
        local: set[int],
        momenta: FindMomenta | None = None,
    ) -> Session:
        """Return the session of these variables; the first time, all ranks must come here.

        A variable may be the ``tf.TensorSpec`` of a tensor. Those whose `identity` is in ``local``
        are not distributed. ``momenta`` finds the optimizer's momenta; a tape has none.
        """
        session = self._sessions.get(key)
        if session is not None:
            return session
        answer_with(mpi_ops)
        if self._tag is None:
            self._start()
            if self._of_tapes:  # a tape begins with the first step, after `inherit`
                self._loaded = _inherited.pop(self.label, self._loaded)
        number = next(self._count)
        self._check_driven(number)
        assert self._tag is not None
        session = Session(
            self.arguments, self.method, self._tag, number, variables, gradients, local, momenta
        )
        before = self._numbers.pop(key, None) if self._numbers else number
        loaded = None if before is None else self._loaded.pop(before, None)
        if not self._are_alike(_summary(loaded), f"{session.tag}.loaded"):
            loaded = None  # some have loaded no checkpoint, or were made anew
        if loaded is not None:
            with tf.init_scope():  # now, not in the graph that is being traced
                session.engine.load(loaded)
        self._sessions[key] = session
        if self._of_tapes:
            holder = next((v for v in variables if not isinstance(v, tf.TensorSpec)), self)
            kept = vars(holder).setdefault("_hvd_pipe_sessions", _Kept())
            kept[id(self), key] = self, session
        return session

    def _check_driven(self, number: int) -> None:
        """Refuse `auto` where nobody drives the steps, and warn of ``overlap="forward"`` there."""
        if self.watcher is not None:
            return
        if isinstance(self.strategy, Auto):
            raise ValueError(  # of the errors that autograph hands on as they are
                "strategy='auto' measures steps and then changes them, which it can do between "
                "two steps of model.fit only: pass "
                "callbacks=[BroadcastGlobalVariablesCallback(0)] of "
                "hvd_pipe.tensorflow.keras.callbacks to fit; in a loop "
                f"of your own, name the strategy: {MergedGradient.name!r}, {PipeSGD.name!r} or "
                f"{CoCoD.name!r} (`hvd-pipe advise` predicts which is fastest)."
            )
        if self.overlaps_forward and number == 0 and rank() == 0:
            _log.warning(
                "overlap='forward': updates stay in their step, as nobody drives it who could "
                "begin it with updates of the step before: pass "
                "callbacks=[BroadcastGlobalVariablesCallback(0)] of "
                "hvd_pipe.tensorflow.keras.callbacks to fit"
            )

    def follow(self, method: Method) -> None:
        """Go on with what ``auto`` has chosen; all ranks, between two steps.

        Nothing is in flight, as the steps before were synchronous. The residuals of a lossy codec
        are dropped.
        """
        before, self.method, self.chosen = self.method, method, method
        if method != before:
            self.is_stale = True
            for session in self:
                session.adopt(method)

    def load(self, states: States) -> None:
        """Go on from what sessions had in flight, by their number."""
        self._loaded = states
        for session in self:
            if session.number in states:
                session.engine.load(states.pop(session.number))
        owner = self.owner()
        if owner is not None and OWNERS in states:
            owner.load(states.pop(OWNERS))

    # What elastic jobs need, and another `hvd.init()`.

    def agree(self) -> None:
        """Start with nothing in flight unless all ranks have as much; all come here.

        Rank 0 alone may have loaded a checkpoint, whose variables are broadcast to the others.
        """
        summaries = {number: _summary(state) for number, state in sorted(self.states().items())}
        if not self._are_alike(summaries, f"{self.tag}.in_flight"):
            self.go_back(None)

    def _are_alike(self, summary: object, name: str) -> bool:
        process_set = self.arguments.process_set
        if not process_set.included():
            return True
        first, *others = gather(summary, name, process_set)
        alike = all(other == first for other in others)
        if not alike and process_set.rank() == 0 and not is_elastic():
            _log.warning(
                "ranks have loaded different states: nothing of it is in flight. Have each rank "
                "load a checkpoint of its own, or call optimizer.synchronize() before saving one."
            )
        return alike

    def states(self) -> States:
        """Return what is in flight, of sessions that are still to come as well."""
        states = {**self._loaded, **{session.number: session.engine.state() for session in self}}
        owner = self.owner()
        return states if owner is None else {**states, OWNERS: owner.state()}

    def go_back(self, states: States | None) -> None:
        """Go on from earlier `states`, and from nothing in flight where these hold none."""
        pending.due.pop(id(self), None)
        numbers = [OWNERS, *(session.number for session in self)]
        nothing: States = {number: {} for number in numbers}
        self.load({**nothing, **(states or {})})

    def rest(self) -> None:
        """Let Horovod end: each session is made again when its gradients come again."""
        for key, session in list(self._sessions.items()):
            self._numbers[key] = number = session.number
            try:
                self._loaded[number] = session.engine.state()
            except Exception as error:  # whatever it is, Horovod must end
                _log.warning("what %s had in flight is lost: %s", session.engine.name, error)
        self._sessions.clear()
        self._count = itertools.count()
        self._tag = self.watcher = None


def _summary(state: Arrays | None) -> dict[str, str] | None:
    """Describe what must be alike on all ranks that go on together: counters, and shapes."""
    if state is None:
        return None
    return {
        name: str(array.tolist() if array.ndim == 0 else array.shape)
        for name, array in sorted(state.items())
        # Each rank's own: prediction leaves out what is not finite, and a local variable's sum has
        # any shape.
        if name != "leads" and ".sum." not in name
    }


def inherit(states_of: dict[str, States]) -> None:
    """Have all that is distributed go on from one rank's `Sessions.states`, by their label.

    Residuals are dropped: they were another rank's, or are of other workers.
    """
    _inherited.clear()
    for label, states in states_of.items():
        _inherited[label] = {
            number: {name: array for name, array in state.items() if not name.startswith(RESIDUAL)}
            for number, state in states.items()
        }
    for sessions in workers.running():
        sessions.go_back(_inherited.pop(sessions.label, None))


def share() -> None:
    """Make what is in flight equal on all ranks, between two steps; all come here.

    A session of a tape that nobody uses any more is gone when this rank's collector comes, so
    only those count that each rank of their process set still has. No other will make a step.
    """
    session_of = {
        session.tag: session
        for sessions in workers.running()
        for session in sessions
        if sessions.arguments.process_set.included()
    }
    gathered = gather(list(session_of), "hvd_pipe.tf.shared", global_process_set)
    holders = Counter(tag for tags in gathered for tag in tags)
    for tag, session in sorted(session_of.items()):
        if holders[tag] == session.engine.settings.reduction.workers:
            session.engine.share()


def sources_key(variables: Sequence[Any]) -> tuple[Hashable, ...]:
    """Return a key for a list of variables; tensors are identified by dtype and shape."""
    return tuple(
        (variable.dtype.name, *variable.shape)
        if isinstance(variable, tf.Tensor | tf.TensorSpec)
        else identity(variable)
        for variable in variables
    )


class _Kept(dict[Any, Any]):
    """The sessions of tapes that a variable keeps; it is not copied or pickled with them."""

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()
