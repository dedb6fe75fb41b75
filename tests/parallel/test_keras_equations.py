"""Each strategy under Keras 3 is its equation: every weight after every batch."""

from __future__ import annotations

import functools
from typing import Any

import keras
import keras_reference
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
from keras_problem import OPTIMIZERS, loss_of, make_model, trained, weights_of
from keras_training import data, fit, forward, init_nodes
from on_ranks import gather, on_ranks
from trajectories import assert_close, compare

import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.tensorflow.pending import due

TOLERANCE = 1e-10
STRATEGIES = (
    "merged-gradient",
    "merged-gradient:plan=wfbp",
    "merged-gradient:bucket_bytes=64",
    "pipe-sgd",
    "pipe-sgd:warmup_steps=5",
    "pipe-sgd:prediction=local",
    "pipe-sgd:prediction=previous,warmup_steps=3",
    "cocod:period=1",
    "cocod:period=4",
    "cocod:period=3,warmup_steps=4",
    "cocod:period=4,momentum=average",
    "cocod:period=3,pull_back=0.6,anchor_momentum=0.7",
    "cocod:period=3,outer=nesterov,outer_lr=0.3,outer_momentum=0.6",
    "cocod:period=2,momentum=average,outer=nesterov,outer_lr=0.5,warmup_steps=3",
    "cocod:period=2,momentum=average,pull_back=0.6,anchor_momentum=0.5,warmup_steps=3",
    "cocod:period=4,fragments=2",
    "cocod:period=4,fragments=4,outer=nesterov,outer_lr=0.3,outer_momentum=0.6",
    "cocod:period=4,fragments=2,pull_back=0.6,anchor_momentum=0.7,warmup_steps=3",
)
# A step outside of fit differs by what a strategy keeps in graphs, not by its options.
FAMILIES = tuple(
    name
    for name in STRATEGIES
    if name in ("merged-gradient", "pipe-sgd") or "warmup_steps" in name or "fragments=4" in name
)
OTHERS = ("sgd", "adam", "clipped", "scheduled", "averaged", "accumulating")
MOMENTS = "cocod:period=5,momentum=average"
WEIGHTED = "cocod:period=3,warmup_steps=4,weights=3/1"  # the warm-up took a plain mean
WITHIN = "cocod:period=4,fragments=4,within=node"

Key = tuple[int, str, str, str]  # ranks, how they train, a strategy, an optimizer

KEYS: list[Key] = [
    *((2, "fit", strategy, "momentum") for strategy in (*STRATEGIES, WEIGHTED)),
    *((2, mode, FAMILIES[i], "momentum") for mode in ("function", "eager") for i in (0, 3, -1)),
    *((2, "fit", "pipe-sgd", optimizer) for optimizer in OTHERS),
    *((2, "fit", "cocod:period=4", optimizer) for optimizer in ("averaged", "accumulating")),
    (2, "fit", MOMENTS, "forgetful"),
    (4, "fit", WITHIN, "momentum"),
    (1, "fit", "cocod:period=4,fragments=2,within=node", "momentum"),
]
# Nightly: other optimizers, and what goes together on four ranks.
NIGHTLY: list[Key] = [
    *((2, "fit", "merged-gradient", optimizer) for optimizer in OTHERS),
    *((2, mode, name, "momentum") for mode in ("function", "eager") for name in FAMILIES),
    (4, "fit", "cocod:period=3,within=node,warmup_steps=4,weights=3/1/1/2", "momentum"),
    (4, "fit", f"{WITHIN},outer=nesterov,outer_lr=0.3", "accumulating"),
]


def cell(key: Key) -> Any:
    n, _, strategy, _ = key
    marks = [on_ranks(n, init=init_nodes if "within=node" in strategy else hvd.init)]
    if key not in KEYS:
        marks.append(pytest.mark.nightly)
    return pytest.param(*key[1:], id="-".join(map(str, key)), marks=marks)


