"""Updates that a step leaves to the next one, made by the user's optimizer, under ``fit``.

See `hvd_pipe.tensorflow.strategies.forward_overlap`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.tensorflow import pending
from hvd_pipe.tensorflow.agree import check_alike, refused
from hvd_pipe.tensorflow.graphs import raw
from hvd_pipe.tensorflow.keras.accumulation import slots_of
from hvd_pipe.tensorflow.strategies.base import Engine
from hvd_pipe.tensorflow.strategies.forward_overlap import ForwardOverlapEngine, Update

_log = logging.getLogger("hvd_pipe")


def _engines(optimizer: Any) -> list[tuple[ForwardOverlapEngine, Update]]:
    """Return the engines that may leave updates to the next step, with functions for these."""
    return [
        (session.engine, optimizer._hvd_pipe_update_of(session))
        for session in optimizer._hvd_pipe
        if isinstance(session.engine, ForwardOverlapEngine)
    ]


def begin_step(optimizer: Any) -> None:
    """Before the forward pass of a step, in its graph: make the updates that are late."""
    for engine, update in _engines(optimizer):
        engine.begin_step(update)


def end_step(optimizer: Any) -> None:
    """Check, at the end of a step's graph, that its updates can be left to the next step."""
    for engine, _ in _engines(optimizer):
        if engine.end_step():
            optimizer._hvd_pipe.is_stale = True
        obstacle = engine.problem()
        if engine.defers and obstacle is not None:
            engine.may_defer = False
            if optimizer._hvd_pipe.arguments.process_set.rank() == 0:
                _log.warning("overlap='forward': updates stay in their step, as %s", obstacle)
            raise CannotDeferError(obstacle)
        if engine.defers:
            slots = slots_of(optimizer, optimizer._trainable_variables)
            variables = [*engine.settings.variables, *map(raw, slots)]
            pending.watch(variables, optimizer._hvd_pipe)


class CannotDeferError(HvdPipeError):
    """A step that leaves updates to the next one cannot, as its trace has shown."""


def finish_step(optimizer: Any) -> None:
    """Make the updates that are late, on all ranks, between two steps."""
    with pending.settling(optimizer._hvd_pipe) as was_due:
        if was_due and not list(optimizer._hvd_pipe):
            raise HvdPipeError(
                "this variable lacks its last update: under overlap='forward', hvd.shutdown() "
                "came before all ranks had made it. Call optimizer.synchronize() on all ranks "
                "before hvd.shutdown()."
            )
        for engine, update in _engines(optimizer):
            engine.drain(update)


def meet(optimizer: Any) -> None:
    """Raise where one rank alone has loaded a checkpoint that has updates in flight."""
    for engine, _ in _engines(optimizer):
        engine.meet()


def interrupt_step(optimizer: Any) -> None:
    """As `finish_step`, where that comes between any two steps for a while."""
    if any(session.engine.is_ahead() for session in optimizer._hvd_pipe):
        finish_step(optimizer)
        if optimizer._hvd_pipe.watcher is not None:
            optimizer._hvd_pipe.watcher.delay()


def finish_before_apply(optimizer: Any, engine: ForwardOverlapEngine) -> None:
    """As `finish_step` and `finish_loaded`, with the gradients at hand."""
    if tf.executing_eagerly() and engine.held:
        raise HvdPipeError(
            "these gradients were computed before updates that the checkpoint holds: call "
            "optimizer.synchronize() on all ranks and compute them again; or put the step into a "
            "tf.function; or call optimizer.synchronize() on all ranks before saving."
        )
    if tf.executing_eagerly():
        pending.settle()
    finish_loaded(optimizer)


def finish_loaded(optimizer: Any) -> None:
    """Make the updates that a checkpoint has brought, on all ranks; also within a trace."""
    for engine, update in _engines(optimizer):
        if engine.held or engine.was_loaded:
            with tf.init_scope():  # now, not in the graph that is being traced
                engine.drain(update)


