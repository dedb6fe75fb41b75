"""The container files, as far as they can be checked without an engine."""

import difflib
import hashlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
DOCKER = ROOT / "docker"
IMAGES = ("cpu", "cuda")
needs_keygen = pytest.mark.skipif(
    shutil.which("ssh-keygen") is None, reason="needs OpenSSH's client"
)

sys.path.insert(0, os.fspath(DOCKER))
try:
    setup_env = importlib.import_module("setup_env")
    recipe = importlib.import_module("build_horovod")
finally:
    sys.path.remove(os.fspath(DOCKER))


def dockerfile(kind: str) -> str:
    return (DOCKER / f"Dockerfile.{kind}").read_text()


def pins() -> dict[str, str]:
    lines = (DOCKER / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


@pytest.mark.parametrize("kind", IMAGES)
def test_versions_are_build_arguments_whose_defaults_are_the_pins(kind: str) -> None:
    arguments = dict(re.findall(r"^ARG (\w+)_VERSION=(.+)$", dockerfile(kind), re.MULTILINE))
    assert set(arguments) == {"TORCH", "TENSORFLOW", "MPI4PY", "NUMPY"}
    named = {"TENSORFLOW": "tensorflow-cpu"}
    for name, version in arguments.items():
        package = named.get(name, name.lower())
        assert version == pins()[package]
        assert f's/^{package}==.*/{package}==${{{name}_VERSION}}/"' in dockerfile(kind)


@pytest.mark.parametrize("kind", IMAGES)
def test_the_last_build_step_proves_the_image(kind: str) -> None:
    steps = [line for line in dockerfile(kind).splitlines() if re.match(r"[A-Z]+ ", line)]
    last = [line for line in steps if line.startswith(("RUN", "USER"))][-2:]
    assert last == ["USER 10001", "RUN hvd-pipe doctor \\"]
    assert "&& horovodrun -np 2 python" in dockerfile(kind).partition("RUN hvd-pipe doctor")[2]


def test_both_images_are_made_by_one_recipe() -> None:
    """They differ in the base, in --cuda and in what NVIDIA's runtime asks for: nothing else."""
    cpu, cuda = (
        [line for line in dockerfile(kind).splitlines() if line and not line.startswith("#")]
        for kind in IMAGES
    )
    changed = [line for line in difflib.ndiff(cpu, cuda) if line[0] in "+-"]
    assert [line[2:].strip().split("=")[0] for line in changed] == [
        "ARG BASE_IMAGE",
        "ARG BASE_IMAGE",
        "ARG RUNTIME_IMAGE",
        "&& if ! python3 docker/setup_env.py --image; then \\",
        "&& if ! python3 docker/setup_env.py --image --cuda; then \\",
        "FROM ${BASE_IMAGE}",
        "FROM ${RUNTIME_IMAGE}",
        "ENV NVIDIA_VISIBLE_DEVICES",
    ]


@pytest.mark.parametrize("kind", IMAGES)
def test_no_key_is_in_an_image(kind: str) -> None:
    assert "/etc/ssh/ssh_host_*" in dockerfile(kind)  # what Debian's package made is removed
    assert "ssh-keygen" not in dockerfile(kind)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored
    copied = re.findall(r"^COPY (?!--from)(?:--\S+ )?(.+) \S+$", dockerfile(kind), re.MULTILINE)
    for name in " ".join(copied).split():
        assert name in let_in or name.split("/")[0] in let_in, f".dockerignore hides {name}"


def test_compose_agrees_with_the_image() -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    services = compose["services"]
    build = services["keys"]["build"]
    assert (DOCKER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    assert {service["image"] for service in services.values()} == {"${IMAGE:-hvd_pipe:cpu}"}
    (port,) = set(re.findall(r"SSH_PORT=(\d+)", "".join(map(dockerfile, IMAGES))))
    assert f"-p {port} " in services["node1"]["command"]
    assert services["node2"]["healthcheck"]["test"][-1].endswith(f"/{port}")
    assert services["node1"]["volumes"] == services["node2"]["volumes"] == ["keys:/keys:ro"]
    assert "ports" not in str(services)  # sshd is for the nodes, not for the world
    example = re.search(r"/opt/hvd_pipe/(\S+)", services["node1"]["command"])
    assert example is not None
    assert (ROOT / example[1]).is_file()


def test_hadolint_and_shellcheck_find_nothing() -> None:
    beside = Path(sys.executable).parent
    for command in (
        [beside / "hadolint", *(DOCKER / f"Dockerfile.{kind}" for kind in IMAGES)],
        [beside / "shellcheck", *DOCKER.glob("*.sh"), ROOT / ".ci" / "run"],
    ):
        assert command[0].exists(), f"no {command[0].name}: make setup"
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout + found.stderr


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


def test_two_nodes_takes_an_image_and_says_when_there_is_no_engine(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, FAILS="info")
    assert nodes.process.stderr == (
        "two_nodes: no container engine answers: start Docker, install podman, or set ENGINE.\n"
    )
    assert nodes.calls == ["info"]
    (tmp_path / "taken").mkdir()
    nodes = Nodes(tmp_path / "taken", IMAGE="mine:1", FAILS="horovodrun")
    assert not [call for call in nodes.calls if call.startswith("build")]
    assert [call for call in nodes.calls if call.endswith(" mine:1 node")]


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


def test_an_image_sheds_what_only_compilers_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages, log = tmp_path / "lib" / "python3.11" / "site-packages", tmp_path / "log" / "log"
    for name in ("torch/include/a.h", "torch/lib/a.so", "tensorflow/b.py", "horovod/torch/l.so"):
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).touch()
    log.parent.mkdir()
    commands: list[list[object]] = []
    monkeypatch.setattr(setup_env, "run", lambda _, command, *__: commands.append(command))
    setup_env.shrink(tmp_path, Path(sys.executable), log)
    assert not (packages / "torch" / "include").exists()
    assert (packages / "torch" / "lib" / "a.so").exists()
    assert commands == [["strip", "--strip-unneeded", packages / "horovod/torch/l.so"]]
    assert (packages / "tensorflow" / "__pycache__").is_dir()
    assert not log.parent.exists()


def test_the_cuda_build_uses_one_toolkit_and_its_libraries_find_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit, package, layout = (tmp_path / name for name in ("cuda", "nccl", "layout"))
    for name in (toolkit / "bin" / "nvcc", package / "lib" / "libnccl.so.2"):
        name.parent.mkdir(parents=True)
        name.touch()
    monkeypatch.setattr(recipe, "nccl_package", lambda: package)
    monkeypatch.setenv("HOROVOD_CUDA_HOME", os.fspath(toolkit))
    monkeypatch.setenv("LDFLAGS", "-s")
    monkeypatch.delenv("HOROVOD_NCCL_HOME", raising=False)
    environment = recipe.cuda_environment(layout)
    # torch and Horovod's CMake would each look for a toolkit by themselves, and may find another
    assert environment["CUDA_HOME"] == environment["HOROVOD_CUDA_HOME"] == os.fspath(toolkit)
    assert environment["PATH"].split(os.pathsep)[0] == os.fspath(toolkit / "bin")
    assert environment["LDFLAGS"] == f"-s -Wl,-rpath,{package}/lib"
    assert (layout / "lib" / "libnccl.so").resolve() == package / "lib" / "libnccl.so.2"


@pytest.mark.parametrize("filters", [False, True])
def test_the_source_unpacks_on_a_python_without_tar_filters(
    filters: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian 12's Python 3.11.2 has none, and extractall(filter=...) ended the build there."""
    if not filters and sys.version_info < (3, 14):  # newer ones need it themselves
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    (tmp_path / "readme").write_text("Horovod")
    name = f"horovod-{recipe.VERSION}"
    with tarfile.open(tmp_path / f"{name}.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "readme", f"{name}/readme")
    digest = hashlib.sha256((tmp_path / f"{name}.tar.gz").read_bytes()).hexdigest()
    monkeypatch.setattr(recipe, "SDIST_SHA256", digest)
    monkeypatch.setattr(recipe, "run", lambda *_: None)
    assert (recipe.fetch_source(tmp_path) / "readme").read_text() == "Horovod"


def test_the_download_is_compared_with_its_hash_before_pip_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip download` runs the setup.py of an sdist.

    The hash was compared after that: a replaced archive had run by then.
    """
    package = tmp_path / "index" / f"horovod-{recipe.VERSION}"
    package.mkdir(parents=True)
    ran = tmp_path / "ran"
    (package / "setup.py").write_text(
        f"open({os.fspath(ran)!r}, 'w')\n"
        f"from setuptools import setup\nsetup(name='horovod', version={recipe.VERSION!r})\n"
    )
    (package / "PKG-INFO").write_text(
        f"Metadata-Version: 2.1\nName: horovod\nVersion: {recipe.VERSION}\n"
    )
    archive = package.parent / f"{package.name}.tar.gz"
    with tarfile.open(archive, "w:gz") as sdist:
        sdist.add(package, package.name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", os.fspath(archive.parent))
    folder = tmp_path / "fetched"
    folder.mkdir()
    with pytest.raises(recipe.SetupError):
        recipe.fetch_source(folder)
    assert not ran.exists()
    monkeypatch.setattr(recipe, "SDIST_SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    assert (recipe.fetch_source(folder) / "setup.py").exists()
    assert ran.exists()


def test_a_cached_wheel_is_compared_with_its_sum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wheel that was cut off or replaced in the cache was installed without a look at it."""
    wheel = tmp_path / "horovod-0-py3-none-any.whl"
    assert recipe.cached_wheel(tmp_path) is None
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("horovod/__init__.py", "x = 1\n")
    kept = wheel.read_bytes()
    assert recipe.cached_wheel(tmp_path) == wheel  # kept before sums were: its archive is sound
    assert recipe.sum_of(wheel).read_text().strip() == hashlib.sha256(kept).hexdigest()
    assert "cached wheel" in capsys.readouterr().out
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("horovod/__init__.py", "x = 2\n")
    assert recipe.cached_wheel(tmp_path) is None
    assert "building it again" in capsys.readouterr().out
    recipe.sum_of(wheel).unlink()
    wheel.write_bytes(kept.replace(b"x = 1\n", b"x = 2\n"))
    assert recipe.cached_wheel(tmp_path) is None
    wheel.write_bytes(kept[:-20])
    assert recipe.cached_wheel(tmp_path) is None


def built(
    features: object, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, str], Path]:
    """What the recipe would build with: the variables, and the wheel that it has put away."""
    seen: dict[str, str] = {}

    def source(target: Path, archive: Path | None) -> Path:
        assert archive == Path("local.tar.gz")
        return target

    def command(
        _: str, words: list[object], *__: object, env: dict[str, str], **___: Path
    ) -> None:
        seen.update(env)
        made = Path(str(words[-1]))
        made.mkdir()
        (made / "horovod-0.whl").write_bytes(b"built")

    monkeypatch.setattr(recipe, "fetch_source", source)
    monkeypatch.setattr(recipe, "run", command)
    monkeypatch.setattr(recipe, "apply", lambda *_: None)
    monkeypatch.setattr(recipe, "cuda_home", lambda: Path("/cuda"))
    return seen, recipe.build(folder / "key", features, 17, Path("local.tar.gz"))


def test_one_recipe_builds_for_torch_alone_and_without_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU kit's: Gloo, PyTorch, and a GPU's tensors by way of the host."""
    features = recipe.Features(None, mpi=False, cuda=True, nccl=False)
    seen, wheel = built(features, tmp_path, monkeypatch)
    wanted = ("WITHOUT_MPI", "WITH_GLOO", "WITH_PYTORCH", "WITHOUT_TENSORFLOW", "WITHOUT_MXNET")
    assert all(seen.get(f"HOROVOD_{name}") == "1" for name in wanted)
    assert seen["HOROVOD_CUDA_HOME"] == "/cuda"
    assert "HOROVOD_GPU_OPERATIONS" not in seen
    assert wheel.read_bytes() == b"built"
    assert recipe.sum_of(wheel).read_text().strip() == hashlib.sha256(b"built").hexdigest()
    paths = {edit.path for edit in recipe.edits(17, features.release, cuda=True)}
    assert not any("tensorflow" in path for path in paths)


def test_the_set_up_builds_with_tensorflow_and_mpi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, _ = built(recipe.Features("2.21.0"), tmp_path, monkeypatch)
    assert seen["HOROVOD_WITH_MPI"] == seen["HOROVOD_WITH_TENSORFLOW"] == "1"
    assert not any(name.startswith("HOROVOD_WITHOUT_TENSORFLOW") for name in seen)
    # CMake 4 refuses what Gloo asks for, and GCC 13 has no uint8_t without its header
    assert seen["CMAKE_POLICY_VERSION_MINIMUM"] == "3.5"
    assert "-include cstdint" in seen["CXXFLAGS"]
