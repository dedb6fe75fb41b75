"""Many cases in one job, as launching costs seconds: how ranks run them and tests look at them."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K")
R = TypeVar("R")


@dataclass(frozen=True)
class Raised:
    """In place of the result of a case that raised."""

    traceback: str


def run_cases(cases: Mapping[K, Callable[[], R]]) -> dict[K, R | Raised]:
    """On a rank: the result of every case, whatever became of the others.

    Where the environment has ``ONLY_CASES``, only cases run whose names match this pattern.

    A case that raises on one rank only leaves the others waiting; Horovod's stall check then ends
    them (see `ranks.environment`), and all later cases with them.
    """
    results: dict[K, R | Raised] = {}
    wanted = re.compile(os.environ.get("ONLY_CASES", ""))
    for name, case in cases.items():
        if not wanted.search(str(name)):
            continue
        print(name, flush=True)  # the log's last line names the case that a job died in
        try:
            results[name] = case()
        except Exception:
            results[name] = Raised(traceback.format_exc())
    return results


def of_case(ranks: Sequence[Mapping[K, R | Raised]], case: K) -> list[R]:
    """In a test: what each rank's run of one case returned."""
    wanted = os.environ.get("ONLY_CASES")
    assert all(case in cases for cases in ranks), f"ONLY_CASES={wanted!r} leaves out {case!r}"
    raised = {
        f"rank {rank}": result.traceback
        for rank, result in enumerate(cases[case] for cases in ranks)
        if isinstance(result, Raised)
    }
    assert not raised, "\n".join(f"{rank}: {text}" for rank, text in raised.items())
    return [cases[case] for cases in ranks]  # type: ignore[misc]
