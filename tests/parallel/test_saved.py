"""Files that earlier versions have written: they load, and training goes on to the same bits.

``tests/data/saved`` has a folder a version. `make_saved.py` writes one; none is ever rewritten.
Keras' are in `test_keras_saved`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import frozen
import pytest
import saved_torch
from on_ranks import on_ranks
from saved_problem import (
    COMMANDS,
    FIRST,
    PIPE_SGD,
    archives,
    assert_same,
    cases_of,
    document,
    unpack,
    unpacked,
)

import hvd_pipe.torch as hvd
from hvd_pipe.planning.cluster import Cluster
from hvd_pipe.planning.plan import Plan
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.stages import Partition
from hvd_pipe.strategy import MergedGradient
from hvd_pipe.torch import pipedream

# nightly: codecs that keep no more than others do, and other versions of weights
NIGHTLY = "-(bf16|bf16-feedback|int8)-1-7$|(wfbp|sgd)-momentum-fp16-|-(vertical-sync|flush|gpipe)-"


@on_ranks(2, init=pipedream.init)
@pytest.mark.parametrize(("archive", "case"), cases_of("torch", FIRST, NIGHTLY))
def test_a_torch_run_goes_on(
    archive: Path, case: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    runs = saved_torch.SAVER.runs_from(unpacked(archive, tmp_path_factory))
    assert_same(runs[case](), archive, case, hvd.rank())


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
def test_files_are_read_and_written_alike(
    archive: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = unpacked(archive, tmp_path_factory)
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
