"""Which CUDA stream waits for which, told by streams that write down what they are asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from hvd_pipe.torch.messages import pending
from hvd_pipe.torch.parameters import are_finite

ASYNC = "HOROVOD_ENABLE_ASYNC_COMPLETION"


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class OnGpu:
    """A tensor of a GPU, as far as streams matter."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def tolist(self) -> list[float]:
        self.log.append("read")
        return [1, 2]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []

    @contextmanager
    def stream(entered: Stream) -> Iterator[None]:
        lines.append(f"in {entered.name}")
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("computing", lines))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: Stream("default", lines))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(pending, "side_stream", lambda _, reads: Stream("reading", lines))
    monkeypatch.setattr(pending.mpi_ops, "nccl_built", lambda: 23007)
    monkeypatch.delenv(ASYNC, raising=False)
    return lines


def test_reading_control_words_waits_for_no_kernel(log: list[str]) -> None:
    """`.tolist()` in the stream that computes waited for all that was queued there.

    Under Pipe-SGD that is a whole backward pass: the host could launch nothing meanwhile.
    """
    assert pending.host_values(OnGpu(log), settled=True) == [1.0, 2.0]
    assert log == ["in reading", "read"]


@pytest.mark.parametrize("why", ["decompressed", "async", "staged"])
def test_words_that_are_yet_to_be_written_are_waited_for(
    why: str, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "async":
        monkeypatch.setenv(ASYNC, "1")
    if why == "staged":
        monkeypatch.setattr(pending.mpi_ops, "nccl_built", lambda: 0)
    pending.host_values(OnGpu(log), settled=why != "decompressed")
    assert log == ["reading waits for computing", "in reading", "read"]


@pytest.mark.parametrize("setting", ["0", "1"])
def test_a_side_stream_waits_where_only_the_default_one_does(
    setting: str, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With asynchronous completion, Horovod has the default stream wait for a message.

    A step in another stream read the buffer before it was reduced.
    """
    monkeypatch.setenv(ASYNC, setting)
    pending.follow_horovod(OnGpu(log))
    assert log == (["computing waits for default"] if setting == "1" else [])


def test_a_buffer_of_the_host_needs_no_stream(log: list[str]) -> None:
    assert pending.host_values(torch.tensor([3.0, 4.0]), settled=False) == [3.0, 4.0]
    pending.follow_horovod(torch.zeros(1))
    assert log == []


def test_an_overflow_is_found_in_any_gradient() -> None:
    fine = [torch.ones(3), torch.ones(2, dtype=torch.float64)]
    sparse = torch.tensor([float("inf"), 0.0]).to_sparse()
    assert are_finite(fine)
    assert are_finite([])
    assert not are_finite([*fine, torch.tensor([1.0, float("nan")])])
    assert not are_finite([*fine, sparse])
