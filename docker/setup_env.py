#!/usr/bin/env python3
"""Make the environment that ``make demo`` and ``make test`` run in: everything, or a clear line.

System packages (installed when root, named otherwise), a virtual environment, the pinned Python
packages, Horovod (hvd_pipe/build_horovod) and this project. A second run takes no time.

    python3 docker/setup_env.py [--venv .venv] [--cuda] [--image | --torch-only]

``make demo`` needs torch alone, for which Horovod builds in half the time; a later run without
``--torch-only`` adds TensorFlow and the tools for developing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from hvd_pipe.build_horovod import recipe
from hvd_pipe.build_horovod.recipe import SetupError, run, say

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "docker" / "constraints.txt"
AGAIN = "Check the network, then run the same command again."

# For the emulated cluster (benchmarks/cluster.py), which only root can have.
ROOT_TOOLS = {"ip": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client"}
# For the tests of batch scripts (benchmarks/slurm.py): all else works without.
SLURM_TOOLS = {
    "munged": "munge",
    "sbatch": "slurm-client",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
}

# Debian's packages start their daemons unless this program ends with 101.
POLICY = Path("/usr/sbin/policy-rc.d")

# What torch_examples/ needs beyond hvd_pipe itself: an image has it without the other tools.
EXAMPLES = ("scikit-learn",)


def missing_packages() -> list[str]:
    """Return the system packages that are missing for the build, the tests and an environment."""
    packages = recipe.missing_packages(more=ROOT_TOOLS if os.geteuid() == 0 else {})
    probe = "import venv, ensurepip"
    if subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False).returncode:
        packages.append("python3-venv")
    return packages


def system_packages(log: Path) -> None:
    packages = missing_packages()
    if not packages:
        say("  system packages: all there")
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise recipe.packages_error(packages)
    apt_install(packages, log)
    still = missing_packages()
    if still:
        raise SetupError(f"still missing after apt-get: {' '.join(still)}: install by hand.")


def apt_install(packages: list[str], log: Path) -> None:
    install = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run("apt-get update", ["apt-get", "update"], log, AGAIN, env=environment)
    run(f"apt-get install {' '.join(packages)}", install, log, AGAIN, env=environment)


def slurm_packages(log: Path) -> None:
    """Install Slurm for its tests, or say that they will be skipped."""
    packages = recipe.missing_packages(more=SLURM_TOOLS)  # all others are there by now
    if not packages:
        return
    skipped = f"  tests of Slurm will be skipped without {' '.join(packages)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        say(skipped)
        return
    try:
        with no_daemons():
            apt_install(packages, log)
    except SetupError as error:
        say(f"{skipped}: {error}")


@contextmanager
def no_daemons() -> Iterator[None]:
    """Have packages that are installed meanwhile start no daemon: tests start their own."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    try:
        POLICY.chmod(0o755)
        yield
    finally:
        POLICY.unlink()


def pin(name: str) -> str:
    """Return ``name==version`` as docker/constraints.txt has it."""
    for line in CONSTRAINTS.read_text().splitlines():
        if line.startswith(f"{name}=="):
            return line.strip()
    raise SetupError(f"docker/constraints.txt does not pin {name}.")


def install_torch(python: Path, cuda: bool, log: Path) -> None:
    """Install the pinned torch; on a CPU machine never the gigabytes of CUDA packages.

    pip is asked first what it would take. Where that is a CPU build (it requires no CUDA package),
    it is taken; otherwise uv, which knows where PyTorch keeps its CPU builds, fetches one.
    """
    requirement = pin("torch")
    constraints = ["-c", os.fspath(CONSTRAINTS)]
    command = [os.fspath(python), "-m", "pip", "install", *constraints, requirement]
    if not cuda:
        asked = subprocess.run(
            [*command, "--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-"],
            capture_output=True,
            text=True,
            check=False,
        )
        if asked.returncode != 0:
            reason = (asked.stderr.strip().splitlines() or ["no answer"])[-1]
            raise SetupError(f"pip finds no {requirement}: {reason}. {AGAIN}")
        metadata = json.loads(asked.stdout)["install"][0]["metadata"]
        needs = " ".join(metadata.get("requires_dist", []))
        if "nvidia-" in needs or "cuda-" in needs:
            run(
                "install uv (it finds torch's CPU build)",
                [python, "-m", "pip", "install", "uv", "-c", CONSTRAINTS],
                log,
                AGAIN,
            )
            command = [
                os.fspath(python),
                "-m",
                "uv",
                "pip",
                "install",
                "--torch-backend",
                "cpu",
                "--python",
                os.fspath(python),
                *constraints,
                requirement,
            ]
    run(
        f"install {requirement}",
        command,
        log,
        "Put a CPU wheel where pip finds it (PIP_FIND_LINKS), or run with CUDA=1.",
    )


