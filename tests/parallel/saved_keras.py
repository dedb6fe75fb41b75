"""Checkpoints of Keras: written by `make_saved.py`, and how runs go on from any version's."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from saved_problem import LR, MOMENTUM, SAVED, STEPS, Array, target

import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.planning.stages import Partition, Stage
from hvd_pipe.tensorflow import pipedream
from hvd_pipe.tensorflow.layer_times import measure_profile

keras.config.set_floatx("float64")


@dataclass(frozen=True)
class Case:
    """One run, which is saved, and what it came to some steps later."""

    strategy: str
    optimizer: str = "momentum"  # or "adam"
    codec: str = "none"  # of `CODECS`
    passes: int = 1  # a step; a checkpoint may then be in the middle of one
    saved: int = SAVED  # steps before the checkpoint
    whole: bool = False  # a .keras file after synchronize(), not a tf.train.Checkpoint

    def __str__(self) -> str:
        text = f"{self.strategy} {self.optimizer} {self.codec} {self.passes} {self.saved}"
        return re.sub(r"[:,=/ ]", "-", text + " keras" * self.whole)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy,
            "compression": CODECS[self.codec](),
            "backward_passes_per_step": self.passes,
        }


CODECS: dict[str, Callable[[], Any]] = {
    "none": lambda: hvd.Compression.none,
    "fp16": lambda: hvd.Compression.fp16,
    "bf16": lambda: hvd.Compression.bf16,
    "bf16 feedback": lambda: hvd.BF16(error_feedback=True),
    "int8": lambda: hvd.Compression.int8,
    "int8 feedback": lambda: hvd.Int8(chunk=4, error_feedback=True),
}
BASE = ("merged-gradient:plan=wfbp", "pipe-sgd", "cocod:period=4")
OPTIONS = (
    "merged-gradient",
    "pipe-sgd:warmup_steps=9",
    "pipe-sgd:prediction=local",
    "pipe-sgd:prediction=previous",
    "cocod:period=4,warmup_steps=9",
    "cocod:period=4,momentum=average",
    "cocod:period=4,pull_back=0.5,anchor_momentum=0.5",
    "cocod:period=4,outer=nesterov,outer_lr=0.25,outer_momentum=0.5",
    "cocod:period=4,weights=3/1",
    "cocod:period=4,fragments=2,outer=nesterov,outer_lr=0.25,outer_momentum=0.5",
)
CASES = [
    *(Case(strategy) for strategy in (*BASE, *OPTIONS)),
    *(Case(strategy, codec=codec) for strategy in BASE for codec in CODECS if codec != "none"),
    *(Case(strategy, "adam") for strategy in (*BASE, OPTIONS[2], OPTIONS[5])),
    *(Case(strategy, passes=3) for strategy in BASE),
    Case("pipe-sgd", saved=1),
    *(Case(strategy, whole=True) for strategy in BASE),
]
FIRST = [Case(strategy, codec=codec) for strategy in BASE for codec in ("none", "int8 feedback")]
"""Also loaded on all ranks from rank 0's file, where ranks do not have files of their own."""


class Trainer:
    """A model of one layer, whose gradients are exact: its inputs are 0, 1 and -1."""

    def __init__(self, case: Case, model: Any = None) -> None:
        self.case = case
        layer = keras.layers.Dense(2, kernel_initializer="zeros", name="dense")
        self.model = model or keras.Sequential([keras.layers.Input((3,)), layer])
        self.optimizer = getattr(model, "optimizer", None) or self._optimizer()
        self.optimizer.build(self.model.trainable_variables)

        @tf.function  # type: ignore[untyped-decorator]
        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(self.model(x) - y)) / 2
            variables = self.model.trainable_variables
            gradients = tape.gradient(loss, [each.value for each in variables])
            self.optimizer.apply(gradients, variables)

        self._step = step

    def _optimizer(self) -> Any:
        return hvd.DistributedOptimizer(self.plain(), **self.case.options)

    def plain(self) -> Any:
        if self.case.optimizer == "adam":
            return keras.optimizers.Adam(0.01)
        return keras.optimizers.SGD(LR / 2, momentum=MOMENTUM)

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


def write(case: Case, folder: Path) -> Array:
    """Write each rank's checkpoint; return what the run itself came to."""
    trainer = Trainer(case)
    trainer.train(0, case.saved)
    path = folder / f"rank{hvd.rank()}" / str(case)
    path.parent.mkdir(parents=True, exist_ok=True)
    if case.whole:
        trainer.optimizer.synchronize()
        trainer.model.compile(optimizer=trainer.optimizer, loss="mse")
        trainer.model.save(path.with_name(f"{case}.keras"))
    else:
        saved = tf.train.Checkpoint(model=trainer.model, optimizer=trainer.optimizer)
        saved.write(str(path))
    return trainer.ended()


