#!/usr/bin/env python3
"""Build, install and check Horovod for the Python that runs this script.

This is the one recipe: ``make demo``, ``make test`` and the Docker images all call it. It needs
torch, TensorFlow, an MPI with its compiler wrappers, CMake and a C++ compiler to be installed, and
nothing outside the standard library. The wheel is kept in a cache folder, under a name made of all
that it depends on, so a second machine state that agrees takes seconds.

    python docker/build_horovod.py [--cuda] [--cache DIR]

``docker/gpu_check.sh`` builds with it too, where there is torch alone and no network: from an
archive that lies there, without TensorFlow and MPI.

Horovod 0.28.1 is its newest release and predates the C++ standard of today's torch and the header
layout of today's TensorFlow; ``edits`` lists the smallest changes that make it build, and each
must apply exactly once or the build stops.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from steps import SetupError, run, say

VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


@dataclass(frozen=True)
class Edit:
    """One textual change to the source: ``old`` must occur exactly once in ``path``."""

    path: str
    old: str
    new: str


# Gloo lets a rank send to all others at once, and TCP shares its link among them unfairly: over
# links of 300 Mbit/s an all-to-all of 3 MB on four ranks took 110 ms, in turn 90 ms, of which the
# bytes need 62.
ALL_TO_ALL = """
    int sendRank = (myRank + i) % worldSize;
    int recvRank = (myRank + worldSize - i) % worldSize;
    in->send(
        sendRank, slot, inOffsetPerRank[sendRank], inLengthPerRank[sendRank]);
    out->recv(
        recvRank, slot, outOffsetPerRank[recvRank], outLengthPerRank[recvRank]);
  }

  for (int i = 1; i < worldSize; i++) {
    in->waitSend(opts.timeout);
    out->waitRecv(opts.timeout);
  }
"""
ALL_TO_ALL_IN_TURN = """
    int recvRank = (myRank + worldSize - i) % worldSize;
    out->recv(
        recvRank, slot, outOffsetPerRank[recvRank], outLengthPerRank[recvRank]);
  }

  for (int i = 1; i < worldSize; i++) {
    int sendRank = (myRank + i) % worldSize;
    in->send(
        sendRank, slot, inOffsetPerRank[sendRank], inLengthPerRank[sendRank]);
    in->waitSend(opts.timeout);
  }

  for (int i = 1; i < worldSize; i++) {
    out->waitRecv(opts.timeout);
  }
