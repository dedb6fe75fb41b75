"""Long runs: what is alive, and how much memory a rank holds, at two moments far apart."""

from __future__ import annotations

import gc
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import run_cases
from problem import OPTIMIZERS, loss_of, make_model

import hvd_pipe.torch as hvd

SETTLED, STEPS = 200, 2000

VARIANTS: dict[str, dict[str, Any]] = {
    "merged-gradient": {},
    "pipe-sgd": {},
    "pipe-sgd:prediction=local": {"compression": hvd.Int8(error_feedback=True)},
    "cocod:period=4,momentum=average": {"compression": hvd.Compression.bf16},
    "cocod:period=4,fragments=4,outer=nesterov": {"compression": hvd.Int8(error_feedback=True)},
}


def grown(strategy: str) -> tuple[int, int]:
    """How many more tensors, and bytes of memory, there are after 2,000 steps than after 200."""
    model = make_model(torch.float32)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["adam"](model),
        model.named_parameters(),
        strategy=strategy,
        **VARIANTS[strategy],
    )
    seen = []
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step % 8).backward()
        optimizer.step()
        if step in (SETTLED, STEPS):
            gc.collect()
            tensors = sum(1 for found in gc.get_objects() if isinstance(found, torch.Tensor))
            # Pages of libraries and of Open MPI's shared memory come in when they are first read.
            _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
            seen.append((tensors, (resident - shared) * os.sysconf("SC_PAGE_SIZE")))
    optimizer.synchronize()
    (tensors, memory), (more_tensors, more_memory) = seen
    return more_tensors - tensors, more_memory - memory


def run() -> dict[Any, Any]:
    hvd.init()
    return run_cases({strategy: partial(grown, strategy) for strategy in VARIANTS})