def python_packages(python: Path, cuda: bool, tools: bool, tensorflow: bool, log: Path) -> None:
    pip = [os.fspath(python), "-m", "pip", "install", "-c", os.fspath(CONSTRAINTS)]
    run("install build tools", [*pip, "setuptools", "wheel", "packaging"], log, AGAIN)
    install_torch(python, cuda, log)
    # Without [and-cuda]: its CUDA 12 packages would overwrite files of torch's CUDA 13 ones.
    release = pin("tensorflow-cpu").replace("-cpu", "" if cuda else "-cpu")
    wanted = [release] if tensorflow else []
    run(
        f"install {', '.join([*wanted, 'mpi4py'])} and the rest",
        [
            *pip,
            "--no-build-isolation",
            *wanted,
            *recipe.PYTHON_PACKAGES,
            "-e",
            *([f"{ROOT}[mpi,plot,dev,docs]"] if tools else [f"{ROOT}[mpi,plot]", *EXAMPLES]),
        ],
        log,
        AGAIN,
    )


def has_tensorflow(venv: Path) -> bool:
    return any(venv.glob("lib/python3*/site-packages/tensorflow"))


def shrink(venv: Path, python: Path, log: Path) -> None:
    """Take out of an image's environment what only compilers, debuggers and builders read."""
    (packages,) = venv.glob("lib/python3*/site-packages")
    for name in ("tensorflow", "torch"):
        shutil.rmtree(packages / name / "include", ignore_errors=True)
    for library in (packages / "horovod").rglob("*.so"):
        run(f"strip {library.name}", ["strip", "--strip-unneeded", library], log, AGAIN)
    # Whoever runs the image may not write here, and would compile all this at every start.
    compiled = [python, "-m", "compileall", "-q", "-j", "0", packages]
    subprocess.run(compiled, check=False, stdout=subprocess.DEVNULL)  # templates do not compile
    shutil.rmtree(log.parent)


def fingerprint(cuda: bool, image: bool, torch_only: bool) -> str:
    """Hash the files that decide what gets installed; the stamp in the environment holds it."""
    digest = hashlib.sha256(f"{sys.version} {ROOT} {cuda} {image} {torch_only}".encode())
    for path in [
        Path(__file__),
        *sorted((ROOT / "hvd_pipe" / "build_horovod").rglob("*.p*[yh]")),
        CONSTRAINTS,
        ROOT / "pyproject.toml",
        ROOT / "setup.py",
    ]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where it goes")
    parser.add_argument("--cuda", action="store_true", help="CUDA builds, Horovod with NCCL")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument(
        "--image", action="store_true", help="what running needs, without the tools for developing"
    )
    parts.add_argument(
        "--torch-only", action="store_true", help="what running needs, without TensorFlow"
    )
    arguments = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 - this script meets any Python
        raise SetupError(
            f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: "
            "make PYTHON=python3.11 ..."
        )
    venv, cuda, image = arguments.venv.resolve(), arguments.cuda, arguments.image
    # What has TensorFlow keeps a Horovod for it.
    torch_only = arguments.torch_only and not has_tensorflow(venv)
    ready = f"environment {venv.name}: ready. To use it: source {venv.name}/bin/activate"
    stamp, made_of = venv / "hvd_pipe-setup", fingerprint(cuda, image, torch_only)
    enough = {made_of, fingerprint(cuda, image, torch_only=False)}
    if stamp.is_file() and stamp.read_text() in enough and not missing_packages():
        say(ready)
        return
    log, python = venv / "log" / "setup.log", venv / "bin" / "python"
    stamp.unlink(missing_ok=True)
    say("[1/4] system packages")
    system_packages(log)
    if not (image or torch_only):
        slurm_packages(log)
    say("[2/4] virtual environment")
    if not python.exists():
        run(
            f"create {venv.name}",
            [sys.executable, "-m", "venv", venv],
            log,
            "Is python3-venv installed?",
        )
    say("[3/4] Python packages")
    python_packages(python, cuda, not (image or torch_only), not torch_only, log)
    say("[4/4] Horovod")
    build = [python, "-m", "hvd_pipe.build_horovod", *(["--cuda"] if cuda else [])]
    if subprocess.run(build, check=False).returncode != 0:
        sys.exit(1)  # the recipe has said why
    if image:
        shrink(venv, python, log)
    stamp.write_text(made_of)
    say(ready)


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"setup: {error}")
    except KeyboardInterrupt:
        sys.exit("setup: interrupted. Run the same command again.")
