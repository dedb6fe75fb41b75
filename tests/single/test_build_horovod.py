"""Horovod's recipe: its edits, its key, what it needs, what it says, and the command.

Nothing is built here: `make setup` and `make matrix` do.
"""

import hashlib
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvd_pipe.build_horovod import recipe
from hvd_pipe.build_horovod.recipe import Features, SetupError, features_here

ROOT = Path(__file__).parent.parent.parent


ALWAYS = {"all-to-all", "cxx-standard", "gcc-14", "idle-loop", "lost-rank"}
WITH_CUDA = "debug = False\ncuda: Optional[str] = '12.1'\n"  # pip's torch is one on any machine


@pytest.mark.parametrize(
    ("features", "version", "more"),
    [
        (Features("2.13.0", None), "", set()),
        (Features("2.13.0", "2.15.1", cuda=True), "", set()),
        (Features("2.13.0", "2.21.0"), "", {"tensorflow-without-xla"}),
        (
            Features("2.13.0", "2.21.0", cuda=True),
            WITH_CUDA,
            {"tensorflow-without-xla", "tensorflow-cuda-stream"},
        ),
        (Features("2.4.1", None), WITH_CUDA, {"torch-without-cuda"}),
        (Features("2.4.1", None), "cuda: Optional[str] = None\n", set()),
        (Features(None, "2.16.2"), WITH_CUDA, {"tensorflow-without-xla"}),
    ],
)
def test_the_patches_follow_torch_and_tensorflow(
    features: Features, version: str, more: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"version.py": version, "utils/cpp_extension.py": "-std=c++20"}
    monkeypatch.setattr(recipe, "_of_torch", files.__getitem__)
    patches = features.patches
    assert set(patches) == ALWAYS | more
    standard = 20 if features.torch else 17
    assert patches["cxx-standard"].count(f"+set(CMAKE_CXX_STANDARD {standard})") == 1
    assert all(text.startswith("--- a/") for text in patches.values())


PATCHES = sorted((ROOT / "hvd_pipe" / "build_horovod" / "patches").glob("*.patch"))


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_patch_does_what_git_does_or_nothing(path: Path, tmp_path: Path) -> None:
    patch = path.read_text()
    for diff in re.split(r"^--- a/", patch, flags=re.MULTILINE)[1:]:
        lines: list[str] = []
        for line in diff.splitlines()[2:]:
            if start := re.match(r"@@ -(\d+)", line):
                lines += ["filler"] * (int(start[1]) - 1 - len(lines))
            elif line[0] != "+":
                lines.append(line[1:])
        for root in ("ours", "git"):
            source = tmp_path / root / diff.partition("\n")[0]
            source.parent.mkdir(parents=True, exist_ok=True)
            source.write_text("\n".join([*lines, "the end", ""]))
    recipe.apply(path.stem, patch, tmp_path / "ours")
    subprocess.run(["git", "apply", path], cwd=tmp_path / "git", check=True)
    for expected in (tmp_path / "git").rglob("*.*"):
        if expected.is_file():
            found = tmp_path / "ours" / expected.relative_to(tmp_path / "git")
            assert found.read_text() == expected.read_text()
    with pytest.raises(SetupError, match=f"{path.stem} does not apply to line .* Adapt it in"):
        recipe.apply(path.stem, patch, tmp_path / "ours")  # for a second time


def test_a_failing_step_says_why_and_what_to_do(tmp_path: Path) -> None:
    log = tmp_path / "log" / "step.log"
    program = "print('fine'); print('fatal error: mpi.h: No such file'); raise SystemExit(3)"
    with pytest.raises(SetupError) as caught:
        recipe.run("build it", [sys.executable, "-c", program], log, "Install libopenmpi-dev.")
    said = str(caught.value)
    assert "\n" not in said
    assert "build it failed: fatal error: mpi.h: No such file" in said
    assert str(log) in said
    assert said.endswith("Install libopenmpi-dev.")
    with pytest.raises(SetupError, match=r"build it failed: .*no-such-program.*Do that\."):
        recipe.run("build it", ["no-such-program"], log, "Do that.")


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
    with pytest.raises(SetupError):
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
    wheel.write_bytes(b"built")
    assert recipe.cached_wheel(tmp_path) is None
    recipe.sum_of(wheel).write_text(recipe.sha256(wheel) + "\n")
    assert recipe.cached_wheel(tmp_path) == wheel
    wheel.write_bytes(b"replaced")
    assert recipe.cached_wheel(tmp_path) is None
    assert "building it again" in capsys.readouterr().out


