"""For all tests: a SIGTERM ends pytest as Ctrl-C does, so that the ranks of a test end with it."""

from __future__ import annotations

import signal

import pytest


def _interrupt(number: int, _frame: object) -> None:
    pytest.exit(f"ended by {signal.Signals(number).name}", pytest.ExitCode.INTERRUPTED)


def pytest_configure() -> None:
    signal.signal(signal.SIGTERM, _interrupt)
