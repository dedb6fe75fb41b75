"""Elastic jobs: workers come, go, fail and are killed, and training goes on as equations say."""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
from horovod.torch import mpi_ops
from ranks import once
from workers_elastic import LR, METHODS, NUMEL, Scenario, Weights, target

from hvd_pipe import restarts
from hvd_pipe.errors import HvdPipeError

PERIOD = 3
TIMEOUT = 240.0
ROUNDED = 0.01  # what codecs may lose; weights are up to 1

# Names of one host are hosts of their own to Horovod, and a host that fails is not used again.
# New workers must have started within Gloo's timeout, and survivors may wait for one.
SCENARIOS = {
    "added": (1, 30, Scenario(24, 5, "localhost:1\n", 12, "hosts", "localhost:1\nLOCALHOST:1\n")),
    "replaced": (
        2,
        30,
        Scenario(36, 5, "localhost:1\nLOCALHOST:1\n", 20, "hosts", "localhost:1\n127.0.0.1:1\n"),
    ),
    "killed": (3, 5, Scenario(24, 5, "localhost:1\nLOCALHOST:1\n127.0.0.1:1\n", 12, "kill")),
    "raised": (2, 30, Scenario(24, 5, "localhost:1\nLOCALHOST:1\n", 12, "raise")),
}


@dataclass(frozen=True)
class Outcome:
    """What the workers that were left have written, and what the launcher has printed."""

    results: list[dict[str, Any]]
    said: str

    @property
    def starts(self) -> list[tuple[int, int]]:
        """At which steps, and with how many workers, training has started."""
        return [(step, workers) for step, workers in self.results[0]["starts"]]

    def weights(self, method: str) -> list[Weights]:
        return [np.array(result["weights"][method]) for result in self.results]


@once
def outcome(name: str) -> Outcome:
    """Run a scenario as users run elastic jobs."""
    workers, gloo_timeout, scenario = SCENARIOS[name]
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        directory = Path(folder)
        scenario.write(directory)
        script = directory / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat {directory}/hosts\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        command = [
            *("env", "-u", "HOROVOD_CYCLE_TIME", *ranks.HOROVODRUN, "-np", str(workers)),
            *("--min-np", "1", "--max-np", "4", "--network-interface", "lo"),
            *("--host-discovery-script", str(script), sys.executable),
            *(str(Path(__file__).with_name("workers_elastic.py")), folder),
        ]
        env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(gloo_timeout)}
        code = ranks._run(command, directory, env, TIMEOUT)
        said = (directory / "log.launcher").read_text(errors="replace")
        found = [json.loads(file.read_text()) for file in sorted(directory.glob("result.*"))]
        assert code == 0, f"{name}: exit status {code}\n{said[-8000:]}"
        assert found, f"{name}: nobody has finished\n{said[-8000:]}"
        return Outcome(found, said)


class Reference:
    """Workers in one process that compute what a strategy's equation says."""

    def __init__(self, workers: int) -> None:
        self.x = [np.zeros(NUMEL) for _ in range(workers)]

    def gradient(self, rank: int, step: int) -> Weights:
        return self.x[rank] - target(rank, step)

    def mean_gradient(self, step: int) -> Weights:
        gradients = [self.gradient(rank, step) for rank in range(len(self.x))]
        return np.asarray(np.mean(gradients, axis=0))

    def step(self, step: int) -> None:
        mean = self.mean_gradient(step)
        self.x = [x - LR * mean for x in self.x]

    def drain(self) -> None:
        """Do what ``synchronize()`` does."""

    def move(self, workers: int) -> None:
        """Go on with as many workers, all of them as the first one is."""
        self.x = [self.x[0].copy() for _ in range(workers)]


class PipeReference(Reference):
    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.pending: Weights | None = None

    def step(self, step: int) -> None:
        mean = self.mean_gradient(step)
        self.drain()
        self.pending = mean

    def drain(self) -> None:
        if self.pending is not None:
            self.x = [x - LR * self.pending for x in self.x]
        self.pending = None


