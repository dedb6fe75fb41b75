"""docs/own-strategy.md: its changes, made in a copy of the package, train by its equation."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_script

from tests.pages import ROOT, blocks

SCRIPT = Path(__file__).with_name("own_strategy.py")
ENGINE = "hvd_pipe/torch/strategies/every_second.py"


def apply(diff: str, tree: Path) -> None:
    """Make the changes of the page's diff, whose hunks have no line numbers."""
    for part in diff.split("--- a/")[1:]:
        path = tree / part.partition("\n")[0]
        for hunk in part.split("@@\n")[1:]:
            lines = hunk.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if line[0] in " -")
            new = "".join(line[1:] for line in lines if line[0] in " +")
            text = path.read_text()
            assert text.count(old) == 1, f"{path} has not once:\n{old}"
            path.write_text(text.replace(old, new))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return where a copy of the package has the page's changes."""
    shutil.copytree(ROOT / "hvd_pipe", tmp_path / "hvd_pipe")
    texts = {block.language: block.text for block in blocks(ROOT / "docs/own-strategy.md")}
    apply(texts["diff"], tmp_path)
    (tmp_path / ENGINE).write_text(texts["python"])
    return tmp_path


def test_a_strategy_of_ones_own(package: Path) -> None:
    printed = run_script(2, str(SCRIPT), env={"PYTHONPATH": str(package)})
    assert [f"rank {rank} is right" in printed for rank in (0, 1)] == [True, True], printed


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "import keras, hvd_pipe.tensorflow.keras as hvd; hvd.init(); "
            "hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), strategy='every-second')",
            "'every-second' has no engine for TensorFlow",
        ),
        ("from hvd_pipe.planning import methods; methods.parse('every-second')", "unknown method"),
    ],
)
def test_what_is_left_out_is_refused(package: Path, code: str, says: str) -> None:
    command = [sys.executable, "-c", code]  # which looks for modules in its own folder first
    ended = subprocess.run(command, cwd=package, capture_output=True, text=True, check=False)
    assert says in ended.stderr.splitlines()[-1], ended.stderr
