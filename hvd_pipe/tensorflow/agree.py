"""Every rank decides alike: `hvd_pipe.runtime.consensus` by way of TensorFlow's Horovod."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from horovod.tensorflow.mpi_ops import ProcessSet, allgather

from hvd_pipe.runtime.consensus import Agreement, Description, failed, members

__all__ = [
    "Description",
    "agreement",
    "check_alike",
    "checked",
    "failed",
    "found_by_first",
    "from_first",
    "gather",
    "largest",
    "members",
]


def _gather_bytes(data: bytes, name: str, process_set: ProcessSet) -> list[bytes]:
    with tf.init_scope(), tf.device("/cpu:0"):  # at once, even while a graph is traced
        tensor = tf.constant(np.frombuffer(data, dtype=np.uint8))
        count = tf.constant([len(data)], dtype=tf.int64)
        counts = allgather(count, name=f"{name}.bytes", process_set=process_set).numpy()
        whole = allgather(tensor, name=f"{name}.data", process_set=process_set).numpy()
    return [part.tobytes() for part in np.split(whole, np.cumsum(counts)[:-1])]


agreement = Agreement(_gather_bytes)
check_alike = agreement.check_alike
checked = agreement.checked
found_by_first = agreement.found_by_first
from_first = agreement.from_first
gather = agreement.gather


def largest(values: Sequence[float], name: str, process_set: ProcessSet) -> list[float]:
    """Return, element by element, the largest of all ranks' ``values``."""
    rows = np.array(gather(list(values), name, process_set))
    return [float(value) for value in rows.max(axis=0)]
