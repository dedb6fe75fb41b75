"""Every name of ``horovod.tensorflow`` and its ``keras``: it works here, or says what to write."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as stock
import horovod.tensorflow.keras as stock_keras
import keras
import numpy as np
import pytest
import tensorflow as tf
from on_ranks import on_ranks

import hvd_pipe.tensorflow as hvd
import hvd_pipe.tensorflow.keras as hvd_keras

SECOND = hvd.ProcessSet([1])


def init() -> None:
    hvd.init(process_sets=[SECOND])


two = on_ranks(2, init=init)

MEAN = [1.5, 3.0, 4.5, 6.0]
SUM = [3.0, 6.0, 9.0, 12.0]


def mine() -> tf.Tensor:
    return tf.constant([1.0, 2.0, 3.0, 4.0]) * (hvd.rank() + 1)


def rows() -> tf.IndexedSlices:
    """Rank r has r + 1 in the rows r and r + 1 of four."""
    values = tf.ones((2, 2)) * (hvd.rank() + 1)
    return tf.IndexedSlices(values, tf.constant([hvd.rank(), hvd.rank() + 1]), tf.constant([4, 2]))


# Calls of ours, or with what is ours, which work alike eagerly and in a graph.
CALLS: list[tuple[str, Callable[[], Any], Any]] = [
    ("allreduce", lambda: hvd.allreduce(mine()), MEAN),
    ("allreduce fp16", lambda: hvd.allreduce(mine(), compression=hvd.Compression.fp16), MEAN),
    ("grouped_allreduce", lambda: hvd.grouped_allreduce([mine(), 2 * mine()]), [MEAN, SUM]),
    (
        "grouped_allreduce mixed",
        lambda: [
            tf.convert_to_tensor(each)
            for each in hvd.grouped_allreduce([mine(), rows(), 2 * mine()], op=hvd.Sum)
        ],
        [SUM, [[1.0, 1.0], [3.0, 3.0], [2.0, 2.0], [0.0, 0.0]], [2 * each for each in SUM]],
    ),
    ("broadcast", lambda: hvd.broadcast(mine(), 1), [2.0, 4.0, 6.0, 8.0]),
]


def numbers(found: Any) -> Any:
    if isinstance(found, list | tuple):
        return [numbers(each) for each in found]
    return np.asarray(found).tolist()


@two
@pytest.mark.parametrize("how", ["eagerly", "in a graph"])
@pytest.mark.parametrize(("call", "wanted"), [pytest.param(*row, id=name) for name, *row in CALLS])
def test_a_call_means_what_it_means_to_horovod(
    call: Callable[[], Any], wanted: Any, how: str
) -> None:
    call = call if how == "eagerly" else tf.function(call, autograph=False)
    assert numbers(call()) == wanted


OURS = {
    *("Compression", "DistributedGradientTape", "DistributedOptimizer"),
    *("PartialDistributedGradientTape", "SyncBatchNormalization", "allgather_object"),
    *("broadcast_", "broadcast_global_variables", "broadcast_object", "broadcast_object_fn"),
    *("broadcast_variables", "grouped_allreduce", "init", "shutdown"),
}


@two
def test_all_names_are_there_and_others_than_these_are_horovods_own() -> None:
    for theirs, ours in ((stock, hvd), (stock_keras, hvd_keras)):
        public = {
            name
            for name, value in vars(theirs).items()
            if not (name.startswith("_") or inspect.ismodule(value))
        }
        public.discard("is_version_greater_equal_than")  # Horovod imports it for itself
        assert not {name for name in public if not hasattr(ours, name)}
        if ours is hvd:
            assert {name for name in public if vars(theirs)[name] is not vars(ours)[name]} == OURS


@two
def test_values_of_the_keras_module() -> None:
    assert numbers(hvd_keras.allreduce([1.0, 2.0 + hvd.rank()])) == [1.0, 2.5]
    assert numbers(hvd_keras.allgather([hvd.rank()])) == [0, 1]
    assert numbers(hvd_keras.broadcast([hvd.rank()], 1)) == [1]
    assert numbers(hvd_keras.reducescatter([1.0, 2.0], op=hvd.Sum)) == [2.0 * (1 + hvd.rank())]


@two
@pytest.mark.parametrize("kind", ["keras", "tensorflow"])
def test_variables_are_broadcast_in_place(kind: str) -> None:
    """Horovod's ``broadcast_`` does not know Keras 3's variables."""

    def made(name: str) -> Any:
        value = np.full(2, hvd.rank() + 1.0, np.float32)
        return keras.Variable(value, name=name) if kind == "keras" else tf.Variable(value)

    first, second = made("first"), made("second")
    assert numbers(hvd.broadcast_([first], 1)) == [[2.0, 2.0]]
    hvd.broadcast_variables([second], 1, inplace=True)
    for each in (first, second):
        assert np.array(each).tolist() == [2.0, 2.0]


@two
@pytest.mark.parametrize("case", ["objects", "objects in a graph"])
def test_objects_travel(case: str) -> None:
    """Horovod's look for a session in a graph, and ``broadcast_object_fn`` for a placeholder."""
    found: list[Any] = []

    def travel() -> None:
        found.append(hvd.broadcast_object({"rank": hvd.rank()}, 1))
        found.append(hvd.broadcast_object_fn(1)({"rank": hvd.rank()}))
        found.append(hvd.allgather_object(["x"] * (hvd.rank() + 1)))

    (travel if case == "objects" else tf.function(travel, autograph=False))()
    assert found == [{"rank": 1}, {"rank": 1}, [["x"], ["x", "x"]]]


@two
def test_graphs_of_tensorflow_1_are_stock_horovods() -> None:
    """Our `DistributedOptimizer` sends people there: it must work."""
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        initial = tf.constant([1.0, 2.0]) + hvd.rank()
        weight = v1.get_variable("weight", initializer=initial)
        optimizer = stock.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
        step = optimizer.minimize(tf.reduce_sum(weight) * (hvd.rank() + 1))
        broadcast = hvd.broadcast_global_variables(0)
        with v1.Session() as session:
            for each in (v1.global_variables_initializer(), broadcast, step):
                session.run(each)
            assert numbers(session.run(weight)) == [1.0 - 1.5, 2.0 - 1.5]


@two
def test_a_process_set() -> None:
    """Of rank 1 alone."""
    assert SECOND.included() == (hvd.rank() == 1)
    if SECOND.included():
        total = hvd.allreduce(mine(), op=hvd.Sum, process_set=SECOND)
        assert numbers(total) == [2.0, 4.0, 6.0, 8.0]
        assert hvd.broadcast_object("here", 1, process_set=SECOND) == "here"


@two
def test_bfloat16_cannot_be_summed() -> None:
    with pytest.raises(Exception, match="not in the list of allowed values"):
        hvd.allreduce(tf.cast(mine(), tf.bfloat16))


@two
def test_another_frameworks_horovod_changes_nothing() -> None:
    """Process sets ask the Horovod that was imported last; ours must not think it is alone."""
    importlib.import_module("horovod.torch")
    weight = tf.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply([tf.constant(1.0 + hvd.rank())], [weight])
    assert weight.numpy() == -1.5
