"""What `kill_loop.py` decides without a job: what happens when, and whether all went well."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import markdown

Weights = npt.NDArray[np.float64]

LR = 2.0**-6  # of elastic jobs
KINDS = {  # what may happen to a rank, or to all ranks of its host
    "restart": ("kill", "stop", "raise", "kill host", "cut"),
    "elastic": ("kill", "raise", "kill host"),
}
ROUNDED = 1e-12  # how far an elastic job's weights may be from those of plain loops


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
    step: int  # the checkpoint, or commit, that training went on from
    ended_s: float | None  # until all ranks had ended, or trained again; None: never
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

    name: str  # the mode, the launcher and the strategy
    settings: dict[str, Any]
    outcomes: list[Outcome]
    compared: int  # sets of weights that were compared with the undisturbed run's
    unequal: list[str]
    largest: float  # the largest difference, where equality is one of equations
    grown: list[str]  # descriptors that were leaked
    seconds: float

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
        found += [f"weights differ: {what}" for what in self.unequal] + self.grown
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


class Reference:
    """Workers in one process that compute what a strategy's equation says, without messages."""

    def __init__(self, strategy: str, seed: int, workers: int, numel: int, lr: float) -> None:
        self._name, self._seed, self._lr = strategy.partition(":")[0], seed, lr
        self._period = int((re.findall(r"period=(\d+)", strategy) or ["1"])[0])
        self.x = [np.zeros(numel) for _ in range(workers)]
        self._pending: Weights | None = None
        self._start: list[Weights] = []
        self._average = np.zeros(numel)
        self._local = 0

    def step(self, step: int) -> None:
        gradients = [x - self._target(rank, step) for rank, x in enumerate(self.x)]
        if self._name == "cocod":
            self._cocod(gradients)
            return
        mean = np.asarray(np.mean(gradients, axis=0))
        if self._name == "pipe-sgd":
            self.drain()
            self._pending = mean
        else:
            self.x = [x - self._lr * mean for x in self.x]

    def drain(self) -> None:
        """Do what ``synchronize()`` does."""
        if self._name == "cocod":
            self.x = [np.asarray(np.mean(self.x, axis=0)) for _ in self.x]
            self._start = []
        elif self._pending is not None:
            self.x = [x - self._lr * self._pending for x in self.x]
            self._pending = None

    def move(self, rank: int, workers: int) -> None:
        """Go on with so many workers, that are all as this one was."""
        self.x = [self.x[rank].copy() for _ in range(workers)]
        if self._start:
            self._start = [self._start[rank].copy() for _ in range(workers)]

    def _target(self, rank: int, step: int) -> Weights:
        places = np.arange(len(self.x[0]), dtype=np.float64)
        return np.asarray(np.cos(places * 0.3 + rank * 0.7 + step * 0.05 + self._seed))

    def _cocod(self, gradients: list[Weights]) -> None:
        if not self._start:
            self._begin()
        self.x = [x - self._lr * gradient for x, gradient in zip(self.x, gradients, strict=True)]
        self._local += 1
        if self._local == self._period:
            pairs = zip(self.x, self._start, strict=True)
            self.x = [self._average + (x - start) for x, start in pairs]
            self._begin()

    def _begin(self) -> None:
        self._start, self._local = list(self.x), 0
        self._average = np.asarray(np.mean(self.x, axis=0))


def unequal_commits(
    log: Sequence[Mapping[str, Any]], strategy: str, seed: int, lr: float = LR
) -> tuple[int, list[str], float]:
    """Compute an elastic job's weights again by plain loops, which are reset at the same commits.

    Returns how many were compared, which differed, and the largest difference.
    """
    numel = next((len(line["weights"]) for line in log if "weights" in line), 0)
    if not numel:
        return 0, ["the job wrote no weights"], 0.0
    reference = Reference(strategy, seed, 1, numel, lr)
    commits = {0: reference}  # as they were at the newest ones
    ranks: dict[str, int] = {}  # of each worker, since its last start
    step, planned, broken, compared, largest, first = 0, False, False, 0, 0.0, ""
    wrong: list[str] = []

    def apart(line: Mapping[str, Any], one: Reference) -> float:
        return float(np.abs(np.array(line["weights"]) - one.x[0]).max())

    def compare(line: Mapping[str, Any], what: str) -> None:
        nonlocal compared, largest
        compared, largest = compared + 1, max(largest, apart(line, reference))
        wrong.extend([what] if apart(line, reference) > ROUNDED else [])

    for line in log:
        was = ranks.get(line["who"], 0)
        if "start" in line:
            ranks[line["who"]] = line["rank"]
        if line["rank"] != 0:
            continue
        if "planned" in line:
            planned = True
        elif "broken" in line:
            broken = True
        elif "start" in line:
            if line["start"] > step and not planned:  # the first rank was lost before it said so
                for number in range(step, line["start"]):
                    reference.step(number)
                commits[line["start"]] = copy.deepcopy(reference)
            step = line["start"]
            # A first rank that is lost in a commit has noted it, and others may not have it. Nor
            # has one that another rank's loss has stopped in it.
            is_kept = line["who"] == first and not broken
            if step not in sorted(commits)[-1 if is_kept else -2 :]:
                wrong.append(f"a start at step {step}, after commits at {sorted(commits)}")
                break
            commits = {number: one for number, one in commits.items() if number <= step}
            first = line["who"]
            # A planned change drains on all ranks, unless one of them fails in that, too.
            resets = [copy.deepcopy(commits[step]) for _ in range(1 + planned)]
            if planned:
                resets[0].drain()
            reference = min(resets, key=lambda one: apart(line, one))
            reference.move(was, line["size"])
            compare(line, f"the start at {step}")
            planned = broken = False
        elif "commit" in line:
            for number in range(step, line["commit"]):
                reference.step(number)
            step = line["commit"]
            commits[step] = copy.deepcopy(reference)
            compare(line, f"commit at {step}")
        elif "end" in line:
            for number in range(step, line["end"]):
                reference.step(number)
            reference.drain()
            compare(line, f"the end at {line['end']}")
    if not any("end" in line for line in log):
        wrong.append("the job had no end")
    return compared, wrong, largest


def grown_files(log: Sequence[Mapping[str, Any]], settled: int = 2) -> list[str]:
    """Return workers whose open descriptors went on growing, in jobs of as many workers."""
    counts: dict[tuple[str, int], list[int]] = {}
    for line in log:
        if "start" in line:
            counts.setdefault((line["who"], line["size"]), []).append(line["files"])
    return [
        f"{who}: open descriptors at its starts among {size} workers: {files}"
        for (who, size), files in counts.items()
        if len(files) > settled and max(files[settled:]) > max(files[:settled])
    ]


# The table --------------------------------------------------------------------------------------


def table(runs: Sequence[Run]) -> str:
    """Return a table in Markdown with a line a run and kind, and one of all."""
    heads = ["run", "kind", "faults", "median s", "longest s", "named by hvd_pipe"]
    heads += ["by the launcher", "orphans", "weights equal"]
    rows = []
    for run in runs:
        for kind in dict.fromkeys(outcome.kind for outcome in run.outcomes):
            outcomes = [outcome for outcome in run.outcomes if outcome.kind == kind]
            rows.append([run.name, kind, *_figures(outcomes, [run])])
    everything = [outcome for run in runs for outcome in run.outcomes]
    return markdown(heads, [*rows, ["all", "all", *_figures(everything, runs)]])


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
