"""``merged-gradient:overlap=forward`` under Keras' ``fit``: all who look see the barrier's values.

What is left for the next step is compared, to the last bit, with runs that wait for all messages.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import keras
import keras_reference
import numpy as np
import pytest
import tensorflow as tf
from keras_problem import BATCH, OPTIMIZERS, STEPS, batch, loss_of, make_model, weights_of
from keras_training import (
    Record,
    checks,
    data,
    embedding_data,
    embedding_model,
    fit,
    forward,
    forward_plan,
    raced,
    seen,
    short_trials,
)
from keras_ways_to_look import METADATA, READS, WAYS, Script, look
from logged import Lines
from on_ranks import gather, on_ranks

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.planning.plan import Plan
from hvd_pipe.runtime.gradient_index import SKIP_STEPS
from hvd_pipe.tensorflow.keras import callbacks
from hvd_pipe.tensorflow.keras.late_updates import begin_step
from hvd_pipe.tensorflow.messages.reduction import Reduction
from hvd_pipe.tensorflow.pending import due
from hvd_pipe.tensorflow.strategies import replan
from hvd_pipe.tensorflow.strategies.replan import Replan

FORWARD = "forward"
"""Of `keras_training.forward`'s plan."""
TRIED = "merged-gradient:overlap=forward"
BARRIER = "merged-gradient:bucket_bytes=200"
"""A given size: nothing is measured, so that the step is traced once."""
FIRST_LAYER = 35
"""Weights, which are never late."""
TWO = hvd.ProcessSet([0, 1])

two = on_ranks(2, init=hvd.init)


def init_with_two() -> None:
    hvd.init(process_sets=[TWO])


three = on_ranks(3, init=init_with_two)


def compiled(
    strategy: str,
    optimizer: Any = "sgd",
    made: Callable[[], Any] = make_model,
    compile_options: dict[str, Any] | None = None,
    is_scaled: bool = False,
    **wrap: Any,
) -> Any:
    model = made()
    plain = OPTIMIZERS[optimizer]() if isinstance(optimizer, str) else optimizer()
    chosen = forward(model) if strategy == FORWARD else strategy
    distributed = hvd.DistributedOptimizer(plain, strategy=chosen, **wrap)
    if is_scaled:
        distributed = keras.optimizers.LossScaleOptimizer(distributed, initial_scale=8.0)
    model.compile(distributed, "mse", **(compile_options or {}))
    return model


class Run(NamedTuple):
    """What a model came to under ``fit``, and what was seen after every batch."""

    records: Any
    weights: Any
    history: dict[str, list[float]]
    said: str
    state: Any


def run(model: Any, *others: Any, given: Any = None, steps: int = STEPS, **options: Any) -> Run:
    record, lines = Record(), Lines()
    history = fit(model, *(given or data(0, steps)), record, *others, **options)
    lines.taken()
    variables = [*model.variables, *model.optimizer.variables]
    return Run(
        np.array(record.weights),
        weights_of(model),
        history.history,
        "\n".join(lines.lines),
        np.concatenate([np.ravel(each.numpy()) for each in variables]),
    )


@functools.cache
def deferred(optimizer: str) -> Run:
    return run(compiled(FORWARD, optimizer))


@functools.cache
def barrier(
    optimizer: Any = "sgd", steps: int = STEPS, made: Any = make_model, **wrap: Any
) -> Run:
    return run(compiled(BARRIER, optimizer, made, **wrap), steps=steps)


def after_batches(call: Callable[[int], object]) -> Any:
    return keras.callbacks.LambdaCallback(on_train_batch_end=lambda number, logs: call(number))


def at_epoch_ends(call: Callable[[], object]) -> Any:
    return keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: call())


def assert_alike(mine: Run, other: Run) -> None:
    assert np.array_equal(mine.weights, other.weights)
    assert np.array_equal(mine.state, other.state)
    assert mine.history == other.history


def trajectory(optimizer: str) -> Any:
    return keras_reference.trajectory(2, "merged-gradient", optimizer)[hvd.rank()]


