"""What ranks hear of each other, over sockets within one process."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_pipe.runtime.watch import rendezvous
from hvd_pipe.runtime.watch.rendezvous import Listener, connect
from hvd_pipe.runtime.watch.watcher import AwakeClock, Link, Peer, Status, Watcher, encode

pytestmark = pytest.mark.slow

LIMIT_S = 2.0
SOON_S = 20.0  # for what takes a second or two on a quiet machine


class Process:
    """Stands for a rank as the process beside it sees it; ``doing`` is what it does."""

    beat_s = 1.0

    def __init__(self, rank: int) -> None:
        self.there, control = socket.socketpair()
        self.control = Link(rank, control)
        self.doing = Status(where="train.py:3")
        self.said: list[str] = []
        self.ended: list[str] = []
        self.sockets: list[socket.socket] = []

    def is_gone(self) -> bool:
        return False

    def is_stopped(self) -> bool:
        return False

    def end_stopped(self, text: str) -> None:
        self.ended.append(text)

    def status(self) -> Status:
        return self.doing

    def say(self, text: str) -> None:
        self.said.append(text)

    def end(self, text: str) -> None:
        self.ended.append(text)
        for one in self.sockets:
            one.shutdown(socket.SHUT_RDWR)  # as the kernel does when it has ended


class Heart(Watcher):
    """The process beside a rank, as a thread of this one."""

    def __init__(self, peers: list[Peer], rank: int, links: dict[int, socket.socket]) -> None:
        self.process: Any = Process(rank)
        super().__init__(peers, links, LIMIT_S, self.process)
        self.thread = threading.Thread(target=self.run, daemon=True)

    def tell(self, **message: Any) -> None:
        self.process.there.sendall(encode(message))

    def cause(self, patience_s: float) -> str | None:
        self.tell(cause=patience_s)
        answer = self.process.there.makefile().readline()
        found: str | None = json.loads(answer)["cause"]
        return found

    def stop(self) -> None:
        self.process.there.shutdown(socket.SHUT_RDWR)
        if self.thread.is_alive():
            self.thread.join(SOON_S)
        self.process.there.close()
        self.process.control.socket.close()


class Job:
    """Ranks that are connected as those of a job are."""

    def __init__(self, size: int) -> None:
        peers = [Peer(rank, f"h{rank}", 100 + rank) for rank in range(size)]
        pairs = {rank: socket.socketpair() for rank in range(1, size)}
        links = [{rank: here for rank, (here, _) in pairs.items()}]
        links += [{0: there} for _, there in pairs.values()]
        self.sockets = links
        self.hearts = [Heart(peers, rank, links[rank]) for rank in range(size)]
        self.processes = [heart.process for heart in self.hearts]

    def start(self, *but: int) -> None:
        """Start all, but for those ranks that are silent."""
        for rank, heart in enumerate(self.hearts):
            if rank not in but:
                heart.thread.start()

    def stop(self) -> None:
        for heart, links in zip(self.hearts, self.sockets, strict=True):
            heart.stop()
            for one in links.values():
                one.close()

    def goes_on(self, seconds: float, *ranks: int) -> None:
        """Wait until ranks, or all of them, have watched for so long; they may run seldom."""
        hearts = [self.hearts[rank] for rank in ranks] or self.hearts
        ends = [heart.clock.now + seconds for heart in hearts]
        soon(lambda: all(heart.clock.now > end for heart, end in zip(hearts, ends, strict=True)))

    def kill(self, rank: int) -> None:
        """Close the connections of a rank, as the kernel does."""
        for one in self.sockets[rank].values():
            one.shutdown(socket.SHUT_RDWR)

    def wait(self, rank: int) -> None:
        """Let a rank do nothing but wait for the others, for ever."""
        self.processes[rank].doing = Status("train.py:9", waits=True, since_s=100 * LIMIT_S)

    def held(self, rank: int) -> list[str]:
        """What a rank has said of threads that it lets finish."""
        return [text for text in self.processes[rank].said if "have finished their work" in text]


@pytest.fixture
def job() -> Iterator[Job]:
    one = Job(3)
    yield one
    one.stop()


def soon(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < deadline, true
        time.sleep(0.01)


def test_a_healthy_job_hears_nothing(job: Job) -> None:
    job.start()
    job.goes_on(2 * LIMIT_S)
    assert [process.ended for process in job.processes] == [[], [], []]
    assert job.hearts[2].cause(0.0) is None


def test_a_rank_that_is_killed_is_known_to_all(job: Job) -> None:
    job.start()
    job.kill(1)
    for rank in (0, 2):
        assert "rank 1 on h1 (pid 101) ended without a word" in str(job.hearts[rank].cause(SOON_S))


def test_only_a_rank_that_waits_is_ended(job: Job) -> None:
    """The others may be saving a checkpoint, and find out for themselves."""
    job.start()
    job.wait(2)
    job.kill(1)
    soon(lambda: job.processes[2].ended)
    job.goes_on(1.0, 0)
    assert job.processes[0].ended == []
    assert "rank 1 on h1" in job.processes[2].ended[0]


LATER = pytest.param(1, marks=pytest.mark.nightly)  # each waits for true limits of seconds


@pytest.mark.parametrize("silent", [0, LATER])
def test_a_silent_rank_is_named_and_then_given_up(job: Job, silent: int) -> None:
    job.start(silent)
    waiting = [rank for rank in range(3) if rank != silent]
    for rank in waiting:
        job.wait(rank)
    for rank in waiting:
        soon(lambda rank=rank: job.processes[rank].ended)
        assert f"rank {silent} on h{silent}" in job.processes[rank].ended[0]
        assert "silent" in job.processes[rank].ended[0]


@pytest.mark.parametrize("first", [0, LATER])
def test_who_ends_for_a_lost_rank_is_not_taken_for_the_lost_one(first: int) -> None:
    job = Job(4)
    for rank, process in enumerate(job.processes):
        process.sockets = list(job.sockets[rank].values())
    job.start(2)
    job.wait(first)
    soon(lambda: job.processes[first].ended)
    others = {0, 1, 3} - {first}
    for rank in others:
        job.wait(rank)
    for rank in others:
        soon(lambda rank=rank: job.processes[rank].ended)
        assert "rank 2 on h2 (pid 102) has been silent" in job.processes[rank].ended[0]
    job.hearts[2].thread.start()  # goes on after all, and is told
    assert "given this rank up: rank 2 on" in str(job.hearts[2].cause(SOON_S))
    job.stop()


def test_an_exception_is_known_with_its_text(job: Job) -> None:
    job.start()
    job.hearts[2].tell(raised="ValueError: bad sample (data.py:7)")
    job.hearts[2].tell(left=True)
    soon(lambda: 2 in job.hearts[2]._left)
    job.kill(2)
    for rank in (0, 1):
        cause = job.hearts[rank].cause(SOON_S)
        assert cause == "rank 2 on h2 (pid 102) raised ValueError: bad sample (data.py:7)"


@pytest.mark.nightly  # it waits for true limits of seconds
def test_a_rank_that_leaves_is_no_loss(job: Job) -> None:
    job.start()
    job.wait(0)
    job.hearts[1].tell(left=True)
    soon(lambda: 1 in job.hearts[1]._left)
    job.kill(1)
    assert "has ended without an exception" in str(job.hearts[2].cause(SOON_S))
    job.goes_on(2 * LIMIT_S, 0, 2)
    assert [process.ended for process in job.processes] == [[], [], []]


@pytest.mark.parametrize("busy", [0, LATER])
def test_no_rank_ends_while_a_thread_of_one_works(job: Job, busy: int) -> None:
    """One rank's end ends the launcher's whole job, and with it a checkpoint that is half written.

    Rank 0 usually writes it, and any rank may.
    """
    job.processes[busy].doing = Status("train.py:9", True, 100 * LIMIT_S, busy=True)
    job.wait(1 - busy)
    job.start(2)
    for rank in (0, 1):
        soon(lambda rank=rank: job.held(rank))
        assert job.processes[rank].ended == []
    job.wait(busy)
    for rank in (0, 1):
        soon(lambda rank=rank: job.processes[rank].ended)
        assert len(job.held(rank)) == 1
        assert "rank 2 on h2" in job.held(rank)[0]


@pytest.mark.nightly  # it waits for true limits of seconds
def test_a_thread_that_never_ends_is_waited_for_within_the_limit(job: Job) -> None:
    for rank in (0, 1):
        job.processes[rank].doing = Status("train.py:9", True, 100 * LIMIT_S, busy=True)
    job.start(2)
    for rank in (0, 1):
        soon(lambda rank=rank: job.processes[rank].ended)


def test_time_in_which_a_process_did_not_run_does_not_count() -> None:
    """A job that is stopped as a whole, and continued, finds nobody silent."""
    clock = AwakeClock(most_s=0.05)
    time.sleep(0.3)
    clock.tick()
    assert 0 < clock.now <= 0.05


def test_a_last_word_may_come_after_an_empty_line(job: Job) -> None:
    """A rank ends what it had begun to say before it says that it hears no more of others."""
    job.start(1)
    job.sockets[1][0].sendall(b'\n{"left": 1}\n')
    assert "rank 1 on h1 (pid 101) has ended without an exception" in str(
        job.hearts[2].cause(SOON_S)
    )


def test_a_long_message_to_a_link_that_takes_nothing_does_not_block(job: Job) -> None:
    for _ in range(10_000):
        job.hearts[0]._links[1].send(encode({"lost": 2, "how": "x" * 300}))


def port_of(listener: Listener) -> int:
    return int(listener.address["addresses"][0][1])


@pytest.mark.parametrize("line", [b"\xff\xfe \xe9\n", b"GET / HTTP/1.1\r\n\r\n", b"x" * 500])
def test_a_stranger_who_talks_nonsense_ends_nothing(line: bytes) -> None:
    """A line that was not ASCII raised TypeError in the listener: no rank got in after.

    Nor does one get in that does not know the secret.
    """
    listener = Listener()
    with socket.create_connection(("127.0.0.1", port_of(listener))) as stranger:
        stranger.settimeout(SOON_S)
        stranger.sendall(line)
        with suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
        assert connect({**listener.address, "question": "0" * 32}, 1) is None
        link = connect(listener.address, 2)
        assert link is not None
        link.close()
    (met,) = listener.close().values()
    met.close()


def test_strangers_who_take_their_time_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that sent a byte now and then held rank 0 in hvd.init() for minutes."""
    monkeypatch.setattr(rendezvous, "AUTH_TIMEOUT_S", 1000.0)  # as if it sent enough of them
    listener = Listener()
    strangers = [socket.create_connection(("127.0.0.1", port_of(listener))) for _ in range(5)]
    for stranger in strangers:
        stranger.sendall(b"a")
    link = connect(listener.address, 2)
    met = listener.close()
    assert list(met) == [2]
    for one in (link, *met.values(), *strangers):
        assert one is not None
        one.close()