def test_the_key_names_all_that_a_wheel_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels lie outside of checkouts under it, for years."""
    answers = {"mpirun": "mpirun (Open MPI) 4.1.4", "c++": "c++ 12.2.0", "nvcc": "nvcc 13.0"}
    standard = "-std=c++17"
    monkeypatch.setattr(recipe, "_of_torch", lambda _: standard)
    monkeypatch.setattr(recipe, "output_of", lambda command: answers[Path(command[0]).name])
    monkeypatch.setattr(recipe.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(recipe.platform, "libc_ver", lambda: ("glibc", "2.36"))
    version = SimpleNamespace(major=3, minor=11)
    monkeypatch.setattr(recipe, "sys", SimpleNamespace(version="3.11.7", version_info=version))
    monkeypatch.setattr(recipe, "cuda_home", lambda: Path("/cuda"))
    monkeypatch.setattr(recipe, "nccl_package", lambda: Path("/nccl"))
    for name in list(os.environ):
        if name.startswith("HOROVOD_") or name in {"CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS"}:
            monkeypatch.delenv(name)
    monkeypatch.delenv("CMAKE_PREFIX_PATH", raising=False)
    features = Features("2.13.0+cpu", "2.21.0")
    key = recipe.cache_key(features)
    assert key == "0.28.1-cp311-cpu-torch2.13.0+cpu-tf2.21.0-mpi4.1.4-272bedf37d6d"
    cells = [Features(t, f) for t in ("2.4.1", "2.13.0", None) for f in ("2.16.2", None)]
    cells += [Features("2.13.0", None, mpi=False), Features("2.13.0", None, cuda=True)]
    keys = {key, *map(recipe.cache_key, cells)}
    monkeypatch.setenv("HOROVOD_BUILD_CUDA_CC_LIST", "90")
    keys.add(recipe.cache_key(features))
    answers["c++"] = "c++ 13.1.0"
    keys.add(recipe.cache_key(features))
    standard = "-std=c++20"
    keys.add(recipe.cache_key(features))
    assert len(keys) == len(cells) + 4
    assert "torchnone-tf2.16.2" in recipe.cache_key(Features(None, "2.16.2"))


# What it finds, and what it says


def test_it_builds_for_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, str] = {"torch": "2.4.1", "tensorflow": "2.16.2"}
    monkeypatch.setattr(
        recipe, "installed", lambda *names: next((found[n] for n in names if n in found), None)
    )
    assert features_here() == Features("2.4.1", "2.16.2")
    assert features_here("torch", mpi=False) == Features("2.4.1", None, mpi=False)
    assert features_here("tensorflow").tensorflow == "2.16.2"
    environment = recipe.build_environment(Features("2.13.0", None, mpi=False), ROOT)
    wanted = ("WITHOUT_MPI", "WITH_GLOO", "WITH_PYTORCH", "WITHOUT_TENSORFLOW", "WITHOUT_MXNET")
    assert all(environment.get(f"HOROVOD_{name}") == "1" for name in wanted)
    del found["torch"]
    alone = features_here()
    assert (alone, alone.cxx_standard) == (Features(None, "2.16.2"), 17)
    assert recipe.build_environment(alone, ROOT)["HOROVOD_WITHOUT_PYTORCH"] == "1"
    with pytest.raises(SetupError, match=r"no torch is installed .* `pip install torch`"):
        features_here("torch")
    found.clear()
    with pytest.raises(SetupError, match="neither torch nor tensorflow is installed"):
        features_here()


def test_system_packages_that_are_missing_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe.shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(recipe.sysconfig, "get_paths", lambda: {"include": os.fspath(tmp_path)})
    every = ["python3-dev", "openmpi-bin", "libopenmpi-dev", "cmake", "g++", "make"]
    assert recipe.missing_packages() == every
    assert recipe.missing_packages(mpi=False) == ["python3-dev", "cmake", "g++", "make"]
    assert recipe.missing_packages(more={"ip": "iproute2"})[-1] == "iproute2"
    with pytest.raises(SetupError, match=r"Debian calls .* g\+\+ make: .*--without-mpi"):
        recipe.install(Features("2.13.0", None), tmp_path / "cache")
    monkeypatch.setattr(recipe.shutil, "which", lambda name, path=None: "/usr/bin/apt-get")
    monkeypatch.setattr(recipe.os, "geteuid", lambda: 1000)
    said = str(recipe.packages_error(["cmake"]))
    assert "Run: sudo apt-get install -y --no-install-recommends cmake." in said
    assert "--without-mpi" not in said


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"cannot write the cache .*Set HVD_PIPE_CACHE"):
        recipe.install(Features("2.13.0", None), tmp_path / "file" / "cache")


# How it is called


def test_it_needs_the_standard_library_alone() -> None:
    """`make setup` runs it before anything is installed: -S leaves out all that pip has put."""
    for words in (["-m", "hvd_pipe.build_horovod"], ["docker/setup_env.py"]):
        answer = subprocess.run(
            [sys.executable, "-S", *words, "--help"],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        assert "--cuda" in answer.stdout


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_an_import_without_horovod_names_the_command(framework: str) -> None:
    """It named a checkout, which whoever installed with pip does not have."""
    script = (
        "import sys\n"
        "sys.modules['horovod'] = None\n"
        f"try:\n    import hvd_pipe.{framework}\n"
        "except ImportError as error:\n    print(error)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=200
    )
    assert "run `hvd-pipe build-horovod` in this environment" in answer.stdout
    assert "checkout" not in answer.stdout
