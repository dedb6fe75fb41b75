"""The small process beside each rank: what it tells the others, whatever the rank itself does.

The test holds the other end of a rank's connection, and reads there as another rank would.
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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_pipe.runtime.watch import watchdog, watcher
from hvd_pipe.runtime.watch.waits import activity
from hvd_pipe.runtime.watch.watchdog import Reporter
from hvd_pipe.runtime.watch.watcher import Peer, Status

pytestmark = pytest.mark.slow

SOON_S = 60.0  # for what takes a second or two on a quiet machine
LIMIT_S = 4.0

RANK = """
import ctypes, os, socket, sys, time
from hvd_pipe.runtime.watch.watchdog import Reporter
from hvd_pipe.runtime.watch.watcher import Peer, Status

class Process:
    def status(self):
        return Status("train.py:3")
    def say(self, text):
        print("said:", text, flush=True)
    def end(self, text):
        print("asked to end:", text, flush=True)

peers = [Peer(0, "h0", 1), Peer(1, "h1", os.getpid())]
link = socket.socket(fileno=int(sys.argv[1]))
reporter = Reporter(peers, 1, {0: link}, float(sys.argv[2]), Process())
reporter.start()
for line in sys.stdin:
    print("does:", line.strip(), flush=True)
    exec(line)
