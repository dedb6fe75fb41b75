"""Keras: what is made of a distributed optimizer's configuration or file is distributed as it."""

from __future__ import annotations

import contextlib
import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from on_ranks import gather, on_ranks

import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.tensorflow import keras_patches
from hvd_pipe.tensorflow.keras.optimizer import DistributedMixin

two = on_ranks(2, init=hvd.init)

OF_WHAT: dict[str, dict[str, Any]] = {
    "pipe-sgd": {"strategy": "pipe-sgd:warmup_steps=2"},
    "cocod": {"strategy": "cocod:period=3"},
    "codec": {"compression": hvd.Int8(chunk=8, error_feedback=True)},
    "sum": {"op": hvd.Sum},
    "predivided": {"gradient_predivide_factor": 2.0},
    "passes": {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
    "dense": {"sparse_as_dense": True},
    "groups": {"groups": 2},
    "local gradients": {"scale_local_gradients": False},
}


def compiled(strategy: str = "merged-gradient") -> Any:
    """A model of one weight."""
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    plain = keras.optimizers.SGD(0.1)
    model.compile(hvd.DistributedOptimizer(plain, strategy=strategy), "mse")
    return model


def fit(model: Any, *callbacks: Any, epochs: int = 1) -> None:
    x = np.ones((2, 1)) * (1 + hvd.rank())
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x, x, verbose=0, epochs=epochs, callbacks=[start, *callbacks])


def assert_alike(one: Any, other: Any) -> None:
    assert isinstance(one, DistributedMixin)
    assert isinstance(other, DistributedMixin)
    mine, others = one._hvd_pipe.arguments, other._hvd_pipe.arguments
    assert mine.process_set.ranks == others.process_set.ranks
    assert replace(mine, process_set=others.process_set) == others
    assert one._hvd_pipe.method == other._hvd_pipe.method


@two
@pytest.mark.parametrize("case", OF_WHAT)
def test_an_optimizer_of_a_configuration(case: str) -> None:
    """A class stands for one way to distribute: those of other arguments are other classes."""
    plain = keras.optimizers.SGD(0.1)
    other = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), strategy="merged-gradient")
    optimizer = hvd.DistributedOptimizer(plain, **OF_WHAT[case])
    assert_alike(type(optimizer).from_config(optimizer.get_config()), optimizer)
    assert_alike(type(other).from_config(other.get_config()), other)


@two
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "in a LossScaleOptimizer"])
@pytest.mark.parametrize("case", ["pipe-sgd", "codec", "passes"])
def test_an_optimizer_of_a_file(case: str, scaled: bool, tmp_path: Path) -> None:
    model = compiled()
    optimizer = inner = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **OF_WHAT[case])
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(inner)
    model.compile(optimizer, "mse")
    model.save(tmp_path / "model.keras")
    found = hvd.load_model(tmp_path / "model.keras", **OF_WHAT[case]).optimizer
    assert_alike(found.inner_optimizer if scaled else found, inner)


@two
def test_it_averages_as_its_original() -> None:
    first = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), strategy="pipe-sgd")
    weights = []
    for optimizer in (first, type(first).from_config(first.get_config())):
        weights.append(keras.Variable(np.zeros(2), name="weight"))
        for number in range(3):
            gradient = tf.ones(2, weights[-1].dtype) * float((1 + hvd.rank()) * 10**number)
            optimizer.apply([gradient], [weights[-1]])
    for weight in weights:
        np.testing.assert_allclose(weight.numpy(), -1.5 - 15.0, rtol=1e-6)


