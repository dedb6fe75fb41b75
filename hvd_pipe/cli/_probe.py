"""Probes of the machine: what each finds out, in a process of its own.

``python -m hvd_pipe.cli._probe NAME SECONDS`` prints what it finds as one line of JSON behind
`MARK`, as libraries print what they like. An import that crashes or hangs ends that process and
nothing else. :func:`ask` runs one here, :func:`ask_host` on another host, and neither waits for
ever.
"""

# ruff: noqa: PLC0415 - each probe imports what it looks at, and nothing else

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["MARK", "PROBES", "Answer", "ask", "ask_host", "ask_ranks", "main"]


_GRACE_S = 5.0
_RAISED = re.compile(r"(\[\d+,\d+\]<\w+>:)?[\w.]*(Error|Exception): ")
_MODULE = "hvd_pipe.cli._probe"
# TensorFlow speaks of the processor unless told not to; Open MPI refuses root unless told.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True)
class Answer:
    """What a probe found, or in ``error`` why it found nothing."""

    found: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def ask(probe: str, seconds: int) -> Answer:
    """Run a probe in a process of its own."""
    return _run([sys.executable, "-m", _MODULE, probe, str(seconds)], seconds)


def ask_host(host: str, port: int | None, probe: str, seconds: int) -> Answer:
    """Run a probe on another host, with this Python's path and directory, as launchers do."""
    command = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={min(seconds, 5)}"]
    if port is not None:
        command += ["-p", str(port)]
    there = shlex.join([sys.executable, "-m", _MODULE, probe, str(seconds)])
    # The directory matters to relative paths only; a host that lacks it may still be fit.
    remote = f"cd {shlex.quote(str(Path.cwd()))} 2>/dev/null; {there}"
    return _run([*command, host, remote], seconds)


def ask_ranks(
    horovodrun: str,
    ranks: int,
    seconds: int,
    hosts: Sequence[str] = (),
    port: int | None = None,
    *,
    gloo: bool = False,
) -> Answer:
    """Run the self-test under horovodrun, on this machine or with one rank on each host."""
    command = [horovodrun, "-np", str(ranks), *(["--gloo"] if gloo else [])]
    if hosts:
        command += ["-H", ",".join(f"{host}:1" for host in hosts)]
    if port is not None:
        command += ["-p", str(port)]
    return _run([*command, sys.executable, "-m", _MODULE, "self_test", str(seconds)], seconds)


def _run(command: Sequence[str], seconds: int) -> Answer:
    root = _ROOT if os.geteuid() == 0 else {}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**_QUIET, **root, **os.environ},
            start_new_session=True,
        )
    except OSError as error:
        return Answer(error=f"{command[0]}: {error.strerror}")
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return Answer(error=f"no answer within {seconds} s")
    finally:
        _end(process)  # a KeyboardInterrupt comes this way, too
    return _answer(output, errors, process.returncode)


def _end(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_GRACE_S)


def _answer(output: str, errors: str, code: int) -> Answer:
    _, mark, rest = output.partition(MARK)
    if mark:
        answer, _ = json.JSONDecoder().raw_decode(rest)  # a launcher may add a rank behind it
        return Answer(**answer)
    if code == -signal.SIGALRM:
        return Answer(error="no answer in time")
    if code < 0:
        return Answer(error=f"the process was ended by {signal.Signals(-code).name}")
    # Launchers end with a banner, so the line that tells best is seldom the last.
    lines = [line.strip() for line in (errors or output).splitlines() if line.strip(" -*=\t")]
    raised = [line for line in lines if _RAISED.match(line)][-1:]
    telling = [x for x in lines if "error" in x.lower() or "denied" in x.lower()]
    best = (raised or telling or lines[-1:] or ["no output"])[0]
    return Answer(error=f"{best[:300]} (exit status {code})")


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
    """Import our package for TensorFlow; return what its Horovod was built with."""
    import hvd_pipe.tensorflow as hvd

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
    hvd = importlib.import_module(f"horovod.{_framework()}")
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
    hvd: Any = importlib.import_module(f"hvd_pipe.{_framework()}")
    hvd.init()
    total, device = (_sum_in_torch if _framework() == "torch" else _sum_in_tensorflow)(hvd)
    expected = hvd.size() * (hvd.size() + 1) / 2
    answer = {
        "ranks": hvd.size(),
        "right": bool((total == expected).all()),
        "device": device,
        "controller": "MPI" if hvd.mpi_enabled() else "Gloo",
    }
    first = hvd.rank() == 0
    hvd.shutdown()
    return answer if first else {}


def _framework() -> str:
    """The framework that trains here: TensorFlow where there is no torch."""
    return "torch" if importlib.util.find_spec("torch") else "tensorflow"


def _sum_in_torch(hvd: Any) -> tuple[Any, str]:
    """Return the sum of ``rank + 1`` over the ranks, and the device that it was on."""
    import torch

    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= hvd.local_size()
    device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
    ones = torch.full((1000,), float(hvd.rank() + 1), device=device)
    return hvd.allreduce(ones, op=hvd.Sum, name="doctor").cpu().numpy(), device.type


def _sum_in_tensorflow(hvd: Any) -> tuple[Any, str]:
    """Return the same from TensorFlow, on the CPU."""
    import tensorflow as tf

    with tf.device("CPU:0"):
        ones = tf.fill([1000], float(hvd.rank() + 1))
        return hvd.allreduce(ones, op=hvd.Sum, name="doctor").numpy(), "cpu"


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
