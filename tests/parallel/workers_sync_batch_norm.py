"""What the ranks of `test_sync_batch_norm` do; `joined` is one worker with all ranks' batches."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path
from typing import Any

import horovod.tensorflow as stock
import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from cases import Raised, run_cases

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd

Found = dict[str, Any]
Array = npt.NDArray[Any]

SIZES = (3, 6, 1, 2)  # of the batches, by rank

# By name: what the layer is given, the mean of its inputs, and the batches' sizes.
LAYERS: dict[str, tuple[Found, float, tuple[int, ...]]] = {
    "plain": ({}, 0.0, SIZES),
    "far from zero": ({}, 1000.0, SIZES),
    "channels first": ({"axis": 1}, 0.0, SIZES),
    "neither scale nor center": ({"scale": False, "center": False}, 0.0, SIZES),
    "renormalising": ({"renorm": True, "renorm_clipping": {"rmax": 3.0}}, 0.0, SIZES),
    "masked": ({}, 0.0, SIZES),
    "one rank all masked": ({}, 0.0, SIZES),
    "one rank without data": ({}, 0.0, (0, 5, 2, 1)),
}
DTYPES = ("float32", "float64")
MODES = ("eager", "function")


def batches(name: str, n: int) -> list[tuple[Array, Array, Array]]:
    """For each rank: inputs, the gradient of its outputs, and a mask."""
    _, mean, sizes = LAYERS[name]
    found = []
    for rank, size in enumerate(sizes[:n]):
        generator = np.random.default_rng([rank, len(name)])
        x = generator.normal(mean, 1 + rank, (size, 5, 4))
        mask = generator.random((size, 5)) < 0.6
        if name == "one rank all masked" and rank == 1:
            mask[:] = False
        found.append((x, generator.standard_normal(x.shape), mask))
    return found


def measured(
    layer: Any, dtype: str, batch: tuple[Array, Array, Array], is_masked: bool, mode: str
) -> Found:
    """Two steps of a layer that is used twice in each; its outputs, gradients and statistics."""
    layer.build((None, 5, 4))
    x, upstream = (tf.constant(part, dtype) for part in batch[:2])
    mask = tf.constant(batch[2]) if is_masked else None
    weights = [each.value for each in layer.trainable_variables]

    def step(x: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(layer(x, training=True, mask=mask) * x, training=True, mask=mask)
            loss = tf.reduce_sum(y * upstream)
        return y, tape.gradient(loss, [x, *weights])

    taken = tf.function(step) if mode == "function" else step
    taken(x)
    y, (of_inputs, *of_weights) = taken(x)
    return {
        "outputs": y.numpy(),
        "of inputs": of_inputs.numpy(),
        "of weights": [each.numpy() for each in of_weights],
        "statistics": [np.array(each) for each in layer.non_trainable_variables],
    }


def on_ranks(name: str, dtype: str, mode: str) -> Found:
    options, _, _ = LAYERS[name]
    layer = hvd_tf.SyncBatchNormalization(momentum=0.5, dtype=dtype, **options)
    mine = batches(name, hvd.size())[hvd.rank()]
    return measured(layer, dtype, mine, "masked" in name, mode)


def joined(name: str, dtype: str, n: int) -> Found:
    """One worker with Keras' own layer; in float64, so that only the ranks' errors count."""
    options, _, _ = LAYERS[name]
    layer = keras.layers.BatchNormalization(momentum=0.5, dtype="float64", **options)
    x, upstream, mask = (np.concatenate(parts) for parts in zip(*batches(name, n), strict=True))
    x, upstream = (part.astype(dtype).astype(np.float64) for part in (x, upstream))
    return measured(layer, "float64", (x, upstream, mask), "masked" in name, "eager")


# Below, one step of statistics that start at 0 and 1, with momentum 0.5.


def small_model(**options: Any) -> Any:
    layers = keras.layers
    normalization = hvd_tf.SyncBatchNormalization(momentum=0.5, **options)
    return keras.Sequential([layers.Input((3,)), normalization, layers.Dense(2)])


def data(rank: int, rows: int = 8) -> Array:
    return np.random.default_rng(rank).normal(rank, 1 + rank, (rows, 3)).astype(np.float32)


def fitted(policy: str) -> Found:
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(1)
    try:
        model = small_model()
    finally:
        keras.config.set_dtype_policy("float32")
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    model.fit(data(hvd.rank()), np.ones((8, 2)), batch_size=4, shuffle=False, verbose=0)
    return {
        "statistics": [np.array(each) for each in model.non_trainable_variables],
        "weights": [np.array(each) for each in model.trainable_variables],
    }


def unlike_shapes() -> Found:
    """The last rank's last batch is smaller, so that it traces its step once more."""
    layer = hvd_tf.SyncBatchNormalization(momentum=0.5)
    layer.build((None, 3))
    traced: list[int] = []

    @tf.function
    def step(x: tf.Tensor) -> None:
        traced.append(1)
        layer(layer(x, training=True), training=True)

    rows = 2 if hvd.rank() == hvd.size() - 1 else 4
    for part in (data(hvd.rank(), 4), data(hvd.rank(), rows)):
        step(tf.constant(part))
    return {"statistics": np.array(layer.moving_mean), "traced": len(traced)}


