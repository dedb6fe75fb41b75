"""The scripts of containers, without an engine. `docker/check.py` reads the files of images."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DOCKER = ROOT / "docker"
needs_keygen = pytest.mark.skipif(
    shutil.which("ssh-keygen") is None, reason="needs OpenSSH's client"
)

sys.path.insert(0, os.fspath(DOCKER))
try:
    setup_env = importlib.import_module("setup_env")
finally:
    sys.path.remove(os.fspath(DOCKER))


def pins() -> dict[str, str]:
    lines = (DOCKER / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


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
    for arguments in ([], ["node"]):
        ran = entrypoint(tmp_path, *arguments)
        assert ran.returncode == 1
        assert ran.stderr == (
            f"entrypoint: no {tmp_path}/authorized_keys: mount the public keys that may log in "
            f"(-v FOLDER:{tmp_path}:ro).\n"
        )


@needs_keygen
def test_keys_are_made_once(tmp_path: Path) -> None:
    assert entrypoint(tmp_path, "keys").returncode == 0
    key = tmp_path / "id_ed25519"
    made = key.read_text()
    assert key.stat().st_mode & 0o077 == 0
    public = (tmp_path / "id_ed25519.pub").read_text()
    assert (tmp_path / "authorized_keys").read_text() == public
    assert entrypoint(tmp_path, "keys").returncode == 0
    assert key.read_text() == made
    assert "cannot write" in entrypoint(tmp_path / "absent", "keys").stderr


@needs_keygen
@pytest.mark.parametrize("name", ["id_ed25519", "id_rsa"])
def test_a_command_gets_the_key_under_either_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubeflow's operators mount a key as id_rsa, of whatever kind it is."""
    keys, home = tmp_path / "keys", tmp_path / "home"
    keys.mkdir()
    home.mkdir()
    (keys / name).write_text("a key")
    (keys / name).chmod(0o644)
    getent = tmp_path / "getent"  # where the entrypoint finds the user's home
    getent.write_text(f"#!/bin/sh\necho hvd:x:10001:10001::{home}:/bin/bash\n")
    getent.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert entrypoint(keys, "true").returncode == 0
    assert (home / ".ssh" / name).stat().st_mode & 0o777 == 0o600
    assert "Port 2222" in (home / ".ssh" / "config").read_text()


# Stands for docker: writes down its calls, and fails where FAILS says.
ENGINE = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
[[ -z ${FAILS:-} || $* != *$FAILS* ]] || { echo "no $FAILS" >&2; exit 9; }
case $* in
  *tx_bytes) echo 1234567 ;;
  *"id -un") echo hvd ;;
esac
"""


class Nodes:
    """A run of two_nodes.sh on an engine that only writes down what it is asked."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        engine, calls, temporary = folder / "engine", folder / "calls", folder / "tmp"
        engine.write_text(ENGINE)
        engine.chmod(0o755)
        temporary.mkdir()
        calls.write_text("")
        self.process = subprocess.run(
            ["bash", DOCKER / "two_nodes.sh", *arguments],
            env={
                **os.environ,
                "ENGINE": os.fspath(engine),
                "CALLS": os.fspath(calls),
                "TMPDIR": os.fspath(temporary),
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        text = calls.read_text()
        self.calls = re.sub(r"hvd-pipe-\d+", "JOB", text).replace(str(temporary), "").splitlines()
        self.left = list(temporary.iterdir())


@needs_keygen
def test_two_nodes_builds_starts_trains_and_clears_up(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "--gloo", "--epochs", "3", RUN_ARGS="--user root", BUILD_ARGS="--pull")
    assert nodes.process.returncode == 0, nodes.process.stderr
    assert nodes.calls[:3] == [
        "info",
        "build --pull -f docker/Dockerfile.cpu -t hvd_pipe:cpu .",
        "network create JOB",
    ]
    for node, call in zip(("node1", "node2"), nodes.calls[3:5], strict=True):
        assert call.startswith(f"run --user root -d --name JOB-{node} --hostname {node} ")
        assert call.endswith(":/keys:ro,z hvd_pipe:cpu node")
    (job,) = [call for call in nodes.calls if "horovodrun" in call]
    assert job == (
        "exec JOB-node1 horovodrun -np 2 -H node1:1,node2:1 -p 2222 --gloo "
        "python /opt/hvd_pipe/torch_examples/digits.py --plot  --epochs 3"
    )
    assert "node2 (hvd) sent 1234 kB over the network" in nodes.process.stdout
    assert nodes.calls[-2:] == ["rm -f JOB-node1 JOB-node2", "network rm JOB"]
    assert not nodes.left


@needs_keygen
@pytest.mark.parametrize("fails", ["build", "network create", "run -d", "horovodrun"])
def test_two_nodes_clears_up_when_a_step_fails(tmp_path: Path, fails: str) -> None:
    nodes = Nodes(tmp_path, FAILS=fails)
    assert nodes.process.returncode != 0
    assert f"no {fails}" in nodes.process.stderr
    assert nodes.calls[-2:] == ["rm -f JOB-node1 JOB-node2", "network rm JOB"]
    assert not nodes.left


@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("cuda", [False, True])
def test_an_image_gets_what_running_needs(
    image: bool, cuda: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(setup_env, "run", lambda _, command, *__: commands.append(command))
    monkeypatch.setattr(setup_env, "install_torch", lambda *_: None)
    setup_env.python_packages(Path("python"), cuda, not image, True, tmp_path / "log")
    last = [str(part) for part in commands[-1]]
    assert ("scikit-learn" in last and "tqdm" in last) == image
    assert last[last.index("-e") + 1] == f"{ROOT}[mpi,plot{'' if image else ',dev,docs'}]"
    # and-cuda brings CUDA 12 packages, which overwrite torch's CUDA 13 files (nvidia/nccl, cudnn)
    assert f"tensorflow{'' if cuda else '-cpu'}=={pins()['tensorflow-cpu']}" in last
