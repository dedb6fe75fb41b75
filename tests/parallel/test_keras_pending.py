"""overlap=forward in Keras is exact for whoever looks: equal to the last bit to plain training.

One process that averages the gradients of both ranks' batches, with Keras' own optimizer, is what
each run is compared with. It runs the same callbacks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_problem import BATCH, batch, make_model, weights_of
from keras_training import data, fit, forward, raced, short_trials
from keras_ways_to_look import METADATA, READS, WAYS, Script, look
from on_ranks import on_ranks

import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.runtime.gradient_index import SKIP_STEPS
from hvd_pipe.tensorflow.messages.reduction import Reduction
from hvd_pipe.tensorflow.pending import due

pytestmark = on_ranks(2, init=hvd.init)

TRIED = "merged-gradient:overlap=forward"


def plain_optimizer() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


Looks = Mapping[int, str]
"""By step, the way to look after it."""


def in_turn(names: Sequence[str], first: int, every: int) -> Looks:
    """All ways in turn, from a step on, every so many steps."""
    return {first + every * i: name for i, name in enumerate(names)}


class Look(keras.callbacks.Callback):  # type: ignore[misc]
    """Looks at the model after some batches, and notes whether updates are late then."""

    def __init__(self, script: Any, looks: Looks) -> None:
        super().__init__()
        self._script, self._looks = script, looks
        self.before: list[bool] = []
        self.after: list[bool] = []

    def on_train_batch_end(self, number: int, logs: Any = None) -> None:
        self.before.append(self._is_ahead())
        if number in self._looks:
            look(self._script, self._looks[number])
        self.after.append(self._is_ahead())

    def _is_ahead(self) -> bool:
        sessions = getattr(self.model.optimizer, "_hvd_pipe", ())
        return any(session.engine.is_ahead() for session in sessions)


class Run(NamedTuple):
    """What was read, all variables at the end, and by step whether updates were left to later.

    Before the script has looked after the step, and after it.
    """

    log: list[tuple[str, float]]
    values: list[Any]
    before: list[bool]
    after: list[bool]

    @property
    def weights(self) -> Any:
        return np.concatenate([each.ravel() for each in self.values[:6]])


def run(model: Any, x: Any, y: Any, size: int, looks: Looks, *first: Any) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        script = Script(model, *batch(hvd.rank(), 999), Path(folder))
        looking = Look(script, looks)
        options: dict[str, Any] = {"batch_size": size, "shuffle": False, "verbose": 0}
        model.fit(x, y, callbacks=[*first, looking], **options)
    models = [model.optimizer, *script.models]
    values = [each.numpy() for each in model.trainable_variables]
    values += [each.numpy() for one in models for each in one.variables]
    return Run(script.log, values, looking.before, looking.after)


def serial(looks: Looks, steps: int) -> Run:
    """Train as one process does that averages the gradients of two batches."""

    def train_step(data: Any) -> Any:
        gradients = []
        for x, y in zip(*(tf.split(each, 2) for each in data), strict=True):
            with tf.GradientTape() as tape:
                loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
            gradients.append(tape.gradient(loss, model.trainable_variables))
        means = [(a + b) / 2.0 for a, b in zip(*gradients, strict=True)]
        model.optimizer.apply(means, model.trainable_variables)
        return {"loss": loss}

    model = make_model()
    model.train_step = train_step
    model.compile(plain_optimizer(), "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    parts = [batch(rank, step) for step in range(steps) for rank in range(2)]
    x, y = (np.concatenate(column) for column in zip(*parts, strict=True))
    return run(model, x, y, 2 * BATCH, looks)


def compiled(strategy: str = "forward") -> Any:
    """Return a model; "forward" is a plan that leaves updates to the next step."""
    model = make_model()
    chosen = forward(model) if strategy == "forward" else strategy
    wrapped = hvd.DistributedOptimizer(plain_optimizer(), strategy=chosen)
    model.compile(wrapped, "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


def overlapped(looks: Looks, steps: int, tried: bool = False) -> Run:
    """Train with a plan that leaves updates to the next step, or by trials, in which it wins."""
    model = compiled(TRIED if tried else "forward")
    parts = [batch(hvd.rank(), step) for step in range(steps)]
    x, y = (np.concatenate(column) for column in zip(*parts, strict=True))
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    if not tried:
        return run(model, x, y, BATCH, looks, first)
    with short_trials(), raced():
        return run(model, x, y, BATCH, looks, first)


def assert_exact(mine: Run, plain: Run) -> None:
    assert [name for name, _ in mine.log] == [name for name, _ in plain.log]
    pairs = zip(mine.log, plain.log, strict=True)
    assert [(a, b[1]) for a, b in pairs if a != b] == []
    for a, b in zip(mine.values, plain.values, strict=True):
        np.testing.assert_array_equal(a, b)


def assert_deferred(found: Run, looks: Looks, first: int) -> None:
    """All steps from ``first`` on, but the last, leave updates, which stay where nobody looks."""
    steps = range(first, len(found.before) - 1)
    assert [step for step in steps if not found.before[step]] == []
    quiet = [step for step in steps if looks.get(step) in (None, *METADATA)]
    assert quiet
    assert [step for step in quiet if not found.after[step]] == []


def test_all_ways_to_look_in_turn_are_exact() -> None:
    looks = in_turn(list(WAYS), SKIP_STEPS + 1, 2)
    steps = max(looks) + 3
    found = overlapped(looks, steps)
    assert_exact(found, serial(looks, steps))
    assert_deferred(found, looks, SKIP_STEPS)


def test_all_ways_to_look_while_plans_are_tried_are_exact() -> None:
    """The first ways meet steps that wait for all messages, the trial without, and its end."""
    looks = in_turn([*[*WAYS][-12:], *WAYS], 0, 2)
    steps = max(looks) + 3
    found = overlapped(looks, steps, tried=True)
    assert_exact(found, serial(looks, steps))
    assert all(found.before[SKIP_STEPS + 2 * 3 : SKIP_STEPS + 3 * 3 - 1])  # and the trial ends
    assert_deferred(found, looks, SKIP_STEPS + 3 * 3)


def test_what_one_rank_alone_reads_is_exact() -> None:
    """The other one sends its part in its next step."""
    names = list(READS) if hvd.rank() == 0 else []
    looks = in_turn(names, SKIP_STEPS + 1, 2)
    steps = SKIP_STEPS + 2 * len(READS) + 3
    found = overlapped(looks, steps)
    assert_exact(found, serial(looks, steps))
    assert_deferred(found, looks, SKIP_STEPS)


class FailedError(Exception):
    """A message has failed."""


def test_after_a_message_that_fails_in_a_read_the_update_is_still_due() -> None:
    model, failed = compiled(), mock.Mock(side_effect=FailedError)

    def between(number: int, logs: Any) -> None:
        if number == 11:
            for _ in range(2):
                with mock.patch.object(Reduction, "reduce", failed), pytest.raises(FailedError):
                    weights_of(model)
            seen.append(weights_of(model))

    seen: list[Any] = []
    fit(model, *data(), keras.callbacks.LambdaCallback(on_train_batch_end=between))
    assert np.array_equal(seen[0], serial({}, 12).weights)
    assert failed.call_count == 2


def test_callbacks_of_keras_see_what_the_barrier_shows(tmp_path: Path) -> None:
    """One of rank 0 saves within epochs, others change rates, and put the best weights back."""

    def trained(strategy: Any) -> Any:
        files = str(tmp_path / f"{strategy}-{{epoch}}-{{batch}}.weights.h5")
        model, other = compiled(strategy), make_model()
        own = [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.9 * rate),
            keras.callbacks.EarlyStopping("loss", restore_best_weights=True, patience=1),
            keras.callbacks.TerminateOnNaN(),
        ]
        if hvd.rank() == 0:
            own.append(keras.callbacks.ModelCheckpoint(files, save_freq=3, save_weights_only=True))
        late = Look(None, {})
        options = {"epochs": 3, "validation_data": batch(0, 99)}
        history = fit(model, *data(0, 10), late, *own, **options).history
        saved = []
        for path in sorted(tmp_path.glob(f"{strategy}-*")):
            other.load_weights(path)
            saved.append(weights_of(other))
        return sum(late.before), len(saved), history, [*saved, weights_of(model)]

    mine, other = trained("forward"), trained("merged-gradient:bucket_bytes=200")
    assert mine[0] >= 20
    assert other[0] == 0
    assert mine[1:3] == other[1:3]
    assert mine[1] == (10 if hvd.rank() == 0 else 0)
    np.testing.assert_array_equal(mine[3], other[3])


def test_at_the_end_of_an_epoch_of_unknown_length_one_rank_reads_before_our_callback() -> None:
    """Its last step has no data, and nobody has made the updates yet."""

    def ends(number: int, logs: Any) -> None:
        if hvd.rank() == 0:
            seen.append(weights_of(model))

    seen: list[Any] = []
    model = compiled()
    parts = [batch(hvd.rank(), step) for step in range(12)]
    shapes = tuple(tf.TensorSpec(each.shape, tf.float64) for each in parts[0])
    batches = tf.data.Dataset.from_generator(lambda: iter(parts), output_signature=shapes)
    own = keras.callbacks.LambdaCallback(on_epoch_end=ends)
    ours = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(batches, verbose=0, callbacks=[own, ours])
    wanted = serial({}, 12).weights
    for each in [*seen, weights_of(model)]:
        np.testing.assert_array_equal(each, wanted)


def fit_fails(model: Any) -> None:
    """A callback ends fit on all ranks, and leaves an update."""

    def fail(number: int, logs: Any) -> None:
        if number == 11:
            raise FailedError

    with pytest.raises(FailedError):
        fit(model, *data(), keras.callbacks.LambdaCallback(on_train_batch_end=fail))


def test_who_looks_at_one_model_waits_for_no_update_of_another() -> None:
    """Rank 0 alone looks at the second model after a fit of the first has failed."""
    other, model = compiled(), compiled()
    fit(other, *data())
    fit_fails(model)
    assert len(due) == 1
    if hvd.rank() == 0:
        weights_of(other)
        other.predict(batch(0, 0)[0], verbose=0)
    assert len(due) == 1
    weights_of(model)
    assert not due


def test_a_variable_whose_update_a_shutdown_has_left_out_is_refused() -> None:
    """The last test of these ranks: MPI cannot be started again."""
    model = compiled()
    fit_fails(model)
    hvd.shutdown()
    for read in (lambda: weights_of(model), lambda: model.predict(batch(0, 0)[0], verbose=0)):
        with pytest.raises(hvd.HvdPipeError, match="lacks its last update"):
            read()
