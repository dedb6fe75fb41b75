"""What `kill_loop.py` decides without a job: what happens when, and whether all went well."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from harness import markdown

KINDS = ("kill", "stop", "raise", "kill host", "cut")  # to a rank, or all ranks of its host


@dataclass(frozen=True)
class Fault:
    """One thing that happens to a rank, or to its host, so long after all ranks train."""

    number: int
    kind: str
    rank: int
    after_s: float


def schedule(
    seed: int, run: str, count: int, kinds: Sequence[str], ranks: int, pause: Sequence[float]
) -> list[Fault]:
    """Return a run's faults: kinds take turns in random order, the rest is random."""
    draw = random.Random(f"{seed} {run}")
    turns: list[str] = []
    while len(turns) < count:
        turns += draw.sample(list(kinds), len(kinds))
    return [
        Fault(number, kind, draw.randrange(ranks), round(draw.uniform(*pause), 2))
        for number, kind in enumerate(turns[:count], start=1)
    ]


# What was said ----------------------------------------------------------------------------------

_RANK = re.compile(
    r"hvd_pipe: rank (\d+) "
    r"(?:failed because of another|(?:ends, as it )?waits for a rank that is lost): "
    r"(?:the others have given this rank up: )?rank (\d+) on (\S+)"
)
_LAUNCHER = (
    r"process rank (\d+) ",  # mpirun, of a rank that a signal has ended
    r"Process name: \[\[\d+,\d+\],(\d+)\]",  # mpirun, of one that has ended with a status
    r"Process name: (\d+)\n",  # horovodrun
    r"Process (\d+) exit with status code [1-9]",  # horovodrun, in an elastic job
)
_LAUNCHER_HOST = (
    r"Remote daemon.* on node (\S+)",  # mpirun
    r"Connection to (\S+) closed by remote host",  # its ssh
)


def named_by_ranks(said: str) -> list[tuple[int, int]]:
    """Return who has named whom as the cause of its end."""
    return [(int(found[1]), int(found[2])) for found in _RANK.finditer(said)]


def named_by_launcher(said: str, hosts: Sequence[str]) -> set[int]:
    """Return the ranks that a launcher has named, or whose host."""
    found = {int(rank) for pattern in _LAUNCHER for rank in re.findall(pattern, said)}
    names = {host for pattern in _LAUNCHER_HOST for host in re.findall(pattern, said)}
    return found | {rank for rank, host in enumerate(hosts) if host in names}


def misnamed(
    pairs: Iterable[tuple[int, int]], victims: Sequence[int], is_cut: bool
) -> list[tuple[int, int]]:
    """Return who has named a rank to which nothing had happened.

    A rank behind a cut link sees the others lost, so there each side may name the other one.
    """
    return [
        (speaker, named)
        for speaker, named in pairs
        if named not in victims and not (is_cut and speaker in victims)
    ]


# Outcomes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What came of a fault."""

    kind: str  # "none" where the job failed by itself before it happened
    victims: list[int]
    after_s: float
    step: int  # the checkpoint that training went on from
    ended_s: float | None  # until all ranks had ended; None: never
    by_ranks: list[int]  # ranks that hvd_pipe named
    by_launcher: list[int]
    misnamed: list[list[int]] = field(default_factory=list)  # who named whom wrongly
    left: list[str] = field(default_factory=list)  # processes that remained
    said: str = ""  # where something was wrong
    load: float = 0.0

    @property
    def teller(self) -> str:
        """Who named the victim: "hvd_pipe", or else "launcher", or nobody.

        A launcher also lists ranks that ended after the victim. It counts where it names that one
        alone. hvd_pipe counts where it names nobody else.
        """
        if self.misnamed:
            return ""
        if set(self.by_ranks) & set(self.victims):
            return "hvd_pipe"
        told = set(self.by_launcher)
        return "launcher" if told and told <= set(self.victims) else ""

    def wrong(self) -> list[str]:
        """Return what went wrong, in words."""
        if self.kind == "none":
            return ["the job failed though nothing had happened to it"]
        found = []
        if self.ended_s is None:
            found.append("ranks had not ended when patience was over")
        if self.misnamed:
            found.append("a message named another rank")
        elif not self.teller:
            found.append("no message named the victim alone")
        if self.left:
            found.append(f"left behind: {', '.join(self.left)}")
        return found


@dataclass(frozen=True)
class Run:
    """All that happened under one strategy."""

    name: str  # "restart", the launcher and the strategy
    settings: dict[str, Any]
    outcomes: list[Outcome]
    compared: int  # sets of weights that were compared with the undisturbed run's
    unequal: list[str]
    largest: float = 0.0  # of elastic jobs, which were measured until hvd_pipe 0.2
    grown: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Run:
        return cls(**{**data, "outcomes": [Outcome(**each) for each in data["outcomes"]]})

    def wrong(self) -> list[str]:
        """Return what went wrong, in words; empty is what a reader wants."""
        found = [
            f"fault {number} ({one.kind}, rank {one.victims}): {what}"
            for number, one in enumerate(self.outcomes, start=1)
            for what in one.wrong()
        ]
        found += [f"weights differ: {what}" for what in self.unequal]
        if not self.compared:
            found.append("no weights were compared")
        return [f"{self.name}: {what}" for what in found]


# Weights ----------------------------------------------------------------------------------------


def unequal_digests(disturbed: str, whole: str) -> tuple[int, list[str]]:
    """Compare a rank's weights at all its checkpoints with those of a run that never stopped.

    Returns how many were compared, and the steps at which they differ or are missing. A step that
    was taken again comes again.
    """
    expected = dict(line.split(" ", 1) for line in whole.splitlines())
    found = [line.split(" ", 1) for line in disturbed.splitlines()]
    wrong = [step for step, value in found if expected.get(step) != value]
    steps = {step for step, _ in found}
    missing = [step for step in expected if step.startswith("end-") and step not in steps]
    return len(found), [*wrong, *missing]


# The table --------------------------------------------------------------------------------------


def table(runs: Sequence[Run]) -> str:
    """Return a line for each mode, launcher and kind of fault, all strategies together."""
    heads = ["mode", "launcher", "kind", "faults", "median s", "longest s", "named by hvd_pipe"]
    heads += ["by the launcher", "orphans", "weights equal"]
    rows = []
    for mode, launcher in sorted({tuple(run.name.split(", ")[:2]) for run in runs}, reverse=True):
        group = [run for run in runs if run.name.startswith(f"{mode}, {launcher}, ")]
        for kind in KINDS:
            outcomes = [one for run in group for one in run.outcomes if one.kind == kind]
            if outcomes:
                rows.append([mode, launcher, kind, *_figures(outcomes, group)])
    everything = [outcome for run in runs for outcome in run.outcomes]
    return markdown(heads, [*rows, ["all", "", "", *_figures(everything, runs)]])


def _figures(outcomes: Sequence[Outcome], runs: Sequence[Run]) -> list[str]:
    seconds = [outcome.ended_s for outcome in outcomes if outcome.ended_s is not None]
    tellers = [outcome.teller for outcome in outcomes]
    compared = sum(run.compared for run in runs)
    return [
        str(len(outcomes)),
        f"{median(seconds):.1f}" if seconds else "-",
        f"{max(seconds):.1f}" if len(seconds) == len(outcomes) else "never",
        str(tellers.count("hvd_pipe")),
        str(tellers.count("launcher")),
        str(sum(len(outcome.left) for outcome in outcomes)),
        f"{compared - sum(len(run.unequal) for run in runs)} of {compared}",
    ]
