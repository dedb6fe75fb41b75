"""`hvd.SyncBatchNormalization` on n ranks is Keras' BatchNormalization on the joined batch."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
import workers_sync_batch_norm as workers
from cases import of_case
from ranks import once, run_ranks
from workers_sync_batch_norm import DTYPES, LAYERS, MODES, data

import hvd_pipe.tensorflow as hvd

observed = once(lambda n: run_ranks(n, workers.observations, timeout=300))
joined = functools.cache(workers.joined)

# Float64 has 1e-16 and the statistics lose a factor of (mean / deviation)^2, here 1e6 at most.
# Float32 has 6e-8 of what is normalised: of numbers near 1, or of 1000 (as Keras' own has then);
# gradients of weights sum up tens of such errors. With a mask, Keras divides by the count + 1e-7:
# another count on one worker than on each of several.
TOLERANCE = {"float64": 1e-9, "float32": 2e-5}
FAR = {"float64": 1e-9, "float32": 2e-2}
MASKED = {"float64": 2e-6, "float32": 2e-5}


def ranks_of(n: int, case: str) -> list[Any]:
    return of_case(observed(n), case)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("n", [2, 4])
def test_ranks_are_one_worker_with_the_joined_batch(
    n: int, name: str, dtype: str, mode: str
) -> None:
    found = ranks_of(n, f"{name} {dtype} {mode}")
    wanted = joined(name, dtype, n)
    tolerance = (FAR if "far" in name else MASKED if "masked" in name else TOLERANCE)[dtype]
    close = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    for key in ("outputs", "of inputs"):
        close(np.concatenate([each[key] for each in found]), wanted[key], err_msg=key)
    for i, gradient in enumerate(wanted["of weights"]):
        close(sum(each["of weights"][i] for each in found), gradient)
    for each in found:
        for mine, first, one in zip(
            each["statistics"], found[0]["statistics"], wanted["statistics"], strict=True
        ):
            np.testing.assert_array_equal(mine, first)
            close(mine, one)


def mean_of(batches: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """The moving mean after one step."""
    mean: npt.NDArray[Any] = 0.5 * np.concatenate(batches).mean(0)
    return mean


def test_horovods_own_cannot_be_made() -> None:
    """The story of this module. When this fails, Horovod has been repaired."""
    for text in ranks_of(2, "stock"):
        assert "fused" in text


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("n", [2, 4])
def test_fit_keeps_statistics_and_weights_alike(n: int, policy: str) -> None:
    first, *others = ranks_of(n, f"fit {policy}")
    for other in others:
        for key in ("statistics", "weights"):
            for mine, theirs in zip(other[key], first[key], strict=True):
                np.testing.assert_array_equal(mine, theirs)
    whole = [data(rank) for rank in range(n)]
    if policy == "mixed_float16":  # Keras casts the inputs of a model's layers
        whole = [each.astype(np.float16).astype(np.float32) for each in whole]
    mean, variance = np.zeros(3), np.ones(3)
    for part in (slice(0, 4), slice(4, 8)):
        batch = np.concatenate([each[part] for each in whole])
        mean = 0.5 * mean + 0.5 * batch.mean(0)
        variance = 0.5 * variance + 0.5 * batch.var(0)
    np.testing.assert_allclose(first["statistics"][0], mean, rtol=1e-5)
    np.testing.assert_allclose(first["statistics"][1], variance, rtol=1e-5)


def test_a_rank_may_trace_its_step_once_more() -> None:
    found = ranks_of(2, "unlike shapes")
    assert [each["traced"] for each in found] == [1, 2]
    np.testing.assert_array_equal(found[0]["statistics"], found[1]["statistics"])


def test_layers_may_have_other_names_on_other_ranks() -> None:
    first, second = ranks_of(2, "unlike names")
    assert first["name"] != second["name"]
    wanted = mean_of([data(0), data(1)])
    for each in (first, second):
        np.testing.assert_allclose(each["statistics"], wanted, rtol=1e-5)


@pytest.mark.parametrize("ending", ["keras", "h5"])
def test_a_file_holds_a_plain_layer_that_goes_on_synchronised(ending: str) -> None:
    """So that it loads without hvd_pipe, and is not silently local with it."""
    wanted = mean_of([data(0), data(1)])
    for found in ranks_of(2, f"saved {ending}"):
        assert not found["names us"]
        assert found["predictions differ by"] < 1e-6
        loaded, cloned = found["classes"]
        assert loaded is keras.layers.BatchNormalization
        assert cloned is hvd.SyncBatchNormalization
        for kind in ("loaded", "cloned"):
            np.testing.assert_allclose(found[kind], wanted, rtol=1e-5)


def test_mistakes_are_explained() -> None:
    for found in ranks_of(2, "wrong"):
        assert len(found) == 5
        assert all("no fused kernel" in text for text in found[:3])
        assert "keras.layers.BatchNormalization" in found[3]
        assert "jit_compile=False" in found[4]
    for early in ranks_of(2, "before init"):
        assert "call hvd.init()" in early
