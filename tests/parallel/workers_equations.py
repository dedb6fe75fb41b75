"""Every cell of `cells.CELLS`, one after the other: test_equations.py looks at them."""

from __future__ import annotations

from functools import partial

import horovod.torch as stock
from cases import Raised, run_cases
from cells import CELLS, STOCK, Cell
from problem import OPTIMIZERS, STEPS, Weights, make_model, train

import hvd_pipe.torch as hvd


def trajectories() -> dict[Cell, Weights | Raised]:
    """The weights after every step and every ``synchronize()``."""
    hvd.init()
    return run_cases({cell: partial(trajectory, cell) for cell in CELLS})


def trajectory(cell: Cell) -> Weights:
    model = make_model()
    plain = OPTIMIZERS[cell.optimizer](model)
    named, passes = model.named_parameters(), cell.passes
    if cell.strategy == STOCK:
        optimizer = stock.DistributedOptimizer(plain, named, backward_passes_per_step=passes)
    else:
        optimizer = hvd.DistributedOptimizer(
            plain, named, backward_passes_per_step=passes, strategy=cell.strategy
        )
    return train(model, optimizer, hvd.rank(), passes=passes, drains={*cell.drains, STEPS - 1})
