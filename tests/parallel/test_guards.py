"""Uneven data, loaded states, loss scales, empty batches: right numbers or a message."""

from __future__ import annotations

import numpy as np
import pytest
from cells import Cell
from on_ranks import on_ranks
from problem import OPTIMIZERS, make_model, one_weight, train, update_one, updates_of

import hvd_pipe.torch as hvd
from hvd_pipe.errors import HvdPipeError

EARLY, LATE = 5, 25  # steps of rank 0 and rank 1; a plan is due in between
MORE = 16  # after both have joined; a plan is due, if none was made

STRATEGIES = ("merged-gradient", "pipe-sgd", "cocod:period=2")

pytestmark = on_ranks(2, init=hvd.init)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_has_joined_is_not_averaged_in_as_a_model(strategy: str) -> None:
    """Uneven data. Gradients of a joined rank count as zero, as in Horovod; its model does not."""
    model, optimizer = one_weight(strategy)
    update_one(model, optimizer, LATE if hvd.rank() else EARLY)
    hvd.join()
    updates = [updates_of(model)]
    optimizer.synchronize()
    updates.append(updates_of(model))
    update_one(model, optimizer, MORE)
    optimizer.synchronize()
    updates.append(updates_of(model))
    if strategy == "cocod:period=2":
        end, together = (EARLY, LATE)[hvd.rank()], (EARLY + LATE) / 2
        assert updates == [end, together, together + MORE]
    else:
        end = (EARLY, EARLY + (LATE - EARLY) / 2)[hvd.rank()]
        assert updates == [end, end, end + MORE]


def test_the_newest_optimizer_of_a_parameter_listens_to_it() -> None:
    """Another one, still alive, has listened to it before."""
    model = make_model()
    first = hvd.DistributedOptimizer(OPTIMIZERS["adam"](model), model.named_parameters())
    second = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](model), model.named_parameters())
    weights = train(model, second, hvd.rank(), steps=6)
    del first
    expected = Cell("merged-gradient", "momentum").expected(2)[0][:6]
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-12)


def test_a_rank_without_a_batch_under_the_clipping_pattern() -> None:
    """It calls synchronize() without a backward pass as well, and is right: it steps after it.

    A rank in turn has an empty batch. After step 6 all ranks give up what they have prepared.
    """
    model, optimizer = one_weight("merged-gradient")
    weights = []
    for number in range(MORE):
        optimizer.zero_grad()
        if number % 3 != 1 + hvd.rank():
            model.weight.sum().backward()
        optimizer.synchronize()
        if number == 6:
            continue
        with optimizer.skip_synchronize():
            optimizer.step()
        weights.append(updates_of(model))
        if number % 4 == 0:
            optimizer.synchronize()  # before an evaluation, on every rank
    updates = [1.0 if number % 3 == 0 else 0.5 for number in range(MORE) if number != 6]
    np.testing.assert_allclose(weights, np.cumsum(updates), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("after", "strategy"),
    # Without a plan to make, and where merged-gradient starts to record, and plans.
    [(4, "merged-gradient:plan=wfbp"), (2, "merged-gradient"), (12, "merged-gradient")],
)
def test_synchronize_on_one_rank_alone_is_told_on_every_rank(after: int, strategy: str) -> None:
    """Rank 0 synchronized before it evaluated, and rank 1 went on.

    The empty round of rank 0 was averaged with the next gradient of rank 1, and all later ones a
    step apart, until the job hung at its end. While plans were made, it hung at once.
    """
    model, optimizer = one_weight(strategy)
    number = 0
    with pytest.raises(HvdPipeError, match=r"synchronize\(\) was called without a backward"):  # noqa: PT012
        for number in range(after + 3):
            update_one(model, optimizer, 1)
            if hvd.rank() == 0 and number == after:
                optimizer.synchronize()
    # Rank 1 is told in the step after the one that went apart, rank 0 in its own next one.
    assert number == after + 1 + hvd.rank()


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(strategy, marks=on_ranks(2, init=hvd.init, env={"LAUNCH": strategy}))
        for strategy in ("pipe-sgd", "cocod:period=2", "cocod:period=2,warmup_steps=4")
    ],
)
def test_ranks_that_drain_at_different_steps_are_told(strategy: str) -> None:
    """One would clip the gradient that it applies, the other not, and nobody would notice.

    Rank 1 has an empty batch in step 2 and skips backward(), under the clipping pattern.
    """
    model, optimizer = one_weight(strategy)
    with pytest.raises(HvdPipeError, match="ranks have sent different things"):  # noqa: PT012
        for number in range(6):
            optimizer.zero_grad()
            if (hvd.rank(), number) != (1, 2):
                model.weight.sum().backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
    hvd.shutdown()  # one may wait until the other has ended
