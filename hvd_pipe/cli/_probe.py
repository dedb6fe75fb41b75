"""One look at the machine: ``python -m hvd_pipe.cli._probe NAME SECONDS`` prints what it finds.

Each probe runs in a process of its own, so that an import that crashes or hangs ends that process
and nothing else. The answer is one line of JSON behind `MARK`: libraries print what they like.
"""

# ruff: noqa: PLC0415 - each probe imports what it looks at, and nothing else

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["MARK", "PROBES", "main"]

MARK = "hvd-pipe-probe:"

# What users call it -> the names under which it may be installed.
_DISTRIBUTIONS = {
    "hvd_pipe": ("hvd_pipe",),
    "numpy": ("numpy",),
    "horovod": ("horovod",),
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly"),
    "keras": ("keras",),
    "mpi4py": ("mpi4py",),
}


def versions() -> dict[str, Any]:
    """Return the versions of what is installed; nothing is imported."""
    found: dict[str, Any] = {"python": platform.python_version()}
    for name, distributions in _DISTRIBUTIONS.items():
        found[name] = next(filter(None, map(_version, distributions)), None)
    return found


def horovod_torch() -> dict[str, Any]:
    """Import our package for PyTorch; return what its Horovod was built with."""
    import hvd_pipe.torch as hvd

    return _built(hvd)


def horovod_tensorflow() -> dict[str, Any]:
    """Import Horovod for TensorFlow; return what it was built with."""
    import horovod.tensorflow as hvd

    return _built(hvd)


def mpi() -> dict[str, Any]:
    """Initialise MPI and leave it again; return the library and what threads may do in it."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    level = MPI.Init_thread(MPI.THREAD_MULTIPLE)
    names = {
        MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
        MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
        MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
        MPI.THREAD_MULTIPLE: "MPI_THREAD_MULTIPLE",
    }
    library = MPI.Get_library_version().replace("\0", "").split(",")[0].strip()
    MPI.Finalize()
    return {"library": library, "threads": names[level]}


def mpi_of_horovod() -> dict[str, Any]:
    """Return the same as Horovod sees it, where mpi4py is missing."""
    import horovod.torch as hvd

    hvd.init()
    try:
        multiple = hvd.mpi_enabled() and hvd.mpi_threads_supported()
    finally:
        hvd.shutdown()
    return {"library": None, "threads": "MPI_THREAD_MULTIPLE" if multiple else "less"}


def cuda() -> dict[str, Any]:
    """Return what torch sees of GPUs."""
    import torch

    devices = []
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            devices.append({"name": properties.name, "memory_bytes": properties.total_memory})
    nccl = None
    if devices:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "torch_cuda": torch.version.cuda,
        "devices": devices,
        "nccl": nccl,
        "driver": shutil.which("nvidia-smi") is not None,
    }


def network() -> dict[str, Any]:
    """Return the interfaces that are up, with addresses and speeds (bit/s; None: not told)."""
    import psutil  # type: ignore[import-untyped]

    state = psutil.net_if_stats()
    interfaces = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        known = [a.address for a in addresses if a.family in {socket.AF_INET, socket.AF_INET6}]
        if name in state and state[name].isup and known:
            speed = state[name].speed
            interfaces.append(
                {
                    "name": name,
                    "addresses": known,
                    "bits_per_s": speed * 10**6 if speed > 0 else None,
                    "loopback": "loopback" in state[name].flags.split(","),
                }
            )
    return {"interfaces": interfaces}


def machine() -> dict[str, Any]:
    """Return the cores and the memory that this process may use."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")  # a container's, if any
    text = limit.read_text().strip() if limit.is_file() else "max"
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": min(pages, int(text)) if text.isdigit() else pages,
    }


def self_test() -> dict[str, Any]:
    """All-reduce through our package among the ranks that run this; return what came out."""
    import torch

    import hvd_pipe.torch

    hvd: Any = hvd_pipe.torch  # most of its names are Horovod's, which has no types
    hvd.init()
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= hvd.local_size()
    device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
    ones = torch.full((1000,), float(hvd.rank() + 1), device=device)
    total = hvd.allreduce(ones, op=hvd.Sum, name="doctor")
    expected = hvd.size() * (hvd.size() + 1) / 2
    answer = {
        "ranks": hvd.size(),
        "right": bool((total == expected).all()),
        "device": str(device.type),
        "controller": "MPI" if hvd.mpi_enabled() else "Gloo",
    }
    first = hvd.rank() == 0
    hvd.shutdown()
    return answer if first else {}


PROBES = {
    probe.__name__: probe
    for probe in (
        versions,
        horovod_torch,
        horovod_tensorflow,
        mpi,
        mpi_of_horovod,
        cuda,
        network,
        machine,
        self_test,
    )
}


def main(name: str, seconds: str) -> None:
    """Run one probe and print its answer; end this process after so many seconds at the latest."""
    signal.alarm(int(seconds))
    try:
        answer: dict[str, Any] = {"found": PROBES[name]()}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    if answer.get("found") != {}:
        # In one piece: launchers put a rank in front of each piece that they read.
        sys.stdout.write(f"\n{MARK}{json.dumps(answer)}\n")
        sys.stdout.flush()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _built(hvd: Any) -> dict[str, Any]:
    names = ("mpi", "gloo", "nccl", "ddl", "ccl")
    return {name: bool(getattr(hvd, f"{name}_built")()) for name in names}


if __name__ == "__main__":
    main(*sys.argv[1:])
