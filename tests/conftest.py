"""For all tests: a SIGTERM ends pytest as Ctrl-C does, so that the ranks of a test end with it.

Random cases are the same in every run, so that a change is judged by what it changes.
``HYPOTHESIS_PROFILE=deep``, as in ``make test-all``, tries more of them, ``explore`` new ones.

Where several files run at a time, those begin first that take longest by ``durations.json``, which
``--write-durations`` rewrites.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

# The serial references are many small operations. Beside the ranks of another test, threads that
# wait for each other in each of them took ten times as long. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

DURATIONS = Path(__file__).with_name("durations.json")


def _interrupt(number: int, _frame: object) -> None:
    pytest.exit(f"ended by {signal.Signals(number).name}", pytest.ExitCode.INTERRUPTED)


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "put the seconds that the files of this run take into tests/durations.json"
    parser.addoption("--write-durations", action="store_true", help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    if "RANKS_DIRECTORY" not in os.environ:  # ranks end at once, as other processes do
        signal.signal(signal.SIGTERM, _interrupt)
    settings.register_profile("repeat", derandomize=True, deadline=None, max_examples=25)
    settings.register_profile("deep", derandomize=True, deadline=None, max_examples=400)
    settings.register_profile("explore", deadline=None, max_examples=400)
    profile = os.environ.get("HYPOTHESIS_PROFILE", "repeat")
    settings.load_profile(profile)
    if profile != "explore":
        # Cases would hold constants of the modules that are loaded: of the tests that came before.
        # It raises where Hypothesis has another name for this.
        pytest.MonkeyPatch().setattr(providers, "_get_local_constants", providers.Constants)
    if config.getoption("--write-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations())


class Durations:
    """Adds up the seconds of the tests of each file, and writes them at the end."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
        known |= {file: round(seconds, 1) for file, seconds in self._seconds.items()}
        root = DURATIONS.parents[1]
        kept = {file: known[file] for file in sorted(known) if (root / file).exists()}
        DURATIONS.write_text(json.dumps(kept, indent=1) + "\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput") and DURATIONS.exists():
        seconds = json.loads(DURATIONS.read_text())
        items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0.0))


def pytest_unconfigure() -> None:
    """End Keras' Horovod before torch's, which has started MPI and ends it for both.

    Tests that initialise both in one process begin with torch's.
    """
    for name in ("horovod.tensorflow", "horovod.torch"):
        horovod = sys.modules.get(name)
        if horovod is not None and horovod.is_initialized():
            horovod.shutdown()