@two
def test_each_step_is_the_equation() -> None:
    """Between two calls, late layers are one update old in memory, and in no step."""
    wanted, run = trajectory("adam"), deferred("adam")
    records, late = run.records, slice(FIRST_LAYER, None)
    assert np.abs(records[:, :FIRST_LAYER] - wanted[:-1, :FIRST_LAYER]).max() < 1e-12
    begun, end = SKIP_STEPS, len(records) - 1
    assert np.abs(records[:begun, late] - wanted[:begun, late]).max() < 1e-12
    old = wanted[begun - 1 : end - 1, late]
    assert np.abs(records[begun:end, late] - old).max() < 1e-12
    assert np.abs(wanted[begun:end, late] - old).max() > 1e-4
    assert np.abs(run.weights - wanted[-1]).max() < 1e-12


def of_many_kinds() -> Any:
    """Layers that are frozen, normalized, used twice, and constrained."""
    keras.utils.set_random_seed(7)
    dense, limit = keras.layers.Dense, keras.constraints.MaxNorm(0.5)
    x = inputs = keras.layers.Input((6,))
    x = dense(5, "tanh")(x)
    x = keras.layers.BatchNormalization(momentum=0.5)(x)
    x = dense(5, "tanh", trainable=False)(x)
    middle = dense(5, "tanh")
    x = middle(middle(x))
    return keras.Model(inputs, dense(3, kernel_constraint=limit)(x))


def rates(strategy: str) -> Run:
    """Another one after every batch."""
    model = compiled(strategy, "momentum")
    return run(
        model,
        after_batches(
            lambda number: setattr(model.optimizer, "learning_rate", 0.1 / (number + 2))
        ),
    )


def executions(strategy: str) -> Run:
    """Epochs of eight batches, three of which are an execution; a callback before ours reads."""
    ends: list[Any] = []
    model = compiled(strategy, compile_options={"steps_per_execution": 3})
    read = at_epoch_ends(lambda: ends.append(weights_of(model)))
    ours = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    history = model.fit(*data(0, 8), epochs=3, callbacks=[read, ours], **options).history
    assert len(ends) == 3
    return Run(ends, weights_of(model), history, "", np.array(ends))


def steps_of_ones_own(strategy: str) -> Run:
    """Between two batches of fit; and gradients of before the last update, which are zeros."""
    model, zeros = compiled(strategy), make_model().trainable_variables
    for each in zeros:
        each.assign(tf.zeros(each.shape, "float64"))
    step = functools.partial(apply_by_hand, model, 0)
    graph = tf.function(step, autograph=False)

    def nothing() -> None:
        model.optimizer.apply([each.value.read_value() for each in zeros])

    between = {11: step, 13: graph, 15: graph, 17: nothing}
    return run(model, *(Record(at, call) for at, call in between.items()))


def callbacks_of_keras(strategy: str) -> Run:
    """One of rank 0 saves within epochs, others change rates, and put the best weights back."""
    model, other, saved = compiled(strategy, "momentum"), make_model(), []
    own = [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.9 * rate),
        keras.callbacks.EarlyStopping("loss", restore_best_weights=True, patience=1),
        keras.callbacks.TerminateOnNaN(),
    ]
    with tempfile.TemporaryDirectory() as folder:
        if hvd.rank() == 0:
            files = f"{folder}/{{epoch}}-{{batch}}.weights.h5"
            saver = keras.callbacks.ModelCheckpoint(files, save_freq=3, save_weights_only=True)
            own.append(saver)
        found = run(model, *own, steps=10, epochs=3, validation_data=batch(0, 99))
        for path in sorted(Path(folder).iterdir()):
            other.load_weights(path)
            saved.append(weights_of(other))
    assert len(saved) == (10 if hvd.rank() == 0 else 0)
    return found._replace(state=np.array([found.weights, *saved]))


SCRIPTS: dict[str, Callable[[str], Run]] = {
    "adam": lambda strategy: deferred("adam") if strategy == FORWARD else barrier("adam"),
    "layers, sum, fp16": lambda strategy: run(
        compiled(strategy, made=of_many_kinds, op=hvd.Sum, compression=hvd.Compression.fp16)
    ),
    "rates": rates,
    "executions": executions,
    "steps of one's own": steps_of_ones_own,
    "callbacks of Keras": callbacks_of_keras,
}


@two
@pytest.mark.parametrize("name", SCRIPTS)
def test_it_ends_as_with_the_barrier_bit_for_bit(name: str) -> None:
    mine, other = SCRIPTS[name](FORWARD), SCRIPTS[name](BARRIER)
    assert_alike(mine, other)
    if name != "executions":
        assert not np.array_equal(mine.records, other.records)  # messages were left for later


