"""Exchanges on ranks: what a codec makes of buffers that are known to the test."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from cases import Raised, run_cases
from horovod.torch.mpi_ops import ProcessSet

import hvd_pipe.torch as hvd
from hvd_pipe.errors import HvdPipeError
from hvd_pipe.torch.compression import BF16, Codec, Int8
from hvd_pipe.torch.messages import pending
from hvd_pipe.torch.messages.allreduce import Feedback, Reduction
from hvd_pipe.torch.messages.compressed_allreduce import CompressedAllReduce, message_for

ROUNDS = 50


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


def reduced(shape: Shape) -> np.ndarray:
    op = hvd.Sum if shape.sum else hvd.Average
    flat = values(hvd.rank(), shape)
    reduction = Reduction(op=op, gradient_predivide_factor=shape.predivide)
    exchange = CompressedAllReduce(reduction, flat, "reduced", shape.codec, shape.exact)
    for _ in range(2):  # the second time with buffers that were used before
        flat.copy_(values(hvd.rank(), shape))
        exchange.launch()
        exchange.wait()
    return arrays(flat)


def traffic() -> float:
    reduction = Reduction()
    exchange = CompressedAllReduce(reduction, torch.ones(256 * 12 + 3), "traffic", Int8(), exact=3)
    exchange.launch()
    exchange.wait()
    exchange.wait()  # at once
    return reduction.traffic.sent_bytes


ORDER = [Shape(Int8(), numel, 2) for numel in (300, 70_000, 12, 5000, 40_000)]


def other_orders(rounds: int = 5) -> list[np.ndarray]:
    """Every rank launches, and waits, in an order of its own, sometimes later than the others."""
    exchanges = []
    for number, shape in enumerate(ORDER):
        flat = values(hvd.rank(), shape)
        exchanges.append(
            (flat, CompressedAllReduce(Reduction(), flat, f"order.{number}", shape.codec, 2))
        )
    for turn in range(rounds):
        mine = np.random.default_rng([turn, hvd.rank()])
        for number in mine.permutation(len(ORDER)):
            flat, exchange = exchanges[number]
            flat.copy_(values(hvd.rank(), ORDER[number]))
            exchange.launch()
            time.sleep(0.01 * mine.random())
        for number in mine.permutation(len(ORDER)):
            exchanges[number][1].wait()
    return [arrays(flat) for flat, _ in exchanges]


def not_finite(codec: Codec, wrong: float) -> tuple[np.ndarray, np.ndarray]:
    """A value that is not finite on the last rank alone, and the same buffer one round later."""
    flat = torch.ones(2000)
    exchange = CompressedAllReduce(Reduction(), flat, "wrong", codec)
    if hvd.rank() == hvd.size() - 1:
        flat[700] = wrong
    exchange.launch()
    exchange.wait()
    first = arrays(flat.clone())
    flat.fill_(1.0)
    exchange.launch()
    exchange.wait()
    return first, arrays(flat)


SOME = Shape(Int8(), 3000, 3)


def some_ranks(process_set: ProcessSet) -> np.ndarray:
    """Only the members reduce; others keep what they have."""
    flat = values(hvd.rank(), SOME)
    exchange = CompressedAllReduce(
        Reduction(process_set=process_set), flat, "some", SOME.codec, SOME.exact
    )
    exchange.launch()
    exchange.wait()
    return arrays(flat)


SHARED = Shape(Int8(error_feedback=True), 3000, 3)
STEPS = 6


def step_values(rank: int, step: int, shape: Shape = SHARED) -> torch.Tensor:
    return torch.roll(values(rank, shape), 17 * step)


def shared() -> list[np.ndarray]:
    """Two buffers in turn, two steps in flight, one feedback."""
    flats = [torch.zeros(SHARED.numel) for _ in range(2)]
    feedback = Feedback.of(flats[0])
    exchanges = [
        CompressedAllReduce(Reduction(), flat, f"shared.{i}", SHARED.codec, feedback=feedback)
        for i, flat in enumerate(flats)
    ]
    results = []
    for step in range(STEPS + 1):
        if step < STEPS:
            flats[step % 2].copy_(step_values(hvd.rank(), step)[: SHARED.numel])
            exchanges[step % 2].launch()
        if step > 0:
            exchanges[(step - 1) % 2].wait()
            results.append(arrays(flats[(step - 1) % 2].clone()))
    return [*results, arrays(feedback.sent), arrays(feedback.reduced)]


def small_and_large() -> torch.Tensor:
    """A gradient most of whose values are below half a step of its chunk's scale."""
    flat = torch.full((1000,), 1e-3) * (1 + torch.arange(1000) % 3)
    flat[::250] = 1.0
    return flat * (1 + 0.1 * hvd.rank())


def running_sum(codec: Codec) -> np.ndarray:
    """The sum of what a constant gradient has arrived as in many rounds."""
    flat = torch.empty(1000)
    exchange = CompressedAllReduce(Reduction(), flat, "running", codec)
    total = np.zeros(1000)
    for _ in range(ROUNDS):
        flat.copy_(small_and_large())
        exchange.launch()
        exchange.wait()
        total += arrays(flat)
    return total


