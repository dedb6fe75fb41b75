"""PipeDream for Keras is its equations: stages by hand, then pipelines of processes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from horovod.common.process_sets import ProcessSet
from keras_pipeline import (
    MINIBATCHES,
    OPTIMIZERS,
    STAGES,
    TOLERANCE,
    Case,
    Reference,
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
from pipeline_versions import METHODS

import hvd_pipe.tensorflow as hvd
from hvd_pipe.errors import HvdPipeError
from hvd_pipe.pipeline.messages import Boundary
from hvd_pipe.pipeline.stage import Clipping, Feed, MicrobatchIndex, Norms
from hvd_pipe.planning.schedule import (
    Backward,
    Forward,
    RecvActivation,
    RecvGradient,
    SendActivation,
    SendGradient,
    Update,
    schedule,
)
from hvd_pipe.tensorflow import pipedream
from hvd_pipe.tensorflow.pipedream import PipeDream
from hvd_pipe.tensorflow.pipedream.graph import cut, graph_of, shapes_of
from hvd_pipe.tensorflow.pipedream.stage import KerasStage, Losses
from hvd_pipe.tensorflow.pipedream.tensors import KerasMessages, split

three = on_ranks(3, init=pipedream.init)


def shared(folder: Path) -> Path:
    """Rank 0's folder, on all ranks."""
    return Path(gather(folder)[0])


class ByHand:
    """All stages of a straight pipeline in this process, with messages in a dict."""

    def __init__(
        self,
        model: Any,
        layers: Sequence[Sequence[str]],
        mode: str,
        optimizer: str,
        m: int,
        recompute: bool = False,
    ) -> None:
        self.graph = graph_of(model)
        self.mode, self.m, self.count = mode, m, len(layers)
        x, _ = make_batches(2)[0]
        sample = split(self.graph, (x, x), m)[0].inputs
        parts = cut(self.graph, layers, shapes_of(self.graph, list(sample)))
        count = len(parts)
        self.stages = []
        for s, part in enumerate(parts):
            before, after = (
                Boundary(specs, lambda x, s=s: KerasMessages(x, count, f"stage {s} replica 0"))
                if specs
                else None
                for specs in (part.inputs, part.outputs)
            )
            stage = KerasStage(
                part,
                Losses(loss_fn) if s == count - 1 else None,
                OPTIMIZERS[optimizer](),
                Clipping(None, False, Norms(s, count), None, ProcessSet([0]), lambda x, *_: x),
                before,
                after,
                coalesces=mode != "stash",
                recompute=recompute,
            )
            self.stages.append(stage)
        self.kept: list[int] = []
        self._recompute = recompute

    def train(self, batches: list[Any]) -> float:
        whole = schedule(METHODS[self.mode], [1] * self.count, len(batches), self.m)
        messages: dict[Any, Any] = {}
        runs = []
        for s, stage in enumerate(self.stages):
            stage.feed = Feed(batches, len(batches), lambda b, n: split(self.graph, b, n))
            stage.feed.microbatches = self.m
            stage.begin(training=True)
            runs.append(self._run(s, stage, whole.programs[s, 0], messages))
        while runs:
            runs = [run for run in runs if next(run, None) is not None]
        tally = self.stages[-1].tally()
        return tally.loss / tally.weight

    def _run(self, s: int, stage: Any, program: Any, messages: dict[Any, Any]) -> Iterator[int]:
        uses = {x.version: at for at, x in enumerate(program) if isinstance(x, Forward | Backward)}
        newest = 0
        for at, step in enumerate(program):
            index = (
                MicrobatchIndex(step.minibatch, step.microbatch)
                if not isinstance(step, Update)
                else None
            )
            match step:
                case RecvActivation() | RecvGradient():
                    kind = isinstance(step, RecvActivation)
                    while (kind, s, index) not in messages:
                        yield at
                    message = messages.pop((kind, s, index))
                    (stage.take_input if kind else stage.take_gradient)(index, message)
                case Forward():
                    stage.forward(index, step.version)
                case SendActivation():
                    messages[True, s + 1, index] = stage.output(index)
                    pending = stage._pending[index]
                    assert (pending.tape is None) == (not pending.outputs) == self._recompute
                case Backward():
                    stage.backward(index, step.version)
                case SendGradient():
                    messages[False, s - 1, index] = stage.input_gradient(index)
                case Update():
                    keep = uses.get(newest, -1) > at
                    stage.update(step.version, keep)
                    newest = step.version
            last = isinstance(step, Forward | Backward) and uses[step.version] == at
            if last and step.version != newest:
                stage.release(step.version)
            self.kept.append(len(stage._versions))


