"""Make the archive that a GPU machine without a network needs, and say what it holds.

    docker/gpu_check.sh --bundle FILE [--python 3.12] [--with numpy]

Horovod's sdist (its hash is compared), hvd_pipe as a wheel, the pure parts and compiled wheels of
what Horovod and hvd_pipe import, the kit, and the tests' reference. No torch.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from hvd_pipe.build_horovod.recipe import VERSION, fetch_source
from hvd_pipe.build_horovod.steps import SetupError, run, say
from setup_env import pin

ROOT = Path(__file__).resolve().parent.parent.parent
MOST_BYTES = 60 * 2**20
TOP = "hvd_pipe_gpu_kit"

# Beside torch and NumPy, which brings most of it; what a machine has already is not installed.
WHEELS = (
    *("cffi", "cloudpickle", "packaging", "psutil", "pycparser", "PyYAML", "setuptools", "wheel"),
    *("click", "markdown-it-py", "mdurl", "Pygments", "rich"),
)
FILES = (
    *("docker/gpu_check.sh", "docker/gpu_kit/*.py"),
    *("tests/parallel/cells.py", "tests/parallel/codec_reference.py"),
    *("tests/parallel/problem.py", "tests/parallel/reference.py", "tests/parallel/serial.py"),
    *("torch_examples/models.py", "LICENSE"),
)
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")


def files() -> list[Path]:
    """Return the checkout's files that the archive has, which must all be there."""
    found = []
    for pattern in FILES:
        paths = sorted(ROOT.glob(pattern))
        if not paths:
            raise SetupError(f"{pattern} is gone: adapt FILES in docker/gpu_kit/bundle.py.")
        found += paths
    return found


def wheel_command(names: list[str], python: str, machine: str, folder: Path) -> list[str]:
    """Return how pip fetches wheels for another Python and machine."""
    platforms = [f"--platform={name}_{machine}" for name in PLATFORMS]
    return [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--implementation=cp", f"--python-version={python}", *platforms),
        *("-d", str(folder), *map(pin, names)),
    ]


def gather(folder: Path, python: str, machine: str, more: list[str]) -> None:
    """Put what is not in the checkout into ``folder``: Horovod's source, and wheels."""
    log = folder.parent / "bundle.log"
    again = "Check the network, then run the same command again."
    fetch_source(folder.parent)
    sdist = f"horovod-{VERSION}.tar.gz"
    (folder.parent / sdist).rename(folder / sdist)
    wheels = folder / "wheels"
    command = wheel_command([*WHEELS, *more], python, machine, wheels)
    run(f"download wheels for Python {python}", command, log, again)
    copy = folder.parent / "source"  # a folder build/ in the checkout may hold what is gone by now
    shutil.copytree(ROOT / "hvd_pipe", copy / "hvd_pipe")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    run("build hvd_pipe's wheel", [*build, "-w", str(wheels), str(copy)], log, again)


def write(archive: Path, folder: Path) -> int:
    """Write the archive and return its size.

    Raises:
        SetupError: It is larger than a GPU machine may be given.
    """
    with tarfile.open(archive, "w:gz") as out:
        for path in files():
            out.add(path, f"{TOP}/{path.relative_to(ROOT)}")
        for path in sorted(each for each in folder.rglob("*") if each.is_file()):
            out.add(path, f"{TOP}/{path.relative_to(folder)}")
    size = archive.stat().st_size
    if size > MOST_BYTES:
        archive.unlink()
        raise SetupError(f"{size / 2**20:.1f} MiB is more than {MOST_BYTES >> 20}: fewer --with.")
    return size


def main() -> None:
    parser = argparse.ArgumentParser(prog="gpu_check.sh --bundle")
    parser.add_argument("file", type=Path, help="the archive, a .tar.gz")
    parser.add_argument("--python", default="3.12", help="the GPU machine's Python")
    parser.add_argument("--machine", default="x86_64", help="the GPU machine's processor")
    parser.add_argument("--with", dest="more", action="append", default=[], metavar="NAME")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bundle-") as name:
        folder = Path(name) / "bundle"
        (folder / "wheels").mkdir(parents=True)
        gather(folder, arguments.python, arguments.machine, arguments.more)
        size = write(arguments.file, folder)
    say(f"{arguments.file}: {size / 2**20:.1f} MiB. On the GPU machine:")
    say(f"  tar xzf {arguments.file.name} && {TOP}/docker/gpu_check.sh --out gpu-check")


if __name__ == "__main__":
    try:
        main()
    except (SetupError, subprocess.SubprocessError) as error:
        sys.exit(f"gpu_check: {error}")
