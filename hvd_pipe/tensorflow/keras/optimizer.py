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
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import keras
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from keras.src.saving import object_registration

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.runtime.consensus import answer_with
from hvd_pipe.tensorflow import pending
from hvd_pipe.tensorflow.agree import check_alike
from hvd_pipe.tensorflow.arguments import Arguments, shapes_of
from hvd_pipe.tensorflow.checkpoint import InFlight
from hvd_pipe.tensorflow.graphs import all_finite, branch, check_graph, data_of_step, identity, raw
from hvd_pipe.tensorflow.keras import late_updates
from hvd_pipe.tensorflow.keras.accumulation import (
    Accumulation,
    momenta_of,
    slots_of,
    statistics_of,
)
from hvd_pipe.tensorflow.keras_patches import build, note_distributed
from hvd_pipe.tensorflow.measuring import timeline
from hvd_pipe.tensorflow.sessions import Session, Sessions
from hvd_pipe.tensorflow.strategies.base import Gradients, OptimizerAccess
from hvd_pipe.tensorflow.strategies.forward_overlap import ForwardOverlapEngine

Update = Callable[[Sequence[Any], Sequence[Any]], None]
"""Applies gradients to variables."""


class DistributedMixin(keras.optimizers.Optimizer):  # type: ignore[misc]
    """What the user's class gains."""

    _hvd_pipe: Sessions
    _hvd_pipe_local: set[int]
    _hvd_pipe_kept: set[int]
    _hvd_pipe_accumulation: Accumulation
    _hvd_pipe_is_scaled: bool
    """Whether a LossScaleOptimizer has unscaled gradients."""
    _hvd_pipe_plain: Any
    """The user's class."""
    _hvd_pipe_arguments: Arguments

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """As Keras', distributed with the same arguments; all ranks must call this.

        Groups that are lists of variables are left out: the variables are another model's.
        """
        plain = cls._hvd_pipe_plain.from_config(*args, **kwargs)
        return distribute(plain, cls._hvd_pipe_arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a distributed optimizer; Keras would make a plain one of it."""
        _, saved = super().__reduce__()
        return _revived, (self._hvd_pipe_plain, self._hvd_pipe_arguments, *saved)

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """As Keras' ``apply``, with the gradients that are due instead of this rank's alone."""
        self._hvd_pipe_apply(grads, trainable_variables, None)

    # Architecture: K1
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _hvd_pipe_apply(self, grads: Sequence[Any], variables: Any, scaler: Any) -> None:
        """Apply gradients; ``scaler`` is the LossScaleOptimizer that has unscaled them, if any."""
        if len(grads) == 0:
            return
        check_graph()
        if variables is None and not self.built:
            raise ValueError(
                "apply() without variables: call optimizer.build(trainable_variables) first."
            )
        variables = list(self._trainable_variables if variables is None else variables)
        if not self.built:
            build(self, variables)
        self._check_variables_are_known(variables)
        gradients = list(grads)
        session = self._hvd_pipe.of(
            (tuple(map(self._var_key, variables)), frozenset(self._hvd_pipe_local)),
            variables,
            gradients,
            self._hvd_pipe_local,
            functools.partial(momenta_of, self),
        )
        self._hvd_pipe_is_scaled |= scaler is not None
        if isinstance(session.engine, ForwardOverlapEngine):
            late_updates.finish_before_apply(self, session.engine)
        # Keras' own counts and decays without them
        with tf.control_dependencies(data_of_step()):
            passes = self._hvd_pipe.arguments.backward_passes_per_step
            if (self.gradient_accumulation_steps or passes) == 1:
                self._hvd_pipe_step(session, gradients, scaler)
            else:
                self._hvd_pipe_accumulation.add(
                    session,
                    variables,
                    gradients,
                    lambda sums: self._hvd_pipe_step(session, sums, scaler),
                )

    # Architecture: K4
    def _hvd_pipe_step(self, session: Session, gradients: list[Any], scaler: Any) -> None:
        """Exchange, and update where that is due."""
        engine = session.engine
        due = engine.exchange(session.outgoing(gradients))
        incoming, variables = session.incoming(due.gradients, gradients), session.variables
        update: Update = super().apply
        if due.note is not None:
            due.note(self._iterations, self.learning_rate)
            update = self._hvd_pipe_apply_some
        own: Update = self._hvd_pipe_apply_own
        if scaler is not None:
            update = functools.partial(_scaled, update, session, scaler)
            own = functools.partial(_scaled, own, session, scaler)
        with timeline.updating(due.when) if timeline.active.is_on else nullcontext():
            if due.when is None or not session.sends:
                update(incoming, variables)
            elif not session.has_local:
                tf.cond(due.when, branch(update, incoming, variables), tf.no_op)
            else:  # gradients of local variables do not travel, and are applied in every step
                whole = branch(update, incoming, variables)
                tf.cond(due.when, whole, branch(own, session.own(incoming), variables))
        if engine.replicas is not None:
            engine.compare_replicas(due.gradients)
        access: OptimizerAccess | None = None
        if engine.predicts:
            state = [raw(variable) for variable in self.variables]
            access = OptimizerAccess(state, self._hvd_pipe_update_of(session))
        engine.after_step(access)

    def _hvd_pipe_update_of(self, session: Session) -> Callable[[Gradients], None]:
        def update(gradients: Gradients) -> None:
            incoming = session.incoming(gradients, [None] * len(session.variables))
            with late_updates.step_before(self, session.engine):
                self._hvd_pipe_apply_some(incoming, session.variables)

        return update

    def _hvd_pipe_apply_some(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """As Keras' ``apply``, without the variables that have no gradient in this step."""
        pairs = [pair for pair in zip(gradients, variables, strict=True) if pair[0] is not None]
        super().apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs])

    def _hvd_pipe_apply_own(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Apply the gradients of local variables alone; counters and moving averages stay."""
        slots = {id(slot) for slot in slots_of(self, self._trainable_variables)}
        every = [raw(variable) for variable in self.variables if id(variable) not in slots]
        counters = [variable for variable in every if variable.shape.rank == 0]
        before = [counter.read_value() for counter in counters]
        averages, self.use_ema = self.use_ema, False  # type: ignore[has-type]
        try:
            self._hvd_pipe_apply_some(gradients, variables)
        finally:
            self.use_ema = averages
        for counter, value in zip(counters, before, strict=True):
            counter.assign(value)

    def synchronize(self) -> None:
        """Finish what is in flight; call it on all ranks before evaluating, saving or exit.

        Pipe-SGD applies its last gradient. CoCoD makes the replicas equal, and the statistics of
        BatchNormalization. ``model.fit`` calls this at its end.
        """
        check_graph()
        answer_with(mpi_ops)
        pending.settle()  # other ranks may have, by reading
        late_updates.meet(self)
        late_updates.finish_step(self)
        for session in self._hvd_pipe:
            plain = self._hvd_pipe_update_of(session)

            def update(due: Gradients, plain: Callable[[Gradients], None] = plain) -> None:
                if not all_finite(due.values()):
                    return  # an overflow of loss scaling: on all ranks alike
                with self._hvd_pipe_accumulation.suspended():
                    plain(due)

            session.engine.drain(update)
            session.warn_of_unlike_replicas()
            if self.use_ema:
                means = self._model_variables_moving_average
                pairs = zip(self._trainable_variables, means, strict=True)
                local = self._hvd_pipe_local
                session.engine.equalise(
                    [mean for variable, mean in pairs if identity(variable) not in local]
                )
        self._hvd_pipe_equalise_statistics()

    def _hvd_pipe_equalise_statistics(self) -> None:
        """Average what local steps leave unequal beside the weights."""
        local = [session for session in self._hvd_pipe if session.engine.is_local]
        process_set = self._hvd_pipe.arguments.process_set
        if not local or not process_set.included():
            return
        trained = {identity(variable) for session in local for variable in session.variables}
        statistics = statistics_of(trained, self._hvd_pipe_local | self._hvd_pipe_kept)
        shapes = shapes_of(statistics)
        lines = [
            (f"the statistics {name}", f"{shapes.dtypes[i].name}{shapes.shapes[i]}")
            for i, name in enumerate(shapes.names)
        ]
        check_alike(lines, f"{self._hvd_pipe.tag}.statistics", process_set)
        local[0].engine.equalise(statistics)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Called by ``model.fit`` at its end: as Keras', after `synchronize`."""
        self.synchronize()
        self._hvd_pipe.fit_ended = True
        super().finalize_variable_values(var_list)

    def register_local_var(self, var: Any) -> None:
        """Do not average a variable's gradients over the workers; as Horovod's method.

        Raises:
            HvdPipeError: Training has begun.
        """
        if list(self._hvd_pipe):
            raise HvdPipeError("register_local_var() after training has begun: call it before.")
        self._hvd_pipe_local.add(identity(var))

    def _hvd_pipe_local_slots(self) -> list[Any]:
        """Return this optimizer's variables for those that are local."""
        here, every = self._hvd_pipe_local, self._trainable_variables
        return slots_of(self, [variable for variable in every if identity(variable) in here])

    @property
    def plan(self) -> Any:
        """The `hvd_pipe.Plan` in use; None before training, and under other strategies."""
        plans = [getattr(session.engine, "plan", None) for session in self._hvd_pipe]
        return plans[0] if plans else None

    # Within.

    @property
    def iterations(self) -> Any:
        """As Keras', also while an accumulated gradient is applied."""
        steps = self._hvd_pipe_accumulation.applying
        if steps is None:
            counter = super().iterations
            return counter.value if isinstance(counter, late_updates.Past) else counter
        return keras.ops.floor_divide(self._iterations, steps)

    @property
    def variables(self) -> Any:
        """As Keras'; calling it, as code for Keras 2 does, raises with what to write."""
        return _Variables(super().variables)


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
    """Make the distributed twin; it shares the optimizer's attributes, so nothing is lost."""
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
    note_distributed()
    sessions = Sessions(arguments)
    plain: Any = type(optimizer)
    # Groups are of this optimizer's variables, which a class would keep, and a copy does not have.
    groups = None if isinstance(arguments.groups, list) else arguments.groups
    cls = _distributed_class(plain, dataclasses.replace(arguments, groups=groups))
    wrapped = cls.__new__(cls)
    object.__setattr__(wrapped, "__dict__", optimizer.__dict__)  # past Keras' tracking
    wrapped.__dict__.update(  # not tracked: files are as of a plain optimizer
        _hvd_pipe=sessions,
        _hvd_pipe_local=set(),
        _hvd_pipe_kept=set(),
        _hvd_pipe_accumulation=Accumulation(wrapped, arguments),
        _hvd_pipe_is_scaled=False,
    )
    sessions.owner = weakref.ref(wrapped._hvd_pipe_accumulation)
    wrapped.hvd_pipe = InFlight(sessions)  # tf.train.Checkpoint finds it
    return wrapped


def _revived(plain: Any, arguments: Arguments, saved: Any) -> Any:
    if arguments.process_set.process_set_id == 0:  # of a pickle, a copy of that
        arguments = dataclasses.replace(arguments, process_set=mpi_ops.global_process_set)
    return distribute(plain._unpickle_model(saved), arguments)


def _distributed_class(cls: Any, arguments: Arguments) -> Any:
    """Return the subclass, under the names by which Keras saves and finds the user's class."""
    for known in _classes:
        if known._hvd_pipe_plain is cls and known._hvd_pipe_arguments == arguments:
            return known
    own = {"_hvd_pipe_plain": cls, "_hvd_pipe_arguments": arguments}
    members = {"__doc__": cls.__doc__, **own}
    distributed = type(cls.__name__, (DistributedMixin, cls), members)
    public = getattr(keras.optimizers, cls.__name__, None) is cls
    distributed.__module__ = "keras.optimizers" if public else cls.__module__
    distributed.__qualname__ = cls.__qualname__
    registered = object_registration.GLOBAL_CUSTOM_NAMES
    if cls in registered:
        registered[distributed] = registered[cls]
    _classes.add(distributed)
    return distributed


def _scaled(
    apply: Update, session: Session, scaler: Any, gradients: Sequence[Any], variables: Any
) -> None:
    """Apply gradients as Keras' LossScaleOptimizer does, but alike on all ranks."""
    finite = session.finite_everywhere(scaler.check_finite(gradients))

    def count(steps: Any, factor: float) -> None:
        scaler.step_counter.assign(steps)
        scaler.dynamic_scale.assign(scaler.dynamic_scale * factor)

    def and_grow() -> None:
        apply(gradients, variables)
        steps = scaler.step_counter + 1
        full = keras.ops.equal(steps, scaler.dynamic_growth_steps)
        tf.cond(full, branch(count, 0, 2.0), branch(count, steps, 1.0))

    tf.cond(finite, branch(and_grow), branch(count, 0, 0.5))
