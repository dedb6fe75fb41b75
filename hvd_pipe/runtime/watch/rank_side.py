"""No rank waits for ever for one that is gone: it ends, and says who is gone and why.

Open MPI waits for a stopped rank, and behind a cut link, for ever; Gloo gives up after half a
minute with an error that names nobody. So each rank has a child process
(`hvd_pipe.runtime.watch.child_process`), which watches the others until ``hvd.shutdown()``. A rank
ends only when another is lost *and* it has itself done nothing but wait for a while. Launchers
then end the rest of the job.

``HVD_PIPE_TIMEOUT`` is how many seconds a rank may be silent (120; 0 switches all of this off).
Elastic jobs recover by themselves and have none of it.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import re
import secrets
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
from types import FrameType
from typing import Any

import psutil  # type: ignore[import-untyped]  # Horovod needs it, too
from horovod.common.process_sets import ProcessSet

import hvd_pipe
from hvd_pipe.runtime.consensus import Agreement
from hvd_pipe.runtime.restarts import is_elastic
from hvd_pipe.runtime.watch import child_process
from hvd_pipe.runtime.watch.child_process import FIRST, Status, beat_s, encode, say
from hvd_pipe.runtime.watch.waits import OtherThreads, Wait

ENVIRONMENT_VARIABLE = "HVD_PIPE_TIMEOUT"
DEFAULT_S = 120.0
NEWS_S = 2.0  # how long news of a rank may take to come after Horovod's own error
START_S = 60.0  # for a process to start, on a machine that is very busy
ANSWER_S = 5.0  # for an answer, or to take a message, of a process that does little else

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


_watch: Watch | None = None


def start(job: Job) -> None:
    """Begin to watch the other ranks, and to be watched; all ranks do this at the same time."""
    global _watch
    stop()
    size, agreement, name = job.ranks.size(), job.agreement, "hvd_pipe.watch"
    if size == 1 or is_elastic():
        return
    watch: Watch | None = None

    def offer() -> dict[str, Any] | None:
        nonlocal watch
        limit_s = _limit(os.environ.get(ENVIRONMENT_VARIABLE, ""))
        if limit_s == 0:
            return None
        watch, secret = Watch(job, limit_s), secrets.token_hex(16)
        chosen = _addresses(os.environ.get("HOROVOD_GLOO_IFACE", ""))[:1]
        port = watch.open(secret=secret, address="".join(chosen), ranks=size)
        hosts = [*(chosen or _addresses()), socket.gethostname()]
        addresses = [(host, port) for host in hosts] if port else []
        return {"limit_s": limit_s, "secret": secret, "addresses": addresses}

    try:
        offered = agreement.found_by_first(offer, f"{name}.offer", job.ranks)
        if offered is None:
            return
        met = watch is not None
        if watch is None:
            watch = Watch(job, offered["limit_s"])
            met = bool(watch.open(secret=offered["secret"], addresses=offered["addresses"]))
        own = f"rank {job.ranks.rank()} on {socket.gethostname()} (pid {os.getpid()})"
        told = agreement.gather((own, met), f"{name}.met", job.ranks)
        missed = [one for one, has_met in told if not has_met]
        if missed and watch.rank == FIRST:
            others = ", ".join(missed[:3]) + (" and others" if len(missed) > 3 else "")
            warnings.warn(
                f"{others} cannot connect to {own}: where one of them is stopped or its link is "
                "cut, nobody notices. Let TCP connections between these hosts through, let that "
                f"rank open {size + child_process.SPARE_FILES} files or more (ulimit -n), or set "
                f"{ENVIRONMENT_VARIABLE}=0 to go without.",
                stacklevel=3,
            )
        if met and len(missed) < size - 1:
            watch.begin([one if has_met else "" for one, has_met in told])
            _watch, watch = watch, None
    finally:
        if watch is not None:
            watch.stop()


def _addresses(interface: str | None = None) -> list[str]:
    """Return the addresses of this host, or of one interface: loopback last, IPv4 before IPv6."""
    addresses = [
        (one.address.startswith("127.") or one.address == "::1", ":" in one.address, one.address)
        for name, ones in psutil.net_if_addrs().items()
        for one in ones
        if interface in (None, name)
        and one.family in (socket.AF_INET, socket.AF_INET6)
        and not one.address.lower().startswith("fe80:")  # needs an interface of the other host's
    ]
    return [address for _, _, address in sorted(addresses)]


def leave() -> None:
    """Tell the others that this rank goes, before Horovod shuts down."""
    if _watch is not None:
        _watch.tell({"left": True})


def stop() -> None:
    """Watch no more, after Horovod has shut down."""
    global _watch  # noqa: PLW0603
    if _watch is not None:
        _watch.stop()
    _watch = None


def _forget() -> None:
    """Take no part in a forked child, such as a data loader's."""
    global _watch  # noqa: PLW0603
    if _watch is not None:
        _watch.close()
    _watch = None


def _at_exit() -> None:
    if _watch is not None:
        _watch.explain()
        leave()


os.register_at_fork(after_in_child=_forget)


