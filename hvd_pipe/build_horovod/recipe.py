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
from pathlib import Path

from hvd_pipe.build_horovod.features import Features
from hvd_pipe.build_horovod.system import (
    PYTHON_PACKAGES,
    SetupError,
    cuda_environment,
    cuda_home,
    first_line,
    installed,
    missing_packages,
    nccl_package,
    packages_error,
    run,
    say,
)

VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
_AGAIN = "Check the network and pip's configuration, then run the same command again."
_HUNK = re.compile(r"^@@ -(\d+)\S* \+\S+ @@.*\n", re.MULTILINE)


def apply(name: str, patch: str, root: Path) -> None:
    """Apply a unified diff, whose lines must all be where it says, to the source in ``root``."""
    for diff in re.split(r"^--- a/.*\n\+\+\+ b/", patch, flags=re.MULTILINE)[1:]:
        file, _, rest = diff.partition("\n")
        path = root / file
        source = path.read_text().split("\n") if path.is_file() else []
        hunks = _HUNK.split(rest)[1:]
        result: list[str] = []
        done = 0
        for first, body in zip(hunks[::2], hunks[1::2], strict=True):
            lines = body.split("\n")[:-1]
            old = [line[1:] for line in lines if line[0] != "+"]
            begin = int(first) - 1
            if source[begin : begin + len(old)] != old:
                raise SetupError(
                    f"the patch {name} does not apply to line {first} of {file}. Adapt it in "
                    "hvd_pipe/build_horovod/patches to this Horovod."
                )
            result += source[done:begin]
            result += [line[1:] for line in lines if line[0] != "-"]
            done = begin + len(old)
        path.write_text("\n".join(result + source[done:]))


def cache_key(features: Features) -> str:
    """Return a readable folder name; its last part hashes everything that the wheel depends on."""
    mpi = first_line(["mpirun", "--version"]) if features.mpi else "none"
    torch, tensorflow = features.torch or "none", features.tensorflow or "none"
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
        *features.patches.values(),
    ]
    if features.cuda:
        parts.append(first_line([str(cuda_home() / "bin" / "nvcc"), "--version"]))
        parts.append(os.environ.get("HOROVOD_NCCL_HOME") or str(nccl_package()))
    compilers = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CMAKE_PREFIX_PATH")
    parts += sorted(
        f"{k}={v}" for k, v in os.environ.items() if k.startswith("HOROVOD_") or k in compilers
    )
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    mpi_version = (re.search(r"\d+(\.\d+)+", mpi) or [mpi])[0]
    kind = "cuda" if features.cuda else "cpu"
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
    if not sum_of(wheel).exists() or sum_of(wheel).read_text().strip() != sha256(wheel):
        say(f"  the cached wheel {target.name} is not the one that was built: building it again")
        return None
    say(f"  Horovod {VERSION}: cached wheel {target.name}")
    return wheel


def build_environment(features: Features, nccl: Path) -> dict[str, str]:
    """Return the variables for Horovod's setup.py; links to NCCL go into the folder ``nccl``."""
    environment = {
        **os.environ,
        f"HOROVOD_WITH{'' if features.mpi else 'OUT'}_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        f"HOROVOD_WITH{'' if features.torch else 'OUT'}_PYTORCH": "1",
        f"HOROVOD_WITH{'' if features.tensorflow else 'OUT'}_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        **(cuda_environment(nccl) if features.cuda else {}),
    }
    # Gloo asks for a CMake that is older than what CMake 4 takes, and GCC 13 no longer brings
    # in the headers of uint8_t and std::string by others.
    environment.setdefault("CMAKE_POLICY_VERSION_MINIMUM", "3.5")
    flags = (os.environ.get("CXXFLAGS"), "-include cstdint -include string")
    environment["CXXFLAGS"] = " ".join(filter(None, flags))
    # Horovod defaults to -j8: on a small host that is more memory than there is.
    environment.setdefault("MAKEFLAGS", f"-j{os.cpu_count() or 1}")
    return environment


def build(target: Path, features: Features, archive: Path | None = None) -> Path:
    """Build the wheel and put it into ``target`` in one atomic move; return its path."""
    versions = {"torch": features.torch, "TensorFlow": features.tensorflow}
    names = " and ".join(f"{name} {version}" for name, version in versions.items() if version)
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as name:
        folder = Path(name)
        root = fetch_source(folder, archive)
        for patch, text in features.patches.items():
            apply(patch, text, root)
        run(
            f"build Horovod for {names} (5 to 20 min, once)",
            [sys.executable, "setup.py", "--quiet", "bdist_wheel", "-d", folder / "dist"],
            target.parent / f"{target.name}.log",
            "Mend what it names, then run the same command again.",
            env=build_environment(features, folder / "nccl"),
            cwd=root,
        )
        (wheel,) = (folder / "dist").glob("horovod-*.whl")
        sum_of(wheel).write_text(sha256(wheel) + "\n")
        if target.exists():
            shutil.rmtree(target)
        wheel.parent.replace(target)
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
    """Show what was built and all-reduce over two ranks, with each controller."""
    horovodrun = [sys.executable, "-m", "horovod.runner.launch"]  # wherever pip puts scripts
    answer = subprocess.run(
        [*horovodrun, "--check-build"], capture_output=True, text=True, check=False
    ).stdout
    parts = {
        "PyTorch": features.torch is not None,
        "TensorFlow": features.tensorflow is not None,
        "MPI": features.mpi,
        "Gloo": True,
        "NCCL": features.cuda,
    }
    missing = [name for name in parts if parts[name] and f"[X] {name}" not in answer]
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


def install(features: Features, cache: Path, source: Path | None = None) -> None:
    """Install Horovod for this Python, from the cache or built now, and try it on two ranks.

    ``source`` is Horovod's sdist, where it shall not be downloaded.
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
    run(
        "install the Horovod wheel",
        [*pip, "--no-deps", "--force-reinstall", str(wheel)],
        cache / "install.log",
        f"Delete {target} and run the same command again.",
    )
    check(cache, features)


def default_cache() -> Path:
    """Return where built wheels are kept, outside any checkout (``HVD_PIPE_CACHE`` moves it)."""
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HVD_PIPE_CACHE") or Path(user) / "hvd_pipe")
