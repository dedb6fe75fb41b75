"""`load_model`: a saved model, with its optimizer distributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvd_pipe.tensorflow.compression import Compression
from hvd_pipe.tensorflow.keras.api import DistributedOptimizer

__all__ = ["load_model"]


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
    **options: Any,
) -> Any:
    """Load a Keras model and distribute its optimizer; iterations and slots are kept.

    Args:
        filepath: A ``.keras`` or ``.h5`` file, made with or without hvd_pipe.
        custom_optimizers: Optimizer classes of your own that the file names.
        custom_objects: As Keras' ``load_model``.
        compression: As `DistributedOptimizer`.
        legacy_opts: Accepted for Horovod's sake: Keras 3 has none.
        options: More of `DistributedOptimizer`'s arguments, such as ``strategy``.

    Returns:
        The model, compiled if it was saved so.

    Raises:
        ValueError: The file has no compiled optimizer.
    """
    known = {cls.__name__: cls for cls in custom_optimizers or ()}
    known.update(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        raise ValueError(
            f"{filepath} was saved without an optimizer: load it with keras.models.load_model, "
            "and compile it with hvd.DistributedOptimizer(...)."
        )
    scaler = optimizer if hasattr(optimizer, "inner_optimizer") else None
    inner = optimizer if scaler is None else scaler.inner_optimizer
    distributed = DistributedOptimizer(inner, compression=compression, **options)
    if scaler is None:
        model.optimizer = distributed
    else:
        scaler.inner_optimizer = distributed
    model.jit_compile = False  # XLA cannot compile Horovod's messages
    model.train_function = None
    return model
