"""What one optimizer or tape distributes, and what is in flight: made, resumed, handed on.

An optimizer or a tape may be given several lists of variables, each of which is a `Session`.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, MutableMapping, Sequence
from typing import Any, Protocol

import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.mpi_ops import ProcessSet, global_process_set, is_initialized, rank

from hvd_pipe.runtime import check_mode
from hvd_pipe.runtime.consensus import Description, answer_with
from hvd_pipe.runtime.restarts import is_elastic
from hvd_pipe.strategy import Auto, CoCoD, MergedGradient, Method, PipeSGD, Strategy
from hvd_pipe.tensorflow import keras_patches, pending, workers
from hvd_pipe.tensorflow.agree import checked, gather
from hvd_pipe.tensorflow.arguments import Arguments
from hvd_pipe.tensorflow.graphs import Arrays, check_graph, identity
from hvd_pipe.tensorflow.measuring import timeline
from hvd_pipe.tensorflow.messages.reduction import RESIDUAL
from hvd_pipe.tensorflow.session import FindMomenta, Session

States = dict[int, Arrays]
"""What sessions have in flight, by their number; beside it what their owner has, by `OWNERS`."""

OWNERS = -1

_log = logging.getLogger("hvd_pipe")

# How many were made of each description, so that a worker that comes knows which is which.
_made: Counter[str] = Counter()

# What is still to be made here, and goes on from another rank's.
_inherited: dict[str, States] = {}


class Owner(Protocol):
    """What an optimizer keeps between two steps beside its sessions."""

    def state(self) -> Arrays: ...

    def load(self, state: Arrays) -> None: ...


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
        check_graph()
        workers.begin()
        keras_patches.install()
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
            return strategy, [made, checks, *arguments.describe(strategy), *_timeline()]

        # One name for all, so that ranks which have made different numbers still meet here.
        strategy = checked(check, f"hvd_pipe.tf.{number}.construction", process_set)
        if not is_elastic():  # files are named after ranks
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
        return iter(list(self._found.values()))

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

        Args:
            key: Tells this list of variables from others.
            variables: Keras' or TensorFlow's, or the ``tf.TensorSpec`` of a tensor.
            gradients: One for each: a tensor, ``tf.IndexedSlices``, or None.
            local: Each `identity` of the variables that are not distributed.
            momenta: Finds the optimizer's momenta of variables; None for a tape.
        """
        found = self._found.get(key)
        if found is None:
            found = self._make(key, variables, gradients, local, momenta)
        return found

    def _make(
        self,
        key: Hashable,
        variables: Sequence[Any],
        gradients: Sequence[Any],
        local: set[int],
        momenta: FindMomenta | None,
    ) -> Session:
        answer_with(mpi_ops)
        if self._tag is None:
            self._start()
            if self._owner is None:  # a tape begins with the first step, after `inherit`
                self._loaded = _inherited.pop(self.label, self._loaded)
        if isinstance(self.strategy, Auto) and self.watcher is None:
            raise ValueError(  # of the errors that autograph hands on as they are
                "strategy='auto' measures steps and then changes them, which it can do between "
                "two steps of model.fit only: pass "
                "callbacks=[BroadcastGlobalVariablesCallback(0)] of "
                "hvd_pipe.tensorflow.keras.callbacks to fit; in a loop "
                f"of your own, name the strategy: {MergedGradient.name!r}, {PipeSGD.name!r} or "
                f"{CoCoD.name!r} (`hvd-pipe advise` predicts which is fastest)."
            )
        number = next(self._count)
        if self.overlaps_forward and self.watcher is None and number == 0 and rank() == 0:
            _log.warning(
                "overlap='forward': updates stay in their step, as nobody drives it who could "
                "begin it with updates of the step before: pass "
                "callbacks=[BroadcastGlobalVariablesCallback(0)] of "
                "hvd_pipe.tensorflow.keras.callbacks to fit"
            )
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
        self._found[key] = made
        if self._of_tapes:
            holder = next((v for v in variables if not isinstance(v, tf.TensorSpec)), self)
            vars(holder).setdefault(_KEPT, _Kept())[id(self), key] = self, made
        return made

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
        owner = None if self._owner is None else self._owner()
        if owner is not None and OWNERS in states:
            owner.load(states.pop(OWNERS))

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
        return found if owner is None else {**found, OWNERS: owner.state()}

    def go_back(self, states: States | None) -> None:
        """Go on from earlier `states`, and from nothing in flight where these hold none."""
        pending.due.pop(id(self), None)
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

    Residuals are dropped: they were another rank's, or are of other workers.
    """
    _inherited.clear()
    for label, states in found.items():
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