class Look(keras.callbacks.Callback):  # type: ignore[misc]
    """By step, a way to look after it; notes whether updates are late before that, and after."""

    def __init__(self, model: Any, looks: Mapping[int, str], folder: Path) -> None:
        super().__init__()
        self.script = Script(model, *batch(hvd.rank(), 999), folder)
        self._looks = looks
        self.before: list[bool] = []
        self.after: list[bool] = []

    def on_train_batch_end(self, number: int, logs: Any = None) -> None:
        self.before.append(self._is_ahead())
        if number in self._looks:
            look(self.script, self._looks[number])
        self.after.append(self._is_ahead())

    def _is_ahead(self) -> bool:
        return any(session.engine.is_ahead() for session in self.model.optimizer._hvd_pipe)


def looked(strategy: str, looks: Mapping[int, str], steps: int) -> tuple[Look, Run]:
    model = compiled(strategy, "momentum")
    model.optimizer.build(model.trainable_variables)
    with tempfile.TemporaryDirectory() as folder, short_trials(), raced():
        looking = Look(model, looks, Path(folder))
        return looking, run(model, looking, steps=steps)


@two
@pytest.mark.parametrize("is_alone", [False, True], ids=["while plans are tried", "rank 0 alone"])
def test_ways_to_look_in_turn_are_exact(is_alone: bool) -> None:
    """The first ways meet, in trials, steps that wait for all messages, one without, and its end.

    Where one rank alone reads, the other one sends its part in its next step.
    """
    names, first = (list(READS), SKIP_STEPS + 1) if is_alone else ([*[*WAYS][-12:], *WAYS], 0)
    steps = first + 2 * len(names) + 1
    looks = {first + 2 * i: each for i, each in enumerate(names)}
    if is_alone and hvd.rank():
        looks = {}
    mine, ended = looked(FORWARD if is_alone else TRIED, looks, steps)
    other, wanted = looked(BARRIER, looks, steps)
    assert_alike(ended, wanted)
    pairs = zip(mine.script.log, other.script.log, strict=True)
    assert [(one, two) for one, two in pairs if one != two] == []
    for one, two in zip(mine.script.models, other.script.models, strict=True):
        assert all(map(np.array_equal, one.get_weights(), two.get_weights()))
    begun = SKIP_STEPS if is_alone else SKIP_STEPS + 3 * 3
    if not is_alone:
        assert all(mine.before[begun - 3 : begun - 1])  # and the trial ends
    assert all(mine.before[begun:-1])
    quiet = [step for step in range(begun, steps - 1) if looks.get(step) in (None, *METADATA)]
    assert quiet
    assert [step for step in quiet if not mine.after[step]] == []


class FailedError(Exception):
    """A message or a callback has failed."""


@two
def test_after_a_message_that_fails_in_a_read_the_update_is_still_due() -> None:
    model, failed, found = compiled(FORWARD), mock.Mock(side_effect=FailedError), []

    def read() -> None:
        for _ in range(2):
            with mock.patch.object(Reduction, "reduce", failed), pytest.raises(FailedError):
                weights_of(model)
        found.append(weights_of(model))

    fit(model, *data(), Record(12, read))
    assert np.array_equal(found[0], barrier().records[11])
    assert failed.call_count == 2


def fit_fails(model: Any) -> None:
    """A callback ends fit on all ranks after its tenth batch, and leaves an update."""
    with pytest.raises(FailedError):
        fit(model, *data(), Record(10, mock.Mock(side_effect=FailedError)))


@two
def test_steps_after_an_exception_that_ends_fit_are_whole() -> None:
    """A callback ends fit; nobody watches the steps after that."""
    model = compiled(FORWARD)
    fit_fails(model)
    model.optimizer.synchronize()
    weights = [weights_of(model)]
    for step in range(10, 13):
        model.train_on_batch(*batch(hvd.rank(), step))
        weights.append(weights_of(model))
    assert np.array_equal(weights, barrier().records[9:13])


@two
def test_who_looks_at_one_model_waits_for_no_update_of_another() -> None:
    """Rank 0 alone looks at the second model after a fit of the first has failed."""
    other, model = compiled(FORWARD), compiled(FORWARD)
    fit(other, *data(0, 8))
    fit_fails(model)
    assert len(due) == 1
    if hvd.rank() == 0:
        weights_of(other)
        other.predict(batch(0, 0)[0], verbose=0)
    assert len(due) == 1
    weights_of(model)
    assert not due


