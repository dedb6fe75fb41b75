"""Tests that run on ranks: the body of the test runs on every rank, and asserts there.

    @on_ranks(2)
    def test_an_allreduce_is_the_mean() -> None:
        mean = hvd.allreduce(torch.tensor(float(hvd.rank())))
        assert mean == 0.5
        assert gather(float(mean)) == [0.5, 0.5]

The tests of a file that ask for the same ranks share one launch, as a launch costs seconds:

    pytest --- mpirun (or horovodrun) --- pytest on every rank (`rank_pytest`)
       |                                      |  runs the selected tests, one after the other
       +--- DIRECTORY: call.pickle ---------->|
                       report.TEST.RANK <-----+  a rank begins a test when all have passed the last

A test passes where it passes on every rank. A test that fails ends its launch, and those after it
run in a new one, so that none fails because of another. Fixtures, parameters and marks are
pytest's own, on the ranks: the first process only waits for reports.
"""

from __future__ import annotations

import itertools
import os
import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest
import rank_pytest
from publish import publish, rank_and_size
from ranks import JOB, Call, Launched, framework_of

T = TypeVar("T")

MAX_FAILED_LAUNCHES = 3
END_S = 60.0  # that ranks may take to shut down after their last test
POLL_S = 0.003


@dataclass(frozen=True)
class Ranks:
    """The ranks that a test asks for; see `on_ranks`."""

    n: int
    launcher: str
    framework: str | None
    init: Callable[[], object] | None
    env: tuple[tuple[str, str], ...]
    timeout: float


def on_ranks(
    n: int,
    *,
    launcher: str = "mpi",
    framework: str | None = "auto",
    init: Callable[[], object] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 150.0,
) -> pytest.MarkDecorator:
    """Return a mark for tests, or for parameters of tests, whose body runs on ranks.

    Args:
        n: How many ranks.
        launcher: ``"mpi"`` (mpirun) or ``"gloo"`` (horovodrun --gloo).
        framework: ``"torch"`` or ``"tensorflow"``, which all ranks have imported when they start.
            With None they are new interpreters, where ``env`` is set before any import.
            ``"auto"`` is the framework that the test's module imports.
        init: What every rank calls before its first test, ``hvd.init`` for example.
        env: Environment variables for the ranks.
        timeout: Seconds that one test may take on a rank.
    """
    variables = tuple(sorted((env or {}).items()))
    return pytest.mark.on_ranks(Ranks(n, launcher, framework, init, variables, timeout))


def ranks_of(item: pytest.Item) -> Ranks | None:
    """Return the ranks that a test asks for; None where it runs in pytest's own process."""
    mark = item.get_closest_marker("on_ranks")
    return mark.args[0] if mark else None


_gathered = itertools.count()


def gather(value: T, timeout: float = 120.0) -> list[T]:
    """On a rank: return the values of all ranks, by rank. All ranks call this equally often.

    The values travel as pickles in files, so this needs no Horovod.
    """
    number = next(_gathered)
    directory, rank, size = place()
    publish(directory / f"gather.{number}.{rank}", pickle.dumps(value))
    files = [directory / f"gather.{number}.{other}" for other in range(size)]
    deadline = time.monotonic() + timeout
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, f"a rank has not called gather() {number + 1} times"
        time.sleep(POLL_S)
    return [pickle.loads(file.read_bytes()) for file in files]


def place() -> tuple[Path, int, int]:
    """On a rank: return the directory of its launch, its rank, and the number of ranks."""
    return Path(os.environ[JOB]), *rank_and_size()


class Report(NamedTuple):
    """What became of a test on one rank: "passed", "failed", "skipped" or "lost", and why."""

    outcome: str
    text: str