class Watch:
    """The child process of this rank, and a thread that tells it what the rank does."""

    def __init__(self, job: Job, limit_s: float) -> None:
        self.job, self.rank, self.limit_s = job, job.ranks.rank(), limit_s
        self.child: subprocess.Popen[bytes] | None = None
        self._control: Any = None  # a socket, once the child process is there
        self._thread = threading.Thread(target=self._run, name="hvd_pipe watch", daemon=True)
        self._sending, self._explained = threading.Lock(), threading.Event()
        self._stopped = False
        self._wait: Wait | None = None
        self._since = time.monotonic()
        self._patience_s = 0.0 if job.is_sure() else limit_s
        self._other_threads = OtherThreads()
        self._shown_before = getattr(sys, "last_value", None)

    def open(self, **words: Any) -> Any:
        """Start the child process, and return its answer: whether it has connected, or its port.

        None where it does not start: this must not raise, as the other ranks wait for this one.
        """
        words |= {"rank": self.rank, "limit_s": self.limit_s, "pid": os.getpid()}
        try:
            self._control, its = socket.socketpair()
            with its:
                # Not a fork of this process: that has threads, and MPI's memory.
                self.child = subprocess.Popen(
                    [sys.executable, "-S", child_process.__file__, str(its.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    cwd="/",
                    pass_fds=[its.fileno()],
                    start_new_session=True,  # Ctrl-Z stops the rank alone
                )
            return self._ask(words | {"main": threading.main_thread().native_id})
        except OSError as error:
            self._give_up(repr(error))
            return None

    def begin(self, names: Sequence[str]) -> None:
        """Begin to report, and to hear of the ranks that have names."""
        try:
            self._ask(names)
        except OSError as error:
            self.tell({"left": True})  # it must not look like a rank that is lost
            self._give_up(repr(error))
            return
        self._control.settimeout(beat_s(len(names), self.limit_s))
        self._thread.start()
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)  # after Horovod's own, so it is called before it

    def _ask(self, question: object) -> Any:
        self._control.settimeout(START_S)
        self._control.sendall(encode(question))
        with self._control.makefile("rb") as lines:
            answer = lines.readline()
        if not answer:
            raise ConnectionResetError("its process for that has ended at its start")
        return json.loads(answer)

    def stop(self) -> None:
        """Report nothing more; the others take it that this rank has left, or is lost."""
        self._stopped = True
        if self._control is not None:
            with suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(ANSWER_S)
        if self.child is not None:
            with suppress(subprocess.TimeoutExpired):
                self.child.wait(ANSWER_S)
            self.child.kill()  # where it is stopped
            self.child.wait()
        self.close()

    def close(self) -> None:
        """Close the connection to the child process."""
        if self._control is not None:
            self._control.close()

    def tell(self, message: Mapping[str, Any]) -> bool:
        """Tell the child process something; return whether it is there."""
        with self._sending, suppress(OSError):
            self._control.sendall(encode(message))
            return True
        return False

    def explain(self, asks: bool = True) -> None:
        """Tell the others by what this rank ends, or the user why communication has failed."""
        error = getattr(sys, "last_value", None)  # Python notes it before it calls any hook
        if error is None or error is self._shown_before or hasattr(sys, "ps1"):
            return
        if not self.job.failed_elsewhere(error):
            self.tell({"raised": _one_line(error)})
        elif asks and self.tell({"explain": NEWS_S}):
            self._explained.wait(NEWS_S + ANSWER_S)

    def status(self) -> Status:
        """Return what this process does."""
        frames = sys._current_frames()
        wait, now = self.job.waits_for(frames), time.monotonic()
        frames.clear()  # this function's own frame is in it: a cycle, which keeps all frames alive
        if wait != self._wait:
            self._wait, self._since = wait, now
        seconds = now - self._since
        waits = wait is not None and seconds >= self._patience_s
        return Status(waits, seconds, self._other_threads.are_busy())

    def _run(self) -> None:
        why = "its process for that has ended"
        try:
            while not self._stopped:
                self.tell({"status": asdict(self.status())})
                if _is_ending():
                    self.explain(asks=False)
                with suppress(TimeoutError):
                    word = self._control.recv(1)
                    if word == child_process.END:
                        with suppress(Exception):
                            sys.stdout.flush()
                        os._exit(1)
                    if not word:
                        break
                    self._explained.set()
        except Exception as error:  # a mistake in here must not look like a rank that is lost
            self.tell({"left": True})
            why = repr(error)
        if not self._stopped:
            self._give_up(why)

    def _give_up(self, why: str) -> None:
        self.close()
        say(f"rank {self.rank} can no longer hear of others: {why}")


def _is_ending() -> bool:
    """Whether Python waits for threads at its end; it waits for those of pools in main's name."""
    main = threading.main_thread()
    frame = sys._current_frames().get(main.ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return (frame is not None and frame.f_code is _SHUTDOWN.__code__) or not main.is_alive()


_SHUTDOWN = threading._shutdown  # type: ignore[attr-defined]


def module_of(frame: FrameType) -> str:
    """Return the name of the module that a frame runs."""
    return str(frame.f_globals.get("__name__"))


_LIBRARIES = (
    "<",  # <frozen runpy>
    *hvd_pipe.__path__,
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)


def is_library(file: str) -> bool:
    """Whether a file is no user's own, wherever its library is installed.

    >>> is_library("/usr/lib/python3/dist-packages/torch/nn.py"), is_library("/home/me/train.py")
    (True, False)
    """
    folders = Path(file).parts
    installed = "site-packages" in folders or "dist-packages" in folders
    return installed or file.startswith(_LIBRARIES)


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


def _one_line(error: BaseException) -> str:
    """Return an exception in a line, with the last line of the user's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [frame for frame in frames if not is_library(frame.filename)]
    last = (of_user or frames)[-1:]
    place = "".join(f" ({Path(one.filename).name}:{one.lineno})" for one in last)
    first, *rest = str(error).split("\n")
    inner = [line for line in rest if re.match(r"[A-Za-z_.]*(Error|Exception): .", line)]
    text = inner[-1] if inner and first.rstrip().endswith(":") else first
    return f"{type(error).__name__}{': ' if text else ''}{text[:300]}{place}"
