"""2,000 steps leave nothing behind: no tensor, and no memory that goes up with the steps."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from problem import OPTIMIZERS, loss_of, make_model

import hvd_pipe.torch as hvd

SETTLED, STEPS = 200, 2000

# What no Python object shows: handles, messages of Horovod, buffers. 1,800 steps that leave 2.4 KB
# each are found; the allocator's own movements stay below.
MEMORY = 4 * 2**20

# One a step that stays would be 1,800; some are on their way at either moment.
TENSORS = 50


@pytest.mark.nightly  # thousands of steps
@on_ranks(2, init=hvd.init)
@pytest.mark.parametrize(
    ("strategy", "compression"),
    [
        ("merged-gradient", hvd.Compression.none),
        ("pipe-sgd", hvd.Compression.none),
        ("pipe-sgd:prediction=local", hvd.Int8(error_feedback=True)),
        ("cocod:period=4,momentum=average", hvd.Compression.bf16),
        ("cocod:period=4,fragments=4,outer=nesterov", hvd.Int8(error_feedback=True)),
    ],
)
def test_a_long_run_does_not_grow(strategy: str, compression: Any) -> None:
    model = make_model(torch.float32)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["adam"](model),
        model.named_parameters(),
        strategy=strategy,
        compression=compression,
    )
    seen = []
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step % 8).backward()
        optimizer.step()
        if step in (SETTLED, STEPS):
            gc.collect()
            tensors = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
            # Pages of libraries and of Open MPI's shared memory come in when they are first read.
            _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
            seen.append((tensors, (resident - shared) * os.sysconf("SC_PAGE_SIZE")))
    optimizer.synchronize()
    (tensors, memory), (more_tensors, more_memory) = seen
    assert more_tensors - tensors < TENSORS
    assert more_memory - memory < MEMORY
