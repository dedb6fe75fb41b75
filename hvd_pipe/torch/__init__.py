"""All of ``horovod.torch`` by the same names, with our `DistributedOptimizer`.

Change ``import horovod.torch as hvd`` to ``import hvd_pipe.torch as hvd``.
"""

from importlib.util import find_spec as _find_spec

try:
    import horovod.torch as _horovod

    _horovod.DistributedOptimizer  # noqa: B018 - absent when its extension is missing
except (ImportError, AttributeError) as error:
    if _find_spec("torch") is None:
        raise ImportError(
            "hvd_pipe.torch needs torch: install it, then run `hvd-pipe build-horovod`."
        ) from error
    raise ImportError(
        "hvd_pipe.torch needs Horovod built for this torch: run `hvd-pipe build-horovod` in this "
        "environment, with --cuda for GPUs."
    ) from error

from horovod.torch import *  # noqa: F403

import hvd_pipe.torch.elastic as elastic  # noqa: PLR0402 - `from` would find Horovod's
from hvd_pipe.cocod import split_batch
from hvd_pipe.errors import HvdPipeError, RanksDisagreeError
from hvd_pipe.planning.plan import Plan
from hvd_pipe.strategy import Auto, CoCoD, MergedGradient, PipeSGD
from hvd_pipe.torch.compression import BF16, Compression, Int8
from hvd_pipe.torch.distributed import DistributedOptimizer
from hvd_pipe.torch.horovod_api import (
    broadcast_optimizer_state,
    broadcast_parameters,
    init,
    join,
    shutdown,
)
from hvd_pipe.torch.measuring.probes import worker_speeds

__all__ = [  # noqa: PLE0604
    *[name for name in dir(_horovod) if not name.startswith("_")],
    "BF16",
    "Auto",
    "CoCoD",
    "Compression",
    "DistributedOptimizer",
    "HvdPipeError",
    "Int8",
    "MergedGradient",
    "PipeSGD",
    "Plan",
    "RanksDisagreeError",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "init",
    "join",
    "shutdown",
    "split_batch",
    "worker_speeds",
]
