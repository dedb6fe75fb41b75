"""What a running job does and when: ``HVD_PIPE_TIMELINE=dir`` writes ``dir/rank{N}.json``.

    forward     from the beginning of the step's graph to the first gradient (see below)
    backward    from there to the last gradient
    ready       what a message carries is complete (of CoCoD, a model)
    allreduce   a message, from when Horovod may send it to its arrival; codecs' work included
    wait        nothing but messages holds the step up: from the last gradient to the last arrival
    update      from then until the optimizer has changed the variables

TensorFlow tells of none of these, so the step's graph has operations that note the time, where it
is traced while the variable is set; else `active` notes nothing and the graph is as ever::

    begin -+-> first -> last -----------------------.     first: the gradient of the last variable
           +-> launched (a bucket) -> arrived ------+--> end     last: all gradients
                                                          end: all of these, and the update

No message and no update waits for a note: notes hang on what they watch, and only the end of a
step waits for all of them.

*Forward* has no border in a graph: it begins with the graph, which may be before its input is
there, and lasts until the gradient of the last variable, so it includes the loss and the first
layer of the backward pass. A step that runs eagerly shows no forward pass, and its backward pass
under a tape only; a tape's update is the user's, and not shown.

*Moments* are the host's. On a GPU a note waits for a number to be copied from there, so it tells
when the device has come to it. A note is taken by one of TensorFlow's threads, so it is late while
all of them compute. It costs about 35 us of a core and of Python's lock, beside the computation; a
step has 4 of them, and 2 a message (3 under Pipe-SGD).

*One clock*, as in `hvd_pipe.runtime.timeline.clock`. CoCoD's messages leave in a
thread of their own, which notes
them without any operation.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.mpi_ops import ProcessSet, Sum, rank, size

from hvd_pipe.runtime.timeline import clock
from hvd_pipe.runtime.timeline.pending import NOT_SHOWN
from hvd_pipe.runtime.timeline.recorder import OFF, Recorder, TraceRecorder, open_recorder
from hvd_pipe.tensorflow.agree import Description, gather

__all__ = [
    "Message",
    "Step",
    "TensorFlowRecorder",
    "active",
    "beginning",
    "cond",
    "current",
    "describe",
    "start",
    "step",
]


class TensorFlowRecorder(TraceRecorder):
    """`hvd_pipe.runtime.timeline.recorder` for TensorFlow: all moments are the host's."""

    _over = False

    def join(self, process_set: ProcessSet) -> None:
        """Take an optimizer or a tape in; all ranks do this, those of its process set together."""
        if not process_set.included():
            self.set_clock(clock.own_clock())
            return
        name = f"hvd_pipe.tf.{process_set.process_set_id}.clock"

        def meet() -> None:
            with tf.init_scope(), tf.device("/cpu:0"):
                mpi_ops._allreduce(tf.zeros([1]), name=name, op=Sum, process_set=process_set)

        self.set_clock(clock.agree_on_clock(meet, gather, name, process_set))

    def begin_step(self) -> None:
        """Note that a step begins; of optimizers in one graph, all do this at its beginning."""
        if self._over:
            self._over = False
            super().end_step()

    def end_step(self) -> None:
        """Note that a step is over; what comes until the next one begins is still a part of it."""
        self._over = True


