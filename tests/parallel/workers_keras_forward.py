"""What the ranks of `test_keras_forward` do; each function is a case and returns what it saw."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from cases import Raised, run_cases
from keras_problem import BATCH, OPTIMIZERS, batch, loss_of, make_model, weights_of
from workers_keras_auto import Found, Lines, Record, data, fit, optimizer_of
from workers_keras_check_mode import checks

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.planning.plan import Plan
from hvd_pipe.strategy import MergedGradient
from hvd_pipe.tensorflow.arguments import shapes_of
from hvd_pipe.tensorflow.keras import callbacks
from hvd_pipe.tensorflow.keras.late_updates import begin_step
from hvd_pipe.tensorflow.measuring.ready_times import ReadyTimes
from hvd_pipe.tensorflow.messages.reduction import Reduction
from hvd_pipe.tensorflow.strategies import replan
from hvd_pipe.tensorflow.strategies.replan import Replan

BARRIER = "merged-gradient"


def plan_of(model: Any) -> Plan:
    """A bucket a layer; the last layer's travels in three pieces, those of the middle in two."""
    variables = model.trainable_variables
    name_of = dict(zip(map(id, variables), shapes_of(variables).names, strict=True))
    layers = [
        tuple(name_of[id(each)] for each in layer.trainable_variables) for layer in model.layers
    ]
    buckets = tuple(layer for layer in reversed(layers) if layer)
    middle = tuple(range(1, len(buckets) - 1))
    return Plan(buckets, "given", order=(0, *middle, 0, len(buckets) - 1, *middle, 0))


def forward(model: Any) -> MergedGradient:
    return MergedGradient(plan=plan_of(model), overlap="forward")


def trained(
    optimizer: Any, overlap: bool, *callbacks: Any, made: Any = make_model, **options: Any
) -> Found:
    """What a model came to under ``fit``, and what was seen after every batch."""
    model = made()
    strategy = forward(model) if overlap else BARRIER
    wrap = options.pop("wrap", {})
    distributed = hvd.DistributedOptimizer(optimizer, strategy=strategy, **wrap)
    model.compile(distributed, "mse", **options.pop("compile", {}))
    record, lines = Record(), Lines()
    history = fit(model, *data(), record, *callbacks, **options)
    lines.taken()
    return {
        "records": np.array(record.weights),
        "weights": weights_of(model),
        "iterations": int(distributed.iterations),
        "history": history.history,
        "said": "\n".join(lines.lines),
        "state": np.concatenate([np.ravel(each.numpy()) for each in model.variables]),
    }


def both(name: str, **options: Any) -> Found:
    return {
        "forward": trained(OPTIMIZERS[name](), True, **options),
        "barrier": trained(OPTIMIZERS[name](), False, **options),
    }


def of_layers(layers: Callable[[], list[Any]]) -> Any:
    keras.utils.set_random_seed(7)
    return keras.Sequential([keras.layers.Input((6,)), *layers()])


class OwnClipping(keras.optimizers.SGD):  # type: ignore[misc]
    """Clips by the norm of all gradients, in the method that Keras calls for that."""

    def _clip_gradients(self, gradients: Any) -> Any:
        return tf.clip_by_global_norm(gradients, 0.05)[0]


class OwnDecay(keras.optimizers.SGD):  # type: ignore[misc]
    """Decays by the norm of all variables."""

    def _apply_weight_decay(self, variables: Any) -> None:
        norm = tf.linalg.global_norm([each.value for each in variables])
        for each in variables:
            each.assign(each * (1.0 - 0.01 * norm))


def frozen() -> Any:
    model = make_model()
    model.layers[1].trainable = False
    return model


def normalized() -> Any:
    dense, normalization = keras.layers.Dense, keras.layers.BatchNormalization
    return of_layers(
        lambda: [dense(5, "tanh"), normalization(momentum=0.5), dense(4, "tanh"), dense(3)]
    )


def constrained() -> Any:
    limit = keras.constraints.MaxNorm(0.5)
    dense = keras.layers.Dense
    return of_layers(
        lambda: [dense(5, "tanh"), dense(4, "tanh"), dense(3, kernel_constraint=limit)]
    )


def shared() -> Any:
    """The layer of the middle is used twice."""
    keras.utils.set_random_seed(7)
    x = inputs = keras.layers.Input((6,))
    middle = keras.layers.Dense(5, "tanh")
    x = keras.layers.Dense(5, "tanh")(x)
    x = middle(middle(x))
    return keras.Model(inputs, keras.layers.Dense(3)(x))


