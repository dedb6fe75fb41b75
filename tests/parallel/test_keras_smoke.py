"""Every strategy of Keras is its equation on two ranks, over both launchers."""

from __future__ import annotations

from functools import partial

import pytest
from keras_pipeline import Case, check
from keras_problem import OPTIMIZERS, trained
from keras_reference import trajectory
from on_ranks import on_ranks
from trajectories import compare

import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.tensorflow import pipedream

LAUNCHERS = [
    pytest.param(launcher, marks=on_ranks(2, launcher=launcher, init=pipedream.init))
    for launcher in ("mpi", "gloo")
]


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("strategy", ["merged-gradient", "pipe-sgd", "cocod:period=4"])
def test_a_strategy(strategy: str, launcher: str) -> None:
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](), strategy=strategy)
    compare(
        trained("fit", optimizer, hvd.rank()), partial(trajectory, 2, strategy, "momentum"), 1e-10
    )


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_pipeline(launcher: str) -> None:
    check(Case("stash", (1, 1), "momentum"), recurrent=False)