"""


class Rank:
    """A rank that does what it is told, seen by another one."""

    def __init__(self) -> None:
        self.link, its = socket.socketpair()
        self.link.settimeout(SOON_S)
        self._lines = self.link.makefile("rb")
        with its:
            self.process = subprocess.Popen(
                [sys.executable, "-c", RANK, str(its.fileno()), str(LIMIT_S)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                bufsize=1,
                pass_fds=[its.fileno()],
            )
        self.hear(lambda one: one.get("status", {}).get("where") == "train.py:3")
        (self.child,) = _children(self.process.pid)

    def hear(self, wanted: Callable[[dict[str, Any]], object]) -> list[dict[str, Any]]:
        """Return what the rank tells another, which answers, up to a certain message."""
        heard: list[dict[str, Any]] = []
        for line in filter(bytes.strip, self._lines):
            heard.append(json.loads(line))
            self.tell({"status": {}})
            if wanted(heard[-1]):
                return heard
        raise AssertionError(f"the connection is closed after {heard}")

    def ends(self) -> list[dict[str, Any]]:
        """Return what it tells until its connection is closed."""
        return [json.loads(line) for line in self._lines]

    def tell(self, message: dict[str, Any]) -> None:
        self.link.sendall(json.dumps(message).encode() + b"\n")

    def do(self, line: str) -> None:
        """Have its main thread do something."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")

    def said(self) -> str:
        """Return the next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()


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
    one.link.close()


def stands_still(message: dict[str, Any]) -> bool:
    status = message.get("status", {})
    return bool(status.get("waits")) and status["since_s"] > LIMIT_S


def test_a_rank_that_stands_still_for_a_lost_one_is_ended(rank: Rank) -> None:
    """Nobody within it could do so: with two ranks, one of them stopped, the job hung."""
    rank.do("ctypes.PyDLL(None).pause()")
    heard = rank.hear(stands_still)
    assert all("status" in message for message in heard)  # it is not silent
    assert heard[-1]["status"]["where"] == "train.py:3"
    rank.tell({"lost": 7, "how": "rank 7 on h7 (pid 7) raised ValueError"})
    rank.process.wait(SOON_S)
    assert rank.process.returncode == -signal.SIGKILL
    assert rank.process.stderr is not None
    told = (
        "hvd_pipe: rank 1 ends, as it waits for a rank that is lost: rank 7 on h7 (pid 7) raised"
    )
    assert told in rank.process.stderr.read()


@pytest.mark.nightly  # it waits for true limits of seconds
def test_a_rank_whose_other_thread_stands_still_is_ended(rank: Rank) -> None:
    """Its main thread asks for Python's lock 200 times a second, and so counted as busy.

    A sending thread kept the lock in a call of Horovod's, whose own thread had failed.
    """
    rank.do("import threading; t = threading.Thread(target=ctypes.PyDLL(None).pause)")
    rank.do("t.start(), any(time.sleep(0.001) for _ in iter(int, 1))")
    rank.hear(stands_still)
    rank.tell({"lost": 7, "how": "rank 7 on h7 (pid 7) raised ValueError"})
    rank.process.wait(SOON_S)
    assert rank.process.returncode == -signal.SIGKILL


@pytest.mark.nightly  # it waits for true limits of seconds
def test_a_rank_that_computes_in_one_long_call_neither_waits_nor_is_silent(rank: Rank) -> None:
    rank.do("sum(range(1 << 60))")  # runs, and lets no other thread of Python run
    heard = rank.hear(lambda one: one.get("status", {}).get("since_s", 0) > LIMIT_S)
    assert all("status" in message for message in heard)
    assert not heard[-1]["status"]["waits"]
    rank.tell({"lost": 7, "how": "rank 7 on h7 (pid 7) raised ValueError"})
    rank.hear(lambda one: one["status"]["since_s"] > 2 * LIMIT_S)  # and is not ended


def test_a_rank_that_is_stopped_says_so_and_goes_on(rank: Rank) -> None:
    os.kill(rank.process.pid, signal.SIGSTOP)
    rank.hear(lambda one: "stopped" in one)
    assert "status" not in rank.hear(lambda one: "stopped" in one)[-1]
    os.kill(rank.process.pid, signal.SIGCONT)
    rank.hear(lambda one: "status" in one)


def test_a_stopped_rank_that_the_others_have_given_up_ends_after_them(rank: Rank) -> None:
    """Under Gloo, the ssh of a rank on another host was ended, and the rank stayed for ever."""
    os.kill(rank.process.pid, signal.SIGSTOP)
    rank.hear(lambda one: "stopped" in one)
    rank.tell({"lost": 1, "how": "rank 1 on h1 (pid 1) has been silent for 9 s"})
    rank.hear(lambda one: "stopped" in one)
    rank.hear(lambda one: "stopped" in one)  # not before they have ended
    rank.link.close()
    rank._lines.close()
    rank.process.wait(SOON_S)
    assert rank.process.returncode == -signal.SIGKILL
    assert rank.process.stderr is not None
    told = "hvd_pipe: rank 1 is ended, as the others have ended: rank 1 on h1 (pid 1) has been"
    assert told in rank.process.stderr.read()


def test_a_stopped_rank_is_left_alone_where_the_others_have_only_finished(rank: Rank) -> None:
    os.kill(rank.process.pid, signal.SIGSTOP)
    rank.hear(lambda one: "stopped" in one)
    rank.tell({"left": 0})
    rank.link.close()
    rank._lines.close()
    assert rank.process.poll() is None
    os.kill(rank.process.pid, signal.SIGCONT)
    rank.do("print('goes on', flush=True)")
    while "goes on" not in rank.said():
        assert rank.process.poll() is None


def test_a_thread_that_keeps_the_lock_still_counts_as_busy(rank: Rank) -> None:
    """A writer that pickled a large checkpoint let no other thread run, and so counted as idle.

    The other ranks ended, and the launcher killed it.
    """
    rank.do("Process.status = lambda self: Status('train.py:9', True, 100.0, busy=True)")
    rank.hear(lambda one: one.get("status", {}).get("busy"))
    rank.do("import threading; threading.Thread(target=ctypes.PyDLL(None).pause).start()")
    heard = rank.hear(lambda one: 0 < one.get("status", {}).get("since_s", 0) < 100)
    assert heard[-1]["status"]["busy"]


def test_a_rank_is_asked_to_end_once_while_it_can_hear(rank: Rank) -> None:
    """It may have a checkpoint to finish, in another thread."""
    rank.do("Process.status = lambda self: Status('train.py:9', True, 100.0)")
    rank.hear(lambda one: one.get("status", {}).get("waits"))
    rank.tell({"lost": 7, "how": "rank 7 is gone"})
    assert rank.said().startswith("does:")
    assert rank.said() == "asked to end: rank 7 is gone\n"
    for _ in range(5):
        rank.hear(lambda one: "status" in one)
    rank.do("pass")
    assert rank.said() == "does: pass\n"


def test_a_rank_that_is_killed_is_known_at_once_and_leaves_nothing(rank: Rank) -> None:
    """Also while a process that it has forked, past Python, keeps its connections open."""
    rank.do(
        "import subprocess; subprocess.Popen(['sleep', '600'], stdout=-3, stderr=-3,"
        " pass_fds=[reporter._control.fileno(), link.fileno()]); print('forked', flush=True)"
    )
    assert rank.said().startswith("does:")
    assert rank.said() == "forked\n"
    (forked,) = set(_children(rank.process.pid)) - {rank.child}
    try:
        rank.process.kill()
        assert all("status" in message for message in rank.ends())
        rank.process.wait(SOON_S)
        soon(lambda: getattr(activity(rank.child, rank.child), "state", "Z") == "Z")
    finally:
        os.kill(forked, signal.SIGKILL)


def test_a_terminal_that_takes_nothing_does_not_hold_up_the_small_process(rank: Rank) -> None:
    """A job whose output was paused would have called the rank silent."""
    rank.do("Process.status = lambda self: Status('train.py:9', True, 100.0, busy=True)")
    rank.hear(lambda one: one.get("status", {}).get("busy"))
    rank.do("os.write(2, b'x' * 65536)")  # as much as a pipe holds
    rank.tell({"lost": 7, "how": "rank 7 is gone"})  # it waits for the busy thread, and says so
    for _ in range(10):
        rank.hear(lambda one: "status" in one)
    assert rank.process.poll() is None


def test_a_rank_whose_small_process_is_killed_is_not_taken_for_a_lost_one(rank: Rank) -> None:
    os.kill(rank.child, signal.SIGKILL)
    rank.hear(lambda one: one.get("left") == 1)
    assert "can no longer hear of others" in rank.said()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_for_all_of_a_job_are_the_ranks_own_affair(
    rank: Rank, number: signal.Signals
) -> None:
    """Schedulers send SIGTERM to every process before the end: a rank may still save its state."""
    os.kill(rank.child, number)
    for _ in range(3):
        rank.hear(lambda one: "status" in one)


def started_with(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, bytes]:
    """Start a reporter whose small process runs this; return what the user and rank 0 heard."""
    (folder / "small.py").write_text(
        f"import socket, sys, time\nfolder = {str(folder)!r}\n{script}"
    )
    monkeypatch.setattr(watcher, "__file__", str(folder / "small.py"))
    said: list[str] = []
    process: Any = SimpleNamespace(status=Status, say=said.append, end=said.append)
    other, link = socket.socketpair()
    with other:
        reporter = Reporter([Peer(0, "h0", 1), Peer(1, "h1", 2)], 1, {0: link}, LIMIT_S, process)
        reporter.start()
        (folder / "started").touch()
        reporter.stop()
        return "".join(said), other.recv(1 << 16)


def test_a_rank_waits_for_its_small_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine took 20 s to start it: the rank looked silent, whatever it ended by."""
    script = """
control = socket.socket(fileno=int(sys.argv[1]))
control.recv(1)
time.sleep(0.5)
from pathlib import Path
(Path(folder) / "early").write_text(str((Path(folder) / "started").exists()))
control.sendall(b"\\n")
control.makefile().read()
"""
    assert started_with(script, tmp_path, monkeypatch) == ("", b"")
    assert (tmp_path / "early").read_text() == "False"


def test_a_rank_goes_without_a_small_process_that_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, told = started_with("", tmp_path, monkeypatch)
    assert "can no longer hear of others" in said
    assert json.loads(told) == {"left": 1}


def test_a_rank_without_a_free_file_descriptor_goes_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are behind the agreement, so ``hvd.init()`` must not raise on this rank alone."""

    def refuse() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    without_pairs = SimpleNamespace(**{**vars(socket), "socketpair": refuse})
    monkeypatch.setattr(watchdog, "socket", without_pairs)
    said, told = started_with("", tmp_path, monkeypatch)
    assert "can no longer hear of others" in said
    assert "Too many open files" in said
    assert json.loads(told) == {"left": 1}


def soon(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found
