"""What ranks do with states of other buckets, and of an earlier hvd_pipe; each is a case."""

from __future__ import annotations

import tempfile
import weakref
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras_problem import weights_of
from workers_keras_elastic import METHODS, Trainer
from workers_keras_features import Found
from workers_keras_tapes import left_of

import hvd_pipe.tensorflow.keras as hvd

EARLIER = Path(__file__).parent.parent / "data" / "keras_states.npz"
"""Of hvd_pipe at commit 5b68a74, by rank and method: variables and what is in flight after step 7
of `Trainer`, and the weights that it ended with after step 12."""

EARLIER_METHODS = [name for name in METHODS if "outer" not in name]  # that one came later


LAYOUTS = {
    "smaller buckets": ({}, {"strategy": "pipe-sgd:bucket_bytes=64"}),
    "a bucket of all": ({"strategy": "pipe-sgd:bucket_bytes=64"}, {}),
    "other groups": ({"groups": 2}, {"groups": 5}),
    "prediction": (
        {"strategy": "pipe-sgd:prediction=local"},
        {"strategy": "pipe-sgd:prediction=local,bucket_bytes=64"},
    ),
}


def of_earlier(name: str) -> Found:
    trainer = Trainer(**METHODS[name])
    trainer.optimizer.build(trainer.model.trainable_variables)
    prefix = f"{hvd.rank()}/{name}"
    with np.load(EARLIER) as file:
        for i, each in enumerate([*trainer.model.variables, *trainer.optimizer.variables]):
            each.assign(file[f"{prefix}/variable/{i}"])
        trainer.optimizer.hvd_pipe.deserialize(file[f"{prefix}/flight"].tobytes())
        ended = file[f"{prefix}/ended"]
    trainer.train(7, 12)
    trainer.optimizer.synchronize()
    return {"weights": weights_of(trainer.model), "wanted": ended}


def in_other_buckets(name: str) -> Found:
    before, after = ({"strategy": "pipe-sgd", **options} for options in LAYOUTS[name])
    trainer, other = Trainer(**before), Trainer(**after)
    trainer.train(0, 7)
    other.optimizer.build(other.model.trainable_variables)
    read(trainer, other)
    for each in (trainer, other):
        each.train(7, 12)
        each.optimizer.synchronize()
    return {"whole": weights_of(trainer.model), "resumed": weights_of(other.model)}


def read(trainer: Trainer, other: Trainer) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = tf.train.Checkpoint(model=trainer.model, optimizer=trainer.optimizer)
        path = saved.write(f"{folder}/own")
        tf.train.Checkpoint(model=other.model, optimizer=other.optimizer).read(path)


def of_equal_sizes_in_other_groups() -> Found:
    """Both have two buckets of four numbers."""
    weights = [keras.Variable(np.zeros(2), name=f"w{i}") for i in range(4)]
    first, second = weights[:2], weights[2:]

    def made(groups: list[list[Any]]) -> Any:
        plain = keras.optimizers.SGD(1.0)
        optimizer = hvd.DistributedOptimizer(plain, strategy="pipe-sgd", groups=groups)
        optimizer.build(weights)
        return optimizer

    gradients = [tf.ones(2, tf.float64) * (i + 1.0) * (hvd.rank() + 1) for i in range(4)]
    optimizer, other = made([first, second]), made([second, first])
    optimizer.apply(gradients, weights)
    other.hvd_pipe.deserialize(optimizer.hvd_pipe.serialize())
    for each in weights:
        each.assign(each * 0)
    other.apply(gradients, weights)
    return {"weights": np.array([each.numpy() for each in weights])}


def of_bfloat16(strategy: str) -> Found:
    weight = keras.Variable(np.zeros(3), dtype="bfloat16", name="weight")

    def made() -> Any:
        plain = keras.optimizers.SGD(0.5)
        optimizer = hvd.DistributedOptimizer(
            plain, strategy=strategy, compression=hvd.Compression.bf16
        )
        optimizer.build([weight])
        return optimizer

    gradient = tf.ones(3, tf.bfloat16) * float(hvd.rank() + 1)
    optimizer, other = made(), made()
    for _ in range(3):
        optimizer.apply([gradient], [weight])
    other.hvd_pipe.deserialize(optimizer.hvd_pipe.serialize())
    other.apply([gradient], [weight])
    other.synchronize()
    return {"weight": np.array(weight, np.float32)}


