"""What ranks hear of each other, over sockets within one process, and how they connect."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_pipe.runtime.watch import child_process, rank_side, rendezvous
from hvd_pipe.runtime.watch.child_process import AwakeClock, Link, Status, Watcher, encode
from hvd_pipe.runtime.watch.rendezvous import accept, connect, listen

pytestmark = pytest.mark.slow

LIMIT_S = 2.0
SOON_S = 20.0  # for what takes a second or two on a quiet machine
WAITS = Status(waits=True, since_s=100 * LIMIT_S)
LATER = pytest.param(1, marks=pytest.mark.nightly)  # each waits for true limits of seconds


class Rank:
    """A rank as the process beside it sees it; ``doing`` is what it does."""

    beat_s = 1.0

    def __init__(self, number: int) -> None:
        self.there, control = socket.socketpair()
        self.control = Link(number, control)
        self.doing = Status()
        self.ended: list[str] = []
        self.sockets: list[socket.socket] = []

    def status(self) -> Status:
        return self.doing

    def tell(self, **message: Any) -> None:
        self.there.sendall(encode(message))

    def is_gone(self) -> bool:
        return False

    def end(self, text: str) -> None:
        self.ended.append(text)
        self.die()

    def die(self) -> None:
        """Close the connections, as the kernel does."""
        for one in self.sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class Job:
    """Ranks that are connected as those of a job are, with their watchers in threads."""

    def __init__(self, size: int, said: list[str]) -> None:
        self._said = said
        names = [f"rank {rank} on h{rank} (pid {100 + rank})" for rank in range(size)]
        pairs = {rank: socket.socketpair() for rank in range(1, size)}
        links = [{rank: here for rank, (here, _) in pairs.items()}]
        links += [{0: there} for _, there in pairs.values()]
        self.ranks: list[Any] = [Rank(number) for number in range(size)]
        self.watchers = []
        for rank, its in zip(self.ranks, links, strict=True):
            rank.sockets = list(its.values())
            self.watchers.append(Watcher(names, its, LIMIT_S, rank))
        self.threads = [threading.Thread(target=one.run, daemon=True) for one in self.watchers]

    def start(self, *but: int) -> None:
        """Start all, but for those ranks that are silent."""
        for rank, thread in enumerate(self.threads):
            if rank not in but:
                thread.start()

    def stop(self) -> None:
        for rank, thread in zip(self.ranks, self.threads, strict=True):
            rank.there.shutdown(socket.SHUT_RDWR)
            if thread.is_alive():
                thread.join(SOON_S)
            for one in (rank.there, rank.control.socket, *rank.sockets):
                one.close()

    def goes_on(self, seconds: float, *ranks: int) -> None:
        """Wait until ranks have watched for so long; they may run seldom."""
        watchers = [self.watchers[rank] for rank in ranks]
        ends = [one.clock.now + seconds for one in watchers]
        soon(lambda: all(one.clock.now > end for one, end in zip(watchers, ends, strict=True)))

    def cause(self, rank: int, patience_s: float = SOON_S) -> str:
        """Return what the user of a rank is told to have become of another."""
        self.ranks[rank].tell(explain=patience_s)
        assert self.ranks[rank].there.recv(1) == child_process.EXPLAINED
        start = f"rank {rank} failed because of another: "
        return "".join(text for text in self._said if text.startswith(start))

    def held(self, rank: int) -> list[str]:
        """What a rank has said of threads that it lets finish."""
        start = f"rank {rank} waits for a rank that is lost: rank 2 on h2"
        return [text for text in self._said if text.startswith(start)]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(child_process, "say", found.append)
    return found


@pytest.fixture
def job(said: list[str]) -> Iterator[Job]:
    one = Job(3, said)
    yield one
    one.stop()


def soon(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < deadline, true
        time.sleep(0.01)


def test_a_healthy_job_hears_nothing(job: Job) -> None:
    job.start()
    for rank in job.ranks:
        rank.doing = WAITS
    job.goes_on(2 * LIMIT_S, 0, 1, 2)
    assert [rank.ended for rank in job.ranks] == [[], [], []]
    assert job.cause(2, 0.0) == ""


def test_only_a_rank_that_waits_is_ended_for_one_that_is_killed(job: Job) -> None:
    """The others may be saving a checkpoint, and find out for themselves."""
    job.start()
    job.ranks[2].doing = WAITS
    job.ranks[1].die()
    soon(lambda: job.ranks[2].ended)
    assert "rank 1 on h1 (pid 101) ended without a word" in job.ranks[2].ended[0]
    job.goes_on(1.0, 0)
    assert job.ranks[0].ended == []
    assert "rank 1 on h1 (pid 101) ended without a word" in job.cause(0)


@pytest.mark.parametrize("first", [0, LATER])
def test_who_ends_for_a_silent_rank_is_not_taken_for_the_lost_one(
    said: list[str], first: int
) -> None:
    job = Job(4, said)
    job.start(2)
    job.ranks[first].doing = WAITS
    soon(lambda: job.ranks[first].ended)
    others = {0, 1, 3} - {first}
    for rank in others:
        job.ranks[rank].doing = WAITS
    for rank in others:
        soon(lambda rank=rank: job.ranks[rank].ended)
        assert "rank 2 on h2 (pid 102) has been silent" in job.ranks[rank].ended[0]
    job.threads[2].start()  # goes on after all, and is told
    assert "given this rank up: rank 2 on" in job.cause(2)
    job.stop()


def test_an_exception_is_known_with_its_text(job: Job) -> None:
    job.start()
    job.ranks[2].tell(raised="ValueError: bad sample (data.py:7)")
    job.ranks[2].tell(left=True)
    soon(lambda: job.watchers[0]._loss)
    job.ranks[2].die()
    for rank in (0, 1):
        how = "rank 2 on h2 (pid 102) raised ValueError: bad sample (data.py:7)"
        assert job.cause(rank).endswith(how)


@pytest.mark.nightly  # it waits for true limits of seconds
def test_a_rank_that_leaves_is_no_loss(job: Job) -> None:
    job.start()
    job.ranks[0].doing = WAITS
    job.ranks[1].tell(left=True)
    soon(lambda: job.watchers[0]._left == 1)
    job.ranks[1].die()
    assert "rank 1 on h1 (pid 101) has ended without an exception" in job.cause(2)
    job.goes_on(2 * LIMIT_S, 0, 2)
    assert [rank.ended for rank in job.ranks] == [[], [], []]


@pytest.mark.parametrize("busy", [0, LATER])
def test_no_rank_ends_while_a_thread_of_one_works(job: Job, busy: int) -> None:
    """One rank's end ends the launcher's whole job, and with it a checkpoint that is half written.

    Rank 0 usually writes it, and any rank may.
    """
    job.ranks[busy].doing = Status(True, 100 * LIMIT_S, busy=True)
    job.ranks[1 - busy].doing = WAITS
    job.start(2)
    for rank in (0, 1):
        soon(lambda rank=rank: job.held(rank))
        assert job.ranks[rank].ended == []
    job.ranks[busy].doing = WAITS
    for rank in (0, 1):
        soon(lambda rank=rank: job.ranks[rank].ended)
        assert len(job.held(rank)) == 1


@pytest.mark.nightly  # it waits for true limits of seconds
def test_a_thread_that_never_ends_is_waited_for_within_the_limit(job: Job) -> None:
    for rank in (0, 1):
        job.ranks[rank].doing = Status(True, 100 * LIMIT_S, busy=True)
    job.start(2)
    for rank in (0, 1):
        soon(lambda rank=rank: job.ranks[rank].ended)


def test_time_in_which_a_process_did_not_run_does_not_count() -> None:
    """A job that is stopped as a whole, and continued, finds nobody silent."""
    clock = AwakeClock(most_s=0.05)
    time.sleep(0.3)
    clock.tick()
    assert 0 < clock.now <= 0.05


def test_a_long_message_to_a_link_that_takes_nothing_does_not_block(job: Job) -> None:
    for _ in range(10_000):
        job.watchers[0]._links[1].send(encode("x" * 300))


# Rank 0's port

SECRET = "0123456789abcdef" * 2


class Port:
    """The port of rank 0, until the context ends."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.listening = listen(address)
        self.number = self.listening.getsockname()[1]
        self._over, over = socket.socketpair()
        self._accepted: dict[int, socket.socket] = {}

        def run() -> None:
            self._accepted = accept(self.listening, SECRET, over)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def connect(self, rank: int, secret: str = SECRET, host: str = "127.0.0.1") -> Any:
        return connect([(host, self.number)], secret, rank)

    def close(self) -> dict[int, socket.socket]:
        self._over.send(b"x")
        self._thread.join(SOON_S)
        return self._accepted


