"""docs/own-strategy.md: its changes, made in a copy of the package, train by its equation."""

from __future__ import annotations

import shutil
from pathlib import Path

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


def test_a_strategy_of_ones_own(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "hvd_pipe", tmp_path / "hvd_pipe")
    page = blocks(ROOT / "docs/own-strategy.md")
    texts = {block.language: block.text for block in page}
    apply(texts["diff"], tmp_path)
    (tmp_path / ENGINE).write_text(texts["python"])
    printed = run_script(2, str(SCRIPT), env={"PYTHONPATH": str(tmp_path)})
    assert [f"rank {rank} is right" in printed for rank in (0, 1)] == [True, True], printed
