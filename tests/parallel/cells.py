"""The cells of test_equations.py: each a strategy as a user writes it, beside its equation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import horovod.torch as stock
from problem import OPTIMIZERS as COMMON
from problem import STEPS, Weights, make_model, train
from serial import make_workers
from torch.optim import SGD

import hvd_pipe.torch as hvd

STOCK = "stock horovod"
OPTIMIZERS = {
    **COMMON,
    # Changes gradients in place, which a prediction once took for the guess.
    "nesterov": lambda model: SGD(
        model.parameters(), lr=0.05, momentum=0.9, nesterov=True, foreach=True
    ),
}
PREDICTIONS = ("pipe-sgd:prediction=local", "pipe-sgd:prediction=previous")

STRATEGIES = (
    STOCK,  # shows that the reference, too, is right
    "merged-gradient",
    "merged-gradient:plan=wfbp",
    "merged-gradient:plan=single",
    "merged-gradient:plan=greedy",
    "merged-gradient:bucket_bytes=64",
    "pipe-sgd",
    "pipe-sgd:warmup_steps=5",
    "pipe-sgd:bucket_bytes=64",
    "cocod:period=1",
    "cocod:period=4",
    "cocod:period=3,warmup_steps=4",
)


@dataclass(frozen=True)
class Cell:
    """One run: ``passes`` backward passes a step; ``synchronize()`` after the steps in drains."""

    strategy: str
    optimizer: str
    passes: int = 1
    drains: tuple[int, ...] = ()

    def __str__(self) -> str:
        passes = f", {self.passes} passes" if self.passes > 1 else ""
        drains = f", drained after {self.drains}" if self.drains else ""
        return f"{self.strategy}, {self.optimizer}{passes}{drains}"

    def run(self) -> Weights:
        """On a rank: the weights after every step and every ``synchronize()``."""
        model, module = make_model(), stock if self.strategy == STOCK else hvd
        optimizer = module.DistributedOptimizer(
            OPTIMIZERS[self.optimizer](model),
            model.named_parameters(),
            backward_passes_per_step=self.passes,
            **({} if module is stock else {"strategy": self.strategy}),
        )
        drains = {*self.drains, STEPS - 1}
        return train(model, optimizer, hvd.rank(), passes=self.passes, drains=drains)

    def expected(self, n: int) -> Weights:
        """Of all workers."""
        return _expected(self, n)


@cache
def _expected(cell: Cell, n: int) -> Weights:
    strategy = "merged-gradient" if cell.strategy == STOCK else cell.strategy
    workers = make_workers(strategy, n, make_model, OPTIMIZERS[cell.optimizer])
    return workers.train(STEPS, passes=cell.passes, drains={*cell.drains, STEPS - 1})


CELLS = [
    *(Cell(strategy, optimizer) for strategy in STRATEGIES for optimizer in COMMON),
    *(
        Cell(strategy, optimizer, **options)
        for strategy in PREDICTIONS
        for optimizer in ("momentum", "adam")
        for options in ({}, {"passes": 2}, {"drains": (3, 8, 9)})
    ),
    *(Cell(f"{strategy},warmup_steps=5", "adam", drains=(3, 8, 9)) for strategy in PREDICTIONS),
    *(Cell(strategy, "nesterov") for strategy in PREDICTIONS),
    Cell("merged-gradient", "momentum", passes=2),
    Cell("pipe-sgd:warmup_steps=5", "momentum", passes=2),
    Cell("cocod:period=4", "momentum", passes=2),
    # In the middle of things: step 13 is one that launches no round and ends none.
    Cell("merged-gradient", "momentum", drains=(13, 14)),
    Cell("pipe-sgd", "momentum", drains=(13, 14)),
    Cell("pipe-sgd:warmup_steps=5", "adam", drains=(2, 13)),
    Cell("cocod:period=4", "momentum", drains=(13, 14)),
    Cell("cocod:period=3,warmup_steps=4", "adam", drains=(2, 13)),
]
