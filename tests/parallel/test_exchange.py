"""Exchanges: equal to two rounds of coding in one process, bit for bit, on every rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import workers_exchange
from cases import of_case
from codec_reference import F32, emulated
from ranks import once, run_ranks, run_script
from workers_exchange import (
    ORDER,
    ROUNDS,
    SHAPES,
    SHARED,
    SOME,
    STEPS,
    Shape,
    members,
    step_values,
    values,
)

from hvd_pipe.torch.compression import BF16, Codec, Int8

results = once(lambda n, launcher="mpi": run_ranks(n, workers_exchange.run, n, launcher=launcher))

JOBS = pytest.mark.parametrize(
    ("n", "launcher"), [(2, "gloo"), (3, "mpi"), (4, "mpi")], ids=["2_gloo", "3_mpi", "4_mpi"]
)


def expected(shape: Shape, ranks: list[int]) -> np.ndarray:
    mine = [values(rank, shape) for rank in ranks]
    coded = [x[: shape.numel].float().numpy() for x in mine]
    words = np.sum([x[shape.numel :].double().numpy() for x in mine], axis=0)
    words /= 1 if shape.sum else len(ranks)
    result = emulated(shape.codec, coded, average=not shape.sum)
    return torch.cat([torch.from_numpy(result), torch.from_numpy(words)]).to(shape.dtype).double()


@JOBS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_to_the_two_phases_in_one_process(n: int, launcher: str, shape: Shape) -> None:
    for result in of_case(results(n, launcher), shape):
        np.testing.assert_array_equal(result, expected(shape, list(range(n))))


def scale(codec: Int8, x: np.ndarray) -> np.ndarray:
    rows = -(-x.size // codec.chunk)
    padded = np.zeros(rows * codec.chunk)
    padded[: x.size] = np.abs(x)
    return np.repeat(padded.reshape(rows, codec.chunk).max(1) / 127, codec.chunk)[: x.size]


@JOBS
@pytest.mark.parametrize("shape", [s for s in SHAPES if s.dtype == torch.float32], ids=str)
def test_near_the_true_mean(n: int, launcher: str, shape: Shape) -> None:
    """Each coding is wrong by half a step; the one of the mean sees an input that is wrong."""
    mine = [values(rank, shape).double().numpy()[: shape.numel] for rank in range(n)]
    weight = 1 if shape.sum else n
    exact = np.sum(mine, axis=0) / weight
    if isinstance(shape.codec, Int8):
        half_steps = np.sum([scale(shape.codec, x) for x in mine], axis=0) / 2 / weight
        widest = np.sum([127 * scale(shape.codec, x) for x in mine], axis=0) / weight
        bound = half_steps + scale(shape.codec, np.abs(exact) + half_steps) / 2
    else:
        widest = np.sum(np.abs(mine), axis=0) / weight
        bound = 2.0**-8 * widest + 2.0**-8 * (np.abs(exact) + 2.0**-8 * widest)
    for result in of_case(results(n, launcher), shape):
        error = np.abs(result[: shape.numel] - exact)
        assert np.all(error <= bound + 4 * n * 2.0**-24 * widest)


@JOBS
def test_control_words_are_exact(n: int, launcher: str) -> None:
    shape = Shape(Int8(), 1000, 3)
    for result in of_case(results(n, launcher), shape):
        assert result[-3:].tolist() == [0.0, 12 * (n + 1) / 2, 1.0]


@JOBS
def test_ranks_may_launch_in_different_orders(n: int, launcher: str) -> None:
    for result in of_case(results(n, launcher), "other orders"):
        for one, shape in zip(result, ORDER, strict=True):
            np.testing.assert_array_equal(one, expected(shape, list(range(n))))


@JOBS
@pytest.mark.parametrize("wrong", ["inf", "nan"])
@pytest.mark.parametrize(
    "codec", [BF16(), Int8(), BF16(error_feedback=True), Int8(error_feedback=True)], ids=str
)
def test_an_overflow_on_one_rank_is_one_on_all(
    n: int, launcher: str, codec: Codec, wrong: str
) -> None:
    start = 700 // codec.chunk * codec.chunk
    finite = np.ones(2000, bool)
    finite[start : start + codec.chunk] = False
    for first, second in of_case(results(n, launcher), ("not finite", codec, wrong)):
        np.testing.assert_array_equal(np.isfinite(first), finite)
        np.testing.assert_array_equal(second, np.ones(2000))  # and it does not stay for ever


@JOBS
def test_a_process_set(n: int, launcher: str) -> None:
    some = members(n)
    for rank, result in enumerate(of_case(results(n, launcher), "some ranks")):
        reduces = rank in some and len(some) > 1
        wanted = expected(SOME, some) if reduces else values(rank, SOME).double()
        np.testing.assert_array_equal(result, wanted)


@JOBS
def test_two_exchanges_share_a_feedback(n: int, launcher: str) -> None:
    lost = np.zeros((n + 1, SHARED.numel), F32)
    steps = []
    for step in range(STEPS):
        mine = [step_values(rank, step)[: SHARED.numel].numpy() for rank in range(n)]
        steps.append(emulated(SHARED.codec, mine, lost=lost))
    ranks = of_case(results(n, launcher), "shared")
    for rank, (*arrived, sent, _) in enumerate(ranks):
        for one, wanted in zip(arrived, steps, strict=True):
            np.testing.assert_array_equal(one, wanted)
        np.testing.assert_array_equal(sent, lost[rank])
    # Every rank keeps its own slice's residual, and zeros outside.
    np.testing.assert_array_equal(np.sum([rank[-1] for rank in ranks], axis=0), lost[-1])


@JOBS
def test_a_feedback_can_be_saved_and_restored(n: int, launcher: str) -> None:
    for wanted, result in of_case(results(n, launcher), "restored"):
        np.testing.assert_array_equal(result, wanted)


@JOBS
@pytest.mark.parametrize("codec", [BF16, Int8])
def test_with_error_feedback_nothing_is_lost_in_the_long_run(
    n: int, launcher: str, codec: type[BF16] | type[Int8]
) -> None:
    """A residual is at most half a step, so the sum of many rounds is off by two of them."""
    base = np.full(1000, F32(1e-3)) * (1 + np.arange(1000) % 3).astype(F32)
    base[::250] = 1.0
    true = ROUNDS * np.mean([base * (1 + 0.1 * rank) for rank in range(n)], axis=0)
    for kept, dropped in zip(
        of_case(results(n, launcher), ("running sum", codec(error_feedback=True))),
        of_case(results(n, launcher), ("running sum", codec())),
        strict=True,
    ):
        largest = 1 + 0.1 * (n - 1)
        half_step = 1.01 * largest / 254 if codec is Int8 else 2.0**-8 * 2 * true / ROUNDS
        rounding = ROUNDS * 2.0**-22
        assert np.all(np.abs(kept - true) <= 2 * half_step + rounding)
        assert np.any(np.abs(dropped - true) > 4 * half_step + rounding)


@JOBS
def test_it_moves_behind_the_script(n: int, launcher: str) -> None:
    assert of_case(results(n, launcher), "without the main thread") == [True] * n


@JOBS
def test_bytes_on_the_wire(n: int, launcher: str) -> None:
    padded = n * (4 * 3 + (12 // n) * 260)
    assert of_case(results(n, launcher), "traffic") == [2 * (n - 1) / n * padded] * n


@JOBS
def test_errors_are_raised_where_the_script_waits(n: int, launcher: str) -> None:
    for first, second, twice in of_case(results(n, launcher), "errors"):
        assert (first, second) == ("in the first phase", "in the second phase")
        assert "call wait() before launch()" in twice


@JOBS
def test_ranks_that_have_gone_apart_are_told(n: int, launcher: str) -> None:
    for said in of_case(results(n, launcher), "gone apart"):
        assert "ranks have sent different things" in said


@JOBS
def test_a_rank_that_has_joined_is_named(n: int, launcher: str) -> None:
    *others, last = of_case(results(n, launcher), "joined")
    assert last == ""
    assert all("left by hvd.join()" in said for said in others)


@JOBS
def test_which_messages_a_reduction_makes(n: int, launcher: str) -> None:
    for result in of_case(results(n, launcher), "through a reduction"):
        kinds = {label: kind for label, (kind, _) in result.items()}
        exchanged = dict.fromkeys(("bf16", "bf16 as fp16", "int8"), "CompressedAllReduce")
        assert kinds == exchanged | {"none": "AllReduce"}
        for _, flat in result.values():
            np.testing.assert_allclose(flat, (n + 1) / 2, rtol=1e-6)


@JOBS
def test_what_is_in_flight_at_the_end_arrives(n: int, launcher: str) -> None:
    """Both phases, before Horovod shuts down; the jobs end with another one in flight."""
    for said, done, left, after in of_case(results(n, launcher), "settled"):
        assert "averages in flight" in said[0]
        assert done
        np.testing.assert_allclose(left, (n - 1) / 2, rtol=1e-6)
        np.testing.assert_allclose(after, (n - 1) / 2, rtol=1e-6)


SCRIPT = """
import time
import torch
import hvd_pipe.torch as hvd
from hvd_pipe.torch.compression import BF16, Codec, Int8
from hvd_pipe.torch.messages.compressed_allreduce import CompressedAllReduce
from hvd_pipe.torch.messages.allreduce import Reduction

hvd.init()
exchanges = [CompressedAllReduce(Reduction(), torch.ones(10**6), str(i), Int8())
    for i in range(3 + hvd.rank())]  # one that the other rank never sends
for exchange in exchanges:
    exchange.launch()
if hvd.rank() == 1:
    raise RuntimeError("of the script")
time.sleep(60)
"""


def test_a_rank_that_fails_ends_at_once() -> None:
    """Neither does it wait for what is in flight, nor does Python's end meet a busy thread."""
    with pytest.raises(AssertionError, match=r"exit status 1\n") as caught:
        run_script(2, "-c", SCRIPT)
    assert "terminate called" not in str(caught.value)
