"""A Keras model on the command line, fed with made-up inputs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvd_pipe.cli._model import Shape, error_text, find
from hvd_pipe.cli.output import InputError
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.tensorflow.layer_times import measure_profile

__all__ = ["measure"]

BATCH = 32
"""Of a model that knows the rest of its input's sizes: what ``fit`` takes, too."""


def measure(
    model: Any,
    name: str,
    shapes: Sequence[Shape],
    loss: str | None,
    device: str | None,
    steps: int,
) -> ModelProfile:
    """Measure a model's training step; see `hvd_pipe.cli.profile.measure_model`."""
    shapes = shapes or known_shapes(model)
    where = _device(device)
    given = " ".join(f"--input {shape.text}" for shape in shapes)
    with tf.device(where):
        inputs = [_made(shape) for shape in shapes]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the structure of inputs is another
                model(inputs[0] if len(inputs) == 1 else inputs)
        except Exception as error:
            raise InputError(f"the model does not take {given}: {error_text(error)}") from error
        try:
            return measure_profile(
                model,
                inputs,
                None if loss is None else find(loss),
                batch=shapes[0].sizes[0],
                steps=steps,
                name=name,
            )
        except ValueError as error:
            raise InputError(str(error)) from error


def known_shapes(model: Any) -> list[Shape]:
    """Return the shapes of a model's inputs, as far as it knows them, for a batch of `BATCH`."""
    try:
        inputs = list(model.inputs or [])
    except (AttributeError, ValueError):
        inputs = []
    if not inputs:
        raise InputError(
            f"{type(model).__name__} does not know the shape of its input: say what it is fed, "
            "such as --input 32,224,224,3"
        )
    found = []
    for each in inputs:
        sizes = [each.shape[0] or BATCH, *each.shape[1:]]
        if None in sizes:
            text = ",".join("?" if size is None else str(size) for size in sizes)
            raise InputError(
                f"the input {each.name} has sizes that the model leaves open: say what it is fed, "
                f"--input {text} with numbers for the question marks"
            )
        dtype = keras.backend.standardize_dtype(each.dtype)
        found.append(Shape.parse(f"{','.join(map(str, sizes))}:{dtype}"))
    return found


def _device(name: str | None) -> str:
    if name is None:
        return "/gpu:0" if tf.config.list_physical_devices("GPU") else "/cpu:0"
    kind, _, number = name.partition(":")
    kind = {"cuda": "gpu"}.get(kind, kind).upper()
    devices = tf.config.list_physical_devices(kind) if kind in ("CPU", "GPU") else []
    if not devices or (number and not (number.isdigit() and int(number) < len(devices))):
        raise InputError(f"--device {name}: TensorFlow sees no such device here")
    return f"/{kind.lower()}:{number or 0}"


def _made(shape: Shape) -> tf.Tensor:
    dtype = tf.as_dtype(shape.dtype)
    if dtype.is_floating:
        return tf.random.normal(shape.sizes, dtype=dtype)
    return tf.cast(tf.random.uniform(shape.sizes, 0, 2, tf.int32), dtype)
