"""Pipe-SGD's weight prediction: its guess's loss scale and hooks; `test_equations` has the rest.

And how far each method moves the limit of stability: `stable_rate`. Replicas of CoCoD leave each
other where momentum overshoots, and the mean does not show it. The advice once called momentum 0.9
at lr * curvature = 0.4 stable under period 4, as synchronous SGD is up to 3.8: the replicas grew
to 5e18, and ``synchronize()`` hid it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cells import PREDICTIONS, Cell
from on_ranks import on_ranks
from problem import OPTIMIZERS, STEPS, make_model, train
from torch import nn
from torch.optim import SGD

import hvd_pipe.torch as hvd
from hvd_pipe.planning.methods import stable_rate
from hvd_pipe.strategy import parse

pytestmark = on_ranks(2, init=hvd.init)

FACTORS = (0.9, 1.1)  # of the limit
LIMITS = [
    *((strategy, momentum) for strategy in PREDICTIONS for momentum in (0.0, 0.9)),
    ("pipe-sgd", 0.5),
    ("cocod:period=4", 0.9),
    ("cocod:period=4,fragments=2,outer=nesterov,outer_momentum=0.5", 0.9),
    *(  # nightly: other momenta and periods, and parts of the last case
        pytest.param(*case, marks=pytest.mark.nightly)
        for case in (
            *((strategy, 0.5) for strategy in PREDICTIONS),
            ("pipe-sgd", 0.0),
            ("pipe-sgd", 0.9),
            ("cocod:period=2", 0.9),
            ("cocod:period=2,momentum=average", 0.9),
            ("cocod:period=8", 0.5),
            ("cocod:period=1", 0.0),
            ("cocod:period=4,fragments=2", 0.9),
        )
    ),
]


@pytest.mark.parametrize("strategy", PREDICTIONS)
def test_a_guess_has_its_own_loss_scale(strategy: str) -> None:
    """Scales are powers of two, so weights are those of a run without one.

    The user's hooks know of true updates only.
    """
    model, calls = make_model(), list[str]()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
    )
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
    weights = train(model, optimizer, hvd.rank(), scaler=scaler, drains={STEPS - 1})
    wanted = Cell(strategy, "momentum").expected(2)[hvd.rank()]
    np.testing.assert_allclose(weights, wanted, rtol=0, atol=1e-12)
    assert calls == ["before", "after"] * STEPS


@pytest.mark.parametrize(("strategy", "momentum"), LIMITS)
def test_weights_rest_below_the_limit_and_go_off_above_it(strategy: str, momentum: float) -> None:
    """Minimise L/2 (w - c)**2, with another centre on every rank."""
    weights = [nn.Parameter(torch.zeros(1).double()) for _ in FACTORS]  # may be fragments
    curvatures = torch.tensor(FACTORS).double() * stable_rate(parse(strategy), momentum)
    optimizer = hvd.DistributedOptimizer(
        SGD(weights, lr=1.0, momentum=momentum), strategy=strategy
    )
    centre = float(hvd.rank() + 1)
    for _ in range(2400):
        optimizer.zero_grad()
        (curvatures / 2 * (torch.cat(weights) - centre) ** 2).sum().backward()
        optimizer.step()
    below, above = (abs(float(weight)) for weight in weights)
    assert below < 10
    assert not above < 1e3
    optimizer.synchronize()
    after = max(abs(float(weight)) for weight in weights)
    if "cocod" in strategy:
        assert after < 10 or not above < 1e12  # far out, the mean is what rounding leaves
    else:
        assert abs(float(weights[0]) - 1.5) < 1e-2  # the mean of the centres
