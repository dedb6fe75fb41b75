"""What a profile of training steps says: bytes that moved beside kernels, and the host's waits.

It reads the events of a Chrome trace as torch.profiler writes them (times in microseconds).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Event = Mapping[str, Any]
Span = tuple[float, float]

WAITS = (
    *("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"),
    *("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize", "cudaMemcpy"),
)
"""Calls in which the host waits for the device; cudaMemcpyAsync is none of them."""


def is_communication(event: Event) -> bool:
    """Whether an event of the device moves bytes between ranks, or between host and device."""
    name = str(event.get("name", "")).lower()
    return "nccl" in name or "dtoh" in name or "htod" in name


def on_device(events: Iterable[Event]) -> list[Event]:
    return [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def span(event: Event) -> Span:
    begin = float(event["ts"])
    return begin, begin + float(event.get("dur", 0.0))


def union(spans: Iterable[Span]) -> list[Span]:
    """Return disjoint spans, in order, that cover the same time.

    >>> union([(3, 4), (0, 2), (1, 2.5)])
    [(0, 2.5), (3, 4)]
    """
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def covered(one: Span, spans: list[Span]) -> float:
    """Return how much of one span disjoint spans cover.

    >>> covered((0, 10), [(2, 3), (8, 12)])
    3
    """
    return sum(max(0, min(one[1], end) - max(one[0], begin)) for begin, end in spans)


def overlap(events: Iterable[Event]) -> dict[str, float]:
    """Return the time of communication, and how much of it and of its copies ran beside kernels.

    NCCL's kernels say nothing of their bytes: ``hidden`` is a share of the time, and the copies'
    bytes are counted in that share of each copy.
    """
    device = on_device(events)
    moving = [e for e in device if is_communication(e)]
    kernels = union(span(e) for e in device if e.get("cat") == "kernel" and e not in moving)
    total_us = hidden_us = copied = hidden_bytes = 0.0
    for event in moving:
        taken, beside = float(event.get("dur", 0.0)), covered(span(event), kernels)
        nbytes = float(event.get("args", {}).get("bytes", 0))
        total_us += taken
        hidden_us += beside
        copied += nbytes
        hidden_bytes += nbytes * (beside / taken if taken else 0.0)
    return {
        "communication_us": total_us,
        "hidden_us": hidden_us,
        "hidden": hidden_us / total_us if total_us else 0.0,
        "copied_bytes": copied,
        "copied_beside_kernels_bytes": hidden_bytes,
        "kernels": float(sum(e.get("cat") == "kernel" for e in device)),
    }


def waits(events: Iterable[Event]) -> dict[str, dict[str, float]]:
    """Return the waits of the threads that compute, each call with its count and microseconds.

    A thread computes if torch's operators ran in it. Horovod's own threads run none.
    """
    every = list(events)
    computing = {e.get("tid") for e in every if e.get("cat") == "cpu_op"}
    found: dict[str, dict[str, float]] = {}
    for event in every:
        name = str(event.get("name", ""))
        if (
            event.get("cat") in ("cuda_runtime", "cuda_driver")
            and name in WAITS
            and event.get("tid") in computing
        ):
            row = found.setdefault(name, {"calls": 0.0, "us": 0.0})
            row["calls"] += 1
            row["us"] += float(event.get("dur", 0.0))
    return found