"""


STREAM = """
// Forward declaration of AsGpuStreamValue
namespace stream_executor {
namespace gpu {
GpuStreamHandle AsGpuStreamValue(Stream* stream);
} // namespace stream_executor
} // namespace gpu
#if TENSORFLOW_VERSION >= 2011000000
#include "tensorflow/compiler/xla/stream_executor/stream.h"
#else
#include "tensorflow/stream_executor/stream.h"
#endif // TENSORFLOW_VERSION >= 2011000000
"""
STREAM_FROM_ITS_HANDLE = """
#include "tensorflow/compiler/xla/stream_executor/stream.h"
namespace stream_executor {
namespace gpu {
inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
} // namespace gpu
} // namespace stream_executor
"""


def edits(cxx_standard: int, tensorflow: tuple[int, int], cuda: bool = False) -> list[Edit]:
    """Return the source edits that this torch and this TensorFlow need."""
    standard = ("set(CMAKE_CXX_STANDARD 14)", f"set(CMAKE_CXX_STANDARD {cxx_standard})")
    needed = [Edit("CMakeLists.txt", *standard), Edit("horovod/torch/CMakeLists.txt", *standard)]
    if tensorflow >= (2, 16):
        # These wheels no longer ship the compiler headers that Horovod's XLA operations include.
        guard = "#if TENSORFLOW_VERSION >= 2006000000"
        needed.append(Edit("horovod/tensorflow/xla_mpi_ops.cc", guard, "#if 0"))
    if tensorflow >= (2, 16) and cuda:
        # A function that these wheels do not export: horovod.tensorflow could not be loaded.
        needed.append(Edit("horovod/tensorflow/mpi_ops.cc", STREAM, STREAM_FROM_ITS_HANDLE))
    needed.append(Edit("third_party/gloo/gloo/alltoallv.cc", ALL_TO_ALL, ALL_TO_ALL_IN_TURN))
    return needed


def apply(edit: Edit, root: Path) -> None:
    path = root / edit.path
    text = path.read_text() if path.is_file() else ""
    found = text.count(edit.old)
    if found != 1:
        raise SetupError(
            f"the source edit of {edit.path} does not apply: {edit.old!r} occurs {found} times, "
            f"expected 1. Adapt edits() in docker/build_horovod.py to this Horovod."
        )
    path.write_text(text.replace(edit.old, edit.new))


def version_of(*names: str) -> str:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise SetupError(f"{names[0]} is not installed for {sys.executable}: run `make setup`.")


def torch_cxx_standard() -> int:
    """Return the C++ standard with which the installed torch compiles extensions (17, 20, ...)."""
    version_of("torch")
    path = importlib.metadata.distribution("torch").locate_file("torch/utils/cpp_extension.py")
    standards = re.findall(r"std[=:]c\+\+(\d\d)", Path(str(path)).read_text())
    if not standards:
        raise SetupError("torch does not say which C++ standard it needs: set it in this script.")
    return max(int(standard) for standard in standards)


def first_line(command: list[str]) -> str:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(f"`{' '.join(command)}` failed: {error}. Run `make setup`.") from error
    return answer.strip().splitlines()[0]


def cuda_home() -> Path:
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


def cuda_environment(layout: Path, nccl: bool = True) -> dict[str, str]:
    """Return Horovod's build variables for CUDA and NCCL; NCCL may come from torch's own wheel.

    Without NCCL, tensors of a GPU travel by way of the host.

    Horovod wants NCCL as ``include/`` and ``lib/libnccl.so``; the wheel has ``libnccl.so.2`` only,
    so ``layout`` gets links to what is there.
    """
    home = cuda_home()
    variables = {
        "HOROVOD_CUDA_HOME": str(home),
        # Horovod runs the nvcc on PATH, and torch, asked for CUDA's libraries, guesses from PATH.
        "CUDA_HOME": str(home),
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    if not nccl:
        return variables
    variables |= {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_LINK": "SHARED"}
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


@dataclass(frozen=True)
class Features:
    """What a Horovod is built with, beside PyTorch and Gloo."""

    tensorflow: str | None = None
    """Its version; None builds without it."""
    mpi: bool = True
    cuda: bool = False
    nccl: bool = True
    """With CUDA: whether a GPU's tensors travel by NCCL, or by way of the host."""

    @property
    def release(self) -> tuple[int, int]:
        """TensorFlow's, as the source edits ask for it."""
        return release(self.tensorflow) if self.tensorflow else (0, 0)


def cache_key(features: Features, cxx_standard: int) -> str:
    """Return a readable folder name; its last part hashes everything that the wheel depends on."""
    mpi = first_line(["mpirun", "--version"]) if features.mpi else "none"
    tensorflow, cuda = features.tensorflow or "none", features.cuda
    torch = version_of("torch")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    parts = [
        VERSION,
        SDIST_SHA256,
        torch,
        tensorflow,
        sys.version,
        platform.machine(),
        " ".join(platform.libc_ver()),
        mpi,
        first_line(["c++", "--version"]),
        str(cxx_standard),
        repr(edits(cxx_standard, features.release, cuda)),
    ]
    if cuda:
        parts.append(first_line([str(cuda_home() / "bin" / "nvcc"), "--version"]))
        own = os.environ.get("HOROVOD_NCCL_HOME")
        parts.append((own or str(nccl_package())) if features.nccl else "no NCCL")
    compilers = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CMAKE_PREFIX_PATH")
    parts += sorted(
        f"{k}={v}" for k, v in os.environ.items() if k.startswith("HOROVOD_") or k in compilers
    )
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    mpi_version = (re.search(r"\d+(\.\d+)+", mpi) or [mpi])[0]
    kind = ("cuda" if features.nccl else "staged") if cuda else "cpu"
    return f"{VERSION}-{tag}-{kind}-torch{torch}-tf{tensorflow}-mpi{mpi_version}-{digest}"