def apply_by_hand(model: Any, number: int) -> None:
    """A step outside of fit, on the batch of this number."""
    with tf.GradientTape() as tape:
        loss = loss_of(model, *batch(hvd.rank(), number))
    variables = model.trainable_variables
    model.optimizer.apply(tape.gradient(loss, variables), variables)


def put(weights: Any, model: Any) -> None:
    for each in model.trainable_variables:
        value, weights = np.split(weights, [np.size(each)])
        each.assign(value.reshape(each.shape))


@functools.cache
def of_epochs(strategy: str, is_length_known: bool) -> Any:
    """Three epochs of eight batches; each ends by a ninth step where Keras does not know that.

    Rank 0 alone reads at their ends, before our callback does.
    """
    batches = [batch(hvd.rank(), step) for step in range(8)]
    spec = tuple(tf.TensorSpec([BATCH, width], tf.float64) for width in (6, 3))
    dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
    if strategy == "tape":
        return by_a_tape(dataset, 8 if is_length_known else 9)
    if is_length_known:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(8))
    model = compiled(strategy, "momentum")
    ends: list[Any] = []
    read = at_epoch_ends(lambda: hvd.rank() or ends.append(weights_of(model)))
    ours = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(dataset, epochs=3, verbose=0, callbacks=[read, ours])
    return np.array([*ends, weights_of(model)])


def by_a_tape(dataset: Any, steps: int) -> Any:
    """Three epochs of ``pipe-sgd``, of so many steps that take a batch themselves."""
    model, optimizer = make_model(), OPTIMIZERS["sgd"]()
    optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
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


@two
@pytest.mark.parametrize("name", ["forward", "merged-gradient", "pipe-sgd", "tape"])
def test_a_step_whose_data_has_run_out_changes_no_weights(name: str) -> None:
    strategy = BARRIER if name == "merged-gradient" else name
    known = BARRIER if name == "forward" else strategy
    assert np.array_equal(of_epochs(strategy, False), of_epochs(known, True))


@two
def test_a_callback_before_ours_reads_whole_weights_where_training_stops() -> None:
    """At the end of an epoch of eight batches, after its sixth one."""
    model, ends = compiled(FORWARD), []
    others = [
        after_batches(lambda number: setattr(model, "stop_training", number == 5)),
        at_epoch_ends(lambda: ends.append(weights_of(model))),
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    ]
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    model.fit(*data(0, 8), epochs=3, callbacks=others, **options)
    assert np.array_equal(ends, barrier().records[5:6])


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


@two
def test_a_second_model_keeps_the_barrier() -> None:
    """It has the layers and the optimizer of one that leaves updates to the next step."""
    model, lines = compiled(FORWARD), Lines()
    fit(model, *data(0, 8))
    other = Averaged(model.layers)
    other.compile(model.optimizer, "mse")
    fit(other, *data(8, 16))
    lines.taken()
    if hvd.rank() == 0:
        assert "updates stay in their step, as a step uses" in "\n".join(lines.lines)
    wanted = barrier().records[:16]
    means = functools.reduce(lambda mean, each: 0.5 * mean + 0.5 * each, wanted[7:])
    assert np.array_equal(means, np.concatenate([np.ravel(each) for each in other.means]))
    assert np.array_equal(weights_of(other), wanted[-1])


@two
def test_variables_that_are_no_longer_trained_send_nothing_more() -> None:
    """The first step of the new graph finishes what is pending; it is traced anew without.

    Tensors of messages are not kept.
    """
    model = compiled(TRIED)
    optimizer = model.optimizer
    fit(model, *data(0, 2))
    next(iter(optimizer._hvd_pipe)).engine.adopt(forward_plan(model))  # as after the trials
    optimizer._hvd_pipe.watcher._open = False
    fit(model, *data(2, 8))
    assert not any(session.engine._trace.sent for session in optimizer._hvd_pipe)
    model.layers[0].trainable = False
    model.compile(optimizer, "mse")
    reduce = Reduction.reduce
    with mock.patch.object(Reduction, "reduce", autospec=True, side_effect=reduce) as reduced:
        fit(model, *data(8, 16))
    sent = [each.args[2] for each in reduced.call_args_list]
    last = max(i for i, name in enumerate(sent) if name.endswith("gradients.0"))
    assert [name for name in sent[:last] if "late" in name]
    assert not [name for name in sent[last - 1 :] if "late" in name]
    plain = compiled(BARRIER)
    put(barrier().records[7], plain)
    plain.layers[0].trainable = False
    plain.compile(plain.optimizer, "mse")
    fit(plain, *data(8, 16))
    assert np.array_equal(weights_of(model), weights_of(plain))


