"""`hvd.SyncBatchNormalization` on n ranks is Keras' BatchNormalization on the joined batch."""

from __future__ import annotations

import functools
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
from on_ranks import gather, on_ranks

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd

Array = npt.NDArray[Any]

_early: list[str] = []


def init() -> None:
    """Note what a layer says before Horovod is initialised, and do so."""
    try:
        hvd_tf.SyncBatchNormalization()(data(0), training=True)
    except ValueError as error:
        _early.append(str(error))
    hvd.init()


two = on_ranks(2, init=init)

# Float64 has 1e-16 and the statistics lose a factor of (mean / deviation)^2, here 1e6 at most.
# Float32 has 6e-8 of what is normalised: of numbers near 1, or of 1000 (as Keras' own has then);
# gradients of weights sum up tens of such errors. With a mask, Keras divides by the count + 1e-7:
# another count on one worker than on each of several.
TOLERANCE = {"float64": 1e-9, "float32": 2e-5}
FAR = {"float64": 1e-9, "float32": 2e-2}
MASKED = {"float64": 2e-6, "float32": 2e-5}

SIZES = (3, 6)  # of the batches, by rank

# By name: what the layer is given, the mean of its inputs, and the batches' sizes.
LAYERS: dict[str, tuple[dict[str, Any], float, tuple[int, ...]]] = {
    "plain": ({}, 0.0, SIZES),
    "far from zero": ({}, 1000.0, SIZES),
    "channels first": ({"axis": 1}, 0.0, SIZES),
    "neither scale nor center": ({"scale": False, "center": False}, 0.0, SIZES),
    "renormalising": ({"renorm": True, "renorm_clipping": {"rmax": 3.0}}, 0.0, SIZES),
    "masked": ({}, 0.0, SIZES),
    "one rank all masked": ({}, 0.0, SIZES),
    "one rank without data": ({}, 0.0, (0, 5)),
}
TRACED = ("plain", "renormalising", "one rank all masked", "one rank without data")


def batches(name: str) -> list[tuple[Array, Array, Array]]:
    """For each rank: inputs, the gradient of its outputs, and a mask."""
    _, mean, sizes = LAYERS[name]
    found = []
    for rank, size in enumerate(sizes):
        generator = np.random.default_rng([rank, len(name)])
        x = generator.normal(mean, 1 + rank, (size, 5, 4))
        mask = generator.random((size, 5)) < 0.6
        if name == "one rank all masked" and rank == 1:
            mask[:] = False
        found.append((x, generator.standard_normal(x.shape), mask))
    return found


def measured(
    layer: Any, dtype: str, batch: tuple[Array, Array, Array], is_masked: bool, mode: str
) -> dict[str, Any]:
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


def joined(name: str, dtype: str) -> dict[str, Any]:
    """One worker with Keras' own layer; in float64, so that only the ranks' errors count."""
    layer = keras.layers.BatchNormalization(
        name="joined", momentum=0.5, dtype="float64", **LAYERS[name][0]
    )
    x, upstream, mask = (np.concatenate(parts) for parts in zip(*batches(name), strict=True))
    x, upstream = (part.astype(dtype).astype(np.float64) for part in (x, upstream))
    return measured(layer, "float64", (x, upstream, mask), "masked" in name, "eager")


@pytest.mark.parametrize(
    ("name", "dtype", "mode"),
    [
        *((name, "float32", "eager") for name in LAYERS),
        *((name, "float64", "function") for name in TRACED),
    ],
)
@two
def test_ranks_are_one_worker_with_the_joined_batch(name: str, dtype: str, mode: str) -> None:
    layer = hvd_tf.SyncBatchNormalization(momentum=0.5, dtype=dtype, **LAYERS[name][0])
    mine = measured(layer, dtype, batches(name)[hvd.rank()], "masked" in name, mode)
    ranks = gather(mine)
    if hvd.rank() != 0:
        return
    wanted = joined(name, dtype)
    tolerance = (FAR if "far" in name else MASKED if "masked" in name else TOLERANCE)[dtype]
    close = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    for key in ("outputs", "of inputs"):
        close(np.concatenate([each[key] for each in ranks]), wanted[key], err_msg=key)
    for i, gradient in enumerate(wanted["of weights"]):
        close(sum(each["of weights"][i] for each in ranks), gradient)
    for each in ranks:
        for theirs, first, one in zip(
            each["statistics"], mine["statistics"], wanted["statistics"], strict=True
        ):
            np.testing.assert_array_equal(theirs, first)
            close(theirs, one)


