"""CommModel: a function of the size that never drops, and what is made of such functions."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hvd_pipe.planning.cluster import rescale
from hvd_pipe.planning.comm import CODECS, NONE, CodecCost, CommModel
from hvd_pipe.runtime.gradient_index import GradientIndex

# 10 s more for one byte more, at 10 MB, is a line through -1e8 s: seconds, in doubles.
ROUNDING = 1e-7

JUMP = CommModel((0, 8192, 524288), (8e-5, 9e-4, 1e-3), (1.5e-8, 3e-9, 3.4e-9), error=0.03)


def reals(most: float) -> st.SearchStrategy[float]:
    """0 or numbers of which products are no subnormal ones."""
    return st.just(0.0) | st.floats(most * 1e-12, most)


@st.composite
def models(draw: st.DrawFn) -> CommModel:
    """Segments with jumps and knees, some of them steep enough to start below 0 s."""
    gaps = draw(st.lists(st.floats(1.0, 1e7), max_size=5))
    starts = [0.0, *np.cumsum(gaps).tolist()]
    slopes = draw(st.lists(reals(1e-6), min_size=len(starts), max_size=len(starts)))
    jumps = draw(st.lists(reals(1e-2), min_size=len(starts), max_size=len(starts)))
    intercepts = [jumps[0]]
    for k in range(1, len(starts)):
        end = intercepts[-1] + slopes[k - 1] * starts[k]
        intercepts.append(end + jumps[k] - slopes[k] * starts[k])
    return CommModel(tuple(starts), tuple(intercepts), tuple(slopes))


sizes_list = st.lists(reals(1e8), min_size=1, max_size=20).map(np.array)


@example([2593, 2674, 2749], [1e-6] + [1.0] * 19)  # 1 us is a small difference of 32 s here
@given(
    st.lists(st.integers(0, 10**7), min_size=2, max_size=20, unique=True),
    st.lists(st.floats(1e-6, 10.0), min_size=20, max_size=20),
)
def test_table_goes_through_points_that_are_monotone(sizes: list[int], raw: list[float]) -> None:
    x, t = np.sort(np.array(sizes)), np.sort(np.array(raw[: len(sizes)]))
    np.testing.assert_allclose(CommModel.table(x, t)(x), t, rtol=1e-9, atol=ROUNDING)


def test_table_beyond_its_ends() -> None:
    steep = CommModel.table([1000, 2000], [1.0, 3.0])  # the first line would start at -1 s
    assert steep.latency == 0.0
    assert [steep(500), steep(1000), steep(1500), steep(4000)] == [0.5, 1.0, 2.0, 7.0]
    gentle = CommModel.table([1000, 2000], [2.0, 3.0])
    assert [gentle(0), gentle(500), gentle(3000)] == [1.0, 1.5, 4.0]
    # The last two points hardly differ; the last factor of four knows better.
    tail = CommModel.table([100, 200, 300, 400], [1.0, 2.0, 3.9, 3.9])
    assert tail.slopes[-1] == pytest.approx(0.0106)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), (), ()), r"one entry a segment, got 0, 0 and 0"),
        (((0.0,), (1.0, 2.0), (0.0,)), r"one entry a segment, got 1, 2 and 1"),
        (((1.0,), (1.0,), (0.0,)), r"starts must begin with 0 and increase"),
        (((0.0, 5.0, 5.0), (1.0,) * 3, (0.0,) * 3), r"starts must begin with 0 and increase"),
        (
            ((0.0,), (-1e-3,), (0.0,)),
            r"latency must not be negative, got intercepts\[0\] = -0.001",
        ),
        (((0.0,), (1.0,), (-1.0,)), r"slopes must not be negative, got -1.0 s/byte"),
        (((0.0,), (float("nan"),), (1.0,)), r"intercepts must be finite"),
        (((0.0, 10.0), (1.0, 0.5), (0.0, 0.0)), r"at 10 bytes it falls from 1 s to 0.5 s"),
    ],
)
def test_bad_segments(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CommModel(*arguments)


@given(models(), sizes_list, st.floats(1e-3, 1e3), reals(1e3))
def test_scaled_is_the_formula(model: CommModel, x: Any, size: float, time: float) -> None:
    scaled = model.scaled(size, time)
    # Where x falls on a start, either side may be meant: a rounding decides.
    x = x[np.abs(x[:, None] * size - np.array(model.starts)[None, 1:]).min(1, initial=1.0) > 1e-3]
    np.testing.assert_allclose(scaled(x), time * model(x * size), rtol=1e-9, atol=1e-9)
    assert (np.diff(scaled(np.sort(x))) >= -1e-9).all()


@given(models(), models(), sizes_list)
def test_a_sum_is_the_formula(a: CommModel, b: CommModel, x: Any) -> None:
    np.testing.assert_allclose((a + b)(x), a(x) + b(x), rtol=1e-9, atol=1e-9)
    assert (a + b)(0.0) == pytest.approx(a.latency + b.latency)
    assert a + b == b + a


@given(models(), sizes_list, st.floats(0.01, 2.0), reals(1e-8))
def test_compressed_is_the_formula(
    model: CommModel, x: Any, ratio: float, per_byte: float
) -> None:
    x = x[np.abs(x[:, None] * ratio - np.array(model.starts)[None, 1:]).min(1, initial=1.0) > 1e-3]
    found = model.compressed(CodecCost("some", ratio, per_byte))(x)
    np.testing.assert_allclose(found, model(ratio * x) + per_byte * x, rtol=1e-9, atol=1e-9)


def test_the_error_goes_where_it_still_holds() -> None:
    assert JUMP.scaled(2.0, 3.0).error == 0.03
    assert JUMP.compressed(NONE) is JUMP
    assert JUMP.compressed(CodecCost("half", 0.5)).error == 0.03
    assert JUMP.compressed(CODECS["int8"]).error is None
    assert (JUMP + CommModel.linear(0.0, 0.0)).error is None
    assert CommModel.table([1, 2, 3], [1.0, 3.0, 2.0]).error == pytest.approx((1 / 6 + 1 / 4) / 3)
    assert CommModel(JUMP.starts, JUMP.intercepts, JUMP.slopes) == JUMP


def test_other_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"no negative size, got -1 bytes"):
        CommModel.linear(1, 1)(-1)
    with pytest.raises(ValueError, match=r"no negative size, got -1 bytes"):
        CommModel.linear(1, 1)(np.array([3, -1]))
    with pytest.raises(ValueError, match=r"a CommModel lacks the keys \['intercepts', 'slopes'\]"):
        CommModel.from_json({"starts": [0.0]})
    with pytest.raises(ValueError, match=r"unknown keys \['extra'\]"):
        CommModel.from_json({**JUMP.to_json(), "extra": 1})
    with pytest.raises(ValueError, match=r"holds lists of numbers"):
        CommModel.from_json({"starts": [0.0], "intercepts": [[1.0]], "slopes": [0.0]})
    with pytest.raises(
        ValueError, match=r"error must be finite and not negative, or None, got -1"
    ):
        CommModel((0.0,), (0.0,), (0.0,), error=-1.0)
    with pytest.raises(ValueError, match=r"bytes_factor must be finite and positive, got 0"):
        JUMP.scaled(0.0)
    with pytest.raises(ValueError, match=r"seconds_factor must be finite, not negative, got -1"):
        JUMP.scaled(1.0, -1.0)
    with pytest.raises(TypeError, match=r"unsupported operand"):
        JUMP + 1  # type: ignore[operator]


def test_the_delay_goes_along() -> None:
    comm = CommModel((0.0,), (1e-4,), (1e-9,), delay=1e-3)
    assert comm(1e6) == CommModel.linear(1e-4, 1e-9)(1e6)
    assert CommModel.from_json(comm.to_json()) == comm
    assert comm.scaled(0.5, 2.0).delay == 1e-3
    assert comm.compressed(CodecCost("half", 0.5, 1e-10)).delay == 1e-3
    assert (comm + comm).delay == 2e-3
    twice = comm.compressed(CodecCost("two", 0.5, 1e-10, phases=2))
    assert twice.delay == 2e-3
    assert twice(1e6) == pytest.approx(2 * (1e-4 + 1e-9 * 0.25e6) + 1e-10 * 1e6)
    blocking = dataclasses.replace(comm, blocking=True)
    assert CommModel.from_json(blocking.to_json()) == blocking != comm
    for same in (blocking.scaled(0.5), blocking + comm, comm + blocking):
        assert same.blocking
    assert blocking.compressed(CodecCost("half", 0.5, 1e-10)).blocking
    assert rescale(blocking, 2, 8).blocking
    with pytest.raises(ValueError, match="blocking is true or false, got 1"):
        CommModel.from_json(comm.to_json() | {"blocking": 1})
    with pytest.raises(ValueError, match="delay must be finite"):
        CommModel((0.0,), (0.0,), (0.0,), delay=-1.0)


def test_ratios_are_those_on_the_wire() -> None:
    compression = pytest.importorskip("hvd_pipe.torch.compression")
    for name, made in (("bf16", compression.BF16()), ("int8", compression.Int8())):
        numel = 16 * 2**20
        assert made.nbytes(numel) / (4 * numel) == CODECS[name].ratio


@pytest.mark.parametrize(
    ("ratio", "seconds", "message"),
    [
        (0.0, 0.0, r"'odd': ratio is bytes on the wire .* positive number .*, got 0.0"),
        (0.5, -1e-9, r"'odd': seconds_per_byte must be finite and not negative, got -1e-09"),
    ],
)
def test_bad_codecs(ratio: float, seconds: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CodecCost("odd", ratio, seconds)


def test_costs_of_encoded_bytes_are_those_of_the_bytes_before() -> None:
    network = replace(CommModel.linear(1e-3, 1e-9), delay=1e-4)
    for cost in CODECS.values():
        before = network.compressed(cost)
        encoded = network.compressed(cost.of_encoded())
        for size in (0.0, 1e3, 1e8):
            assert encoded(cost.ratio * size) == pytest.approx(before(size))


def test_a_plan_counts_both_messages_of_a_codec_and_its_time() -> None:
    """It once planned int8 as if one message carried it, and sent too many.

    Two gradients of 60 kB on the wire, the second ready 1.5 ms after the first; a message takes
    1 ms and 10 ns a byte. By themselves they end at 3.2 ms, together at 3.7 ms. Where each needs
    two messages, they end at 5.2 and at 4.7 ms.
    """
    torch = pytest.importorskip("torch")
    hvd = pytest.importorskip("hvd_pipe.torch")
    from hvd_pipe.torch.messages.allreduce import Reduction  # noqa: PLC0415
    from hvd_pipe.torch.strategies.merged_gradient import MergedGradientEngine  # noqa: PLC0415

    for compression, count, exposed_s in (
        (hvd.Compression.none, 2, 3.2e-3 - 1.5e-3),
        (hvd.Compression.int8, 1, 4.7e-3 - 1.5e-3),
    ):
        reduction = Reduction(compression=compression)
        engine = object.__new__(MergedGradientEngine)
        engine.settings = SimpleNamespace(
            names=["b", "a"],
            parameters=[torch.zeros(8), torch.zeros(8)],
            reduction=reduction,
            wire_bytes=lambda: [60_000, 60_000],
            index=GradientIndex(["b", "a"], [32, 32], ["float32", "float32"]),
        )
        engine.comm, engine.plan = CommModel.linear(1e-3, 1e-8), None
        engine._method, engine._bucket_bytes = "exact", None
        plan = engine._propose(np.array([1.5e-3, 0.0]), [])[0]
        assert len(plan.buckets) == count
        coding_s = reduction.cost(torch.zeros(8)).of_encoded().seconds_per_byte * 120_000
        assert plan.exposed_s == pytest.approx(exposed_s + coding_s)
