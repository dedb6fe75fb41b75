"""Which Keras ``hvd_pipe.tensorflow`` works with."""

from __future__ import annotations

import importlib


def check_keras() -> None:
    """Raise unless this is Keras 3 on TensorFlow."""
    keras, tf = (importlib.import_module(name) for name in ("keras", "tensorflow"))
    if int(keras.__version__.partition(".")[0]) < 3:
        raise ImportError(
            f"hvd_pipe.tensorflow needs Keras 3, as in TensorFlow 2.16 and newer (tested: 2.21); "
            f"this is Keras {keras.__version__} with TensorFlow {tf.__version__}. Upgrade with "
            "`pip install 'tensorflow>=2.16'` and build Horovod for it with `hvd-pipe "
            "build-horovod`. Or stay, and import horovod.tensorflow: under Keras 2, stock Horovod "
            "works."
        )
    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            f"hvd_pipe.tensorflow needs Keras on TensorFlow, and KERAS_BACKEND is "
            f"{keras.backend.backend()!r}: set KERAS_BACKEND=tensorflow."
        )
