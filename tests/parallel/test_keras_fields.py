"""Keras: two ranks with two values of an argument, as `test_fields` has it for PyTorch."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from differing_values import Differing, argument, arguments_in, check, common, fields_of
from on_ranks import on_ranks

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.errors import RanksDisagreeError
from hvd_pipe.planning.plan import Plan

two = on_ranks(2, init=hvd.init, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})


def sent_as(order: tuple[int, ...]) -> hvd.MergedGradient:
    return hvd.MergedGradient(Plan((("a",), ("b",)), "given", order=order), overlap="forward")


OF_OPTIMIZERS: dict[str, Differing] = {
    **common(hvd),
    "optimizer": argument(
        "optimizer",
        keras.optimizers.SGD,
        keras.optimizers.Adam,
        "the optimizer SGD",
        "the optimizer Adam",
    ),
    "scale_local_gradients": argument("scale_local_gradients", True, False),
    "average_aggregated_gradients": argument("average_aggregated_gradients", True, False),
    "gradient_accumulation_steps": argument(
        "optimizer",
        partial(keras.optimizers.SGD, gradient_accumulation_steps=2),
        partial(keras.optimizers.SGD, gradient_accumulation_steps=3),
        "2",
        "3",
    ),
    "order of a plan": Differing(
        ({"strategy": sent_as((0, 1))}, {"strategy": sent_as((1, 0))}),
        ("sent as (0, 1)", "sent as (1, 0)"),
    ),
    "groups": argument("groups", 1, 2),
    "num_groups": argument("num_groups", 1, 2),
}
OF_APPLY = {
    "optimizer",
    "backward_passes_per_step",
    "average_aggregated_gradients",
    "gradient_accumulation_steps",
    "order of a plan",
}
"""What tapes do not have."""

OF_TAPES = {
    key: row
    for key, row in OF_OPTIMIZERS.items()
    if key not in OF_APPLY
    and not key.startswith(("CoCoD.", "Auto.", "PipeSGD.prediction", "MergedGradient.overlap"))
}

PLACES = {"name", "device_dense", "device_sparse"}
"""What each rank may have as it likes: where it computes, and a name that nobody uses."""

NOT_TOLD = {"process_set"}
"""Ranks that do not mean the same ranks do not meet."""


@two
@pytest.mark.parametrize("case", OF_OPTIMIZERS)
def test_both_ranks_are_told_both_values(case: str) -> None:
    row = OF_OPTIMIZERS[case]
    arguments: dict[str, Any] = {"optimizer": keras.optimizers.SGD, **row.values[hvd.rank()]}
    plain = arguments.pop("optimizer")(0.1)
    weights = [keras.Variable(np.ones(2), name=name) for name in ("a", "b")]
    with pytest.raises(RanksDisagreeError) as told:  # groups are compared with the variables
        hvd.DistributedOptimizer(plain, **arguments).apply([tf.ones(2)] * 2, weights)
    check(str(told.value), row)


@two
@pytest.mark.parametrize("case", OF_TAPES)
def test_both_ranks_of_a_tape_are_told_both_values(case: str) -> None:
    row = OF_TAPES[case]
    weights = [tf.Variable(tf.ones(2)) for _ in range(2)]
    with tf.GradientTape() as recorded:
        loss = tf.reduce_sum(weights[0] * weights[1])
    with pytest.raises(RanksDisagreeError) as told:
        hvd_tf.DistributedGradientTape(recorded, **row.values[hvd.rank()]).gradient(loss, weights)
    check(str(told.value), row)


VARIABLES = {
    "number": argument("shapes", [(2,), (3,)], [(2,)], "2", "1"),
    "shape": argument("shapes", [(2,), (3,)], [(2,), (4,)], "float32[3]", "float32[4]"),
    "dtype": argument("dtype", "float32", "float64", "float32[2]", "float64[2]"),
}


@two
@pytest.mark.parametrize("case", VARIABLES)
def test_both_ranks_are_told_what_they_train(case: str) -> None:
    row = VARIABLES[case]
    mine: dict[str, Any] = {"shapes": [(2,)], "dtype": "float32", **row.values[hvd.rank()]}
    weights = [
        keras.Variable(np.ones(shape), dtype=mine["dtype"], name=f"w{i}")
        for i, shape in enumerate(mine["shapes"])
    ]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(RanksDisagreeError) as told:
        optimizer.apply([tf.ones_like(each.value) for each in weights], weights)
    check(str(told.value), row)


def test_no_argument_is_forgotten() -> None:
    told = arguments_in(OF_OPTIMIZERS.values())
    signature = inspect.signature(hvd.DistributedOptimizer).parameters
    assert told | PLACES | NOT_TOLD == set(signature)
    strategies = hvd.MergedGradient, hvd.PipeSGD, hvd.CoCoD, hvd.Auto
    assert fields_of(*strategies, hvd.Int8, hvd.BF16) <= OF_OPTIMIZERS.keys()
    told = arguments_in(OF_TAPES.values()) | {"gradtape"}
    signature = inspect.signature(hvd_tf.DistributedGradientTape).parameters
    assert told | (PLACES | NOT_TOLD) & set(signature) == set(signature)
