"""Build Horovod's wheel for the frameworks of this environment, keep it, install it and try it.

The wheel is kept in a cache folder, under a name made of all that it depends on, so a second
environment that agrees takes seconds.
"""

from __future__ import annotations

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
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from hvd_pipe.errors import HvdPipeError

VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
_AGAIN = "Check the network and pip's configuration, then run the same command again."

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
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=env,
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
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
        errors = [line for line in lines if _ERROR.search(line)]
        reason = next(filter(None, [*errors, *reversed(lines)]), "no output")[:300]
        raise SetupError(f"{label} failed: {reason} (whole log: {log}). {remedy}")
    say(f"  {label}: done in {time.monotonic() - start:.0f} s")


def missing_packages(mpi: bool = True, more: dict[str, str] | None = None) -> list[str]:
    """Return the system packages that a build, or one of ``more`` commands, needs and lacks."""
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


def output_of(command: Sequence[str]) -> str:
    """Return what a command prints."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(f"`{' '.join(command)}` failed: {error}. Mend it first.") from error


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


@dataclass(frozen=True)
class Features:
    """What a Horovod is built with, beside Gloo: versions of frameworks, or None for without."""

    torch: str | None
    tensorflow: str | None
    mpi: bool = True
    cuda: bool = False  # and NCCL

    @property
    def cxx_standard(self) -> int:
        """The C++ standard that the frameworks' headers need (17, 20, ...)."""
        if self.torch is None:
            return 17  # TensorFlow's, 2.16 to 2.21
        standards = re.findall(r"std[=:]c\+\+(\d\d)", _of_torch("utils/cpp_extension.py"))
        if not standards:
            raise SetupError(
                f"torch {self.torch} does not say which C++ standard it needs: adapt cxx_standard "
                "in hvd_pipe/build_horovod/recipe.py."
            )
        return max(map(int, standards))

    @property
    def hides_cuda(self) -> bool:
        """Whether torch is a CUDA build, which this Horovod will not be."""
        version = "" if self.torch is None or self.cuda else _of_torch("version.py")
        return re.search(r"^cuda\b.*=\s*['\"]", version, re.MULTILINE) is not None

    @property
    def patches(self) -> dict[str, str]:
        """The patches of Horovod's source, without the reasons above their first line."""
        release = tuple(int(part) for part in (self.tensorflow or "0.0").split(".")[:2])
        needed = {
            "cxx-standard": True,
            "gcc-14": True,
            "tensorflow-without-xla": release >= (2, 16),
            "tensorflow-cuda-stream": release >= (2, 16) and self.cuda,
            "torch-without-cuda": self.hides_cuda,
            "all-to-all": True,
            "lost-rank": True,
            "idle-loop": True,
        }
        folder = resources.files("hvd_pipe.build_horovod") / "patches"
        texts = {name: (folder / f"{name}.patch").read_text() for name in needed if needed[name]}
        return {
            name: text[text.index("--- a/") :].replace("@CXX_STANDARD@", str(self.cxx_standard))
            for name, text in texts.items()
        }


def _of_torch(file: str) -> str:
    """Read a source file of torch, which is not imported: that takes long, and may fail."""
    path = importlib.metadata.distribution("torch").locate_file(f"torch/{file}")
    return Path(str(path)).read_text()


def features_here(only: str | None = None, mpi: bool = True, cuda: bool = False) -> Features:
    """Return the features of a Horovod for the frameworks that are installed."""
    torch = None if only == "tensorflow" else installed("torch")
    tensorflow = None if only == "torch" else installed("tensorflow-cpu", "tensorflow")
    if torch is None and tensorflow is None:
        none, names = ("no ", only) if only else ("neither ", "torch nor tensorflow")
        raise SetupError(
            f"{none}{names} is installed for {sys.executable}: `pip install {only or 'torch'}` "
            "first, or run this with the Python that has it."
        )
    return Features(torch, tensorflow, mpi, cuda)


