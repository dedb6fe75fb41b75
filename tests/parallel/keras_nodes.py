"""For Keras: ranks on emulated nodes of two, as launchers say it."""

from __future__ import annotations

import importlib
import os

import hvd_pipe.tensorflow.keras as hvd

RANKS_A_NODE = 2


def init() -> None:
    """Initialise Horovod so that ``within="node"`` can add its process sets."""
    importlib.import_module("mpi4py.MPI")  # it finalises MPI, so that Horovod can start again
    hvd.init(process_sets="dynamic")
    os.environ["HOROVOD_HOSTNAME"] = f"node{hvd.rank() // RANKS_A_NODE}"
