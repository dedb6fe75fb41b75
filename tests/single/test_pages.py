"""README, docs/ and CONTRIBUTING: links lead somewhere, and README stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import pages

ELSEWHERE = ("http://", "https://", "mailto:")
README_LINES = 180

# Pages of the site that README need not name: what stands elsewhere, and what strategies.md lists.
ON_THE_SITE = {
    *(f"docs/{name}.md" for name in ("index", "benchmarks", "changelog", "contributing", "tests")),
    *(f"docs/{name}.md" for name in ("merged-gradient", "pipe-sgd", "cocod", "auto")),
}


@pytest.mark.parametrize("page", pages.pages(), ids=pages.name_of)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in pages.links(page):
        if link.startswith(ELSEWHERE):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            wrong.append(f"{link}: there is no {target}")
        elif anchor and anchor not in pages.anchors(target):
            wrong.append(f"{link}: its anchors are {sorted(pages.anchors(target))}")
    assert not wrong, "\n".join(wrong)


def test_every_page_is_linked_from_readme() -> None:
    linked = {link.partition("#")[0] for link in pages.links(pages.ROOT / "README.md")}
    missing = {pages.name_of(page) for page in (pages.ROOT / "docs").glob("*.md")} - linked
    missing -= {"docs/gpu-check-cpu.md"}  # the output of a command, linked from docs/gpu-check.md
    missing -= ON_THE_SITE
    assert not missing, f"README's table of pages lacks {sorted(missing)}"


def test_readme_is_short() -> None:
    lines = len((pages.ROOT / "README.md").read_text().splitlines())
    assert lines <= README_LINES, f"README has {lines} lines: move topics to pages under docs/"


def test_anchors_are_those_of_github(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A, `b_c` & d-e\n\n## What?\n\n## What?\n\n    # no heading\n")
    assert pages.anchors(page) == {"a-b_c--d-e", "what", "what-1"}


def test_blocks_are_found_with_their_language() -> None:
    page = pages.ROOT / "docs" / "pytorch.md"
    languages = [(block.language, block.index) for block in pages.blocks(page)]
    assert languages[:2] == [("python", 0), ("python", 1)]


@pytest.mark.parametrize("page", pages.pages(), ids=pages.name_of)
def test_rows_of_a_table_have_as_many_cells(page: Path) -> None:
    """A bar too many or too few moves the cells that follow into another column."""
    cells = None
    for number, line in enumerate(page.read_text().splitlines(), 1):
        found = len(re.split(r"(?<!\\)\|", line)) if line.startswith("|") else None
        assert cells is None or found in {None, cells}, f"{pages.name_of(page)}:{number}: {line}"
        cells = found
