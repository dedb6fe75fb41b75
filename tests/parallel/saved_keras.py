"""Checkpoints of Keras: written by `make_saved.py`, and how runs go on from any version's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import saved_problem
import tensorflow as tf
from saved_problem import BASE, LR, MOMENTUM, STEPS, Array, Case, Saver, target

import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.planning.stages import Partition, Stage
from hvd_pipe.tensorflow import pipedream
from hvd_pipe.tensorflow.layer_times import measure_profile

keras.config.set_floatx("float64")


class Trainer:
    """A model of one layer, whose gradients are exact: its inputs are 0, 1 and -1."""

    def __init__(self, case: Case, model: Any = None) -> None:
        self.case = case
        layer = keras.layers.Dense(2, kernel_initializer="zeros", name="dense")
        self.model = model or keras.Sequential([keras.layers.Input((3,)), layer])
        adam = case.optimizer == "adam"
        sgd = keras.optimizers.SGD
        plain = keras.optimizers.Adam(0.01) if adam else sgd(LR / 2, momentum=MOMENTUM)
        self.optimizer = getattr(model, "optimizer", None) or hvd.DistributedOptimizer(
            plain, **case.arguments(hvd)
        )
        self.optimizer.build(self.model.trainable_variables)
        self.saved = tf.train.Checkpoint(model=self.model, optimizer=self.optimizer)

        @tf.function  # type: ignore[untyped-decorator]
        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(self.model(x) - y)) / 2
            variables = self.model.trainable_variables
            gradients = tape.gradient(loss, [each.value for each in variables])
            self.optimizer.apply(gradients, variables)

        self._step = step

    def train(self, first: int, last: int) -> None:
        exact = "int8" not in self.case.codec
        for step in range(first, last):
            x = np.array([[(step + 2 * i + hvd.rank()) % 3 - 1.0 for i in range(3)]])
            y = target((1, 2), 0, hvd.rank(), step, exact)
            self._step(tf.constant(x), tf.constant(y))

    def ended(self) -> Array:
        """All variables after some more steps, and after `synchronize`."""
        self.train(self.case.saved, self.case.saved + STEPS)
        rows = self._all()
        self.optimizer.synchronize()
        return np.concatenate([*rows, *self._all()])

    def _all(self) -> list[Array]:
        # A float: the learning rate; whole numbers: how many steps there were.
        return [
            np.asarray(each.numpy(), np.float64).ravel()
            for each in (*self.model.variables, *self.optimizer.variables)
        ]


def write(case: Case, path: Path) -> Array:
    trainer = Trainer(case)
    trainer.train(0, case.saved)
    if case.way == "keras":
        trainer.optimizer.synchronize()
        trainer.model.compile(optimizer=trainer.optimizer, loss="mse")
        trainer.model.save(path.with_name(f"{case}.keras"))
    else:
        trainer.saved.write(str(path))
    return trainer.ended()


def go_on(case: Case, path: Path) -> Array:
    if case.way == "keras":
        file = path.with_name(f"{case}.keras")
        return Trainer(case, hvd.load_model(file, **case.arguments(hvd))).ended()
    trainer = Trainer(case)
    for each in trainer.model.trainable_variables:
        each.assign(each + 8)
    trainer.saved.read(str(path)).assert_consumed()
    return trainer.ended()


class Pipeline(saved_problem.Pipeline):
    """With the workers of each stage, such as "1-1"."""

    def start(self, first: float) -> Any:
        keras.utils.set_random_seed(5)
        layers = [
            keras.layers.Dense(4, "tanh", name="first"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(0.25, seed=3, name="drop"),
            keras.layers.Dense(2, name="last"),
        ]
        model = keras.Sequential([keras.layers.Input((3,)), *layers])
        for number, each in enumerate(model.trainable_variables):
            each.assign(target(tuple(each.shape), number, 0, 3, exact=True) / 4 + first)
        return pipedream.PipeDream(
            model,
            keras.losses.MeanSquaredError(),
            lambda: keras.optimizers.Adam(0.05),
            plan=self.partition(),
            mode=self.mode,
            sample=self.data(0)[0],
            microbatches=None if self.mode == "stash" else 4,
            max_grad_norm=1.0,
            progress=False,
        )

    def partition(self) -> Partition:
        names, widths = ("first", "norm", "drop", "last"), [*map(int, self.plan.split("-"))]
        parts = [names[:2], names[2:]] if len(widths) == 2 else [names]
        stages = tuple(
            Stage(one, width, 0.0, 0, 0, 0, 0, 0.0)
            for one, width in zip(parts, widths, strict=True)
        )
        ones = (1,) * len(stages)
        return Partition(stages, sum(widths), 0.0, 0.0, 0.0, "paper", ones)

    def values(self, engine: Any) -> Sequence[Any]:
        return [each for each in engine.gather().variables if "seed" not in each.path]


SAVER = Saver(
    hvd,
    saved_problem.cases(passes=3, way="keras"),
    [*(Pipeline(mode, "1-1") for mode in ("stash", "2bw", "flush")), Pipeline("stash", "2")],
    write,
    go_on,
)


def timed(profile: Path) -> None:
    """Under HVD_PIPE_TIMELINE: each strategy, and a pipeline; and a model's profile."""
    pipedream.init()
    model = Trainer(Case(BASE[0])).model
    measured = measure_profile(model, [tf.zeros((1, 3), tf.float64)], steps=2)
    if hvd.rank() == 0:
        measured.save(profile)
    for strategy in BASE:
        Trainer(Case(strategy)).train(0, 8)
    pipeline = Pipeline("stash", "1-1")
    engine = pipeline.start(0.0)
    engine.train_epoch(pipeline.data(0))
    engine.close()
    hvd.shutdown()