def release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def fetch_source(folder: Path, archive: Path | None = None) -> Path:
    """Unpack the sdist, downloaded or from ``archive``, into ``folder``; return its root.

    pip runs the setup.py of what it downloads, and compares the hash before that only if the
    requirement holds one.
    """
    if archive is None:
        requirement = folder / "requirements.txt"
        requirement.write_text(f"horovod=={VERSION} --hash=sha256:{SDIST_SHA256}\n")
        run(
            f"download Horovod {VERSION}",
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--require-hashes",
                "--no-deps",
                "--no-build-isolation",
                "--no-binary",
                ":all:",
                "-d",
                folder,
                "-r",
                requirement,
            ],
            folder / "download.log",
            "Check the network and pip's configuration, then run the same command again.",
        )
        archive = folder / f"horovod-{VERSION}.tar.gz"
    digest = sha256(archive)
    if digest != SDIST_SHA256:
        raise SetupError(f"{archive.name} has SHA-256 {digest}, not {SDIST_SHA256}: not built.")
    with tarfile.open(archive) as source:
        if hasattr(tarfile, "data_filter"):  # Debian 12's Python 3.11.2 has none
            source.extraction_filter = tarfile.data_filter
        source.extractall(folder)
    return folder / f"horovod-{VERSION}"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sum_of(wheel: Path) -> Path:
    """Return where the SHA-256 of a cached wheel is kept."""
    return wheel.with_name(f"{wheel.name}.sha256")


def cached_wheel(target: Path) -> Path | None:
    """Return the wheel that ``target`` holds; None if there is none, or not the one built."""
    wheel = next(iter(target.glob("horovod-*.whl")), None)
    if wheel is None:
        return None
    if sum_of(wheel).exists():
        sound = sum_of(wheel).read_text().strip() == sha256(wheel)
    else:  # kept by an older recipe: its archive can be checked for damage only
        sound = zipfile.is_zipfile(wheel) and _undamaged(wheel)
        if sound:
            sum_of(wheel).write_text(sha256(wheel) + "\n")
    if not sound:
        say(f"  the cached wheel {target.name} is not the one that was built: building it again")
        return None
    say(f"  Horovod {VERSION}: cached wheel {target.name}")
    return wheel


def _undamaged(wheel: Path) -> bool:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, zlib.error, EOFError):
        return False


def build(
    target: Path, features: Features, cxx_standard: int, archive: Path | None = None
) -> Path:
    """Build the wheel and put it into ``target`` in one atomic move; return its path."""
    log = target.parent / f"{target.name}.log"
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as name:
        folder = Path(name)
        root = fetch_source(folder, archive)
        for edit in edits(cxx_standard, features.release, features.cuda):
            apply(edit, root)
        environment = {
            **os.environ,
            f"HOROVOD_WITH{'' if features.mpi else 'OUT'}_MPI": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITH_PYTORCH": "1",
            f"HOROVOD_WITH{'' if features.tensorflow else 'OUT'}_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            **(cuda_environment(folder / "nccl", features.nccl) if features.cuda else {}),
        }
        # Gloo asks for a CMake that is older than what CMake 4 takes, and GCC 13 no longer brings
        # in the header of uint8_t by others.
        environment.setdefault("CMAKE_POLICY_VERSION_MINIMUM", "3.5")
        flags = (os.environ.get("CXXFLAGS"), "-include cstdint")
        environment["CXXFLAGS"] = " ".join(filter(None, flags))
        # Horovod defaults to -j8: on a small host that is more memory than there is.
        environment.setdefault("MAKEFLAGS", f"-j{os.cpu_count() or 1}")
        run(
            f"build Horovod ({'5 to 20' if features.tensorflow else '3 to 10'} min, once)",
            [sys.executable, "setup.py", "--quiet", "bdist_wheel", "-d", folder / "dist"],
            log,
            "Mend what it names, then run the same command again.",
            env=environment,
            cwd=root,
        )
        (wheel,) = (folder / "dist").glob("horovod-*.whl")
        staged = folder / "wheel"
        staged.mkdir()
        shutil.move(str(wheel), staged / wheel.name)
        sum_of(staged / wheel.name).write_text(sha256(staged / wheel.name) + "\n")
        if target.exists():
            shutil.rmtree(target)
        staged.replace(target)
    return target / wheel.name