class Step(AbstractContextManager["Step"]):
    """The notes of one step: while it is traced, operations are made; they run with each step.

    Executed eagerly, a note is taken at once.
    """

    def __init__(
        self, recorder: TensorFlowRecorder, is_backward: bool = False, goes_on: bool = False
    ) -> None:
        self._recorder, self._is_backward, self._goes_on = recorder, is_backward, goes_on
        self.is_eager = tf.executing_eagerly()
        self._outer: Step | None = None
        self._tokens: list[Any] = []
        self._begin: Any = None
        # Of the step that is running.
        self._begun: float | None = None
        self._first: float | None = None
        self._last: float | None = None
        self._arrivals: list[float] = []  # from several of TensorFlow's threads

    def __enter__(self) -> Step:
        self._outer, _open.step = getattr(_open, "step", None), self
        if self._begin is not None:
            return self  # begun in this graph, by `beginning`
        if not tf.executing_eagerly():
            note = (lambda: None) if self._goes_on else self._note_begin
            self._begin = tf.numpy_function(self._noted(note), [], tf.int32)
        elif self._is_backward:
            self._note_begin()
        return self

    def __exit__(self, *_: object) -> None:
        _open.step = self._outer
        self._tokens, self._begin = [], None  # of a graph that is complete

    # What is noted, in the order of a step.

    def gradients(self, gradients: Sequence[Any]) -> None:
        """Note when the first one is there, and when all are."""
        there = [_dense(each) for each in gradients if each is not None]
        if not there:
            return
        if tf.executing_eagerly() and not self._is_backward:
            self._recorder.begin_step()
        first = self._mark(self._note_first, there[-1])
        with tf.control_dependencies(there):
            self._mark(self._note_last, there[0], first)

    def ready(self, values: tf.Tensor, name: str) -> None:
        """Note that what a message carries is complete."""
        self._mark(lambda: self._recorder.ready(name), values)

    def launch(self, values: tf.Tensor, name: str, nbytes: Any, fresh: bool) -> Message:
        """Note that a message leaves."""
        message = Message(self._recorder, name, fresh)
        message.token = self._mark(message.launched, values, tf.cast(nbytes, tf.int64))
        return message

    def land(self, message: Message, values: tf.Tensor) -> None:
        """Note that a message has arrived."""

        def landed(*_: Any) -> None:
            self._arrivals.append(message.landed())

        self._mark(landed, values, message.token)

    def end(self, variables: Sequence[Any] = (), when: Any = True) -> Any:
        """Note that the step is over, and return what waits for that."""
        has = bool(variables)
        due = tf.constant(True) if when is None else tf.convert_to_tensor(when)

        def noted(is_due: Any, *_: Any) -> None:
            self._note_end(has and bool(is_due))

        if tf.executing_eagerly():
            noted(due)
            return nullcontext()
        # A read waits for the writes that were traced before it.
        with tf.control_dependencies([each.read_value() for each in variables]):
            end = tf.numpy_function(self._noted(noted), [due, *self._tokens], tf.int32)
        return tf.control_dependencies([end])

    # Marks in a graph.

    def part(self) -> list[Any]:
        """Return, as one more output of a branch of a condition, that its notes are taken.

        Give it to `whole` outside of the branch.
        """
        if tf.executing_eagerly():
            return []
        graph = tf.compat.v1.get_default_graph()
        mine = [each for each in self._tokens if each.graph is graph]
        self._tokens = [each for each in self._tokens if each.graph is not graph]
        return [tf.add_n(mine) if mine else tf.constant(0)]

    def whole(self, parts: Sequence[Any]) -> None:
        """Let the end of the step wait for what `part` has returned."""
        self._tokens += parts

    def _mark(self, note: Callable[..., None], values: Any, *inputs: Any) -> Any:
        """Call ``note(*inputs)`` when ``values`` and ``inputs`` are there."""
        if tf.executing_eagerly():
            note(*inputs)
            return tf.constant(0)
        # Stateful calls would run one after another, in the order in which they are traced. What
        # has no state is computed before the first step unless it depends on what has some
        # (`begin`), and never unless that needs its value (`end`).
        some = tf.reshape(values, [-1])[:1]
        token = tf.numpy_function(
            self._noted(lambda _, __, *rest: note(*rest)),
            [some, self._begin, *inputs],
            tf.int32,
            stateful=False,
        )
        token.set_shape([])
        self._tokens.append(token)
        return token

    @staticmethod
    def _noted(note: Callable[..., None]) -> Callable[..., Any]:
        def noted(*inputs: Any) -> Any:
            note(*inputs)
            return np.int32(0)

        return noted

    # What notes say.

    def _note_begin(self) -> None:
        self._recorder.begin_step()
        self._begun, self._first, self._last = self._recorder.now(), None, None

    def _note_first(self, *_: Any) -> None:
        self._first = self._recorder.now()

    def _note_last(self, *_: Any) -> None:
        self._last = now = self._recorder.now()
        begun, self._begun = self._begun, None
        if begun is None or self._first is None:
            return  # executed eagerly, and this is an optimizer: it hears of gradients only
        first = begun if self._is_backward and self.is_eager else self._first
        if first > begun:
            self._recorder.span("forward", "forward", begun, first)
        self._recorder.span("backward", "backward", first, now)

    def _note_end(self, updated: bool) -> None:
        now = self._recorder.now()
        free = now if self._last is None else self._last
        arrived = max(self._arrivals, default=0.0)
        if arrived > free:
            self._recorder.span("wait", "messages", free, arrived)
            free = arrived
        if updated:
            self._recorder.span("update", "update", free, now)
        self._last, self._arrivals = None, []
        self._recorder.end_step()


