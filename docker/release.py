#!/usr/bin/env python3
"""Build the wheel and the sdist of a release, check them, and list what they hold. No upload.

    make release                    # python docker/release.py [--out dist]
    make release TRY=python3.13     # the same with --try python3.13

CHANGELOG.md must have a section for the version. `twine check` reads the description, every module
must be in both archives, and each is installed into a new environment, where the command runs.

``--try`` then does what docs/install.md tells a user of the wheel to do, with the torch that the
index has today: an empty environment, pip, `hvd-pipe build-horovod`, `hvd-pipe doctor`, and
torch_examples/digits.py on two ranks. It may be repeated, for several Pythons.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from hvd_pipe import __version__
from hvd_pipe.build_horovod.recipe import SetupError, default_cache, run, say

ROOT = Path(__file__).resolve().parent.parent
FILES = (
    *("CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "SECURITY.md"),
    *("pyproject.toml", "setup.py"),
)
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # which the hooks change
build_meta.build_wheel(out)
build_meta.build_sdist(out)
"""
VERSIONS = """
import importlib.metadata, json, platform, sys
had = {each.name: each.version for each in importlib.metadata.distributions()}
found = {name: had.get(name, "") for name in sys.argv[1:]}
print(json.dumps({"python": platform.python_version(), **found}))
"""
LOOK = "Its log says more; then run the same command again."
OURS = ("PYTHONPATH", "PIP_CONSTRAINT", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")


def require_notes(changelog: str, version: str) -> None:
    """Raise unless the changelog has a section of the version."""
    if not re.search(rf"^## \[?{re.escape(version)}\]?(\s|$)", changelog, re.MULTILINE):
        raise SetupError(
            f"CHANGELOG.md has no section '## [{version}]': write down what is new, or set "
            "__version__ in hvd_pipe/__init__.py to the version that it describes."
        )


def build(out: Path) -> tuple[Path, Path]:
    """Build the wheel and the sdist into ``out``, and return their paths.

    They are built from a copy: a folder build/ in the checkout may hold what is gone by now.
    """
    out.mkdir(parents=True, exist_ok=True)
    for old in [*out.glob("hvd_pipe-*.whl"), *out.glob("hvd_pipe-*.tar.gz")]:
        old.unlink()
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        copy = Path(name)
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "hvd_pipe", copy / "hvd_pipe", ignore=skipped)
        for each in FILES:
            shutil.copy(ROOT / each, copy)
        command = [sys.executable, "-c", BUILD, out.resolve()]
        run("build wheel and sdist", command, out / "build.log", "Run `make setup`.", cwd=copy)
    (wheel,), (sdist,) = out.glob("hvd_pipe-*.whl"), out.glob("hvd_pipe-*.tar.gz")
    return wheel, sdist


def contents(archive: Path) -> list[str]:
    """Return the files of a wheel, or those of an sdist below its folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return sorted(wheel.namelist())
    with tarfile.open(archive) as sdist:
        files = (member.name for member in sdist if member.isfile())
        return sorted(name.partition("/")[2] for name in files)


def require_contents(archive: Path) -> None:
    """Raise unless an archive has the package, the sdist our pages, and the wheel no more."""
    package = [path for path in (ROOT / "hvd_pipe").rglob("*.*") if path.suffix != ".pyc"]
    wanted = {path.relative_to(ROOT).as_posix() for path in package}
    wanted |= set() if archive.suffix == ".whl" else {*FILES}
    found = set(contents(archive))
    missing = wanted - found
    if missing:
        raise SetupError(f"{archive.name} lacks {', '.join(sorted(missing))}: see pyproject.toml.")
    others = {name for name in found - wanted if ".dist-info/" not in name}
    if archive.suffix == ".whl" and others:
        raise SetupError(f"{archive.name} has {', '.join(sorted(others))}: see pyproject.toml.")


@dataclass(frozen=True)
class Environment:
    """A virtual environment in a folder outside of the checkout, and what is run with it."""

    name: str
    folder: Path
    logs: Path
    variables: Mapping[str, str]

    @property
    def programs(self) -> Path:
        """Where its commands are."""
        return self.folder / "venv" / "bin"

    def make(self, interpreter: str) -> None:
        """Make it, empty, unless it is there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.programs / "python").exists():
            self.step("environment", interpreter, "-m", "venv", self.folder / "venv")

    def step(self, label: str, *command: str | Path) -> str:
        """Run a command in its folder; return the output, which the log of this label has."""
        path = self.logs / f"{label.replace(' ', '-')}.log"
        full = f"{self.name}: {label}"
        run(full, command, path, LOOK, env=self.variables, cwd=self.folder)
        return path.read_text(errors="replace")

    def versions(self, packages: Sequence[str]) -> dict[str, str]:
        """Return the version of Python and of packages, "" for one that is not there."""
        asked = self.step("versions", self.programs / "python", "-c", VERSIONS, *packages)
        return dict(json.loads(asked.strip().splitlines()[-1]))