class Rates(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets another learning rate after every batch."""

    def on_train_batch_end(self, number: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.1 / (number + 2)


def of_models(made: Any, **options: Any) -> Found:
    return both("momentum", made=made, **options)


def with_rates() -> Found:
    found = {}
    for overlap in (True, False):
        name = "forward" if overlap else "barrier"
        found[name] = trained(OPTIMIZERS["momentum"](), overlap, Rates())
    return found


def with_validation() -> Found:
    """On three epochs of eight batches, with weights that rank 0 alone reads at their ends."""
    seen: dict[bool, list[Any]] = {True: [], False: []}

    class Read(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self, into: list[Any]) -> None:
            super().__init__()
            self.into = into

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.into.append(weights_of(self.model))

    found: Found = {}
    for overlap in (True, False):
        readers = [Read(seen[overlap])] if hvd.rank() == 0 else []
        found["forward" if overlap else "barrier"] = trained(
            OPTIMIZERS["adam"](),
            overlap,
            *readers,
            epochs=3,
            steps_per_epoch=8,
            validation_data=batch(0, 99),
        )
    found["read"] = [np.array(seen[overlap]) for overlap in (True, False)]
    return found


def of_unknown_length() -> Found:
    """Three epochs of eight batches; each ends by a ninth step where Keras does not know that."""
    batches = [batch(hvd.rank(), step) for step in range(8)]
    spec = tuple(tf.TensorSpec([BATCH, width], tf.float64) for width in (6, 3))
    unknown = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
    known = unknown.apply(tf.data.experimental.assert_cardinality(8))
    found: Found = {}
    for name in ("forward", BARRIER, "pipe-sgd"):
        for length, dataset in (("known", known), ("unknown", unknown)):
            model, seen = make_model(), EpochEnds()
            strategy = forward(model) if name == "forward" else name
            optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](), strategy=strategy)
            model.compile(optimizer, "mse")
            fit(model, dataset, None, seen, epochs=3, batch_size=None)
            found[f"{name}, {length}"] = np.array([*seen.weights, weights_of(model)])
    for length, steps in (("known", 8), ("unknown", 9)):
        found[f"tape, {length}"] = by_a_tape(unknown, steps)
    return found


def by_a_tape(dataset: Any, steps: int) -> Any:
    """Three epochs of ``pipe-sgd``, of so many steps that take a batch themselves."""
    model, optimizer = make_model(), OPTIMIZERS["sgd"]()
    optimizer.build(model.trainable_variables)

    @tf.function  # type: ignore[untyped-decorator]
    def step(batches: Any) -> None:
        x, y = next(batches)
        with tf.GradientTape() as plain:
            loss = loss_of(model, x, y)
        tape = hvd_tf.DistributedGradientTape(plain, strategy="pipe-sgd")
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    for _ in range(3):
        batches = iter(dataset)
        with contextlib.suppress(tf.errors.OutOfRangeError):
            for _ in range(steps):
                step(batches)
    return weights_of(model)


class EpochEnds(keras.callbacks.Callback):  # type: ignore[misc]
    """Notes the weights at the end of every epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Any] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.weights.append(weights_of(self.model))


class Stop(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends training after the sixth batch of an epoch."""

    def on_train_batch_end(self, number: int, logs: Any = None) -> None:
        self.model.stop_training = number == 5


def read_before_the_callback(executions: int) -> Found:
    """What a callback before ours reads at the end of epochs of eight batches.

    Args:
        executions: Of Keras' ``steps_per_execution``; for 1, training stops within an epoch.
    """
    found: Found = {}
    for name in ("forward", BARRIER):
        model, seen = make_model(), EpochEnds()
        strategy = forward(model) if name == "forward" else name
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](), strategy=strategy)
        model.compile(optimizer, "mse", steps_per_execution=executions)
        callbacks = [seen, hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        if executions == 1:
            callbacks.insert(0, Stop())
        x, y = data(0, 8)
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, epochs=3, callbacks=callbacks)
        found[name] = np.array(seen.weights)
    return found


def saved(end: bool) -> Found:
    """Saved after batch 10 by each rank for itself, and gone on from there by another model."""
    with tempfile.TemporaryDirectory() as folder:

        class Save(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, number: int, logs: Any = None) -> None:
                if number == 9:
                    if end:
                        optimizer_of(self.model).synchronize()
                    tf.train.Checkpoint(model=self.model, optimizer=self.model.optimizer).write(
                        f"{folder}/own"
                    )

        whole = trained(OPTIMIZERS["adam"](), True, Save())
        model = make_model()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](), strategy=forward(model))
        optimizer.build(model.trainable_variables)
        tf.train.Checkpoint(model=model, optimizer=optimizer).read(f"{folder}/own")
    old = weights_of(model)
    model.compile(optimizer, "mse")
    record = Record()
    fit(model, *data(10), record)
    return {"whole": whole["weights"], "resumed": weights_of(model), "read": old, **whole}


def restored_in_between() -> Found:
    """A checkpoint is read into the optimizer that trains, which goes back by five batches."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](), strategy=forward(model))
    model.compile(optimizer, "mse")
    with tempfile.TemporaryDirectory() as folder:

        class Save(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, number: int, logs: Any = None) -> None:
                if number == 9:
                    checkpoint.write(f"{folder}/own")

        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        fit(model, *data(0, 15), Save())
        checkpoint.read(f"{folder}/own")
    fit(model, *data(10))
    return {"weights": weights_of(model)}


def loaded_alone() -> list[str]:
    """Rank 0 alone goes back by some batches between two calls of fit; what is said."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](), strategy=forward(model))
    model.compile(optimizer, "mse")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:

        class Save(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, number: int, logs: Any = None) -> None:
                if number == 9:
                    checkpoint.write(f"{folder}/own")

        try:
            fit(model, *data(0, 15), Save())
            if hvd.rank() == 0:
                checkpoint.read(f"{folder}/own")
            fit(model, *data(10))
        except hvd.RanksDisagreeError as error:
            said.append(str(error))
    return said


def committed() -> Found:
    """A commit within an epoch; later all go back to it, and take rank 0's."""
    found: Found = {}
    for name, deferred in (("forward", True), ("barrier", False)):
        model = make_model()
        strategy = forward(model) if deferred else BARRIER
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](), strategy=strategy)
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, "mse")
        state = hvd.elastic.KerasState(model, batch=0)
        fit(model, *data(0, 15), Record(10, state.commit))
        state.restore()
        state.sync()
        fit(model, *data(10))
        found[name] = weights_of(model)
    return found


def said_by(optimizer: Any, **options: Any) -> Found:
    """What keeps the barrier, and that it is the barrier's result."""
    found = {}
    for name, deferred in (("forward", True), ("barrier", False)):
        found[name] = trained(optimizer(), deferred, **options)
    return found


def ema() -> Any:
    return keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=4)


def scaled() -> Found:
    model = make_model()
    plain = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](), strategy=forward(model))
    lines = Lines()
    model.compile(keras.optimizers.LossScaleOptimizer(plain, initial_scale=8.0), "mse")
    fit(model, *data())
    lines.taken()
    return {"weights": weights_of(model), "said": "\n".join(lines.lines)}


class Twice(keras.Sequential):  # type: ignore[misc]
    """Its step applies two gradients."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = loss_of(self, x, y)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def applied_twice() -> Found:
    return said_by(OPTIMIZERS["sgd"], made=lambda: Twice(make_model().layers))


def used_after_update() -> Found:
    """The step of a model of one's own reads a weight that its update has changed."""

    class Norm(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            found = super().train_step(data)
            return {**found, "norm": tf.norm(self.trainable_variables[2])}

    return said_by(OPTIMIZERS["sgd"], made=lambda: Norm(make_model().layers))


def saving_within_an_epoch() -> Found:
    """Rank 0 alone has a callback that saves weights after every fourth batch."""
    with tempfile.TemporaryDirectory() as folder:
        saver = keras.callbacks.ModelCheckpoint(f"{folder}/own.keras", save_freq=4, verbose=0)
        found = {}
        for name, deferred in (("forward", True), ("barrier", False)):
            savers = [saver] if hvd.rank() == 0 else []
            found[name] = trained(OPTIMIZERS["sgd"](), deferred, *savers)
    return found


def checked() -> Found:
    """Under HVD_PIPE_CHECK, with a checkpoint between two steps."""
    with checks(0):
        return saved(False)


def eager_on_one_rank() -> str:
    try:
        trained(OPTIMIZERS["sgd"](), True, compile={"run_eagerly": hvd.rank() == 1})
    except hvd.RanksDisagreeError as error:
        return str(error)
    return "nothing"


def without_callback() -> Found:
    """After a call of fit that leaves messages, steps that nobody watches; rank 0 joins."""
    found = {}
    for name, deferred in (("forward", True), ("barrier", False)):
        model = make_model()
        strategy = forward(model) if deferred else BARRIER
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](), strategy=strategy)
        model.compile(optimizer, "mse")
        first, record = Record(), Record()
        fit(model, *data(0, 8), first)
        x, y = data(8, 12)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[record])
        steps = []
        for step in range(12, 14 + 2 * hvd.rank()):
            model.train_on_batch(*batch(hvd.rank(), step))
            steps.append(weights_of(model))
        last = int(hvd_tf.join())
        hvd_tf.broadcast_variables([*model.variables, *optimizer.variables], root_rank=last)
        again = Record()
        fit(model, *data(16, 20), again)
        found[name] = {
            "first": np.array(first.weights),
            "unwatched": np.array([*record.weights, *steps]),
            "again": np.array(again.weights),
            "weights": weights_of(model),
        }
    return found


def after_an_exception() -> Found:
    """Steps that nobody watches, after a callback has ended fit by an exception."""

    def fail() -> None:
        raise KeyError("the callback's own")

    found: Found = {}
    for name in ("forward", BARRIER):
        model = make_model()
        strategy = forward(model) if name == "forward" else name
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](), strategy=strategy)
        model.compile(optimizer, "mse")
        with contextlib.suppress(KeyError):
            fit(model, *data(), Record(10, fail))
        optimizer.synchronize()
        weights = [weights_of(model)]
        for step in range(10, 13):
            model.train_on_batch(*batch(hvd.rank(), step))
            weights.append(weights_of(model))
        found[name] = np.array(weights)
    return found


class Averaged(keras.Sequential):  # type: ignore[misc]
    """Its step averages the weights after their update."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers)
        self.means = [tf.Variable(each.value) for each in self.trainable_variables]

    def train_step(self, data: Any) -> Any:
        found = super().train_step(data)
        for mean, weight in zip(self.means, self.trainable_variables, strict=True):
            mean.assign(0.5 * mean + 0.5 * weight)
        return found


def of_a_second_model(made: Any) -> Found:
    """Over the layers and the optimizer of one that leaves updates to the next step."""
    found: Found = {}
    for name in ("forward", BARRIER):
        model, lines = make_model(), Lines()
        strategy = forward(model) if name == "forward" else name
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](), strategy=strategy)
        model.compile(optimizer, "mse")
        fit(model, *data(0, 8))
        other = made(model.layers)
        other.compile(optimizer, "mse")
        fit(other, *data(8, 16))
        lines.taken()
        means = [each.numpy().ravel() for each in getattr(other, "means", [])]
        found[name] = np.concatenate([weights_of(other), *means])
        found[f"{name}, said"] = "\n".join(lines.lines)
    return found


def of_a_layer_that_is_frozen_later() -> Found:
    """What the step sends at last, and which tensors of messages engines keep."""
    found: Found = {}
    for name in ("merged-gradient:overlap=forward", BARRIER):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](), strategy=name)
        model.compile(optimizer, "mse")
        fit(model, *data(0, 2))
        if name != BARRIER:  # as after the trials
            next(iter(optimizer._hvd_pipe)).engine.adopt(plan_of(model))
            optimizer._hvd_pipe.watcher._open = False
        fit(model, *data(2, 8))
        model.layers[0].trainable = False
        model.compile(optimizer, "mse")
        with mock.patch.object(
            Reduction, "reduce", autospec=True, side_effect=Reduction.reduce
        ) as reduce:
            fit(model, *data(8, 16))
        found[name] = weights_of(model)
        found[f"{name}, sent"] = [each.args[2] for each in reduce.call_args_list]
        engines = [session.engine for session in optimizer._hvd_pipe]
        found[f"{name}, kept"] = sum(len(getattr(each, "_sent", ())) for each in engines)
    return found


def own_loop() -> Found:
    """Steps of one's own keep the barrier, and that is said once."""
    model, lines = make_model(), Lines()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](), strategy=forward(model))

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    records = []
    for number in range(6):
        step(*map(tf.constant, batch(hvd.rank(), number)))
        records.append(weights_of(model))
    lines.taken()
    return {"records": np.array(records), "said": "\n".join(lines.lines)}


def sparse() -> Found:
    """The rows of an embedding travel by themselves, and a plan of the others is found."""

    def plan(tried: Any, gradients: Any) -> Plan:
        *others, last = range(len(gradients.names))
        buckets = tuple((name,) for name in gradients.names)
        return Plan(buckets, "given", order=(last, *others))

    found: Found = {}
    rows = np.random.default_rng(hvd.rank()).integers(0, 12, (30 * BATCH, 2))
    for name, strategy in (("forward", "merged-gradient:overlap=forward"), ("barrier", BARRIER)):
        keras.utils.set_random_seed(5)
        layers = keras.layers
        model = keras.Sequential(
            [layers.Input((2,), dtype="int32"), layers.Embedding(12, 3), layers.Flatten(),
             layers.Dense(3), layers.Dense(1)]
        )  # fmt: skip
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](), strategy=strategy)
        model.compile(optimizer, "mse")
        record, lines = Record(), Lines()
        with mock.patch.object(replan, "deferring_plan", plan):
            fit(model, rows, rows.sum(axis=1, keepdims=True) / 12.0, record)
        lines.taken()
        found[name] = {"records": np.array(record.weights), "said": "\n".join(lines.lines)}
    return found


def refused_on_one_rank() -> Found:
    """Ranks that differ: all keep the barrier."""
    problem = "of its own" if hvd.rank() == 1 else None
    with mock.patch.object(callbacks, "problem", return_value=problem):
        return said_by(OPTIMIZERS["sgd"])


def step_outside() -> Found:
    """A step of one's own between two batches of fit says what to do; after that it works."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](), strategy=forward(model))
    model.compile(optimizer, "mse")
    said: list[str] = []

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(model, *batch(hvd.rank(), 0))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    class Own(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, number: int, logs: Any = None) -> None:
            if number == 10:
                for taken in (step, tf.function(step, autograph=False)):
                    try:
                        taken()
                    except Exception as error:
                        said.append(str(error))
                optimizer.synchronize()
                step()

    fit(model, *data(), Own())
    return {"said": said, "weights": weights_of(model)}


def waits() -> Found:
    """Which messages each layer's forward pass waits for, in the graph of a step."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](), strategy=forward(model))
    model.compile(optimizer, "mse")
    fit(model, *data(0, 8))
    x, y = (tf.constant(each) for each in batch(hvd.rank(), 0))

    def step() -> None:
        begin_step(optimizer)
        model.train_step((x, y))

    tag = optimizer._hvd_pipe.tag
    graph = tf.function(step, autograph=False).get_concrete_function().graph

    def label(operation: Any) -> str:
        return str(operation.name.rpartition(f"{tag}.0.")[2])

    def messages_before(operation: Any) -> set[str]:
        found, left = {operation}, [operation]
        while left:
            one = left.pop()
            more = {*one.control_inputs, *(each.op for each in one.inputs)} - found
            found |= more
            left += more
        return {label(each) for each in found if _is_message(each)}

    multiplied = [
        each
        for each in graph.get_operations()
        if each.type == "MatMul" and "grad" not in each.name
    ]
    sent = [each for each in graph.get_operations() if _is_message(each)]
    return {
        "layers": [messages_before(each) for each in multiplied[: len(model.layers)]],
        "messages": {label(each): messages_before(each) for each in sent},
    }


def _is_message(operation: Any) -> bool:
    return bool(operation.type == "HorovodAllreduce")


def tried(forward_s: float) -> Found:
    """Plans with the barrier take 13, 12 and 14 s a step; what each rank sees of them is given.

    Args:
        forward_s: A step without the barrier on the last rank. On the first one it is the fastest.
    """
    is_first = hvd.rank() == 0
    steps = iter([13.0, 12.0, 14.0, 1.0 if is_first else forward_s])
    recorded = Replan._recorded

    def seen(self: Any, engine: Any) -> Any:
        engine.times.waits, engine.times.step_s = [6.0] * 5, [next(steps)] * 5
        return recorded(self, engine)

    def ready(times: ReadyTimes) -> list[float]:
        return [0.4 * (5 - index) for index in range(6)]

    found: Found = {}
    for name in ("merged-gradient:overlap=forward", "merged-gradient"):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](), strategy=name)
        model.compile(optimizer, "mse")
        record, lines = Record(), Lines()
        with contextlib.ExitStack() as stack:
            if name != "merged-gradient":
                stack.enter_context(mock.patch.object(Replan, "_recorded", seen))
                stack.enter_context(mock.patch.object(ReadyTimes, "seconds", ready))
            fit(model, *data(0, 30), record)
        lines.taken()
        found[name] = {
            "plan": optimizer.plan,
            "weights": weights_of(model),
            "records": np.array(record.weights),
            "said": "\n".join(lines.lines),
            "resumed": resumed(model, name),
        }
    return found


@contextlib.contextmanager
def raced(ends: list[int]) -> Iterator[None]:
    """Have the plan without the barrier be fastest; note after which batches plans are looked at.

    Args:
        ends: Takes the batches.
    """
    recorded = Replan._recorded

    def seen(self: Any, engine: Any) -> Any:
        ends.append(self._batches)
        if engine.times is not None:
            engine.times.waits, engine.times.step_s = [6.0] * 5, [14.0 - len(ends)] * 5
        return recorded(self, engine)

    def ready(times: ReadyTimes) -> list[float]:
        return [0.4 * (5 - index) for index in range(6)]

    with (
        mock.patch.object(Replan, "_recorded", seen),
        mock.patch.object(ReadyTimes, "seconds", ready),
    ):
        yield


def saver_in_a_trial() -> Found:
    """A call of fit ends within the trial without the barrier; rank 0 saves in the next one."""
    found: Found = {}
    for name in ("merged-gradient:overlap=forward", "merged-gradient"):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](), strategy=name)
        model.compile(optimizer, "mse")
        record, ends = Record(), []
        with tempfile.TemporaryDirectory() as folder, raced(ends):
            saver = keras.callbacks.ModelCheckpoint(f"{folder}/own.keras", save_freq=100)
            fit(model, *data(0, 24))
            fit(model, *data(24, 40), record, *([saver] if hvd.rank() == 0 else []))
        found[name] = {"records": np.array(record.weights), "plan": optimizer.plan}
    return found


def ended_twice() -> Found:
    """A session is done with its trial while another one's goes on."""
    model, ends = make_model(), []
    strategy = "merged-gradient:overlap=forward"
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](), strategy=strategy)
    model.compile(optimizer, "mse")
    with raced(ends):
        fit(model, *data(0, 30))
        plan, sessions = optimizer.plan, optimizer._hvd_pipe
        [session] = sessions
        stays = sessions.watcher._take_next(session.engine, 0)
    return {"before": plan, "after": optimizer.plan, "stays": stays}


def warmed_up(name: str) -> Found:
    """The learning rate rises in the first epoch of 26 batches, in which a trial begins."""

    class Late(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, number: int, logs: Any = None) -> None:
            sessions = optimizer_of(self.model)._hvd_pipe
            seen.append(any(each.engine.is_ahead() for each in sessions))

    found: Found = {}
    for strategy in ("merged-gradient:overlap=forward", "merged-gradient"):
        seen: list[bool] = []
        ends: list[int] = []
        model = make_model()
        model.compile(hvd.DistributedOptimizer(OPTIMIZERS[name](), strategy=strategy), "mse")
        warmup = hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=1)
        with raced(ends):
            fit(model, *data(0, 26), warmup, Late(), epochs=2)
        found[strategy] = {"late": seen, "ends": ends, "weights": weights_of(model)}
    return found


def resumed_eagerly() -> Found:
    """A loop without a graph goes on from a checkpoint that holds updates."""
    model, other = make_model(), make_model()
    optimizers = [
        hvd.DistributedOptimizer(OPTIMIZERS["adam"](), strategy=forward(each))
        for each in (model, other)
    ]
    with tempfile.TemporaryDirectory() as folder:

        def save() -> None:
            tf.train.Checkpoint(model=model, optimizer=optimizers[0]).write(f"{folder}/own")

        model.compile(optimizers[0], "mse")
        fit(model, *data(0, 12), Record(10, save))
        optimizers[1].build(other.trainable_variables)
        tf.train.Checkpoint(model=other, optimizer=optimizers[1]).read(f"{folder}/own")

    def step(number: int) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(other, *batch(hvd.rank(), number))
        optimizers[1].apply(tape.gradient(loss, other.trainable_variables))

    said = ""
    try:
        step(10)
    except hvd.HvdPipeError as error:
        said = str(error)
    optimizers[1].synchronize()
    for number in range(10, 12):
        step(number)
    return {"said": said, "whole": weights_of(model), "resumed": weights_of(other)}


def resumed(model: Any, strategy: str) -> Found:
    """Another model goes on from a checkpoint of this one, in so many steps that plans race."""
    other = make_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](), strategy=strategy)
    with tempfile.TemporaryDirectory() as folder:
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(f"{folder}/own")
        optimizer.build(other.trainable_variables)
        tf.train.Checkpoint(model=other, optimizer=optimizer).read(f"{folder}/own")
    other.compile(optimizer, "mse")
    record, taken = Record(), mock.Mock(return_value=True)
    with mock.patch.object(Replan, "_take_next", taken):
        fit(other, *data(30, 42), record)
    return {
        "plan": optimizer.plan,
        "raced": taken.called,
        "records": np.array(record.weights),
        "weights": weights_of(other),
    }


CASES = {
    **{name: partial(both, name) for name in ("sgd", "momentum", "adam", "scheduled")},
    "frozen": partial(of_models, frozen),
    "normalized": partial(of_models, normalized),
    "constrained": partial(of_models, constrained),
    "shared": partial(of_models, shared),
    "executions": partial(both, "adam", compile={"steps_per_execution": 4}),
    "rates": with_rates,
    "validation": with_validation,
    "unknown length": of_unknown_length,
    "ends, executions": partial(read_before_the_callback, 3),
    "ends, stopped": partial(read_before_the_callback, 1),
    "exception": after_an_exception,
    "second averages": partial(of_a_second_model, Averaged),
    "second applies twice": partial(of_a_second_model, Twice),
    "frozen later": of_a_layer_that_is_frozen_later,
    "saved": partial(saved, False),
    "saved when finished": partial(saved, True),
    "restored": restored_in_between,
    "committed": committed,
    "loaded alone between": loaded_alone,
    "clipped": partial(said_by, OPTIMIZERS["clipped"]),
    "own clipping": partial(said_by, lambda: OwnClipping(0.1)),
    "own decay": partial(said_by, lambda: OwnDecay(0.1)),
    "averaged": partial(said_by, ema),
    "accumulating": partial(said_by, OPTIMIZERS["accumulating"]),
    "nadam": partial(said_by, lambda: keras.optimizers.Nadam(0.01)),
    "scaled": scaled,
    "twice": applied_twice,
    "eager": partial(said_by, OPTIMIZERS["sgd"], compile={"run_eagerly": True}),
    "one rank": refused_on_one_rank,
    "used after": used_after_update,
    "saver": saving_within_an_epoch,
    "int8": partial(said_by, OPTIMIZERS["sgd"], wrap={"compression": hvd.Compression.int8}),
    "sparse": sparse,
    "sum": partial(both, "momentum", wrap={"op": hvd.Sum}),
    "fp16": partial(both, "momentum", wrap={"compression": hvd.Compression.fp16}),
    "checked": checked,
    "eager on one rank": eager_on_one_rank,
    "unwatched": without_callback,
    "own loop": own_loop,
    "outside": step_outside,
    "waits": waits,
    "saver in a trial": saver_in_a_trial,
    "ended twice": ended_twice,
    "warm-up": partial(warmed_up, "sgd"),
    "warm-up, momentum": partial(warmed_up, "momentum"),
    "resumed eagerly": resumed_eagerly,
    "tried, faster": partial(tried, 11.0),
    "tried, slower": partial(tried, 12.5),
}


def two_of_three() -> Found:
    """Two calls of fit; the last rank is no member of the process set."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["adam"](), strategy=forward(model), process_set=TWO
    )
    model.compile(optimizer, "mse")
    fit(model, *data(0, 12))
    fit(model, *data(12))
    hvd_tf.broadcast_object(None, root_rank=0)  # the last rank must not leave before
    return {"weights": weights_of(model)}


TWO = hvd.ProcessSet([0, 1])
SEPARATE = {
    "two of three": two_of_three,
}


def cases(names: list[str]) -> dict[str, Found | Raised]:
    hvd.init(process_sets=[TWO] if "two of three" in names else None)
    return run_cases({name: (CASES | SEPARATE)[name] for name in names})