BY_HAND = [
    (mode, m, *rest)
    for mode, m in (("stash", 1), ("2bw", 4), ("flush", 4))
    for rest in (
        (2, "momentum", False),
        (3, "momentum", False),
        (3, "adam", False),
        (3, "momentum", True),
    )
]
# The others are nightly: pipelines of processes show more stages and optimizers in make test.
DAILY_BY_HAND = {
    ("stash", 1, 3, "momentum", True),
    ("2bw", 4, 2, "momentum", False),
    ("flush", 4, 2, "momentum", False),
}


@pytest.mark.parametrize(
    ("mode", "m", "stages", "optimizer", "recompute"),
    [
        pytest.param(*cell, marks=() if cell in DAILY_BY_HAND else pytest.mark.nightly)
        for cell in BY_HAND
    ],
)
def test_stages_by_hand_are_the_equation(
    mode: str, m: int, stages: int, optimizer: str, recompute: bool
) -> None:
    """Two epochs: the second begins with the versions, optimizers and state of the first."""
    batches, model = make_batches(6), make_model()
    pipeline = ByHand(model, STAGES[stages], mode, optimizer, m, recompute)
    reference = Reference(STAGES[stages], [1] * stages, mode, OPTIMIZERS[optimizer], m)
    for _ in range(2):
        loss, expected = pipeline.train(batches), reference.train_epoch(batches)
        assert loss == pytest.approx(expected, abs=TOLERANCE)
        wanted, found = values_of(reference.model), values_of(model)
        assert len(wanted) == 13
        for path, value in found.items():
            error = np.abs(value - wanted[path]).max()
            assert error <= TOLERANCE, f"{path} differs by {error:.3g}"
    assert max(pipeline.kept) == {"stash": stages, "2bw": 2, "flush": 1}[mode]


def test_the_modes_can_be_told_apart() -> None:
    """A tolerance of 1e-10 shows something only where another mode is off by far more."""
    found = {}
    for mode, m in (("stash", 1), ("2bw", 4), ("flush", 4)):
        reference = Reference(STAGES[3], [1] * 3, mode, OPTIMIZERS["adam"], m)
        reference.train_epoch(make_batches(6))
        found[mode] = values_of(reference.model)["last/kernel"]
    assert np.abs(found["stash"] - found["2bw"]).max() > 1e-4
    assert np.abs(found["2bw"] - found["flush"]).max() > 1e-4


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("change", ["optimizer", "assign", "in place"])
def test_reading_a_variable_is_a_snapshot(name: str, change: str) -> None:
    """All weight stashing rests on this: updates leave alone what someone has read."""
    variable, optimizer = keras.Variable(np.arange(5.0)), OPTIMIZERS[name]()
    optimizer.build([variable])
    update = tf.function(lambda gradient: optimizer.apply([gradient], [variable]))
    for _ in range(3):
        kept = variable.value.read_value()
        before = kept.numpy().copy()
        if change == "optimizer":
            update(tf.ones(5, tf.float64))
        elif change == "assign":
            variable.assign(variable + 1.0)
        else:
            variable.value.assign_sub(tf.ones(5, tf.float64))
        assert np.array_equal(kept.numpy(), before)
        assert not np.array_equal(variable.numpy(), before)


def test_evaluation_takes_the_newest_weights_and_changes_nothing() -> None:
    batches, model = make_batches(3), make_model()
    pipeline = ByHand(model, STAGES[2], "stash", "adam", 1)
    pipeline.train(batches)
    before = [v.numpy() for v in model.variables]
    first, last = pipeline.stages
    for stage in pipeline.stages:
        stage.feed = Feed(batches, 3, lambda b, n: split(pipeline.graph, b, n))
        stage.begin(training=False)
    for b in range(3):
        first.forward(MicrobatchIndex(b, 0), 0)
        last.take_input(MicrobatchIndex(b, 0), first.output(MicrobatchIndex(b, 0)))
        last.forward(MicrobatchIndex(b, 0), 0)
    tally = last.tally()
    x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    assert tally.samples == tally.weight == len(x)
    assert tally.loss / tally.weight == pytest.approx(float(loss_fn(y, model(x))), abs=TOLERANCE)
    for kept, variable in zip(before, model.variables, strict=True):
        assert np.array_equal(kept, variable.numpy())


