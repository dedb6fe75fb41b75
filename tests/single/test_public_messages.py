"""Refusals: the class and the words of each, which users meet, search for and act on.

``tests/data/frozen/messages.json`` lists the messages of all ``raise`` statements, with ``{}`` for
values, by their class and not by their place: code may move, and twins may become one. Where a
change of words is meant, this rewrites the list, and the diff is what reviewers read::

    REWRITE_FROZEN=1 python -m pytest tests/single/test_public_messages.py

Where two branches change it, take either side and rewrite it.
"""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import frozen

SOURCE = Path(__file__).parents[2] / "hvd_pipe"


def test_refusals_have_the_same_classes_and_words() -> None:
    """A message that a function hands to ``raise`` counts while its words are in the source."""
    raised: dict[str, set[str]] = defaultdict(set)
    written: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        written |= {_text(node) for node in ast.walk(tree) if isinstance(node, ast.expr)}
        for kind, text in _refusals(tree):
            raised[text].add(kind)
    found = {text: "|".join(sorted(kinds)) for text, kinds in raised.items()}
    if not frozen.rewriting():
        known = json.loads((frozen.FOLDER / "messages.json").read_text())
        found |= {text: known[text] for text in known if text not in found and text in written}
    frozen.compare("messages", found)


def test_what_counts_as_a_message() -> None:
    tree = ast.parse(
        "def f(x):\n"
        "    raise ValueError(f'got {x!r}: ' 'give 1.')\n"
        "    raise errors.Wrong('a' + str(x) + ' b') from None\n"
        "    raise click.BadParameter('on {host}'.format(host=x))\n"
        "    raise TypeError('one' if x else 'other')\n"
        "    raise KeyError(x)\n"
        "    raise\n"
    )
    assert [*_refusals(tree)] == [
        ("ValueError", "got {}: give 1."),
        ("Wrong", "a{} b"),
        ("BadParameter", "on {}"),
        ("TypeError", "one"),
        ("TypeError", "other"),
    ]


def _refusals(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the class and the message of each ``raise`` that has words."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            kind = ast.unparse(node.exc.func).rpartition(".")[2]
            for argument in node.exc.args[:1]:
                for text in map(_text, _branches(argument)):
                    if any(map(str.isalpha, text)):
                        yield kind, text


def _branches(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.IfExp):
        yield from _branches(node.body)
        yield from _branches(node.orelse)
    else:
        yield node


def _text(node: ast.expr) -> str:
    """Return an expression's words, with ``{}`` for what is known only when it is raised."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _without_names(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(each) for each in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _text(node.func.value) if node.func.attr == "format" else "{}"
    return "{}"


def _without_names(text: str) -> str:
    """Replace ``{name}`` of a format by ``{}``.

    >>> _without_names("{host}: no")
    '{}: no'
    """
    parts = text.split("{")
    return "{}".join([parts[0], *(part.partition("}")[2] for part in parts[1:])])
