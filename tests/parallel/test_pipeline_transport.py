"""Messages of a pipeline between real ranks: all arrive, in order, whoever computes meanwhile.

Wrong calls end all ranks with a message; `test_pipedream_wrong` has ranks that are lost.
"""

from __future__ import annotations

import functools
import importlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from horovod.common.exceptions import HorovodInternalError
from on_ranks import on_ranks

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.pipeline.build import open_transport
from hvd_pipe.pipeline.messages import Bytes, Format, Header
from hvd_pipe.pipeline.transport import Channel, Kind, Layout, Transport
from hvd_pipe.planning.schedule import (
    Backward,
    Forward,
    Instruction,
    RecvActivation,
    RecvGradient,
    SendActivation,
    SendGradient,
    schedule,
)

LATE = 1  # the rank that lacks something
DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
LAUNCHERS = {"mpi": "mpi", "process-sets": "gloo"}
CLASSES = {"mpi": "MpiTransport", "process-sets": "ProcessSetTransport"}

ONE_THREAD = on_ranks(4, framework="torch", env={"HOROVOD_MPI_THREADS_DISABLE": "1"})
OVER = {
    launcher: on_ranks(4, launcher=launcher, framework="torch", env=DYNAMIC)
    for launcher in ("mpi", "gloo")
}
TRANSPORTS = [pytest.param(name, marks=OVER[LAUNCHERS[name]]) for name in CLASSES]
# Where a pipeline has fewer workers, or two ranks speak, the ranks beyond have no channels.

BATCH, WIDTH = 6, 50
FORMAT = Format(((BATCH, WIDTH), (3,)), (8, 4), stages=4)
SENDS = SendActivation | SendGradient
RECEIVES = RecvActivation | RecvGradient
LARGE = 50_000_000


class Wires:
    """A framework's Horovod, initialised, and its transports."""

    def __init__(self, framework: str) -> None:
        self.hvd = importlib.import_module(f"hvd_pipe.{framework}")
        self.framework = importlib.import_module(f"hvd_pipe.{framework}.pipedream.build").FRAMEWORK
        self.hvd.init()
        self.rank: int = self.hvd.rank()

    def open(self, channels: Sequence[Channel], transport: str) -> Transport:
        """Connect the ranks; all of them call this."""
        return open_transport(channels, transport, self.framework)

    def meet(self, value: object = None) -> list[Any]:
        """Return the values of all ranks."""
        return self.framework.agreement.gather(value, "test.meet", self.hvd.global_process_set)


@functools.cache
def wires(framework: str = "torch") -> Wires:
    """Return what opens transports, with Horovod initialised."""
    return Wires(framework)


def kind_of(step: Instruction) -> Kind:
    return Kind.ACTIVATION if isinstance(step, SendActivation | RecvActivation) else Kind.GRADIENT


def message_of(sender: int, kind: Kind, minibatch: int, last: bool) -> Bytes:
    """What anyone can make who knows its words."""
    random = np.random.default_rng([sender, kind, minibatch])
    x = random.standard_normal((BATCH - 2 * last, WIDTH))
    y = random.standard_normal(3).astype(np.float32)
    norms = tuple(random.standard_normal(4).tolist())
    header = Header(minibatch, 0, int(random.integers(1 << 62)), norms, (x.shape, y.shape))
    return FORMAT.pack(header, [x, y])


def check_schedule(
    framework: str, transport: str, carrier: str, replicas: tuple[int, ...], minibatches: int
) -> None:
    """Exchange the messages of a schedule; all arrive, and are as large as they say."""
    layout, ours = Layout(replicas), wires(framework)
    random = np.random.default_rng(ours.rank)
    programs = schedule("1f1b", replicas, minibatches).programs
    program = programs[layout.worker(ours.rank)] if ours.rank < layout.size else ()
    messages = [step for step in program if isinstance(step, SENDS | RECEIVES)]
    counts = Counter(
        (layout.rank(step.peer), kind_of(step), isinstance(step, SENDS)) for step in messages
    )
    wire = ours.open([Channel(*one, FORMAT.capacity) for one in sorted(counts)], transport)
    assert type(wire).__name__ == carrier
    for (peer, kind, outgoing), count in counts.items():
        if not outgoing:
            wire.expect(peer, kind, count)
    for step in program:
        if isinstance(step, Forward | Backward):
            time.sleep(float(random.exponential(0.002)))
        if not isinstance(step, SENDS | RECEIVES):
            continue
        peer, kind = layout.rank(step.peer), kind_of(step)
        last = step.minibatch == minibatches - 1
        if isinstance(step, SENDS):
            wire.send(peer, kind, message_of(ours.rank, kind, step.minibatch, last))
            continue
        buffer = wire.receive(peer, kind)
        expected = message_of(peer, kind, step.minibatch, last)
        FORMAT.unpack(buffer)
        assert np.array_equal(buffer[: expected.size], expected), step
        wire.recycle(buffer)
    wire.flush()
    whole = sum(isinstance(step, SENDS) for step in messages) * FORMAT.capacity
    assert 0.9 * whole <= wire.sent_bytes <= whole  # the last minibatch is smaller
    wire.close()