@two
def test_a_commit_has_the_gradients_of_all_ranks() -> None:
    """They go on from rank 0's, which is of no use to others where it is a gradient."""
    model = compiled(FORWARD, "adam")
    model.optimizer.build(model.trainable_variables)
    state = hvd.elastic.KerasState(model, batch=0)
    fit(model, *data(0, 15), Record(10, state.commit))
    state.restore()
    state.sync()
    fit(model, *data(10))
    assert np.array_equal(weights_of(model), barrier("adam").weights)


def loader(optimizer: str) -> tuple[Any, Any]:
    """Return a model, and what reads a checkpoint into it."""
    model = compiled(FORWARD, optimizer)
    model.optimizer.build(model.trainable_variables)
    return model, tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def save(folder: Path, optimizer: str) -> tuple[Any, Any, Any]:
    """Return a model that has been trained, what saves it, and its weights in memory.

    "pending" is saved after batch 10, and "finished" after batch 14, where all is synchronized.
    """
    (model, checkpoint), record = loader(optimizer), Record()

    def finish() -> None:
        model.optimizer.synchronize()
        checkpoint.write(str(folder / "finished"))

    def write() -> None:
        with mock.patch.dict(due, clear=True):  # as older versions did, which left it pending
            checkpoint.write(str(folder / "pending"))

    fit(model, *data(), record, Record(10, write), Record(14, finish))
    return model, checkpoint, np.array(record.weights)


@two
def test_a_checkpoint_has_what_is_still_to_come(tmp_path: Path) -> None:
    """Before it is made, the weights that are read are those of between two calls.

    An optimizer that trains goes back to a checkpoint, too.
    """
    saved, saver, records = save(tmp_path, "adam")
    whole = weights_of(saved)
    assert np.abs(whole - trajectory("adam")[-1]).max() < 1e-12
    model, checkpoint = loader("adam")
    checkpoint.read(str(tmp_path / "pending"))
    read = weights_of(model)
    assert np.array_equal(read, records[9])
    assert np.abs(read - trajectory("adam")[9]).max() > 1e-4
    # A gradient of a step without a graph was computed before that update.
    with pytest.raises(hvd.HvdPipeError, match=r"call optimizer\.synchronize\(\) on all ranks"):
        apply_by_hand(model, 10)
    model.optimizer.synchronize()
    for number in range(10, 12):
        apply_by_hand(model, number)
    assert np.array_equal(weights_of(model), barrier("adam").records[11])
    for its_model, its_checkpoint in ((model, checkpoint), (saved, saver)):
        its_checkpoint.read(str(tmp_path / "pending"))
        fit(its_model, *data(10))
        assert np.array_equal(weights_of(its_model), whole)
        its_checkpoint.read(str(tmp_path / "finished"))
        assert np.abs(weights_of(its_model) - trajectory("adam")[13]).max() < 1e-12
        fit(its_model, *data(14))
        assert np.array_equal(weights_of(its_model), whole)
    # One rank alone loads it between two calls: an error on all.
    if hvd.rank() == 0:
        saver.read(str(tmp_path / "pending"))
    with pytest.raises(hvd.RanksDisagreeError, match="load the checkpoint on all ranks"):
        fit(saved, *data(10))


@two
def test_under_check_mode_a_read_that_is_too_early_is_nan(tmp_path: Path) -> None:
    """Also in a checkpoint, whose run goes on with the right weights."""
    with checks(0):
        saved, _, records = save(tmp_path, "sgd")
        model, checkpoint = loader("sgd")
        checkpoint.read(str(tmp_path / "pending"))
        read = weights_of(model)
        fit(model, *data(10))
    records = records[SKIP_STEPS:-1]
    assert np.isfinite(records[:, :FIRST_LAYER]).all()
    assert np.isnan(records[:, FIRST_LAYER:]).all()
    assert np.isnan(read[FIRST_LAYER:]).all()
    for end in (saved, model):
        assert np.abs(weights_of(end) - trajectory("sgd")[-1]).max() < 1e-12


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


