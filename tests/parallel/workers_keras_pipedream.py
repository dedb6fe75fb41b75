"""What the ranks of `test_keras_pipedream` do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from cases import run_cases
from horovod.tensorflow import mpi_ops
from keras_pipeline import (
    OPTIMIZERS,
    STAGES,
    Weights,
    loss_fn,
    make_batches,
    make_model,
    values_of,
)

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.planning.stages import Partition, Stage
from hvd_pipe.tensorflow import pipedream
from hvd_pipe.tensorflow.pipedream import PipeDream


class Case(NamedTuple):
    """A pipeline, and some of its options."""

    mode: str
    replicas: tuple[int, ...]
    optimizer: str
    most: float | None = None
    short: bool = False
    recompute: bool = False
    in_transit: int = 0


MINIBATCHES = 7
EPOCHS = 2


def plan_of(replicas: tuple[int, ...]) -> Partition:
    names = STAGES[len(replicas)] if len(replicas) > 1 else [sum(STAGES[2], ())]
    stages = tuple(
        Stage(one, width, 0.0, 0, 0, 0, 0, 0.0) for one, width in zip(names, replicas, strict=True)
    )
    ones = (1,) * len(replicas)
    return Partition(stages, sum(replicas), 0.0, 0.0, 0.0, "paper", ones)


def engine_of(mode: str, replicas: tuple[int, ...], optimizer: str, **options: Any) -> PipeDream:
    arguments: dict[str, Any] = {
        "plan": plan_of(replicas),
        "microbatches": None if mode == "stash" else 4,
        "metric_fn": keras.metrics.sparse_categorical_accuracy,
        "progress": False,
    }
    make = OPTIMIZERS[optimizer]
    return PipeDream(make_model(), loss_fn, make, mode=mode, **(arguments | options))


def unseen() -> list[Any]:
    """To evaluate on: the last minibatch cannot be cut as the others are."""
    return make_batches(3, last=1)


Run = tuple[list[float], Weights, tuple[float, float, int]]


def train(case: Case, transport: str) -> Run:
    engine = engine_of(
        *case[:3],
        transport=transport,
        max_grad_norm=case.most,
        wire_dtype="bfloat16" if case.short else None,
        recompute=case.recompute,
        in_transit=case.in_transit,
    )
    batches = make_batches(MINIBATCHES)
    losses = [engine.train_epoch(batches).loss for _ in range(EPOCHS)]
    stats = engine.evaluate(unseen())
    assert stats.metric is not None
    return losses, values_of(engine.gather()), (stats.loss, stats.metric, stats.samples)


def equations(cases: list[Case], transport: str = "auto") -> Any:
    pipedream.init()
    return run_cases({case: functools.partial(train, case, transport=transport) for case in cases})


def features(directory: str) -> Any:
    pipedream.init()
    cases: dict[str, Callable[[], Any]] = {
        "auto": auto,
        "dataset": dataset,
        "resume": functools.partial(resume, Path(directory) / "one", (2, 1), (2, 1)),
        "schedule": schedule,
        "renamed": functools.partial(renamed, Path(directory) / "three"),
        "damage": functools.partial(damage, Path(directory) / "two"),
        "errors": errors,
    }
    return run_cases(cases)


def repartition(directory: str) -> Any:
    pipedream.init()
    return resume(Path(directory), (2, 1), (1, 1, 1))


def auto() -> tuple[str, list[float]]:
    """Measured and planned, with what is printed on rank 0."""
    engine = engine_of("stash", (2, 1), "adam", plan="auto", bandwidth=1e9, progress=True)
    losses = [engine.train_epoch(make_batches(MINIBATCHES)).loss for _ in range(8)]
    return engine.partition.config, losses


def dataset() -> tuple[list[float], list[float]]:
    """A tf.data.Dataset that is shuffled alike on all ranks, beside the same in a list."""
    x, y = make_batches(2)[0]
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(8, seed=4).repeat(2).batch(6)
    engine = engine_of("flush", (2, 1), "momentum", sample=(x[:6], y[:6]))
    first = [engine.train_epoch(data).loss for _ in range(2)]
    again = engine_of("flush", (2, 1), "momentum", sample=(x[:6], y[:6]))
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(8, seed=4).repeat(2).batch(6)
    second = [again.train_epoch(list(data)).loss for _ in range(2)]
    return first, second


def resume(
    directory: Path, saved: tuple[int, ...], loaded: tuple[int, ...]
) -> tuple[int, Weights, Weights, Weights, Weights]:
    """The epoch, weights at the checkpoint, those of one epoch more, and both as loaded."""
    batches = make_batches(MINIBATCHES)
    engine = engine_of("stash", saved, "adam", max_grad_norm=1.0)
    engine.train_epoch(batches)
    engine.save(directory)
    kept = values_of(engine.gather())
    engine.train_epoch(batches)
    after = values_of(engine.gather())
    other = engine_of("stash", loaded, "adam", sample=batches[0], max_grad_norm=1.0)
    other.load(directory)
    plain = values_of(other.gather())
    epoch = other.epoch
    other.train_epoch(batches)
    return epoch, kept, plain, after, values_of(other.gather())


def renamed(directory: Path) -> tuple[list[str], float, float]:
    """Names that Keras made up in two models of a script, and the losses of both pipelines."""
    generator = np.random.default_rng(5)
    batches = [
        (generator.standard_normal((8, 4)), generator.integers(0, 3, 8))
        for _ in range(MINIBATCHES)
    ]

    def make() -> PipeDream:
        keras.utils.set_random_seed(2)
        layers = [keras.layers.Dense(5), keras.layers.Dropout(0.3), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        names = [layer.name for layer in model.layers]
        stages = tuple(
            Stage(tuple(some), width, 0.0, 0, 0, 0, 0, 0.0)
            for some, width in ((names[:2], 2), (names[2:], 1))
        )
        plan = Partition(stages, 3, 0.0, 0.0, 0.0, "paper", (1, 1))
        made = OPTIMIZERS["momentum"]
        return PipeDream(
            model, loss_fn, made, plan, sample=batches[0], max_grad_norm=0.5, progress=False
        )

    engine = make()
    engine.train_epoch(batches)
    engine.save(directory)
    loss = engine.train_epoch(batches).loss
    other = make()
    other.load(directory)
    names = [one.partition.stages[1].layers[0] for one in (engine, other)]
    return names, loss, other.train_epoch(batches).loss


def damage(directory: Path) -> list[tuple[str, float]]:
    """What is said of a checkpoint without the end of a file, and how far weights have moved."""
    batches = make_batches(MINIBATCHES)
    engine = engine_of("stash", (2, 1), "adam")
    engine.train_epoch(batches)
    found = []
    for name in ("stage1.npz", "model.weights.h5", "pipeline.json"):
        engine.save(directory)
        other = engine_of("stash", (2, 1), "adam", sample=batches[0])
        before = values_of(other.gather())
        if mpi_ops.rank() == 0:
            path = directory / name
            path.write_bytes(path.read_bytes()[:-200])
        try:
            other.load(directory)
        except HvdPipeError as error:
            found.append((str(error), is_close(values_of(other.gather()), before)))
    momentum = engine_of("stash", (2, 1), "momentum", sample=batches[0])
    before = values_of(momentum.gather())
    engine_of("stash", (2, 1), "sgd", sample=batches[0]).save(directory)
    try:
        momentum.load(directory)
    except HvdPipeError as error:
        found.append((str(error), is_close(values_of(momentum.gather()), before)))
    return found


def schedule() -> list[float]:
    """Rates after epochs of three minibatches, with a stage that updates twice in each."""
    decay = keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.2, 0.1])
    engine = PipeDream(
        make_model(),
        loss_fn,
        lambda: keras.optimizers.SGD(decay),
        plan_of((2, 1)),
        sample=make_batches(2)[0],
        progress=False,
    )
    rates = []
    for _ in range(2):
        engine.train_epoch(make_batches(3))
        rates.append(float(engine.optimizer.learning_rate))
    return rates


def errors() -> dict[str, str]:
    """Each mistake, on every rank, and nothing hangs after any of them."""
    rank = int(mpi_ops.rank())
    batches = make_batches(MINIBATCHES)
    adam = OPTIMIZERS["adam"]

    def new(**options: Any) -> PipeDream:
        return engine_of("stash", (2, 1), "adam", **options)

    def closed() -> PipeDream:
        engine = new()
        engine.train_epoch(batches)
        engine.close()
        engine.close()
        return engine

    def call(*arguments: Any, **options: Any) -> PipeDream:
        return PipeDream(*arguments, **options)

    shared = adam()
    mistakes: dict[str, Callable[[], Any]] = {
        "mode": lambda: engine_of("vertical-sync", (2, 1), "adam"),
        "another mode": lambda: engine_of("fast", (2, 1), "adam"),
        "workers": lambda: new(plan="3-1"),
        "transport": lambda: new(transport="pigeon"),
        "shared": lambda: call(make_model(), loss_fn, lambda: shared),
        "instance": lambda: call(make_model(), loss_fn, adam()),
        "clipping": lambda: call(
            make_model(), loss_fn, lambda: keras.optimizers.SGD(global_clipnorm=1.0)
        ),
        "microbatches": lambda: new(microbatches=2),
        "wire_dtype": lambda: new(wire_dtype="int8"),
        "norm": lambda: new(max_grad_norm=0.0),
        "norms differ": lambda: new(max_grad_norm=1.0 + rank),
        "not built": lambda: new().gather(),
        "modes differ": lambda: engine_of(["stash", "flush"][rank % 2], (2, 1), "adam"),
        "lengths differ": lambda: new().train_epoch(batches[rank:]),
        "no length": lambda: new().train_epoch(iter(batches)),
        "one rank's batch": lambda: new().train_epoch([3] if rank == 1 else batches[:1]),
        "one sample": lambda: new(sample=batches[0] if rank == 1 else None),
        "closed": lambda: closed().train_epoch(batches),
        "no checkpoint": lambda: new(sample=batches[0]).load("/nonexistent"),
    }
    found = {}
    for name, mistake in mistakes.items():
        try:
            mistake()
            found[name] = "nothing"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    assert len(new().train_epoch(batches).compute_s) == 3
    return found


def is_close(found: Weights, wanted: Weights) -> float:
    """The largest difference of two models' values."""
    assert found.keys() == wanted.keys()
    return max(float(np.abs(found[name] - wanted[name]).max()) for name in wanted)
