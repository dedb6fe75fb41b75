"""Codecs that make a buffer smaller on the wire: all of Horovod's, and two of ours.

``hvd.Compression.none`` and ``.fp16`` are Horovod's compressors: what they make is summed on the
wire. ``.bf16`` and ``.int8`` are codecs: what they make cannot be summed as it is, so a buffer
travels in the two phases of `hvd_pipe.torch.messages.compressed_allreduce`.

`hvd_pipe.runtime.codec_format` draws the bytes.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any

import torch
from horovod.torch import compression as _horovod

from hvd_pipe.runtime.codec_format import (
    LARGEST_SCALE,
    LEVELS,
    SMALLEST_SCALE,
    BF16Format,
    CodecFormat,
    Int8Format,
)

BLOCK = 32 * 1024
"""Elements that are worked on at a time on a CPU.

With its scratch this stays in the second-level cache. It is also the most that torch works on with
one thread however many it has, so that coding takes one core and leaves backward the others.
"""

_CUDA_BLOCK = 16 * 2**20  # there, few large kernels are fast, and 64 MiB of scratch are little


class Codec(CodecFormat):
    """Turns a buffer of floating numbers into bytes and back, at a loss.

    Buffers are one-dimensional and contiguous. Every dtype goes by way of float32.
    """

    belongs_to = "hvd_pipe.torch.DistributedOptimizer(compression=...)"

    @abc.abstractmethod
    def _encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """As `encode`, with arguments that fit."""

    @abc.abstractmethod
    def _decoded(self, data: torch.Tensor, numel: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield float32 blocks with their offset; a block is gone when the next one comes."""

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write the code of ``values`` into ``out``: `nbytes` of uint8, at any address."""
        self._check(values, out)
        self._encode(values, out)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values that ``data`` stands for into ``out``: the inverse of `encode`."""
        self._check(out, data)
        for start, values in self._decoded(data, out.numel()):
            out[start : start + values.numel()].copy_(values)

    def add(self, data: torch.Tensor, out: torch.Tensor, factor: float = 1.0) -> None:
        """Add ``factor`` times the values that ``data`` stands for to ``out``; see `decode`."""
        self._check(out, data)
        for start, values in self._decoded(data, out.numel()):
            out[start : start + values.numel()].add_(values, alpha=factor)

    def _check(self, values: torch.Tensor, data: torch.Tensor) -> None:
        if not values.dtype.is_floating_point:
            raise TypeError(f"{self!r} is for floating numbers, got {values.dtype}.")
        if data.dtype != torch.uint8:
            raise TypeError(f"encoded data must be torch.uint8, got {data.dtype}.")
        if values.dim() != 1 or not values.is_contiguous():
            raise ValueError(
                "values must be one-dimensional and contiguous, got shape "
                f"{tuple(values.shape)}: pass tensor.contiguous().view(-1)."
            )
        needed = self.nbytes(values.numel())
        if data.shape != (needed,):
            raise ValueError(
                f"{values.numel()} values need {needed} bytes in one dimension, got "
                f"{tuple(data.shape)}: allocate codec.nbytes(values.numel())."
            )


class BF16(BF16Format, Codec):
    """The upper half of a float32, rounded to nearest, ties to even.

    Keeps 8 bits of precision and all of float32's range: ``|x - dec(enc(x))| <= 2**-8 |x|`` for
    normal numbers. As with ``Tensor.to(torch.bfloat16)``, numbers from 3.396e38 become infinite.

    Args:
        error_feedback: Whether what a message loses is added to the next one.

    Raises:
        TypeError: ``error_feedback`` is no bool.

    Example:
        >>> codec, values = BF16(), torch.tensor([1.0, -2.5, 1.01])
        >>> data = torch.empty(codec.nbytes(3), dtype=torch.uint8)
        >>> codec.encode(values, data)
        >>> codec.decode(data, values)
        >>> values.tolist(), data.numel()
        ([1.0, -2.5, 1.0078125], 6)

    Source:
        Pipe-SGD (Li et al., NeurIPS 2018), "truncation", with rounding in its place.
    """

    def _encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        step = _step(values)
        half = values.new_empty(min(step, values.numel()), dtype=torch.bfloat16)
        for start in range(0, values.numel(), step):
            part = values[start : start + step]
            code = half[: part.numel()].copy_(part)
            # By way of bytes: ``out`` may begin at an odd address.
            out[2 * start : 2 * (start + part.numel())].copy_(code.view(torch.uint8))

    def _decoded(self, data: torch.Tensor, numel: int) -> Iterator[tuple[int, torch.Tensor]]:
        step = _step(data)
        code = data.new_empty(2 * min(step, numel))
        values = data.new_empty(min(step, numel), dtype=torch.float32)
        for start in range(0, numel, step):
            count = min(step, numel - start)
            half = code[: 2 * count].copy_(data[2 * start : 2 * (start + count)])
            yield start, values[:count].copy_(half.view(torch.bfloat16))