def restored() -> tuple[np.ndarray, np.ndarray]:
    """Two rounds after two, and the same after the feedback went through a save and a restore."""
    flat = torch.empty(SHARED.numel)

    def run(exchange: CompressedAllReduce, steps: range) -> None:
        for step in steps:
            flat.copy_(step_values(hvd.rank(), step)[: SHARED.numel])
            exchange.launch()
            exchange.wait()

    first = CompressedAllReduce(Reduction(), flat, "first", SHARED.codec)
    run(first, range(2))
    assert first.feedback is not None
    saved = first.feedback.sent.clone(), first.feedback.reduced.clone()
    run(first, range(2, 4))
    expected = arrays(flat.clone())
    second = CompressedAllReduce(Reduction(), flat, "second", SHARED.codec)
    assert second.feedback is not None
    second.feedback.sent.copy_(saved[0])
    second.feedback.reduced.copy_(saved[1])
    run(second, range(2, 4))
    return expected, arrays(flat)


def without_the_main_thread() -> bool:
    """Whether both phases come to their end while the script does something else."""
    flat = values(hvd.rank(), SOME)
    exchange = CompressedAllReduce(Reduction(), flat, "behind", SOME.codec, SOME.exact)
    exchange.launch()
    arrived = exchange.done.wait(60)
    exchange.wait()
    return arrived


class Broken(Int8):
    """Fails in one of the phases."""

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        if self.chunk == 1:
            raise ZeroDivisionError("in the first phase")
        super().encode(values, out)

    def add(self, data: torch.Tensor, out: torch.Tensor, factor: float = 1.0) -> None:
        raise ZeroDivisionError("in the second phase")


def errors() -> list[str]:
    """What `wait` raises here for errors in the communication thread, which goes on."""
    said = []
    for number, codec in enumerate((Broken(chunk=1), Broken())):
        exchange = CompressedAllReduce(Reduction(), torch.ones(2000), f"broken.{number}", codec)
        exchange.launch()
        try:
            exchange.wait()
        except ZeroDivisionError as error:
            said.append(str(error))
    exchange = CompressedAllReduce(Reduction(), torch.ones(2000), "twice", Int8())
    exchange.launch()
    try:
        exchange.launch()
    except HvdPipeError as error:
        said.append(str(error))
    exchange.wait()
    return said


def gone_apart() -> str:
    """The first rank sends a buffer of another size under the same name."""
    exchange = CompressedAllReduce(
        Reduction(), torch.ones(2000 + 500 * (hvd.rank() == 0)), "apart", Int8()
    )
    exchange.launch()
    try:
        exchange.wait()
    except HvdPipeError as error:
        return str(error)
    return ""


def through_a_reduction() -> dict[str, tuple[str, np.ndarray]]:
    """Which message `Reduction.message` takes, and what comes of ones."""
    results = {}
    for label, compression, dtype in (
        ("bf16", hvd.Compression.none, torch.bfloat16),
        ("bf16 as fp16", hvd.Compression.fp16, torch.bfloat16),
        ("int8", Int8(), torch.float32),
        ("none", hvd.Compression.none, torch.float32),
    ):
        flat = torch.full((1003,), 1.0 + hvd.rank(), dtype=dtype)
        message = message_for(Reduction(compression=compression), flat, label, exact=3)
        message.launch()
        message.wait()
        results[label] = type(message).__name__, arrays(flat)
    return results


def joined() -> str:
    """What an exchange says when the last rank has run out of data."""
    said = ""
    if hvd.rank() < hvd.size() - 1:
        exchange = CompressedAllReduce(Reduction(), torch.ones(2000), "joined", Int8())
        exchange.launch()
        try:
            exchange.wait()
        except HvdPipeError as error:
            said = str(error)
    hvd.join()
    return said


_left: list[tuple[torch.Tensor, CompressedAllReduce]] = []


def leave_one(name: str) -> None:
    """Launch one that nobody waits for, at another time on each rank."""
    time.sleep(0.3 * hvd.rank())
    flat = torch.full((50_000,), float(hvd.rank()))
    _left.append((flat, CompressedAllReduce(Reduction(), flat, name, Int8())))
    _left[-1][1].launch()


def settled() -> tuple[list[str], bool, np.ndarray, np.ndarray]:
    """What comes before Horovod's shutdown, with one in flight; and another one after it."""
    leave_one("settled")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pending.settle()
    flat, exchange = _left[-1]
    done, first = exchange.done.is_set(), arrays(flat.clone())
    second = torch.full((3000,), float(hvd.rank()))
    exchange = CompressedAllReduce(Reduction(), second, "after", Int8())
    exchange.launch()
    exchange.wait()
    return [str(warning.message) for warning in caught], done, first, arrays(second)


def members(n: int) -> list[int]:
    """The ranks of the process set; of two ranks, one that is alone."""
    return [0, n - 1] if n > 2 else [1]


def run(n: int) -> dict[Any, Any | Raised]:
    some = hvd.ProcessSet(members(n))
    hvd.init(process_sets=[some])
    cases: dict[Any, Callable[[], Any]] = {
        "traffic": traffic,
        "other orders": other_orders,
        "some ranks": partial(some_ranks, some),
        "shared": shared,
        "restored": restored,
        "without the main thread": without_the_main_thread,
        "errors": errors,
        "gone apart": gone_apart,
        "through a reduction": through_a_reduction,
        "settled": settled,
    }
    for shape in SHAPES:
        cases[shape] = partial(reduced, shape)
    for codec in (BF16(), Int8(), Int8(error_feedback=True), BF16(error_feedback=True)):
        cases["running sum", codec] = partial(running_sum, codec)
        for wrong in (float("inf"), float("nan")):
            cases["not finite", codec, str(wrong)] = partial(not_finite, codec, wrong)
    cases["joined"] = joined
    results = run_cases(cases)
    leave_one("left")  # the script ends with it in flight
    return results
