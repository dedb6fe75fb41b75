"""Messages that leave in a fixed order, with messages that travel when a test says so."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.torch.messages import ordered
from hvd_pipe.torch.messages.allreduce import Message, Reduction
from hvd_pipe.torch.messages.ordered import IN_FLIGHT, OrderedMessages, Sender

LIMIT_S = 60.0  # for an event that comes at once


def wait_for(event: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not event():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(1e-4)


class Wire:
    """Notes what leaves; lets arrive what `deliver` names, or all at once."""

    def __init__(self, at_once: bool = False) -> None:
        self.left: list[int] = []
        self.there: set[int] = set()
        self.most = 0
        self.at_once = at_once
        self.failing: dict[int, BaseException] = {}

    def leaves(self, number: int) -> None:
        if number in self.failing:
            raise self.failing[number]
        self.left.append(number)
        self.most = max(self.most, len(self.left) - len(self.there))
        if self.at_once:
            self.there.add(number)

    def deliver(self, *numbers: int) -> None:
        self.there.update(numbers)

    def clear(self) -> None:
        self.left.clear()
        self.there.clear()


class Fake(Message):
    """A message that doubles its buffer when it is waited for."""

    def __init__(self, wire: Wire, number: int, flat: torch.Tensor | None = None) -> None:
        self.wire, self.number, self.flat = wire, number, flat
        self.waits = 0

    @property
    def arrived(self) -> bool:
        return self.number in self.wire.there

    def launch(self) -> None:
        self.wire.leaves(self.number)

    def wait(self) -> None:
        assert self.arrived
        self.waits += 1
        if self.flat is not None:
            self.flat.mul_(2)

    def meet(self) -> None: ...


def sender_of(wire: Wire, count: int) -> Sender:
    return Sender([Fake(wire, i) for i in range(count)], torch.device("cpu"))


def test_nothing_overtakes_what_is_not_ready() -> None:
    wire = Wire(at_once=True)
    sender = sender_of(wire, 3)
    sender.ready(2)
    sender.ready(0)
    sender.wait([0])
    assert wire.left == [0]
    assert sender.arrived([0])
    assert not sender.arrived([0, 2])
    sender.ready(1)
    sender.wait([2])
    assert wire.left == [0, 1, 2]
    sender.close()


def test_few_are_on_the_wire_at_a_time() -> None:
    """And each makes room for the next one, in whatever order they arrive."""
    wire, count = Wire(), 9
    sender = sender_of(wire, count)
    for i in range(count):
        sender.ready(i)
    draw = random.Random(2)
    while len(wire.there) < count:
        wanted = min(len(wire.there) + IN_FLIGHT, count)
        wait_for(lambda wanted=wanted: len(wire.left) == wanted)  # type: ignore[misc]
        wire.deliver(draw.choice([i for i in wire.left if i not in wire.there]))
    sender.wait(range(count))
    assert wire.left == list(range(count))
    assert wire.most == IN_FLIGHT
    assert set(sender.seconds) == set(range(count))
    assert all(each >= 0.0 for each in sender.seconds.values())
    sender.close()


def test_a_message_that_cannot_leave_raises_where_it_is_waited_for() -> None:
    wire = Wire(at_once=True)
    wire.failing[1] = RuntimeError("the wire is cut")
    sender = sender_of(wire, 3)
    for i in range(3):
        sender.ready(i)
    for _ in range(2):  # and whoever asks again is told again
        with pytest.raises(RuntimeError, match="the wire is cut"):
            sender.wait([2])
    assert wire.left == [0]
    sender.close()


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "hvd_pipe sender"]


def test_close_ends_the_thread_and_those_who_wait() -> None:
    before = set(threads())
    wire = Wire()
    sender = sender_of(wire, 2)
    sender.ready(0)
    (thread,) = set(threads()) - before
    said: list[str] = []

    def wait() -> None:
        try:
            sender.wait([1])
        except HvdPipeError as error:
            said.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_for(lambda: wire.left == [0])
    sender.close()
    waiting.join(LIMIT_S)
    assert said == ["Horovod was shut down while gradients were in flight."]
    assert not thread.is_alive()
    sender.close()  # once more does nothing
    sender.ready(1)
    assert set(threads()) <= before
    assert wire.left == [0]


# What becomes ready while the thread falls asleep.


class SpiedLock:
    """Says when a thread finds it taken."""

    def __init__(self, found_taken: threading.Event) -> None:
        self._lock, self._found_taken = threading.Lock(), found_taken
        self.release = self._lock.release

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        if blocking:
            self._found_taken.set()
        return blocking and self._lock.acquire(timeout=timeout)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Ready(dict[int, None]):
    """What is ready, with a call between the next look for a place in vain and what follows it."""

    def __init__(self, missed: Callable[[int], None]) -> None:
        super().__init__()
        self._missed, self.armed = missed, False

    def __contains__(self, place: object) -> bool:
        found = super().__contains__(place)
        if self.armed and not found:
            self.armed = False
            self._missed(place)  # type: ignore[arg-type]
        return found


@pytest.mark.parametrize("flying", [False, True])
def test_a_message_that_is_ready_as_the_thread_falls_asleep_leaves(flying: bool) -> None:
    """Another thread calls ready() after the sender has looked, and before it sleeps.

    Either it waits for the lock until the sender sleeps, and wakes it; or it is done by then, and
    nobody wakes the sender.
    """
    happened, wire = threading.Event(), Wire(at_once=not flying)
    sender = sender_of(wire, 2)
    helpers: list[threading.Thread] = []

    def ready(place: int) -> None:
        sender.ready(place)
        happened.set()

    def missed(place: int) -> None:
        helpers.append(threading.Thread(target=ready, args=[place], daemon=True))
        happened.clear()
        helpers[-1].start()
        assert happened.wait(LIMIT_S)

    sender._changed = threading.Condition(SpiedLock(happened))  # type: ignore[arg-type]
    sender._ready = places = Ready(missed)  # type: ignore[assignment]
    if flying:  # message 0 is not due for days
        sender.seconds[0] = 1e6
        sleep = sender._sleep_until_due

        def about_to_sleep() -> bool:
            places.armed = not helpers
            return sleep()

        sender._sleep_until_due = about_to_sleep  # type: ignore[method-assign]
        sender.ready(0)
    else:  # message 1 waits for message 0
        places.armed = True
        sender.ready(1)
    wait_for(lambda: wire.left == [0, 1])
    sender.close()
    for helper in helpers:
        helper.join(LIMIT_S)
    assert len(helpers) == 1


# Buckets and their pieces.


class Job:
    """Buckets of which each counts up from its number times 1000."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, order: Sequence[int], at_once: bool
    ) -> None:
        self.wire, self.names = Wire(at_once), list[str]()
        self.pieces: list[Fake] = []
        self.exact: list[int] = []

        def message_for(
            reduction: Reduction, flat: torch.Tensor, name: str, exact: int, own: object
        ) -> Fake:
            self.names.append(name)
            self.exact.append(exact)
            self.pieces.append(Fake(self.wire, len(self.pieces), flat))
            return self.pieces[-1]

        monkeypatch.setattr(ordered, "message_for", message_for)
        self.messages = OrderedMessages(order)
        self.reduction: Any = SimpleNamespace(compression=None, group=None)

    def bucket(self, numel: int, exact: int = 0) -> tuple[torch.Tensor, ordered.OrderedMessage]:
        flat = torch.arange(float(numel))
        name = f"{len(self.messages._messages)}"
        return flat, self.messages.make(self.reduction, flat, name, exact)