def apply(name: str, patch: str, root: Path) -> None:
    """Apply a unified diff, whose lines must all be where it says, to the source in ``root``."""
    for diff in re.split(r"^--- a/.*\n\+\+\+ b/", patch, flags=re.MULTILINE)[1:]:
        head, *hunks = re.split(r"^@@ -", diff, flags=re.MULTILINE)
        file = head.strip()
        path = root / file
        source = path.read_text().split("\n") if path.is_file() else []
        result: list[str] = []
        done = 0
        for hunk in hunks:
            place, *lines = hunk.split("\n")[:-1]
            first = re.split(r"\D", place)[0]
            begin, old = int(first) - 1, [line[1:] for line in lines if line[0] != "+"]
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
    mpi = _first_line("mpirun") if features.mpi else "none"
    torch, tensorflow = features.torch or "none", features.tensorflow or "none"
    parts = [VERSION, SDIST_SHA256, torch, tensorflow, sys.version, platform.machine()]
    parts += [" ".join(platform.libc_ver()), mpi, _first_line("c++"), *features.patches.values()]
    if features.cuda:
        parts.append(_first_line(f"{cuda_home()}/bin/nvcc"))
        parts.append(os.environ.get("HOROVOD_NCCL_HOME") or str(nccl_package()))
    compilers = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CMAKE_PREFIX_PATH")
    parts += sorted(
        f"{k}={v}" for k, v in os.environ.items() if k.startswith("HOROVOD_") or k in compilers
    )
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    mpi_version = (re.search(r"\d+(\.\d+)+", mpi) or [mpi])[0]
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    device = "cuda" if features.cuda else "cpu"
    return f"{VERSION}-{python}-{device}-torch{torch}-tf{tensorflow}-mpi{mpi_version}-{digest}"


def _first_line(program: str) -> str:
    return output_of([program, "--version"]).strip().splitlines()[0]


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
    for wheel in target.glob("horovod-*.whl"):
        if sum_of(wheel).exists() and sum_of(wheel).read_text().strip() == sha256(wheel):
            say(f"  Horovod {VERSION}: cached wheel {target.name}")
            return wheel
        say(f"  the cached wheel {target.name} is not the one that was built: building it again")
    return None


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


_CHECK = """
import {name}, horovod.{name} as hvd
hvd.init()
total = hvd.allreduce({name}.ones((1000,)) * (hvd.rank() + 1), op=hvd.Sum)
assert hvd.size() == 2 and all(float(part) == 3 for part in total), (hvd.size(), total[:3])
"""


def check(cache: Path, features: Features) -> None:
    """Show what was built and all-reduce over two ranks, with each controller."""
    horovodrun = [sys.executable, "-m", "horovod.runner.launch"]  # wherever pip puts scripts
    answer = output_of([*horovodrun, "--check-build"])
    wanted = {
        "PyTorch": features.torch is not None,
        "TensorFlow": features.tensorflow is not None,
        "MPI": features.mpi,
        "Gloo": True,
        "NCCL": features.cuda,
    }
    missing = [name for name in wanted if wanted[name] and f"[X] {name}" not in answer]
    if missing:
        raise SetupError(f"horovodrun --check-build lacks {', '.join(missing)}: logs in {cache}.")
    found = dict.fromkeys(part.strip() for part in re.findall(r"\[X\] (.+)", answer))
    say(f"  horovodrun --check-build: {', '.join(found)}")
    program = _CHECK.format(name="tensorflow" if features.torch is None else "torch")
    for controller in ("mpi", "gloo") if features.mpi else ("gloo",):
        run(
            f"all-reduce over 2 ranks ({controller})",
            [*horovodrun, "-np", "2", f"--{controller}", sys.executable, "-c", program],
            cache / f"check-{controller}.log",
            "Two local processes could not talk: check that the loopback interface is up and that "
            "this machine's own name resolves (getent hosts $(hostname)).",
        )


def install(features: Features, cache: Path, source: Path | None = None) -> None:
    """Install Horovod for this Python, from the cache or built now, and try it on two ranks."""
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