def test_stages_that_read_other_minibatches_say_so() -> None:
    batches = make_batches(2)
    pipeline = ByHand(make_model(), STAGES[2], "stash", "adam", 1)
    first, last = pipeline.stages
    for stage, read in ((first, batches), (last, batches[::-1])):
        stage.feed = Feed(read, 2, lambda b, n: split(pipeline.graph, b, n))
        stage.begin(training=True)
    first.forward(MicrobatchIndex(0, 0), 0)
    last.take_input(MicrobatchIndex(0, 0), first.output(MicrobatchIndex(0, 0)))
    with pytest.raises(HvdPipeError, match=r"targets of minibatch 0 differ.*shuffle.*seed=1"):
        last.forward(MicrobatchIndex(0, 0), 0)


def test_a_message_of_another_microbatch_is_refused() -> None:
    pipeline = ByHand(make_model(), STAGES[2], "stash", "adam", 1)
    first, last = pipeline.stages
    first.feed = Feed(make_batches(2), 2, lambda b, n: split(pipeline.graph, b, n))
    first.begin(training=True)
    first.forward(MicrobatchIndex(0, 0), 0)
    message = first.output(MicrobatchIndex(0, 0))
    with pytest.raises(HvdPipeError, match=r"stage 1 replica 0 waits for .*minibatch 1"):
        last.take_input(MicrobatchIndex(1, 0), message)


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
    Case("stash", (1, 1), "momentum", most=3.0),
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


def closed() -> PipeDream:
    engine = new(sample=minibatches()[0])
    engine.close()
    engine.close()
    return engine


def call(*arguments: Any) -> PipeDream:
    return PipeDream(make_small(), loss_fn, *arguments)


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "mode": (
        lambda: engine_of("vertical-sync", (2, 1), "adam"),
        "ValueError: mode must be one of stash, 2bw, flush, got 'vertical-sync'.*PyTorch",
    ),
    "another mode": (
        lambda: engine_of("fast", (2, 1), "adam"),
        "ValueError: mode must be one of stash, 2bw, flush, got 'fast'$",
    ),
    "workers": (lambda: new(plan="3-1"), "ValueError:.*3-1.*3"),
    "transport": (
        lambda: new(transport="pigeon"),
        "ValueError: transport must be one of .*'pigeon'",
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
    "wire_dtype": (
        lambda: new(wire_dtype="int8"),
        "ValueError: wire_dtype must be None or 'bfloat16', got 'int8'",
    ),
    "norm": (
        lambda: new(max_grad_norm=0.0),
        "ValueError: max_grad_norm must be finite and above 0",
    ),
    "norms differ": (
        lambda: new(max_grad_norm=1.0 + hvd.rank()),
        "RanksDisagreeError: ranks disagree on the pipeline's options",
    ),
    "microbatches": (
        lambda: new(microbatches=2),
        "ValueError: mode 'stash' updates after every minibatch.*got 2",
    ),
    "not built": (
        lambda: new().gather(),
        "ValueError: the pipeline is built with its first minibatch",
    ),
    "modes differ": (
        lambda: engine_of(["stash", "flush"][hvd.rank() % 2], (2, 1), "adam"),
        "RanksDisagreeError: ranks disagree on the mode of the pipeline",
    ),
    "lengths differ": (
        lambda: new().train_epoch(minibatches()[hvd.rank() :]),
        "RanksDisagreeError: ranks disagree on the number of minibatches",
    ),
    "no length": (lambda: new().train_epoch(iter(minibatches())), "TypeError: .*has no len"),
    "one rank's batch": (
        lambda: new().train_epoch([3] if hvd.rank() == 1 else minibatches()[:1]),
        "rank 1 was given something wrong|must yield .x, y., got int|number of mi",
    ),
    "closed": (
        lambda: closed().train_epoch(minibatches()),
        "ValueError: this pipeline is closed: make another",
    ),
    "one sample": (
        lambda: new(sample=minibatches()[0] if hvd.rank() == 1 else None),
        "RanksDisagreeError: ranks disagree on whether a sample is given",
    ),
    "no checkpoint": (
        lambda: new(sample=minibatches()[0]).load("/nonexistent"),
        "HvdPipeError: .*no checkpoint of such a pipeline",
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
