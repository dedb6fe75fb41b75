"""All of ``horovod.tensorflow`` by the same names, with our optimizer and tape.

Change ``import horovod.tensorflow as hvd`` to ``import hvd_pipe.tensorflow as hvd``.
"""

from importlib.util import find_spec as _find_spec

from hvd_pipe.runtime.keras_version import check_keras

try:
    import horovod.tensorflow as _horovod

    _horovod.init  # noqa: B018 - absent when its extension is missing
except (ImportError, AttributeError) as error:
    check_keras()
    if _find_spec("tensorflow") is None:
        raise ImportError(
            "hvd_pipe.tensorflow needs TensorFlow: install it, then run `hvd-pipe build-horovod`."
        ) from error
    raise ImportError(
        "hvd_pipe.tensorflow needs Horovod built for this TensorFlow: run `hvd-pipe "
        "build-horovod` in this environment, with --cuda for GPUs."
    ) from error
else:
    check_keras()

from horovod.tensorflow import *  # noqa: F403

from hvd_pipe.errors import HvdPipeError, RanksDisagreeError
from hvd_pipe.planning.plan import Plan
from hvd_pipe.strategy import Auto, CoCoD, MergedGradient, PipeSGD
from hvd_pipe.tensorflow import elastic
from hvd_pipe.tensorflow.compression import BF16, Compression, Int8
from hvd_pipe.tensorflow.horovod_api import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
    grouped_allreduce,
    init,
    shutdown,
)
from hvd_pipe.tensorflow.keras.api import DistributedOptimizer
from hvd_pipe.tensorflow.sync_batch_norm import SyncBatchNormalization
from hvd_pipe.tensorflow.tape import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
    drain_gradients,
)

__all__ = [  # noqa: PLE0604
    *[name for name in dir(_horovod) if not name.startswith("_")],
    "BF16",
    "Auto",
    "BroadcastGlobalVariablesHook",
    "CoCoD",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HvdPipeError",
    "Int8",
    "MergedGradient",
    "PartialDistributedGradientTape",
    "PipeSGD",
    "Plan",
    "RanksDisagreeError",
    "SyncBatchNormalization",
    "allgather_object",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "drain_gradients",
    "elastic",
    "grouped_allreduce",
    "init",
    "shutdown",
]
