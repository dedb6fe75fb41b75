"""Elastic jobs of Keras and of tapes: a worker comes, another is killed, training goes on."""

from __future__ import annotations

import json
import stat
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import ranks
import tensorflow as tf
import workers_keras_elastic as workers
from cases import of_case
from keras_problem import Weights
from ranks import once, run_ranks
from workers_keras_elastic import METHODS, SWAPPED, Scenario

TIMEOUT = 400.0
# A new worker must have started within it, and a survivor may wait for one.
GLOO_TIMEOUT = 120

# Names of one host are hosts of their own to Horovod, and a host that fails is not used again.
# Under merged-gradient, worker 1 would die while plans are tried.
TWO = "localhost:1\nLOCALHOST:1\n"
WAYS = ["pipe-sgd", "cocod:period=4"]  # "merged-gradient" and TAPE work, too
STOCK = f"{SWAPPED} pipe-sgd"
ADDED_AT, KILLED_AT = 9, 19
STARTS = [(0, 2), (10, 3)]
COMMITS = [18]
LOCAL_COMMITS = [18, 20]  # a worker on its own under CoCoD may commit before it hears of the end


@dataclass(frozen=True)
class Outcome:
    """What the workers that were left have written, and what the launcher has printed."""

    results: list[dict[str, Any]]
    loss_before: float
    said: str


@once
def outcome(way: str) -> Outcome:
    """Run a job as users run elastic jobs."""
    scenario = Scenario(way, ADDED_AT, KILLED_AT, TWO, TWO + "127.0.0.1:1\n")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        directory = Path(folder)
        scenario.write(directory)
        script = directory / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat {directory}/hosts\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        command = [
            *(*ranks.HOROVODRUN, "-np", "2"),
            *("--min-np", "2", "--max-np", "3", "--network-interface", "lo"),
            *("--host-discovery-script", str(script), sys.executable),
            *(str(Path(workers.__file__)), folder),
        ]
        env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(GLOO_TIMEOUT)}
        code = ranks._run(command, directory, env, TIMEOUT)
        said = (directory / "log.launcher").read_text(errors="replace")
        found = [json.loads(file.read_text()) for file in sorted(directory.glob("result.*"))]
        assert code == 0, f"{way}: exit status {code} within {TIMEOUT:g} s\n{said[-8000:]}"
        assert found, f"{way}: nobody has finished\n{said[-8000:]}"
        return Outcome(found, float((directory / "loss").read_text()), said)


# nightly: jobs whose workers come and go take a minute, and wait for times that Gloo is given.
@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_training_starts_again_where_it_should(way: str) -> None:
    """After a host has come at the same step, after a failure at the last commit."""
    found = outcome(way)
    *starts, last = [tuple(start) for start in found.results[0]["starts"]]
    assert starts == STARTS
    assert last in [(step, 2) for step in (LOCAL_COMMITS if "cocod" in way else COMMITS)]
    assert [result["size"] for result in found.results] == [2, 2]
    assert "back to the last commit" in found.said


@pytest.mark.nightly
def test_swapping_the_class_alone() -> None:
    """Horovod's own elastic.run resets unseen: the others' graphs still spoke of two workers.

    It did not know the failure of a message of ours by its name either, and knows nothing of
    pending gradients, which is said.
    """
    found = outcome(STOCK)
    *starts, last = [tuple(start) for start in found.results[0]["starts"]]
    assert starts == STARTS
    assert last == (COMMITS[0], 2)
    assert "take `run` and the state from hvd_pipe.tensorflow.elastic" in found.said


@pytest.mark.nightly
@pytest.mark.parametrize("way", [*WAYS, STOCK])
def test_replicas_are_equal(way: str) -> None:
    first, second = outcome(way).results
    assert first["weights"] == second["weights"]
    assert first["starts"] == second["starts"]
    if "cocod" not in way:  # its workers keep momenta of their own
        assert first["slots"] == second["slots"]


