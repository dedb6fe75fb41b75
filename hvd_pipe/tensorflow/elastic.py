"""``hvd.elastic``: Horovod's elastic training, with something in flight, under Keras 3.

Scripts are written as for Horovod: `run` decorates the training function, a state holds what all
workers share, and ``state.commit()`` saves it now and then. Messages in flight::

    hosts come or go     the old workers average what is in flight, and the new ones go on with it
    a worker fails       the workers that are left drop what was sent since the last commit, load
                         that commit, and all go on from rank 0's state

Either way graphs are traced anew, and every optimizer and tape gets a new engine, on the new
workers; all ranks drop the residuals of error feedback.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from horovod.common.elastic import ObjectState
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow.functions import broadcast_object
from horovod.tensorflow.mpi_ops import broadcast, rank

from hvd_pipe.runtime.restarts import elastic_run
from hvd_pipe.tensorflow import horovod_api, pending, workers
from hvd_pipe.tensorflow.graphs import raw
from hvd_pipe.tensorflow.horovod_api import broadcast_variables
from hvd_pipe.tensorflow.sessions import States, inherit, share

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]

_log = logging.getLogger("hvd_pipe")

_FAILURES = (tf.errors.UnknownError, tf.errors.AbortedError)
# Horovod's own words, the names of messages, and the library below, one of which an error has.
_WORDS = ("Horovod", "hvd_pipe.tf.", "hvd_pipe.broadcast", "gloo")


class TensorFlowState(ObjectState):  # type: ignore[misc]
    """The state that workers share: variables, messages in flight, and values of the user.

    Args:
        variables: Keras' or TensorFlow's variables, such as those of the model and the optimizer.
        session: Accepted for Horovod's sake: TensorFlow 2 has none.
        kwargs: The user's values, by name; they become attributes of the state.

    Raises:
        ValueError: There are no variables.

    Example::

        variables = [*model.trainable_variables, *optimizer.variables]
        state = hvd.elastic.TensorFlowState(variables, step=0)
    """

    def __init__(
        self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any
    ) -> None:
        if not variables:
            raise ValueError(
                "TensorFlow 2 keeps no list of all variables: pass variables=[*model.variables, "
                "*optimizer.variables], of a model and an optimizer that have been built."
            )
        self.variables, self.session = list(variables), session
        self._values: list[npt.NDArray[Any]] = []
        self._in_flight: dict[str, States] = {}
        self._keep()
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **kwargs)

    def save(self) -> None:
        """Copy everything to host memory, on all ranks; waits for what this rank has sent."""
        with _failures():
            self._keep()
        super().save()

    def restore(self) -> None:
        """Go back to the last commit; `run` calls this when a worker has failed."""
        for sessions in workers.running():
            sessions.go_back(self._in_flight.get(sessions.label))
        for variable, value in zip(self.variables, self._values, strict=True):
            raw(variable).assign(value)
        super().restore()
        _log.warning(
            "elastic: a worker has failed, back to the last commit; what was sent since then is "
            "dropped"
        )

    def sync(self) -> None:
        """Copy rank 0's state to all ranks; each keeps the state of its own random numbers."""
        with _failures():
            shared = [v for v in self.variables if v.name != "seed_generator_state"]
            broadcast_variables(shared, root_rank=0)
            inherit(_of_first(_in_flight()))
            self._keep()
            super().sync()

    def _keep(self) -> None:
        in_flight = _in_flight()  # first: where a message fails, the last commit stays whole
        self._values = [raw(variable).numpy() for variable in self.variables]
        self._in_flight = in_flight


class TensorFlowKerasState(TensorFlowState):
    """The state that workers share: a model, its optimizer, messages in flight, and user values.

    Args:
        model: A Keras model that has been built.
        optimizer: The model's optimizer, if the model is not compiled with it.
        backend: Accepted for Horovod's sake.
        kwargs: As `TensorFlowState`.

    Raises:
        ValueError: The model has not been built, or there is no optimizer.

    Example::

        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
        state = hvd.elastic.TensorFlowKerasState(model, batch=0, epoch=0)
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        if not model.built:
            raise ValueError("the model has no variables yet: call model.build(input_shape).")
        self.model, self.backend = model, backend
        compiled = getattr(model, "optimizer", None)
        self.optimizer = compiled if optimizer is None else optimizer
        if self.optimizer is None:
            raise ValueError(
                "there is no optimizer: compile the model with one before this, or pass optimizer="
            )
        if not self.optimizer.built:  # workers that come must have what the others have
            self.optimizer.build(model.trainable_variables)
        super().__init__([*model.variables, *self.optimizer.variables], **kwargs)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function ``func(state, ...)``: it starts anew when workers change.

    As Horovod's ``run``, with the same rule: no collectives between ``hvd.init()`` and the call.
    In an elastic job, optimizers and tapes send nothing before their first step, in which ranks
    compare their arguments.
    """
    return elastic_run(func, _finish, horovod_api, _failures)


def _finish(state: Any) -> None:
    with _failures():
        _finish_late()
        share()
    state.save()


def _finish_late() -> None:
    """Apply deferred updates, also those of a checkpoint: they are averages over all ranks."""
    for sessions in workers.running():
        if sessions.watcher is not None:
            sessions.watcher.finish()


@contextmanager
def _failures() -> Iterator[None]:
    """Say in Horovod's terms that a message has failed: TensorFlow has errors of its own."""
    try:
        yield
    except HorovodInternalError:
        _forget()
        raise
    except _FAILURES as error:
        if not any(word in str(error) for word in _WORDS):
            raise
        _forget()
        raise HorovodInternalError(str(error)) from error


def _forget() -> None:
    for sessions in workers.running():
        for session in sessions:
            session.engine.forget()


def _in_flight() -> dict[str, States]:
    pending.settle()  # applies deferred updates, which are averages over all ranks
    return {sessions.label: sessions.states() for sessions in workers.running()}


def _of_first(value: Any) -> Any:
    """Return rank 0's value on every rank; arrays of any size and dtype are fine."""
    data = pickle.dumps(value) if rank() == 0 else b""
    size = int(broadcast(tf.constant([len(data)], tf.int64), 0, "hvd_pipe.elastic.size")[0])
    mine = np.frombuffer(data, np.uint8) if rank() == 0 else np.zeros(size, np.uint8)
    sent = broadcast(tf.constant(mine), 0, "hvd_pipe.elastic.data")
    return value if rank() == 0 else pickle.loads(sent.numpy().tobytes())
