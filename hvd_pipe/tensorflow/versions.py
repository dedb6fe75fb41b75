"""Which Keras this is for: found at import, before anything strange can happen."""

from __future__ import annotations

import keras
import tensorflow as tf

__all__ = ["check"]


def check() -> None:
    """Raise unless this is Keras 3 on TensorFlow.

    Raises:
        ImportError: With what to install or set.
    """
    if int(keras.__version__.partition(".")[0]) < 3:
        raise ImportError(
            f"hvd_pipe.tensorflow needs Keras 3, as in TensorFlow 2.16 and newer; this is Keras "
            f"{keras.__version__} with TensorFlow {tf.__version__}. Under Keras 2, stock Horovod "
            "works: import horovod.tensorflow, or upgrade TensorFlow."
        )
    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            f"hvd_pipe.tensorflow needs Keras on TensorFlow, and KERAS_BACKEND is "
            f"{keras.backend.backend()!r}: set KERAS_BACKEND=tensorflow."
        )


check()
