"""What a profile of training steps says: bytes that moved beside kernels, and the host's waits.

It reads the events of a Chrome trace as torch.profiler writes them (times in microseconds).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]
Span = tuple[float, float]

WAITS = (  # in which the host waits for the device; cudaMemcpyAsync is none of them
    *("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"),
    *("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize", "cudaMemcpy"),
)


def communicates(event: Event) -> bool:
    """Whether an event of the device moves bytes between ranks, or between host and device."""
    name = str(event.get("name", "")).lower()
    return "nccl" in name or "dtoh" in name or "htod" in name


def span(event: Event) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0))


def union(spans: Iterable[Span]) -> list[Span]:
    """Return disjoint spans, in order, that cover the same time."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def overlap(events: Iterable[Event]) -> dict[str, float]:
    """Return the time of communication, and how much of it and of its copies ran beside kernels.

    NCCL's kernels say nothing of their bytes: ``hidden`` is a share of the time, and the copies'
    bytes are counted in that share of each copy.
    """
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    moving = [e for e in device if communicates(e)]
    kernels = union(span(e) for e in device if e.get("cat") == "kernel" and e not in moving)
    found = dict.fromkeys(("communication_us", "hidden_us", "copied", "copied_beside"), 0.0)
    for event in moving:
        begin, end = span(event)
        beside = sum(max(0.0, min(end, last) - max(begin, first)) for first, last in kernels)
        copied = float(event.get("args", {}).get("bytes", 0))
        found["communication_us"] += end - begin
        found["hidden_us"] += beside
        found["copied"] += copied
        found["copied_beside"] += copied * (beside / (end - begin) if end > begin else 0.0)
    return found


def waits(events: Sequence[Event]) -> dict[str, list[float]]:
    """Return the microseconds of each wait, by call, of the threads that compute.

    A thread computes if torch's operators ran in it. Horovod's own threads run none.
    """
    computing = {e.get("tid") for e in events if e.get("cat") == "cpu_op"}
    found: dict[str, list[float]] = defaultdict(list)
    for event in events:
        runtime = event.get("cat") in ("cuda_runtime", "cuda_driver")
        if runtime and event.get("name") in WAITS and event.get("tid") in computing:
            found[event["name"]].append(float(event.get("dur", 0.0)))
    return dict(found)
