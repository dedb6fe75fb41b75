"""When a process counts as one that waits for other ranks inside TensorFlow."""

from __future__ import annotations

import doctest
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from hvd_pipe.runtime.watch.rank_side import Job, Watch
from hvd_pipe.runtime.watch.waits import Wait, waiting_for
from hvd_pipe.tensorflow import workers

SOON_S = 60.0  # for what takes a moment on a quiet machine
LONG_S = 0.5


def test_doctests() -> None:
    assert doctest.testmod(workers).failed == 0


def look() -> Wait | None:
    return workers.waits_for(sys._current_frames())


class Queue:
    """A graph that waits in TensorFlow for what another thread gives it, as for a message."""

    def __init__(self) -> None:
        self.queue = tf.queue.FIFOQueue(10, [tf.int32], [[]])
        self.graph = tf.function(lambda: self.queue.dequeue() + 1)
        self.give()
        self.graph()  # traced before anybody looks

    def give(self) -> None:
        self.queue.enqueue(1)

    def take(self) -> None:
        self.graph()


@pytest.fixture(scope="module")
def queue() -> Queue:
    return Queue()


def seen_beside(
    work: Callable[[], object], see: Callable[[], object], go_on: Callable[[], object]
) -> Any:
    """Return what another thread sees while the main one works, which ``go_on`` lets end."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(see())
        finally:
            go_on()

    thread = threading.Thread(target=run)
    thread.start()
    work()
    thread.join()
    assert found, "it raised"
    return found[0]


def soon() -> Wait:
    """Return the first wait that is seen."""
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        if (found := look()) is not None:
            return found
        time.sleep(0.01)
    raise AssertionError("nobody waits")


def looks(seconds: float = LONG_S) -> list[bool]:
    """Whether each of many looks finds a wait."""
    found, end = [], time.monotonic() + seconds
    while time.monotonic() < end or len(found) < 5:
        found.append(look() is not None)
        time.sleep(0.02)
    return found


def test_a_call_in_which_nothing_works_is_a_wait_and_the_next_call_another(queue: Queue) -> None:
    """A job that gets on is none that waits, however slow its links are."""

    def take_two() -> None:
        queue.take()
        queue.take()

    def see() -> tuple[object, object]:
        """At the first look a thread that is on its way to the call may seem to wait, too."""
        deadline, first, then = time.monotonic() + SOON_S, None, soon()
        while first != then:
            assert time.monotonic() < deadline
            time.sleep(LONG_S)
            first, then = then, soon()
        queue.give()
        while (then := soon()) == first:
            assert time.monotonic() < deadline
        return first, then

    first, then = seen_beside(take_two, see, queue.give)
    assert first != then


@pytest.fixture(scope="module")
def computing() -> tuple[Callable[[], object], Callable[[], object]]:
    """A call that computes until it is told to end."""
    ends = tf.Variable(False)

    @tf.function  # type: ignore[untyped-decorator]
    def compute() -> tf.Tensor:
        x = tf.ones([64, 64])
        while not ends:
            x = tf.linalg.matmul(x, x) / 64.0
        return x

    ends.assign(True)
    compute()
    ends.assign(False)
    return compute, lambda: ends.assign(True)


def test_a_call_that_computes_for_long_is_no_wait(computing: Any) -> None:
    """A look may come while the thread that computes sleeps; a wait lasts for all looks."""
    compute, end = computing
    seen = seen_beside(compute, looks, end)
    assert seen.count(True) < len(seen) / 2


def test_the_users_own_code_is_no_wait_even_where_tensorflow_calls_it() -> None:
    assert not any(seen_beside(lambda: time.sleep(2 * LONG_S), looks, lambda: None))
    there, ended = threading.Event(), threading.Event()

    def sample() -> int:
        there.set()
        ended.wait()
        return 3

    graph = tf.function(lambda: tf.py_function(sample, [], tf.int32))

    def see() -> list[bool]:
        there.wait()
        return looks()

    assert not any(seen_beside(graph, see, ended.set))


def test_a_main_thread_that_waits_for_one_that_waits(queue: Queue) -> None:
    other = threading.Thread(target=queue.take)
    other.start()
    assert seen_beside(other.join, soon, queue.give)


def test_a_wait_that_is_registered_counts_whatever_else_works() -> None:
    with waiting_for("a message of a pipeline"):
        assert look() is not None
    assert look() is None


def test_where_one_cannot_tell_only_a_long_wait_counts() -> None:
    ranks: Any = SimpleNamespace(rank=lambda: 0)
    found: Any = lambda _: ("a step on a GPU",)  # noqa: E731
    job = Job(ranks, workers.agreement, found, lambda _: False, is_sure=lambda: False)
    watch = Watch(job, LONG_S)
    assert not watch.status().waits
    time.sleep(LONG_S)
    assert watch.status().waits


def test_a_start_that_nobody_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of Open MPI's that polls counted as one that computes: no rank ever waited."""
    monkeypatch.setattr(workers, "_is_at_work", lambda: pytest.fail("asked"))
    monkeypatch.setattr(workers, "_missed", False)
    workers._miss_start()
    assert not workers._is_sure()
    with workers._starting_to_communicate():
        pass
    assert not workers._missed
