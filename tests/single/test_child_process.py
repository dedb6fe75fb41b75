"""The small process beside each rank: what it tells the others, whatever the rank itself does.

The test is rank 0, to which the small process connects, and reads there as rank 0's would.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_pipe.runtime.watch import child_process, rank_side
from hvd_pipe.runtime.watch.child_process import Status
from hvd_pipe.runtime.watch.rank_side import Job, Watch
from hvd_pipe.runtime.watch.waits import activity

pytestmark = pytest.mark.slow

SOON_S = 60.0  # for what takes a second or two on a quiet machine
LIMIT_S = 4.0
SECRET = "0123456789abcdef" * 2
LOST = [7, "rank 7 on h7 (pid 7) raised ValueError"]

RANK = """
import ctypes, os, sys, time
from types import SimpleNamespace
from hvd_pipe.runtime.watch import rank_side
from hvd_pipe.runtime.watch.rank_side import Job, Watch
from hvd_pipe.runtime.watch.child_process import Status

port, limit_s, secret = sys.argv[1:]
ranks = SimpleNamespace(rank=lambda: 1)
rank_side._watch = watch = Watch(
    Job(ranks, None, lambda frames: None, lambda error: False), float(limit_s)
)
assert watch.open(secret=secret, addresses=[("127.0.0.1", int(port))])
watch.begin([f"rank {rank} on h{rank} (pid {rank})" for rank in range(8)])
for line in sys.stdin:
    print("does:", line.strip(), flush=True)
    exec(line)