@pytest.mark.parametrize("replicas", [(1, 1, 1, 1), (2, 1), (3, 1)])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_messages_arrive_in_the_order_of_a_schedule(
    transport: str, replicas: tuple[int, ...]
) -> None:
    """Both ends of a chain, its inner ranks that are in two pairs, and replicas that share one."""
    for _ in range(2):
        check_schedule("torch", "auto", CLASSES[transport], replicas, 20)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_large_messages_arrive_while_nobody_asks(transport: str) -> None:
    """A send that waited for its receive would never end: the receiver waits for it to return."""
    ours = wires()
    wire = pair(transport, Kind.GRADIENT, LARGE)
    messages = [
        np.random.default_rng(number).integers(0, 256, LARGE - 64 * number, np.uint8)
        for number in range(3 if ours.rank < 2 else 0)
    ]
    if ours.rank == 0:
        for message in messages[:2]:  # as many as are received ahead
            wire.send(1, Kind.GRADIENT, message)
        ours.meet()  # a send that waited for the other rank would never come here
        wire.flush()
        ours.meet()  # nor would one that moved only while the other rank waits for it
        wire.send(1, Kind.GRADIENT, messages[2])
        wire.flush()
    else:
        ours.meet()
        if ours.rank == 1:
            wire.expect(0, Kind.GRADIENT, len(messages))
            time.sleep(0.5)
        ours.meet()
        for message in messages:
            buffer = wire.receive(0, Kind.GRADIENT)
            assert np.array_equal(buffer[: message.size], message)
            wire.recycle(buffer)
    wire.close()


def channel(kind: Kind = Kind.ACTIVATION, capacity: int = 64) -> Channel:
    """From rank 0 to rank 1, on one of both."""
    return Channel(1 - wires().rank, kind, wires().rank == 0, capacity)


def pair(transport: str, kind: Kind, capacity: int = 64) -> Any:
    """Open a channel from rank 0 to rank 1; others have none."""
    ours = wires()
    return ours.open([channel(kind, capacity)] if ours.rank < 2 else [], transport)


def recycle_twice(wire: Transport) -> None:
    if wires().rank == 0:
        wire.send(1, Kind.ACTIVATION, bytes(64))
        wire.flush()
        raise ValueError("not my turn")
    wire.expect(0, Kind.ACTIVATION, 1)
    buffer = wire.receive(0, Kind.ACTIVATION)
    wire.recycle(buffer)
    wire.recycle(buffer)


def use_closed(wire: Transport) -> None:
    wire.close()
    wire.flush()


def too_large(wire: Transport) -> None:
    if wires().rank == 0:
        wire.send(1, Kind.ACTIVATION, bytes(65))
    raise ValueError("not my turn")


def not_expected(wire: Transport) -> None:
    if wires().rank == 0:
        wire.send(1, Kind.ACTIVATION, b"")
        raise ValueError("not my turn")
    wire.receive(0, Kind.ACTIVATION)


def told(function: Callable[[], object]) -> str:
    with pytest.raises((HvdPipeError, HorovodInternalError, ValueError)) as raised:
        function()
    return f"{raised.type.__name__}: {raised.value}"


NAMES = {  # that rank 0 asks for, and the others
    "unknown": ("carrier-pigeon", "carrier-pigeon"),
    "one rank alone chooses": ("tcp", "auto"),
}
CAPACITIES = {"empty": 0, "huge": 1 << 31}  # of a channel of ranks 0 and 1
USES: dict[str, tuple[Callable[[Transport], object], tuple[str, str]]] = {  # by ranks 0 and 1
    "no such channel": (
        lambda wire: wire.send(1 - wires().rank, Kind.GRADIENT, b""),
        ("no channel of gradient messages with rank 1", "messages with rank 0"),
    ),
    "too large": (
        too_large,
        ("to rank 1 have at most 64 bytes by the plan, got one of 65", "not my turn"),
    ),
    "not expected": (
        not_expected,
        ("not my turn", "no activation messages from rank 0 are expected after 0"),
    ),
    "recycled twice": (
        recycle_twice,
        ("not my turn", "only a buffer that receive() has returned can be recycled"),
    ),
    "closed": (use_closed, ("this transport is closed",) * 2),
}


