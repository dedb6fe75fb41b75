"""Messages of a pipeline: what is packed is unpacked, and what is no message is told so."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.pipeline.messages import ALIGNMENT, Bytes, Format, Header, empty

DTYPES = [np.dtype(name) for name in ("uint8", "float16", "int32", "float64", "complex128")]
NUMBERS = st.integers(0, 2**63 - 1)
DIMS = st.lists(st.integers(0, 5), max_size=4).map(tuple)

FORMAT = Format(most_shapes=((4, 3), ()), itemsizes=(4, 8), stages=2)
HEADER = Header(7, 1, 2**62, (0.5, math.nan), ((2, 3), ()))
PARTS = [np.arange(6, dtype=np.float32).reshape(2, 3), np.array(2.5)]


@st.composite
def messages(draw: st.DrawFn) -> tuple[Format, Header, list[np.ndarray]]:
    most = tuple(draw(st.lists(DIMS, max_size=4)))
    dtypes = [draw(st.sampled_from(DTYPES)) for _ in most]
    norms = draw(st.lists(st.floats(width=64), min_size=1, max_size=4))
    shapes = tuple(tuple(draw(st.integers(0, dim)) for dim in shape) for shape in most)
    random = np.random.default_rng(draw(st.integers(0, 99)))
    parts = [
        random.integers(0, 100, shape[::-1]).astype(dtype).T  # of any strides
        if draw(st.booleans())
        else random.integers(0, 100, shape).astype(dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    header = Header(draw(NUMBERS), draw(NUMBERS), draw(NUMBERS), tuple(norms), shapes)
    return Format(most, tuple(dtype.itemsize for dtype in dtypes), len(norms)), header, parts


@given(messages(), st.integers(0, 200))
def test_what_is_packed_is_unpacked(
    case: tuple[Format, Header, list[np.ndarray]], more: int
) -> None:
    form, header, parts = case
    message = form.pack(header, parts)
    assert message.ctypes.data % ALIGNMENT == 0
    assert message.size <= form.capacity
    assert message.size == form.capacity or header.shapes != form.most_shapes
    padded = empty(message.size + more)
    padded[: message.size] = message
    found, views = form.unpack(padded)
    np.testing.assert_array_equal(found.squared_norms, header.squared_norms)
    assert replace(found, squared_norms=()) == replace(header, squared_norms=())
    assert len(views) == len(parts)
    for view, part in zip(views, parts, strict=True):
        assert view.ctypes.data % ALIGNMENT == 0
        assert view.size == 0 or np.shares_memory(view, padded)
        np.testing.assert_array_equal(view.view(part.dtype).reshape(part.shape), part)


def test_parts_of_other_kinds() -> None:
    """A framework's tensor comes as bytes where numpy has no dtype for it."""
    data = [bytearray(range(24)), memoryview(np.array(2.5))]
    _, views = FORMAT.unpack(FORMAT.pack(HEADER, data))
    assert [view.tobytes() for view in views] == [bytes(range(24)), np.array(2.5).tobytes()]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"shapes": ((5, 3), ())}, r"tensor 0 has shape \(5, 3\); the plan allows \(4, 3\)"),
        ({"shapes": ((2, 3), (1,))}, r"tensor 1 has shape \(1,\); the plan allows \(\)"),
        ({"shapes": ((1, 3), ())}, "tensor 0 .* has 12 bytes, got a part of 24"),
    ],
)
def test_what_cannot_be_packed(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        FORMAT.pack(replace(HEADER, **change), PARTS)


def test_a_part_too_few() -> None:
    with pytest.raises(ValueError, match="2 tensors, got 1 parts"):
        FORMAT.pack(HEADER, PARTS[:1])


def put(first: int, data: bytes) -> Callable[[Bytes], Bytes]:
    def change(message: Bytes) -> Bytes:
        message[first : first + len(data)] = np.frombuffer(data, np.uint8)
        return message

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (put(0, b"hvdpipe0"), "begins with b'hvdpipe0'"),
        (put(8, b"\x01\x00"), "says that it has 1 bytes, and its shapes make 256"),
        (put(40, b"\x03"), "has 3 stages, the plan 2"),
        (put(44, b"\x01"), "has 1 tensors, the plan 2"),
        (put(64, b"\x05"), r"tensor 0 has shape \(5, 3\)"),
        (put(64, b"\xff" * 8), r"tensor 0 has shape \(-1, 3\)"),
        (lambda message: message[:128], "128 of its 256 bytes have come"),
        (lambda message: message[:60], "has 128 bytes, the message 60"),
        (lambda message: message[:0], "the message 0"),
    ],
)
def test_what_is_no_message(change: Callable[[Bytes], Bytes], told: str) -> None:
    message = FORMAT.pack(HEADER, PARTS)
    assert message.size == 256
    with pytest.raises(HvdPipeError, match=told):
        FORMAT.unpack(change(message))


@given(st.binary(min_size=48, max_size=400))
def test_noise_is_no_message(noise: bytes) -> None:
    buffer = np.frombuffer(b"hvdpipe1" + noise, np.uint8)
    with pytest.raises(HvdPipeError):
        FORMAT.unpack(buffer)


@pytest.mark.parametrize(
    "buffer", [np.zeros(256), np.zeros((2, 128), np.uint8), np.zeros(512, np.uint8)[::2]]
)
def test_what_is_not_bytes(buffer: Any) -> None:
    with pytest.raises(ValueError, match="flat, contiguous array of uint8"):
        FORMAT.unpack(buffer)
