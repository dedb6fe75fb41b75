"""Uneven data, loaded states, loss scales, empty batches: right numbers or a message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import workers_guards
from cases import of_case
from cells import Cell
from problem import OPTIMIZERS, make_model, weights_of
from ranks import once, run_ranks
from reference import Workers, mean
from workers_guards import EARLY, EVALUATED, LATE, LR, MORE, STRATEGIES

results = once(lambda: run_ranks(2, workers_guards.run, timeout=150))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_has_joined_is_not_averaged_in_as_a_model(strategy: str) -> None:
    """Uneven data. Gradients of a joined rank count as zero, as in Horovod; its model does not."""
    updates = [
        tuple(-w / LR for w in weights) for weights in of_case(results(), ("joined", strategy))
    ]
    half = EARLY + (LATE - EARLY) / 2
    if strategy == "cocod:period=2":
        together = (EARLY + LATE) / 2
        assert updates == [(end, together, together + MORE) for end in (EARLY, LATE)]
    else:
        assert updates == [(end, end, end + MORE) for end in (EARLY, half)]


# In flight after three steps with gradients of 100 and 200: Pipe-SGD's average of 150, and
# CoCoD's mean of the starts 200 and 400. Every gradient is applied once in the end: 454.5.
GOES_ON: dict[tuple[str, str], list[list[float]]] = {
    ("merged-gradient", "nothing in flight"): [[1.5, 3, 4.5, 4.5]] * 2,
    ("merged-gradient", "in flight"): [[451.5, 453, 454.5, 454.5]] * 2,
    ("merged-gradient", "plain"): [[451.5, 453, 454.5, 454.5]] * 2,
    ("pipe-sgd", "nothing in flight"): [[0, 1.5, 3, 4.5]] * 2,
    ("pipe-sgd", "in flight"): [[450, 451.5, 453, 454.5]] * 2,
    ("pipe-sgd", "plain"): [[300, 301.5, 303, 304.5]] * 2,
    ("cocod:period=2", "nothing in flight"): [[1, 2, 3, 4.5], [2, 4, 6, 4.5]],
    # The first round goes on where it was: mean 300, and a third local step of 1 or 2.
    ("cocod:period=2", "in flight"): [[401, 402, 453.5, 454.5], [502, 504, 455.5, 454.5]],
    ("cocod:period=2", "plain"): [[301, 452, 453, 454.5], [602, 454, 456, 454.5]],
}


@pytest.mark.parametrize(("strategy", "saved"), GOES_ON)
def test_a_loaded_state_goes_on_with_what_it_holds(strategy: str, saved: str) -> None:
    """And with nothing of what was in flight when it was loaded."""
    told = of_case(results(), (f"loaded, {saved}", strategy))
    assert [updates for updates, _ in told] == GOES_ON[strategy, saved]
    loses = saved == "plain" and strategy != "merged-gradient"
    assert [warnings for _, warnings in told] == [int(loses)] * 2


def test_grad_scaler_with_merged_gradients() -> None:
    """Scales are powers of two, so the numbers are those of a run without a scaler."""
    model = make_model(torch.float32)
    optimizer = OPTIMIZERS["momentum"](model)
    for number in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            x = torch.full((2, 6), 1.0 + rank + number)
            (model(x).pow(2).mean() / 2).backward()
        optimizer.step()
    for weights in of_case(results(), "scaled"):
        np.testing.assert_allclose(weights, weights_of(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_an_optimizer_whose_zero_grad_takes_nothing(strategy: str) -> None:
    workers = Workers(2, lambda model: torch.optim.SGD(model.parameters(), lr=0.05))
    expected, pending = [], None
    for step in range(6):
        average = mean(workers.gradients(step))
        due = average if strategy == "merged-gradient" else pending
        if due is not None:
            workers.update(due)
        pending = average
        expected.append(weights_of(workers.models[0]))
    for weights in of_case(results(), ("old", strategy)):
        np.testing.assert_allclose(weights, np.array(expected), rtol=0, atol=1e-12)


def test_the_newest_optimizer_of_a_parameter_listens_to_it() -> None:
    expected: Any = Cell("merged-gradient", "momentum").expected(2)
    for weights in of_case(results(), "made anew"):
        np.testing.assert_allclose(weights, expected[0][:6], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("after", "strategy"), EVALUATED)
def test_synchronize_on_one_rank_alone_is_told_on_every_rank(after: int, strategy: str) -> None:
    """Rank 0 synchronized before it evaluated, and rank 1 went on.

    The empty round of rank 0 was averaged with the next gradient of rank 1, and all later ones a
    step apart, until the job hung at its end. While plans were made, it hung at once.
    """
    told = of_case(results(), ("evaluated on rank 0", after, strategy))
    for _, text in told:
        assert "synchronize() on every rank" in text, text
    # Rank 1 is told in the step after the one that went apart, rank 0 in its own next one.
    assert [number for number, _ in told] == [after + 1, after + 2]


def test_a_rank_without_a_batch_under_the_clipping_pattern() -> None:
    """It calls synchronize() without a backward pass as well, and is right: it steps after it."""
    updates = [1.0 if number % 3 == 0 else 0.5 for number in range(MORE) if number != 6]
    for weights in of_case(results(), "clipped"):
        np.testing.assert_allclose(weights, np.cumsum(updates), rtol=0, atol=1e-12)


DRAINED = {
    "pipe-sgd": "ranks have sent different things",
    "cocod:period=2": "ranks have sent different things",
    "cocod:period=2,warmup_steps=4": "ranks have sent different things",
}


@pytest.mark.parametrize("strategy", DRAINED)
def test_ranks_that_drain_at_different_steps_are_told(strategy: str) -> None:
    """One would clip the gradient that it applies, the other not, and nobody would notice."""
    said = run_ranks(2, workers_guards.clip_without_a_gradient, strategy)
    assert all(DRAINED[strategy] in text for text in said), said


def test_any_error_on_one_rank_reaches_the_others() -> None:
    first, second = run_ranks(2, workers_guards.refused_on_one_rank)
    assert first.startswith("RanksDisagreeError: rank 1 was given something wrong")
    assert "layer 7" in first
    assert second == "KeyError: 'layer 7'"