@pytest.mark.parametrize(
    ("mode", "strategy", "optimizer"), [cell(key) for key in dict.fromkeys([*KEYS, *NIGHTLY])]
)
def test_trajectory(mode: str, strategy: str, optimizer: str) -> None:
    """Replicas are equal bit for bit after training, too; where all update alike, at all times.

    Stock Horovod under Keras 3 fails this: ``fit`` calls ``apply`` alone, which it does not know,
    so nothing is ever averaged, and nobody is told.
    """
    distributed = hvd.DistributedOptimizer(OPTIMIZERS[optimizer](), strategy=strategy)
    mine = trained(mode, distributed, hvd.rank())
    wanted = functools.partial(keras_reference.trajectory, hvd.size(), strategy, optimizer)
    first, *others = compare(mine, wanted, TOLERANCE)
    local = strategy.startswith("cocod") or "prediction=local" in strategy
    records = slice(-1, None) if local else slice(None)
    for other in others:
        assert np.array_equal(other[records], first[records])


class TwoParts(keras.Model):  # type: ignore[misc]
    """An optimizer for each, as in Keras' guide to GANs; ranks draw numbers of their own."""

    def __init__(self, strategy: str) -> None:
        super().__init__()
        self.parts = [make_model(), make_model()]
        self.numbers = keras.random.SeedGenerator(hvd.rank())
        self.own: list[Any] = []
        for part in self.parts:
            chosen = forward(part) if strategy == "forward" else strategy
            self.own.append(hvd.DistributedOptimizer(OPTIMIZERS["momentum"](), strategy=chosen))
            for each in part.trainable_variables:
                each.assign(each + hvd.rank())
            if strategy.startswith("cocod"):  # else its slots become rank 0's after a local step
                self.own[-1].build(part.trainable_variables)

    def train_step(self, data: Any) -> dict[str, Any]:
        for part, optimizer in zip(self.parts, self.own, strict=True):
            with tf.GradientTape() as tape:
                loss = loss_of(part, *data)
            variables = part.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"number": keras.random.uniform((), seed=self.numbers)}


@on_ranks(2, init=hvd.init)
@pytest.mark.parametrize("strategy", ["merged-gradient", "forward", "pipe-sgd", "cocod:period=4"])
def test_a_step_of_two_optimizers_has_a_trajectory_for_each(strategy: str) -> None:
    """Under ``fit``, which gives all ranks rank 0's weights."""
    late: list[bool] = []
    model = TwoParts(strategy)
    model.compile()
    noting = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: late.append(bool(due))
    )
    fit(model, *data(), noting)
    assert any(late) == (strategy == "forward")
    equation = "merged-gradient" if strategy == "forward" else strategy
    wanted = keras_reference.trajectory(2, equation, "momentum")[hvd.rank()][-1]
    for part in model.parts:
        np.testing.assert_allclose(weights_of(part), wanted, rtol=0, atol=TOLERANCE)
        np.testing.assert_array_equal(*gather(weights_of(part)))
    first, second = gather(model.numbers.state.numpy()[0])
    assert first != second


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_reference_of_one_worker_is_plain_keras(optimizer: str) -> None:
    plain = trained("fit", OPTIMIZERS[optimizer](), 0)
    wanted = keras_reference.trajectory(1, "merged-gradient", optimizer)
    assert_close([plain], wanted, TOLERANCE)


def test_the_equations_can_be_told_apart() -> None:
    """A tolerance of 1e-10 shows something only where a wrong strategy is off by far more."""
    expected = keras_reference.trajectory

    def spread(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
        return float(np.abs(a - b).max())

    runs = [
        expected(2, name, "momentum") for name in ("merged-gradient", *STRATEGIES[3:], WEIGHTED)
    ]
    assert spread(expected(4, WITHIN, "momentum"), expected(4, "cocod", "momentum")) > 1e-3
    for i, one in enumerate(runs):
        for other in runs[i + 1 :]:
            assert spread(one[:, :-1], other[:, :-1]) > 1e-3
    assert spread(expected(2, "pipe-sgd", "sgd")[0], expected(1, "pipe-sgd", "sgd")[0]) > 1e-3


def test_second_moments_would_have_become_negative() -> None:
    """Else nothing above shows that they are kept from it: a root of them would be NaN."""
    assert keras_reference.values_clamped(2, MOMENTS, "forgetful") > 0
