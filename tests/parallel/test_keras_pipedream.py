"""PipeDream for Keras is its equations: stages by hand, then pipelines of processes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import workers_keras_pipedream
from cases import of_case
from horovod.common.process_sets import ProcessSet
from keras_pipeline import (
    METHODS,
    OPTIMIZERS,
    STAGES,
    Reference,
    loss_fn,
    make_batches,
    make_model,
    values_of,
)
from ranks import once, run_ranks
from workers_keras_pipedream import EPOCHS, MINIBATCHES, Case, is_close

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.pipeline.messages import Boundary
from hvd_pipe.pipeline.norms import Clipping, Norms
from hvd_pipe.pipeline.stage import Feed, MicrobatchIndex
from hvd_pipe.planning.instructions import (
    Backward,
    Forward,
    RecvActivation,
    RecvGradient,
    SendActivation,
    SendGradient,
    Update,
)
from hvd_pipe.planning.schedule import schedule
from hvd_pipe.tensorflow.pipedream.cut import cut, shapes_of
from hvd_pipe.tensorflow.pipedream.graph import graph_of
from hvd_pipe.tensorflow.pipedream.passes import Losses
from hvd_pipe.tensorflow.pipedream.stage import KerasStage
from hvd_pipe.tensorflow.pipedream.tensors import KerasMessages, split

TOLERANCE = 1e-10
CASES: dict[int, list[Case]] = {
    2: [
        Case("stash", (1, 1), "momentum"),
        Case("2bw", (1, 1), "adam"),
        Case("flush", (1, 1), "momentum"),
        Case("stash", (2,), "momentum"),
        Case("stash", (1, 1), "momentum", most=3.0),
        Case("stash", (1, 1), "adam", short=True),
        Case("stash", (1, 1), "momentum", in_transit=2),
    ],
    3: [
        Case("stash", (2, 1), "momentum"),
        Case("2bw", (2, 1), "momentum"),
        Case("flush", (2, 1), "adam"),
        Case("stash", (1, 1, 1), "adam"),
        Case("flush", (2, 1), "momentum", most=3.0, recompute=True),
        Case("stash", (2, 1), "momentum", in_transit=2),
    ],
}

jobs = once(
    lambda n, launcher, transport: run_ranks(
        n,
        workers_keras_pipedream.equations,
        CASES[n] if launcher == "mpi" else CASES[n][:2],
        transport,
        launcher=launcher,
        timeout=280,
    )
)


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


@pytest.mark.parametrize(
    ("stages", "optimizer", "recompute"),
    [
        (2, "momentum", False),
        (3, "momentum", False),
        (3, "adam", False),
        (3, "momentum", True),
    ],
)
@pytest.mark.parametrize(("mode", "m"), [("stash", 1), ("2bw", 4), ("flush", 4)])
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


@pytest.mark.parametrize(
    ("n", "launcher", "transport", "case"),
    [(n, "mpi", "mpi", case) for n, cases in CASES.items() for case in cases]
    + [(3, "gloo", "process-sets", case) for case in CASES[3][:2]],
)
def test_pipelines_are_the_equation(n: int, launcher: str, transport: str, case: Case) -> None:
    """Losses of two epochs, all weights and statistics after them, and an evaluation."""
    mode, replicas, optimizer, *_ = case
    batches = make_batches(MINIBATCHES)
    layers = STAGES[len(replicas)] if len(replicas) > 1 else [sum(STAGES[2], ())]
    m = 1 if mode == "stash" else 4
    make = OPTIMIZERS[optimizer]
    reference = Reference(layers, replicas, mode, make, m, case.most, case.short, case.in_transit)
    wanted = [reference.train_epoch(batches) for _ in range(EPOCHS)]
    seen = workers_keras_pipedream.unseen()
    x, y = (np.concatenate(parts) for parts in zip(*seen, strict=True))
    if case.most is not None:
        assert MINIBATCHES < reference.clipped < 2 * EPOCHS * MINIBATCHES
    output = reference.model(x, training=False)
    right = float(np.mean(np.argmax(output, axis=-1) == y))
    for losses, weights, (loss, metric, samples) in of_case(jobs(n, launcher, transport), case):
        assert losses == pytest.approx(wanted, abs=TOLERANCE)
        assert is_close(weights, values_of(reference.model)) <= TOLERANCE
        assert loss == pytest.approx(float(loss_fn(y, output)), abs=TOLERANCE)
        assert (metric, samples) == (pytest.approx(right), len(x))


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("checkpoints")
    results = once(
        lambda: run_ranks(3, workers_keras_pipedream.features, str(directory), timeout=280)
    )
    return lambda case: of_case(results(), case)


def test_a_measured_plan_trains(features: Any) -> None:
    (config, losses), *others = features("auto")
    assert sum(map(int, config.split("-"))) == 3
    assert losses[-1] < losses[0]
    assert all(other == (config, losses) for other in others)


def test_datasets_of_tensorflow(features: Any) -> None:
    for streamed, listed in features("dataset"):
        assert streamed == pytest.approx(listed, abs=TOLERANCE)


def test_a_resumed_run_is_the_same_bit_for_bit(features: Any) -> None:
    for epoch, kept, plain, after, again in features("resume"):
        assert epoch == 1
        assert is_close(plain, kept) == 0.0
        assert is_close(again, after) == 0.0
        assert is_close(after, kept) > 1e-4


def test_a_run_is_resumed_with_other_stages(tmp_path: Path) -> None:
    results = run_ranks(3, workers_keras_pipedream.repartition, str(tmp_path), timeout=200)
    plain_model = make_model()
    plain_model.load_weights(tmp_path / "model.weights.h5")
    assert is_close(values_of(plain_model), results[0][1]) == 0.0
    for _, kept, plain, after, again in results:
        assert is_close(plain, kept) == 0.0
        # Other stages see other versions, so it is another run, but not far away.
        assert 0.0 < is_close(again, after) < 0.2


def test_a_resumed_run_is_the_same_under_other_names(features: Any) -> None:
    """Seeds of dropout are those of each replica, although Keras has named the layers anew."""
    for (one, other), loss, again in features("renamed"):
        assert one != other
        assert loss == again


def test_a_damaged_checkpoint_is_refused_and_changes_nothing(features: Any) -> None:
    for *damaged, other in features("damage"):
        assert len(damaged) == 3
        for said, moved in damaged:
            assert "no checkpoint of such a pipeline" in said
            assert re.search(r"is damaged|line \d+ column", said)
            assert moved == 0.0
        assert re.search(r"of another optimizer: it has no 'slot.*SGD needs", other[0])
        assert other[1] == 0.0


def test_schedules_count_minibatches(features: Any) -> None:
    """All of which are those of one epoch, also where a stage's last round is short."""
    rates = [[0.2, 0.1]] * 2 + [[0.1, 0.05]]
    assert [np.round(one, 6).tolist() for one in features("schedule")] == rates


