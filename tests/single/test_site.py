"""The documentation site: it builds without warnings, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests import pages

DOCS = pages.ROOT / "docs"
TABLE = re.compile(r"^```\{toctree\}\n(?::.*\n)*\n((?:.+\n)*)```$", re.MULTILINE)
ENTRY = re.compile(r"^(?:.* <)?([\w/-]+)>?$", re.MULTILINE)


def _entries() -> list[str]:
    """The pages that index.md lists, without the titles that it gives them."""
    return ENTRY.findall("\n".join(TABLE.findall((DOCS / "index.md").read_text())))


def test_every_page_is_in_the_table_of_contents_once() -> None:
    files = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(_entries()) == sorted(files - {"index"})


def test_pictures_are_those_of_the_script(tmp_path: Path) -> None:
    script = DOCS / "pictures" / "timelines.py"
    (tmp_path / script.name).write_text(script.read_text())
    environment = {**os.environ, "PYTHONPATH": os.fspath(pages.ROOT)}
    subprocess.run([sys.executable, tmp_path / script.name], check=True, env=environment)
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    kept = {path.name: path.read_text() for path in script.parent.glob("*.svg")}
    assert drawn == kept, "run docs/pictures/timelines.py"


class _Page(HTMLParser):
    """What a page of the site links to, and where it can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors = {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors.add(values.get("id") or "")
        self.links |= {value for key in ("href", "src") if (value := values.get(key))}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make docs` builds it."""
    recipe = (pages.ROOT / "Makefile").read_text()
    (options,) = re.findall(r"-m sphinx (.*) -d \S+ docs build/docs$", recipe, re.MULTILINE)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", *options.split(), DOCS, folder]
    done = subprocess.run(command, cwd=pages.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_links_of_the_site_lead_somewhere(site: Path) -> None:
    read = {path: _Page(path) for path in site.rglob("*.html")}
    assert len(read) > len(_entries())
    wrong = []
    for path, page in read.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.is_file() or (target in read and anchor not in read[target].anchors):
                wrong.append(f"{path.relative_to(site)}: {link}")
    assert not wrong, "\n".join(sorted(wrong))


@pytest.mark.slow
def test_the_site_needs_no_network(site: Path) -> None:
    """No page loads a script, a style sheet or a font from elsewhere."""
    loaded = re.compile(r"<(?:script|link|img)\b[^>]*\b(?:src|href)=\"(?:https?:)?//[^\"]*\"")
    for path in site.rglob("*.html"):
        assert not loaded.findall(path.read_text()), path.name


@pytest.mark.slow
def test_the_site_can_be_searched(site: Path) -> None:
    assert "overlap-forward" in (site / "searchindex.js").read_text()
