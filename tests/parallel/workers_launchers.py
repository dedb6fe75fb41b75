"""One all-reduce, to see that ranks find each other whoever launched them."""

from __future__ import annotations

import horovod.torch as hvd
import torch


def sum_of_ranks() -> tuple[int, float]:
    hvd.init()
    total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum, name="total")
    return hvd.size(), float(total)
