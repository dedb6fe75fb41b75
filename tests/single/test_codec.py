"""Codecs as a plan sees them, beside those that really travel."""

from __future__ import annotations

import doctest

import pytest

from hvd_pipe.planning import codec
from hvd_pipe.planning.codec import CODECS, NONE, CodecCost
from hvd_pipe.planning.comm import CommModel


def test_doctests() -> None:
    assert doctest.testmod(codec).failed == 0
    assert doctest.testmod(codec).attempted > 0


def test_the_table() -> None:
    assert list(CODECS) == ["none", "fp16", "bf16", "int8"]
    assert all(name == cost.name for name, cost in CODECS.items())
    assert CODECS["none"] is NONE
    size = 64 * 2**20
    assert CODECS["bf16"].seconds_per_byte * size == pytest.approx(27.45e-3)
    assert CODECS["int8"].seconds_per_byte * size == pytest.approx(52.725e-3)
    assert [CODECS[name].phases for name in ("none", "fp16", "bf16", "int8")] == [1, 1, 2, 2]


def test_ratios_are_those_on_the_wire() -> None:
    compression = pytest.importorskip("hvd_pipe.torch.compression")
    for name, made in (("bf16", compression.BF16()), ("int8", compression.Int8())):
        numel = 16 * 2**20
        assert made.nbytes(numel) / (4 * numel) == CODECS[name].ratio


def test_a_slow_codec_pays_on_slow_networks_only() -> None:
    slow, fast = CommModel.linear(1e-3, 2e-9), CommModel.linear(1e-3, 1e-10)
    size = 100e6
    assert slow.compressed(CODECS["int8"])(size) < slow(size)
    assert fast.compressed(CODECS["int8"])(size) > fast(size)
    assert fast.compressed(CodecCost("free", 0.5))(size) < fast(size)


@pytest.mark.parametrize(
    ("ratio", "seconds", "message"),
    [
        (0.0, 0.0, r"'odd': ratio is bytes on the wire .* positive number .*, got 0.0"),
        (-1.0, 0.0, r"got -1.0"),
        (float("inf"), 0.0, r"got inf"),
        (0.5, -1e-9, r"'odd': seconds_per_byte must be finite and not negative, got -1e-09"),
        (0.5, float("nan"), r"got nan"),
    ],
)
def test_bad_codecs(ratio: float, seconds: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CodecCost("odd", ratio, seconds)
