"""Codecs: what arrives is near what was sent, and an overflow stays one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hvd_pipe.torch.compression import BF16, BLOCK, Codec, Compression, Int8, blocks, codec_for

F32 = np.finfo(np.float32)
CODECS = [BF16(), Int8(), Int8(chunk=1), Int8(chunk=7), Int8(chunk=BLOCK + 1)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIZES = [0, 1, 2, 255, 256, 257, 1000, BLOCK - 1, BLOCK, 2 * BLOCK + 300]


def encoded(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    data = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, data)
    return data


def carried(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(values)
    codec.decode(encoded(codec, values), out)
    return out


def scales(codec: Int8, values: np.ndarray) -> np.ndarray:
    """The scale of every value, in float64, from its definition."""
    chunks = -(-values.size // codec.chunk)
    padded = np.zeros(chunks * codec.chunk)
    padded[: values.size] = np.abs(values)
    peak = padded.reshape(chunks, codec.chunk).max(1)
    return np.repeat(np.maximum(peak / 127, 2.0**-126), codec.chunk)[: values.size]


def floats(**limits: bool) -> st.SearchStrategy[np.ndarray]:
    sizes = st.integers(1, 600)
    return hnp.arrays(np.float32, sizes, elements=st.floats(width=32, **limits), fill=st.nothing())


mixed = st.one_of(
    floats(allow_nan=False, allow_infinity=False),
    # Ranges that random floats hardly meet: subnormal chunks, and ones at the largest number.
    hnp.arrays(np.float32, st.integers(1, 300), elements=st.integers(-300, 300).map(float)).map(
        lambda a: (a * F32.smallest_subnormal).astype(np.float32)
    ),
    hnp.arrays(np.float32, st.integers(1, 300), elements=st.sampled_from([1, -1, 0.5])).map(
        lambda a: a * F32.max
    ),
)


@given(mixed, st.integers(1, 40) | st.just(256))
def test_int8_is_wrong_by_half_a_scale_at_most(values: np.ndarray, chunk: int) -> None:
    codec = Int8(chunk)
    out = carried(codec, torch.from_numpy(values)).numpy()
    error = np.abs(values.astype(np.float64) - out)
    # Rounding: one of the scale, which q multiplies, one of the quotient and one of the product.
    assert np.all(error <= scales(codec, values) / 2 + 4 * F32.epsneg * np.abs(values))


@given(mixed)
def test_bf16_is_torch_rounding(values: np.ndarray) -> None:
    tensor = torch.from_numpy(values)
    assert torch.equal(carried(BF16(), tensor), tensor.to(torch.bfloat16).float())


@given(floats(), st.integers(1, 40))
def test_int8_keeps_an_overflow_in_its_chunk(values: np.ndarray, chunk: int) -> None:
    out = carried(Int8(chunk), torch.from_numpy(values)).numpy()
    for start in range(0, values.size, chunk):
        part, arrived = values[start : start + chunk], out[start : start + chunk]
        assert np.isfinite(part).all() == np.isfinite(arrived).all()
        assert np.isfinite(part).all() or not np.isfinite(arrived).any()


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_an_overflow_arrives(codec: Codec, wrong: float) -> None:
    values = torch.ones(1000)
    values[300] = wrong
    start = 300 // codec.chunk * codec.chunk
    expected = torch.ones(1000, dtype=torch.bool)
    expected[start : start + codec.chunk] = False
    assert torch.equal(carried(codec, values).isfinite(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_every_size_and_dtype(codec: Codec, numel: int, dtype: torch.dtype) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    out = carried(codec, values)
    # By way of float32, in blocks: as the float32 values would be coded in one.
    assert torch.equal(out, carried(codec, values.float()).to(dtype))
    if numel > 0:
        exact = values.double().numpy()
        bound = scales(codec, exact) / 2 if isinstance(codec, Int8) else 2**-8 * np.abs(exact)
        error = np.abs(out.double().numpy() - exact)
        assert np.all(error <= bound + 5 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_codes_are_the_same_each_time_at_any_address(codec: Codec) -> None:
    values = torch.randn(BLOCK + 999)
    data = encoded(codec, values)
    room = torch.full((data.numel() + 3,), 255, dtype=torch.uint8)
    for offset in range(4):
        moved = room[offset : offset + data.numel()]
        codec.encode(values, moved)
        assert torch.equal(moved, data)
        out = torch.empty_like(values)
        codec.decode(moved, out)
        assert torch.equal(out, carried(codec, values))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_adding_is_decoding_and_adding(codec: Codec) -> None:
    values, out = torch.randn(BLOCK + 999), torch.randn(BLOCK + 999)
    for factor in (1.0, -1.0):
        expected = out + factor * carried(codec, values)
        codec.add(encoded(codec, values), out, factor)
        assert torch.equal(out, expected)


def test_blocks_cover_the_tensors() -> None:
    pair = torch.arange(BLOCK + 5), torch.arange(BLOCK + 5) + 1
    parts = list(blocks(*pair))
    assert [first.numel() for first, _ in parts] == [BLOCK, 5]
    assert all(torch.equal(second, first + 1) for first, second in parts)
    assert torch.equal(torch.cat([first for first, _ in parts]), pair[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_which_codec_carries_a_buffer(dtype: torch.dtype) -> None:
    assert codec_for(Compression.int8, dtype) is Compression.int8
    unsummable = BF16() if dtype == torch.bfloat16 else None
    assert codec_for(Compression.none, dtype) == unsummable
    assert codec_for(Compression.fp16, dtype) == unsummable
    assert codec_for(object(), dtype) is None


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Int8(chunk=0), ValueError, "at least 1, got 0"),
        (lambda: Int8(chunk=-256), ValueError, "at least 1"),
        (lambda: Int8(chunk=2.0), TypeError, "chunk must be an int, got 2.0"),
        (lambda: Int8(chunk=True), TypeError, "chunk must be an int"),
        (lambda: Int8(error_feedback=1), TypeError, "error_feedback must be True or False"),
        (lambda: BF16(error_feedback="yes"), TypeError, "error_feedback must be True or False"),
        (lambda: carried(Int8(), torch.ones(3, dtype=torch.int32)), TypeError, "floating"),
        (lambda: carried(BF16(), torch.ones(3, dtype=torch.complex64)), TypeError, "floating"),
        (lambda: carried(Int8(), torch.ones(8)[::2]), ValueError, "contiguous"),
        (lambda: carried(Int8(), torch.ones(4, 2)), ValueError, "one-dimensional"),
        (lambda: Int8().encode(torch.ones(3), torch.empty(7)), TypeError, "torch.uint8"),
        (
            lambda: Int8().decode(torch.empty(6, dtype=torch.uint8), torch.ones(3)),
            ValueError,
            "3 values need 7 bytes",
        ),
    ],
)
def test_wrong_arguments(make: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()  # type: ignore[operator]
