"""The set-up script: what it installs, and what it names where it may not."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from benchmarks.slurm import TOOLS

DOCKER = Path(__file__).parent.parent.parent / "docker"


def script(name: str) -> ModuleType:
    sys.path.insert(0, str(DOCKER))
    try:
        spec = importlib.util.spec_from_file_location(name, DOCKER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(DOCKER))
    return module


setup_env = script("setup_env")


@pytest.mark.parametrize("first", ["demo", "test"])
def test_the_demo_needs_torch_alone(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Horovod builds in half the time without TensorFlow, which the tests then add."""
    commands: list[str] = []

    def run(command: list[object], **_: object) -> object:
        commands.append(" ".join(str(part) for part in command[1:]))
        return SimpleNamespace(returncode=0)

    def install(_: str, command: list[object], *__: object, **___: object) -> None:
        text = " ".join(str(part) for part in command)
        commands.append(text)
        if "tensorflow-cpu==" in text:
            (tmp_path / "lib" / "python3.11" / "site-packages" / "tensorflow").mkdir(
                parents=True, exist_ok=True
            )

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
    if first == "demo":
        done = make("--torch-only")
        assert "tensorflow" not in done
        assert ",dev" not in done
        assert "Slurm" not in done
        assert done.endswith("-m hvd_pipe.build_horovod")
        assert make("--torch-only") == ""
    done = make()
    assert "tensorflow-cpu==" in done
    assert "[mpi,plot,dev,docs]" in done
    assert "Slurm" in done
    assert done.endswith("-m hvd_pipe.build_horovod")
    assert make() == make("--torch-only") == ""
    (tmp_path / "hvd_pipe-setup").write_text("of an older checkout")
    assert make("--torch-only").endswith("-m hvd_pipe.build_horovod")


def test_without_root_the_missing_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env, "missing_packages", lambda: ["openmpi-bin", "libopenmpi-dev"])
    monkeypatch.setattr(setup_env.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(setup_env.shutil, "which", lambda _: "/usr/bin/apt-get")
    with pytest.raises(setup_env.SetupError, match=r"sudo apt-get .* openmpi-bin libopenmpi"):
        setup_env.system_packages(tmp_path / "log")


def slurm(packages: list[str], user: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(setup_env.system, "missing_packages", lambda more: packages)
    monkeypatch.setattr(setup_env.os, "geteuid", lambda: user)
    monkeypatch.setattr(setup_env.shutil, "which", lambda _: "/usr/bin/apt-get")
    monkeypatch.setattr(setup_env, "POLICY", tmp_path / "policy-rc.d")
    setup_env.slurm_packages(tmp_path / "log")


def test_slurm_is_installed_and_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = []

    def run(_: str, command: list[str], *__: object, **___: object) -> None:
        policy = tmp_path / "policy-rc.d"
        policies.append((command[1], policy.stat().st_mode & 0o777, policy.read_text()))

    monkeypatch.setattr(setup_env, "run", run)
    slurm([], 0, monkeypatch, tmp_path)
    assert not policies
    slurm(["munge", "slurmd"], 0, monkeypatch, tmp_path)
    told = "#!/bin/sh\nexit 101\n"
    assert policies == [("update", 0o755, told), ("install", 0o755, told)]
    assert not (tmp_path / "policy-rc.d").exists()


@pytest.mark.parametrize("nvidia", [False, True])
def test_a_cpu_machine_never_gets_the_cuda_build_of_torch(
    nvidia: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip's own report decides: a build that requires nvidia packages is fetched by uv instead."""
    needs = ["filelock", *(["nvidia-nccl-cu13==2.29"] if nvidia else [])]
    report = f'{{"install": [{{"metadata": {{"requires_dist": {needs!r}}}}}]}}'.replace("'", '"')
    commands: list[list[str]] = []

    class Answer:
        returncode, stdout, stderr = 0, report, ""

    monkeypatch.setattr(setup_env.subprocess, "run", lambda *_, **__: Answer)
    monkeypatch.setattr(setup_env, "run", lambda _, command, *__: commands.append(command))
    setup_env.install_torch(Path("python"), False, tmp_path / "log")
    last = " ".join(commands[-1])
    assert ("--torch-backend cpu" in last) == nvidia
    assert last.endswith("torch==2.13.0")


def test_the_emulated_slurm_gets_the_packages_that_it_asks_for() -> None:
    """Set-up starts before there is an environment, and cannot ask benchmarks/slurm.py."""
    assert setup_env.SLURM_TOOLS == TOOLS