class Int8(Int8Format, Codec):
    """Eight bits a value and a float32 scale a chunk.

    With the scale ``s = max|x| / 127`` of a chunk, ``q = round(x / s)`` in [-127, 127] travels and
    ``q s`` arrives, so ``|x - q s| <= s / 2`` up to float32 rounding (of some ``2**-23 |x|``). The
    scale is at least the smallest normal number, 2**-126, so that this holds for subnormal numbers
    too, and zeros stay zeros. One value that is not finite makes its whole chunk NaN, so that an
    overflow on one rank is one on all; float32's largest number is none.

    Args:
        chunk: Elements that share a scale. Smaller ones are more exact and send more:
            ``1 + 4 / chunk`` bytes a value.
        error_feedback: Whether what a message loses is added to the next one, so that in the long
            run nothing is lost; costs two float32 buffers of the gradients' size.

    Raises:
        TypeError: ``chunk`` is no int, or ``error_feedback`` is no bool.
        ValueError: ``chunk`` is less than 1.

    Example:
        >>> codec, values = Int8(chunk=4), torch.tensor([1.0, -0.5, 0.0, 0.01, 1e-6])
        >>> data = torch.empty(codec.nbytes(5), dtype=torch.uint8)
        >>> codec.encode(values, data)
        >>> codec.decode(data, values)
        >>> [round(value, 8) for value in values.tolist()], data.numel()
        ([1.0, -0.50393701, 0.0, 0.00787402, 1e-06], 13)

    Source:
        Pipe-SGD (Li et al., NeurIPS 2018), "scalar quantization", with a scale a chunk instead of
        one a message. Error feedback: Seide et al., 1-bit SGD (Interspeech 2014); on both ways:
        Tang et al., DoubleSqueeze (ICML 2019).
    """

    def _encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        numel, chunk = values.numel(), self.chunk
        scales, code = self._parts(out, numel)
        step = _step(values, chunk)
        size = min(step, chunk * self.chunks(numel))
        work = values.new_empty(size, dtype=torch.float32)
        magnitudes = torch.empty_like(work)
        for start in range(0, numel, step):
            count = min(step, numel - start)
            size = chunk * self.chunks(count)
            work[:count].copy_(values[start : start + count])
            work[count:size].zero_()
            rows = work[:size].view(-1, chunk)
            peak = torch.abs(rows, out=magnitudes[:size].view(-1, chunk)).amax(1, keepdim=True)
            # 0 * peak is NaN where the peak is not finite. It must stay so: clamp would hide it.
            scale = peak.div(LEVELS).clamp_(SMALLEST_SCALE, LARGEST_SCALE).add_(peak.mul_(0.0))
            rows.div_(scale).round_()  # may be NaN; what that becomes as an int8 does not matter
            scales[4 * (start // chunk) :][: scale.nbytes].copy_(scale.view(torch.uint8).view(-1))
            code[start : start + count].copy_(work[:count])

    def _decoded(self, data: torch.Tensor, numel: int) -> Iterator[tuple[int, torch.Tensor]]:
        chunk = self.chunk
        scales, code = self._parts(data, numel)
        step = _step(data, chunk)
        values = data.new_empty(min(step, chunk * self.chunks(numel)), dtype=torch.float32)
        scale = data.new_empty(4 * (values.numel() // chunk))
        for start in range(0, numel, step):
            count = min(step, numel - start)
            rows = values[: chunk * self.chunks(count)].view(-1, chunk)
            part = scale[: 4 * rows.shape[0]].copy_(
                scales[4 * (start // chunk) :][: 4 * len(rows)]
            )
            values[:count].copy_(code[start : start + count])
            rows.mul_(part.view(torch.float32).view(-1, 1))
            yield start, values[:count]

    def _parts(self, data: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Split encoded data into the scales' bytes (at any address) and the int8 codes."""
        border = 4 * self.chunks(numel)
        return data[:border], data[border:].view(torch.int8)


class Compression(_horovod.Compression):  # type: ignore[misc]
    """All that ``DistributedOptimizer(compression=...)`` takes; our codecs are instances.

    Example:
        >>> Compression.int8, Compression.bf16
        (Int8(chunk=256, error_feedback=False), BF16(error_feedback=False))
        >>> Compression.fp16.__name__
        'FP16Compressor'
    """

    bf16 = BF16()
    int8 = Int8()


def codec_for(compression: Any, dtype: torch.dtype) -> Codec | None:
    """Return a buffer's codec; None where Horovod sums it on the wire (bfloat16 it cannot)."""
    if isinstance(compression, Codec):
        return compression
    return BF16() if dtype == torch.bfloat16 and is_horovods(compression) else None


def is_horovods(compression: Any) -> bool:
    """Return whether this is a compressor of Horovod's own, which keeps small whole numbers."""
    return compression in (Compression.none, Compression.fp16)


def blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cut one-dimensional tensors of one size into pieces that are best worked on at a time."""
    step = _step(tensors[0])
    for start in range(0, tensors[0].numel(), step):
        yield tuple(tensor[start : start + step] for tensor in tensors)


def _step(like: torch.Tensor, chunk: int = 1) -> int:
    """Return how many elements to work on at a time: whole chunks."""
    block = BLOCK if like.device.type == "cpu" else _CUDA_BLOCK
    return max(block // chunk, 1) * chunk