@pytest.mark.nightly
def test_each_gradient_is_applied_once() -> None:
    """A falling loss does not tell: it falls with a gradient that is lost or doubled, too."""
    found = outcome("pipe-sgd")
    starts = [(step, size) for step, size in found.results[0]["starts"]]
    wanted = pipelined(starts)
    for result in found.results:
        np.testing.assert_allclose(result["weights"], wanted, rtol=0, atol=1e-10)


def pipelined(starts: list[tuple[int, int]]) -> Weights:
    """Simulate Pipe-SGD in one process, with these (step, workers) after each start.

    When a host comes, the pending gradients become their average. When a worker fails, all go on
    from rank 0's.
    """
    model = workers.make_model()
    optimizer = keras.optimizers.SGD(0.02, momentum=0.5)
    variables = model.trainable_variables

    def gradients(rank: int, step: int) -> list[Any]:
        x, y = workers.sample(rank, step)
        with tf.GradientTape() as tape:
            loss = workers.loss_of(model, x, y)
        return list(tape.gradient(loss, [each.value for each in variables]))

    def mean(each: list[list[Any]]) -> list[Any]:
        return [sum(parts) / len(each) for parts in zip(*each, strict=True)]

    pending: list[list[Any]] = []
    ends = [step for step, _ in starts[1:]] + [workers.EPOCH * workers.EPOCHS]
    for number, ((start, size), end) in enumerate(zip(starts, ends, strict=True)):
        if pending:
            came = size > starts[number - 1][1]
            pending = [mean(pending) if came else pending[0]] * size
        for step in range(start, end):
            fresh = [gradients(rank, step) for rank in range(size)]
            if pending:
                optimizer.apply(mean(pending), variables)
            pending = fresh
    optimizer.apply(mean(pending), variables)
    return workers.weights_of(model)


@pytest.mark.nightly
@pytest.mark.parametrize("way", [*WAYS, STOCK])
def test_the_loss_goes_on_falling(way: str) -> None:
    found = outcome(way)
    assert found.results[0]["loss"] < found.loss_before


observed = once(lambda: run_ranks(2, workers.observations, timeout=400))


def ranks_of(case: str) -> list[dict[str, Any]]:
    return of_case(observed(), case)


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("name", METHODS)
def test_a_commit_comes_back_bit_for_bit(name: str) -> None:
    """Weights, slots and what is in flight; and what is computed from them."""
    for found in ranks_of(f"committed {name}"):
        assert_same(found["restored"], found["committed"])
        assert found["step"] == 7
        assert_same(found["gone on again"], found["gone on"])


@pytest.mark.parametrize("name", METHODS)
def test_ranks_go_on_from_the_first(name: str) -> None:
    """What codecs have left over is dropped, as it is of one rank."""
    first, second = ranks_of(f"committed {name}")
    assert_same(second["synced"], first["synced"])
    kept = [key for key in first["synced"] if "lost." not in key]
    for key in kept:
        np.testing.assert_array_equal(first["synced"][key], first["gone on again"][key], key)
    for key in first["synced"].keys() - set(kept):
        assert not np.any(first["synced"][key])
    weights = [key for key in first["ended"] if key.startswith("variable")][:6]
    for key in weights:
        np.testing.assert_array_equal(second["ended"][key], first["ended"][key], key)


@pytest.mark.parametrize("name", METHODS)
def test_horovod_may_end_and_start_again(name: str) -> None:
    """Nothing is lost, and graphs are traced anew; the same workers compute the same."""
    for found in ranks_of(f"again {name}"):
        assert_same(found["again"], found["whole"])


def test_states_say_what_they_need() -> None:
    for found in ranks_of("wrong"):
        assert "model.build" in found["unbuilt"]
        assert "compile the model" in found["no optimizer"]
        assert "pass variables=" in found["no variables"]


def test_an_interrupted_epoch_has_the_batches_that_were_left() -> None:
    for found in ranks_of("interrupted"):
        assert found["alone"] == {"batches": [2, 6, 6], "epoch": 5, "batch": 0}
        assert found["stopped before"] == {"batches": [2], "epoch": 3, "batch": 0}