@pytest.mark.parametrize("case", [*NAMES, *CAPACITIES, *USES])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_wrong_call_is_told_on_every_rank(transport: str, case: str) -> None:
    """What is wrong with the channels also on ranks that have none."""
    ours = wires()
    rank = ours.rank
    if case in NAMES:
        first, others = NAMES[case]
        said = told(lambda: ours.open([], others if rank else first))
        assert f"one of auto, mpi, process-sets, got {first!r}" in said
    elif case in CAPACITIES:
        said = told(lambda: pair(transport, Kind.ACTIVATION, CAPACITIES[case]))
        if rank < 2:
            assert f"up to {CAPACITIES[case]} bytes; a message can have 1 to 2147483647" in said
    else:
        use, both = USES[case]
        wire = pair(transport, Kind.ACTIVATION)
        if rank < 2:
            assert both[rank] in told(lambda: use(wire))
        wire.close()


@OVER["mpi"]
def test_the_communication_thread_sleeps_while_nothing_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = wires()
    wire = pair("mpi", Kind.GRADIENT)
    looks, look = 0, wire._look

    def counted() -> bool:
        nonlocal looks
        looks += 1
        return bool(look())

    def in_a_while(enough: Callable[[int], bool]) -> bool:
        """Return whether it looks so often in 0.6 s, for which a busy machine may need a while."""
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline:
            before = looks
            time.sleep(0.6)
            if enough(looks - before):
                return True
        return False

    def pass_one() -> None:
        if ours.rank == 0:
            wire.send(1, Kind.GRADIENT, bytes(64))
            wire.flush()
        elif ours.rank == 1:
            wire.receive(0, Kind.GRADIENT)

    monkeypatch.setattr(wire, "_look", counted)
    for _ in range(2):
        if ours.rank == 1:
            wire.expect(0, Kind.GRADIENT, 1)
        pass_one()
        ours.meet()
        assert in_a_while(lambda looked: looked == 0)
    if ours.rank == 1:
        wire.expect(0, Kind.GRADIENT, 1)
        assert in_a_while(lambda looked: looked > 10)
    ours.meet()
    pass_one()
    wire.close()


@pytest.mark.parametrize(
    ("transport", "without", "words"),
    [
        pytest.param(
            "mpi",
            "",
            ["over Gloo: start it with mpirun"] * 4,
            marks=OVER["gloo"],
            id="mpi over Gloo",
        ),
        pytest.param(
            "auto",
            "mpi4py",
            ["rank 1 was given something wrong", "pip install mpi4py", "need mpi4py", "mpi4py"],
            marks=OVER["mpi"],
            id="no mpi4py",
        ),
        pytest.param(
            "process-sets",
            "",
            ["call pipedream.init() in place of hvd.init()"] * 4,
            marks=ONE_THREAD,
            id="no dynamic process sets",
        ),
        pytest.param(
            "auto",
            "",
            ["THREADS_DISABLE"] * 4,
            marks=ONE_THREAD,
            id="one thread",
        ),
        pytest.param(
            "auto",
            "",
            ['or hvd.init(process_sets="dynamic")'] * 4,
            # nightly: as "no dynamic process sets", by the other launcher
            marks=[on_ranks(4, launcher="gloo", framework="torch"), pytest.mark.nightly],
            id="no dynamic process sets over Gloo",
        ),
    ],
)
def test_what_is_missing_is_told_on_every_rank(
    transport: str, without: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = wires()
    if without and ours.rank == LATE:
        monkeypatch.setitem(sys.modules, without, None)
        monkeypatch.delitem(sys.modules, "hvd_pipe.pipeline.mpi", raising=False)
        monkeypatch.delattr("hvd_pipe.pipeline.mpi", raising=False)
    mine = Channel(ours.rank ^ 1, Kind.ACTIVATION, ours.rank % 2 == 0, 64)
    said = told(lambda: ours.open([mine], transport))
    assert words[ours.rank] in said
    assert "Error: " in said
