"""A Keras optimizer whose `apply` exchanges gradients with the other workers.

``model.fit``, custom training steps and ``apply_gradients`` of Keras 3 all end in ``apply``:

    apply(gradients)      accumulate, if asked for; then:
      exchange            this rank's gradients out, what is due in
      plain apply         Keras' own: unscale, clip, decay, update, average, constrain, count

The result is an instance of a subclass of the user's class, over the same attributes, so that
iterations and slots are there, and that is saved as the user's class.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import keras
import tensorflow as tf
from keras.src.saving import object_registration

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.tensorflow.agree import check_alike
from hvd_pipe.tensorflow.arguments import Arguments, shapes_of
from hvd_pipe.tensorflow.checkpoint import InFlight
from hvd_pipe.tensorflow.graphs import (
    Arrays,
    all_finite,
    identity,
    raw,
    refuse_old_graphs,
    refuse_xla,
    restore,
    variable,
)
from hvd_pipe.tensorflow.keras.variables import momenta_of, slots_of, statistics_of
from hvd_pipe.tensorflow.measuring import timeline
from hvd_pipe.tensorflow.session import Session
from hvd_pipe.tensorflow.sessions import Sessions
from hvd_pipe.tensorflow.strategies.base import Gradients, Peek

__all__ = ["DistributedMixin", "distribute"]


@dataclass(frozen=True)
class _Window:
    """The passes that make one gradient, so far.

    Args:
        passes: How many there were, of all windows.
        sums: Of their gradients, by variable.
        named: What a state holds of it.
    """

    passes: tf.Variable
    sums: Sequence[tf.Variable]
    named: dict[str, tf.Variable]

    def load(self, number: int, state: Arrays) -> bool:
        """Go on from the part of a state that is this window's; return whether there is one."""
        prefix = f"{number}."
        mine = {
            name.removeprefix(prefix): array
            for name, array in state.items()
            if name.startswith(prefix)
        }
        if mine:
            restore(self.named, mine)
        return bool(mine)


