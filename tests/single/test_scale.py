"""What must not grow with the number of ranks more than it has to: agreements and the watch."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_pipe.errors import RanksDisagreeError
from hvd_pipe.runtime import consensus
from hvd_pipe.runtime.consensus import Agreement, Description
from hvd_pipe.runtime.watch import rank_side
from hvd_pipe.runtime.watch.child_process import Link, Status, Watcher, encode

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
    rank: Any = SimpleNamespace(status=Status, control=Link(0, control))
    names = [f"rank {number} on h{number} (pid {100 + number})" for number in range(40)]
    links = {number: here for number, (here, _) in enumerate(pairs, 1)}
    yield Watcher(names, links, 120.0, rank), [there for _, there in pairs]
    for pair in [*pairs, (control, own)]:
        for one in pair:
            one.close()


def _heard(link: socket.socket) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(link.recv(1 << 16))
    return message


def test_news_reach_every_rank_in_one_message_however_many_ranks_leave(
    first: tuple[Watcher, list[socket.socket]],
) -> None:
    """Where n ranks left, the first one sent n times n messages."""
    watcher, others = first
    left = {"status": asdict(Status(left=True)), "loss": None, "left": None, "silence": None}
    for other in others:
        other.send(encode(left))
    others[6].send(encode(left | {"loss": [7, "it is gone"]}))
    thread = threading.Thread(target=watcher.run)
    thread.start()
    told = [_heard(other) for other in others]
    watcher._rank.control.socket.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert [(one["loss"], one["left"]) for one in told] == [([7, "it is gone"], 1)] * 39


def test_of_many_silent_ranks_the_longest_silent_is_told(
    first: tuple[Watcher, list[socket.socket]],
) -> None:
    watcher, others = first
    watcher.clock.now = 1000.0
    for rank, link in watcher._links.items():
        link.heard_at = float(rank % 20)
    watcher._beat()
    assert _heard(others[0])["silence"] == [1000.0, 20, False]


def test_a_job_of_too_many_ranks_for_its_files_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank took all files that there were, waited for 10 s and blamed a firewall."""
    ranks, offered = watch_scale.Ranks(2048), []
    monkeypatch.delenv("HVD_PIPE_TIMEOUT", raising=False)
    monkeypatch.setattr(rank_side, "is_elastic", lambda: False)

    def find(find: Callable[[], dict[str, Any]], *_: object) -> dict[str, Any]:
        offered.append(find())
        return offered[0]

    def gather(own: object, *_: object) -> list[Any]:
        return [own, *[("rank 1 on h1 (pid 7)", False)] * 2047]

    agreement: Any = SimpleNamespace(found_by_first=find, gather=gather)
    job = rank_side.Job(ranks, agreement, lambda _: None, lambda _: False)  # type: ignore[arg-type]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    popen, files = subprocess.Popen, f"ulimit -n 1024; exec {sys.executable} $0 $@"
    monkeypatch.setattr(
        subprocess, "Popen", lambda words, **how: popen(["sh", "-c", files, *words[1:]], **how)
    )
    text = r"cannot connect to rank 0 .* let that rank open 2112 files or more \(ulimit -n\)"
    with pytest.warns(UserWarning, match=text) as told:
        rank_side.start(job)
    assert limits == resource.getrlimit(resource.RLIMIT_NOFILE)
    assert offered[0]["addresses"] == []
    assert [each.category for each in told].count(UserWarning) == 1
    assert rank_side._watch is None


def test_the_watch_of_many_ranks_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is lost must be the one that all others name."""
    monkeypatch.setattr(watch_scale, "QUIET_S", 0.1)
    monkeypatch.setenv(rank_side.ENVIRONMENT_VARIABLE, "")
    found = watch_scale.measure_watch(5)
    assert found.missed == 0
    assert found.child_files > 4
    assert found.lost_s > 0
