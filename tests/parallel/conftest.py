"""Tests that are marked with `on_ranks` run on ranks, in place of pytest's own process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import on_ranks
import pytest
import ranks

LAUNCHES = pytest.StashKey[dict[pytest.Item, on_ranks.Launches]]()


def runs_elsewhere(item: pytest.Item) -> bool:
    """Whether the body of a test runs on ranks, and this is none of them."""
    return ranks.JOB not in os.environ and on_ranks.ranks_of(item) is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = on_ranks.together(items)


def pytest_configure() -> None:
    directory = os.environ.get(ranks.JOB)
    if directory and not Path(directory, "call.pickle").exists():
        raise pytest.UsageError(f"unset {ranks.JOB}: only ranks that pytest launches have it")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Function) -> None:
    if runs_elsewhere(item):
        item.fixturenames = []  # the ranks have them


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not runs_elsewhere(pyfuncitem):
        return None
    session = pyfuncitem.session
    if LAUNCHES not in session.stash:
        session.stash[LAUNCHES] = on_ranks.launches(session.items)
    session.stash[LAUNCHES][pyfuncitem].run(pyfuncitem)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """End ranks that an interrupt, or ``-x``, has left."""
    for launches in session.stash.get(LAUNCHES, {}).values():
        launches.end()
    return (yield)
