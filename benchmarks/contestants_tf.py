"""TensorFlow's contestants of the throughput benchmark; their names begin with ``tf:``.

tf:single            one worker by itself: no communication
tf:horovod           stock Horovod's DistributedGradientTape
tf:pipe-sgd+int8 ... hvd_pipe.tensorflow: a strategy's spelling, and a compression
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as stock
import keras
import tensorflow as tf
from contestants import TENSORFLOW
from emulated_tf import EmulatedModel

import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.tensorflow.strategies.replan import Replan

LR = 1e-3
CODECS = {
    "": hvd.Compression.none,
    "bf16": hvd.Compression.bf16,
    "int8": hvd.Compression.int8,
}


class Contestant:
    """One training: a step of it, and its orderly end."""

    def __init__(self, name: str, model: EmulatedModel) -> None:
        kind, _, compression = name.removeprefix(TENSORFLOW).partition("+")
        self._optimizer: Any = keras.optimizers.SGD(LR)
        self._replan: Replan | None = None
        if kind not in ("single", "horovod"):
            self._optimizer = hvd.DistributedOptimizer(
                self._optimizer, compression=CODECS[compression], strategy=kind
            )
            self._replan = Replan(self._optimizer._hvd_pipe)
        self._optimizer.build(model.variables)
        self._number = tf.Variable(0.0)

        def step(x: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = model.loss(x)
            if kind == "horovod":
                tape = stock.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, model.variables)
            self._optimizer.apply(gradients, model.variables)

        self._traced = tf.function(step)
        self._plain = step

    def step(self) -> None:
        """Take one step and wait for it; plan as the callback does under ``fit``."""
        self._traced(self._number)
        if self._replan is not None and self._replan.after_step():
            self._traced = tf.function(self._plain)

    def finish(self) -> None:
        """Leave nothing in flight."""
        if hasattr(self._optimizer, "synchronize"):
            self._optimizer.synchronize()


def start(ours: bool) -> tuple[int, Callable[[], None]]:
    """Initialise Horovod; return this rank, and a barrier."""
    tf.config.threading.set_inter_op_parallelism_threads(4)  # layers that wait take one
    tf.config.threading.set_intra_op_parallelism_threads(1)
    (hvd if ours else stock).init()

    @tf.function
    def meet(x: tf.Tensor) -> tf.Tensor:
        return stock.allreduce(x, name="barrier", op=stock.Sum)

    def barrier() -> None:
        meet(tf.zeros([]))

    return int(stock.rank()), barrier


def build(
    name: str, profile: ModelProfile, compute_s: float, gradient_bytes: int
) -> tuple[Contestant, int]:
    """Return a contestant on an emulated accelerator, and the bytes of its gradients."""
    model = EmulatedModel(profile, compute_s, gradient_bytes)
    return make(name, model), model.nbytes


def make(name: str, model: EmulatedModel) -> Contestant:
    """Return a contestant that trains ``model``; Horovod must have been initialised."""
    _, _, compression = name.partition("+")
    if not name.startswith(TENSORFLOW) or compression not in CODECS:
        raise ValueError(f"{name}: not {TENSORFLOW} and single, horovod, or a strategy[+codec]")
    return Contestant(name, model)
