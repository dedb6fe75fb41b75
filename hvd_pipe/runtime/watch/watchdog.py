"""No rank waits for ever for one that is gone: it ends, and says who is gone and why.

Open MPI waits for a stopped rank, and behind a cut link, for ever; Gloo gives up after half a
minute with an error that names nobody. So a small process beside each rank
(`hvd_pipe.runtime.watch.watcher`) watches the others until ``hvd.shutdown()``. A rank ends only
when another is lost *and* it has itself done nothing but wait for a while. Launchers then end the
rest of the job.

``HVD_PIPE_TIMEOUT`` is how many seconds a rank may be silent (120; 0 switches all of this off).
Elastic jobs recover by themselves and have none of it.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import re
import resource
import selectors
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psutil  # type: ignore[import-untyped]  # Horovod needs it, too
from horovod.common.process_sets import ProcessSet

import hvd_pipe
from hvd_pipe.runtime.consensus import Agreement
from hvd_pipe.runtime.restarts import is_elastic
from hvd_pipe.runtime.watch import watcher
from hvd_pipe.runtime.watch.rendezvous import Listener, connect
from hvd_pipe.runtime.watch.waits import OtherThreads, Wait
from hvd_pipe.runtime.watch.watcher import FIRST, Peer, Status, beat_s, encode

ENVIRONMENT_VARIABLE = "HVD_PIPE_TIMEOUT"
DEFAULT_S = 120.0
NEWS_S = 2.0  # how long news of a rank may take to come after Horovod's own error
START_S = 60.0  # for a process to start, on a machine that is very busy
ANSWER_S = 5.0  # for an answer, or to take a message, of a process that does little else
SPARE_FILES = 64  # that rank 0 opens beside its connections: its data and checkpoints

Frames = Mapping[int, FrameType]
"""What each thread of this process is doing, by the thread's number."""


@dataclass(frozen=True)
class Job:
    """What a framework's adapter knows of the job and of this process."""

    ranks: ProcessSet
    agreement: Agreement
    waits_for: Callable[[Frames], Wait | None]  # what the main thread waits for of other ranks
    failed_elsewhere: Callable[[BaseException], bool]  # whether Horovod's communication has failed
    is_sure: Callable[[], bool] = lambda: True
    """Else a wait looks like a long computation, and counts after ``HVD_PIPE_TIMEOUT`` alone."""


_reporter: Reporter | None = None
_job: Job | None = None


def start(job: Job) -> None:
    """Begin to watch the other ranks, and to be watched; all ranks do this at the same time."""
    global _reporter, _job
    stop()
    ranks, agreement, name = job.ranks, job.agreement, "hvd_pipe.watchdog"
    if ranks.size() == 1 or is_elastic():
        return
    rank: int = ranks.rank()
    listener: Listener | None = None

    def offer() -> dict[str, Any] | None:
        nonlocal listener
        limit_s = _limit(os.environ.get(ENVIRONMENT_VARIABLE, ""))
        if limit_s == 0:
            return None
        if _has_files_for(ranks.size()):
            with suppress(OSError):  # no port can be opened: the warning below says so
                listener = Listener()
        return {"limit_s": limit_s, "listener": None if listener is None else listener.address}

    link: socket.socket | None = None
    told: list[dict[str, Any]] = []
    try:
        offered = agreement.found_by_first(offer, f"{name}.offer", ranks)
        if offered is None:
            return
        if rank != FIRST and offered["listener"] is not None:
            link = connect(offered["listener"], rank)
        met = rank == FIRST or link is not None
        me = {"host": socket.gethostname(), "pid": os.getpid(), "met": met}
        told = agreement.gather(me, f"{name}.met", ranks)
    finally:
        links = {} if listener is None else listener.close()
        if link is not None:
            links = {FIRST: link}
        for other in list(links):
            # A rank that had given up before it was let in holds no other end.
            if not (told and told[other]["met"]):
                links.pop(other).close()
    peers = [Peer(number, one["host"], one["pid"]) for number, one in enumerate(told)]
    missed = [peer for peer in peers if not told[peer.rank]["met"]]
    if missed and rank == FIRST:
        names = ", ".join(map(str, missed[:3])) + (" and others" if len(missed) > 3 else "")
        warnings.warn(
            f"{names} cannot connect to {peers[FIRST]}: where one of them is stopped or its link "
            "is cut, nobody notices. Let TCP connections between these hosts through, let that "
            f"rank open {_files_for(ranks.size())} files or more (ulimit -n), or set "
            f"{ENVIRONMENT_VARIABLE}=0 to go without.",
            stacklevel=3,
        )
    if links:
        limit_s = offered["limit_s"]
        process = _Process(rank, job.waits_for, 0.0 if job.is_sure() else limit_s)
        _reporter, _job = Reporter(peers, rank, links, limit_s, process), job
        _reporter.start()
        _install()