class Message:
    """A message of a step's graph.

    Args:
        recorder: Where it is shown.
        name: Its name.
        fresh: Whether its values become ready when it leaves.
    """

    token: Any = None

    def __init__(self, recorder: TensorFlowRecorder, name: str, fresh: bool) -> None:
        self._recorder, self._name, self._fresh = recorder, name, fresh
        self._operation = NOT_SHOWN

    def launched(self, nbytes: Any, *_: Any) -> None:
        """Take the moment down at which it left."""
        if self._fresh:
            self._recorder.ready(self._name)
        self._operation = self._recorder.launched(self._name, int(nbytes))

    def landed(self) -> float:
        """Take down that it has arrived, and return when."""
        self._operation.complete()
        assert self._operation.end_s is not None
        return self._operation.end_s


def _dense(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


_open = threading.local()

active: Recorder = OFF
"""The process's recorder; `OFF` where ``HVD_PIPE_TIMELINE`` is not set."""


def step(is_backward: bool = False, goes_on: bool = False) -> AbstractContextManager[Step | None]:
    """Return a context in which a step is exchanged; its value is None where nothing is noted.

    Args:
        is_backward: Whether, executed eagerly, the backward pass begins with the context.
        goes_on: Whether a graph has what is still to do of the step before.
    """
    if not isinstance(active, TensorFlowRecorder):
        return nullcontext()
    begun: tuple[Any, Step] | None = getattr(_open, "begun", None)
    _open.begun = None
    if begun is not None and begun[0]() is tf.compat.v1.get_default_graph():
        return begun[1]
    return Step(active, is_backward, goes_on)


@contextmanager
def beginning() -> Iterator[None]:
    """Return a context for what a step's graph does first; the next `step` in it goes on there."""
    if not isinstance(active, TensorFlowRecorder):
        yield
        return
    begun = Step(active)
    outer, _open.begun = getattr(_open, "step", None), None
    begun.__enter__()
    try:
        yield
    finally:
        _open.step = outer
    _open.begun = weakref.ref(tf.compat.v1.get_default_graph()), begun


def current() -> Step | None:
    """Return the step that this thread traces or executes.

    A function that an eager step calls is traced once for all steps, so it is no part of one.
    """
    found: Step | None = getattr(_open, "step", None)
    return found if found is None or found.is_eager == tf.executing_eagerly() else None


def cond(when: tf.Tensor, does: Callable[[], tf.Tensor], other: tf.Tensor) -> tf.Tensor:
    """Return in a graph what ``does`` returns, with its notes, or ``other``."""
    found = current()

    def of(branch: Callable[[], tf.Tensor]) -> Callable[[], tuple[tf.Tensor, list[Any]]]:
        return lambda: (branch(), [] if found is None else found.part())

    result, notes = tf.cond(when, of(does), of(lambda: tf.identity(other)))
    if found is not None:
        found.whole(notes)
    return result


def describe() -> Description:
    """Open this rank's file if that is asked for, and return what all ranks must have alike."""
    global active
    active, alike = open_recorder(active, TensorFlowRecorder, rank(), size())
    return alike


def start(process_set: ProcessSet) -> None:
    """Take an optimizer or tape in, where a timeline is asked for; all its ranks do this."""
    if isinstance(active, TensorFlowRecorder):
        active.join(process_set)
