"""For all tests: a SIGTERM ends pytest as Ctrl-C does, so that the ranks of a test end with it.

Random cases are the same in every run, so that a change is judged by what it changes;
``HYPOTHESIS_PROFILE=explore`` looks at new ones.
"""

from __future__ import annotations

import os
import signal
import sys

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

# The serial references are many small operations. Beside the ranks of another test, threads that
# wait for each other in each of them took ten times as long. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _interrupt(number: int, _frame: object) -> None:
    pytest.exit(f"ended by {signal.Signals(number).name}", pytest.ExitCode.INTERRUPTED)


def pytest_configure() -> None:
    if "RANKS_DIRECTORY" not in os.environ:  # ranks end at once, as other processes do
        signal.signal(signal.SIGTERM, _interrupt)
    settings.register_profile("repeat", derandomize=True, deadline=None)
    settings.register_profile("explore", deadline=None)
    profile = os.environ.get("HYPOTHESIS_PROFILE", "repeat")
    settings.load_profile(profile)
    if profile == "repeat":
        # Cases would hold constants of the modules that are loaded: of the tests that came before.
        # "explore" has them. It raises where Hypothesis has another name for this.
        pytest.MonkeyPatch().setattr(providers, "_get_local_constants", providers.Constants)


def pytest_unconfigure() -> None:
    """End Keras' Horovod before torch's, which has started MPI and ends it for both.

    Tests that initialise both in one process begin with torch's.
    """
    for name in ("horovod.tensorflow", "horovod.torch"):
        horovod = sys.modules.get(name)
        if horovod is not None and horovod.is_initialized():
            horovod.shutdown()
