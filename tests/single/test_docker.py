"""What sets machines up: containers' scripts, `make setup`, `make release`.

No engine, compiler or index is used. `docker/check.py` reads the files of images.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hvd_pipe
from benchmarks.slurm import TOOLS

ROOT = Path(__file__).parent.parent.parent
DOCKER = ROOT / "docker"

sys.path.insert(0, os.fspath(DOCKER))
try:
    setup_env, release = map(importlib.import_module, ("setup_env", "release"))
finally:
    del sys.path[0]


def entrypoint(keys: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", DOCKER / "entrypoint.sh", *arguments],
        env={**os.environ, "SSH_KEYS": os.fspath(keys)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_container_without_keys_runs_commands_and_is_no_node(tmp_path: Path) -> None:
    ran = entrypoint(tmp_path, "printf", "%s|", "a b", "c")
    assert (ran.returncode, ran.stdout) == (0, "a b|c|")
    assert entrypoint(tmp_path, "false").returncode == 1
    ran = entrypoint(tmp_path, "node")
    assert ran.returncode == 1
    assert ran.stderr.startswith(f"entrypoint: no {tmp_path}/authorized_keys: mount the public")


def test_without_root_the_missing_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env, "missing_packages", lambda: ["openmpi-bin", "libopenmpi-dev"])
    monkeypatch.setattr(setup_env.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(setup_env.shutil, "which", lambda _: "/usr/bin/apt-get")
    with pytest.raises(setup_env.SetupError, match=r"sudo apt-get .* openmpi-bin libopenmpi"):
        setup_env.system_packages(tmp_path / "log")
    assert setup_env.SLURM_TOOLS == TOOLS  # there is no environment yet to ask benchmarks/slurm.py


@pytest.mark.parametrize("nvidia", [False, True])
def test_a_cpu_machine_never_gets_the_cuda_build_of_torch(
    nvidia: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip's own report decides: a build that requires nvidia packages is fetched by uv instead."""
    needs = ["filelock", *(["nvidia-nccl-cu13==2.29"] if nvidia else [])]
    report = json.dumps({"install": [{"metadata": {"requires_dist": needs}}]})
    answer = SimpleNamespace(returncode=0, stdout=report, stderr="")
    commands: list[list[str]] = []
    monkeypatch.setattr(setup_env.subprocess, "run", lambda *_, **__: answer)
    monkeypatch.setattr(setup_env, "run", lambda _, command, *__: commands.append(command))
    setup_env.install_torch(Path("python"), False, tmp_path / "log")
    assert ("--torch-backend cpu" in " ".join(commands[-1])) == nvidia


@pytest.mark.nightly  # setuptools builds both archives; make release checks them, too
def test_the_archives_hold_the_package_with_the_recipe(tmp_path: Path) -> None:
    archives = release.build(tmp_path)
    version = hvd_pipe.__version__
    names = [archive.name for archive in archives]
    assert names == [f"hvd_pipe-{version}-py3-none-any.whl", f"hvd_pipe-{version}.tar.gz"]
    for archive in archives:
        release.require_contents(archive)
        assert "hvd_pipe/build_horovod/patches/lost-rank.patch" in release.contents(archive)
    assert {"CHANGELOG.md", "SECURITY.md"} <= {*release.contents(archives[1])}
    with zipfile.ZipFile(archives[0], "a") as wheel:
        wheel.writestr("tests/test_a.py", "")
    with pytest.raises(release.SetupError, match=r"has tests/test_a\.py: see"):
        release.require_contents(archives[0])


def test_a_version_without_a_section_is_refused() -> None:
    release.require_notes("# Changelog\n\n## [0.2.0] - 2026-11-23\n\n- new\n", "0.2.0")
    for heading in ("## [Unreleased]", "## [0.2.0rc1]", "## [10.2.0]", "### [0.2.0]"):
        with pytest.raises(release.SetupError, match=r"no section '## \[0\.2\.0\]'"):
            release.require_notes(f"# Changelog\n\n{heading}\n", "0.2.0")


def test_a_trial_is_that_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkout, constraints or files of pip; a step that fails ends it, and leaves its logs."""
    steps: list[str] = []

    def run(label: str, command: list[object], log: Path, *_: str, **options: Any) -> None:
        env = options["env"]
        assert not {"PYTHONPATH", "PIP_CONSTRAINT", "PIP_FIND_LINKS"} & env.keys()
        assert env["PATH"].startswith(f"{options['cwd']}/venv/bin:")
        assert ROOT not in options["cwd"].parents
        steps.append(" ".join(map(str, command[:3])))
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(said if label.endswith("digits") else '{"torch": "2.99.0"}')

    for name in ("PYTHONPATH", "PIP_CONSTRAINT", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "/ours")
    monkeypatch.setenv("HVD_PIPE_CACHE", os.fspath(tmp_path / "cache"))
    monkeypatch.setattr(release, "run", run)
    said = "epoch 1/1: test accuracy 90.00%"
    python = release.interpreter(sys.executable)
    had = release.try_as_user(python, tmp_path / "a.whl", tmp_path / "logs")
    assert "torch 2.99.0" in had
    assert not list((tmp_path / "cache" / "try").iterdir())
    assert [step for step in steps if not step.startswith(("/", os.fspath(tmp_path)))] == [
        "pip install torch",
        "hvd-pipe build-horovod",
        "hvd-pipe doctor",
        "pip install scikit-learn",
        "horovodrun -np 2",
    ]
    said = "nothing"
    with pytest.raises(release.SetupError, match=r"says no accuracy: .*digits\.log"):
        release.try_as_user(sys.executable, tmp_path / "a.whl", tmp_path / "logs")
    with pytest.raises(release.SetupError, match=r"there is no python2\.0: name"):
        release.interpreter("python2.0")
