"""What a rank says of itself: where its script is, and what it waits for."""

from __future__ import annotations

import doctest
import gc
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops

from hvd_pipe.runtime.watch import waits, watchdog, watcher
from hvd_pipe.runtime.watch.rendezvous import connect
from hvd_pipe.runtime.watch.waits import OtherThreads, waiting_for
from hvd_pipe.runtime.watch.watchdog import Reporter
from hvd_pipe.runtime.watch.watcher import Peer, Status
from hvd_pipe.torch import workers
from hvd_pipe.torch.messages import pending

pytestmark = pytest.mark.slow


def test_doctests() -> None:
    assert sum(doctest.testmod(each).failed for each in (watcher, waits, watchdog)) == 0


@pytest.mark.parametrize("text", ["-1", "inf", "nan", "two minutes"])
def test_a_limit_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="HVD_PIPE_TIMEOUT must be a number of seconds"):
        watchdog._limit(text)


def test_the_line_of_the_script_is_named_not_that_of_a_library() -> None:
    found: list[str] = []
    frame = sys._getframe()
    # `sorted` calls back through a library's function, as a hook of torch's would be called.
    sorted([1], key=lambda _: found.append(watchdog._line(sys._getframe())) or 0)
    assert found[0].startswith("test_watchdog.py:")
    assert watchdog._line(frame).startswith("test_watchdog.py:")


def test_a_look_at_a_rank_keeps_nothing_of_what_it_runs() -> None:
    """Once a second, all variables of the running functions were kept for the garbage collector.

    It ended iterators of tf.data late, and then waited for their threads, for up to a minute.
    """
    process = watchdog._Process(0, lambda frames: None)

    def running() -> weakref.ref[Any]:
        batch = threading.Event()
        with ThreadPoolExecutor(1) as reporter:
            reporter.submit(process.status).result()
        return weakref.ref(batch)

    gc.disable()
    try:
        assert running()() is None
    finally:
        gc.enable()


class Stuck:
    """Functions that call each other, the last of which waits, as Horovod's do for a message.

    Args:
        module: Where they are.
        names: Theirs.
        registered: What the last one registers that it waits for.
    """

    def __init__(self, module: str, *names: str, registered: str = "") -> None:
        self.there, self._over = threading.Event(), list[bool]()
        space: dict[str, Any] = {"__name__": module, "there": self.there, "over": self._over}
        space["waits"] = waiting_for(registered) if registered else nullcontext()
        space["sleep"] = time.sleep
        body = "with waits:\n        there.set()\n        while not over: sleep(0.001)"
        for name in reversed(names):
            exec(f"def {name}():\n    {body}", space)
            body = f"{name}()"
        self.function: Any = space[names[0]]

    def go_on(self) -> None:
        self._over.append(True)

    def seen(self, status: Callable[[], Any]) -> Any:
        """What another thread sees while the main one waits here."""
        found = []

        def run() -> None:
            self.there.wait()
            try:
                found.append(status())
            finally:
                self.go_on()

        with beside(run):
            self.function()
        return found[0]


@contextmanager
def beside(run: Callable[[], None]) -> Iterator[None]:
    """Another thread, which ends by itself."""
    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()


def test_a_rank_waits_where_horovod_does_and_where_it_says_so() -> None:
    status = watchdog._Process(0, workers.waits_for).status
    assert not status().waits
    assert not Stuck("my_script", "synchronize").seen(status).waits
    assert Stuck("horovod.torch.mpi_ops", "synchronize").seen(status).waits
    assert not Stuck("hvd_pipe.torch.messages.pending", "wait").seen(status).waits
    assert Stuck("anything", "whatever", registered="a message").seen(status).waits
    with pytest.raises(ValueError, match="lost"), waiting_for("a message"):
        raise ValueError("lost")
    assert not status().waits


def test_the_time_is_that_of_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that waits for one message after the other gets on, however slow its links are."""
    process = watchdog._Process(0, workers.waits_for)

    def look_twice() -> tuple[Status, Status]:
        return process.status(), process.status()

    for handle in (7, 8):
        monkeypatch.setattr(mpi_ops, "_handle_map", {handle: None})
        stock = Stuck("horovod.torch.mpi_ops", "synchronize")
        for stuck in (stock, Stuck("ours", "wait", registered="the same name")):
            first, then = stuck.seen(look_twice)
            assert first.waits
            assert first.since_s == 0 < then.since_s
    assert not process.status().waits


@pytest.mark.parametrize(
    "stuck",
    [
        Stuck("horovod.torch.mpi_ops", "synchronize"),
        Stuck("ours", "wait", registered="a message"),
    ],
    ids=["stock", "registered"],
)
def test_a_thread_that_waits_beside_a_busy_main_one_does_not_count(stuck: Stuck) -> None:
    """A rank that saves a checkpoint would end; one whose main thread waits for it does wait."""
    status = watchdog._Process(0, workers.waits_for).status

    with beside(stuck.function):
        stuck.there.wait()
        busy = status().waits
        found: list[bool] = []
        seen = threading.Event()

        def run() -> None:
            deadline = time.monotonic() + 60
            while not (waits := status().waits) and time.monotonic() < deadline:
                pass
            found.append(waits)
            seen.set()

        with beside(run):
            seen.wait()  # the main thread waits for another
        stuck.go_on()
    assert (busy, found) == (False, [True])


def test_sent_messages_may_be_forgotten_while_they_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The communication thread forgets all where Horovod has failed.

    The main one went through the same set just then: "Set changed size during iteration".
    """

    def poll(handle: int) -> bool:
        pending.forget()  # as another thread does, at any time
        return False

    monkeypatch.setattr(pending, "poll", poll)
    monkeypatch.setattr(pending, "_handles", {1, 2, 3})
    pending.complete_all()