@two
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("case", OF_WHAT)
def test_a_copy_is_distributed(case: str, how: str) -> None:
    """Keras copies by what it saves, which is a plain optimizer: ``fit`` averaged nothing."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), **OF_WHAT[case])
    optimizer.build([keras.Variable(np.ones(3), name="weight")])
    found = (
        copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    )
    assert_alike(found, optimizer)
    assert found is not optimizer


@two
def test_a_model_with_a_plain_optimizer_is_told_once(recwarn: pytest.WarningsRecorder) -> None:
    """A copied or loaded model has one, where the script distributes its optimizers."""
    keras_patches.note_distributed()
    copied = copy.deepcopy(compiled())
    x = np.ones((2, 1))
    for _ in range(2):
        copied.fit(x, x, verbose=0)
    told = [str(each.message) for each in recwarn if "not distributed" in str(each.message)]
    assert len(told) == 1
    assert "hvd.load_model" in told[0]


@two
def test_fit_and_compile_that_others_have_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As autologging tools do, with a function that takes any arguments."""
    told = []

    def wrapping(plain: Any) -> Any:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            told.append(plain.__name__)
            return plain(self, *args, **kwargs)

        return wrapped

    wrap = {patch.name: patch for patch in keras_patches.PATCHES}
    for name in ("fit", "compile"):
        owner = wrap[name].owner
        patched = wrap[name].wrap(wrapping(getattr(owner, name)))
        monkeypatch.setattr(owner, name, patched)
    model = compiled()
    fit(model)
    assert told == ["compile", "fit"]
    np.testing.assert_array_equal(*gather(model.get_weights()))
    with pytest.raises(TypeError, match="is for Keras 2"):
        fit(model, Keras2())


class Keras2(keras.callbacks.Callback):
    pass


Keras2.__module__, Keras2.__name__ = "horovod._keras.callbacks", "BroadcastGlobalVariablesCallback"


class SetsWeights(keras.callbacks.Callback):
    """Sets each rank's own weights, as EarlyStopping(restore_best_weights=True) does."""

    def on_train_end(self, logs: Any = None) -> None:
        self.model.set_weights([np.full((1, 1), 3.0 + 2 * hvd.rank())])


@two
@pytest.mark.parametrize("strategy", ["merged-gradient", "pipe-sgd", "cocod"])
def test_weights_that_callbacks_set_at_the_end_of_fit(
    strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They stayed unlike, as the optimizer had finished before."""
    model = compiled(strategy)
    fit(model)
    fit(model, SetsWeights())
    np.testing.assert_array_equal(model.get_weights(), [[[4.0]]])
    told = [each for each in caplog.messages if "a callback has set weights at the end" in each]
    assert len(told) == (hvd.rank() == 0 and strategy != "cocod")


@two
@pytest.mark.parametrize("rank", [0, 1])
def test_fit_may_raise_on_one_rank_as_it_ends(rank: int) -> None:
    """The other rank waited for it, to compare weights."""

    class Raises(keras.callbacks.Callback):
        def on_train_end(self, logs: Any = None) -> None:
            if hvd.rank() == rank:
                raise OSError("no space left on device")

    model = compiled()
    for _ in range(2):
        with contextlib.suppress(OSError):
            fit(model, Raises())
    np.testing.assert_array_equal(*gather(model.get_weights()))


@two
def test_fit_before_compile_has_keras_own_error() -> None:
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))  # from here on, `fit` is ours
    with pytest.raises(ValueError, match="compile"):
        model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0)


@two
def test_what_is_built_before_fit_is_broadcast_before_its_first_batch() -> None:
    """Ranks take it for done alike, whatever becomes of the batch on one of them."""
    seen = []

    class Looks(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            seen.append((start.broadcast_done, self.model.get_weights()[0].item()))

    model = compiled()
    model.set_weights([np.full((1, 1), 1.0 + hvd.rank())])
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0, callbacks=[start, Looks()])
    assert seen == [(True, 1.0)]


class OwnStep(keras.Sequential):
    """Its optimizer stands in a dictionary, as several of them may."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(x) - y) ** 2)
        self.own["a"].apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        return {"loss": loss}


@two
def test_an_optimizer_in_a_dictionary_of_a_model_that_one_rank_has_built() -> None:
    """Ranks waited for each other, one to broadcast before the first step, one after it."""
    model = OwnStep([keras.layers.Dense(1, use_bias=False)])
    if hvd.rank() == 0:
        model(np.ones((2, 1)))
    model.own = {"a": hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))}
    model.compile()
    fit(model, SetsWeights(), epochs=2)
    np.testing.assert_array_equal(model.get_weights(), [[[4.0]]])
