"""Build Horovod's wheel for the frameworks of this environment, keep it, install it and try it.

The wheel is kept in a cache folder, under a name made of all that it depends on, so a second
environment that agrees takes seconds.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path

from hvd_pipe.build_horovod.edits import apply
from hvd_pipe.build_horovod.features import Features
from hvd_pipe.build_horovod.steps import SetupError, run, say
from hvd_pipe.build_horovod.system import (
    PYTHON_PACKAGES,
    cuda_environment,
    cuda_home,
    first_line,
    installed,
    missing_packages,
    nccl_package,
    packages_error,
)

__all__ = [
    "SDIST_SHA256",
    "VERSION",
    "build",
    "cache_key",
    "cached_wheel",
    "default_cache",
    "fetch_source",
    "install",
]

VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
_AGAIN = "Check the network and pip's configuration, then run the same command again."


def cache_key(features: Features) -> str:
    """Return a readable folder name; its last part hashes everything that the wheel depends on."""
    mpi = first_line(["mpirun", "--version"]) if features.mpi else "none"
    torch, tensorflow = features.torch or "none", features.tensorflow or "none"
    cuda = features.cuda
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
        str(features.cxx_standard),
        repr(features.edits),
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


def fetch_source(folder: Path, archive: Path | None = None) -> Path:
    """Unpack the sdist, downloaded or from ``archive``, into ``folder``; return its root.

    pip runs the setup.py of what it downloads, and compares the hash before that only if the
    requirement holds one.
    """
    if archive is None:
        requirement = folder / "requirements.txt"
        requirement.write_text(f"horovod=={VERSION} --hash=sha256:{SDIST_SHA256}\n")
        pip = [sys.executable, "-m", "pip", "download", "--require-hashes", "--no-deps"]
        from_source = ["--no-build-isolation", "--no-binary", ":all:"]
        command = [*pip, *from_source, "-d", str(folder), "-r", str(requirement)]
        run(f"download Horovod {VERSION}", command, folder / "download.log", _AGAIN)
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


def build_environment(features: Features, nccl: Path) -> dict[str, str]:
    """Return the variables under which Horovod's setup.py builds these features.

    Args:
        features: What it is built with.
        nccl: A folder for links to NCCL, which is made if it is needed.
    """
    environment = {
        **os.environ,
        f"HOROVOD_WITH{'' if features.mpi else 'OUT'}_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        f"HOROVOD_WITH{'' if features.torch else 'OUT'}_PYTORCH": "1",
        f"HOROVOD_WITH{'' if features.tensorflow else 'OUT'}_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        **(cuda_environment(nccl, features.nccl) if features.cuda else {}),
    }
    # Gloo asks for a CMake that is older than what CMake 4 takes, and GCC 13 no longer brings
    # in the headers of uint8_t and std::string by others.
    environment.setdefault("CMAKE_POLICY_VERSION_MINIMUM", "3.5")
    flags = (os.environ.get("CXXFLAGS"), "-include cstdint -include string")
    environment["CXXFLAGS"] = " ".join(filter(None, flags))
    # Horovod defaults to -j8: on a small host that is more memory than there is.
    environment.setdefault("MAKEFLAGS", f"-j{os.cpu_count() or 1}")
    return environment


def _names(features: Features) -> str:
    names = {"torch": features.torch, "TensorFlow": features.tensorflow}
    return " and ".join(f"{name} {version}" for name, version in names.items() if version)


def build(target: Path, features: Features, archive: Path | None = None) -> Path:
    """Build the wheel and put it into ``target`` in one atomic move; return its path."""
    log = target.parent / f"{target.name}.log"
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as name:
        folder = Path(name)
        root = fetch_source(folder, archive)
        for edit in features.edits:
            apply(edit, root)
        environment = build_environment(features, folder / "nccl")
        run(
            f"build Horovod for {_names(features)} (5 to 20 min, once)",
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


_CHECKS = {
    "torch": """
import torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.full((1000,), float(hvd.rank() + 1)), op=hvd.Sum)
assert hvd.size() == 2 and bool((total == 3).all()), (hvd.size(), total[:3])
""",
    "tensorflow": """
import tensorflow as tf, horovod.tensorflow as hvd
hvd.init()
total = hvd.allreduce(tf.fill([1000], float(hvd.rank() + 1)), op=hvd.Sum)
assert hvd.size() == 2 and bool(tf.reduce_all(total == 3)), (hvd.size(), total[:3])
""",
}


def check(cache: Path, features: Features) -> None:
    """Show what was built and all-reduce over two ranks, with each controller.

    Raises:
        SetupError: Something is missing in it, or the ranks do not get the sum.
    """
    horovodrun = [sys.executable, "-m", "horovod.runner.launch"]  # wherever pip puts scripts
    answer = subprocess.run(
        [*horovodrun, "--check-build"], capture_output=True, text=True, check=False
    ).stdout
    parts = {
        "PyTorch": features.torch is not None,
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
    program = _CHECKS["tensorflow" if features.torch is None else "torch"]
    for controller in ("mpi", "gloo") if features.mpi else ("gloo",):
        run(
            f"all-reduce over 2 ranks ({controller})",
            [*horovodrun, "-np", "2", f"--{controller}", sys.executable, "-c", program],
            cache / f"check-{controller}.log",
            "Two local processes could not talk: check that the loopback interface is up and that "
            "this machine's own name resolves (getent hosts $(hostname)).",
        )


def install(
    features: Features, cache: Path, source: Path | None = None, into: Path | None = None
) -> None:
    """Install Horovod for this Python, from the cache or built now, and try it on two ranks.

    Args:
        features: What it is built with.
        cache: The folder that keeps wheels.
        source: Horovod's sdist, where it shall not be downloaded.
        into: A folder to install into, beside this environment; nothing is tried then.

    Raises:
        SetupError: Something is missing, or a step failed; says what to do.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache).close()
    except OSError as error:
        raise SetupError(
            f"cannot write the cache {cache}: {error.strerror}. Set HVD_PIPE_CACHE to a folder "
            "that can be written."
        ) from error
    packages = missing_packages(features.mpi)
    if packages:
        raise packages_error(packages)
    pip = [sys.executable, "-m", "pip", "install"]
    if installed("pip") is None:
        raise SetupError(f"{sys.executable} has no pip: `{sys.executable} -m ensurepip` first.")
    absent = [name for name in PYTHON_PACKAGES if installed(name) is None]
    if absent:
        run(f"install {' '.join(absent)}", [*pip, *absent], cache / "install.log", _AGAIN)
    if features.hides_cuda:
        say(f"  torch {features.torch} has CUDA, this Horovod will not: --cuda builds for GPUs")
    target = cache / cache_key(features)
    wheel = cached_wheel(target) or build(target, features, source)
    beside = ["--target", str(into)] if into else []
    run(
        "install the Horovod wheel",
        [*pip, "--no-deps", "--force-reinstall", *beside, str(wheel)],
        cache / "install.log",
        f"Delete {target} and run the same command again.",
    )
    if into is None:
        check(cache, features)


def default_cache() -> Path:
    """Return where built wheels are kept, outside any checkout (``HVD_PIPE_CACHE`` moves it)."""
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HVD_PIPE_CACHE") or Path(user) / "hvd_pipe")
