"""Codecs as a plan sees them, beside those that really travel."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_pipe.planning.comm import CODECS, NONE, CodecCost, CommModel
from hvd_pipe.runtime.bucket_planner import GradientIndex


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
