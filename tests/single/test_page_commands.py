"""The commands `hvd-pipe` of README and of the pages about planning and timelines run.

`make docs-check` runs all commands, and `docs/check.py` looks up what they name.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hvd_pipe.cli.main import main
from hvd_pipe.planning.cluster import Cluster, Network
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.timeline import Event, Timeline
from tests import pages

RUN = ("README.md", "docs/planning.md", "docs/timelines.md", "docs/tutorial.md")

TRAIN = """
import torch
import hvd_pipe.torch as hvd

hvd.init()
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for step in range(1000):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages' commands read: a script, a cluster that was measured, a job's timeline."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "train.py").write_text(TRAIN)
    (folder / "tests").symlink_to(pages.ROOT / "tests")
    ring = CommModel.linear(1e-4, 1e-9)
    measured = Network(None, measured=ring, measured_workers=2)
    Cluster(2, measured).save(folder / "cluster.json")
    (folder / "run").mkdir()
    for rank in range(2):
        passes = (
            Event("0", "forward", rank, "compute", start_s=0.0, duration_s=1.2),
            Event("0", "backward", rank, "compute", start_s=1.2, duration_s=2.0),
        )
        Timeline(passes).save(folder / "run" / f"rank{rank}.json")
    return folder


@pytest.fixture(scope="module")
def ran() -> set[str]:
    """Commands that stand on more than one page run once."""
    return set()


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_commands_run(
    page: str, folder: Path, ran: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    every = pages.commands(pages.ROOT / page)
    mine = [command for command in every if command.startswith("hvd-pipe ")]
    assert mine
    for command in mine:
        if command not in ran:
            words = shlex.split(command)[1:]
            status = main.main(words, prog_name="hvd-pipe", standalone_mode=False)
            assert status in {None, 0}, f"{command} ended with status {status}"
            if "-o" in words:
                assert Path(words[words.index("-o") + 1]).stat().st_size > 0
            ran.add(command)