def test_a_thread_that_works_is_told_from_one_that_idles() -> None:
    """The end of a rank ended the thread that wrote its checkpoint as well."""
    go_on = threading.Event()

    def work() -> None:
        while not go_on.wait(0.01):
            pass

    def is_soon(busy: bool, others: OtherThreads) -> None:
        deadline = time.monotonic() + 60
        while others.are_busy() is not busy:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    others = OtherThreads()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(id, 0).result()
        is_soon(False, others)  # the pool's thread is there, and has nothing to do
        with beside(work):
            assert others.are_busy()
            for _ in range(60):
                time.sleep(0.1)
                assert others.are_busy()
            go_on.set()
        is_soon(False, others)


class Ranks:
    """Two ranks that connect to this one; the first of them gives up before it is accepted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offered: dict[str, Any] = {}
        self.links: list[Any] = []
        monkeypatch.delenv("HVD_PIPE_TIMEOUT", raising=False)
        monkeypatch.setattr(watchdog, "is_elastic", lambda: False)
        monkeypatch.setattr(watchdog, "_install", lambda: None)
        everyone: Any = SimpleNamespace(size=lambda: 3, rank=lambda: 0)
        self.agreement: Any = SimpleNamespace(found_by_first=self.offer, gather=self.gather)
        self.job = watchdog.Job(everyone, self.agreement, workers.waits_for, lambda error: False)

    def offer(self, find: Callable[[], dict[str, Any]], *_: object) -> dict[str, Any]:
        self.offered = find()
        return self.offered

    def gather(self, first: dict[str, Any], *_: object) -> list[dict[str, Any]]:
        self.links = [connect(self.offered["listener"], rank) for rank in (1, 2)]
        return [first, first | {"met": False}, first | {"met": True}]


def test_a_rank_that_gave_up_before_it_was_let_in_is_not_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its end of the connection is closed: that must not look like the end of the rank."""
    ranks = Ranks(monkeypatch)
    with pytest.warns(UserWarning, match="rank 1 on .* cannot connect to rank 0"):
        watchdog.start(ranks.job)
    assert watchdog._reporter is not None
    assert list(watchdog._reporter.links) == [2]
    assert ranks.links[0].recv(1) == b""
    watchdog.stop()


def test_nothing_stays_open_where_ranks_cannot_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)

    def gather(*words: Any) -> None:
        ranks.gather(*words)
        raise HorovodInternalError("another rank is gone")

    ranks.agreement.gather = gather
    with pytest.raises(HorovodInternalError) as error:  # holds the frame, and what that holds
        watchdog.start(ranks.job)
    assert [link.recv(1) for link in ranks.links] == [b"", b""], error


def test_a_forked_child_does_not_keep_a_dead_ranks_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A data loader's worker outlives its rank for a while, and others must know at once."""
    here, there = socket.socketpair()
    there.settimeout(20)
    reporter = Reporter([Peer(0, "h0", 1), Peer(1, "h1", 2)], 0, {1: here}, 120.0, _NOBODY)
    monkeypatch.setattr(watchdog, "_reporter", reporter)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    watchdog._install()
    mine, its = socket.socketpair()
    child = os.fork()
    if child == 0:
        its.send(b"x")
        its.recv(1)
        os._exit(0)
    try:
        mine.recv(100)
        reporter.close()  # as the kernel does for a rank that is killed
        assert there.recv(1) == b""
    finally:
        mine.send(b"x")
        os.waitpid(child, 0)
        for one in (mine, its, there):
            one.close()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What this rank tells the others."""
    found: list[str] = []
    reporter = SimpleNamespace(raised=found.append, leave=lambda: found.append("left"))
    monkeypatch.setattr(watchdog, "_reporter", reporter)
    monkeypatch.setattr(watchdog, "_job", None)
    monkeypatch.setattr(watchdog, "_explained", None)
    monkeypatch.setattr(watchdog, "_before", lambda *_: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.delattr(sys, "ps1", raising=False)
    return found


@pytest.mark.parametrize(
    ("is_old", "words"), [(True, ["left"]), (False, ["TypeError: bad", "left"])]
)
def test_an_exception_that_no_hook_has_told_is_told_at_the_end(
    told: list[str], monkeypatch: pytest.MonkeyPatch, is_old: bool, words: list[str]
) -> None:
    """Unless it is older: Python keeps the last one that a console has shown."""
    error = TypeError("bad")
    monkeypatch.setattr(sys, "last_value", error if is_old else None, raising=False)
    watchdog._install()
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    watchdog._at_exit()
    assert told == words


def test_an_exception_at_a_prompt_does_not_end_a_rank(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others were told that it ended by one that it had shown, and ended themselves."""
    watchdog._install()
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    watchdog._on_exception(TypeError, TypeError("shown"), None)
    monkeypatch.setattr(sys, "last_value", NameError("shown by another hook"), raising=False)
    watchdog._at_exit()
    assert told == ["left"]


_NOBODY: Any = None
