"""What the recipe finds on this machine, and how it runs the steps that take long."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvd_pipe.errors import HvdPipeError

# What must be there -> the Debian/Ubuntu package that brings it.
_TOOLS = {"cmake": "cmake", "c++": "g++", "make": "make"}
_MPI_TOOLS = {"mpirun": "openmpi-bin", "mpicxx": "libopenmpi-dev"}
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"  # not every root's PATH leads there

# What Horovod's build and Horovod itself import, beside a framework.
PYTHON_PACKAGES = ("cffi", "cloudpickle", "packaging", "psutil", "pyyaml", "setuptools", "wheel")

_PERCENT = re.compile(rb"\[\s*(\d{1,3})%\]")
_ERROR = re.compile(r"\berror\b|^E: |CMake Error|No space left", re.IGNORECASE)
PROGRESS_S = 15.0


class SetupError(HvdPipeError):
    """A set-up step failed; the message says what failed and what to do, in one line."""


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def _first_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)]
    return (errors or lines or ["no output"])[0 if errors else -1][:300]


def run(
    label: str,
    command: Sequence[str | os.PathLike[str]],
    log: Path,
    remedy: str,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> None:
    """Run a command: its output goes to ``log``, and how far it is to the terminal."""
    log.parent.mkdir(parents=True, exist_ok=True)
    start = shown = time.monotonic()
    say(f"  {label} ...")
    with log.open("wb") as sink:
        try:
            process = subprocess.Popen(
                [os.fspath(part) for part in command],
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=None if env is None else dict(env),
                cwd=cwd,
            )
        except OSError as error:
            raise SetupError(f"{label} failed: {error}. {remedy}") from error
        try:
            while process.poll() is None:
                time.sleep(0.2)
                if time.monotonic() - shown >= PROGRESS_S:
                    shown = time.monotonic()
                    percents = _PERCENT.findall(log.read_bytes()[-65536:])  # CMake's
                    percent = f"{int(percents[-1])}% in " if percents else ""
                    say(f"  {label} ... {percent}{shown - start:.0f} s")
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if process.returncode != 0:
        raise SetupError(f"{label} failed: {_first_error(log)} (whole log: {log}). {remedy}")
    say(f"  {label}: done in {time.monotonic() - start:.0f} s")


def missing_packages(mpi: bool = True, more: dict[str, str] | None = None) -> list[str]:
    """Return the system packages that a build, or one of ``more`` commands, needs and lacks.

    Example:
        >>> missing_packages(mpi=False, more={"no-such-command": "its-package"})[-1]
        'its-package'
    """
    tools = {**(_MPI_TOOLS if mpi else {}), **_TOOLS, **(more or {})}
    path = f"{os.environ.get('PATH', os.defpath)}:{_SBIN}"
    headers = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    return [
        *([] if headers else ["python3-dev"]),
        *(package for tool, package in tools.items() if shutil.which(tool, path=path) is None),
    ]


def packages_error(packages: Sequence[str]) -> SetupError:
    """Return the error that says how to install the system packages that are missing."""
    names = " ".join(packages)
    without = ""
    if {"openmpi-bin", "libopenmpi-dev"} & set(packages):
        without = " Or build with Gloo alone: hvd-pipe build-horovod --without-mpi."
    if shutil.which("apt-get") is None:
        return SetupError(f"missing what Debian calls {names}: install these first.{without}")
    sudo = "" if os.geteuid() == 0 else "sudo "
    return SetupError(
        f"missing system packages. Run: {sudo}apt-get install -y --no-install-recommends "
        f"{names}.{without}"
    )


def installed(*names: str) -> str | None:
    """Return the version of the first of some Python packages that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def first_line(command: list[str]) -> str:
    """Return the first line that a command prints."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(f"`{' '.join(command)}` failed: {error}. Mend it first.") from error
    return answer.strip().splitlines()[0]


def cuda_home() -> Path:
    """Return where the CUDA toolkit is."""
    home = Path(os.environ.get("HOROVOD_CUDA_HOME", "/usr/local/cuda"))
    if not (home / "bin" / "nvcc").exists():
        raise SetupError(f"no nvcc in {home}: install the CUDA toolkit or set HOROVOD_CUDA_HOME.")
    return home


def nccl_package() -> Path:
    """Return where torch's own NCCL wheel lies, which a thin environment has from another."""
    for folder in (sysconfig.get_paths()["purelib"], *sys.path):
        package = Path(folder) / "nvidia" / "nccl"
        if (package / "lib" / "libnccl.so.2").exists():
            return package
    raise SetupError("no NCCL: install torch's CUDA build, or set HOROVOD_NCCL_HOME.")


def cuda_environment(layout: Path) -> dict[str, str]:
    """Return Horovod's build variables for CUDA and NCCL, which may come from torch's wheel.

    Horovod wants NCCL as ``include/`` and ``lib/libnccl.so``; the wheel has ``libnccl.so.2`` only,
    so ``layout`` gets links to what is there.
    """
    home = cuda_home()
    variables = {
        "HOROVOD_CUDA_HOME": str(home),
        # Horovod runs the nvcc on PATH, and torch, asked for CUDA's libraries, guesses from PATH.
        "CUDA_HOME": str(home),
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_LINK": "SHARED",
    }
    if "HOROVOD_NCCL_HOME" not in os.environ:
        package = nccl_package()
        (layout / "lib").mkdir(parents=True)
        (layout / "include").symlink_to(package / "include")
        for name in ("libnccl.so", "libnccl.so.2"):
            (layout / "lib" / name).symlink_to(package / "lib" / "libnccl.so.2")
        variables["HOROVOD_NCCL_HOME"] = str(layout)
        # torch loads its NCCL itself; horovod.tensorflow has only this path to find it by.
        flags = (os.environ.get("LDFLAGS"), f"-Wl,-rpath,{package / 'lib'}")
        variables["LDFLAGS"] = " ".join(filter(None, flags))
    return variables
