"""The release: its wheel and sdist hold all of hvd_pipe, and it refuses what is not ready.

`make release` also runs `twine check`, and installs both into new environments.
"""

import importlib
import os
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import hvd_pipe

ROOT = Path(__file__).parent.parent.parent

nightly = pytest.mark.nightly  # setuptools builds both archives; make release checks them, too

sys.path.insert(0, os.fspath(ROOT / "docker"))
try:
    release = importlib.import_module("release")
finally:
    sys.path.remove(os.fspath(ROOT / "docker"))


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return release.build(tmp_path_factory.mktemp("dist"))


@nightly
def test_the_archives_hold_the_package_with_the_recipe(archives: tuple[Path, Path]) -> None:
    version = hvd_pipe.__version__
    assert [each.name for each in archives] == [
        f"hvd_pipe-{version}-py3-none-any.whl",
        f"hvd_pipe-{version}.tar.gz",
    ]
    for archive in archives:
        release.require_contents(archive)
        found = set(release.contents(archive))
        recipe = ("__main__.py", "recipe.py", "patches/lost-rank.patch")
        assert found >= {f"hvd_pipe/build_horovod/{name}" for name in recipe}
        assert "hvd_pipe/py.typed" in found
    assert {"pyproject.toml", "README.md", "LICENSE"} <= set(release.contents(archives[1]))
    with zipfile.ZipFile(archives[0]) as wheel:
        metadata = wheel.read(f"hvd_pipe-{version}.dist-info/METADATA").decode()
        entry = wheel.read(f"hvd_pipe-{version}.dist-info/entry_points.txt").decode()
    assert f"\nVersion: {version}\n" in metadata
    assert "hvd-pipe = hvd_pipe.cli.main:main" in entry
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    assert not [line for line in required if "horovod" in line.lower()]


@nightly
def test_an_archive_that_lacks_a_module_or_has_others_is_refused(
    archives: tuple[Path, Path], tmp_path: Path
) -> None:
    wheel = tmp_path / archives[0].name
    with zipfile.ZipFile(archives[0]) as whole, zipfile.ZipFile(wheel, "w") as part:
        for name in whole.namelist():
            if name != "hvd_pipe/build_horovod/patches/gcc-14.patch":
                part.writestr(name, whole.read(name))
    with pytest.raises(
        release.SetupError, match=r"lacks hvd_pipe/build_horovod/patches/gcc-14\.patch: see"
    ):
        release.require_contents(wheel)
    with zipfile.ZipFile(wheel, "a") as part:
        part.write(archives[0], "hvd_pipe/build_horovod/patches/gcc-14.patch")
        part.writestr("tests/test_a.py", "")
    with pytest.raises(release.SetupError, match=r"has tests/test_a\.py: see"):
        release.require_contents(wheel)
    sdist = tmp_path / archives[1].name
    with tarfile.open(sdist, "w:gz") as part:
        part.add(ROOT / "LICENSE", "hvd_pipe-0/LICENSE")
    with pytest.raises(release.SetupError, match=r"tar\.gz lacks .*hvd_pipe/__init__\.py"):
        release.require_contents(sdist)


def test_a_version_without_a_section_is_refused() -> None:
    for heading in ("## [0.2.0] - 2026-11-23", "## 0.2.0", "## [0.2.0]"):
        release.require_notes(f"# Changelog\n\n{heading}\n\n- new\n", "0.2.0")
    for heading in ("## [Unreleased]", "## [0.2.0rc1]", "## [10.2.0]", "### [0.2.0]"):
        with pytest.raises(release.SetupError, match=r"no section '## \[0\.2\.0\]'"):
            release.require_notes(f"# Changelog\n\n{heading}\n", "0.2.0")
