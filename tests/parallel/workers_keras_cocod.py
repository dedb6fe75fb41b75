"""What ranks do under CoCoD with fragments, and within nodes; each function is a case."""

from __future__ import annotations

import importlib
import os
import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cases import Raised, run_cases
from keras_problem import weights_of
from workers_keras_elastic import Trainer
from workers_keras_equations import RANKS_A_NODE
from workers_keras_features import Found, overflow_on_one_rank

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd

PERIOD, TOTAL = 6, 14
FRAGMENTED: dict[str, Found] = {
    "outer": {"strategy": f"cocod:period={PERIOD},fragments=3,outer=nesterov,outer_lr=0.4"},
    "int8": {
        "strategy": f"cocod:period={PERIOD},fragments=2,pull_back=0.5,anchor_momentum=0.5",
        "compression": hvd.Int8(chunk=16, error_feedback=True),
    },
}
WITHIN = f"cocod:period={PERIOD},fragments=2,within=node"
WEIGHTED, WEIGHTS = "cocod:period=4,within=node,warmup_steps=1", (3, 1, 1, 2)
OUTER = "cocod:period=4,outer=nesterov,outer_lr=0.4,fragments="
CUTS = [(2, 4), (4, 1), (1, 2)]


def is_last() -> bool:
    return bool(hvd.rank() == hvd.size() - 1)


def engine_of(trainer: Trainer) -> Any:
    (session,) = trainer.optimizer._hvd_pipe
    return session.engine


def saver(trainer: Trainer) -> Any:
    return tf.train.Checkpoint(model=trainer.model, optimizer=trainer.optimizer)


def resumed_at_every_moment(**options: Any) -> Found:
    """Weights and states at the end, of one run and of those that go on from each moment of it."""
    whole, other = Trainer(**options), Trainer(**options)
    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        moments = range(1, 2 + PERIOD)
        paths = []
        for step in range(TOTAL):
            whole.train(step, step + 1)
            if step + 1 in moments:
                paths.append(saver(whole).write(f"{folder}/{step + 1}"))
        found["whole"] = whole.all()
        other.optimizer.build(other.model.trainable_variables)
        for moment, path in zip(moments, paths, strict=True):
            saver(other).read(path)
            other.train(moment, TOTAL)
            found[moment] = other.all()
    return found


def kept(trainer: Trainer) -> Found:
    """What goes from round to round, by variable."""
    found: Found = {}
    for part in engine_of(trainer)._parts:
        for kind in ("_anchor", "_velocity"):
            flats = getattr(part.average, kind)
            for index, value in (part.packing.unpack(flats) if flats else {}).items():
                found[f"{kind} {index}"] = value.numpy()
    return found


def in_other_fragments() -> dict[tuple[int, int], Found]:
    """Saved where every fragment has an anchor, and another one is in flight than the first."""
    trainers = {count: Trainer(strategy=f"{OUTER}{count}") for count in (1, 2, 4)}
    found: dict[tuple[int, int], Found] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths, saved = {}, {}
        for count, one in trainers.items():
            one.train(0, 9)
            paths[count] = saver(one).write(f"{folder}/{count}")
            saved[count] = {"kept": kept(one), "weights": weights_of(one.model)}
        for before, after in CUTS:
            other = trainers[after]
            engine = engine_of(other)
            saver(other).read(paths[before])
            one = saved[before]
            row = {
                "saved": one["kept"],
                "loaded": kept(other),
                "same": np.array_equal(one["weights"], weights_of(other.model)),
                "ahead": engine.is_ahead(),
                "local steps": int(engine._local_steps),
            }
            other.train(9, TOTAL)
            row["ahead later"] = engine.is_ahead()
            other.optimizer.synchronize()
            found[before, after] = {**row, "weights": weights_of(other.model)}
    return found


def of_too_many_fragments() -> Found:
    trainer, told = Trainer(strategy="cocod:period=7,fragments=7"), ""
    try:
        trainer.train(0, 1)
    except ValueError as error:
        told = str(error)
    good = Trainer(strategy="cocod:period=6,fragments=6")
    good.train(0, 8)
    good.optimizer.synchronize()
    return {"told": told, "weights": weights_of(good.model)}


