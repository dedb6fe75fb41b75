"""docs/clients.md shows lines of the scripts in torch_examples/clients."""

from __future__ import annotations

import re

import pytest

from tests import pages

PAGE = (pages.ROOT / "docs" / "clients.md").read_text()
SECTIONS = {
    name: section
    for section in PAGE.split("\n## ")
    for name in re.findall(r"^`torch_examples/clients/(\w+\.py)`", section, re.MULTILINE)
}
SCRIPTS = sorted(path.name for path in (pages.ROOT / "torch_examples" / "clients").glob("*.py"))


def test_every_script_has_a_section() -> None:
    assert sorted([*SECTIONS, "small_data.py"]) == SCRIPTS


@pytest.mark.parametrize("name", SECTIONS)
def test_the_lines_to_add_are_lines_of_the_script(name: str) -> None:
    [block] = re.findall(r"^```diff\n(.*?)^```", SECTIONS[name], re.MULTILINE | re.DOTALL)
    script = (pages.ROOT / "torch_examples" / "clients" / name).read_text()
    lines = {line.strip().removesuffix(",") for line in script.splitlines()}
    added = {line[1:].strip().removesuffix(",") for line in block.splitlines() if line[0:1] == "+"}
    assert added - {""} <= lines