def _files_for(ranks: int) -> int:
    """Return how many files this process has with a connection to every other rank."""
    return int(psutil.Process().num_fds()) + ranks - 1 + SPARE_FILES


def _has_files_for(ranks: int) -> bool:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _files_for(ranks) <= allowed or allowed == resource.RLIM_INFINITY


def leave() -> None:
    """Tell the others that this rank goes, before Horovod shuts down."""
    if _reporter is not None:
        _reporter.leave()


def stop() -> None:
    """Watch no more, after Horovod has shut down."""
    global _reporter  # noqa: PLW0603
    if _reporter is not None:
        _reporter.stop()
    _reporter = None


class Reporter:
    """Starts the process beside this rank, and a thread that tells it what the rank does.

    The first rank has links to all others, and these have one to the first.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        me: int,
        links: Mapping[int, socket.socket],
        limit_s: float,
        process: _Process,
    ) -> None:
        self.peers, self.me, self.limit_s, self.links = peers, me, limit_s, links
        self.child: subprocess.Popen[bytes] | None = None
        self._process = process
        self._control: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="hvd_pipe reporter", daemon=True)
        self._sending = threading.Lock()
        self._answered = threading.Event()
        self._answer: str | None = None
        self._stopped = False

    def start(self) -> None:
        """Begin to report, and to hear of the others."""
        try:
            self._control, its = socket.socketpair()
            self._start_child(self._control, its)
        except OSError as error:
            self._give_up(repr(error))
        else:
            self._thread.start()

    def _start_child(self, control: socket.socket, its: socket.socket) -> None:
        numbers = {rank: link.fileno() for rank, link in self.links.items()}
        with its:
            # Not a fork of this process: that has threads, and MPI's memory.
            self.child = subprocess.Popen(
                [sys.executable, "-S", watcher.__file__, str(its.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                pass_fds=(its.fileno(), *numbers.values()),
                start_new_session=True,  # Ctrl-Z stops the rank alone
            )
        words = {
            "me": self.me,
            "pid": os.getpid(),
            "main": threading.main_thread().native_id,
            "limit_s": self.limit_s,
            "links": numbers,
            "peers": [(peer.rank, peer.host, peer.pid) for peer in self.peers],
        }
        control.settimeout(START_S)
        control.sendall(encode(words))
        # Training waits for this, or a rank would look silent while its process starts.
        if control.recv(len(watcher.READY)) != watcher.READY:
            raise ConnectionResetError("its process for that has ended at its start")
        control.settimeout(ANSWER_S)

    def stop(self) -> None:
        """Report nothing more; the others take it that this rank has left, or is lost."""
        self._stopped = True
        self._hang_up()
        if self._thread.is_alive():
            self._thread.join(ANSWER_S)
        if self.child is not None:
            try:
                self.child.wait(ANSWER_S)
            except subprocess.TimeoutExpired:  # it is stopped, say
                self.child.kill()
                self.child.wait()
        self.close()

    def close(self) -> None:
        """Close the sockets of this process: a forked child must not keep a dead rank's open."""
        for one in filter(None, (self._control, *self.links.values())):
            one.close()

    def leave(self) -> None:
        """Tell the others that this rank goes, and that nothing is wrong."""
        self._send({"left": True})

    def raised(self, text: str) -> None:
        """Tell the others that this rank ends by an exception."""
        self._send({"raised": text})

    def cause(self, patience_s: float) -> str | None:
        """Return what has become of another rank, when communication has failed; None: nothing."""
        self._answered.clear()
        if self._send({"cause": patience_s}) and self._answered.wait(patience_s + ANSWER_S):
            return self._answer
        return None

    def _hang_up(self) -> None:
        """End the process beside this one, and the thread."""
        if self._control is not None:
            with suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)

    def _send(self, message: Mapping[str, Any]) -> bool:
        if self._control is None:
            return False
        with self._sending, suppress(OSError):
            self._control.sendall(encode(message))
            return True
        return False

    def _give_up(self, why: str) -> None:
        """Go without: that must not look like a rank that is lost."""
        for link in self.links.values():
            with suppress(OSError):
                link.send(b"\n" + encode({"left": self.me}))
        self._hang_up()
        self._process.say(f"{self.peers[self.me]} can no longer hear of others: {why}")

    def _run(self) -> None:
        assert self._control is not None
        try:
            self._loop(self._control)
            why = "its process for that has ended"
        except Exception as error:  # a mistake in here must not look like a rank that is lost
            why = repr(error)
        if not self._stopped:
            self._give_up(why)

    def _loop(self, control: socket.socket) -> None:
        rest, due = b"", 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(control, selectors.EVENT_READ)
            while not self._stopped:
                now = time.monotonic()
                if now >= due:
                    due = now + beat_s(len(self.peers), self.limit_s)
                    self._send({"status": asdict(self._process.status())})
                if not selector.select(max(due - now, 0.0)):
                    continue
                data = control.recv(1 << 16)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for message in map(json.loads, lines):
                    if "cause" in message:
                        self._answer = message["cause"]
                        self._answered.set()
                    elif "end" in message:
                        # Beside the reports, which show that this process runs.
                        end, text = self._process.end, message["end"]
                        name = "hvd_pipe end"
                        threading.Thread(target=end, args=(text,), name=name, daemon=True).start()