@dataclass(frozen=True)
class WatchedStep:
    """A model's function of a step; it leaves nothing where no call of ``fit`` watches."""

    step: Callable[[Any], Any]
    """Keras' function."""
    optimizers: Callable[[], list[Any]]
    """Returns those of the model."""

    def __call__(self, iterator: Any) -> Any:
        for optimizer in self.optimizers():
            finish_loaded(optimizer)  # somebody may have read a checkpoint
            with pending.settling(optimizer._hvd_pipe):
                pass  # the step does
        try:
            with refused():
                logs = self.step(iterator)
        except CannotDeferError:  # in a trace, which is alike on all ranks
            for optimizer in self.optimizers():
                finish_step(optimizer)
                optimizer._hvd_pipe.is_stale = True
            return self(iterator)
        finally:  # also where data has run out
            for optimizer in self.optimizers():
                if any(session.engine.defers for session in optimizer._hvd_pipe):
                    pending.due[id(optimizer._hvd_pipe)] = partial(finish_step, optimizer)
        for optimizer in self.optimizers():
            watcher = optimizer._hvd_pipe.watcher
            if watcher is None or not watcher.is_driven:
                finish_step(optimizer)
        return logs


def retrace_train_step(model: Any, optimizers: Callable[[], list[Any]]) -> None:
    """Have ``fit`` trace its next step anew, which begins with the updates that are late."""
    attributes, plain = model.__dict__, model.train_step
    saved = {"train_step": attributes["train_step"]} if "train_step" in attributes else {}

    def train_step(*arguments: Any, **keywords: Any) -> Any:
        for optimizer in optimizers():
            begin_step(optimizer)
        logs = plain(*arguments, **keywords)
        for optimizer in optimizers():
            end_step(optimizer)
        return logs

    attributes["train_step"] = train_step  # past Keras' tracking, for this call alone
    try:
        model.make_train_function(force=True)
    finally:
        del attributes["train_step"]
        attributes.update(saved)
    model.train_function = WatchedStep(model.train_function, optimizers)


def check_eagerness(model: Any, optimizers: list[Any]) -> None:
    """Refuse steps that are graphs on some ranks alone: their messages do not meet."""
    lines = [("run_eagerly (compile the model alike on all)", str(model.run_eagerly))]
    for optimizer in optimizers:
        process_set = optimizer._hvd_pipe.arguments.process_set
        if process_set.included():
            check_alike(lines, f"{optimizer._hvd_pipe.tag}.eager", process_set)
            meet(optimizer)


_METHODS = (
    "apply",
    "_apply_weight_decay",
    "_backend_apply_gradients",
    "_backend_update_step",
    "_clip_gradients",
)
"""Methods of Keras that treat each gradient by itself, if they are its own."""


def problem(model: Any, optimizer: Any) -> str | None:
    """Return why updates cannot be made layer by layer; None where they can."""
    if model.run_eagerly:
        return "the model runs eagerly, in which messages travel one by one"
    if optimizer.global_clipnorm:
        return "global_clipnorm needs all gradients at once"
    if optimizer.use_ema:
        return "use_ema averages all weights after each step"
    if optimizer._hvd_pipe_is_scaled:
        return "a LossScaleOptimizer decides by all gradients"
    if optimizer._hvd_pipe_accumulation.passes != 1:
        return "gradients of several passes are summed up"
    own = optimizer._hvd_pipe_plain
    for name in _METHODS:
        if getattr(own, name) is not getattr(keras.optimizers.SGD, name):
            return f"{own.__name__}.{name}() is its own, and may need all gradients at once"
    known = [optimizer._iterations, optimizer._learning_rate]
    known += slots_of(optimizer, optimizer._trainable_variables)
    indices = set(map(id, known))
    others = [variable.name for variable in optimizer.variables if id(variable) not in indices]
    return f"{own.__name__} has {others[0]!r}, a state of all variables" if others else None


@contextmanager
def step_before(optimizer: Any, engine: Engine) -> Iterator[None]:
    """Have `apply` update as in the step before, which has been counted, if updates are late."""
    if not isinstance(engine, ForwardOverlapEngine):
        yield
        return
    iterations, rate = (noted.read_value() for noted in engine.noted.values())
    attributes = {name: optimizer.__dict__[name] for name in ("_iterations", "_learning_rate")}
    rate = tf.cast(rate, keras.ops.convert_to_tensor(optimizer.learning_rate).dtype)
    past = Past(tf.cast(iterations, attributes["_iterations"].dtype))
    optimizer.__dict__.update(_iterations=past, _learning_rate=lambda: rate)
    try:
        yield
    finally:
        optimizer.__dict__.update(attributes)


@dataclass(frozen=True)
class Past:
    """In place of the counter of iterations: what it was in the step before."""

    value: tf.Tensor

    def assign_add(self, count: int) -> None:
        """Count nothing: the step before has been counted."""
