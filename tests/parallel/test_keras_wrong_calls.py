"""What users get wrong with Keras and TensorFlow is told with the rule and the way out."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from on_ranks import on_ranks
from refusals import OTHER_PLAN, id_of, refusals

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.errors import HvdPipeError


def optimizer(**options: Any) -> Any:
    return keras.optimizers.SGD(0.1, **options)


def small_model() -> Any:
    return keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])


def given(**arguments: Any) -> Callable[[], Any]:
    return lambda: hvd.DistributedOptimizer(optimizer(), **arguments)


def tape(**arguments: Any) -> Callable[[], Any]:
    return lambda: hvd_tf.DistributedGradientTape(tf.GradientTape(), **arguments)


BOTH = [tf.zeros((2, 1)), tf.zeros((1,))]
"""Gradients of a small model."""


def applied(*steps: list[Any], **arguments: Any) -> Callable[[], Any]:
    """Steps of a loop of one's own, with these gradients."""

    def call() -> None:
        model = small_model()
        distributed = hvd.DistributedOptimizer(optimizer(), **arguments)
        for gradients in steps:
            distributed.apply(gradients, model.trainable_variables)

    return call


def fitted(plain: Callable[[], Any], *callbacks: Any, **arguments: Any) -> Callable[[], Any]:
    def call() -> None:
        model = small_model()
        model.compile(hvd.DistributedOptimizer(plain(), **arguments), "mse")
        x = np.zeros((8, 2))
        model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=list(callbacks))

    return call


def in_an_old_graph(call: Callable[[], Any]) -> Callable[[], Any]:
    def inside() -> None:
        with tf.Graph().as_default():
            call()

    return inside


def late_local_variable() -> None:
    model, distributed = small_model(), given()()
    distributed.apply(BOTH, model.trainable_variables)
    distributed.register_local_var(model.trainable_variables[0])


def xla_step() -> None:
    weight, distributed = keras.Variable([1.0]), given()()
    step = tf.function(lambda: distributed.apply([tf.zeros(1)], [weight]), jit_compile=True)
    step()


def step_in_an_old_graph() -> None:
    weight, distributed = keras.Variable([1.0]), given()()
    in_an_old_graph(lambda: distributed.apply([tf.zeros(1)], [weight]))()


def gradient_in_an_old_graph() -> None:
    weight = tf.Variable([1.0])
    with tf.GradientTape() as recorded:
        loss = tf.reduce_sum(weight)
    distributed = hvd_tf.DistributedGradientTape(recorded)
    in_an_old_graph(lambda: distributed.gradient(loss, [weight]))()


def source_of_unknown_shape() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def step(source: Any) -> Any:
        with tf.GradientTape() as recorded:
            recorded.watch(source)
            loss = tf.reduce_sum(source)
        return hvd_tf.DistributedGradientTape(recorded).gradient(loss, [source])

    step(tf.zeros(3))


def load_without_optimizer() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.keras"
        small_model().save(file)
        hvd.load_model(file)


SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)

