"""What a rank says of itself: whether it waits, and by what it ends."""

from __future__ import annotations

import doctest
import gc
import json
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

from hvd_pipe.runtime.watch import child_process, rank_side, waits
from hvd_pipe.runtime.watch.child_process import Status
from hvd_pipe.runtime.watch.rank_side import Job, Watch
from hvd_pipe.runtime.watch.rendezvous import connect
from hvd_pipe.runtime.watch.waits import OtherThreads, waiting_for
from hvd_pipe.torch import workers
from hvd_pipe.torch.messages import pending

pytestmark = pytest.mark.slow


def watch(waits_for: Any = workers.waits_for) -> Watch:
    everyone: Any = SimpleNamespace(size=lambda: 3, rank=lambda: 0)
    failed = (HorovodInternalError,)
    return Watch(Job(everyone, workers.agreement, waits_for, lambda e: isinstance(e, failed)), 9.0)


def test_doctests() -> None:
    assert sum(doctest.testmod(each).failed for each in (child_process, waits, rank_side)) == 0


@pytest.mark.parametrize("text", ["-1", "inf", "nan", "two minutes"])
def test_a_limit_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="HVD_PIPE_TIMEOUT must be a number of seconds"):
        rank_side._limit(text)


def test_a_look_at_a_rank_keeps_nothing_of_what_it_runs() -> None:
    """Once a second, all variables of the running functions were kept for the garbage collector.

    It ended iterators of tf.data late, and then waited for their threads, for up to a minute.
    """
    status = watch(lambda frames: None).status

    def running() -> weakref.ref[Any]:
        batch = threading.Event()
        with ThreadPoolExecutor(1) as beside:
            beside.submit(status).result()
        return weakref.ref(batch)

    gc.disable()
    try:
        assert running()() is None
    finally:
        gc.enable()


class Stuck:
    """Functions that call each other, the last of which waits, as Horovod's do for a message."""

    def __init__(self, module: str, name: str, registered: str = "") -> None:
        self.there, self._over = threading.Event(), list[bool]()
        space: dict[str, Any] = {"__name__": module, "there": self.there, "over": self._over}
        space["waits"] = waiting_for(registered) if registered else nullcontext()
        space["sleep"] = time.sleep
        body = "with waits:\n        there.set()\n        while not over: sleep(0.001)"
        exec(f"def {name}():\n    {body}", space)
        self.function: Any = space[name]

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
    status = watch().status
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
    one = watch()

    def look_twice() -> tuple[Status, Status]:
        return one.status(), one.status()

    for handle in (7, 8):
        monkeypatch.setattr(mpi_ops, "_handle_map", {handle: None})
        stock = Stuck("horovod.torch.mpi_ops", "synchronize")
        for stuck in (stock, Stuck("ours", "wait", registered="the same name")):
            first, then = stuck.seen(look_twice)
            assert first.waits
            assert first.since_s == 0 < then.since_s
    assert not one.status().waits


@pytest.mark.parametrize("registered", ["", "a message"])
def test_a_thread_that_waits_beside_a_busy_main_one_does_not_count(registered: str) -> None:
    """A rank that saves a checkpoint would end; one whose main thread waits for it does wait."""
    status = watch().status
    stuck = Stuck("horovod.torch.mpi_ops", "synchronize", registered)
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
            for _ in range(60):
                assert others.are_busy()
                time.sleep(0.1)
            go_on.set()
        is_soon(False, others)


class Ranks:
    """Two ranks that connect to this one; the first of them gives up before it is accepted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offered: dict[str, Any] = {}
        self.links: list[Any] = []
        monkeypatch.delenv("HVD_PIPE_TIMEOUT", raising=False)
        monkeypatch.setattr(rank_side, "is_elastic", lambda: False)
        monkeypatch.setattr(rank_side.atexit, "register", id)
        everyone: Any = SimpleNamespace(size=lambda: 3, rank=lambda: 0)
        self.agreement: Any = SimpleNamespace(found_by_first=self.offer, gather=self.gather)
        self.job = Job(everyone, self.agreement, workers.waits_for, lambda error: False)

    def offer(self, find: Callable[[], dict[str, Any]], *_: object) -> dict[str, Any]:
        self.offered = find()
        return self.offered

    def gather(self, own: Any, *_: object) -> list[Any]:
        addresses, secret = self.offered["addresses"], self.offered["secret"]
        self.links = [connect(addresses, secret, rank) for rank in (1, 2)]
        return [own, ("rank 1 on h1 (pid 8)", False), ("rank 2 on h2 (pid 9)", True)]


def test_a_rank_that_gave_up_before_it_was_let_in_is_not_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its end of the connection is closed: that must not look like the end of the rank."""
    ranks = Ranks(monkeypatch)
    with pytest.warns(UserWarning, match=r"rank 1 on h1 \(pid 8\) cannot connect to rank 0"):
        rank_side.start(ranks.job)
    ranks.links[1].settimeout(20)
    assert ranks.links[0].recv(1) == b""
    assert json.loads(ranks.links[1].makefile().readline())["loss"] is None
    rank_side.stop()


def test_nothing_stays_open_where_ranks_cannot_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)

    def gather(*words: Any) -> None:
        ranks.gather(*words)
        raise HorovodInternalError("another rank is gone")

    ranks.agreement.gather = gather
    with pytest.raises(HorovodInternalError) as error:  # holds the frame, and what that holds
        rank_side.start(ranks.job)
    assert [link.recv(1) for link in ranks.links] == [b"", b""], error


def test_a_forked_child_does_not_keep_a_dead_ranks_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A data loader's worker outlives its rank for a while, and others must know at once."""
    one, (mine, its) = watch(), socket.socketpair()
    one._control, there = socket.socketpair()
    there.settimeout(20)
    monkeypatch.setattr(rank_side, "_watch", one)
    child = os.fork()
    if child == 0:
        its.send(b"x")
        its.recv(1)
        os._exit(0)
    try:
        mine.recv(100)
        one.close()  # as the kernel does for a rank that is killed
        assert there.recv(1) == b""
    finally:
        mine.send(b"x")
        os.waitpid(child, 0)
        for each in (mine, its, there):
            each.close()


@pytest.mark.parametrize(
    ("before", "error", "words"),
    [
        (None, None, [{"left": True}]),
        (None, TypeError("bad"), [{"raised": "TypeError: bad"}, {"left": True}]),
        (None, HorovodInternalError("gone"), [{"explain": rank_side.NEWS_S}, {"left": True}]),
        # Python keeps the last one that a console has shown.
        (TypeError("old"), None, [{"left": True}]),
    ],
)
def test_what_a_rank_says_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
    before: BaseException | None,
    error: BaseException | None,
    words: list[dict[str, Any]],
) -> None:
    """Whatever `sys.excepthook` does; also, with an exception, while Python waits for threads."""
    monkeypatch.delattr(sys, "ps1", raising=False)
    monkeypatch.setattr(sys, "last_value", before, raising=False)
    told: list[Any] = []
    one: Any = watch()
    one.tell = told.append
    monkeypatch.setattr(rank_side, "_watch", one)
    monkeypatch.setattr(sys, "last_value", error or before)
    one.explain(asks=False)
    assert told == [each for each in words if "raised" in each]
    told.clear()
    rank_side._at_exit()
    assert told == words
    told.clear()
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    rank_side._at_exit()  # at a prompt, an exception is shown, and ends nothing
    assert told == [{"left": True}]