class _Process:
    """What this process does; the reporter asks from a thread of its own."""

    def __init__(
        self,
        own_rank: int,
        waits_for: Callable[[Frames], Wait | None],
        patience_s: float = 0.0,
    ) -> None:
        self._rank = own_rank
        self._find, self._patience_s = waits_for, patience_s
        self._waits_for: Wait | None = None
        self._since = time.monotonic()
        self._threads = OtherThreads()

    def status(self) -> Status:
        frames = sys._current_frames()
        waits_for, now = self._find(frames), time.monotonic()
        if waits_for != self._waits_for:
            self._waits_for, self._since = waits_for, now
        seconds = now - self._since
        waits = waits_for is not None and seconds >= self._patience_s
        where = _line(frames.get(threading.main_thread().ident or 0))
        frames.clear()  # this function's own frame is in it: a cycle, which keeps all frames alive
        return Status(where, waits, seconds, self._threads.are_busy())

    def say(self, text: str) -> None:
        _say(text)

    def end(self, text: str) -> None:
        self.say(f"rank {self._rank} ends, as it waits for a rank that is lost: {text}")
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(1)


def _say(text: str) -> None:
    with suppress(Exception):  # nobody may be reading any more
        sys.stderr.write(f"hvd_pipe: {text}\n")
        sys.stderr.flush()


def module_of(frame: FrameType) -> str:
    """Return the name of the module that a frame runs."""
    return str(frame.f_globals.get("__name__"))


_LIBRARIES = (
    "<",  # <frozen runpy>
    *hvd_pipe.__path__,
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)


