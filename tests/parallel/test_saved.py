"""Files that earlier versions have written: they load, and training goes on to the same bits.

``tests/data/saved`` has a folder a version. `make_saved.py` writes one; none is ever rewritten.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import frozen
import numpy as np
import pytest
import workers_keras_saved
import workers_saved
from cases import of_case
from ranks import once, run_ranks
from saved_problem import COMMANDS, PIPE_SGD, archives, document, expected, tolerance, unpack

from hvd_pipe.planning.cluster import Cluster
from hvd_pipe.planning.plan import Plan
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.stages import Partition
from hvd_pipe.strategy import MergedGradient


def cases_of(part: str, first: Sequence[Any]) -> list[Any]:
    """All that an archive's checkpoints came to, those of rank 0 on all ranks where asked for."""
    kept = {f"first {case}" for case in first}
    return [
        pytest.param(archive, case, id=f"{archive.parent.name}-{case}")
        for archive in archives(part)
        for case in expected(archive)[0]
        if case in kept or case.startswith("own ")
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Where an archive's files lie."""

    def found(archive: Path) -> Path:
        path = tmp_path_factory.getbasetemp() / "saved" / archive.parent.name / archive.name
        if not path.exists():
            unpack(archive, path)
        return path

    return found


in_torch = once(lambda folder: run_ranks(2, workers_saved.go_on_all, folder))


@pytest.mark.parametrize(("archive", "case"), cases_of("torch", workers_saved.FIRST))
def test_a_torch_run_goes_on(archive: Path, case: str, folder: Callable[[Path], Path]) -> None:
    assert_same(of_case(in_torch(folder(archive)), case), archive, case)


in_keras = once(lambda folder: run_ranks(2, workers_keras_saved.go_on_all, folder, timeout=290))


@pytest.mark.parametrize(("archive", "case"), cases_of("keras", workers_keras_saved.FIRST))
def test_a_keras_run_goes_on(archive: Path, case: str, folder: Callable[[Path], Path]) -> None:
    assert_same(of_case(in_keras(folder(archive)), case), archive, case)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("archive", archives("files"), ids=lambda archive: archive.parent.name)
def test_commands_read_files(archive: Path, command: str, tmp_path: Path) -> None:
    """Profiles, a measured cluster, timelines of jobs and of simulations."""
    unpack(archive, tmp_path)  # commands write files that others read
    text = (tmp_path / "made.json").read_text()
    if command == "simulated":
        text = text.replace('"pipe-sgd', f'"{PIPE_SGD}')
    # Since then advice ranks overlap=forward, too, and names options as they are written.
    text = text.replace("momentum, learning rate, c", "--momentum, --learning-rate, --c")
    wanted = json.loads(text)[command]
    found = document(tmp_path, COMMANDS[command].split())
    if command.startswith("profile of"):
        found["rows"] = [row for row in found["rows"] if "overlap" not in row["strategy"]]
        models = " models.py:make --input 32,3,224,224"
        found["notes"] = [text.replace(models, "") for text in found["notes"]]
    if command == "partition":  # since then a plan is chosen by what its schedule reaches
        del wanted["straight_simulated_period_s"], found["on_paper"]
        for key in ("in_transit", "simulated_s"):
            del found["partition"][key]
    lines = frozen.differences(wanted, found)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("archive", archives("files"), ids=lambda archive: archive.parent.name)
def test_files_are_read_and_written_alike(archive: Path, folder: Callable[[Path], Path]) -> None:
    path = folder(archive)
    files = {
        "plan.json": Plan,
        "partition.json": Partition,
        "cluster.json": Cluster,
        "job-torch.profile.json": ModelProfile,
        "job-keras.profile.json": ModelProfile,
    }
    for name, kind in files.items():
        made: Any = kind
        text = (path / name).read_text()
        assert made.load(path / name) == made.from_json(text), name
        assert json.loads(made.from_json(text).to_json()) == json.loads(text), name
    plan = MergedGradient(plan=str(path / "plan.json")).load_plan()
    assert plan is not None
    assert plan == Plan.load(path / "plan.json")


def assert_same(found: Sequence[Any], archive: Path, case: str) -> None:
    """Bit for bit where nothing is rounded."""
    for rank, wanted in enumerate(expected(archive)):
        np.testing.assert_allclose(found[rank], wanted[case], rtol=0, atol=tolerance(case))
