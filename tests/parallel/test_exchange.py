"""Exchanges: equal to two rounds of coding in one process, bit for bit, on every rank."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from codec_reference import F32, emulated
from horovod.torch.mpi_ops import ProcessSet
from on_ranks import gather, on_ranks, place
from ranks import run_script

import hvd_pipe.torch as hvd
from hvd_pipe.errors import HvdPipeError
from hvd_pipe.torch.compression import BF16, Codec, Int8
from hvd_pipe.torch.messages import pending
from hvd_pipe.torch.messages.allreduce import Feedback, Reduction
from hvd_pipe.torch.messages.compressed_allreduce import CompressedAllReduce


def members(n: int) -> list[int]:
    """The ranks of the process set; of two ranks, one that is alone."""
    return [0, n - 1] if n > 2 else [1]


@functools.cache
def some_ranks() -> ProcessSet:
    return hvd.ProcessSet(members(place()[2]))


def init() -> None:
    hvd.init(process_sets=[some_ranks()])


JOBS = pytest.mark.parametrize(
    "n",
    [
        pytest.param(2, marks=on_ranks(2, launcher="gloo", init=init), id="2_gloo"),
        pytest.param(3, marks=on_ranks(3, init=init), id="3_mpi"),
    ],
)


class Shape(NamedTuple):
    """One buffer that is reduced once."""

    codec: Codec
    numel: int
    exact: int = 0
    dtype: torch.dtype = torch.float32
    sum: bool = False
    predivide: float = 1.0


SHAPES = [
    *(Shape(codec, numel, exact) for codec in (BF16(), Int8()) for numel, exact in (
        (1, 0), (1, 3), (0, 3), (2, 0), (255, 2), (256, 0), (257, 1), (1000, 3), (5123, 0)
    )),
    *(Shape(codec, 100_003, 3) for codec in (BF16(), Int8(), Int8(chunk=100))),
    *(Shape(codec, 1000, 3, dtype) for codec in (BF16(), Int8())
        for dtype in (torch.float64, torch.float16, torch.bfloat16)),
    *(Shape(codec, 3000, 3, sum=True) for codec in (BF16(), Int8())),
    Shape(Int8(chunk=64), 3000, 3, predivide=2.0),
]  # fmt: skip


def values(rank: int, shape: Shape) -> torch.Tensor:
    """A rank's buffer: values of many sizes, then words that float16 cannot hold."""
    noise = torch.Generator().manual_seed(1000 * shape.numel + rank)
    sizes = torch.exp(3 * torch.randn(shape.numel, generator=noise))
    flat = torch.randn(shape.numel, generator=noise) * sizes.clamp(max=100)
    return torch.cat([flat, words(rank, shape.exact)]).to(shape.dtype)


def words(rank: int, exact: int) -> torch.Tensor:
    """Words whose sums are exact in every dtype: small integers, and the last one is one."""
    word = torch.arange(exact, dtype=torch.float32) * 4 * 3 * (rank + 1)
    word[-1:] = 1.0
    return word


def arrays(tensor: torch.Tensor) -> np.ndarray:
    """As float64, which holds the values of all dtypes."""
    return tensor.double().numpy()


def expected(shape: Shape, ranks: Sequence[int]) -> np.ndarray:
    mine = [values(rank, shape) for rank in ranks]
    coded = [x[: shape.numel].float().numpy() for x in mine]
    words = np.sum([x[shape.numel :].double().numpy() for x in mine], axis=0)
    words /= 1 if shape.sum else len(ranks)
    result = emulated(shape.codec, coded, average=not shape.sum)
    return torch.cat([torch.from_numpy(result), torch.from_numpy(words)]).to(shape.dtype).double()


def run(exchange: CompressedAllReduce) -> None:
    exchange.launch()
    exchange.wait()


@JOBS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_to_the_two_phases_in_one_process(n: int, shape: Shape) -> None:
    reduction = Reduction(
        op=hvd.Sum if shape.sum else hvd.Average, gradient_predivide_factor=shape.predivide
    )
    flat = values(hvd.rank(), shape)
    exchange = CompressedAllReduce(reduction, flat, "reduced", shape.codec, shape.exact)
    for _ in range(2):  # the second time with buffers that were used before
        flat.copy_(values(hvd.rank(), shape))
        run(exchange)
    np.testing.assert_array_equal(arrays(flat), expected(shape, range(n)))


@JOBS
def test_control_words_are_exact(n: int) -> None:
    flat = values(hvd.rank(), Shape(Int8(), 1000, 3))
    run(CompressedAllReduce(Reduction(), flat, "words", Int8(), exact=3))
    assert flat[-3:].tolist() == [0.0, 12 * (n + 1) / 2, 1.0]


@JOBS
def test_ranks_may_launch_in_different_orders(n: int) -> None:
    """Every rank launches, and waits, in an order of its own, sometimes later than the others."""
    order = [Shape(Int8(), numel, 2) for numel in (300, 70_000, 12, 5000, 40_000)]
    flats = [values(hvd.rank(), shape) for shape in order]
    exchanges = [
        CompressedAllReduce(Reduction(), flat, f"order.{number}", Int8(), 2)
        for number, flat in enumerate(flats)
    ]
    for turn in range(5):
        mine = np.random.default_rng([turn, hvd.rank()])
        for number in mine.permutation(len(order)):
            flats[number].copy_(values(hvd.rank(), order[number]))
            exchanges[number].launch()
            time.sleep(0.01 * mine.random())
        for number in mine.permutation(len(order)):
            exchanges[number].wait()
    for flat, shape in zip(flats, order, strict=True):
        np.testing.assert_array_equal(arrays(flat), expected(shape, range(n)))