def try_install(archive: Path, logs: Path) -> None:
    """Install an archive into a new environment, and run what it brings."""
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        made = Environment(archive.name, Path(name), logs, os.environ)
        made.make(sys.executable)
        made.step("install", made.programs / "pip", "install", archive.resolve())
        made.step("recipe", made.programs / "python", "-m", "hvd_pipe.build_horovod", "--help")
        made.step("help", made.programs / "hvd-pipe", "--help")
        said = made.step("version", made.programs / "hvd-pipe", "--version")
    if __version__ not in said.split():
        raise SetupError(f"{archive.name} installs {said.strip()!r}, not {__version__}.")


def interpreter(named: str) -> str:
    """Return the path of a Python that was named; SetupError if there is none."""
    path = shutil.which(str(Path(named).expanduser()))
    if path is None:
        raise SetupError(f"there is no {named}: name a Python, 3.11 or newer, or its path.")
    return path


def try_as_user(python: str, wheel: Path, logs: Path) -> str:
    """Do what docs/install.md says, in a new environment of a Python; return what was there.

    The environment stays where a step has failed.
    """
    name = python.strip("/").replace("/", "-")
    folder = default_cache() / "try" / name
    shutil.rmtree(folder, ignore_errors=True)
    programs = folder / "venv" / "bin"
    variables = {
        **{key: value for key, value in os.environ.items() if key not in OURS},
        # No file says where pip gets packages: PIP_INDEX_URL may.
        "PIP_CONFIG_FILE": os.devnull,
        "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    trial = Environment(name, folder, logs / f"try-{name}", variables)
    trial.make(python)
    start = time.monotonic()
    trial.step("pip install torch", "pip", "install", "torch", wheel.resolve())
    seconds = time.monotonic() - start
    size = sum(path.lstat().st_size for path in folder.rglob("*")) / 1e9
    trial.step("hvd-pipe build-horovod", "hvd-pipe", "build-horovod")
    trial.step("hvd-pipe doctor", "hvd-pipe", "doctor")
    trial.step("pip install scikit-learn", "pip", "install", "scikit-learn")
    shutil.copytree(ROOT / "torch_examples", folder / "torch_examples")
    digits = "horovodrun -np 2 python torch_examples/digits.py --epochs 1"
    if "test accuracy" not in trial.step("digits", *digits.split()):
        raise SetupError(f"{name}: digits.py says no accuracy: {trial.logs / 'digits.log'}.")
    versions = trial.versions(("torch", "numpy", "horovod", "hvd_pipe")).items()
    shutil.rmtree(folder)
    had = ", ".join(" ".join(each) for each in versions)
    return f"{had}; pip installed {size:.1f} GB in {seconds:.0f} s; all steps passed"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add, trial = parser.add_argument, "then train with it and today's torch; may be repeated"
    add("--out", type=Path, default=ROOT / "dist", help="where they go (dist)")
    add("--try", dest="pythons", action="append", default=[], metavar="PYTHON", help=trial)
    given = parser.parse_args()
    out, pythons = given.out, {name: interpreter(name) for name in given.pythons}
    require_notes((ROOT / "CHANGELOG.md").read_text(), __version__)
    archives = build(out)
    twine = [sys.executable, "-m", "twine", "check", "--strict", *map(str, archives)]
    run("twine check", twine, out / "twine.log", "Mend README.md or pyproject.toml.")
    for archive in archives:
        require_contents(archive)
        say("\n".join([f"{archive.name}:", *(f"  {name}" for name in contents(archive))]))
        try_install(archive, out.resolve() / "install")
    for archive in archives:
        say(f"{archive}: {archive.stat().st_size / 1024:.0f} KiB, good")
    for name, path in pythons.items():
        say(f"{name}: {try_as_user(path, archives[0], out.resolve())}")


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"release: {error}")
    except KeyboardInterrupt:
        sys.exit("release: interrupted. Run the same command again.")
