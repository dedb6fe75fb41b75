"""PipeDream for Keras is its equations: pipelines of processes beside one that is never cut."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_pipeline import (
    MINIBATCHES,
    OPTIMIZERS,
    TOLERANCE,
    Case,
    Weights,
    check,
    difference,
    engine_of,
    loss_fn,
    make_batches,
    make_model,
    make_small,
    values_of,
)
from on_ranks import gather, on_ranks

import hvd_pipe.tensorflow as hvd
from hvd_pipe.errors import HvdPipeError
from hvd_pipe.pipeline.messages import TensorSpec
from hvd_pipe.pipeline.stage import MicrobatchIndex
from hvd_pipe.tensorflow import pipedream
from hvd_pipe.tensorflow.pipedream import PipeDream
from hvd_pipe.tensorflow.pipedream.graph import graph_of
from hvd_pipe.tensorflow.pipedream.tensors import KerasMessages, split

three = on_ranks(3, init=pipedream.init)


def shared(folder: Path) -> Path:
    """Rank 0's folder, on all ranks."""
    return Path(gather(folder)[0])


def test_a_message_of_another_microbatch_is_refused() -> None:
    spec = TensorSpec("x", (2,), "float64", (0,), gradient=True)
    messages = KerasMessages([spec], 2, "stage 1 replica 0")
    message = messages.pack(MicrobatchIndex(0, 0), [tf.zeros(2, tf.float64)], 0, (0.0, 0.0))
    with pytest.raises(HvdPipeError, match=r"stage 1 replica 0 waits for .*minibatch 1"):
        messages.unpack(MicrobatchIndex(1, 0), message)


@pytest.mark.parametrize(
    ("batch", "microbatches", "error", "words"),
    [
        (3, 1, TypeError, r"must yield \(x, y\), got int"),
        ((1, 2, 3), 1, TypeError, r"must yield \(x, y\), got 3 items"),
        ((np.ones((2, 5, 5, 1)), np.ones(3)), 1, ValueError, "targets of shape .3.*first dim"),
        ((np.ones((2, 5, 5, 1)), np.ones(2)), 3, ValueError, "2 samples.* 3 microbatches"),
    ],
)
def test_minibatches_that_cannot_be(
    batch: Any, microbatches: int, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        split(graph_of(make_model()), batch, microbatches)


PLAIN = Case("stash", (2, 1), "momentum")
DAILY = [
    Case("2bw", (2, 1), "momentum"),
    Case("stash", (1, 1, 1), "adam"),
    Case("flush", (2, 1), "momentum", most=3.0, recompute=True),
    Case("stash", (2, 1), "adam", short=True, in_transit=2),
]
NIGHTLY = [  # of two ranks, and with one option each of those that DAILY has together
    PLAIN,
    Case("stash", (1, 1), "momentum"),
    Case("2bw", (1, 1), "adam"),
    Case("flush", (1, 1), "momentum"),
    Case("stash", (2,), "momentum"),
    Case("stash", (1, 1), "adam", short=True),
    Case("stash", (1, 1), "momentum", in_transit=2),
    Case("flush", (2, 1), "adam"),
    Case("stash", (2, 1), "momentum", in_transit=2),
]


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=three, id=str(case)) for case in DAILY),
        *(
            pytest.param(
                case,
                marks=[on_ranks(sum(case.replicas), init=pipedream.init), pytest.mark.nightly],
                id=str(case),
            )
            for case in NIGHTLY
        ),
    ],
)
def test_pipelines_are_the_equation(case: Case) -> None:
    """Losses of two epochs, all weights and statistics after them, and an evaluation."""
    check(case, "mpi", recurrent=case in NIGHTLY)


@pytest.mark.nightly  # test_keras_smoke.py has a pipeline over Gloo
@on_ranks(3, launcher="gloo", init=pipedream.init)
@pytest.mark.parametrize("case", [PLAIN, DAILY[0]], ids=str)
def test_pipelines_without_mpi(case: Case) -> None:
    check(case, "process-sets", recurrent=False)


def minibatches() -> list[Any]:
    """Of one size, as each size is compiled."""
    return make_batches(MINIBATCHES, last=8)


def new(**options: Any) -> PipeDream:
    return engine_of("stash", (2, 1), "adam", **options)


@three
def test_datasets_of_tensorflow() -> None:
    """A tf.data.Dataset that is shuffled alike on all ranks, beside the same in a list."""
    x, y = make_batches(2)[0]
    losses = []
    for is_list in (False, True):
        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(8, seed=4).repeat(2).batch(8)
        engine = engine_of("flush", (2, 1), "momentum", sample=(x, y))
        # Each iteration shuffles anew.
        epochs = (list(data) if is_list else data for _ in range(2))
        losses.append([engine.train_epoch(each).loss for each in epochs])
    assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE)


