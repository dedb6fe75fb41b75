"""All of ``horovod.tensorflow.keras`` by the same names, working under Keras 3.

Change ``import horovod.tensorflow.keras as hvd`` to ``import hvd_pipe.tensorflow.keras as hvd``.
"""

from horovod.tensorflow.mpi_ops import (
    Average,
    ProcessSet,
    Sum,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    size,
    start_timeline,
    stop_timeline,
)

from hvd_pipe.errors import HvdPipeError, RanksDisagreeError
from hvd_pipe.planning.plan import Plan
from hvd_pipe.strategy import Auto, CoCoD, MergedGradient, PipeSGD
from hvd_pipe.tensorflow.compression import BF16, Compression, Int8
from hvd_pipe.tensorflow.horovod_api import (
    broadcast_global_variables,
    broadcast_variables,
    init,
    shutdown,
)
from hvd_pipe.tensorflow.keras import callbacks, elastic
from hvd_pipe.tensorflow.keras.api import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
    allgather,
    allreduce,
    broadcast,
    load_model,
    reducescatter,
)

__all__ = [
    "BF16",
    "Auto",
    "Average",
    "CoCoD",
    "Compression",
    "DistributedOptimizer",
    "HvdPipeError",
    "Int8",
    "MergedGradient",
    "PartialDistributedOptimizer",
    "PipeSGD",
    "Plan",
    "ProcessSet",
    "RanksDisagreeError",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