def of_momenta_that_came_twice() -> Found:
    """Layers of equal shapes, of which an earlier version averaged some momenta twice."""
    weights = [keras.Variable(np.ones((3, 3)), name=f"w{i}") for i in range(4)]

    def made() -> Any:
        plain = keras.optimizers.Adam(0.1)
        optimizer = hvd.DistributedOptimizer(plain, strategy="cocod:period=2,momentum=average")
        optimizer.build(weights)
        return optimizer

    def step(optimizer: Any, count: int) -> None:
        for number in range(count):
            gradient = tf.ones((3, 3), tf.float64) * (number + 1.0 + hvd.rank())
            optimizer.apply([gradient] * 4, weights)

    optimizer, other = made(), made()
    step(optimizer, 3)
    (session,) = optimizer._hvd_pipe
    momenta = [id(each.variable) for each in session.engine.settings.momenta]
    states = optimizer._hvd_pipe.states()
    for kind in ("start", "sent"):
        states[0][f"momenta.{kind}.0"] = np.zeros(100)
    other._hvd_pipe.go_back(states)
    step(other, 3)
    other.synchronize()
    return {
        "momenta": len(momenta),
        "unlike": len(set(momenta)),
        "weights": np.array([each.numpy() for each in weights]),
    }


def of_other_rules() -> Found:
    """Train on under one rule, with the state of another one and with none."""
    rules = {
        "pull-back": "cocod:period=2,pull_back=0.6,anchor_momentum=0.7",
        "outer": "cocod:period=2,outer=nesterov",
        "cocod": "cocod:period=2",
    }
    found: Found = {}
    for before, after in (("pull-back", "outer"), ("outer", "pull-back"), ("outer", "cocod")):
        trainer = Trainer(strategy=rules[before])
        trainer.train(0, 7)
        trainer.optimizer.synchronize()
        for state in (trainer.optimizer.hvd_pipe.serialize(), None):
            other = Trainer(strategy=rules[after])
            other.optimizer.build(other.model.trainable_variables)
            both = zip(other.model.variables, trainer.model.variables, strict=True)
            for variable, value in both:
                variable.assign(value)
            if state is not None:
                other.optimizer.hvd_pipe.deserialize(state)
            other.train(7, 12)
            other.optimizer.synchronize()
            label = "fresh" if state is None else "loaded"
            found[f"{before} {after} {label}"] = weights_of(other.model)
    return found


def of_classes() -> Found:
    """Optimizers that come and go with their models, of a class that Keras has registered."""
    registered = keras.saving.register_keras_serializable("tests")
    cls = registered(type("Registered", (keras.optimizers.SGD,), {}))

    def made(strategy: str) -> tuple[type[Any], Any]:
        weight = keras.Variable(np.zeros(2), name="weight")
        optimizer = hvd.DistributedOptimizer(cls(1.0), strategy=strategy, groups=[[weight]])
        optimizer.apply([tf.ones(2, tf.float64)], [weight])
        return type(optimizer), weakref.ref(weight)

    found = [made(strategy) for strategy in ("pipe-sgd", "pipe-sgd", "merged-gradient")]
    kept = left_of([weight for _, weight in found])
    (one, _), (same, _), (other, _) = found
    return {
        "same": one is same,
        "other": one is other,
        "kept": kept,
    }


CASES: dict[str, tuple[Any, ...]] = {
    "classes": (of_classes,),
    **{f"earlier {name}": (of_earlier, name) for name in EARLIER_METHODS},
    **{f"layout {name}": (in_other_buckets, name) for name in LAYOUTS},
    "momenta": (of_momenta_that_came_twice,),
    "other rules": (of_other_rules,),
    "equal sizes": (of_equal_sizes_in_other_groups,),
    **{f"bfloat16 {name}": (of_bfloat16, name) for name in ("pipe-sgd", "cocod:period=2")},
}