MISTAKES = {
    "mode": "ValueError: mode must be one of stash, 2bw, flush, got 'vertical-sync'.*PyTorch",
    "another mode": "ValueError: mode must be one of stash, 2bw, flush, got 'fast'$",
    "workers": "ValueError:.*3-1.*3",
    "transport": "ValueError: transport must be one of .*'pigeon'",
    "shared": "ValueError: optimizer_fn must make a new optimizer in each call",
    "instance": "TypeError: optimizer_fn makes an optimizer .*keras.optimizers.Adam",
    "clipping": "ValueError: global_clipnorm=1.0 would be the norm of one stage",
    "wire_dtype": "ValueError: wire_dtype must be None or 'bfloat16', got 'int8'",
    "norm": "ValueError: max_grad_norm must be finite and above 0",
    "norms differ": "RanksDisagreeError: ranks disagree on the pipeline's options",
    "microbatches": "ValueError: mode 'stash' updates after every minibatch.*got 2",
    "not built": "ValueError: the pipeline is built with its first minibatch",
    "modes differ": "RanksDisagreeError: ranks disagree on the mode of the pipeline",
    "lengths differ": "RanksDisagreeError: ranks disagree on the number of minibatches",
    "no length": "TypeError: .*has no len",
    "one rank's batch": "rank 1 was given something wrong|must yield .x, y., got int|number of mi",
    "closed": "ValueError: this pipeline is closed: make another",
    "one sample": "RanksDisagreeError: ranks disagree on whether a sample is given",
    "no checkpoint": "HvdPipeError: .*no checkpoint of such a pipeline",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(features: Any, name: str) -> None:
    for found in features("errors"):
        assert re.search(MISTAKES[name], found[name]), found[name]
