"""What sets machines up: containers' scripts, `make setup`, `make matrix`, `make release`.

No engine, compiler or index is used. `docker/check.py` reads the files of images.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
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

sys.path[:0] = [os.fspath(DOCKER), os.fspath(DOCKER / "matrix")]
try:
    setup_env, matrix, release = map(importlib.import_module, ("setup_env", "matrix", "release"))
finally:
    del sys.path[:2]


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


# Stands for docker: writes down its calls, and fails where FAILS says.
ENGINE = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
[[ -z ${FAILS:-} || $* != *$FAILS* ]] || { echo "no $FAILS" >&2; exit 9; }
case $* in
  *tx_bytes) echo 1234567 ;;
  *"id -un") echo hvd ;;
esac
"""


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs OpenSSH's client")
@pytest.mark.parametrize("fails", ["", "run -d"])
def test_two_nodes_starts_trains_and_clears_up(fails: str, tmp_path: Path) -> None:
    engine, log, temporary = tmp_path / "engine", tmp_path / "calls", tmp_path / "tmp"
    engine.write_text(ENGINE)
    engine.chmod(0o755)
    temporary.mkdir()
    variables = {"ENGINE": os.fspath(engine), "CALLS": os.fspath(log), "FAILS": fails}
    done = subprocess.run(
        ["bash", DOCKER / "two_nodes.sh", "--gloo"],
        env={**os.environ, **variables, "TMPDIR": os.fspath(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == (not fails), done.stderr
    calls = re.sub(r"hvd-pipe-\d+", "JOB", log.read_text()).splitlines()
    assert ("horovodrun -np 2 -H node1:1,node2:1 -p 2222 --gloo" in " ".join(calls)) == (not fails)
    assert calls[-2:] == ["rm -f JOB-node1 JOB-node2", "network rm JOB"]
    assert not list(temporary.iterdir())


def test_the_demo_needs_torch_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod builds in half the time without TensorFlow, which the tests then add."""
    commands: list[str] = []

    def run(command: list[object], **_: object) -> object:
        commands.append(" ".join(str(part) for part in command[1:]))
        return SimpleNamespace(returncode=0)

    def install(_: str, command: list[object], *__: object, **___: object) -> None:
        text = " ".join(str(part) for part in command)
        commands.append(text)
        if "tensorflow-cpu==" in text:
            site = tmp_path / "lib" / "python3.11" / "site-packages"
            (site / "tensorflow").mkdir(parents=True, exist_ok=True)

    def make(*options: str) -> str:
        commands.clear()
        monkeypatch.setattr(sys, "argv", ["setup_env.py", "--venv", str(tmp_path), *options])
        setup_env.main()
        return "\n".join(commands)

    monkeypatch.setattr(setup_env, "missing_packages", list)
    monkeypatch.setattr(setup_env, "slurm_packages", lambda _: commands.append("Slurm"))
    monkeypatch.setattr(setup_env, "install_torch", lambda *_: None)
    monkeypatch.setattr(setup_env, "run", install)
    monkeypatch.setattr(setup_env.subprocess, "run", run)
    done = make("--torch-only")
    assert not [word for word in ("tensorflow", ",dev", "Slurm") if word in done]
    assert done.endswith("-m hvd_pipe.build_horovod")
    assert make("--torch-only") == ""
    done = make()
    assert all(word in done for word in ("tensorflow-cpu==", "[mpi,plot,dev,docs]", "Slurm"))
    assert done.endswith("-m hvd_pipe.build_horovod")
    assert make() == make("--torch-only") == ""


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


def test_the_matrix_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = matrix.CELLS[:2]
    tried: list[str] = []

    def try_cell(cell: Any, wheel: Path, work: Path) -> dict[str, str]:
        tried.append(cell.name)
        if cell == second:
            raise matrix.SetupError("Horovod failed: no compiler. Its log says more.")
        return dict.fromkeys(("python", "torch", "tensorflow", "keras", "numpy"), "1")

    monkeypatch.setattr(matrix, "try_cell", try_cell)
    monkeypatch.setattr(matrix, "build", lambda out: (out / "wheel", out / "sdist"))
    assert not matrix.carry_out([first, second], tmp_path)
    assert not matrix.carry_out([first, second], tmp_path)
    assert tried == [first.name, second.name, second.name]
    monkeypatch.setattr(matrix, "sources", lambda: "others")
    assert matrix.carry_out([first], tmp_path)


@pytest.mark.nightly  # setuptools builds both archives; make release checks them, too
def test_the_archives_hold_the_package_with_the_recipe(tmp_path: Path) -> None:
    archives = release.build(tmp_path)
    version = hvd_pipe.__version__
    names = [archive.name for archive in archives]
    assert names == [f"hvd_pipe-{version}-py3-none-any.whl", f"hvd_pipe-{version}.tar.gz"]
    for archive in archives:
        release.require_contents(archive)
        assert "hvd_pipe/build_horovod/patches/lost-rank.patch" in release.contents(archive)
    with zipfile.ZipFile(archives[0], "a") as wheel:
        wheel.writestr("tests/test_a.py", "")
    with pytest.raises(release.SetupError, match=r"has tests/test_a\.py: see"):
        release.require_contents(archives[0])


def test_a_version_without_a_section_is_refused() -> None:
    release.require_notes("# Changelog\n\n## [0.2.0] - 2026-11-23\n\n- new\n", "0.2.0")
    for heading in ("## [Unreleased]", "## [0.2.0rc1]", "## [10.2.0]", "### [0.2.0]"):
        with pytest.raises(release.SetupError, match=r"no section '## \[0\.2\.0\]'"):
            release.require_notes(f"# Changelog\n\n{heading}\n", "0.2.0")