@pytest.mark.parametrize(
    "line", [b"\xff\xfe \xe9\n", b"GET / HTTP/1.1\r\n\r\n", b"x" * 500, b"a", b""]
)
def test_a_stranger_neither_gets_in_nor_holds_up_a_rank(line: bytes) -> None:
    """A line that was not ASCII raised TypeError in the listener: no rank got in after.

    A stranger that sent a byte now and then held rank 0 in hvd.init() for minutes.
    """
    port = Port()
    with socket.create_connection(("127.0.0.1", port.number)) as stranger:
        stranger.settimeout(SOON_S)
        stranger.sendall(line)
        assert port.connect(1, "0" * 32) is None
        link = port.connect(2)
        ((rank, met),) = port.close().items()
        with suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    assert rank == 2
    met.sendall(b"x")
    assert link.recv(1) == b"x"
    link.close()
    met.close()


def test_a_rank_that_tries_again_has_given_the_first_connection_up() -> None:
    port = Port()
    first, then = port.connect(1), port.connect(1)
    port.close()[1].sendall(b"x")
    assert then.recv(1) == b"x"
    assert first.recv(1) == b""


def test_the_door_is_where_horovods_own_connections_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood open on every interface, also those that face other networks."""

    def of(address: str) -> Any:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return SimpleNamespace(family=family, address=address)

    addresses = {"lo": [of("127.0.0.1")], "eth0": [of("fe80::1"), of("fc00::1"), of("10.0.0.2")]}
    monkeypatch.setattr(rank_side.psutil, "net_if_addrs", lambda: addresses)
    assert rank_side._addresses("eth0") == ["10.0.0.2", "fc00::1"]
    assert rank_side._addresses() == ["10.0.0.2", "fc00::1", "127.0.0.1"]
    assert rank_side._addresses("no-such-interface") == []
    for address, hosts in (("127.0.0.1", {"127.0.0.1"}), ("", {"::", "0.0.0.0"})):
        with listen(address) as listening:
            assert listening.getsockname()[0] in hosts


def test_ipv6_alone_will_do() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    port = Port("::1")
    link = port.connect(1, host="::1")
    assert link.family == socket.AF_INET6
    link.close()
    port.close()[1].close()


def test_a_service_that_is_no_rank_takes_its_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A proxy behind the first address took it all: the right one was not tried.

    One rank alone must not raise on what a foreign service answers: the others wait for it.
    """
    monkeypatch.setattr(rendezvous, "CONNECT_S", 0.5)
    port = Port()
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("", 0)) as other:

        def answer() -> None:
            accepted, _ = other.accept()
            with accepted:
                accepted.sendall(b"\xff\xfe\x00\n")
                accepted.recv(100)

        thread = threading.Thread(target=answer)
        thread.start()
        numbers = [silent.getsockname()[1], other.getsockname()[1], port.number]
        ways = [("no..host", 1), *(("127.0.0.1", number) for number in numbers)]
        link = connect(ways, SECRET, 1)
        thread.join()
    assert link is not None
    link.close()
    assert list(port.close()) == [1]