class CoCoDReference(Reference):
    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.start: list[Weights] = []
        self.average = np.zeros(NUMEL)
        self.local = 0

    def begin(self) -> None:
        self.start = list(self.x)
        self.average = np.mean(self.x, axis=0)
        self.local = 0

    def step(self, step: int) -> None:
        if not self.start:
            self.begin()
        self.x = [x - LR * self.gradient(rank, step) for rank, x in enumerate(self.x)]
        self.local += 1
        if self.local == PERIOD:
            pairs = zip(self.x, self.start, strict=True)
            self.x = [self.average + (x - start) for x, start in pairs]
            self.begin()

    def drain(self) -> None:
        self.x = [np.asarray(np.mean(self.x, axis=0)) for _ in self.x]
        self.start = []

    def move(self, workers: int) -> None:
        super().move(workers)
        self.start = self.start[:1] * workers


REFERENCES = {
    "merged-gradient": Reference,
    "merged-gradient, bf16": Reference,
    "pipe-sgd": PipeReference,
    "pipe-sgd, int8": PipeReference,
    "cocod": CoCoDReference,
    "cocod, int8": CoCoDReference,
}


def expected(kind: type[Reference], outcome: Outcome, scenario: Scenario) -> Weights:
    """The weights at the end; a planned change drains, a failure goes back to a commit."""
    (_, workers), *later = outcome.starts
    moves = dict(later)
    reference = kind(workers)
    for step in range(scenario.steps):
        if step in moves:
            if scenario.what == "hosts":
                reference.drain()
            reference.move(moves[step])
        reference.step(step)
    reference.drain()
    return reference.x[0]


STARTS = {
    "added": [(0, 1), (13, 2)],
    "replaced": [(0, 2), (21, 2)],
    "killed": [(0, 3), (10, 2)],
    "raised": [(0, 2), (10, 2)],
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_training_starts_again_where_it_should(name: str) -> None:
    """After a planned change at the same step, after a failure at the last commit."""
    found = outcome(name)
    assert found.starts == STARTS[name]
    assert [result["size"] for result in found.results] == [STARTS[name][-1][1]] * len(
        found.results
    )
    assert len(found.results) == STARTS[name][-1][1]


@pytest.mark.parametrize("name", ["killed", "raised"])
def test_a_failure_is_over_soon(name: str) -> None:
    """The bound is far above the seconds in README, for machines that do other things."""
    for result in outcome(name).results:
        assert result["recovered_s"] < 60


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("method", METHODS)
def test_replicas_are_equal(name: str, method: str) -> None:
    first, *others = outcome(name).weights(method)
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("method", REFERENCES)
def test_training_goes_on_as_the_equation_says(name: str, method: str) -> None:
    """What was in flight at a commit goes on, what was sent later is lost on all ranks alike."""
    found, scenario = outcome(name), SCENARIOS[name][-1]
    wanted = expected(REFERENCES[method], found, scenario)
    tolerance = 1e-12 if METHODS[method].exact else ROUNDED
    np.testing.assert_allclose(found.weights(method)[0], wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("method", sorted(METHODS.keys() - REFERENCES.keys()))
def test_training_goes_on(name: str, method: str) -> None:
    """Weights follow the moving target as merged-gradient's do, a step later."""
    found = outcome(name)
    away = np.abs(found.weights(method)[0] - found.weights("merged-gradient")[0]).max()
    assert away < 0.1


@pytest.mark.parametrize("name", ["killed", "raised"])
def test_a_failure_is_told_in_one_line(name: str) -> None:
    said = outcome(name).said
    told = [line for line in said.splitlines() if "a worker has failed" in line]
    assert told
    assert all("back to the last commit" in line for line in told)
    assert len(told) <= SCENARIOS[name][0]


def test_settings_that_crash_a_reset_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod segfaulted in its second start with both set, and init() itself set one of them."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "0.1")
    monkeypatch.delenv("HOROVOD_FUSION_THRESHOLD", raising=False)
    restarts.prepare(mpi_ops)
    assert "HOROVOD_FUSION_THRESHOLD" not in os.environ
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
    with pytest.raises(HvdPipeError, match="unset HOROVOD_CYCLE_TIME"):
        restarts.prepare(mpi_ops)