class Launches:
    """The tests of one file that ask for the same ranks, and the ranks that run them."""

    def __init__(self, wanted: Ranks, items: list[pytest.Item]) -> None:
        self._wanted = wanted
        self._items = items
        self._launched: Launched | None = None
        self._first = 0  # the first test of the launch
        self._failed = 0  # launches

    def run(self, item: pytest.Item) -> None:
        """Wait for the reports of all ranks on a test; launch the ranks where none run.

        Raises:
            pytest.skip.Exception: It was skipped on every rank.
            pytest.fail.Exception: It did not pass on every rank; the message has what each says.
        """
        position = self._items.index(item)
        try:
            if position < self._first:  # another order than that of the file
                self.end()
            launched = self._launched or self._launch(position)
            reports = self._reports(launched, position - self._first)
            outcomes = {report.outcome for report in reports}
            good = outcomes in ({"passed"}, {"skipped"})
            if not good or item is self._items[-1]:
                code = launched.wait(END_S)
                if good and code != 0:  # a rank has failed after its last test
                    reports = [
                        each._replace(text=_output(launched, rank))
                        for rank, each in enumerate(reports)
                    ]
                if not good or code != 0:
                    self._failed += 1
                    tail = launched.tail("launcher")
                    # What the ranks say is all there is to read, none of it in this process.
                    pytest.fail(_message(item.name, reports, code, tail), pytrace=False)
                self.end()
        except BaseException:
            self.end()
            raise
        if outcomes == {"skipped"}:
            pytest.skip(reports[0].text)

    def _launch(self, position: int) -> Launched:
        if self._failed >= MAX_FAILED_LAUNCHES:
            text = f"not run, as {self._failed} launches for tests of this file have failed"
            pytest.fail(text, pytrace=False)
        items = self._items[position:]
        wanted = self._wanted
        framework = wanted.framework
        if framework == "auto":
            framework = framework_of(items[0].getparent(pytest.Module).obj.__name__)  # type: ignore[union-attr]
        names = [item.nodeid.partition("::")[2] for item in items]
        paths = {str(item.path) for item in items}
        assert len(paths) == 1, paths
        args = str(items[0].config.rootpath), paths.pop(), names, wanted.timeout
        call = Call(rank_pytest.__name__, rank_pytest.run.__name__, args, wanted.timeout)
        self._first = position
        self._launched = Launched(wanted.n, call, dict(wanted.env), wanted.launcher, framework)
        return self._launched

    def _reports(self, launched: Launched, number: int) -> list[Report]:
        files = [launched.directory / f"report.{number}.{rank}" for rank in range(self._wanted.n)]
        # Ranks end themselves before, if they have started.
        deadline = time.monotonic() + self._wanted.timeout + END_S
        while launched.runs() and time.monotonic() < deadline:
            if all(file.exists() for file in files):
                break
            time.sleep(POLL_S)
        return [
            Report(*pickle.loads(file.read_bytes()))
            if file.exists()
            else Report("lost", _output(launched, rank))
            for rank, file in enumerate(files)
        ]

    def end(self) -> None:
        """End the ranks, if there are any."""
        launched, self._launched = self._launched, None
        if launched is not None:
            launched.__exit__()


def _output(launched: Launched, rank: int) -> str:
    ended_well, said = launched.outcome(rank)
    return launched.tail(str(rank)) if ended_well else str(said)


def _message(name: str, reports: Sequence[Report], code: int | None, tail: str) -> str:
    said = [(rank, each) for rank, each in enumerate(reports) if each.outcome == "failed"]
    first = f" Rank {said[0][0]}: {_error(said[0][1].text)}" if said else ""
    lines = [f"{name} did not pass on {len(reports)} ranks.{first}"]
    if any(report.outcome == "lost" for report in reports):
        lines.append(
            "A rank that is lost has not reported: it hung (the stacks of its threads follow), it "
            "exited, or it was ended because another rank had failed."
        )
    lines.append(f"The launcher's exit status: {code}")
    for rank, report in enumerate(reports):
        lines += [f"--- rank {rank}: {report.outcome}", report.text]
    return "\n".join([*lines, "--- the launcher:", tail])


def _error(text: str) -> str:
    """Return the line of a failure that says what was wrong."""
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return lines[0] if lines else text.strip().rpartition("\n")[2]


def launches(items: Iterable[pytest.Item]) -> dict[pytest.Item, Launches]:
    """Return for each test that runs on ranks the launches that it shares with others."""
    groups: dict[tuple[Path, Ranks], list[pytest.Item]] = {}
    for item in items:
        if wanted := ranks_of(item):
            groups.setdefault((item.path, wanted), []).append(item)
    return {
        item: shared
        for (_, wanted), group in groups.items()
        for shared in [Launches(wanted, group)]
        for item in group
    }


def together(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return tests in an order in which those of a file that share a launch stand together."""
    first: dict[tuple[Path, Ranks | None], int] = {}
    for at, item in enumerate(items):
        first.setdefault((item.path, ranks_of(item)), at)
    return sorted(items, key=lambda item: first[item.path, ranks_of(item)])
