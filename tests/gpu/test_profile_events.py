"""What is counted in a profile, of events that are written down here: it needs no GPU."""

from typing import Any

from profile_events import overlap, waits


def event(
    cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: float
) -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


EVENTS = [
    event("kernel", "gemm", 0, 10),
    event("kernel", "gemm", 8, 4),  # in another stream
    event("kernel", "ncclDevKernel_AllReduce", 6, 12),  # 6 of 12 beside a gemm
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 20, 4, bytes=400),
    event("kernel", "relu", 22, 10),  # 2 of these 4
    event("gpu_memcpy", "Memcpy DtoD", 50, 5, bytes=1000),  # moves nothing between ranks
    event("cpu_op", "aten::mm", 0, 1, tid=1),
    event("cpu_op", "aten::mm_backward", 0, 1, tid=2),
    event("cuda_runtime", "cudaStreamSynchronize", 5, 3, tid=1),
    event("cuda_runtime", "cudaStreamSynchronize", 15, 2, tid=2),
    event("cuda_runtime", "cudaEventSynchronize", 5, 50, tid=9),  # Horovod's own thread
    event("cuda_runtime", "cudaLaunchKernel", 5, 1, tid=1),
]


def test_bytes_that_move_beside_kernels_are_counted() -> None:
    found = {"communication_us": 16, "hidden_us": 8, "copied": 400, "copied_beside": 200}
    assert overlap(EVENTS) == found


def test_only_waits_of_threads_that_compute_are_counted() -> None:
    assert waits(EVENTS) == {"cudaStreamSynchronize": [3, 2]}