# What is wrong; the exception's class; a regular expression of its message, which has the rule and
# the way out; and a call that makes the mistake.
TABLE: list[tuple[str, type[Exception], str, Callable[[], Any]]] = [
    ("no optimizer", TypeError, "must be a keras.optimizers.Optimizer of Keras 3, got .*str",
     lambda: hvd.DistributedOptimizer("sgd")),
    ("an optimizer of TensorFlow 1", TypeError,
     r"v1.train.GradientDescentOptimizer .* use horovod.tensorflow.DistributedOptimizer",
     lambda: hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))),
    ("a hook", RuntimeError, "BroadcastGlobalVariablesCallback.* to model.fit",
     lambda: hvd_tf.BroadcastGlobalVariablesHook(0)),
    ("wrapped twice", ValueError, "distributed already: wrap it once",
     lambda: hvd.DistributedOptimizer(given()())),
    ("around LossScaleOptimizer", ValueError, "wrap the optimizer inside",
     lambda: hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer()))),
    ("auto without a callback", ValueError,
     r"pass callbacks=\[BroadcastGlobalVariablesCallback\(0\)\] of hvd_pipe.tensorflow.keras."
     "callbacks to fit; in a loop of your own, name the strategy",
     fitted(optimizer, strategy="auto")),
    ("auto in a loop of one's own", ValueError, "in a loop of your own, name the strategy",
     applied(BOTH, strategy="auto")),
    ("a tape under auto", ValueError, "use hvd.DistributedOptimizer under model.fit, or give",
     tape(strategy="auto")),
    ("auto has nothing to choose from", ValueError,
     "leaves nothing to choose from. With 'cocod': op=hvd.Sum",
     given(op=hvd.Sum, strategy="auto:allow=cocod")),
    ("a tape with prediction", ValueError, "prediction='local' needs the optimizer",
     tape(strategy="pipe-sgd:prediction=local")),
    ("op is Adasum", ValueError, "Adasum is not for Keras", given(op=hvd_tf.Adasum)),
    ("op of a tape is Adasum", ValueError, "use op=hvd.Average", tape(op=hvd_tf.Adasum)),
    ("nodes without process sets", HvdPipeError, r'call hvd.init\(process_sets="dynamic"\)',
     given(strategy="cocod:within=node")),
    ("more fragments than variables", ValueError, "so give at most 2 fragments",
     fitted(optimizer, strategy="cocod:period=3,fragments=3")),
    ("a codec in one call", TypeError, "cannot be used in a single Horovod call",
     lambda: hvd.allreduce(1.0, compression=hvd.Compression.int8)),
    ("passes twice", ValueError, "both sum up gradients: give one",
     lambda: hvd.DistributedOptimizer(
         optimizer(gradient_accumulation_steps=2), backward_passes_per_step=2)),
    ("device is a number", TypeError, "device_dense must be a device's name",
     given(device_dense=0)),
    ("groups of another model", ValueError, "must list variables that are trained here",
     applied(BOTH, groups=[[tf.Variable(1.0)]])),
    ("a plan of another model", ValueError, "names 'nobody/kernel', no gradient",
     applied(BOTH, strategy=OTHER_PLAN)),
    ("a local variable too late", HvdPipeError, "after training has begun: call it before",
     late_local_variable),
    ("a gradient that comes later", HvdPipeError, "had none on any rank",
     applied([BOTH[0], None], BOTH)),
    ("XLA around a step", ValueError, r"write model.compile\(..., jit_compile=False\)",
     xla_step),
    ("a tape of nothing", TypeError, "must be a tf.GradientTape, got list",
     lambda: hvd_tf.DistributedGradientTape([])),
    ("a tape wrapped twice", ValueError, "this tape is distributed already",
     lambda: hvd_tf.DistributedGradientTape(tape()())),
    ("a tape under cocod", ValueError, "CoCoD averages models, and a tape has gradients",
     tape(strategy="cocod")),
    ("all variables", RuntimeError, "call hvd.broadcast_variables",
     lambda: hvd.broadcast_global_variables(0)),
    ("an optimizer in a graph of TensorFlow 1", ValueError, "the step into a @tf.function",
     in_an_old_graph(given())),
    ("a tape in a graph of TensorFlow 1", ValueError, "the step into a @tf.function",
     in_an_old_graph(tape())),
    ("a step in a graph of TensorFlow 1", ValueError, "the step into a @tf.function",
     step_in_an_old_graph),
    ("a gradient in a graph of TensorFlow 1", ValueError, "the step into a @tf.function",
     gradient_in_an_old_graph),
    ("a source of unknown shape", ValueError, "give tf.function an input_signature",
     source_of_unknown_shape),
    ("a local layer without variables", ValueError, "has no variables yet: build it",
     lambda: hvd.PartialDistributedOptimizer(
              optimizer(), local_layers=[keras.layers.Dense(1, name="own")])),
    ("a schedule and a warm-up", ValueError, "both set the learning rate",
     fitted(lambda: keras.optimizers.SGD(SCHEDULE),
            hvd.callbacks.LearningRateWarmupCallback(0.1))),
    ("a warm-up from nowhere", ValueError, "initial_lr is needed",
     lambda: hvd.callbacks.LearningRateScheduleCallback(None, 0.9)),
    ("a model without optimizer", ValueError, "saved without an optimizer",
     load_without_optimizer),
]  # fmt: skip


@on_ranks(1, init=hvd.init)
@pytest.mark.parametrize(
    ("kind", "words", "call"),
    [
        *(pytest.param(*row, id=name) for name, *row in TABLE),
        *(
            pytest.param(kind, re.escape(words), given(**arguments), id=id_of(arguments))
            for arguments, kind, words in refusals(hvd)
        ),
    ],
)
def test_a_mistake_is_explained(
    kind: type[Exception], words: str, call: Callable[[], Any]
) -> None:
    with pytest.raises(kind, match=f"(?s){words}") as raised:
        call()
    assert type(raised.value) is kind