def go_on(case: Case, folder: Path, rank: int) -> Array:
    """What a run comes to that loads a rank's checkpoint."""
    path = folder / f"rank{rank}" / str(case)
    if case.whole:
        file = path.with_name(f"{case}.keras")
        return Trainer(case, hvd.load_model(file, **case.options)).ended()
    trainer = Trainer(case)
    for each in trainer.model.trainable_variables:
        each.assign(each + 8)
    saved = tf.train.Checkpoint(model=trainer.model, optimizer=trainer.optimizer)
    saved.read(str(path)).assert_consumed()
    return trainer.ended()


@dataclass(frozen=True)
class Pipeline:
    """A pipeline's run of an epoch, which is saved, and of one more."""

    mode: str  # of the versions of the weights
    replicas: tuple[int, ...]  # workers of each stage

    def __str__(self) -> str:
        return f"pipedream-{self.mode}-{'-'.join(map(str, self.replicas))}"

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
        names = ("first", "norm", "drop", "last")
        parts = [names[:2], names[2:]] if len(self.replicas) == 2 else [names]
        stages = tuple(
            Stage(one, width, 0.0, 0, 0, 0, 0, 0.0)
            for one, width in zip(parts, self.replicas, strict=True)
        )
        ones = (1,) * len(stages)
        return Partition(stages, sum(self.replicas), 0.0, 0.0, 0.0, "paper", ones)

    def data(self, epoch: int) -> list[tuple[Array, Array]]:
        def draw(width: int, step: int) -> Array:
            return target((8, width), width, epoch, step, exact=False)

        return [(draw(3, step), draw(2, step)) for step in range(6)]

    def write(self, folder: Path) -> Array:
        engine = self.start(0.0)
        engine.train_epoch(self.data(0))
        engine.save(folder / str(self))
        return self.ended(engine)

    def go_on(self, folder: Path) -> Array:
        engine = self.start(1.0)
        engine.load(folder / str(self))
        return self.ended(engine)

    def ended(self, engine: Any) -> Array:
        """The loss of one epoch more, and all variables but seeds after it."""
        loss = engine.train_epoch(self.data(1)).loss
        values = [
            np.asarray(each.numpy(), np.float64).ravel()
            for each in engine.gather().variables
            if "seed" not in each.path
        ]
        engine.close()
        return np.concatenate([[loss], *values])


PIPELINES = [
    *(Pipeline(mode, (1, 1)) for mode in ("stash", "2bw", "flush")),
    Pipeline("stash", (2,)),
]


def write_all(folder: Path) -> dict[str, Array]:
    """Write all checkpoints; return what the runs themselves came to."""
    pipedream.init()
    runs = {str(case): write(case, folder) for case in CASES}
    return runs | {str(pipeline): pipeline.write(folder) for pipeline in PIPELINES}


def runs_from(folder: Path) -> dict[str, Callable[[], Array]]:
    """Return how to go on from each rank's own checkpoints, and from some of rank 0's, by name."""
    runs: dict[str, Callable[[], Array]] = {}
    for case in CASES:
        if list((folder / "rank0").glob(f"{case}.*")):
            runs[f"own {case}"] = partial(go_on, case, folder, hvd.rank())
            if case in FIRST:
                runs[f"first {case}"] = partial(go_on, case, folder, 0)
    for pipeline in PIPELINES:
        if (folder / str(pipeline)).exists():
            runs[f"own {pipeline}"] = partial(pipeline.go_on, folder)
    return runs


def go_on_all(folder: Path) -> dict[str, Array]:
    pipedream.init()
    return {name: run() for name, run in runs_from(folder).items()}


def timed(profile: Path) -> None:
    """Under HVD_PIPE_TIMELINE: each strategy, and a pipeline; and a model's profile."""
    pipedream.init()
    model = Trainer(Case(BASE[0])).model
    measured = measure_profile(model, [tf.zeros((1, 3), tf.float64)], steps=2)
    if hvd.rank() == 0:
        measured.save(profile)
    for strategy in BASE:
        Trainer(Case(strategy)).train(0, 8)
    engine = PIPELINES[0].start(0.0)
    engine.train_epoch(PIPELINES[0].data(0))
    engine.close()
    hvd.shutdown()