def snic(address: str) -> Any:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return SimpleNamespace(family=family, address=address)


def test_ipv6_alone_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    names = {"lo": [snic("::1")], "eth0": [snic("fe80::1%eth0")]}
    monkeypatch.setattr(rendezvous.psutil, "net_if_addrs", lambda: names)
    monkeypatch.delenv("HOROVOD_GLOO_IFACE", raising=False)
    listener = Listener()
    assert [host for host, _ in listener.address["addresses"]] == ["::1"]
    link = connect(listener.address, 1)
    met = listener.close()
    assert link is not None
    assert link.family == socket.AF_INET6
    link.close()
    met[1].close()


def test_the_door_is_where_horovods_own_connections_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood open on every interface, also those that face other networks."""
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    monkeypatch.setattr(rendezvous.psutil, "net_if_addrs", lambda: {"lo": [snic("127.0.0.1")]})
    listener = Listener()
    assert listener.address["addresses"] == [("127.0.0.1", port_of(listener))]
    assert listener.listening[0].getsockname()[0] == "127.0.0.1"
    link = connect(listener.address, 1)
    met = listener.close()
    assert link is not None
    link.close()
    met[1].close()
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "no-such-interface")
    listener = Listener()
    assert listener.listening[0].getsockname()[0] in ("::", "0.0.0.0")
    assert listener.close() == {}


def test_a_stranger_behind_the_door() -> None:
    """One rank alone must not raise on what a foreign service answers: the others wait for it."""
    with socket.create_server(("127.0.0.1", 0)) as service:

        def answer() -> None:
            accepted, _ = service.accept()
            with accepted:
                accepted.sendall(b"\xff\xfe\x00\n")
                accepted.recv(100)

        thread = threading.Thread(target=answer)
        thread.start()
        address = {
            "host": "no..host",  # nobody is asked for it
            "addresses": [("127.0.0.1", service.getsockname()[1])],
            "question": "q",
            "answer": "a",
        }
        assert connect(address, 1) is None
        thread.join()


def test_a_service_that_accepts_and_says_nothing_takes_its_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A proxy behind the first address took it all: the right one was not tried.

    The job then ran without a watch.
    """
    now = 0.0

    class Connection:
        def __init__(self, way: tuple[str, int], timeout: float) -> None:
            self.host, self.timeout = way[0], timeout

        def settimeout(self, timeout: float) -> None:
            self.timeout = timeout

        def sendall(self, data: bytes) -> None:
            pass

        def recv(self, size: int) -> bytes:
            nonlocal now
            if self.host == "10.0.0.9":
                return b"a\n"
            now += self.timeout
            raise TimeoutError

        def close(self) -> None:
            pass

    monkeypatch.setattr(socket, "create_connection", Connection)
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: now))
    ways = [(f"10.0.0.{number}", 1) for number in range(10)]
    link: Any = connect({"host": "h0", "addresses": ways, "question": "q", "answer": "a"}, 1)
    assert link is not None
    assert link.host == "10.0.0.9"
    assert now < rendezvous.CONNECT_S
