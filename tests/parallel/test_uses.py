"""The battery: every use works under every strategy as it should, or is refused as it should be.

``python tests/parallel/test_uses.py`` writes docs/uses.md from it.
"""

from __future__ import annotations

import re
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import uses_training
import workers_uses
from cases import of_case
from ranks import once, run_ranks
from uses import FORWARD, STRATEGIES, Use
from workers_uses import USES, Refused

PAGE = Path(__file__).parents[2] / "docs" / "uses.md"
COMMAND = "python tests/parallel/test_uses.py"

COMPILED = (  # see tests/single/test_compiled.py
    "`torch.compile` of a whole model gives autograd one function for its backward pass: all",
    "gradients come at the end, and no message travels behind the pass. Compile layer by layer",
    "(`layer.compile()`), and buckets leave during it, as they do without a compiler.",
)

results = once(lambda n: run_ranks(n, workers_uses.run, n))


def test_names_tell_uses_apart() -> None:
    names = [use.name for use in USES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("use", USES, ids=lambda use: use.name)
def test_cell(use: Use, strategy: str) -> None:
    actual = of_case(results(use.ranks), (use.name, strategy))
    if strategy in use.refused:
        for rank in actual:
            assert isinstance(rank, Refused), "it was not refused"
            assert use.refused[strategy] in rank.message
        return
    expected = use.expected(strategy, use.ranks)
    for rank, (mine, wanted) in enumerate(zip(actual, expected, strict=True)):
        assert np.shape(mine) == np.shape(wanted)
        errors = np.abs(np.subtract(mine, wanted)).reshape(len(mine), -1).max(axis=1)
        wrong = np.flatnonzero(~(errors <= use.tolerance))  # ~(<=): a NaN is wrong, too
        assert not len(wrong), (
            f"rank {rank}: {len(wrong)} of {len(errors)} rows differ, first row {wrong[0]} by "
            f"{errors[wrong[0]]:.3g}, at most by {np.nanmax(errors):.3g}"
        )
    rows = slice(-1, None) if strategy.startswith("cocod") else slice(None)
    replicas = range(use.ranks) if use.replicas is None else use.replicas
    for rank in replicas:
        assert np.array_equal(actual[rank][rows], actual[replicas[0]][rows]), "replicas differ"


@pytest.mark.parametrize("use", uses_training.USES, ids=lambda use: use.name)
def test_strategies_can_be_told_apart(use: Use) -> None:
    """A tolerance shows something only where a wrong strategy is off by more."""
    working = [each for each in STRATEGIES if each not in use.refused and each != FORWARD]
    for one, other in combinations(working, 2):
        pair = [use.expected(strategy, use.ranks)[0] for strategy in (one, other)]
        assert np.abs(np.subtract(*pair)).max() > 3 * use.tolerance, (one, other)


def test_the_page_is_up_to_date() -> None:
    assert PAGE.is_file(), f"there is no {PAGE}: `{COMMAND}` writes it"
    assert PAGE.read_text() == page(), f"{PAGE} is out of date: `{COMMAND}` writes it"


def page() -> str:
    """docs/uses.md, with the messages that the ranks have got."""
    titles = [each if each == FORWARD else each.partition(":")[0] for each in STRATEGIES]
    lines = [
        "# What works with what",
        "",
        "Each row is something that training scripts do; each column a strategy. *works* means",
        "that a test runs it on real ranks and finds the weights after every step equal to those",
        "of plain torch that plays all workers in one process by the strategy's equation.",
        "*refused* means that it raises, on every rank, with the message below the table.",
        "",
        f"`{COMMAND}` writes this page from these tests; a test fails when it is out of date.",
        "",
        f"| use | {' | '.join(titles)} |",
        f"| --- |{' --- |' * len(titles)}",
    ]
    for use in USES:
        words = ["refused" if strategy in use.refused else "works" for strategy in STRATEGIES]
        lines.append(f"| {use.name} | {' | '.join(words)} |")
    lines += ["", *COMPILED, "", "## What refusals say"]
    for use in USES:
        texts: dict[str, list[str]] = {}
        for strategy, title in zip(STRATEGIES, titles, strict=True):
            if strategy in use.refused:
                texts.setdefault(_refusal(use, strategy), []).append(title)
        if texts:
            lines += ["", f"**{use.name}**", ""]
            lines += [f"- {', '.join(who)}: {text}" for text, who in texts.items()]
    return "\n".join([*lines, ""])


def _refusal(use: Use, strategy: str) -> str:
    refused = of_case(results(use.ranks), (use.name, strategy))[0]
    assert isinstance(refused, Refused), f"{use.name} under {strategy} was not refused"
    return _first_sentence(refused.message)


def _first_sentence(message: str, most: int = 200) -> str:
    """The first sentence, on one line, without what differs from run to run.

    >>> _first_sentence("no tensor at 0x7f3a in a.b: use one. Then go on.")
    'no tensor at 0x... in a.b: use one.'
    """
    text = re.sub(r"0x[0-9a-f]+", "0x...", " ".join(message.split()))
    text = re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0]
    return text if len(text) <= most else text[: most - 3].rsplit(" ", 1)[0] + " ..."


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
    sys.stdout.write(f"wrote {PAGE}\n")
