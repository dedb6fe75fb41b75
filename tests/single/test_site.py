"""The documentation site: it builds without warnings, and its links lead somewhere.

`docs/check.py` reads the pages themselves, in `make lint`. This builds the site, as `make docs`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests import pages

pytestmark = pytest.mark.nightly  # Sphinx takes half a minute, and links are checked by make lint

DOCS = pages.ROOT / "docs"


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


def test_links_of_the_site_lead_somewhere(site: Path) -> None:
    read = {path: _Page(path) for path in site.rglob("*.html")}
    assert len(read) > len(list(DOCS.rglob("*.md")))
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


def test_the_site_needs_no_network(site: Path) -> None:
    """No page loads a script, a style sheet or a font from elsewhere."""
    loaded = re.compile(r"<(?:script|link|img)\b[^>]*\b(?:src|href)=\"(?:https?:)?//[^\"]*\"")
    for path in site.rglob("*.html"):
        assert not loaded.findall(path.read_text()), path.name
