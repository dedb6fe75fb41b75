"""What users get wrong with Keras and TensorFlow is told with the rule and the way out."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from on_ranks import on_ranks

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.errors import HvdPipeError


def optimizer(**options: Any) -> Any:
    return keras.optimizers.SGD(0.1, **options)


def given(**arguments: Any) -> Callable[[], Any]:
    return lambda: hvd.DistributedOptimizer(optimizer(), **arguments)


def tape(**arguments: Any) -> Callable[[], Any]:
    return lambda: hvd_tf.DistributedGradientTape(tf.GradientTape(), **arguments)


def small_model() -> Any:
    return keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])


def trained(compiled: Callable[[Any], None], **fit: Any) -> Callable[[], Any]:
    def call() -> None:
        model = small_model()
        compiled(model)
        model.fit(np.zeros((8, 2)), np.zeros((8, 1)), batch_size=4, verbose=0, **fit)

    return call


@dataclass(frozen=True)
class Wrong:
    """A call that must raise.

    Args:
        what: Names the row.
        kind: The exception's class.
        words: A regular expression that its message must match: the rule and the way out.
        call: Makes the mistake.
    """

    what: str
    kind: type[Exception]
    words: str
    call: Callable[[], Any] = field(repr=False)


def _twice() -> None:
    hvd.DistributedOptimizer(hvd.DistributedOptimizer(optimizer()))


def _around_loss_scale() -> None:
    hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer()))


def _tape_twice() -> None:
    hvd_tf.DistributedGradientTape(hvd_tf.DistributedGradientTape(tf.GradientTape()))


def _both_accumulate() -> None:
    hvd.DistributedOptimizer(optimizer(gradient_accumulation_steps=2), backward_passes_per_step=2)


def _foreign_group() -> None:
    model = small_model()
    other = tf.Variable(1.0)
    groups = [[model.trainable_variables[0], other]]
    distributed = hvd.DistributedOptimizer(optimizer(), groups=groups)
    distributed.apply([tf.zeros((2, 1)), tf.zeros((1,))], model.trainable_variables)


def _late_local_variable() -> None:
    model = small_model()
    distributed = hvd.DistributedOptimizer(optimizer())
    distributed.apply([tf.zeros((2, 1)), tf.zeros((1,))], model.trainable_variables)
    distributed.register_local_var(model.trainable_variables[0])


def _late_gradient() -> None:
    model = small_model()
    distributed = hvd.DistributedOptimizer(optimizer())
    distributed.apply([tf.zeros((2, 1)), None], model.trainable_variables)
    distributed.apply([tf.zeros((2, 1)), tf.zeros((1,))], model.trainable_variables)


def _xla_step() -> None:
    model = small_model()
    distributed = hvd.DistributedOptimizer(optimizer())

    @tf.function(jit_compile=True)
    def step() -> None:
        with tf.GradientTape() as recorded:
            loss = tf.reduce_mean(model(tf.zeros((4, 2))))
        gradients = recorded.gradient(loss, model.trainable_variables)
        distributed.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    step()


def _compress_with_codec() -> None:
    hvd.allreduce(1.0, compression=hvd.Compression.int8)


def _plan_of_another_model() -> None:
    plan = hvd.Plan((("nobody/kernel",),), "given")
    model = small_model()
    distributed = hvd.DistributedOptimizer(optimizer(), strategy=hvd.MergedGradient(plan=plan))
    distributed.apply([tf.zeros((2, 1)), tf.zeros((1,))], model.trainable_variables)


def _in_an_old_graph(call: Callable[[], Any]) -> Callable[[], Any]:
    def inside() -> None:
        with tf.Graph().as_default():
            call()

    return inside


def _step_in_an_old_graph() -> None:
    distributed = hvd.DistributedOptimizer(optimizer())
    weight = keras.Variable([1.0])
    _in_an_old_graph(lambda: distributed.apply([tf.zeros(1)], [weight]))()


def _gradient_in_an_old_graph() -> None:
    weight = tf.Variable([1.0])
    with tf.GradientTape() as recorded:
        loss = tf.reduce_sum(weight)
    distributed = hvd_tf.DistributedGradientTape(recorded)
    _in_an_old_graph(lambda: distributed.gradient(loss, [weight]))()


def _source_of_unknown_shape() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def step(source: Any) -> Any:
        with tf.GradientTape() as recorded:
            recorded.watch(source)
            loss = tf.reduce_sum(source)
        return hvd_tf.DistributedGradientTape(recorded).gradient(loss, [source])

    step(tf.zeros(3))


def _load_without_optimizer() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.keras"
        small_model().save(file)
        hvd.load_model(file)


def _auto(model: Any) -> None:
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), strategy="auto"), "mse")


def _auto_loop() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), strategy="auto")
    weight = keras.Variable([1.0])
    optimizer.apply([tf.constant([1.0])], [weight])


SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)

TABLE = [
    Wrong("no optimizer", TypeError, "must be a keras.optimizers.Optimizer of Keras 3, got .*str",
          lambda: hvd.DistributedOptimizer("sgd")),
    Wrong("an optimizer of TensorFlow 1", TypeError,
          r"v1.train.GradientDescentOptimizer .* use horovod.tensorflow.DistributedOptimizer",
          lambda: hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))),
    Wrong("a hook", RuntimeError, "BroadcastGlobalVariablesCallback.* to model.fit",
          lambda: hvd_tf.BroadcastGlobalVariablesHook(0)),
    Wrong("wrapped twice", ValueError, "distributed already: wrap it once", _twice),
    Wrong("around LossScaleOptimizer", ValueError, "wrap the optimizer inside",
          _around_loss_scale),
    Wrong("unknown strategy", ValueError, "unknown strategy .*did you mean 'pipe-sgd'",
          given(strategy="pipesgd")),
    Wrong("unknown option", ValueError, "'k=3' is not an option of cocod",
          given(strategy="cocod:k=3")),
    Wrong("strategy is a number", TypeError, "strategy must be a string or one of",
          given(strategy=3)),
    Wrong("auto without a callback", ValueError,
          r"pass callbacks=\[BroadcastGlobalVariablesCallback\(0\)\] of hvd_pipe.tensorflow.keras."
          "callbacks to fit; in a loop of your own, name the strategy", trained(_auto)),
    Wrong("auto in a loop of one's own", ValueError, "in a loop of your own, name the strategy",
          _auto_loop),
    Wrong("a tape under auto", ValueError, "use hvd.DistributedOptimizer under model.fit, or give",
          tape(strategy="auto")),
    Wrong("auto has nothing to choose from", ValueError,
          "leaves nothing to choose from. With 'cocod': op=hvd.Sum",
          given(op=hvd.Sum, strategy="auto:allow=cocod")),
    Wrong("a tape with prediction", ValueError, "prediction='local' needs the optimizer",
          tape(strategy="pipe-sgd:prediction=local")),
    Wrong("op is a word", ValueError, "op must be hvd.Average or hvd.Sum, got 'mean'",
          given(op="mean")),
    Wrong("op is Adasum", ValueError, "Adasum is not for Keras", given(op=hvd_tf.Adasum)),
    Wrong("op is Max", ValueError, "op must be hvd.Average or hvd.Sum", given(op=hvd_tf.Max)),
    Wrong("sum under cocod", ValueError, "op=hvd.Sum has no meaning under CoCoD",
          given(op=hvd.Sum, strategy="cocod")),
    Wrong("nodes without process sets", HvdPipeError, r'call hvd.init\(process_sets="dynamic"\)',
          given(strategy="cocod:within=node")),
    Wrong("more fragments than variables", ValueError, "so give at most 2 fragments",
          trained(
              lambda model: model.compile(
                  hvd.DistributedOptimizer(optimizer(), strategy="cocod:period=3,fragments=3"),
                  "mse",
              ))),
    Wrong("groups under cocod", ValueError, "groups has no meaning under CoCoD",
          given(groups=2, strategy="cocod")),
    Wrong("predivide with Sum", ValueError, "gradient_predivide_factor must be > 0 and needs",
          given(op=hvd.Sum, gradient_predivide_factor=2.0)),
    Wrong("predivide is 0", ValueError, "gradient_predivide_factor must be > 0",
          given(gradient_predivide_factor=0)),
    Wrong("predivide is a word", TypeError, "gradient_predivide_factor must be a number",
          given(gradient_predivide_factor="2")),
    Wrong("compression is a word", TypeError, "compression must be hvd.Compression.none",
          given(compression="fp16")),
    Wrong("compression is a class", TypeError, r"is the class Int8: write hvd.Int8\(\)",
          given(compression=hvd.Int8)),
    Wrong("a codec in one call", TypeError, "cannot be used in a single Horovod call",
          _compress_with_codec),
    Wrong("process_set is a list", TypeError, "process_set must be an hvd.ProcessSet",
          given(process_set=[0])),
    Wrong("process_set is not registered", ValueError, "is not registered: call hvd.add_process",
          given(process_set=hvd.ProcessSet([0]))),
    Wrong("no passes", ValueError, "backward_passes_per_step must be an int >= 1",
          given(backward_passes_per_step=0)),
    Wrong("passes twice", ValueError, "both sum up gradients: give one", _both_accumulate),
    Wrong("sparse_as_dense is a word", TypeError, "sparse_as_dense must be True or False",
          given(sparse_as_dense="yes")),
    Wrong("device is a number", TypeError, "device_dense must be a device's name",
          given(device_dense=0)),
    Wrong("no groups", ValueError, "groups must be a positive int or a list", given(groups=0)),
    Wrong("groups of another model", ValueError, "must list variables that are trained here",
          _foreign_group),
    Wrong("groups and bucket_bytes", ValueError, "both say what to merge",
          given(groups=2, strategy="merged-gradient:bucket_bytes=100")),
    Wrong("a plan of another model", ValueError, "names 'nobody/kernel', no gradient",
          _plan_of_another_model),
    Wrong("a local variable too late", HvdPipeError, "after training has begun: call it before",
          _late_local_variable),
    Wrong("a gradient that comes later", HvdPipeError, "had none on any rank", _late_gradient),
    Wrong("XLA around a step", ValueError, r"write model.compile\(..., jit_compile=False\)",
          _xla_step),
    Wrong("a tape of nothing", TypeError, "must be a tf.GradientTape, got list",
          lambda: hvd_tf.DistributedGradientTape([])),
    Wrong("a tape wrapped twice", ValueError, "this tape is distributed already", _tape_twice),
    Wrong("a tape under cocod", ValueError, "CoCoD averages models, and a tape has gradients",
          tape(strategy="cocod")),
    Wrong("all variables", RuntimeError, "call hvd.broadcast_variables",
          lambda: hvd.broadcast_global_variables(0)),
    Wrong("an optimizer in a graph of TensorFlow 1", ValueError, "the step into a @tf.function",
          _in_an_old_graph(given())),
    Wrong("a tape in a graph of TensorFlow 1", ValueError, "the step into a @tf.function",
          _in_an_old_graph(tape())),
    Wrong("a step in a graph of TensorFlow 1", ValueError, "the step into a @tf.function",
          _step_in_an_old_graph),
    Wrong("a gradient in a graph of TensorFlow 1", ValueError, "the step into a @tf.function",
          _gradient_in_an_old_graph),
    Wrong("a source of unknown shape", ValueError, "give tf.function an input_signature",
          _source_of_unknown_shape),
    Wrong("a local layer without variables", ValueError, "has no variables yet: build it",
          lambda: hvd.PartialDistributedOptimizer(
              optimizer(), local_layers=[keras.layers.Dense(1, name="own")])),
    Wrong("a schedule and a warm-up", ValueError, "both set the learning rate",
          trained(
              lambda model: model.compile(
                  hvd.DistributedOptimizer(keras.optimizers.SGD(SCHEDULE)), "mse"
              ),
              callbacks=[hvd.callbacks.LearningRateWarmupCallback(0.1)],
          )),
    Wrong("a warm-up from nowhere", ValueError, "initial_lr is needed",
          lambda: hvd.callbacks.LearningRateScheduleCallback(None, 0.9)),
    Wrong("a model without optimizer", ValueError, "saved without an optimizer",
          _load_without_optimizer),
]  # fmt: skip


@on_ranks(1, init=hvd.init)
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.what)
def test_a_mistake_is_explained(row: Wrong) -> None:
    with pytest.raises(row.kind, match=f"(?s){row.words}") as raised:
        row.call()
    assert type(raised.value) is row.kind
