#!/usr/bin/env python3
"""Check README, the other top pages and docs/ for what a machine can see: ``make lint``.

Links lead somewhere, tables have as many cells in each row, every page is in both tables of
contents, blocks of Python parse, what commands name exists, and the diagrams of architecture.md
are those that the code cites. Each check gives a line for each thing that is wrong.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import run_commands

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hvd_pipe.cli import script
from hvd_pipe.cli.main import main as hvd_pipe
from tests import pages

ROOT = pages.ROOT
DOCS = ROOT / "docs"
README_LINES, README_WORDS, README_LINKS = 120, 1100, 10
ELSEWHERE = ("http://", "https://", "mailto:")

FOLDERS = r"\.ci|benchmarks|docker|docs|tests|t[fo]\w+_examples"

TOC = re.compile(r"^```\{toctree\}\n(?::.*\n)*\n((?:.+\n)*)```$", re.MULTILINE)
ENTRY = re.compile(r"^(?:.* <)?([\w/-]+)>?$", re.MULTILINE)
STEP = re.compile(r"^[ |]*([GPFKD]\d+) +(\S+\.py) +([\w.]+)", re.MULTILINE)
CITATION = re.compile(r"^ *# Architecture: ([GPFKD]\d+(?:, [GPFKD]\d+)*)$")


def links() -> Iterator[str]:
    for page in pages.pages():
        for link in pages.links(page):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if link.startswith(ELSEWHERE):
                continue
            if not target.exists():
                yield f"{pages.name_of(page)}: {link}: there is no {target}"
            elif anchor and anchor not in pages.anchors(target):
                yield f"{pages.name_of(page)}: {link}: no such heading"


def rows() -> Iterator[str]:
    """A bar too many or too few moves the cells that follow into another column."""
    for page in pages.pages():
        cells = None
        for number, line in enumerate(page.read_text().splitlines(), 1):
            count = len(re.split(r"(?<!\\)\|", line)) if line.startswith("|") else None
            if None not in (cells, count) and count != cells:
                yield f"{pages.name_of(page)}:{number}: {count} cells, not {cells}: {line}"
            cells = count


def contents() -> Iterator[str]:
    """README is short, and the site's index names each page once."""
    entries = ENTRY.findall("\n".join(TOC.findall((DOCS / "index.md").read_text())))
    files = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    if sorted(entries) != sorted(files - {"index"}):
        other = sorted(files ^ {*entries, "index"})
        yield f"docs/index.md: not each page once: {other or sorted(entries)}"
    readme = ROOT / "README.md"
    text = readme.read_text()
    for what, count, most in (
        ("lines", len(text.splitlines()), README_LINES),
        ("words", len(re.findall(r"\w[\w'.-]*", text)), README_WORDS),
        ("links", len(pages.links(readme)), README_LINKS),
    ):
        if count > most:
            yield f"README.md: {count} {what}, more than {most}: move topics to docs/"


def python() -> Iterator[str]:
    for page in pages.pages():
        for block in pages.blocks(page):
            if block.language == "python":
                try:
                    ast.parse(block.text)
                except SyntaxError as error:
                    yield f"{block}: {error}"


def commands() -> Iterator[str]:
    """What commands name exists, and each command runs or says in commands.toml why it does not.

    Scripts, make targets, and commands and options of `hvd-pipe` are looked up. Nothing runs here.
    """
    phony = re.search(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = phony[1].split() if phony else []
    for page in pages.pages():
        for command in pages.commands(page):
            for wrong in _wrong(command, targets):
                yield f"{pages.name_of(page)}: {command}: {wrong}"
    yield from run_commands.wrong_entries()


def _wrong(command: str, targets: list[str]) -> Iterator[str]:
    words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
    for one, following in zip(words, [*words[1:], ""], strict=True):
        if one == words[0] == "make" and following not in targets:
            yield f"the Makefile has no target {following!r}"
        if re.match(rf"({FOLDERS})/", one) and not (ROOT / one.split("::")[0]).exists():
            yield f"there is no {one}"
    if "hvd-pipe" in words:
        after = words[words.index("hvd-pipe") + 1 :]
        ends = [i for i, word in enumerate(after) if word in {"&&", "|", ";"}]
        name, *options = after[: ends[0]] if ends else after
        group = click.Context(hvd_pipe, info_name="hvd-pipe")
        subcommand = hvd_pipe.get_command(group, name)
        if subcommand is None:
            yield f"hvd-pipe has no command {name!r}"
            return
        if isinstance(subcommand, script.Command):
            options = script.end_options(options)
        context = click.Context(subcommand, info_name=name, parent=group)
        try:
            subcommand.make_parser(context).parse_args(options)
        except click.UsageError as error:
            yield error.format_message()


def architecture() -> Iterator[str]:
    """Code cites each step of the diagrams where they say, and steps have no gaps."""
    drawn = set(STEP.findall((DOCS / "architecture.md").read_text()))
    for step, file, name in sorted(drawn ^ set(_citations())):
        where = "in no diagram" if (step, file, name) not in drawn else "not cited there"
        yield f"docs/architecture.md: {step} {file} {name}: {where}"
    for letter in "GPFKD":
        numbers = {int(step[1:]) for step, _, _ in drawn if step[0] == letter}
        if numbers != set(range(1, len(numbers) + 1)) or not numbers:
            yield f"docs/architecture.md: the steps {letter} are {sorted(numbers)}"


def _citations() -> Iterator[tuple[str, str, str]]:
    for path in sorted((ROOT / "hvd_pipe").rglob("*.py")):
        text = path.read_text()
        if "# Architecture: " in text:
            functions = _functions(ast.parse(text))
            for number, line in enumerate(text.splitlines(), 1):
                match = CITATION.match(line)
                for step in match[1].split(", ") if match else ():
                    name = functions.get(number + 1, "(no function is below the comment)")
                    yield step, path.relative_to(ROOT / "hvd_pipe").as_posix(), name


def _functions(tree: ast.AST, prefix: str = "") -> dict[int, str]:
    """The qualified names of functions by the line at which they or decorators begin."""
    names: dict[int, str] = {}
    for node in ast.iter_child_nodes(tree):
        inner = prefix
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inner = f"{prefix}{node.name}."
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if isinstance(node, ast.FunctionDef):
                names[first] = f"{prefix}{node.name}"
        names.update(_functions(node, inner))
    return names


def main() -> int:
    wrong = [
        line
        for check in (links, rows, contents, python, commands, architecture)
        for line in check()
    ]
    print(
        "\n".join(wrong) or "docs: links, tables, contents, blocks, commands and diagrams are good"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
