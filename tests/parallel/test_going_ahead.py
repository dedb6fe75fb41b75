"""A rank waits for the others as late as its strategy says: it goes ahead of one that is slow.

Rank 1 begins what rank 0 has ended. Where rank 0 waits too early, both wait, until `gather` ends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from in_turn import one_after_the_other
from on_ranks import on_ranks
from problem import OPTIMIZERS, loss_of, make_model, weights_of

import hvd_pipe.torch as hvd
from hvd_pipe.planning.plan import Plan

two = on_ranks(2, init=hvd.init)

INT8 = hvd.Int8(chunk=8, error_feedback=True)
TOGETHER, STEPS = 12, 20
"""The first steps, in which ranks agree on what they do later, and all steps."""


def forward_plan() -> Plan:
    names = [name for name, _ in make_model().named_parameters()]
    return Plan((tuple(names[3:]), tuple(names[:3])), "given", order=(1, 0))


IN_BACKWARD = {
    "merged-gradient": ("merged-gradient:plan=wfbp", hvd.Compression.none),
    "merged-gradient, int8": ("merged-gradient:plan=wfbp", INT8),
    "pipe-sgd": ("pipe-sgd:bucket_bytes=64", hvd.Compression.none),
    "pipe-sgd, int8": ("pipe-sgd:bucket_bytes=64", INT8),
    "warm-up of pipe-sgd": ("pipe-sgd:bucket_bytes=64,warmup_steps=20", hvd.Compression.none),
    "warm-up of cocod": ("cocod:period=2,warmup_steps=20", hvd.Compression.none),
}
IN_STEP = {
    "pipe-sgd": ("pipe-sgd:bucket_bytes=64", hvd.Compression.none),
    "pipe-sgd, int8": ("pipe-sgd:bucket_bytes=64", INT8),
    "pipe-sgd, local": ("pipe-sgd:bucket_bytes=64,prediction=local", hvd.Compression.none),
    "pipe-sgd, previous": ("pipe-sgd:bucket_bytes=64,prediction=previous", hvd.Compression.none),
    "cocod": ("cocod:period=2", hvd.Compression.none),
    "cocod, int8": ("cocod:period=2", INT8),
    "cocod, fragments": ("cocod:period=4,fragments=2", hvd.Compression.none),
    "cocod, momenta": ("cocod:period=2,momentum=average", hvd.Compression.none),
    "overlap=forward": (
        hvd.MergedGradient(forward_plan(), overlap="forward"),
        hvd.Compression.none,
    ),
}

Call = Callable[..., Any]


def trained(strategy: Any, compression: Any, ahead: str = "") -> Any:
    """The losses and the last weights of steps of which ranks make a part one after the other."""
    model = make_model(torch.float32)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model),
        model.named_parameters(),
        compression=compression,
        strategy=strategy,
    )
    losses = []

    def backward(number: int) -> None:
        loss = loss_of(model, hvd.rank(), number)
        loss.backward()
        losses.append(float(loss))

    def step(number: int) -> None:
        optimizer.zero_grad()
        in_turn("backward", backward, number)
        optimizer.step()

    def in_turn(part: str, call: Call, number: int) -> None:
        if part == ahead and number >= TOGETHER:
            one_after_the_other(partial(call, number))
        else:
            call(number)

    for number in range(STEPS):
        in_turn("step", step, number)
    optimizer.synchronize()
    return np.array([*losses, *weights_of(model)])


@two
@pytest.mark.parametrize("case", IN_BACKWARD)
def test_a_backward_pass_waits_for_nobody(case: str) -> None:
    ahead = trained(*IN_BACKWARD[case], "backward")
    np.testing.assert_array_equal(ahead, trained(*IN_BACKWARD[case]))


@two
@pytest.mark.parametrize("case", IN_STEP)
def test_a_step_waits_for_what_was_sent_before_it(case: str) -> None:
    ahead = trained(*IN_STEP[case], "step")
    np.testing.assert_array_equal(ahead, trained(*IN_STEP[case]))
