"""On a rank: run the tests of one file by pytest, in step with the other ranks; see `on_ranks`."""

from __future__ import annotations

import faulthandler
import os
import pickle
import time

import on_ranks
import pytest
from publish import publish

PATIENCE_S = 8.0  # that a rank whose test has failed gives the others to report as well


def run(root: str, file: str, names: list[str], timeout: float) -> None:
    """Run tests of a file, the others beside them on all ranks."""
    os.environ.pop("PYTEST_ADDOPTS", None)
    options = ["-q", "-s", *(f"-pno:{name}" for name in ("cacheprovider", "timeout", "xdist"))]
    plugin = InStep(names, timeout)
    status = pytest.main([*options, f"--rootdir={root}", file], plugins=[plugin])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest on a rank: {status!r}; {plugin.errors}")


class InStep:
    """Begins a test when all ranks have passed the one before, and reports what became of it."""

    def __init__(self, names: list[str], timeout: float) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self._timeout = timeout
        self._outcome, self._text = "passed", ""
        self.errors = ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors += report.longreprtext

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        known = {_name(item.nodeid): item for item in items}
        if missing := [name for name in self._places if name not in known]:
            self.errors += (
                f"this rank does not know {missing}, which the first process has selected: its "
                f"own tests are {list(known)}. Parametrize alike on all ranks."
            )
            raise pytest.UsageError("unknown tests")
        items[:] = [known[name] for name in self._places]

    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Initialise Horovod, say, before the first test."""
        wanted = on_ranks.ranks_of(session.items[0])
        if wanted and wanted.init:
            wanted.init()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        faulthandler.dump_traceback_later(self._timeout, exit=True)
        print(nodeid, flush=True)  # the log's last line names the test that a rank died in
        self._outcome, self._text = "passed", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._outcome = "failed"
            self._text += report.longreprtext
        elif report.skipped and isinstance(report.longrepr, tuple):
            self._outcome, self._text = "skipped", report.longrepr[2]

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Wait for the others, or leave them where this rank's failure may have them wait."""
        number = self._places[_name(nodeid)]
        directory, rank, size = on_ranks.place()
        publish(directory / f"report.{number}.{rank}", pickle.dumps((self._outcome, self._text)))
        files = [directory / f"report.{number}.{other}" for other in range(size)]
        deadline = time.monotonic() + PATIENCE_S
        while not all(file.exists() for file in files):
            if self._outcome == "failed" and time.monotonic() > deadline:
                os._exit(1)
            time.sleep(on_ranks.POLL_S)
        outcomes = [pickle.loads(file.read_bytes())[0] for file in files]
        if "failed" in outcomes:
            pytest.exit("a test has failed", pytest.ExitCode.TESTS_FAILED)


def _name(nodeid: str) -> str:
    return nodeid.partition("::")[2]
