"""A pipeline's engine, its clipping, and a stage in PyTorch, with no rank but this one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from horovod.common.process_sets import ProcessSet
from torch import nn

from hvd_pipe.pipeline.build import Framework
from hvd_pipe.pipeline.executor import Times
from hvd_pipe.pipeline.messages import Boundary
from hvd_pipe.pipeline.pipedream import PipeDreamBase
from hvd_pipe.pipeline.stage import Buffer, Clipping, Feed, Microbatch, MicrobatchIndex, Norms
from hvd_pipe.runtime.consensus import Agreement
from hvd_pipe.torch.pipedream.graph import cut, specs, trace
from hvd_pipe.torch.pipedream.stage import TorchStage
from hvd_pipe.torch.pipedream.tensors import TorchMessages, split
from hvd_pipe.torch.pipedream.weights import Updates, WeightVersions

ALONE = ProcessSet([0])
ALONE.size, ALONE.rank, ALONE.included = lambda: 1, lambda: 0, lambda: True


class Transport:
    def __init__(self) -> None:
        self.closed: list[bool] = []

    def close(self, meet: bool) -> None:
        self.closed.append(meet)


class Alone(PipeDreamBase[Any]):
    """An engine whose runner does what a test wants."""

    def __init__(self, train: Any) -> None:
        agreement = Agreement(lambda data, *_: [data])
        horovod: Any = SimpleNamespace(
            is_initialized=lambda: True, rank=ALONE.rank, size=ALONE.size
        )
        options: Any = SimpleNamespace(progress=False, check=lambda _workers: [])
        framework = Framework(horovod, agreement, ALONE, start=None, add=None)  # type: ignore[arg-type]
        super().__init__(options, framework, list, None)
        self.transport, self.made = Transport(), 0
        self._parts = SimpleNamespace(
            assignment=SimpleNamespace(microbatches=1),
            connections=SimpleNamespace(transport=self.transport),
            stage=SimpleNamespace(),
            train=train,
        )

    def save(self, directory: Any) -> None: ...

    def _split(self, batch: Any, count: int) -> list[Microbatch]:
        return [Microbatch((batch,), None, 1, 1.0, 0)] * count

    def _build_part(self, sample: Any) -> Any:
        self.made += 1
        return self._parts

    def _load_checkpoint(self, built: Any, directory: Path) -> tuple[int, bool]:
        return 7, True


def fails_on(number: int) -> Any:
    """A runner whose run of this number fails."""
    runs: list[int] = []

    def train(*_: Any, progress: bool) -> str:
        runs.append(len(runs))
        if runs[-1] == number:
            raise OSError("a bad sample")
        return "stats"

    return train


def test_a_failed_run_is_the_last() -> None:
    engine = Alone(fails_on(1))
    assert engine.train_epoch([1]) == "stats"
    with pytest.raises(OSError, match="bad sample"):
        engine.train_epoch([1])
    with pytest.raises(ValueError, match=r"has failed.*make another PipeDream"):
        engine.train_epoch([1])
    assert engine.epoch == engine.made == 1
    engine.close()
    assert engine.transport.closed == [False]  # another rank may never come


def test_a_closed_engine_says_so() -> None:
    engine = Alone(fails_on(-1))
    engine.train_epoch([1])
    engine.close()
    engine.close()
    assert engine.transport.closed == [True]
    for use in (lambda: engine.train_epoch([1]), lambda: engine.stage, lambda: engine.load("x")):
        with pytest.raises(ValueError, match="closed: make another"):
            use()


def test_what_is_not_built_names_what_builds_it() -> None:
    engine = Alone(fails_on(-1))
    with pytest.raises(
        ValueError, match=r"PipeDream\(\.\.\., sample=\) or load\(\.\.\., sample=\)"
    ):
        engine.load("x")
    engine.load("x", sample=1)
    assert (engine.epoch, engine.made) == (7, 1)


def test_the_utilisation_of_an_epoch_that_never_fills_the_pipeline() -> None:
    """It was 0 for one minibatch."""
    assert Times(total_s=4.0, compute_s=1.0).utilisation == 0.25
    assert (
        Times(total_s=4.0, compute_s=1.0, steady_s=2.0, steady_compute_s=0.9).utilisation == 0.45
    )
    assert Times().utilisation == 0.0


# Clipping by the norm over all stages.

RANKS = ProcessSet([0, 1])  # of which no rank asks anything here
RANKS.size = lambda: 2  # type: ignore[method-assign]


def clipping(
    most: float | None,
    together: bool = False,
    replicas: ProcessSet | None = None,
    others: Sequence[float] = (),
    stages: int = 2,
) -> Clipping:
    """Of stage 0, where the other ranks that take part bring these numbers to each sum."""

    def add(value: float, _: str, ranks: ProcessSet) -> float:
        assert ranks is RANKS
        return value + sum(others)

    return Clipping(most, together, Norms(0, stages), replicas, RANKS, add)


def never() -> float:
    raise AssertionError("nobody asks for the norm where nothing is clipped")


def test_nothing_is_asked_where_nothing_is_clipped() -> None:
    found = clipping(None)
    assert found.factor(never) == 1.0
    assert math.isnan(found.norms.squared[0])


@pytest.mark.parametrize("most", [0.5, 5.0, 6.0])
def test_it_is_pytorch_s_rule(most: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([parameter], most)
    factor = clipping(most).factor(lambda: 25.0)
    assert factor == pytest.approx(float(parameter.grad[0]) / 3.0, rel=1e-12)


def test_what_is_not_known_counts_as_nothing() -> None:
    found = clipping(1.0, stages=3)
    found.norms.update([math.nan, 11.0, math.nan], from_before=False)
    assert found.factor(lambda: 25.0) == pytest.approx(1.0 / 6.0, rel=1e-6)
    assert found.norms.squared[:2] == (25.0, 11.0)


def test_stages_that_update_together_add_up() -> None:
    """Each replica brings its share of the own norm, so that the sum has it once."""
    found = clipping(1.0, together=True, replicas=RANKS, others=(12.5, 11.0))
    assert found.factor(lambda: 25.0) == pytest.approx(1.0 / 6.0, rel=1e-6)


def test_replicas_take_the_mean_of_what_they_were_told() -> None:
    found = clipping(1.0, replicas=RANKS, others=(4.0,))
    found.norms.update([math.nan, 18.0], from_before=False)
    assert found.factor(lambda: 25.0) == pytest.approx(1.0 / 6.0, rel=1e-6)


# A worker's stage in PyTorch.


class Shifted(nn.Module):
    """A stage that ends in the sum of a parameter, which reaches it by views alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.shift = nn.Parameter(torch.zeros(4))
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)) + self.shift.unsqueeze(0)
        return self.last(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("samples", [1, 2])
def test_gradients_do_not_stay_in_the_memory_of_messages(samples: int) -> None:
    """Autograd gives a parameter the very gradient that has come, where nothing is to be summed.

    The message's memory is then posted for the next one, before the gradient is applied.
    """
    sample = (torch.ones(2, 4),)
    traced = trace(Shifted(), sample)
    names = [layer.name for layer in traced.layers]
    cuts = cut(traced, [names[:-1], names[-1:]], specs(traced, sample))
    device = torch.device("cpu")
    boundary = Boundary(cuts[0].outputs, lambda x: TorchMessages(x, 2, "stage 0", False, device))

    def overwrite(message: Buffer) -> None:
        message[:] = 255

    optimizer = torch.optim.SGD(cuts[0].module.parameters(), lr=1.0)
    clipping = Clipping(None, False, Norms(0, 2), None, ProcessSet([0]), lambda x, *_: x)
    updates = Updates(optimizer, None, None, clipping, mean=True)
    stage = TorchStage(cuts[0], None, updates, None, boundary, False, overwrite, device)
    stage.feed = Feed([(torch.ones(samples, 4), torch.zeros(samples, 2))], 1, split)
    stage.begin(training=True)
    index, norms = MicrobatchIndex(0, 0), (math.nan, math.nan)
    stage.forward(index, 0)
    stage.output(index)
    gradient = torch.full((samples, 4), 0.5)
    stage.take_gradient(index, boundary.gradients.pack(index, [gradient], 0, norms))
    stage.backward(index, 0)
    stage.update(1, keep=False)
    assert cuts[0].module.get_parameter("shift").tolist() == [-0.5 * samples] * 4


@pytest.mark.parametrize("keep", [True, False])
def test_optimizers_may_give_parameters_other_tensors(keep: bool) -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    versions = WeightVersions([weight])
    with versions.updating(1, keep):
        weight.data = weight.data + 1.0
    if keep:
        versions.use(0)
        assert weight.item() == 1.0
    versions.restart()
    assert weight.item() == 2.0
