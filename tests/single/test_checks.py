"""What the checks of ``make lint`` are made of: schemas of manifests, anchors and blocks of pages.

That they find nothing wrong here is for ``make lint`` to see, and that they find what is wrong for
these tests.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
from pathlib import Path

import pytest
import yaml

from tests import pages

sys.path.insert(0, os.fspath(pages.ROOT / "docker"))
try:
    check = importlib.import_module("check")
finally:
    sys.path.remove(os.fspath(pages.ROOT / "docker"))

DOCUMENTS = {
    document["kind"]: document
    for path in sorted(check.MANIFESTS.glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
}
FREE = ("labels", "limits")
"""Mappings whose keys are the user's."""
of_each_kind = pytest.mark.parametrize("kind", DOCUMENTS)


@pytest.mark.parametrize("kind", check.MODELS)
def test_a_field_that_no_schema_knows_is_refused_everywhere(kind: str) -> None:
    assert not list(check.unknown(kind, DOCUMENTS[kind]))
    for number in range(len(list(check.places(DOCUMENTS[kind])))):
        document = copy.deepcopy(DOCUMENTS[kind])
        places = list(check.places(document))
        if any(places[number] is each.get(name) for each in places for name in FREE):
            continue
        places[number]["replica"] = 1
        assert list(check.unknown(kind, document)), places[number]


@of_each_kind
def test_a_value_of_another_type_is_refused(kind: str) -> None:
    text = yaml.safe_dump(DOCUMENTS[kind])
    changed = [
        text.replace(right, wrong)
        for right, wrong in (
            ("- node", "- 3"),
            ("numNodes: 2", "numNodes: two"),
            ("'2222'", "2222"),
        )
        if right in text
    ]
    assert changed
    for each in changed:
        assert "validation error" in "".join(check.unknown(kind, yaml.safe_load(each)))


def test_anchors_are_those_of_github(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A, `b_c` & d-e\n\n## What?\n\n## What?\n\n    # no heading\n")
    assert pages.anchors(page) == {"a-b_c--d-e", "what", "what-1"}


def test_blocks_are_found_with_their_language(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "ROOT", tmp_path)  # pages are named from there
    page = tmp_path / "page.md"
    page.write_text(
        "    make  # all\n\n```python\n1\n```\n\n- ```yaml\n  a: 1\n  ```\n\n```python\n2\n```\n"
    )
    assert pages.blocks(page) == [
        pages.Block("page.md", 0, "", "make  # all\n"),
        pages.Block("page.md", 0, "python", "1\n"),
        pages.Block("page.md", 0, "yaml", "a: 1\n"),
        pages.Block("page.md", 1, "python", "2\n"),
    ]
    assert list(pages.commands(page)) == ["make"]
