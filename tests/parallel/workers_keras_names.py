"""What the ranks of `test_keras_names` do: every name that Horovod exports, called once."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as stock
import keras
import numpy as np
import tensorflow as tf
from cases import Raised, run_cases

import hvd_pipe.tensorflow as hvd
import hvd_pipe.tensorflow.keras as hvd_keras


def mine() -> tf.Tensor:
    return tf.constant([1.0, 2.0, 3.0, 4.0]) * (hvd.rank() + 1)


def rows() -> tf.IndexedSlices:
    """Rank r has r + 1 in the rows r and r + 1 of four."""
    values = tf.ones((2, 2)) * (hvd.rank() + 1)
    return tf.IndexedSlices(values, tf.constant([hvd.rank(), hvd.rank() + 1]), tf.constant([4, 2]))


# Calls that work alike eagerly and in a graph.
BOTH: dict[str, Callable[[], Any]] = {
    "allreduce": lambda: hvd.allreduce(mine()),
    "allreduce as of old": lambda: hvd.allreduce(mine(), average=False),
    "allreduce Sum": lambda: hvd.allreduce(mine(), op=hvd.Sum),
    "allreduce Min": lambda: hvd.allreduce(mine(), op=hvd.Min),
    "allreduce Max": lambda: hvd.allreduce(mine(), op=hvd.Max),
    "allreduce Product": lambda: hvd.allreduce(mine(), op=hvd.Product),
    "allreduce Adasum": lambda: hvd.allreduce(mine(), op=hvd.Adasum),
    "allreduce fp16": lambda: hvd.allreduce(mine(), compression=hvd.Compression.fp16),
    "allreduce sparse": lambda: tf.convert_to_tensor(hvd.allreduce(rows())),
    "grouped_allreduce": lambda: hvd.grouped_allreduce([mine(), 2 * mine()]),
    "grouped_allreduce mixed": lambda: [
        tf.convert_to_tensor(each)
        for each in hvd.grouped_allreduce([mine(), rows(), 2 * mine()], op=hvd.Sum)
    ],
    "allgather": lambda: hvd.allgather(mine()[: hvd.rank() + 1]),
    "grouped_allgather": lambda: hvd.grouped_allgather([mine(), mine()[:1]]),
    "broadcast": lambda: hvd.broadcast(mine(), 1),
    "alltoall": lambda: hvd.alltoall(mine()),
    "alltoall splits": lambda: hvd.alltoall(mine(), splits=[1, 3]),
    "reducescatter": lambda: hvd.reducescatter(mine()),
    "grouped_reducescatter": lambda: hvd.grouped_reducescatter([mine(), 2 * mine()]),
    "sizes": lambda: [
        hvd.size_op(),
        hvd.rank_op(),
        hvd.local_size_op(),
        hvd.local_rank_op(),
        hvd.process_set_included_op(),
    ],
}


def numbers(found: Any) -> Any:
    if isinstance(found, list | tuple):
        return [numbers(each) for each in found]
    return np.asarray(found).tolist()


def eagerly(call: Callable[[], Any]) -> Any:
    return numbers(call())


def in_graph(call: Callable[[], Any]) -> Any:
    @tf.function(autograph=False)
    def function() -> Any:
        return call()

    return numbers(function())


def keras_values() -> list[Any]:
    return [
        numbers(hvd_keras.allreduce([1.0, 2.0 + hvd.rank()])),
        numbers(hvd_keras.allgather([hvd.rank()])),
        numbers(hvd_keras.broadcast([hvd.rank()], 1)),
        numbers(hvd_keras.reducescatter([1.0, 2.0], op=hvd.Sum)),
    ]


def variables_in_place(kind: str) -> list[Any]:
    def made(name: str) -> Any:
        value = np.full(2, hvd.rank() + 1.0, np.float32)
        return keras.Variable(value, name=name) if kind == "keras" else tf.Variable(value)

    first, second = made("first"), made("second")
    returned = hvd.broadcast_([first], 1)
    hvd.broadcast_variables([second], 1, inplace=True)
    return [numbers(returned), np.array(first).tolist(), np.array(second).tolist()]


def objects() -> Any:
    return [
        hvd.broadcast_object({"rank": hvd.rank()}, 1),
        hvd.broadcast_object_fn(1)({"rank": hvd.rank()}),
        hvd.allgather_object(["x"] * (hvd.rank() + 1)),
    ]


def objects_in_graph() -> Any:
    kept: list[Any] = []

    @tf.function(autograph=False)
    def function() -> None:
        kept.append(objects())

    function()
    return kept[0]


def graph_of_tensorflow_1() -> list[float]:
    """Where our `DistributedOptimizer` sends people to: it must work there."""
    with tf.Graph().as_default():
        initial = tf.constant([1.0, 2.0]) + hvd.rank()
        weight = tf.compat.v1.get_variable("weight", initializer=initial)
        optimizer = stock.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0))
        step = optimizer.minimize(tf.reduce_sum(weight) * (hvd.rank() + 1))
        broadcast = hvd.broadcast_global_variables(0)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(broadcast)
            session.run(step)
            return [float(each) for each in session.run(weight)]


def plain_answers() -> dict[str, Any]:
    variable = tf.Variable(1.0)
    built = ["mpi", "gloo", "nccl", "ddl", "ccl", "cuda", "rocm"]
    return {
        "power of 2": [hvd.check_num_rank_power_of_2(4), hvd.check_num_rank_power_of_2(3)],
        "gpu": isinstance(hvd.gpu_available("tensorflow"), bool),
        "homogeneous": hvd.is_homogeneous(),
        "lists": hvd.split_list([1, 2, 3], 2),
        "extension": hvd.check_extension(
            "horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", stock.__file__, "mpi_lib"
        ),
        "references": hvd.refs_to_vars(hvd.vars_to_refs([variable]))[0] is variable,
        "average": hvd.handle_average_backwards_compatibility(None, None) == hvd.Average,
        "built": [bool(getattr(hvd, f"{name}_built")()) for name in built],
        "cross": [hvd.cross_rank(), hvd.cross_size()],
    }


def process_set() -> list[Any]:
    """Rank 1 alone; made at `hvd.init`."""
    alone = _sets[0]
    if not alone.included():
        return []
    total = hvd.allreduce(mine(), op=hvd.Sum, process_set=alone)
    return [numbers(total), hvd.broadcast_object("here", 1, process_set=alone)]


def said_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals() -> dict[str, str]:
    return {
        "hook": said_by(lambda: hvd.BroadcastGlobalVariablesHook(0)),
        "all variables": said_by(lambda: hvd.broadcast_global_variables(0)),
        "codec": said_by(lambda: hvd.allreduce(mine(), compression=hvd.Compression.int8)),
        "bfloat16": said_by(lambda: hvd.allreduce(tf.cast(mine(), tf.bfloat16))),
        "Adasum": said_by(lambda: hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Adasum)),
    }


def joined() -> int:
    """Rank 1 has one step more; rank 0 has left by then and counts as zeros."""
    if hvd.rank() == 1:
        hvd.allreduce(mine(), op=hvd.Sum)
    return int(hvd.join())


def beside_torch() -> Any:
    """Another framework's Horovod is imported after ours has begun; rank r's gradient is r + 1."""
    importlib.import_module("horovod.torch")
    weight = tf.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply([tf.constant(1.0 + hvd.rank())], [weight])
    return weight.numpy()


_sets: list[hvd.ProcessSet] = []


def observations() -> dict[str, Any | Raised]:
    _sets.append(hvd.ProcessSet([1]))
    hvd.init(process_sets=_sets)
    cases: dict[str, Any] = {}
    for name, call in BOTH.items():
        cases[f"{name} eagerly"] = functools.partial(eagerly, call)
        cases[f"{name} in a graph"] = functools.partial(in_graph, call)
    for kind in ("keras", "tensorflow"):
        cases[f"in place {kind}"] = functools.partial(variables_in_place, kind)
    cases |= {
        "keras values": keras_values,
        "objects": objects,
        "objects in a graph": objects_in_graph,
        "graph of TensorFlow 1": graph_of_tensorflow_1,
        "plain": plain_answers,
        "process set": process_set,
        "refusals": refusals,
        "beside torch": beside_torch,
        "join": joined,
    }
    return run_cases(cases)