def of_unlike_variables() -> Found:
    """The last rank trains a model of its own."""
    trainer = Trainer(strategy="cocod:period=4,fragments=2")
    if is_last():
        trainer.model = keras.Sequential(
            [keras.layers.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(3)]
        )
    return told(lambda: trainer.train(0, 1))


def of_unlike_fragments() -> Found:
    count = 2 if is_last() else 4
    return told(lambda: Trainer(strategy=f"cocod:period=4,fragments={count}"))


def told(call: Any) -> Found:
    """What was raised; AutoGraph puts an error of a traced step into one of its own."""
    try:
        call()
    except Exception as error:
        return {"told": f"{type(error).__name__}: {error}"}
    return {"told": ""}


def of_static_sets() -> Found:
    """On the last rank alone no process set can be added."""
    name = "HOROVOD_DYNAMIC_PROCESS_SETS"
    before = os.environ[name]
    if is_last():
        os.environ[name] = "0"
    try:
        return told(lambda: Trainer(strategy=WITHIN))
    finally:
        os.environ[name] = before


def started_again() -> Found:
    """Horovod ends and starts in the middle, with the same workers."""
    found: Found = {}
    for way in ("whole", "again"):
        trainer = Trainer(strategy=f"{WITHIN},warmup_steps=2")
        trainer.train(0, 7)
        if way == "again":
            hvd.shutdown()
            hvd.init(process_sets="dynamic")
        trainer.train(7, TOTAL)
        found[way] = trainer.all()
    return found


def joined() -> Found:
    trainer = Trainer(strategy=WITHIN)
    trainer.train(0, 1)
    found = told(hvd_tf.join)
    trainer.optimizer.synchronize()
    return found


def within_one_node() -> Found:
    """Replicas of a node are equal after every step, and of another node not."""
    trainer = Trainer(strategy=WITHIN)
    rows = []
    for step in range(PERIOD):
        trainer.train(step, step + 1)
        rows.append(weights_of(trainer.model))
    trainer.optimizer.synchronize()
    return {"rows": np.array(rows), "ended": weights_of(trainer.model)}


def in_a_process_set() -> Found:
    ranks = hvd.add_process_set([0, 1, 2])
    try:
        hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1), strategy="cocod:within=node", process_set=ranks
        )
    except ValueError as error:
        return {"told": str(error)}
    finally:
        hvd.remove_process_set(ranks)
    return {"told": ""}


def weighted() -> Found:
    """Rank r's gradient is r + 1: in a step of all ranks, then in one of each node's."""
    weight = keras.Variable(np.zeros(2), name="weight")
    strategy = f"{WEIGHTED},weights={'/'.join(map(str, WEIGHTS))}"
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), strategy=strategy)
    optimizer.build([weight])
    rows = []
    for _ in range(2):
        optimizer.apply([tf.ones(2, tf.float64) * (hvd.rank() + 1.0)], [weight])
        rows.append(weight.numpy()[0])
    optimizer.synchronize()
    return {"weights": [*rows, weight.numpy()[0]]}


TWO = {
    **{
        f"resumed {name}": (resumed_at_every_moment, options)
        for name, options in FRAGMENTED.items()
    },
    "cuts": (in_other_fragments, {}),
    "too many": (of_too_many_fragments, {}),
    "unlike variables": (of_unlike_variables, {}),
    "unlike fragments": (of_unlike_fragments, {}),
}
FOUR = {
    "resumed": (resumed_at_every_moment, {"strategy": WITHIN}),
    "overflow": (overflow_on_one_rank, {"strategy": WITHIN}),
    "static sets": (of_static_sets, {}),
    "process set": (in_a_process_set, {}),
    "join": (joined, {}),
    "weights": (weighted, {}),
    "one node": (within_one_node, {}),
    "again": (started_again, {}),
}


def in_fragments() -> dict[str, Found | Raised]:
    hvd.init()
    return run_cases({name: lambda case=case: case[0](**case[1]) for name, case in TWO.items()})


def within_nodes() -> dict[str, Found | Raised]:
    importlib.import_module("mpi4py.MPI")  # it finalises MPI, so that Horovod does not
    hvd.init(process_sets="dynamic")
    os.environ["HOROVOD_HOSTNAME"] = f"node{hvd.rank() // RANKS_A_NODE}"
    return run_cases({name: lambda case=case: case[0](**case[1]) for name, case in FOUR.items()})