def horovod_call(frame: FrameType | None) -> list[str]:
    """Return the functions of Horovod's that a thread is in, from the innermost on.

    The user's own calls of Horovod are registered by nobody.
    """
    names = []
    while frame is not None and module_of(frame).startswith("horovod."):
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


def is_library(file: str) -> bool:
    """Whether a file is no user's own, wherever its library is installed.

    >>> is_library("/usr/lib/python3/dist-packages/torch/nn.py"), is_library("/home/me/train.py")
    (True, False)
    """
    folders = Path(file).parts
    installed = "site-packages" in folders or "dist-packages" in folders
    return installed or file.startswith(_LIBRARIES)


def _line(frame: FrameType | None) -> str:
    """Return the line of the user's own code that a thread is at, or the innermost one."""
    innermost = frame
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    return "" if frame is None else _place(frame.f_code.co_filename, frame.f_lineno)


def _place(file: str, line: int) -> str:
    return f"{Path(file).name}:{line}"


def _limit(text: str) -> float:
    """Read `ENVIRONMENT_VARIABLE`.

    >>> _limit(""), _limit("0"), _limit("2.5")
    (120.0, 0.0, 2.5)
    """
    try:
        seconds = float(text or DEFAULT_S)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(
            f"{ENVIRONMENT_VARIABLE} must be a number of seconds, 0 for no limit, got {text!r}."
        )
    return seconds


# What happens once a process: after a fork, at an exception, at the end.

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
_before: _Hook | None = None
_explained: BaseException | None = None


def _install() -> None:
    global _before, _explained  # noqa: PLW0603
    _explained = getattr(sys, "last_value", None)  # it was shown before, and ended nothing
    if _before is None:
        os.register_at_fork(after_in_child=_forget)
        _before, sys.excepthook = sys.excepthook, _on_exception
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def _forget() -> None:
    """Take no part in a forked child: a data loader's, say."""
    global _reporter  # noqa: PLW0603
    if _reporter is not None:
        _reporter.close()
    _reporter = None


def _one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str:
    """Return an exception in a line, with the last line of the user's own code."""
    frames = traceback.extract_tb(trace)
    of_user = [frame for frame in frames if not is_library(frame.filename)]
    place = "".join(
        f" ({_place(frame.filename, frame.lineno or 0)})" for frame in (of_user or frames)[-1:]
    )
    first, *rest = str(error).split("\n")
    inner = [line for line in rest if re.match(r"[A-Za-z_.]*(Error|Exception): .", line)]
    text = inner[-1] if inner and first.rstrip().endswith(":") else first
    return f"{kind.__name__}{': ' if text else ''}{text[:300]}{place}"


def _on_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Explain an exception around what shows it."""
    _tell_others(error)
    assert _before is not None
    _before(kind, error, trace)
    _tell_user(error)


def _at_exit() -> None:
    """Leave; with an explanation, where a later `sys.excepthook` did not call this one's."""
    error = getattr(sys, "last_value", None)
    if error is not None and error is not _explained and not _at_prompt():
        _tell_others(error)
        _tell_user(error)
    leave()


def _at_prompt() -> bool:
    """Whether this is an interactive session, which shows an exception and goes on."""
    return hasattr(sys, "ps1")


def _failed_here(error: BaseException) -> bool:
    return _job is None or not _job.failed_elsewhere(error)


def _tell_others(error: BaseException) -> None:
    """Tell the other ranks why this one ends."""
    global _explained  # noqa: PLW0603
    _explained = error
    if _reporter is not None and not _at_prompt() and _failed_here(error):
        _reporter.raised(_one_line(type(error), error, error.__traceback__))


def _tell_user(error: BaseException) -> None:
    """Tell the user why Horovod's communication has failed."""
    if _reporter is None or _failed_here(error):
        return
    cause = _reporter.cause(NEWS_S)
    if cause is not None:
        _say(f"rank {_reporter.me} failed because of another: {cause}")