@JOBS
@pytest.mark.parametrize("wrong", ["inf", "nan"])
@pytest.mark.parametrize(
    "codec", [BF16(), Int8(), BF16(error_feedback=True), Int8(error_feedback=True)], ids=str
)
def test_an_overflow_on_one_rank_is_one_on_all(n: int, codec: Codec, wrong: str) -> None:
    flat = torch.ones(2000)
    exchange = CompressedAllReduce(Reduction(), flat, "wrong", codec)
    if hvd.rank() == n - 1:
        flat[700] = float(wrong)
    run(exchange)
    start = 700 // codec.chunk * codec.chunk
    finite = np.ones(2000, bool)
    finite[start : start + codec.chunk] = False
    np.testing.assert_array_equal(np.isfinite(arrays(flat)), finite)
    flat.fill_(1.0)
    run(exchange)
    np.testing.assert_array_equal(arrays(flat), np.ones(2000))  # and it does not stay for ever


@JOBS
def test_a_process_set(n: int) -> None:
    """Only the members reduce; others, and one that is alone, keep what they have."""
    shape, some = Shape(Int8(), 3000, 3), members(n)
    flat = values(hvd.rank(), shape)
    reduction = Reduction(process_set=some_ranks())
    run(CompressedAllReduce(reduction, flat, "some", shape.codec, shape.exact))
    reduces = hvd.rank() in some and len(some) > 1
    wanted = expected(shape, some) if reduces else values(hvd.rank(), shape).double()
    np.testing.assert_array_equal(arrays(flat), wanted)


def step_values(rank: int, step: int, shape: Shape) -> torch.Tensor:
    return torch.roll(values(rank, shape), 17 * step)[: shape.numel]


@pytest.mark.parametrize(
    "codec", [Int8(error_feedback=True), BF16(error_feedback=True)], ids=["int8", "bf16"]
)
@JOBS
def test_two_exchanges_share_a_feedback(n: int, codec: Codec) -> None:
    """Two buffers in turn, two steps in flight."""
    shape = Shape(codec, 3000, 3)
    flats = [torch.zeros(shape.numel) for _ in range(2)]
    feedback = Feedback.of(flats[0])
    exchanges = [
        CompressedAllReduce(Reduction(), flat, f"shared.{i}", codec, feedback=feedback)
        for i, flat in enumerate(flats)
    ]
    lost = np.zeros((n + 1, shape.numel), F32)
    steps = 6
    for step in range(steps + 1):
        if step < steps:
            flats[step % 2].copy_(step_values(hvd.rank(), step, shape))
            exchanges[step % 2].launch()
        if step > 0:
            exchanges[(step - 1) % 2].wait()
            mine = [step_values(rank, step - 1, shape).numpy() for rank in range(n)]
            wanted = emulated(codec, mine, lost=lost)
            np.testing.assert_array_equal(flats[(step - 1) % 2].numpy(), wanted)
    np.testing.assert_array_equal(feedback.sent.numpy(), lost[hvd.rank()])
    # Every rank keeps its own slice's residual, and zeros outside.
    np.testing.assert_array_equal(np.sum(gather(feedback.reduced.numpy()), axis=0), lost[-1])


class Broken(Int8):
    """Fails in one of the phases."""

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        if self.chunk == 1:
            raise ZeroDivisionError("in the first phase")
        super().encode(values, out)

    def add(self, data: torch.Tensor, out: torch.Tensor, factor: float = 1.0) -> None:
        raise ZeroDivisionError("in the second phase")


@JOBS
def test_errors_are_raised_where_the_script_waits(n: int) -> None:
    """Those of the communication thread, which goes on."""
    for codec, phase in ((Broken(chunk=1), "first"), (Broken(), "second")):
        exchange = CompressedAllReduce(Reduction(), torch.ones(2000), f"broken.{phase}", codec)
        exchange.launch()
        with pytest.raises(ZeroDivisionError, match=f"^in the {phase} phase$"):
            exchange.wait()
    exchange = CompressedAllReduce(Reduction(), torch.ones(2000), "twice", Int8())
    exchange.launch()
    with pytest.raises(HvdPipeError, match=r"call wait\(\) before launch\(\)"):
        exchange.launch()
    exchange.wait()


_left: list[CompressedAllReduce] = []


def leave_one(name: str) -> torch.Tensor:
    """Launch one that nobody waits for, at another time on each rank."""
    time.sleep(0.3 * hvd.rank())
    flat = torch.full((50_000,), float(hvd.rank()))
    _left.append(CompressedAllReduce(Reduction(), flat, name, Int8()))
    _left[-1].launch()
    return flat


@JOBS
def test_what_is_in_flight_at_the_end_arrives(n: int) -> None:
    """Both phases, before Horovod shuts down; as the last of its launch, it leaves another one."""
    flat = leave_one("settled")
    with pytest.warns(match="averages in flight"):
        pending.settle()
    assert _left[0].done.is_set()
    np.testing.assert_allclose(arrays(flat), (n - 1) / 2, rtol=1e-6)
    after = torch.full((3000,), float(hvd.rank()))
    run(CompressedAllReduce(Reduction(), after, "after", Int8()))
    np.testing.assert_allclose(arrays(after), (n - 1) / 2, rtol=1e-6)
    leave_one("left")


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
