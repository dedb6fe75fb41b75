"""CoCoD on quadratics near the limit of stability: another centre on every rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from cases import Raised, run_cases
from torch import nn
from torch.optim import SGD

import hvd_pipe.torch as hvd

FACTORS = (0.9, 1.1)
STEPS = 2400


def quadratics(strategy: str, momentum: float, limit: float) -> tuple[list[float], list[float]]:
    """Minimise L/2 (w - c)**2 for curvatures below and above the limit.

    Returns:
        The sizes of this rank's weights after the last round, and after ``synchronize()``.
    """
    each = [nn.Parameter(torch.zeros(1).double()) for _ in FACTORS]  # may be fragments
    curvatures = torch.tensor(FACTORS).double() * limit
    optimizer = hvd.DistributedOptimizer(SGD(each, lr=1.0, momentum=momentum), strategy=strategy)
    centre = float(hvd.rank() + 1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (curvatures / 2 * (torch.cat(list(each)) - centre) ** 2).sum().backward()
        optimizer.step()
    before = [abs(float(weight)) for weight in each]
    optimizer.synchronize()
    return before, [abs(float(weight)) for weight in each]


def run(cases: dict[tuple[str, float], float]) -> dict[Any, Any | Raised]:
    hvd.init()
    return run_cases({case: partial(quadratics, *case, limit) for case, limit in cases.items()})
