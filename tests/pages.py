"""The Markdown pages of the project, as tests read them: headings, links and code blocks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[1]

_MARKDOWN = MarkdownIt("commonmark").enable("table")


def pages() -> list[Path]:
    """Every page that users and developers read, in the order of their names."""
    names = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
    top = [ROOT / name for name in names]
    folders = ("docs", "benchmarks", "tests", "tests/data")
    below = [page for folder in folders for page in sorted((ROOT / folder).glob("*.md"))]
    return [page for page in top if page.is_file()] + below


def name_of(page: Path) -> str:
    """The page's path from the project's root."""
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    """A block of code: its language ("" for commands), its text, and where it stands."""

    page: str
    index: int  # among the page's blocks of this language, from 0
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page} {self.language or 'commands'} {self.index}"


def blocks(page: Path) -> list[Block]:
    """The code blocks of a page. Commands are indented blocks, everything else has a fence."""
    seen: Counter[str] = Counter()
    found = []
    for token in _MARKDOWN.parse(page.read_text()):
        if token.type in {"fence", "code_block"}:
            language = token.info.strip()
            found.append(Block(name_of(page), seen[language], language, token.content))
            seen[language] += 1
    return found


def commands(page: Path) -> Iterator[str]:
    """The commands of a page, without comments and continuations."""
    for block in blocks(page):
        if block.language == "":
            for line in block.text.replace("\\\n", " ").splitlines():
                command = re.sub(r"(^|\s+)#\s.*", "", line).strip()
                if command:
                    yield command


def links(page: Path) -> list[str]:
    """Where the links and pictures of a page lead."""
    inline = [t for t in _tokens(page) if t.type in {"link_open", "image"}]
    return [str(token.attrGet("src" if token.type == "image" else "href")) for token in inline]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes from a page's headings."""
    tokens = _MARKDOWN.parse(page.read_text())
    seen: Counter[str] = Counter()
    found = set()
    for opening, heading in pairwise(tokens):
        if opening.type == "heading_open":
            words = "".join(t.content for t in heading.children or () if t.content)
            anchor = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
            found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
            seen[anchor] += 1
    return found


def _tokens(page: Path) -> Iterator[Token]:
    for token in _MARKDOWN.parse(page.read_text()):
        yield from token.children or ()
