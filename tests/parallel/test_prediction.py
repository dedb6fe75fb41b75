"""Pipe-SGD's weight prediction: it is its equation, and how far it moves the limit of stability.

On f_i(w) = L/2 (w - c_i)**2, with heavy-ball momentum mu, training is stable while lr L is below

====  =================  =====  ========  ===========================
mu    synchronous SGD    none   previous  local
====  =================  =====  ========  ===========================
0     2                  1      0.618     1, on one worker alone 2
0.5   3                  0.5    0.522     1, on one worker alone 3
0.9   3.8                0.1    0.500     1, on one worker alone 3.8
====  =================  =====  ========  ===========================

``none`` is 1 - mu. ``local`` predicts the mean over workers exactly, which leaves the limit
2 (1 + mu) of synchronous SGD; but each worker's own point strays from the mean by lr L times what
it strayed by before, which ends at 1 whatever the momentum. ``previous`` extrapolates the last
update: from mu = 0.475 on it allows more than no prediction (5 times as much at 0.9, where it is
near 1/2 and stays there); with less momentum it allows less.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import workers_prediction
from cases import of_case
from problem import loss_of, make_model
from ranks import once, run_ranks
from serial import make_workers
from workers_prediction import (
    CELLS,
    CENTRES,
    FACTORS,
    MOMENTA,
    OPTIMIZERS,
    PREDICTIONS,
    STEPS,
    Cell,
)

Array = npt.NDArray[np.float64]


def iteration_matrix(prediction: str, mu: float, a: float, workers: int) -> Array:
    """A step of Pipe-SGD on a quadratic, as a matrix; ``a`` is lr times the curvature.

    All is measured from the minimum and in units of weights (a gradient stands for lr times it)::

        w          the true weights
        u          the last update
        p          the average that is in flight
        x_1 .. x_n where the workers compute their gradients, a x_i

        u' = mu u + p      w' = w - u'      p' = mean_i a x_i
        x_i' = w'                       none
        x_i' = w' - (mu u' + p)         previous: p has just been applied
        x_i' = w' - (mu u' + a x_i)     local: this worker's part of what is in flight
    """

    def step(state: Array) -> Array:
        w, u, p, x = state[0], state[1], state[2], state[3:]
        update = mu * u + p
        true, own = w - update, a * x
        guess = {"none": None, "previous": np.full_like(x, p), "local": own}[prediction]
        ahead = np.zeros_like(x) if guess is None else mu * update + guess
        return np.array([true, update, own.mean(), *(true - ahead)])

    return np.array([step(unit) for unit in np.eye(3 + workers)]).T


def spectral_radius(prediction: str, mu: float, a: float, workers: int) -> float:
    """By how much a disturbance grows in a step, in the long run: stable where below 1."""
    return float(np.abs(np.linalg.eigvals(iteration_matrix(prediction, mu, a, workers))).max())


@cache
def limit(prediction: str, mu: float, workers: int = 2) -> float:
    """The lr times curvature at which training stops being stable."""
    step = 1e-3
    high = next(
        a for a in np.arange(step, 5, step) if spectral_radius(prediction, mu, a, workers) >= 1
    )
    low = high - step
    for _ in range(40):
        middle = (low + high) / 2
        stable = spectral_radius(prediction, mu, middle, workers) < 1
        low, high = (middle, high) if stable else (low, middle)
    return float(low)


LIMITS = {(prediction, mu): limit(prediction, mu) for prediction in PREDICTIONS for mu in MOMENTA}

results = once(lambda: run_ranks(2, workers_prediction.run, LIMITS))


@cache
def simulate(cell: Cell) -> tuple[Array, Array]:
    """All workers' weights, and the state of an optimizer, which is the same on all of them."""
    workers = make_workers(cell.strategy, 2, make_model, OPTIMIZERS[cell.optimizer])
    states = []

    def record() -> None:
        workers.record()
        states.append(workers_prediction.state_of(workers.optimizers[0], cell.optimizer))

    for step in range(STEPS):
        workers.backward(loss_of, *range(step * cell.passes, (step + 1) * cell.passes))
        workers.step()
        record()
        if step in cell.drains or step == STEPS - 1:
            workers.synchronize()
            record()
    return workers.trajectory, np.array(states)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_trajectory(cell: Cell) -> None:
    """Gradients are computed at the predicted weights, and the true ones come back.

    The guess "previous" was the gradient as the update had left it: SGD with ``nesterov`` and
    ``foreach`` adds the momentum to it, in place.
    """
    weights, _ = simulate(cell)
    for rank, actual in enumerate(of_case(results(), cell)):
        np.testing.assert_allclose(actual["weights"], weights[rank], rtol=0, atol=1e-12)


@pytest.mark.parametrize("prediction", PREDICTIONS[1:])
def test_a_guess_has_its_own_loss_scale(prediction: str) -> None:
    """Scales are powers of two, so weights are those of a run without one."""
    weights, _ = simulate(Cell(prediction, "momentum"))
    for rank, actual in enumerate(of_case(results(), f"scaled {prediction}")):
        np.testing.assert_allclose(actual, weights[rank], rtol=0, atol=1e-12)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_optimizer_knows_of_true_updates_only(cell: Cell) -> None:
    _, states = simulate(cell)
    for actual in of_case(results(), cell):
        np.testing.assert_allclose(actual["states"], states, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_hooks_of_the_user_see_true_updates_only(cell: Cell) -> None:
    updates = []
    for step in range(STEPS):
        updates.append(step + (step < cell.warmup))  # the last gradient is in flight
        if step in cell.drains or step == STEPS - 1:
            updates.append(step + 1)
    for actual in of_case(results(), cell):
        assert actual["hooks"] == [(number, number) for number in updates]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_replicas_are_equal_bit_for_bit(cell: Cell) -> None:
    """After the last ``synchronize()``; with ``previous``, which all guess alike, always."""
    first, second = of_case(results(), cell)
    rows = slice(-1, None) if cell.prediction == "local" else slice(None)
    assert np.array_equal(first["weights"][rows], second["weights"][rows])
    assert np.array_equal(first["states"], second["states"])


def test_predictions_can_be_told_apart() -> None:
    for optimizer in OPTIMIZERS.keys() & workers_prediction.STATES.keys():
        ends = [simulate(Cell(prediction, optimizer))[0][0, -1] for prediction in PREDICTIONS]
        for one, other in ((0, 1), (0, 2), (1, 2)):
            assert np.abs(ends[one] - ends[other]).max() > 1e-3


@pytest.mark.parametrize("mu", MOMENTA)
def test_limits_in_closed_form(mu: float) -> None:
    assert limit("none", mu) == pytest.approx(1 - mu)
    assert limit("local", mu) == pytest.approx(1)
    assert limit("local", mu, workers=1) == pytest.approx(2 * (1 + mu))
    assert limit("previous", mu) == pytest.approx(limit("previous", mu, workers=1))


def test_the_table() -> None:
    found = [limit("previous", mu) for mu in MOMENTA]
    np.testing.assert_allclose(found, [0.618, 0.522, 0.500], atol=5e-4)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("mu", MOMENTA)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_stability(prediction: str, mu: float, factor: float) -> None:
    """The weights come to rest just below the limit, and go off just above it."""
    stable = factor < 1
    assert (spectral_radius(prediction, mu, factor * limit(prediction, mu), 2) < 1) == stable
    place = (MOMENTA.index(mu), FACTORS.index(factor))
    for records, end in of_case(results(), prediction):
        moves = np.abs(np.diff(records[:, *place]))
        early, late = np.array_split(moves, 10)[0].max(), np.array_split(moves, 10)[-1].max()
        assert late < 1e-2 * early if stable else late > 1e2 * early
        if stable:
            assert end[place] == pytest.approx(np.mean(CENTRES), abs=1e-2)