def unlike_names() -> Found:
    """Rank 0 has built other models before, so that Keras numbers its layers otherwise."""
    for _ in range(3 if hvd.rank() == 0 else 0):
        small_model()
    model = small_model()

    @tf.function
    def step(x: tf.Tensor) -> None:
        model(x, training=True)

    step(tf.constant(data(hvd.rank())))
    return {"name": model.layers[0].name, "statistics": np.array(model.layers[0].moving_mean)}


def saved(ending: str) -> Found:
    """A file holds a plain layer; here, it goes on with all ranks' statistics."""
    model = small_model()
    x = tf.constant(data(hvd.rank()))
    model.layers[0].moving_mean.assign([1.0, 2.0, 3.0])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"model.{ending}"
        model.save(file)
        found: Found = {"names us": b"hvd_pipe" in file.read_bytes()}
        if ending == "keras":
            config = zipfile.ZipFile(file).read("config.json")
            found = {"names us": b"hvd_pipe" in config or b"SyncBatch" in config}
        loaded = keras.models.load_model(file, compile=False)
    cloned = keras.models.clone_model(model)
    found["predictions differ by"] = float(tf.reduce_max(tf.abs(model(x) - loaded(x))))
    found["classes"] = [type(each.layers[0]) for each in (loaded, cloned)]
    for kind, each in (("loaded", loaded), ("cloned", cloned)):
        each.layers[0].moving_mean.assign([0.0, 0.0, 0.0])
        each(x, training=True)
        found[kind] = np.array(each.layers[0].moving_mean)
    return found


def stock_one() -> str:
    """What becomes of Horovod's layer under Keras 3."""
    try:
        stock.SyncBatchNormalization()
    except ValueError as error:
        return str(error)
    return ""


def wrong() -> list[str]:
    found = []
    for options in ({"fused": True}, {"fused": None}, {"fused": 1}, {"synchronized": False}):
        try:
            hvd_tf.SyncBatchNormalization(**options)
        except ValueError as error:
            found.append(str(error))
    layer = hvd_tf.SyncBatchNormalization()
    try:
        tf.function(lambda x: layer(x, training=True), jit_compile=True)(data(0))
    except ValueError as error:
        found.append(str(error))
    return found


def before_init() -> str:
    try:
        hvd_tf.SyncBatchNormalization()(data(0), training=True)
    except ValueError as error:
        return str(error)
    return ""


def observations() -> dict[str, Any | Raised]:
    early = before_init()
    hvd.init()
    cases: dict[str, Any] = {
        f"{name} {dtype} {mode}": (lambda a=(name, dtype, mode): on_ranks(*a))
        for name in LAYERS
        for dtype in DTYPES
        for mode in MODES
    }
    for policy in ("float32", "mixed_float16"):
        cases[f"fit {policy}"] = lambda policy=policy: fitted(policy)
    for ending in ("keras", "h5"):
        cases[f"saved {ending}"] = lambda ending=ending: saved(ending)
    cases["unlike shapes"] = unlike_shapes
    cases["unlike names"] = unlike_names
    cases["stock"] = stock_one
    cases["wrong"] = wrong
    return {**run_cases(cases), "before init": early}