@pytest.mark.parametrize(
    ("numel", "exact", "count", "sizes"),
    [
        (10, 0, 3, [3, 4, 3]),
        (10, 2, 3, [3, 2, 5]),
        (10, 0, 1, [10]),
        (2, 0, 5, [1, 1]),
        (5, 5, 3, [5]),
        (7, 1, 6, [1, 1, 1, 1, 1, 2]),
    ],
)
def test_pieces(
    monkeypatch: pytest.MonkeyPatch, numel: int, exact: int, count: int, sizes: list[int]
) -> None:
    """All elements once, in pieces of nearly one size; what is exact is in the last one."""
    job = Job(monkeypatch, [0] * count, at_once=True)
    flat, message = job.bucket(numel, exact)
    assert [piece.flat.numel() for piece in job.pieces if piece.flat is not None] == sizes
    assert job.exact == [0] * (len(sizes) - 1) + [exact]
    assert len(set(job.names)) == len(sizes)
    assert list(message.sizes) == [4 * size for size in [*sizes[:-1], sizes[-1] - exact]]
    for rounds in range(1, 4):
        assert message.arrived  # nothing is on its way
        message.launch()
        message.wait()
        message.wait()  # once is enough
        assert flat.equal(torch.arange(float(numel)) * 2**rounds)
        assert job.wire.left == list(range(len(sizes)))
        job.wire.clear()
    job.messages.close()


def test_buckets_leave_in_the_order_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """In which the pieces of one are among those of another; a piece too few is left out."""
    job = Job(monkeypatch, [1, 0, 1, 2, 1, 0, 1], at_once=True)
    made = [job.bucket(numel) for numel in (4, 3, 5)]
    assert job.names == ["0-0", "0-1", "1-0", "1-1", "1-2", "2"]
    for _ in range(3):
        for _, message in reversed(made):
            message.launch()
        for _, message in made:
            message.wait()
        left = [job.names[number] for number in job.wire.left]
        assert left == ["1-0", "0-0", "1-1", "2", "1-2", "0-1"]
        job.wire.clear()
    sizes = sorted(size for size, _ in job.messages.seconds())
    assert sizes == [4, 4, 4, 8, 8, 20]
    job.messages.close()


def test_messages_that_nobody_has_end_their_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threads())
    job = Job(monkeypatch, [0], at_once=True)
    _, message = job.bucket(4)
    message.launch()
    message.wait()
    (thread,) = set(threads()) - before
    reference = weakref.ref(job.messages)
    monkeypatch.undo()
    del job, message
    gc.collect()
    assert reference() is None
    assert not thread.is_alive()