"""


class Rank:
    """A rank that does what it is told, seen by rank 0."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            words = [str(server.getsockname()[1]), str(LIMIT_S), SECRET]
            self.process = subprocess.Popen(
                [sys.executable, "-c", RANK, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            server.settimeout(SOON_S)
            self.link, _ = server.accept()
        self.link.settimeout(SOON_S)
        assert self.link.recv(100) == f"{SECRET} 1".encode()
        self.link.sendall(SECRET[::-1].encode())
        self._lines = self.link.makefile("rb")
        self.hear()
        (self.child,) = _children(self.process.pid)

    def hear(self, wanted: Callable[[Status], object] = lambda status: True) -> Status:
        """Return what the rank says of itself, up to a certain message; answer all of them."""
        for line in self._lines:
            status = Status(**json.loads(line)["status"])
            self.tell()
            if wanted(status):
                return status
        raise AssertionError("the connection is closed")

    def tell(self, **words: Any) -> None:
        message = {"status": asdict(Status()), "loss": None, "left": None, "silence": None}
        self.link.sendall(json.dumps(message | words).encode() + b"\n")

    def do(self, line: str) -> None:
        """Have its main thread do something."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")

    def printed(self) -> str:
        """Return the next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def ended(self, text: str) -> int:
        """Return its status at the end, which comes by itself, with this text."""
        self.process.wait(SOON_S)
        assert self.process.stderr is not None
        assert text in self.process.stderr.read()
        return self.process.returncode

    def hang_up(self) -> None:
        self.link.close()
        self._lines.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    one = Rank()
    yield one
    one.process.kill()
    one.process.wait(SOON_S)
    for pipe in (one.process.stdin, one.process.stdout, one.process.stderr):
        assert pipe is not None
        with suppress(OSError):
            pipe.close()
    one.hang_up()


TOLD = f"hvd_pipe: rank 1 ends, as it waits for a rank that is lost: {LOST[1]}"
STANDS_STILL = "ctypes.PyDLL(None).pause()"
OTHER_STANDS_STILL = (
    "import threading; threading.Thread(target=ctypes.PyDLL(None).pause).start();"
    " any(time.sleep(0.001) for _ in iter(int, 1))"
)


@pytest.mark.parametrize(
    "line",
    [
        STANDS_STILL,
        pytest.param(OTHER_STANDS_STILL, marks=pytest.mark.nightly),  # true limits of seconds
    ],
)
def test_a_rank_that_stands_still_for_a_lost_one_is_killed(rank: Rank, line: str) -> None:
    """Nobody within it could do so: with two ranks, one of them stopped, the job hung.

    Where another thread keeps Python's lock in a call of Horovod's, the main one asks for it 200
    times a second, and so counted as busy.
    """
    rank.do(line)
    status = rank.hear(lambda status: status.waits and status.since_s > LIMIT_S)
    assert not status.stopped
    rank.tell(loss=LOST)
    assert rank.ended(TOLD) == -signal.SIGKILL


def test_a_rank_that_runs_python_ends_itself_with_what_it_has_printed(rank: Rank) -> None:
    rank.do("Watch.status = lambda self: Status(True, 100.0); print('last words', end='')")
    rank.hear(lambda status: status.waits)
    rank.tell(loss=LOST)
    assert rank.ended(TOLD) == 1
    assert rank.process.stdout is not None
    assert rank.process.stdout.read().endswith("last words")


@pytest.mark.nightly  # it waits for true limits of seconds
def test_a_rank_that_computes_in_one_long_call_neither_waits_nor_is_silent(rank: Rank) -> None:
    rank.do("sum(range(1 << 60))")  # runs, and lets no other thread of Python run
    status = rank.hear(lambda status: status.since_s > LIMIT_S)
    assert (status.waits, status.stopped) == (False, False)
    rank.tell(loss=LOST)
    rank.hear(lambda status: status.since_s > 2 * LIMIT_S)  # and is not ended


def test_a_stopped_rank_that_the_others_have_given_up_ends_after_them(rank: Rank) -> None:
    """Under Gloo, the ssh of a rank on another host was ended, and the rank stayed for ever."""
    os.kill(rank.process.pid, signal.SIGSTOP)
    rank.hear(lambda status: status.stopped)
    rank.tell(loss=[1, "rank 1 on h1 (pid 1) has been silent for 9 s"])
    rank.hear(lambda status: status.stopped)
    rank.hear(lambda status: status.stopped)  # not before they have ended
    rank.hang_up()
    told = "rank 1 is ended, as the others have ended: rank 1 on h1 (pid 1) has been silent"
    assert rank.ended(told) == -signal.SIGKILL


def test_a_stopped_rank_is_left_alone_where_the_others_have_only_finished(rank: Rank) -> None:
    os.kill(rank.process.pid, signal.SIGSTOP)
    rank.hear(lambda status: status.stopped)
    rank.tell(status=asdict(Status(left=True)))
    rank.hang_up()
    time.sleep(2)
    os.kill(rank.process.pid, signal.SIGCONT)
    rank.do("print('goes on', flush=True)")
    while "goes on" not in rank.printed():
        assert rank.process.poll() is None


def test_a_rank_whose_process_is_killed_goes_on_and_counts_as_lost(rank: Rank) -> None:
    os.kill(rank.child, signal.SIGKILL)
    with pytest.raises(AssertionError, match="the connection is closed"):
        rank.hear(lambda status: status.left)
    rank.do("print('goes on', flush=True)")
    while "goes on" not in rank.printed():
        assert rank.process.poll() is None


def test_a_thread_that_keeps_the_lock_still_counts_as_busy(rank: Rank) -> None:
    """A writer that pickled a large checkpoint let no other thread run, and so counted as idle.

    The other ranks ended, and the launcher killed it.
    """
    rank.do("Watch.status = lambda self: Status(True, 100.0, busy=True)")
    rank.hear(lambda status: status.busy)
    rank.do(STANDS_STILL)
    assert rank.hear(lambda status: 0 < status.since_s < 100).busy


def test_a_rank_that_is_killed_is_known_at_once_and_leaves_nothing(rank: Rank) -> None:
    """Also while a process that it has started goes on."""
    rank.do("import subprocess; subprocess.Popen(['sleep', '600'], stdout=-3, stderr=-3)")
    rank.do("if os.fork() == 0: time.sleep(600)")
    rank.do("print('forked', flush=True)")
    while rank.printed() != "forked\n":
        pass
    forked = set(_children(rank.process.pid)) - {rank.child}
    assert len(forked) == 2
    try:
        rank.process.kill()
        with pytest.raises(AssertionError, match="the connection is closed"):
            rank.hear(lambda status: status.left)
        rank.process.wait(SOON_S)
        deadline = time.monotonic() + SOON_S
        while getattr(activity(rank.child, rank.child), "state", "Z") != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        for pid in forked:
            os.kill(pid, signal.SIGKILL)


def test_a_terminal_that_takes_nothing_does_not_hold_up_the_small_process(rank: Rank) -> None:
    """A job whose output was paused would have called the rank silent."""
    rank.do("Watch.status = lambda self: Status(True, 100.0, busy=True)")
    rank.hear(lambda status: status.busy)
    rank.do("os.write(2, b'x' * 65536)")  # as much as a pipe holds
    rank.tell(loss=LOST)  # it waits for the busy thread, and says so
    for _ in range(4):  # it waits for no longer than its limit
        rank.hear()
    assert rank.process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_for_all_of_a_job_are_the_ranks_own_affair(
    rank: Rank, number: signal.Signals
) -> None:
    """Schedulers send SIGTERM to every process before the end: a rank may still save its state."""
    os.kill(rank.child, number)
    for _ in range(3):
        rank.hear()


def opened(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
    """Return what a small process that runs this answers, and what the user was told."""
    (folder / "small.py").write_text(f"import socket, sys, time\n{script}")
    monkeypatch.setattr(child_process, "__file__", str(folder / "small.py"))
    said: list[str] = []
    monkeypatch.setattr(rank_side, "say", said.append)
    ranks: Any = SimpleNamespace(rank=lambda: 1)
    job: Any = Job(ranks, None, lambda frames: None, lambda error: False)  # type: ignore[arg-type]
    watch = Watch(job, LIMIT_S)
    answer = watch.open()
    watch.stop()
    return answer, "".join(said)


def test_a_rank_waits_for_its_small_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine took 20 s to start it: the rank looked silent, whatever it ended by."""
    script = "time.sleep(0.5); socket.socket(fileno=int(sys.argv[1])).sendall(b'true\\n')"
    assert opened(script, tmp_path, monkeypatch) == (True, "")


def test_a_rank_goes_without_a_small_process_that_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are behind the agreement, so ``hvd.init()`` must not raise on this rank alone."""
    answer, said = opened("", tmp_path, monkeypatch)
    assert answer is None
    assert said.startswith("rank 1 can no longer hear of others: ConnectionResetError")

    def refuse() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    without_pairs = SimpleNamespace(**{**vars(socket), "socketpair": refuse})
    monkeypatch.setattr(rank_side, "socket", without_pairs)
    answer, said = opened("", tmp_path, monkeypatch)
    assert answer is None
    assert "Too many open files" in said


def _children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append(int(stat.parent.name))
    return found
