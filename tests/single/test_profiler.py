"""Ready times: medians over steps, from the first gradient; one that is absent is ready last."""

from __future__ import annotations

import doctest
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from horovod.torch.mpi_ops import global_process_set

from hvd_pipe.measuring.clock import Stopwatch
from hvd_pipe.measuring.step_times import ReadyTimes
from hvd_pipe.runtime import comm_probe
from hvd_pipe.runtime.comm_probe import _sizes
from hvd_pipe.torch.measuring import probes
from hvd_pipe.torch.measuring.probes import measure_allreduce, measure_comm


def test_examples() -> None:
    found = doctest.testmod(comm_probe)
    assert found.failed == 0 < found.attempted


@pytest.mark.parametrize("sizes", [[], [0], [6], [8, 8], [8, 4]])
def test_sizes_that_cannot_be_measured(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="grow and be multiples of 4 bytes"):
        measure_allreduce(sizes, torch.device("cpu"), global_process_set)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The moments that will be read, in order."""
    moments: list[float] = []
    monkeypatch.setattr(Stopwatch, "now", lambda _: moments.pop(0))
    return moments


def test_the_median_over_steps_from_the_first_gradient(clock: list[float]) -> None:
    times = ReadyTimes(3, torch.device("cpu"))
    for start, gap in ((0.0, 1.0), (50.0, 2.0), (90.0, 9.0)):
        clock += [start + 2 * gap, start, start + gap, start + 3 * gap]
        for place in (2, 0, 1):
            times.mark(place)
        times.end_step()
    assert times.steps == 3
    assert times.seconds() == [0.0, 2.0, 4.0]


def test_a_gradient_that_was_not_computed_is_ready_at_the_end(clock: list[float]) -> None:
    times = ReadyTimes(2, torch.device("cpu"))
    clock += [1.0, 4.0]
    times.mark(0)
    times.end_step()
    assert times.seconds() == [0.0, 3.0]


def test_a_step_without_gradients_counts_but_says_nothing(clock: list[float]) -> None:
    """Ranks count steps together, so a rank without gradients must count it too."""
    times = ReadyTimes(2, torch.device("cpu"))
    times.end_step()
    assert (times.steps, times.seconds()) == (1, [0.0, 0.0])
    clock += [5.0, 6.0, 7.0]
    times.mark(1)
    times.mark(0)
    times.end_step()
    assert (times.steps, times.seconds()) == (2, [1.0, 0.0])


@pytest.mark.parametrize("largest", [4, 1024, 1025, 5000, 100_000_000])
def test_sizes_grow_to_the_largest_message(largest: int) -> None:
    sizes = _sizes(largest)
    assert sizes == sorted(set(sizes))
    assert len(sizes) >= 2
    assert sizes[0] == 1024
    assert sizes[-1] in (largest // 4 * 4, 2048, 2 * sizes[-2])
    assert all(size % 4 == 0 for size in sizes)


def network(
    monkeypatch: pytest.MonkeyPatch, seconds: Callable[[float], float], delay: float
) -> list[float]:
    """Put a network in place of the real one; return the times that it will have taken."""
    spent: list[float] = []

    def fake(messages: Sequence[torch.Tensor], name: str, process_set: object) -> float:
        spent.append(delay + sum(seconds(message.nbytes) for message in messages))
        return spent[-1]

    monkeypatch.setattr(probes, "_time", fake)
    monkeypatch.setattr(probes, "largest", lambda values, *_: values)
    return spent


@pytest.mark.parametrize("budget", [0.1, 2.0, 60.0])
@pytest.mark.parametrize("latency", [1e-4, 5e-3, 2e-2, 0.2])
@pytest.mark.parametrize("largest", [600_000, 3 * 2**20, 64 * 2**20])
def test_the_link_and_the_delay_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, largest: int, latency: float, budget: float
) -> None:
    """n messages that are sent together take ``delay + n T(bytes)``: T and delay come back.

    Slow small messages once used the budget up, and megabytes were extrapolated from 16 KiB.
    """

    def seconds(size: float) -> float:
        return latency + (1e-9 if latency == 1e-4 else 1e-8) * size

    spent = network(monkeypatch, seconds, delay=2e-3)
    sizes = _sizes(largest)
    (done, found), delay = measure_allreduce(
        sizes, torch.device("cpu"), global_process_set, budget
    )
    assert found == pytest.approx([seconds(size) for size in done], rel=1e-6)
    assert delay == pytest.approx(2e-3)
    if latency == 1e-4:
        assert done[0] == sizes[0]
        assert sum(spent) < 2 * budget
    assert budget < 1 or done[-1] >= 2**19
    assert budget < 10 or latency > 1e-4 or done == sizes


@pytest.mark.parametrize("others_block", [False, True])
@pytest.mark.parametrize("nccl", [0, 1])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_messages_are_blocking_unless_nccl_carries_them_everywhere(
    monkeypatch: pytest.MonkeyPatch, device: str, nccl: int, others_block: bool
) -> None:
    network(monkeypatch, lambda size: 1e-4 + 1e-9 * size, delay=2e-3)
    monkeypatch.setattr(probes._Sender, "allocate", lambda sender, count: None)
    monkeypatch.setattr(
        probes._Sender, "seconds", lambda sender, size, n: 2e-3 + n * (1e-4 + 1e-9 * size)
    )
    monkeypatch.setattr(probes, "nccl_built", lambda: nccl)
    if others_block:
        monkeypatch.setattr(probes, "largest", lambda values, *_: [max(x, 1.0) for x in values])
    comm = measure_comm(2048, torch.device(device), global_process_set, "test")
    assert comm.blocking == (others_block or device == "cpu" or not nccl)
    if not others_block:
        assert comm.delay == pytest.approx(2e-3)


def test_late_messages_do_not_make_megabytes_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the time of 3 MiB was once planned with: single messages had been late, pairs not."""

    def seconds(size: float) -> float:
        return 1e-3 + 1.5e-7 * size

    network(monkeypatch, seconds, delay=5e-3)
    honest = probes._time

    def late(messages: Sequence[torch.Tensor], *more: Any) -> float:
        alone = len(messages) == 1 and messages[0].nbytes >= 2**19
        return honest(messages, *more) + (0.04 if alone else 0.0)

    monkeypatch.setattr(probes, "_time", late)
    sizes = _sizes(3 * 2**20)
    (done, found), _ = measure_allreduce(sizes, torch.device("cpu"), global_process_set, 4.0)
    assert done[-1] == 2**19
    assert found[-1] == pytest.approx(seconds(done[-1]), rel=0.1)