# By name: an optimizer that keeps the barrier, and why.
KEEPING: dict[str, tuple[Any, str]] = {
    "clipped": ("clipped", "global_clipnorm needs all gradients at once"),
    "own clipping": (lambda: OwnClipping(0.1), "OwnClipping._clip_gradients() is its own"),
    "own decay": (lambda: OwnDecay(0.1), "OwnDecay._apply_weight_decay() is its own"),
    "averaged": ("averaged", "use_ema averages all weights after each step"),
    "accumulating": ("accumulating", "gradients of several passes are summed up"),
    "nadam": (lambda: keras.optimizers.Nadam(0.01), "Nadam._backend_update_step() is its own"),
}


@two
@pytest.mark.parametrize("name", KEEPING)
def test_an_optimizer_that_needs_the_barrier_is_known(name: str) -> None:
    optimizer, reason = KEEPING[name]
    model = compiled(FORWARD, optimizer)
    model.optimizer.build(model.trainable_variables)
    assert reason in (callbacks.problem(model, model.optimizer) or "")


def rows(strategy: str) -> Run:
    """The rows of an embedding travel by themselves, and a plan of the others is taken."""

    def plan(tried: Any, gradients: Any) -> Plan:
        *others, last = range(len(gradients.names))
        return Plan(tuple((name,) for name in gradients.names), "given", order=(last, *others))

    with short_trials(), mock.patch.object(replan, "deferring_plan", plan):
        return run(compiled(strategy, made=embedding_model), given=embedding_data())


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


# By name: arguments of `compiled`, and why a model that is made so keeps the barrier.
REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "own clipping": ({"optimizer": lambda: OwnClipping(0.1)}, KEEPING["own clipping"][1]),
    "twice": (
        {"made": lambda: Twice(make_model().layers)},
        "a step applies gradients more than once",
    ),
    "eager": ({"compile_options": {"run_eagerly": True}}, "the model runs eagerly"),
    "one rank": ({}, "as of its own"),
    "scaled": ({"is_scaled": True}, "a LossScaleOptimizer decides"),
    "used after": ({"made": lambda: Averaged(make_model().layers)}, "a step uses"),
    "int8": (
        {"compression": hvd.Compression.int8},
        "compressed messages have residuals of their own",
    ),
    "sparse": ({}, "is sparse (sparse_as_dense=True sends a dense one)"),
}


