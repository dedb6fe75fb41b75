"""The battery: every use works under every strategy as it should, or is refused as it should be.

``python tests/parallel/test_uses.py`` writes docs/uses.md from it.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import public_optimizers
import pytest
import uses_state
import uses_training
from on_ranks import on_ranks
from ranks import run_ranks
from trajectories import compare
from uses import FORWARD, STRATEGIES, Use
from uses_common import PROCESS_SETS

import hvd_pipe.torch as hvd
from hvd_pipe.errors import HvdPipeError

PAGE = Path(__file__).parents[2] / "docs" / "uses.md"
COMMAND = "python tests/parallel/test_uses.py"

COMPILED = (  # see tests/single/test_compiled.py
    "`torch.compile` of a whole model gives autograd one function for its backward pass: all",
    "gradients come at the end, and no message travels behind the pass. Compile layer by layer",
    "(`layer.compile()`), and buckets leave during it, as they do without a compiler.",
)

USES = {use.name: use for use in [*uses_training.USES, *uses_state.USES]}
ON_RANKS = {
    n: on_ranks(n, init=functools.partial(hvd.init, process_sets=sets))
    for n, sets in PROCESS_SETS.items()
}
LIKE_OTHERS = {  # nightly: little sets them apart from uses that are not among them
    "`model.zero_grad()`",
    "accumulation: `backward_passes_per_step=2`",
    "GradScaler",
    "`torch.compile`",  # tests/single/test_compiled.py has it
    "gradient checkpointing, `use_reentrant=False`",
}


def parameters(uses: Iterable[Use]) -> list[Any]:
    return [
        pytest.param(
            use,
            id=use.name,
            marks=[ON_RANKS[use.ranks], *([pytest.mark.nightly] * (use.name in LIKE_OTHERS))],
        )
        for use in uses
    ]


@functools.cache
def expected(name: str, strategy: str) -> Any:
    """In one process: each rank's rows."""
    return USES[name].expected(strategy, USES[name].ranks)


@functools.cache
def refusal(name: str, strategy: str) -> str:
    """On a rank: what a refused use says."""
    with pytest.raises((HvdPipeError, TypeError, ValueError)) as caught:
        USES[name].run(strategy)
    return str(caught.value)


def test_names_tell_uses_apart() -> None:
    assert len(USES) == len(uses_training.USES) + len(uses_state.USES)
    assert set(USES) >= LIKE_OTHERS


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("use", parameters(USES.values()))
def test_cell(use: Use, strategy: str) -> None:
    if strategy in use.refused:
        assert use.refused[strategy] in refusal(use.name, strategy)
        return
    wanted = functools.partial(expected, use.name, strategy)
    ranks = compare(use.run(strategy), wanted, use.tolerance)
    rows = slice(-1, None) if strategy.startswith("cocod") else slice(None)
    columns = slice(-1 if use.has_own_column and strategy.startswith("cocod") else None)
    replicas = range(use.ranks) if use.replicas is None else use.replicas
    for rank in replicas:
        one, other = (ranks[i][rows, columns] for i in (rank, replicas[0]))
        assert np.array_equal(one, other), "replicas differ"


@ON_RANKS[2]
def test_the_page_is_up_to_date() -> None:
    assert PAGE.is_file(), f"there is no {PAGE}: `{COMMAND}` writes it"
    assert PAGE.read_text() == page(), f"{PAGE} is out of date: `{COMMAND}` writes it"


def page() -> str:
    """On ranks: docs/uses.md, with the messages that they get."""
    hvd.init()
    titles = [each if each == FORWARD else each.partition(":")[0] for each in STRATEGIES]
    lines = [
        "# What works with what",
        "",
        "Each row is something that training scripts do; each column a strategy. *works* means",
        "that a test runs it on real ranks and finds the weights after every step equal to those",
        "of plain torch that plays all workers in one process by the strategy's equation.",
        "*refused* means that it raises, on every rank, with the message below the table.",
        "A parameter without a gradient counts as one whose gradient is zero, also where no rank",
        "has a gradient for it: momentum and weight decay go on, which plain torch leaves out.",
        "",
        f"`{COMMAND}` writes this page from these tests; a test fails when it is out of date.",
        "",
        f"| use | {' | '.join(titles)} |",
        f"| --- |{' --- |' * len(titles)}",
    ]
    for use in USES.values():
        words = ["refused" if strategy in use.refused else "works" for strategy in STRATEGIES]
        lines.append(f"| {use.name} | {' | '.join(words)} |")
    lines += ["", *COMPILED, "", *_public(titles), "", "## What refusals say"]
    for use in USES.values():
        texts: dict[str, list[str]] = {}
        for strategy, title in zip(STRATEGIES, titles, strict=True):
            if strategy in use.refused:
                texts.setdefault(_first_sentence(refusal(use.name, strategy)), []).append(title)
        if texts:
            lines += ["", f"**{use.name}**", ""]
            lines += [f"- {', '.join(who)}: {text}" for text, who in texts.items()]
    return "\n".join([*lines, ""])


def _public(titles: Iterable[str]) -> list[str]:
    """The section on optimizers from PyPI."""
    lines = [
        "## Optimizers",
        "",
        "Each row is an optimizer that people install, used as its README says. *works* means the",
        "same as above (`tests/parallel/test_public_optimizers.py`), with `cocod:period=4`.",
        "*in `step()`* means that `overlap=forward` leaves no update to the next forward pass.",
        "The optimizers of these two packages count their steps in `param_groups`, or share",
        "something over all parameters, so leave `updates_each_parameter = True` out for them.",
        "",
        f"| optimizer | package | {' | '.join(titles)} |",
        f"| --- | --- |{' --- |' * len([*titles])}",
    ]
    rows = public_optimizers.ROWS.values()
    for row in rows:
        cells = map(row.outcome, public_optimizers.STRATEGIES)
        lines.append(f"| {row.name} | {row.package} {row.version} | {' | '.join(cells)} |")
    notes: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            notes.setdefault(row.note, []).append(row.name)
    return [*lines, "", *[f"- {'; '.join(who)}: {note}." for note, who in notes.items()]]


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
    PAGE.write_text(run_ranks(2, import_module("test_uses").page)[0])
    sys.stdout.write(f"wrote {PAGE}\n")