# Below, one step of statistics that start at 0 and 1, with momentum 0.5.


def small_model(**options: Any) -> Any:
    layers = keras.layers
    normalization = hvd_tf.SyncBatchNormalization(momentum=0.5, **options)
    return keras.Sequential([layers.Input((3,)), normalization, layers.Dense(2)])


def data(rank: int, rows: int = 8) -> Array:
    return np.random.default_rng(rank).normal(rank, 1 + rank, (rows, 3)).astype(np.float32)


def mean_of_both() -> Array:
    """Of two ranks: the moving mean after one step."""
    mean: Array = 0.5 * np.concatenate([data(0), data(1)]).mean(0)
    return mean


@two
def test_fit_keeps_statistics_and_weights_alike() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    keras.utils.set_random_seed(1)
    try:
        model = small_model()
    finally:
        keras.config.set_dtype_policy("float32")
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    model.fit(data(hvd.rank()), np.ones((8, 2)), batch_size=4, shuffle=False, verbose=0)
    first, *others = gather([np.array(each) for each in model.weights])
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    # Keras casts the inputs of a model's layers.
    whole = [data(rank).astype(np.float16).astype(np.float32) for rank in range(2)]
    mean, variance = np.zeros(3), np.ones(3)
    for part in (slice(0, 4), slice(4, 8)):
        batch = np.concatenate([each[part] for each in whole])
        mean = 0.5 * mean + 0.5 * batch.mean(0)
        variance = 0.5 * variance + 0.5 * batch.var(0)
    statistics = [np.array(each) for each in model.non_trainable_variables]
    np.testing.assert_allclose(statistics[0], mean, rtol=1e-5)
    np.testing.assert_allclose(statistics[1], variance, rtol=1e-5)


@two
def test_a_rank_may_trace_its_step_once_more() -> None:
    """Rank 1's last batch is smaller."""
    layer = hvd_tf.SyncBatchNormalization(momentum=0.5)
    layer.build((None, 3))
    traced: list[int] = []

    @tf.function
    def step(x: tf.Tensor) -> None:
        traced.append(1)
        layer(layer(x, training=True), training=True)

    for rows in (4, 4 - 2 * hvd.rank()):
        step(tf.constant(data(hvd.rank(), rows)))
    assert len(traced) == hvd.rank() + 1
    first, second = gather(np.array(layer.moving_mean))
    np.testing.assert_array_equal(first, second)


@two
def test_layers_may_have_other_names_on_other_ranks() -> None:
    """Rank 0 has built other models before, so that Keras numbers its layers otherwise."""
    for _ in range(3 if hvd.rank() == 0 else 0):
        small_model()
    model = small_model()

    @tf.function
    def step(x: tf.Tensor) -> None:
        model(x, training=True)

    step(tf.constant(data(hvd.rank())))
    first, second = gather(model.layers[0].name)
    assert first != second
    np.testing.assert_allclose(np.array(model.layers[0].moving_mean), mean_of_both(), rtol=1e-5)


@two
def test_a_file_holds_a_plain_layer_that_goes_on_synchronised(tmp_path: Path) -> None:
    """So that it loads without hvd_pipe, and is not silently local with it."""
    model = small_model()
    x = tf.constant(data(hvd.rank()))
    model.layers[0].moving_mean.assign([1.0, 2.0, 3.0])
    file = tmp_path / "model.keras"
    model.save(file)
    text = zipfile.ZipFile(file).read("config.json")
    assert b"hvd_pipe" not in text
    assert b"SyncBatch" not in text
    loaded = keras.models.load_model(file, compile=False)
    cloned = keras.models.clone_model(model)
    assert float(tf.reduce_max(tf.abs(model(x) - loaded(x)))) < 1e-6
    assert type(loaded.layers[0]) is keras.layers.BatchNormalization
    assert type(cloned.layers[0]) is hvd_tf.SyncBatchNormalization
    for each in (loaded, cloned):
        each.layers[0].moving_mean.assign([0.0, 0.0, 0.0])
        each(x, training=True)
        np.testing.assert_allclose(np.array(each.layers[0].moving_mean), mean_of_both(), rtol=1e-5)


@two
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fused": True}, "no fused kernel"),
        ({"fused": None}, "no fused kernel"),
        ({"fused": 1}, "no fused kernel"),
        ({"synchronized": False}, "keras.layers.BatchNormalization"),
    ],
    ids=str,
)
def test_mistakes_are_explained(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hvd_tf.SyncBatchNormalization(**options)
