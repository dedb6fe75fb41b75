#!/usr/bin/env python3
"""Build the wheel and the sdist of a release, check them, and list what they hold. No upload.

    make release        # python docker/release.py [--out dist]

CHANGELOG.md must have a section for the version. `twine check` reads the description, every module
must be in both archives, and each is installed into a new environment, where the command runs.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from hvd_pipe import __version__
from hvd_pipe.build_horovod.recipe import SetupError, run, say

ROOT = Path(__file__).resolve().parent.parent
FILES = ("CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "setup.py")
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # which the hooks change
build_meta.build_wheel(out)
build_meta.build_sdist(out)
"""


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
    """Raise unless an archive has all of the package, and the wheel nothing else."""
    package = [path for path in (ROOT / "hvd_pipe").rglob("*.*") if path.suffix != ".pyc"]
    wanted = {path.relative_to(ROOT).as_posix() for path in package}
    found = set(contents(archive))
    missing = wanted - found
    if missing:
        raise SetupError(f"{archive.name} lacks {', '.join(sorted(missing))}: see pyproject.toml.")
    others = {name for name in found - wanted if ".dist-info/" not in name}
    if archive.suffix == ".whl" and others:
        raise SetupError(f"{archive.name} has {', '.join(sorted(others))}: see pyproject.toml.")


def try_install(archive: Path, log: Path) -> None:
    """Install an archive into a new environment, and run what it brings."""
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        python = Path(name) / "venv" / "bin" / "python"
        for label, command in (
            ("a new environment", [sys.executable, "-m", "venv", Path(name) / "venv"]),
            (f"install {archive.name}", [python, "-m", "pip", "install", archive.resolve()]),
            ("hvd-pipe --help", [python.with_name("hvd-pipe"), "--help"]),
            ("the recipe", [python, "-m", "hvd_pipe.build_horovod", "--help"]),
        ):
            run(label, command, log, f"See {log}.", cwd=Path(name))
        version = [python.with_name("hvd-pipe"), "--version"]
        said = subprocess.run(version, capture_output=True, text=True, check=True).stdout
    if __version__ not in said.split():
        raise SetupError(f"{archive.name} installs {said.strip()!r}, not {__version__}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where they go (dist)")
    out = parser.parse_args().out
    require_notes((ROOT / "CHANGELOG.md").read_text(), __version__)
    archives = build(out)
    twine = [sys.executable, "-m", "twine", "check", "--strict", *map(str, archives)]
    run("twine check", twine, out / "twine.log", "Mend README.md or pyproject.toml.")
    for archive in archives:
        require_contents(archive)
        say("\n".join([f"{archive.name}:", *(f"  {name}" for name in contents(archive))]))
        try_install(archive, out / "install.log")
    for archive in archives:
        say(f"{archive}: {archive.stat().st_size / 1024:.0f} KiB, good")


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"release: {error}")
    except KeyboardInterrupt:
        sys.exit("release: interrupted. Run the same command again.")
