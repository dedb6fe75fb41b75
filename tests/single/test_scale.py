"""What must not grow with the number of ranks more than it has to: agreements and the watch."""

from __future__ import annotations

import json
import resource
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_pipe.errors import RanksDisagreeError
from hvd_pipe.runtime import consensus
from hvd_pipe.runtime.consensus import Agreement, Description
from hvd_pipe.runtime.watch import watchdog
from hvd_pipe.runtime.watch.watcher import MOST_SILENT, Link, Peer, Status, Watcher

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import watch_scale

# Agreements


class Gathered:
    """Ranks, each in a thread, and the bytes that they have gathered under each name."""

    def __init__(self, descriptions: list[Description]) -> None:
        self.sent: dict[str, list[bytes]] = {}
        self.told: list[str | None] = [None] * len(descriptions)
        self._together = threading.Barrier(len(descriptions))
        threads = [
            threading.Thread(target=self._run, args=(rank, len(descriptions), one))
            for rank, one in enumerate(descriptions)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _run(self, rank: int, size: int, mine: Description) -> None:
        def gather_bytes(data: bytes, name: str, _: Any) -> list[bytes]:
            self.sent.setdefault(name, [b""] * size)[rank] = data
            self._together.wait(60)
            return self.sent[name]

        ranks: Any = watch_scale.Ranks(size, rank)
        try:
            Agreement(gather_bytes).check_alike(mine, "name", ranks)
        except RanksDisagreeError as error:
            self.told[rank] = str(error)


def test_ranks_that_agree_send_a_digest() -> None:
    found = Gathered([[("op", "Sum" * 1000)]] * 5)
    assert found.told == [None] * 5
    assert list(found.sent) == ["name.digest"]
    assert max(map(len, found.sent["name.digest"])) < 100


def test_of_ranks_that_differ_one_of_a_kind_says_how() -> None:
    """All lines of all ranks are n times as much, on each of n ranks."""
    kinds: list[Description] = [[("op", name), ("lr", "0.1")] for name in ("Sum", "Average")]
    found = Gathered([kinds[rank in (3, 4)] for rank in range(6)])
    assert len(set(found.told)) == 1
    assert str(found.told[0]).startswith("ranks disagree on op: rank 0 has Sum; rank 3 has Avera")
    spoken = [json.loads(data) is not None for data in found.sent["name.lines"]]
    assert spoken == [True, False, False, True, False, False]


def test_where_all_ranks_differ_some_say_how() -> None:
    size = consensus.MOST_SPEAKERS + 4
    found = Gathered([[("seed", str(rank))] for rank in range(size)])
    assert str(found.told[-1]).startswith("ranks disagree on seed: rank 0 has 0; rank 1 has 1.")
    assert sum(data != b"null" for data in found.sent["name.lines"]) == consensus.MOST_SPEAKERS


# The watch


@pytest.fixture
def first() -> Iterator[tuple[Watcher, list[socket.socket]]]:
    """The first of forty ranks, whose thread does not run, and what the others hold of it."""
    pairs = [socket.socketpair() for _ in range(39)]
    control, own = socket.socketpair()
    process: Any = SimpleNamespace(status=Status, control=Link(0, control))
    peers = [Peer(rank, f"h{rank}", 100 + rank) for rank in range(40)]
    links = {rank: here for rank, (here, _) in enumerate(pairs, 1)}
    yield Watcher(peers, links, 120.0, process), [there for _, there in pairs]
    for pair in [*pairs, (control, own)]:
        for one in pair:
            one.close()


def _heard(link: socket.socket) -> list[dict[str, Any]]:
    return [json.loads(line) for line in link.recv(1 << 16).splitlines()]


def test_news_that_come_together_are_passed_on_in_one_sending(
    first: tuple[Watcher, list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where n ranks left, the first one sent n times n messages."""
    heart, others = first
    sendings: list[bytes] = []
    monkeypatch.setattr(heart, "_send", sendings.append)
    for rank, other in enumerate(others, 1):
        other.send(json.dumps({"left": rank}).encode() + b"\n")
    for link in list(heart._links.values()):
        heart._hear(link)
    heart._pass_on()
    heart._pass_on()
    assert len(sendings) == 1
    assert [json.loads(line)["left"] for line in sendings[0].splitlines()] == [*range(1, 40)]


def test_news_reach_every_rank(first: tuple[Watcher, list[socket.socket]]) -> None:
    heart, others = first
    heart._record({"lost": 7, "how": "it is gone"})
    heart._pass_on()
    assert all(_heard(other) == [{"lost": 7, "how": "it is gone"}] for other in others)


def test_of_many_silent_ranks_the_longest_silent_are_told(
    first: tuple[Watcher, list[socket.socket]],
) -> None:
    heart, others = first
    heart.clock.now = 1000.0
    for rank, link in heart._links.items():
        link.heard_at = float(rank)
    heart._beat()
    (message,) = _heard(others[0])
    assert [rank for rank, _ in message["silent"]] == [*range(1, MOST_SILENT + 1)]
    assert len(heart._silent) == 39  # the first one itself knows of all


def _allow(monkeypatch: pytest.MonkeyPatch, files: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))


def test_what_lacks_for_a_connection_to_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for files in (100_000, resource.RLIM_INFINITY):
        _allow(monkeypatch, files)
        assert watchdog._has_files_for(2048)
    _allow(monkeypatch, 1024)
    assert not watchdog._has_files_for(2048)


def test_a_job_of_too_many_ranks_for_its_files_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first rank took all files that there were, waited for 10 s and blamed a firewall."""
    ranks, offered = watch_scale.Ranks(2048), []
    monkeypatch.delenv("HVD_PIPE_TIMEOUT", raising=False)
    monkeypatch.setattr(watchdog, "is_elastic", lambda: False)

    def find(find: Callable[[], dict[str, Any]], *_: object) -> dict[str, Any]:
        offered.append(find())
        return offered[0]

    def gather(first: dict[str, Any], *_: object) -> list[dict[str, Any]]:
        return [first, *[first | {"met": False}] * 2047]

    agreement: Any = SimpleNamespace(found_by_first=find, gather=gather)
    job = watchdog.Job(ranks, agreement, lambda _: None, lambda _: False)  # type: ignore[arg-type]
    _allow(monkeypatch, 1024)
    text = r"cannot connect to rank 0 .* let that rank open \d{4} files or more \(ulimit -n\)"
    with pytest.warns(UserWarning, match=text) as told:
        watchdog.start(job)
    assert offered[0]["listener"] is None
    assert [each.category for each in told].count(UserWarning) == 1
    assert watchdog._reporter is None


def test_the_watch_of_many_ranks_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is lost must be the one that all others name."""
    monkeypatch.setattr(watch_scale, "QUIET_S", 0.1)
    monkeypatch.setenv(watchdog.ENVIRONMENT_VARIABLE, "")
    found = watch_scale.measure_watch(5)
    assert found.missed == 0
    assert found.files > 4
    assert found.lost_s > 0