@two
@pytest.mark.parametrize("name", REASONS)
def test_the_barrier_stays_with_the_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a rank differs, all keep the barrier."""
    options, reason = REASONS[name]
    if name == "one rank":
        problem = None if hvd.rank() == 0 else "of its own"
        monkeypatch.setattr(callbacks, "problem", lambda *_: problem)
    if name == "sparse":
        mine, other = rows(TRIED), rows(BARRIER)
    else:
        mine = run(compiled(FORWARD, **options))
        others = options if name in ("own clipping", "twice") else {}
        other = run(compiled(BARRIER, **others)) if others else barrier()
    if hvd.rank() == 0:
        assert mine.said.count("updates stay in their step") == 1
        assert reason in mine.said
    # A sum over all gradients may be in another order, and a code has one scale a message.
    limit = 0.05 if name == "int8" else 1e-14
    assert np.abs(mine.records - other.records).max() < limit


@two
def test_steps_of_ones_own_keep_the_barrier_and_say_so_once() -> None:
    model, lines = make_model(), Lines()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](), strategy=forward(model))

    @tf.function(autograph=False)
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    for number in range(6):
        step(*map(tf.constant, batch(hvd.rank(), number)))
        assert np.abs(weights_of(model) - trajectory("sgd")[number]).max() < 1e-12
    lines.taken()
    said = "\n".join(lines.lines)
    assert said.count("updates stay in their step") == (hvd.rank() == 0)


@two
def test_ranks_that_run_eagerly_alone_are_refused_on_all() -> None:
    model = compiled(FORWARD, compile_options={"run_eagerly": hvd.rank() == 1})
    with pytest.raises(hvd.RanksDisagreeError, match="ranks disagree on run_eagerly"):
        fit(model, *data())


@two
def test_a_step_that_no_call_of_fit_watches_is_whole() -> None:
    """After a call of fit that leaves messages, steps that nobody watches; rank 0 joins.

    Neither another call of fit without the callback, nor train_on_batch, nor a join.
    """

    def trained(strategy: str) -> tuple[Any, Any, Any, Any]:
        model = compiled(strategy)
        first, record, again = Record(), Record(), Record()
        fit(model, *data(0, 8), first)
        x, y = data(8, 12)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[record])
        for step in range(12, 14 + 2 * hvd.rank()):
            model.train_on_batch(*batch(hvd.rank(), step))
            record.weights.append(weights_of(model))
        last = int(hvd_tf.join())
        variables = [*model.variables, *model.optimizer.variables]
        hvd_tf.broadcast_variables(variables, root_rank=last)
        fit(model, *data(16, 20), again)
        return first.weights, record.weights, again.weights, weights_of(model)

    mine, other = trained(FORWARD), trained(BARRIER)
    assert not np.array_equal(mine[0], other[0])
    assert np.array_equal(mine[1], other[1])
    assert not np.array_equal(mine[2], other[2])
    assert np.array_equal(mine[3], other[3])


@two
def test_a_layer_waits_for_its_own_messages_alone() -> None:
    """In the order 0 1 0 2 | 1 0 of buckets, of which the first layer has the last."""
    model = compiled(FORWARD)
    optimizer = model.optimizer
    fit(model, *data(0, 8))
    x, y = (tf.constant(each) for each in batch(hvd.rank(), 0))

    def step() -> None:
        begin_step(optimizer)
        model.train_step((x, y))

    tag = optimizer._hvd_pipe.tag
    graph = tf.function(step, autograph=False).get_concrete_function().graph

    def label(operation: Any) -> str:
        """The name of the message that this is, or that a branch of it sends; else nothing."""
        is_condition = operation.type in ("If", "StatelessIf")
        names = ("then_branch", "else_branch") if is_condition else ()
        branches = [graph._get_function(operation.get_attr(each).name).graph for each in names]
        inside = [each for branch in branches for each in branch.get_operations()]
        sent = [each for each in [operation, *inside] if each.type == "HorovodAllreduce"]
        return str(sent[0].name.rpartition(f"{tag}.0.")[2]) if sent else ""

    def messages_before(operation: Any) -> set[str]:
        found, left = {operation}, [operation]
        while left:
            one = left.pop()
            more = {*one.control_inputs, *(each.op for each in one.inputs)} - found
            found |= more
            left += more
        return {label(each) for each in found} - {""}

    operations = graph.get_operations()
    multiplied = [each for each in operations if each.type == "MatMul" and "grad" not in each.name]
    layers = [messages_before(each) for each in multiplied[: len(model.layers)]]
    messages = {label(each): messages_before(each) for each in operations if label(each)}
    late = {"late.4", "late.5"}
    assert layers == [set(), {"late.4"}, late]
    assert set(messages) == late | {f"gradients.{place}" for place in range(4)}
    assert messages["late.5"] == {"late.5"}  # two may be on their way
    assert messages["gradients.0"] - late == {"gradients.0"}
    assert messages["gradients.2"] - late == {"gradients.2", "gradients.0"}
    assert messages["gradients.3"] - late == {"gradients.3", "gradients.1"}


def is_barriers(records: Any, first: int) -> Any:
    """By step, whether these records, from step ``first`` on, are those with the barrier."""
    wanted = barrier("sgd", STEPS if first + len(records) <= STEPS else 42).records
    return (np.array(records) == wanted[first : first + len(records)]).all(axis=1)


@two
@pytest.mark.parametrize(
    ("is_faster", "barriers", "forward_s"),
    [(True, [13.0, 12.0, 14.0], 11.0), (False, [13.0, 12.0], 12.5)],
    ids=["faster", "slower"],
)
def test_what_was_faster_on_the_slowest_rank_stays(
    is_faster: bool, barriers: list[float], forward_s: float, tmp_path: Path
) -> None:
    """Steps with the barrier, and without it, take so many seconds on the slowest rank.

    The trials change nothing that is computed, and end once. Another model goes on from there with
    the plan that stayed, and tries none. The faster case has trials of the true length, the other
    one has short ones.
    """
    # On the first rank, a step without the barrier is the fastest.
    steps = [*barriers, 1.0 if hvd.rank() == 0 else forward_s]
    with contextlib.nullcontext() if is_faster else short_trials():
        a_plan = replan.SETTLE_STEPS + replan.TRIAL_STEPS
        begin = SKIP_STEPS + replan.PLANS * a_plan
        end = begin + a_plan  # of the trial without the barrier
        model, other = compiled(TRIED), compiled(TRIED)
        with seen(steps.__getitem__):
            trials = run(model, steps=end + 3)
        plan = model.optimizer.plan
        assert gather(plan.to_json()) == [plan.to_json()] * 2
        assert (plan.order is not None) == is_faster
        assert [seconds for _, seconds in plan.tried] == barriers
        assert [seconds for _, seconds in plan.tried_forward] == [forward_s]
        same = is_barriers([*trials.records[:-1], trials.weights], 0)
        assert same[:begin].all()
        assert not same[begin : end - 1].any()
        assert same[end + 1 : -1].all() == (not is_faster)
        assert same[-1]
        other.optimizer.build(other.trainable_variables)
        ours, theirs = (
            tf.train.Checkpoint(model=each, optimizer=each.optimizer) for each in (model, other)
        )
        theirs.read(ours.write(str(tmp_path / "own")))
        record, race = Record(), mock.Mock(return_value=True)
        with mock.patch.object(Replan, "_take_next", race):
            fit(other, *data(end + 3, end + 3 + a_plan + 6), record)
    for key in ("order", "tried", "tried_forward"):  # names are of another model
        assert getattr(other.optimizer.plan, key) == getattr(plan, key)
    assert not race.called
    same = is_barriers(record.weights, len(trials.records))
    assert same[:SKIP_STEPS].all()
    assert same[SKIP_STEPS:-1].all() == (not is_faster)
    assert same[-1]
    if is_faster:  # a session is done with its trial while another one's goes on
        [session] = model.optimizer._hvd_pipe
        assert model.optimizer._hvd_pipe.watcher._take_next(session.engine)
        assert model.optimizer.plan == plan


@two
def test_a_trial_does_not_go_on_where_updates_must_not_wait_any_more() -> None:
    """A call of fit ends within the trial without the barrier; rank 0 objects in the next one."""
    model, record = compiled(TRIED), Record()
    problem = "of its own" if hvd.rank() == 0 else None
    with short_trials(), raced():
        fit(model, *data(0, 10))
        assert model.optimizer.plan.order is not None
        with mock.patch.object(callbacks, "problem", return_value=problem):
            fit(model, *data(10, 18), record)
    assert is_barriers(record.weights, 10).all()
    assert model.optimizer.plan.order is None


WARM_UP = 14
"""Batches of an epoch, in which a trial begins."""


def warmed_up(optimizer: str, strategy: str) -> tuple[list[bool], Any]:
    """Return before which batches of two epochs updates were late, and the weights."""
    late: list[bool] = []
    model = compiled(strategy, optimizer)

    def note(number: int, logs: Any) -> None:
        late.append(any(each.engine.is_ahead() for each in model.optimizer._hvd_pipe))

    warmup = hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=1)
    noting = keras.callbacks.LambdaCallback(on_train_batch_begin=note)
    fit(model, *data(0, WARM_UP), warmup, noting, epochs=2)
    return late, weights_of(model)


@two
def test_a_warm_up_finishes_updates_for_velocities_alone() -> None:
    """And a trial in which it did so begins anew: it ends long after its first batch.

    A warm-up changes nothing that is computed.
    """
    late, weights = warmed_up("sgd", FORWARD)
    assert any(late[:WARM_UP])
    assert any(late[WARM_UP:])
    assert np.array_equal(weights, warmed_up("sgd", BARRIER)[1])
    with short_trials(), raced() as ends:
        late, weights = warmed_up("momentum", TRIED)
    assert not any(late[:WARM_UP])
    assert any(late[WARM_UP:])
    assert ends[-1] == WARM_UP - 1 + 3  # batches of a trial
    assert np.array_equal(weights, warmed_up("momentum", BARRIER)[1])


@two
def test_a_variable_whose_update_a_shutdown_has_left_out_is_refused() -> None:
    """The last test of these ranks: MPI cannot be started again."""
    model = compiled(FORWARD)
    fit_fails(model)
    hvd.shutdown()
    for read in (lambda: weights_of(model), lambda: model.predict(batch(0, 0)[0], verbose=0)):
        with pytest.raises(hvd.HvdPipeError, match="lacks its last update"):
            read()


@three
def test_a_rank_outside_of_the_process_set_is_not_asked() -> None:
    """It trains by itself, also in another call of fit."""
    model = compiled(FORWARD, process_set=TWO)
    fit(model, *data(0, 12))
    fit(model, *data(12))
    if hvd.rank() < 2:
        assert np.abs(weights_of(model) - trajectory("sgd")[-1]).max() < 1e-12