@three
def test_a_run_is_resumed(tmp_path: Path) -> None:
    """Bit for bit, although Keras has named the layers anew; with other stages nearly so.

    Seeds of dropout and statistics are those of each replica.
    """
    directory, batches = shared(tmp_path), minibatches()

    def values(model: Any) -> Weights:
        return {str(place): value for place, value in enumerate(values_of(model).values())}

    engine = engine_of("stash", (2, 1), "adam", max_grad_norm=1.0)
    engine.train_epoch(batches)
    engine.save(directory)
    kept = values(engine.gather())
    plain = make_small()
    plain.load_weights(directory / "model.weights.h5")
    assert difference(values(plain), kept) == 0.0
    loss = engine.train_epoch(batches).loss
    after = values(engine.gather())
    assert difference(after, kept) > 1e-4
    for replicas in ((2, 1), (1, 1, 1)):
        other = engine_of("stash", replicas, "adam", sample=batches[0], max_grad_norm=1.0)
        assert other.partition.stages[-1].layers != engine.partition.stages[-1].layers
        other.load(directory)
        assert other.epoch == 1
        assert difference(values(other.gather()), kept) == 0.0
        again, moved = other.train_epoch(batches).loss, difference(values(other.gather()), after)
        if replicas == (2, 1):
            assert (again, moved) == (loss, 0.0)
        else:  # other stages see other versions, so it is another run, but not far away
            assert 0.0 < moved < 0.2


@three
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    directory, batches = shared(tmp_path), minibatches()
    engine, other = (new(sample=batches[0]) for _ in range(2))

    def refused(engine: PipeDream) -> str:
        before = values_of(engine.gather())
        with pytest.raises(HvdPipeError) as raised:
            engine.load(directory)
        assert difference(values_of(engine.gather()), before) == 0.0
        return str(raised.value)

    for name in ("stage1.npz", "model.weights.h5", "pipeline.json"):
        engine.save(directory)
        if hvd.rank() == 0:
            path = directory / name
            path.write_bytes(path.read_bytes()[:-200])
        gather(None)
        said = refused(other)
        assert "no checkpoint of such a pipeline" in said
        assert re.search(r"is damaged|line \d+ column", said)
    engine_of("stash", (2, 1), "sgd", sample=batches[0]).save(directory)
    momentum = engine_of("stash", (2, 1), "momentum", sample=batches[0])
    assert re.search(r"of another optimizer: it has no 'slot.*SGD needs", refused(momentum))


@three
def test_schedules_count_minibatches() -> None:
    """All of which are those of one epoch, also where a stage's last round is short."""
    decay = keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.2, 0.1])
    engine = new(optimizer_fn=lambda: keras.optimizers.SGD(decay), sample=make_batches(2)[0])
    rates = []
    for _ in range(2):
        engine.train_epoch(make_batches(3))
        rates.append(round(float(engine.optimizer.learning_rate), 6))
    assert rates == ([0.1, 0.05] if hvd.rank() == 2 else [0.2, 0.1])


def call(*arguments: Any) -> PipeDream:
    return PipeDream(make_small(), loss_fn, *arguments)


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "mode": (
        lambda: engine_of("vertical-sync", (2, 1), "adam"),
        "ValueError: mode must be one of stash, 2bw, flush, got 'vertical-sync'.*PyTorch",
    ),
    "shared": (
        lambda: call(functools.cache(OPTIMIZERS["adam"])),
        "ValueError: optimizer_fn must make a new optimizer in each call",
    ),
    "instance": (
        lambda: call(OPTIMIZERS["adam"]()),
        "TypeError: optimizer_fn makes an optimizer .*keras.optimizers.Adam",
    ),
    "clipping": (
        lambda: call(lambda: keras.optimizers.SGD(global_clipnorm=1.0)),
        "ValueError: global_clipnorm=1.0 would be the norm of one stage",
    ),
    "norms differ": (
        lambda: new(max_grad_norm=1.0 + hvd.rank()),
        "RanksDisagreeError: ranks disagree on the pipeline's options",
    ),
    "one rank's batch": (
        lambda: new().train_epoch([3] if hvd.rank() == 1 else minibatches()[:1]),
        "rank 1 was given something wrong|must yield .x, y., got int|number of mi",
    ),
}


@three
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    mistake, words = MISTAKES[name]
    with pytest.raises((HvdPipeError, TypeError, ValueError)) as raised:
        mistake()
    assert re.search(words, f"{raised.type.__name__}: {raised.value}")


@three
def test_a_measured_plan_trains() -> None:
    """Measured and planned, with what is printed on rank 0; nothing hangs after the mistakes."""
    engine = engine_of("stash", (2, 1), "adam", plan="auto", bandwidth=1e9, progress=True)
    losses = [engine.train_epoch(minibatches()).loss for _ in range(8)]
    config = engine.partition.config
    assert sum(map(int, config.split("-"))) == 3
    assert losses[-1] < losses[0]
    assert gather((config, losses)) == [(config, losses)] * 3


@three
def test_ranks_that_read_other_minibatches_are_told() -> None:
    """The last test of these ranks, as Horovod's end is what ends the others' waits."""
    batches = minibatches()[:: -1 if hvd.rank() == 2 else 1]
    says = r"targets of minibatch 0 differ.*shuffle.*seed=1" if hvd.rank() == 2 else ""
    with pytest.raises(Exception, match=says):
        new().train_epoch(batches)
    hvd.shutdown()