CHECK = """
import sys
import torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.full((1000,), float(hvd.rank() + 1)), op=hvd.Sum)
assert hvd.size() == 2 and bool((total == 3).all()), (hvd.size(), total[:3])
"""


def check(cache: Path, features: Features) -> None:
    """Show what was built and all-reduce over two ranks, with each controller."""
    horovodrun = Path(sys.executable).parent / "horovodrun"
    answer = subprocess.run(
        [horovodrun, "--check-build"], capture_output=True, text=True, check=False
    ).stdout
    parts = {
        "PyTorch": True,
        "TensorFlow": features.tensorflow is not None,
        "MPI": features.mpi,
        "Gloo": True,
        "NCCL": features.cuda and features.nccl,
    }
    wanted = [name for name, is_wanted in parts.items() if is_wanted]
    missing = [name for name in wanted if f"[X] {name}" not in answer]
    if missing:
        raise SetupError(f"horovodrun --check-build lacks {', '.join(missing)}: logs in {cache}.")
    found = dict.fromkeys(part.strip() for part in re.findall(r"\[X\] (.+)", answer))
    say(f"  horovodrun --check-build: {', '.join(found)}")
    for controller in ("mpi", "gloo") if features.mpi else ("gloo",):
        run(
            f"all-reduce over 2 ranks ({controller})",
            [horovodrun, "-np", "2", f"--{controller}", sys.executable, "-c", CHECK],
            cache / f"check-{controller}.log",
            "Two local processes could not talk: check that the loopback interface is up and that "
            "this machine's own name resolves (getent hosts $(hostname)).",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cuda", action="store_true", help="build for CUDA with NCCL")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="keep wheels here")
    parser.add_argument("--pytorch-only", action="store_true", help="build without TensorFlow")
    parser.add_argument("--without-mpi", action="store_true", help="build with Gloo alone")
    parser.add_argument(
        "--staged", action="store_true", help="with --cuda: send by way of the host, not by NCCL"
    )
    parser.add_argument("--source", type=Path, help="Horovod's sdist, not to be downloaded")
    parser.add_argument("--into", type=Path, help="install into this folder, beside others")
    arguments = parser.parse_args()
    try:
        arguments.cache.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=arguments.cache).close()
    except OSError as error:
        raise SetupError(
            f"cannot write the cache {arguments.cache}: {error.strerror}. Set HVD_PIPE_CACHE to a "
            "folder that can be written."
        ) from error
    standard = torch_cxx_standard()
    features = Features(
        None if arguments.pytorch_only else version_of("tensorflow-cpu", "tensorflow"),
        not arguments.without_mpi,
        arguments.cuda,
        not arguments.staged,
    )
    target = arguments.cache / cache_key(features, standard)
    wheel = cached_wheel(target) or build(target, features, standard, arguments.source)
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--force-reinstall"]
    run(
        "install the Horovod wheel",
        [*install, *(["--target", arguments.into] if arguments.into else []), wheel],
        arguments.cache / "install.log",
        f"Delete {target} and run the same command again.",
    )
    if arguments.into is None:
        check(arguments.cache, features)


def default_cache() -> Path:
    """Return where built wheels are kept, outside any checkout (``HVD_PIPE_CACHE`` moves it)."""
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HVD_PIPE_CACHE") or Path(user) / "hvd_pipe")


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"build_horovod: {error}")
    except KeyboardInterrupt:
        sys.exit("build_horovod: interrupted. Run the same command again.")
