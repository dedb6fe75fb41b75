"""What becomes of an engine whose run has failed, and of a closed one; no rank but this."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from horovod.common.process_sets import ProcessSet

from hvd_pipe.pipeline.build import Framework
from hvd_pipe.pipeline.executor import Times
from hvd_pipe.pipeline.pipedream import PipeDreamBase
from hvd_pipe.pipeline.stage import Microbatch
from hvd_pipe.runtime.consensus import Agreement

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

    def _made(self, sample: Any) -> Any:
        self.made += 1
        return self._parts

    def _restored(self, built: Any, directory: Path) -> tuple[int, bool]:
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
