"""Codecs that make a buffer smaller on the wire: all of Horovod's, and two of ours.

``hvd.Compression.none`` and ``.fp16`` are Horovod's compressors: what they make is summed on the
wire. ``.bf16`` and ``.int8`` are codecs: what they make cannot be summed as it is, so a buffer
travels in the two phases of `hvd_pipe.tensorflow.messages.reduction`.
`hvd_pipe.runtime.codec_format` draws their bytes, `hvd_pipe.torch.compression` has their bounds.
"""

from __future__ import annotations

import abc

import tensorflow as tf
from horovod.tensorflow import compression as _horovod

from hvd_pipe.runtime.codec_format import (
    LARGEST_SCALE,
    LEVELS,
    SMALLEST_SCALE,
    BF16Format,
    CodecFormat,
    Int8Format,
)


class Codec(CodecFormat):
    """Turns rows of float32 numbers into rows that Horovod can carry, and back, at a loss."""

    belongs_to = "hvd_pipe.tensorflow's DistributedOptimizer or DistributedGradientTape"

    @abc.abstractmethod
    def encode(self, rows: tf.Tensor) -> tf.Tensor:
        """Return the code of float32 rows, a row for each."""

    @abc.abstractmethod
    def decode(self, code: tf.Tensor) -> tf.Tensor:
        """Return the float32 rows that ``code`` stands for: the inverse of `encode`."""


class BF16(BF16Format, Codec):
    """The upper half of a float32, rounded to nearest, ties to even.

    Args:
        error_feedback: Whether what a message loses is added to the next one.

    Raises:
        TypeError: ``error_feedback`` is no bool.

    Example:
        >>> codec = BF16()
        >>> codec.decode(codec.encode(tf.constant([[1.0, -2.5, 1.01]]))).numpy().tolist()
        [[1.0, -2.5, 1.0078125]]

    Source:
        Pipe-SGD (Li et al., NeurIPS 2018), "truncation", with rounding in its place.
    """

    def encode(self, rows: tf.Tensor) -> tf.Tensor:
        return tf.bitcast(tf.cast(rows, tf.bfloat16), tf.int16)

    def decode(self, code: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.bitcast(code, tf.bfloat16), tf.float32)


class Int8(Int8Format, Codec):
    """Eight bits a value and a float32 scale a chunk.

    With the scale ``s = max|x| / 127`` of a chunk, ``q = round(x / s)`` travels and ``q s``
    arrives. One value that is not finite makes its whole chunk NaN, so that an overflow on one
    rank is one on all.

    Args:
        chunk: Elements that share a scale. Smaller ones are more exact and send more:
            ``1 + 4 / chunk`` bytes a value.
        error_feedback: Whether what a message loses is added to the next one, so that in the long
            run nothing is lost; costs two float32 variables of the gradients' size.

    Raises:
        TypeError: ``chunk`` is no int, or ``error_feedback`` is no bool.
        ValueError: ``chunk`` is less than 1.

    Example:
        >>> codec = Int8(chunk=2)
        >>> codec.decode(codec.encode(tf.constant([[1.0, -0.5, 0.0, 0.01]]))).numpy().round(4)
        array([[ 1.    , -0.5039,  0.    ,  0.01  ]], dtype=float32)

    Source:
        Pipe-SGD (Li et al., NeurIPS 2018), "scalar quantization", with a scale a chunk. Error
        feedback: Seide et al., 1-bit SGD (Interspeech 2014); Tang et al., DoubleSqueeze (2019).
    """

    def encode(self, rows: tf.Tensor) -> tf.Tensor:
        count = rows.shape[0]
        chunks = tf.reshape(rows, [count, -1, self.chunk])
        peak = tf.reduce_max(tf.abs(chunks), axis=2, keepdims=True)
        # 0 * peak is NaN where the peak is not finite. It must stay so: clipping would hide it.
        scale = tf.clip_by_value(peak / LEVELS, SMALLEST_SCALE, LARGEST_SCALE) + 0.0 * peak
        levels = tf.cast(tf.round(chunks / scale), tf.int8)
        parts = (tf.bitcast(scale, tf.uint8), tf.bitcast(levels, tf.uint8))
        return tf.concat([tf.reshape(part, [count, -1]) for part in parts], axis=1)

    def decode(self, code: tf.Tensor) -> tf.Tensor:
        count, width = code.shape
        border = 4 * (width // (4 + self.chunk))  # a chunk is four bytes of scale and its levels
        scale = tf.bitcast(tf.reshape(code[:, :border], [count, -1, 1, 4]), tf.float32)
        levels = tf.bitcast(tf.reshape(code[:, border:], [count, -1, self.chunk]), tf.int8)
        return tf.reshape(tf.cast(levels, tf.float32) * scale, [count, -1])


class Compression(_horovod.Compression):  # type: ignore[misc]
    """All that ``compression=`` takes; our codecs are instances.

    Example:
        >>> Compression.int8, Compression.bf16
        (Int8(chunk=256, error_feedback=False), BF16(error_feedback=False))
    """

    bf16 = BF16()
    int8 = Int8()