class DistributedMixin(keras.optimizers.Optimizer):  # type: ignore[misc]
    """What the user's class gains."""

    _hvd_pipe: Sessions
    _hvd_pipe_local: set[int]
    _hvd_pipe_kept: set[int]
    _hvd_pipe_steps: int | None
    _hvd_pipe_windows: dict[int, _Window]
    _hvd_pipe_resumed: Arrays
    _hvd_pipe_plain: Any
    """The user's class."""
    _hvd_pipe_arguments: Arguments

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """As Keras', distributed with the same arguments; all ranks must come here.

        Groups that are lists of variables are left out: they are of another model.
        """
        plain = cls._hvd_pipe_plain.from_config(*args, **kwargs)
        return distribute(plain, cls._hvd_pipe_arguments)

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """As Keras' ``apply``, with the gradients that are due instead of this rank's alone."""
        self._hvd_pipe_apply(grads, trainable_variables, None)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _hvd_pipe_apply(self, grads: Sequence[Any], variables: Any, scaler: Any) -> None:
        """Apply gradients; ``scaler`` is the LossScaleOptimizer that has unscaled them, if any."""
        if len(grads) == 0:
            return
        refuse_old_graphs()
        refuse_xla()
        variables = self._hvd_pipe_variables(variables)
        gradients = list(grads)
        find = functools.partial(momenta_of, self)
        session = self._hvd_pipe.of(variables, gradients, self._hvd_pipe_local, find)
        with timeline.step() as step:
            if step is not None:
                step.gradients(gradients)
            self._hvd_pipe_pass(session, variables, gradients, scaler)

    def _hvd_pipe_pass(
        self, session: Session, variables: list[Any], gradients: list[Any], scaler: Any
    ) -> None:
        """Accumulate the gradients of a pass, if asked for, and step where they are complete."""
        steps, share = self._hvd_pipe_passes()
        if steps == 1:
            self._hvd_pipe_step(session, gradients, scaler)
            return
        window = self._hvd_pipe_window(session, variables)
        sums = window.sums
        # What has no gradient keeps none, and neither its sum.
        pairs = [
            None if gradient is None else (tf.convert_to_tensor(gradient), total)
            for gradient, total in zip(gradients, sums, strict=True)
        ]

        def last() -> None:
            totals = [None if pair is None else (pair[0] + pair[1]) * share for pair in pairs]
            for each in sums:
                each.assign(tf.zeros(each.shape, each.dtype))
            with self._hvd_pipe_plainly():
                self._hvd_pipe_step(session, totals, scaler)

        def another() -> None:
            for gradient, total in filter(None, pairs):
                total.assign_add(gradient)
            self._iterations.assign_add(1)

        count = window.passes.assign_add(1)
        tf.cond(tf.equal(count % steps, 0), _run(last), _run(another))

    def _hvd_pipe_step(self, session: Session, gradients: list[Any], scaler: Any) -> None:
        """Exchange, and update where that is due."""
        engine = session.engine
        due = engine.exchange(session.outgoing(gradients))
        incoming = session.incoming(due.gradients, gradients)

        def update(found: Sequence[Any], apply: Callable[[Any, Any], None]) -> None:
            def plain() -> None:
                apply(found, session.variables)

            if scaler is None:
                plain()
            else:
                _update_if_finite(session, scaler, found, plain)

        def whole() -> None:
            update(incoming, super(DistributedMixin, self).apply)

        engine.before_update()
        if due.when is None or not session.sends:
            whole()
        elif not session.has_local:
            tf.cond(due.when, _run(whole), tf.no_op)
        else:  # what does not travel is due at once; ranks that have none of it vote
            own = session.own(incoming)
            tf.cond(due.when, _run(whole), _run(lambda: update(own, self._hvd_pipe_apply_own)))
        step = timeline.current()
        changed = [raw(each) for each in session.variables]
        with nullcontext() if step is None else step.end(changed, due.when):
            engine.after_step(
                Peek([raw(each) for each in self.variables], self._hvd_pipe_update_of(session))
            )
        engine.compare_replicas(due.gradients)

    def _hvd_pipe_update_of(self, session: Session) -> Callable[[Gradients], None]:
        def update(gradients: Gradients) -> None:
            incoming = session.incoming(gradients, [None] * len(session.variables))
            self._hvd_pipe_apply_there(incoming, session.variables)

        return update

    def _hvd_pipe_apply_there(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """As Keras' ``apply``, where some gradients may be due at another time."""
        pairs = [pair for pair in zip(gradients, variables, strict=True) if pair[0] is not None]
        super().apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs])

    def _hvd_pipe_apply_own(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Apply what does not travel, alone, and leave alone what belongs to all variables.

        Counters and moving averages stay, as others have no such gradients. So the first two
        updates of such a variable have one number.
        """
        slots = {id(each) for each in slots_of(self, self._trainable_variables)}
        every = [raw(each) for each in self.variables if id(each) not in slots]
        counters = [each for each in every if each.shape.rank == 0]
        before = [each.read_value() for each in counters]
        averages, self.use_ema = self.use_ema, False  # type: ignore[has-type]
        try:
            self._hvd_pipe_apply_there(gradients, variables)
        finally:
            self.use_ema = averages
        for each, value in zip(counters, before, strict=True):
            each.assign(value)

    def synchronize(self) -> None:
        """Finish what is in flight, on all ranks: at the end, before evaluating, before saving.

        Pipe-SGD applies its last gradient. CoCoD makes the replicas equal, and the statistics of
        BatchNormalization. ``model.fit`` calls this at its end.
        """
        refuse_old_graphs()
        for session in self._hvd_pipe:
            plain = self._hvd_pipe_update_of(session)

            def update(due: Gradients, plain: Callable[[Gradients], None] = plain) -> None:
                if not all_finite(due.values()):
                    return  # an overflow of loss scaling: on all ranks alike
                with self._hvd_pipe_plainly():
                    plain(due)

            with timeline.step():
                session.engine.drain(update)
            session.warn_of_unlike_replicas()
            if self.use_ema:
                means = self._model_variables_moving_average
                pairs = zip(self._trainable_variables, means, strict=True)
                local = self._hvd_pipe_local
                session.engine.equalise(
                    [mean for each, mean in pairs if identity(each) not in local]
                )
        self._hvd_pipe_equalise_statistics()

    def _hvd_pipe_equalise_statistics(self) -> None:
        """Average what local steps leave unequal beside the weights.

        Raises:
            RanksDisagreeError: Ranks have trained models with other statistics.
        """
        local = [session for session in self._hvd_pipe if session.engine.is_local]
        process_set = self._hvd_pipe.arguments.process_set
        if not local or not process_set.included():
            return
        trained = {identity(each) for session in local for each in session.variables}
        statistics = statistics_of(trained, self._hvd_pipe_local | self._hvd_pipe_kept)
        shapes = shapes_of(statistics)
        lines = [
            (f"the statistics {name}", f"{dtype.name}{shape}")
            for name, dtype, shape in zip(shapes.names, shapes.dtypes, shapes.shapes, strict=True)
        ]
        check_alike(lines, f"{self._hvd_pipe.tag}.statistics", process_set)
        local[0].engine.equalise(statistics)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Called by ``model.fit`` at its end: as Keras', after `synchronize`."""
        self.synchronize()
        super().finalize_variable_values(var_list)

    def register_local_var(self, var: Any) -> None:
        """Keep a variable's gradients on this worker, as Horovod's.

        Raises:
            HvdPipeError: Training has begun.
        """
        if list(self._hvd_pipe):
            raise HvdPipeError("register_local_var() after training has begun: call it before.")
        self._hvd_pipe_local.add(identity(var))

    def _hvd_pipe_local_slots(self) -> list[Any]:
        """Return this optimizer's variables for those that are local."""
        here, every = self._hvd_pipe_local, self._trainable_variables
        return slots_of(self, [each for each in every if identity(each) in here])

    @property
    def plan(self) -> Any:
        """The `hvd_pipe.Plan` in use under merged-gradient; None before training, and else."""
        plans = [getattr(session.engine, "plan", None) for session in self._hvd_pipe]
        return plans[0] if plans else None

    # Within.

    @property
    def iterations(self) -> Any:
        """As Keras', also while an accumulated gradient is applied."""
        steps = self._hvd_pipe_steps
        if steps is None:
            return super().iterations
        return keras.ops.floor_divide(self._iterations, steps)

    @property
    def variables(self) -> Any:
        """As Keras'; calling it, as Keras 2 and what Horovod has for that do, says what to do."""
        return _Variables(super().variables)

    def _hvd_pipe_variables(self, variables: Any) -> list[Any]:
        if variables is None:
            if not self.built:
                raise ValueError(
                    "apply() without variables: call optimizer.build(trainable_variables) first."
                )
            return list(self._trainable_variables)
        variables = list(variables)
        if not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(variables)
        self._check_variables_are_known(variables)
        return list(variables)

    def _hvd_pipe_window(self, session: Session, variables: Sequence[Any]) -> _Window:
        """Return what sums up the gradients of a session's passes."""
        number = list(self._hvd_pipe).index(session)
        if number not in self._hvd_pipe_windows:
            passes = variable([], tf.int64, f"hvd_pipe.passes.{number}")
            if self.gradient_accumulation_steps:  # Keras keeps the sums, files have them
                kept = self._accumulated_gradients
                sums = [raw(kept[self._get_variable_index(each)]) for each in variables]
                with tf.init_scope():
                    done = int(self._iterations.numpy()) % self.gradient_accumulation_steps
                    passes.assign(done)
                window = _Window(passes, sums, {"passes": passes})
            else:
                sums = [
                    variable(each.shape, each.dtype, f"hvd_pipe.sum.{number}.{i}")
                    for i, each in enumerate(variables)
                ]
                named = {f"sum.{i}": each for i, each in enumerate(sums)}
                window = _Window(passes, sums, {"passes": passes, **named})
            with tf.init_scope():
                window.load(number, self._hvd_pipe_resumed)
            self._hvd_pipe_windows[number] = window
        return self._hvd_pipe_windows[number]

    def _hvd_pipe_passes(self) -> tuple[int, float]:
        """Return how many passes make a gradient, and what their sum is multiplied by."""
        steps = self.gradient_accumulation_steps
        if steps:
            return int(steps), 1.0 / steps
        arguments = self._hvd_pipe.arguments
        passes = arguments.backward_passes_per_step
        return passes, 1.0 / passes if arguments.average_aggregated_gradients else 1.0

    def _hvd_pipe_state(self) -> Arrays:
        """Return what accumulates here; `hvd_pipe.tensorflow.sessions` asks."""
        found = dict(self._hvd_pipe_resumed)
        for number, window in self._hvd_pipe_windows.items():
            found |= {f"{number}.{name}": each.numpy() for name, each in window.named.items()}
        return found

    def _hvd_pipe_load(self, state: Arrays) -> None:
        """Go on from a `_hvd_pipe_state`; {} holds nothing."""
        self._hvd_pipe_resumed = dict(state)
        for number, window in self._hvd_pipe_windows.items():
            if not window.load(number, state):
                restore(window.named, {})

    @contextmanager
    def _hvd_pipe_plainly(self) -> Iterator[None]:
        """Let Keras apply a gradient without accumulating it once more."""
        steps = self.gradient_accumulation_steps  # type: ignore[has-type]
        self._hvd_pipe_steps, self.gradient_accumulation_steps = steps, None
        try:
            yield
        finally:
            self._hvd_pipe_steps, self.gradient_accumulation_steps = None, steps


class _Variables(list[Any]):
    """An optimizer's variables."""

    def __call__(self) -> NoReturn:
        raise TypeError(
            "optimizer.variables() is of Keras 2: under Keras 3, write optimizer.variables. "
            "Horovod's KerasState, TensorFlowKerasState and BroadcastGlobalVariablesCallback call "
            "it: take those of hvd_pipe.tensorflow.keras.elastic, hvd_pipe.tensorflow.elastic and "
            "hvd_pipe.tensorflow.keras.callbacks."
        )


# The subclasses in use. They are few: one for each class and strategy.
_classes: weakref.WeakSet[Any] = weakref.WeakSet()


def distribute(optimizer: Any, arguments: Arguments) -> Any:
    """Make the distributed twin; it shares the optimizer's attributes, so nothing is lost.

    Raises:
        TypeError, ValueError: What cannot be, on any rank.
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise TypeError(
            f"tf.compat.v1.train.{type(optimizer).__name__} belongs to TensorFlow 1's graphs and "
            "sessions: use horovod.tensorflow.DistributedOptimizer there, which has no "
            "strategies, or a keras.optimizers.Optimizer here."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"optimizer must be a keras.optimizers.Optimizer of Keras 3, got "
            f"{type(optimizer).__module__}.{type(optimizer).__name__}. (With TF_USE_LEGACY_KERAS "
            "set, tf.keras is Keras 2: unset it.)"
        )
    if isinstance(optimizer, DistributedMixin):
        raise ValueError("this optimizer is distributed already: wrap it once.")
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        raise ValueError(
            "wrap the optimizer inside of LossScaleOptimizer: keras.optimizers.LossScaleOptimizer("
            "hvd.DistributedOptimizer(optimizer)). Keras does that by itself under mixed_float16."
        )
    sessions = Sessions(arguments)
    plain: Any = type(optimizer)
    # Groups are of this optimizer's variables, which a class would keep, and a copy does not have.
    groups = None if isinstance(arguments.groups, list) else arguments.groups
    cls = _distributed_class(plain, dataclasses.replace(arguments, groups=groups))
    wrapped = cls.__new__(cls)
    object.__setattr__(wrapped, "__dict__", optimizer.__dict__)  # past Keras' tracking
    fields = {
        "_hvd_pipe": sessions,
        "_hvd_pipe_local": set(),
        "_hvd_pipe_kept": set(),
        "_hvd_pipe_steps": None,
        "_hvd_pipe_windows": {},
        "_hvd_pipe_resumed": {},
    }
    wrapped.__dict__.update(fields)  # not tracked: files are as of a plain optimizer
    sessions.own(wrapped)
    wrapped.hvd_pipe = InFlight(sessions)  # tf.train.Checkpoint finds it
    return wrapped


def _distributed_class(cls: Any, arguments: Arguments) -> Any:
    """Return the subclass, under the names by which Keras saves and finds the user's class."""
    for known in _classes:
        if known._hvd_pipe_plain is cls and known._hvd_pipe_arguments == arguments:
            return known
    members = {
        "__doc__": cls.__doc__,
        "_hvd_pipe_plain": cls,
        "_hvd_pipe_arguments": arguments,
    }
    made = type(cls.__name__, (DistributedMixin, cls), members)
    public = getattr(keras.optimizers, cls.__name__, None) is cls
    made.__module__ = "keras.optimizers" if public else cls.__module__
    made.__qualname__ = cls.__qualname__
    registered = object_registration.GLOBAL_CUSTOM_NAMES
    if cls in registered:
        registered[made] = registered[cls]
    _classes.add(made)
    return made


def _run(what: Callable[[], None]) -> Callable[[], Any]:
    """Return what ``tf.cond`` wants: a function that returns an operation."""

    def branch() -> Any:
        what()
        return tf.no_op()

    return branch


def _update_if_finite(
    session: Session, scaler: Any, gradients: Sequence[Any], update: Callable[[], None]
) -> None:
    """As Keras' LossScaleOptimizer, alike on all ranks."""
    finite = session.finite_everywhere(scaler.check_finite(gradients))

    def and_grow() -> None:
        update()
        full = keras.ops.equal(scaler.step_counter, scaler.dynamic_growth_steps - 1)

        def grow() -> None:
            scaler.step_counter.assign(0)
            scaler.dynamic_scale.assign(scaler.dynamic_scale * 2.0)

        def count() -> None:
            scaler.step_counter.assign_add(1)

        tf.cond(full, _run(grow), _run(count))

    def shrink() -> None:
        scaler.step_counter.assign(0)
        scaler.dynamic_scale.assign(scaler.dynamic_scale * 0.5)

    tf.cond(finite, _run(and_grow), _run(shrink))
