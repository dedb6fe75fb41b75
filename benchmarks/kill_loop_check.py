"""What `kill_loop.py` decides without a job: what happens when, and whether all went well."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

Weights = npt.NDArray[np.float64]

KINDS = {
    "restart": ("kill", "stop", "raise", "kill host", "cut"),
    "elastic": ("kill", "raise", "kill host"),
}
"""What may happen to a rank, or to all ranks of its host."""
ON_HOSTS = ("cut",)  # which needs links
ROUNDED = 1e-12  # how far an elastic job's weights may be from those of plain loops


@dataclass(frozen=True)
class Fault:
    """One thing that happens.

    Args:
        number: Counts the faults of a run.
        kind: One of `KINDS`.
        rank: To which rank, or to whose host.
        after_s: Seconds after all ranks train.
    """

    number: int
    kind: str
    rank: int
    after_s: float


def schedule(
    seed: int, run: str, count: int, kinds: Sequence[str], ranks: int, pause: Sequence[float]
) -> list[Fault]:
    """Return a run's faults: kinds take turns in random order, the rest is random.

    >>> [fault.kind for fault in schedule(1, "pipe-sgd", 2, ["kill"], 3, (2.0, 6.0))]
    ['kill', 'kill']
    """
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
    """Return who has named whom as the cause of its end.

    >>> named_by_ranks("hvd_pipe: rank 2 failed because of another: rank 1 on h2 (pid 4) raised")
    [(2, 1)]
    """
    return [(int(found[1]), int(found[2])) for found in _RANK.finditer(said)]


def named_by_launcher(said: str, hosts: Sequence[str]) -> set[int]:
    """Return the ranks that a launcher has named, or whose host.

    Args:
        said: What it has printed.
        hosts: Of each rank.

    >>> named_by_launcher("mpirun noticed that process rank 1 with PID 4 on node h2", ["h1", "h2"])
    {1}
    """
    found = {int(rank) for pattern in _LAUNCHER for rank in re.findall(pattern, said)}
    names = {host for pattern in _LAUNCHER_HOST for host in re.findall(pattern, said)}
    return found | {rank for rank, host in enumerate(hosts) if host in names}


def misnamed(
    pairs: Iterable[tuple[int, int]], victims: Sequence[int], is_cut: bool
) -> list[tuple[int, int]]:
    """Return who has named a rank to which nothing had happened.

    A rank behind a cut link sees the others lost, so there each side may name the other one.

    >>> misnamed([(0, 1), (1, 0)], [1], is_cut=True), misnamed([(0, 1), (1, 0)], [1], is_cut=False)
    ([], [(1, 0)])
    """
    return [
        (speaker, named)
        for speaker, named in pairs
        if named not in victims and not (is_cut and speaker in victims)
    ]


# Outcomes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What came of a fault.

    Args:
        kind: What happened; "none" where the job failed by itself before it did.
        victims: To which ranks.
        after_s: Seconds after all ranks trained.
        step: The checkpoint, or commit, that training went on from.
        ended_s: Seconds until all ranks had ended, or trained again in an elastic job; None where
            they had not when patience was over.
        by_ranks: Ranks that hvd_pipe named.
        by_launcher: Ranks that the launcher named.
        misnamed: Who named whom, where nothing had happened to that one.
        left: Processes that remained, though nobody needed them.
        said: What was said, where it was wrong.
        load: The machine's load average.
    """

    kind: str
    victims: list[int]
    after_s: float
    step: int
    ended_s: float | None
    by_ranks: list[int]
    by_launcher: list[int]
    misnamed: list[list[int]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    said: str = ""
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
    """All that happened under one strategy.

    Args:
        name: The mode, the launcher and the strategy.
        settings: What it was asked for: its seed, how many ranks, and so on.
        outcomes: One a fault.
        compared: How many sets of weights were compared with the undisturbed run's.
        unequal: Which of them were not equal.
        largest: The largest difference, where equality is one of equations.
        grown: Descriptors that were leaked, in words.
        seconds: What the run took.
    """

    name: str
    settings: dict[str, Any]
    outcomes: list[Outcome]
    compared: int
    unequal: list[str]
    largest: float
    grown: list[str]
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


def read_digests(text: str) -> Iterator[tuple[str, str]]:
    """Return steps and what the weights were; a step that was taken again comes again."""
    for line in text.splitlines():
        step, _, found = line.partition(" ")
        yield step, found


def unequal_digests(disturbed: str, whole: str) -> tuple[int, list[str]]:
    r"""Compare a rank's weights at all its checkpoints with those of a run that never stopped.

    Returns:
        How many were compared, and the steps at which they differ or are missing.

    >>> unequal_digests("10 a\n10 a\n20 c\nend-30 d", "10 a\n20 b\nend-30 d")
    (4, ['20'])
    """
    expected = dict(read_digests(whole))
    found = list(read_digests(disturbed))
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
    log: Sequence[Mapping[str, Any]], strategy: str, seed: int, lr: float
) -> tuple[int, list[str], float]:
    """Compute an elastic job's weights again by plain loops, which are reset at the same commits.

    Args:
        log: What its workers have written: starts, commits and the end.
        strategy: As in ``strategy=``.
        seed: Of the targets.
        lr: The learning rate.

    Returns:
        How many weights were compared, which differed, and the largest difference.
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
    """Return workers whose open descriptors went on growing, in jobs of as many workers.

    Args:
        log: As in `unequal_commits`.
        settled: Starts of a worker after which none may be added.
    """
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

HEADER = (
    "run",
    "kind",
    "faults",
    "median s",
    "longest s",
    "named by hvd_pipe",
    "by the launcher",
    "orphans",
    "weights equal",
)


def rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return a line a run and kind, and one of all."""
    found = []
    for run in runs:
        for kind in dict.fromkeys(one.kind for one in run.outcomes):
            found.append((run.name, *_row(kind, [o for o in run.outcomes if o.kind == kind], run)))
    everything = [one for run in runs for one in run.outcomes]
    equal = sum(run.compared - len(run.unequal) for run in runs)
    total = list(_row("all", everything, None))
    total[-1] = f"{equal} of {sum(run.compared for run in runs)}"
    return [*found, ("all", *total)]


def _row(kind: str, outcomes: Sequence[Outcome], run: Run | None) -> tuple[str, ...]:
    seconds = [one.ended_s for one in outcomes if one.ended_s is not None]
    tellers = [one.teller for one in outcomes]
    equal = "" if run is None else f"{run.compared - len(run.unequal)} of {run.compared}"
    return (
        kind,
        str(len(outcomes)),
        f"{median(seconds):.1f}" if seconds else "-",
        f"{max(seconds):.1f}" if len(seconds) == len(outcomes) else "never",
        str(tellers.count("hvd_pipe")),
        str(tellers.count("launcher")),
        str(sum(len(one.left) for one in outcomes)),
        equal,
    )


def table(runs: Sequence[Run]) -> str:
    """Return the table as Markdown."""
    lines = [HEADER, tuple("---" for _ in HEADER), *rows(runs)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
