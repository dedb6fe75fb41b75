"""From arguments and the first gradients to an engine, alike on all ranks.

What an optimizer or a tape distributes shows when gradients come for the first time, mostly while
the step is traced. There ranks compare their variables, and agree on which gradients there are:
one that a rank lacks travels as zeros, as others may have it.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.mpi_ops import ProcessSet, Sum, global_process_set, is_initialized

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.runtime import check_mode
from hvd_pipe.runtime.agreement import answer_with
from hvd_pipe.runtime.restarts import is_elastic
from hvd_pipe.strategy import Auto, CoCoD, MergedGradient, Method, PipeSGD, Strategy
from hvd_pipe.tensorflow import workers
from hvd_pipe.tensorflow.agree import Description, checked, gather
from hvd_pipe.tensorflow.arguments import Arguments, shapes_of, user_groups
from hvd_pipe.tensorflow.measuring import timeline
from hvd_pipe.tensorflow.old_graphs import refuse_old_graphs
from hvd_pipe.tensorflow.strategies.engine import (
    LOST,
    Arrays,
    Engine,
    Gradients,
    Momentum,
    Settings,
    identity,
    raw,
)
from hvd_pipe.tensorflow.strategies.engines import make_engine

__all__ = ["OWNERS", "Owner", "Session", "Sessions", "States", "inherit", "share", "sources_key"]

_NONE, _DENSE, _SPARSE = "none", "dense", "sparse"

FindMomenta = Callable[[Sequence[Any]], Sequence[Momentum]]

States = dict[int, Arrays]
"""What sessions have in flight, by their number; beside it what their owner has, by `OWNERS`."""

OWNERS = -1

_log = logging.getLogger("hvd_pipe")

# How many were made of each description, so that a worker that comes knows which is which.
_made: Counter[str] = Counter()

# What is still to be made here, and goes on from another rank's.
_inherited: dict[str, States] = {}


class Owner(Protocol):
    """An optimizer that keeps something between two steps itself."""

    def _hvd_pipe_state(self) -> Arrays: ...

    def _hvd_pipe_load(self, state: Arrays) -> None: ...


class Sessions:
    """What one optimizer or tape distributes; it may be given several lists of variables.

    Args:
        arguments: As the user passed them.
        of_tapes: Whether a session lasts as long as its variables, which keep it.

    Raises:
        TypeError, ValueError: An argument that cannot be.
        RanksDisagreeError: Ranks came with different ones.
    """

    def __init__(self, arguments: Arguments, of_tapes: bool = False) -> None:
        if not is_initialized():
            raise ValueError("Horovod is not initialised: call hvd.init() before this.")
        refuse_old_graphs()
        workers.begin()
        self.arguments = arguments
        self._tag: str | None = None
        self._owner: weakref.ref[Owner] | None = None
        self._of_tapes = of_tapes
        self._found: MutableMapping[Hashable, Session]
        self._found = weakref.WeakValueDictionary() if of_tapes else {}
        self._count = itertools.count()
        self._loaded: States = {}
        self._numbers: dict[Hashable, int] = {}
        """What sessions on other workers were numbered, of those that are still to come here."""
        # A worker that comes to an elastic job is here alone: there, ranks compare at a step.
        self.strategy = arguments.check_alone() if is_elastic() else self._start()
        auto = isinstance(self.strategy, Auto)
        self.method: Method = MergedGradient() if auto else self.strategy  # type: ignore[assignment]
        """What is carried out: the strategy, or under ``auto`` what that has come to."""
        self.chosen: Method | None = None
        """What ``auto`` has chosen."""
        self.is_stale = False
        """Whether steps that were traced before are another method's."""
        self.watcher: Any = None
        """The `strategies.replan.Replan` that sees the steps, if somebody drives it."""
        lines = arguments.describe(self.strategy)
        text = "; ".join(f"{label} {value}" for label, value in lines)
        self.label = f"{text}; {_made[text]}"
        _made[text] += 1
        workers.note(self)

    def _start(self) -> Strategy:
        """Compare the arguments with those of the other workers; all of them must come here.

        Raises:
            TypeError, ValueError, RanksDisagreeError: As the class.
        """
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
            return strategy, [made, checks, *arguments.describe(strategy), *_timeline()]

        # One name for all, so that ranks which have made different numbers still meet here.
        strategy = checked(check, f"hvd_pipe.tf.{number}.construction", process_set)
        if not is_elastic():  # files are named after ranks
            timeline.start(process_set)
        if number == 0:
            workers.watch()
        return strategy

    @property
    def tag(self) -> str:
        """What begins the names of all messages; the first time, all ranks must come here."""
        if self._tag is None:
            self._start()
        assert self._tag is not None
        return self._tag

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._found.values()))

    def of(
        self,
        variables: Sequence[Any],
        gradients: Sequence[Any],
        local: set[int],
        momenta: FindMomenta | None = None,
        turn: int = 0,
    ) -> Session:
        """Return the session of these variables; the first time, all ranks must come here.

        Args:
            variables: Keras' or TensorFlow's, or the ``tf.TensorSpec`` of a tensor.
            gradients: One for each: a tensor, ``tf.IndexedSlices``, or None.
            local: Each `identity` of the variables that are not distributed.
            momenta: Finds the optimizer's momenta of variables; None for a tape.
            turn: How many gradients of these variables the step has had before this one.
        """
        workers.note_graphs()
        answer_with(mpi_ops)
        if self._tag is None:
            self._start()
            if self._owner is None:  # a tape begins with the first step, after `inherit`
                self._loaded = _inherited.pop(self.label, self._loaded)
        here = tuple(identity(each) in local for each in variables)
        key = (sources_key(variables), here, turn)
        if isinstance(self.strategy, Auto) and self.watcher is None:
            raise ValueError(  # of the errors that autograph hands on as they are
                "strategy='auto' measures steps and then changes them, which it can do between "
                "two steps of model.fit only: pass "
                "callbacks=[BroadcastGlobalVariablesCallback(0)] of "
                "hvd_pipe.tensorflow.keras.callbacks to fit; in a loop "
                f"of your own, name the strategy: {MergedGradient.name!r}, {PipeSGD.name!r} or "
                f"{CoCoD.name!r} (`hvd-pipe advise` predicts which is fastest)."
            )
        found = self._found.get(key)
        if found is None:
            number = next(self._count)
            tag = f"{self._tag}.{number}"
            made = Session(self.arguments, self.method, tag, variables, gradients, local, momenta)
            made.number = number
            before = self._numbers.pop(key, None) if self._numbers else number
            loaded = None if before is None else self._loaded.pop(before, None)
            if not self._are_alike(_summary(loaded), f"{tag}.loaded"):
                loaded = None  # some have loaded no checkpoint, or were made anew
            if loaded is not None:
                with tf.init_scope():  # now, not in the graph that is being traced
                    made.engine.load(loaded)
            self._found[key] = found = made
            if self._of_tapes:
                holder = next((v for v in variables if not isinstance(v, tf.TensorSpec)), self)
                vars(holder).setdefault(_KEPT, _Kept())[id(self), key] = self, made
        return found

    def follow(self, method: Method) -> None:
        """Go on with what ``auto`` has chosen; all ranks, between two steps.

        Nothing is in flight, as the steps before were synchronous. What a lossy codec has left
        over of them is dropped.
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
        owner = None if self._owner is None else self._owner()
        if owner is not None and OWNERS in states:
            owner._hvd_pipe_load(states.pop(OWNERS))

    # What elastic jobs need, and another `hvd.init()`.

    def agree(self) -> None:
        """Start with nothing in flight unless all ranks have as much; all come here.

        Rank 0 alone may have loaded a checkpoint, whose variables are broadcast to the others.
        """
        mine = {number: _summary(state) for number, state in sorted(self.states().items())}
        if not self._are_alike(mine, f"{self.tag}.in_flight"):
            self.go_back(None)

    def _are_alike(self, mine: object, name: str) -> bool:
        process_set = self.arguments.process_set
        if not process_set.included():
            return True
        first, *others = gather(mine, name, process_set)
        alike = all(other == first for other in others)
        if not alike and process_set.rank() == 0 and not is_elastic():
            _log.warning(
                "ranks have loaded different states: nothing of it is in flight. Have each rank "
                "load a checkpoint of its own, or call optimizer.synchronize() before saving one."
            )
        return alike

    def own(self, owner: Owner) -> None:
        """Remember the optimizer that these belong to."""
        self._owner = weakref.ref(owner)

    def states(self) -> States:
        """Return what is in flight, of sessions that are still to come as well."""
        found = dict(self._loaded)
        for session in self:
            found[session.number] = session.engine.state()
        owner = None if self._owner is None else self._owner()
        return found if owner is None else {**found, OWNERS: owner._hvd_pipe_state()}

    def go_back(self, states: States | None) -> None:
        """Go on from earlier `states`, and from nothing in flight where these hold none."""
        nothing: States = {number: {} for number in [OWNERS, *(each.number for each in self)]}
        self.load({**nothing, **(states or {})})

    def rest(self) -> None:
        """Let Horovod end: each session is made again when its gradients come again."""
        for key, session in list(self._found.items()):
            self._numbers[key] = number = session.number
            try:
                self._loaded[number] = session.engine.state()
            except Exception as error:  # whatever it is, Horovod must end
                _log.warning("what %s had in flight is lost: %s", session.engine.name, error)
        self._found.clear()
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


def _timeline() -> Description:
    return [] if is_elastic() else timeline.describe()  # files are named after ranks


def inherit(found: dict[str, States]) -> None:
    """Have all that is distributed go on from one rank's `Sessions.states`, by their label.

    What codecs have left over is dropped: it was another rank's, or is of other workers.
    """
    _inherited.clear()
    for label, states in found.items():
        _inherited[label] = {
            number: {name: array for name, array in state.items() if not name.startswith(LOST)}
            for number, state in states.items()
        }
    for sessions in workers.running():
        sessions.go_back(_inherited.pop(sessions.label, None))


def share() -> None:
    """Make what is in flight equal on all ranks, between two steps; all come here.

    A session of a tape that nobody uses any more is gone when this rank's collector comes, so
    only those count that each rank of their process set still has. No other will make a step.
    """
    mine = {
        session.tag: session
        for sessions in workers.running()
        for session in sessions
        if sessions.arguments.process_set.included()
    }
    found = gather(list(mine), "hvd_pipe.tf.shared", global_process_set)
    holders = Counter(tag for tags in found for tag in tags)
    for tag, session in sorted(mine.items()):
        if holders[tag] == session.workers:
            session.engine.share()


def sources_key(variables: Sequence[Any]) -> tuple[Hashable, ...]:
    """Return what tells lists of variables apart; tensors, which come anew, by dtype and shape."""
    return tuple(
        (each.dtype.name, *each.shape)
        if isinstance(each, tf.Tensor | tf.TensorSpec)
        else identity(each)
        for each in variables
    )


_KEPT = "_hvd_pipe_sessions"
"""The attribute by which a variable keeps the sessions of tapes."""


class _Kept(dict[Any, Any]):
    """Is not copied or pickled with the variable."""

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


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
        shared = [place for place, each in enumerate(variables) if identity(each) not in local]
        self._agreed, self.has_local = self._agree(shared, gradients)
        self._sent = [place for place in shared if self._agreed[place] != _NONE]
        self.adopt(method)

    def adopt(self, method: Method) -> None:
        """Let an engine of this method distribute the gradients; nothing is in flight."""
        arguments = self._arguments
        sparse_travels = isinstance(method, MergedGradient) and not arguments.sparse_as_dense
        self._kinds = {
            place: _DENSE if kind == _SPARSE and not sparse_travels else kind
            for place, kind in self._agreed.items()
        }
        sparse = frozenset(
            i for i, place in enumerate(self._sent) if self._kinds[place] == _SPARSE
        )
        mine = [self.variables[place] for place in self._sent]
        shapes = shapes_of(mine)
        dense = [i for i in range(len(mine)) if i not in sparse]
        groups = user_groups(arguments.groups, mine, shapes, dense)
        settings = Settings(
            shapes,
            [raw(each) for each in mine],
            arguments.reduction(),
            self.tag,
            sparse,
            groups,
            self._momenta(mine) if self._momenta is not None else (),
        )
        self.engine: Engine = make_engine(settings, method)

    @property
    def workers(self) -> int:
        """How many ranks distribute these gradients."""
        return int(self._arguments.process_set.size())

    @property
    def refuses_join(self) -> bool:
        """Whether zeros in place of a rank that has left would be wrong, or cannot be had."""
        reduction = self._arguments.reduction()
        if reduction.alone:
            return False
        travels_apart = reduction.codec is not None or bool(self.engine.settings.sparse)
        return travels_apart or self.engine.is_local

    def outgoing(self, gradients: Sequence[Any]) -> Gradients:
        """Return what the engine is given: one gradient for each variable that is sent.

        Raises:
            HvdPipeError: There is a gradient where no rank had one at first.
        """
        found: dict[int, Any] = {}
        for i, place in enumerate(self._sent):
            found[i] = self._as_agreed(place, gradients[place])
        for place, kind in self._kinds.items():
            if kind == _NONE and gradients[place] is not None:
                raise HvdPipeError(
                    f"{self._shapes.names[place]!r} has a gradient now, and had none on any rank "
                    "when training began: compile the model with a new DistributedOptimizer when "
                    "other layers are trained."
                )
        return found

    def incoming(self, due: Gradients, gradients: Sequence[Any]) -> list[Any]:
        """Return one gradient a variable: what is due, and this rank's own for local ones."""
        found = list(gradients)
        if self._arguments.scale_local_gradients:
            for place in set(range(len(found))) - set(self._sent):
                if found[place] is not None:
                    workers = self._arguments.reduction().workers
                    found[place] = _scaled(found[place], 1.0 / workers)
        for i, place in enumerate(self._sent):
            found[place] = due[i]
        return found

    @property
    def sends(self) -> bool:
        """Whether any gradient travels; the same on all ranks."""
        return bool(self._sent)

    def own(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients with None for those that travel."""
        sent = set(self._sent)
        return [None if i in sent else each for i, each in enumerate(gradients)]

    def warn_of_unlike_replicas(self) -> None:
        """Say so where ranks that have trained with the same gradients have other weights."""
        process_set = self._arguments.process_set
        if not process_set.included():
            return
        if check_mode.active.on:
            self._compare_replicas()
            return
        crc = 0
        for place in self._sent:
            crc = zlib.crc32(raw(self.variables[place]).numpy().tobytes(), crc)
        everyone = gather(crc, f"{self.tag}.replicas", process_set)
        if len(set(everyone)) > 1 and process_set.rank() == 0:
            _log.warning(
                "replicas differ after training with the same gradients: they began differently. "
                "Pass callbacks=[BroadcastGlobalVariablesCallback(0)] of "
                "hvd_pipe.tensorflow.keras.callbacks to fit, or call hvd_pipe.tensorflow."
                "broadcast_variables(model.variables + optimizer.variables, root_rank=0) "
                "before the first step."
            )

    def _compare_replicas(self) -> None:
        values = [np.asarray(raw(self.variables[place])) for place in self._sent]
        names = [self._shapes.names[place] for place in self._sent]
        sums = [check_mode.checksum(value.tobytes()) for value in values]

        def detail(place: int) -> str:
            norm = float(np.linalg.norm(values[place].astype(np.float64)))
            return f"checksum {sums[place]}, norm {norm:.9g}"

        lines = [(f"the weight of {name!r}", crc) for name, crc in zip(names, sums, strict=True)]
        name, process_set = f"{self.tag}.checked", self._arguments.process_set
        check_mode.compare(lines, detail, "after synchronize()", gather, name, process_set)

    def finite_everywhere(self, finite: tf.Tensor) -> tf.Tensor:
        """Return whether gradients are finite on all ranks: of averages, each rank knows."""
        reduction = self._arguments.reduction()
        if reduction.alone or not (self.has_local or self.engine.is_local):
            return finite
        votes = dataclasses.replace(reduction.lossless(), op=Sum, gradient_predivide_factor=1.0)
        total = votes.reduce(tf.cast(finite, tf.float32)[None], f"{self.tag}.finite")
        return tf.equal(total[0], float(reduction.workers))

    def _as_agreed(self, place: int, gradient: Any) -> Any:
        shape, dtype = self._shapes.shapes[place], self._shapes.dtypes[place]
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        if self._kinds[place] == _DENSE:
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

    def _agree(
        self, shared: Sequence[int], gradients: Sequence[Any]
    ) -> tuple[dict[int, str], bool]:
        """Compare the variables that are shared with those of the other ranks.

        Variables that are local do not travel, so each rank may have its own.

        Args:
            shared: The places of the variables that are not local.
            gradients: One for each variable.

        Returns:
            What all ranks know of each gradient that is shared, by place; and whether any rank has
            local variables.

        Raises:
            RanksDisagreeError: Two ranks share unlike variables.
        """
        process_set = self._arguments.process_set
        variables = [self.variables[place] for place in shared]
        shapes = shapes_of(variables)
        by_hand = self._arguments.groups
        if isinstance(by_hand, list):
            index = {id(each): i for i, each in enumerate(variables)}
            by_hand = [[index.get(id(each)) for each in group] for group in by_hand]

        def check() -> tuple[None, Description]:
            count = ("the number of variables that are not local", str(len(variables)))
            named = [
                (f"the variable {name}", f"{shapes.dtypes[i].name}{shapes.shapes[i]}")
                for i, name in enumerate(shapes.names)
            ]
            return None, [
                count,
                *named,
                ("groups (by the places of their variables)", str(by_hand)),
            ]

        checked(check, f"{self.tag}.variables", process_set)
        mine = [_kind(gradients[place]) for place in shared]
        has_local = len(shared) < len(self.variables)
        if not process_set.included():
            return dict(zip(shared, mine, strict=True)), has_local
        everyone = gather([has_local, mine], f"{self.tag}.gradients.kinds", process_set)
        kinds = [_together(each) for each in zip(*(kinds for _, kinds in everyone), strict=True)]
        return dict(zip(shared, kinds, strict=True)), any(each for each, _ in everyone)


def _kind(gradient: Any) -> str:
    if gradient is None:
        return _NONE
    return _SPARSE if isinstance(gradient, tf.IndexedSlices) else _DENSE


def _together(kinds: Sequence[str]) -> str:
    """Return what a gradient is on all ranks together.

    >>> _together(("none", "sparse")), _together(("sparse", "dense")), _together(("none", "none"))
    ('sparse', 'dense', 'none')
    """
    there = {kind for kind in kinds if kind != _NONE}
    if not there:
        return _NONE
    return _SPARSE if there == {_SPARSE} else _DENSE


def _scaled(gradient: Any, factor: float) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor
