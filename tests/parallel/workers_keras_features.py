"""What the ranks of `test_keras_features` do; each function is a case and returns what it saw."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import horovod.tensorflow as stock
import horovod.tensorflow.keras as stock_keras
import keras
import numpy as np
import tensorflow as tf
from cases import Raised, run_cases
from keras_problem import BATCH, batch, loss_of, make_model, weights_of

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.errors import RanksDisagreeError
from hvd_pipe.planning.plan import Plan
from hvd_pipe.planning.trials import SETTLE_STEPS, TRIAL_STEPS
from hvd_pipe.runtime.bucket_planner import SKIP_STEPS
from hvd_pipe.tensorflow.messages.reduction import Reduction
from hvd_pipe.tensorflow.strategies.replan import PLANS

Found = dict[str, Any]

STEPS = 12
CODED, CODED_ROUNDS = 1000, 4  # elements, no whole slices; rounds
TRIED_FOR = SETTLE_STEPS + TRIAL_STEPS  # steps of each plan
PLANNED_AFTER = SKIP_STEPS + PLANS * TRIED_FOR  # steps; fewer where no other plan is worth a trial


def functions_of_a_step(traced: bool) -> Found:
    """The functions of ours that a step of merged-gradient calls, in the order of first calls.

    The step is not the optimizer's first one: that one compares the ranks' variables.
    """
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    with tf.GradientTape() as tape:
        loss = loss_of(model, *batch(hvd.rank(), 0))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    found: dict[tuple[str, str], None] = {}

    def note(frame: Any, event: str, _: object) -> None:
        path, _, file = frame.f_code.co_filename.rpartition("/hvd_pipe/")
        if event == "call" and path and not frame.f_code.co_name.endswith(("comp>", "genexpr>")):
            found[file, frame.f_code.co_qualname] = None

    def step() -> None:
        sys.setprofile(note)
        try:
            optimizer.apply(gradients, model.trainable_variables)
        finally:
            sys.setprofile(None)

    if traced:
        tf.function(step, autograph=False).get_concrete_function()
    else:
        step()
    return {"functions": list(found)}


def data(rank: int, steps: int = STEPS) -> tuple[Any, Any]:
    parts = [batch(rank, step) for step in range(steps)]
    x, y = (np.concatenate(column) for column in zip(*parts, strict=True))
    return x, y


def fitted(strategy: str, compile: Found | None = None, fit: Found | None = None) -> Any:
    """A model that was trained by ``fit`` on this rank's data."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9), strategy=strategy
    )
    model.compile(optimizer, "mse", **(compile or {}))
    x, y = data(hvd.rank())
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, **(fit or {}))
    return model


def plain(strategy: str) -> Found:
    model = fitted(strategy)
    return {"weights": weights_of(model), "iterations": int(model.optimizer.iterations)}


def several_steps_an_execution(strategy: str) -> Found:
    model = fitted(strategy, {"steps_per_execution": 4})
    return {"weights": weights_of(model), "iterations": int(model.optimizer.iterations)}


def run_eagerly(strategy: str) -> Found:
    return {"weights": weights_of(fitted(strategy, {"run_eagerly": True}))}


def xla_when_auto() -> Found:
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile="auto")
    return {"jit": bool(model.jit_compile)}


def custom_train_step(strategy: str) -> Found:
    class Own(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model()

        def call(self, x: Any, training: bool = False) -> Any:
            return self.inner(x, training=training)

        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = loss_of(self.inner, x, y)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    model = Own()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9), strategy=strategy
    )
    model.compile(optimizer)
    x, y = data(hvd.rank())
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return {"weights": weights_of(model)}


def overflow_on_one_rank(strategy: str) -> Found:
    """Under mixed_float16, Keras puts a LossScaleOptimizer around ours."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), strategy=strategy)
        model.compile(optimizer, "mse")
    finally:
        keras.config.set_dtype_policy("float64")
    x, y = data(hvd.rank())
    if hvd.rank() == hvd.size() - 1:
        x[5 * BATCH] = 1e30  # beyond float16
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    scaler = model.optimizer
    return {
        "class": type(scaler).__name__,
        "weights": weights_of(model),
        "scale": float(scaler.dynamic_scale),
        "iterations": int(scaler.inner_optimizer.iterations),
    }


def saved_and_loaded() -> Found:
    model = fitted("pipe-sgd")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.keras"
        model.save(file)
        without = keras.models.load_model(file)
        again = hvd.load_model(file, strategy="pipe-sgd")
    x, y = data(hvd.rank())
    slots = [np.array(each) for each in model.optimizer.variables]
    same = all(
        np.array_equal(a, np.array(b))
        for a, b in zip(slots, again.optimizer.variables, strict=True)
    )
    again.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return {
        "plain": f"{type(without.optimizer).__module__}.{type(without.optimizer).__name__}",
        "is plain": type(without.optimizer) is keras.optimizers.SGD,
        "iterations": int(without.optimizer.iterations),
        "same slots": same,
        "weights": weights_of(again),
        "iterations after": int(again.optimizer.iterations),
    }


def a_gradient_that_one_rank_lacks(strategy: str) -> Found:
    """Two heads; the last rank's loss uses the first one alone."""
    keras.utils.set_random_seed(3)
    body, first, second = (keras.layers.Dense(2) for _ in range(3))
    for layer in (body, first, second):
        layer.build((None, 2))
    variables = [*body.trainable_variables, *first.trainable_variables]
    variables += second.trainable_variables
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), strategy=strategy)
    x = tf.ones((3, 2), tf.float64) * (hvd.rank() + 1.0)
    last = hvd.rank() == hvd.size() - 1
    before = np.concatenate([np.array(v).ravel() for v in second.trainable_variables])
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(first(body(x)))
            if not last:
                loss += tf.reduce_sum(second(body(x)))
        gradients = tape.gradient(loss, variables)
        optimizer.apply(gradients, variables)
    optimizer.synchronize()
    after = np.concatenate([np.array(v).ravel() for v in second.trainable_variables])
    every = np.concatenate([np.array(v).ravel() for v in variables])
    return {"missing": gradients[-1] is None, "weights": every, "moved": after - before}


def embedding(strategy: str, as_dense: bool) -> Found:
    """Each rank looks up other rows."""
    keras.utils.set_random_seed(5)
    table = keras.layers.Embedding(12, 3)
    table.build()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.5), strategy=strategy, sparse_as_dense=as_dense
    )
    before = np.array(table.embeddings)

    @tf.function
    def step(rows: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(table(rows) ** 2)
        gradients = tape.gradient(loss, [table.embeddings])
        optimizer.apply(gradients, [table.embeddings])

    for number in range(3):
        step(tf.constant([hvd.rank(), hvd.rank() + number, 11]))
    optimizer.synchronize()
    return {"before": before, "after": np.array(table.embeddings)}


class MaxScaled:
    """A compressor of a user's own: 127 levels up to a message's largest value.

    Nothing else may travel with gradients: values far below the largest become zero.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        scale = tf.reduce_max(tf.abs(tensor)) / 127
        return tf.round(tf.math.divide_no_nan(tensor, scale)) * scale, None

    @staticmethod
    def decompress(tensor: Any, context: None) -> Any:
        return tensor


def compressed(name: str, strategy: str) -> Found:
    keras.utils.set_random_seed(7)
    codecs = {
        "none": hvd.Compression.none,
        "fp16": hvd.Compression.fp16,
        "bf16": hvd.Compression.bf16,
        "int8": hvd.Compression.int8,
        "int8 and feedback": hvd.Int8(chunk=16, error_feedback=True),
        "a user's own": MaxScaled,
    }
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.5), compression=codecs[name], strategy=strategy
    )
    model.compile(optimizer, "mse")
    x, y = data(hvd.rank())
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return {"weights": weights_of(model)}


def coded() -> Found:
    """A buffer that is averaged round after round, by a codec that keeps what it has lost."""
    codec = hvd.Int8(chunk=16, error_feedback=True)
    reduction = Reduction(compression=codec)
    feedback = reduction.feedback(CODED)

    @tf.function
    def average(flat: Any) -> Any:
        return reduction.reduce(flat, "coded", feedback)

    rounds = [tf.constant(coded_values(hvd.rank(), number)) for number in range(CODED_ROUNDS)]
    return {"rounds": [average(each).numpy() for each in rounds]}


def coded_values(rank: int, number: int) -> Any:
    """What a rank has in a round, float32."""
    return np.random.default_rng([rank, number]).standard_normal(CODED).astype(np.float32)


def one_update(**arguments: Any) -> Found:
    """What one gradient of rank + 1 does to a weight of 0, with a learning rate of 1."""
    weight = keras.Variable(np.zeros(3), name="weight")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **arguments)
    passes = arguments.get("backward_passes_per_step", 1)
    for number in range(passes):
        gradient = tf.constant([1.0, 2.0, 3.0], tf.float64) * (hvd.rank() + 1 + number)
        optimizer.apply([gradient], [weight])
    return {"weight": np.array(weight), "iterations": int(optimizer.iterations)}


def local_variable() -> Found:
    mine, shared = (keras.Variable(np.zeros(2), name=name) for name in ("mine", "shared"))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.register_local_var(mine)
    gradient = tf.ones(2, tf.float64) * (hvd.rank() + 1)
    optimizer.apply([gradient, gradient], [mine, shared])
    return {"mine": np.array(mine), "shared": np.array(shared)}


def in_groups(groups: int) -> Found:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), groups=groups)
    model.compile(optimizer, "mse")
    x, y = data(hvd.rank())
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return {"weights": weights_of(model), "buckets": len(optimizer.plan.buckets)}


def planned(both: bool) -> Found:
    """The planning callback by its own name, without a broadcast or beside one."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
    model.compile(optimizer, "mse")
    callbacks: list[Any] = [hvd.callbacks.PlanningCallback()]
    callbacks += [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if both else []
    plans: list[Plan] = []

    class Watch(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, number: int, logs: Any = None) -> None:
            plans.append(optimizer.plan)

    x, y = data(hvd.rank(), PLANNED_AFTER + 1)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[*callbacks, Watch()])
    return {"plans": plans, "weights": weights_of(model)}


def unlike_beginnings() -> Found:
    """The broadcast callback makes all ranks start as rank 0."""
    model = make_model()
    for each in model.trainable_variables:
        each.assign_add(each * 0 + hvd.rank())
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.05 * (1 + hvd.rank()), momentum=0.9), strategy="pipe-sgd"
    )
    model.compile(optimizer, "mse", metrics=["mae"])
    x, y = data(hvd.rank())
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]
    history = model.fit(
        x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=callbacks
    )
    return {"weights": weights_of(model), "mae": history.history["mae"]}


def learning_rates() -> Found:
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    x, y = data(hvd.rank(), 4)
    seen: list[float] = []

    class Watch(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, number: int, logs: Any = None) -> None:
            seen.append(float(self.model.optimizer.learning_rate))

    callbacks = [hvd.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2), Watch()]
    model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
    return {"rates": seen}


def through_a_tape(strategy: str, in_function: bool) -> Found:
    model = make_model()
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(model.trainable_variables)

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        tape = hvd_tf.DistributedGradientTape(tape, strategy=strategy)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    taken = tf.function(step) if in_function else step
    for number in range(STEPS):
        x, y = batch(hvd.rank(), number)
        taken(tf.constant(x), tf.constant(y))
    last = hvd_tf.drain_gradients(model.trainable_variables)
    if last is not None:
        optimizer.apply_gradients(zip(last, model.trainable_variables, strict=True))
    return {"weights": weights_of(model), "drained": last is not None}


def drained_in_the_middle() -> Found:
    """A tape under Pipe-SGD that goes on after a drain: two gradients of rank + 1, twice."""
    weight = tf.Variable(0.0)
    optimizer = keras.optimizers.SGD(1.0)
    for _ in range(2):
        for _ in range(2):
            with tf.GradientTape() as recorded:
                loss = weight * (hvd.rank() + 1.0)
            tape = hvd_tf.DistributedGradientTape(recorded, strategy="pipe-sgd")
            optimizer.apply_gradients([(tape.gradient(loss, [weight])[0], weight)])
        (last,) = hvd_tf.drain_gradients([weight])
        optimizer.apply_gradients([(last, weight)])
    return {"weight": float(weight)}


def tapes_of_all_kinds() -> Found:
    """Persistent, of one variable, of a structure, with sparse, missing and local gradients."""
    factor = hvd.rank() + 1.0
    w, v, unused = (tf.Variable([2.0, 3.0], name=name) for name in ("w", "v", "unused"))
    rows = tf.Variable(tf.ones((4, 2)), name="rows")
    with tf.GradientTape(persistent=True) as recorded:
        loss = factor * tf.reduce_sum(w * w)
        other = factor * tf.reduce_sum(v)
        looked = factor * tf.reduce_sum(tf.gather(rows, [hvd.rank()]))
    tape = hvd_tf.DistributedGradientTape(recorded)
    found: Found = {"one": np.array(tape.gradient(loss, w))}
    named = tape.gradient(loss, {"w": w, "unused": unused})
    found["named"] = np.array(named["w"])
    found["unused"] = named["unused"] is None
    found["again"] = np.array(tape.gradient(other, [v])[0])
    found["sparse"] = np.array(tf.convert_to_tensor(tape.gradient(looked, [rows])[0]))
    with tf.GradientTape() as recorded:
        loss = factor * (tf.reduce_sum(w) + tf.reduce_sum(v))
    tape = hvd_tf.DistributedGradientTape(recorded)
    tape.register_local_source(w)
    local, others = tape.get_local_and_global_gradients(loss, [w, v])
    found["local"] = np.array(local[0][1])
    found["global"] = np.array(others[0][1])
    return found


def checkpoint(strategy: str) -> Found:
    """Training goes on bit for bit from a checkpoint of each rank's own."""
    x, y = data(hvd.rank(), 2 * STEPS)

    def made() -> tuple[Any, Any, Any]:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.05, momentum=0.9),
            strategy=strategy,
            compression=hvd.Int8(chunk=16, error_feedback=True),
        )
        optimizer.build(model.trainable_variables)

        @tf.function
        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = loss_of(model, x, y)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)

        return model, optimizer, step

    def train(step: Any, first: int, last: int) -> None:
        for number in range(first, last):
            part = slice(number * BATCH, (number + 1) * BATCH)
            step(tf.constant(x[part]), tf.constant(y[part]))

    with tempfile.TemporaryDirectory() as folder:
        model, optimizer, step = made()
        train(step, 0, STEPS + 1)
        saver = tf.train.Checkpoint(model=model, optimizer=optimizer)
        path = saver.write(f"{folder}/own")
        train(step, STEPS + 1, 2 * STEPS)
        optimizer.synchronize()
        other, resumed, again = made()
        tf.train.Checkpoint(model=other, optimizer=resumed).read(path)
        train(again, STEPS + 1, 2 * STEPS)
        resumed.synchronize()
        plain_model, plain_optimizer = make_model(), keras.optimizers.SGD(0.05, momentum=0.9)
        plain_optimizer.build(plain_model.trainable_variables)
        tf.train.Checkpoint(model=plain_model, optimizer=plain_optimizer).read(path)
    return {
        "whole": weights_of(model),
        "resumed": weights_of(other),
        "iterations": int(plain_optimizer.iterations),
    }


def disagreeing(what: str) -> Found:
    """Every rank is told what differs, and who has what."""
    last = hvd.rank() == hvd.size() - 1
    try:
        if what == "strategy":
            hvd.DistributedOptimizer(
                keras.optimizers.SGD(0.1), strategy="pipe-sgd" if last else "merged-gradient"
            )
        elif what == "argument":
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), groups=0 if last else 1)
        elif what == "momenta":
            weight = keras.Variable(np.zeros(3), name="weight")
            plain = keras.optimizers.SGD(0.1, momentum=0.0 if last else 0.9)
            optimizer = hvd.DistributedOptimizer(plain, strategy=MOMENTA)
            optimizer.apply([tf.zeros(3, tf.float64)], [weight])
        else:
            weight = keras.Variable(np.zeros(4 if last else 3), name="weight")
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
            optimizer.apply([tf.zeros(weight.shape, tf.float64)], [weight])
    except (RanksDisagreeError, ValueError) as error:
        return {"kind": type(error).__name__, "text": str(error)}
    return {"kind": "", "text": ""}


def names() -> Found:
    """Which of Horovod's names ours lack."""

    def lacking(theirs: Any, ours: Any) -> list[str]:
        # Not what Horovod's own modules import for themselves.
        helpers = {"K", "inspect", "is_version_greater_equal_than", "keras", "tf", "version"}
        public = [name for name in dir(theirs) if not name.startswith("_")]
        return [n for n in public if n not in helpers | {"warnings"} and not hasattr(ours, n)]

    return {"tensorflow": lacking(stock, hvd_tf), "keras": lacking(stock_keras, hvd)}


CODECS = ("none", "fp16", "bf16", "int8", "int8 and feedback", "a user's own")
EXACT = ("merged-gradient", "pipe-sgd", "cocod:period=3")
MOMENTA = "cocod:period=3,momentum=average"
DISAGREEMENTS = ("strategy", "argument", "model", "momenta")
CASES = {
    **{f"plain {s}": (plain, s) for s in EXACT},
    **{f"several steps {s}": (several_steps_an_execution, s) for s in EXACT},
    **{f"eagerly {s}": (run_eagerly, s) for s in EXACT},
    **{f"custom step {s}": (custom_train_step, s) for s in EXACT},
    "xla": (xla_when_auto,),
    "functions of the eager step": (functions_of_a_step, False),
    "functions of the traced step": (functions_of_a_step, True),
    **{f"overflow {s}": (overflow_on_one_rank, s) for s in ("merged-gradient", "pipe-sgd")},
    "saved": (saved_and_loaded,),
    **{f"lacking {s}": (a_gradient_that_one_rank_lacks, s) for s in EXACT[:2]},
    "embedding sparse": (embedding, "merged-gradient", False),
    "embedding dense": (embedding, "merged-gradient", True),
    "embedding pipe-sgd": (embedding, "pipe-sgd", False),
    **{f"compressed {name} {s}": (compressed, name, s) for name in CODECS for s in EXACT},
    "coded": (coded,),
    "local": (local_variable,),
    "drained": (drained_in_the_middle,),
    "groups": (in_groups, 2),
    "planning": (planned, False),
    "planning twice": (planned, True),
    "beginnings": (unlike_beginnings,),
    "rates": (learning_rates,),
    **{
        f"tape {s} {mode}": (through_a_tape, s, mode == "function")
        for s in EXACT[:2]
        for mode in ("function", "eager")
    },
    "tapes": (tapes_of_all_kinds,),
    **{f"checkpoint {s}": (checkpoint, s) for s in (*EXACT, MOMENTA)},
    **{f"disagreeing {what}": (disagreeing, what) for what in DISAGREEMENTS},
    "names": (names,),
}
UPDATES = {
    "average": {},
    "sum": {"op": "Sum"},
    "predivide": {"gradient_predivide_factor": 2.0},
    "passes": {"backward_passes_per_step": 3},
    "averaged passes": {"backward_passes_per_step": 3, "average_aggregated_gradients": True},
}


def observations() -> dict[str, Found | Raised]:
    hvd.init()

    def updated(arguments: Found) -> Found:
        given = {key: hvd.Sum if value == "Sum" else value for key, value in arguments.items()}
        return one_update(**given)

    cases: dict[str, Any] = {
        name: (lambda f=function, a=arguments: f(*a))
        for name, (function, *arguments) in CASES.items()
    }
    cases |= {f"update {name}": (lambda a=given: updated(a)) for name, given in UPDATES.items()}
    return run_cases(cases)
