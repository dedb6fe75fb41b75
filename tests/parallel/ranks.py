"""Run a function on n ranks from inside one pytest process.

    pytest --- mpirun (or horovodrun) --- python rank_main.py DIRECTORY     once a rank
       |                                      |
       +--- DIRECTORY: call.pickle ---------->|    what to run
                       log.R        <---------+    what rank R printed
                       outcome.R    <---------+    its result, or its traceback

No rank outlives its test. Three things see to it, each for the case that the one before misses:

1. a rank dumps its stacks and exits at the deadline, even if pytest has been killed by then;
2. the launcher's own session is ended, by its id, when the test ends in whatever way;
3. what is left of the job (Open MPI gives each rank a process group of its own) is known by the
   job's directory in its environment, or where it writes, and ended by its pid.

Where ``python rank_main.py`` would import a framework first, `rank_server` forks the rank instead.
"""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, ParamSpec, Self, TypeVar

import pytest
import rank_server

P = ParamSpec("P")
R = TypeVar("R")

HOROVODRUN = [sys.executable, str(Path(__file__).with_name("launch.py"))]
ENTRY = Path(__file__).with_name("rank_main.py")
GRACE = 5.0  # seconds that ranks get to end by themselves after their deadline
LONGEST = 420.0  # seconds; a job's own limit must come before pytest's, and say where ranks hang
TAIL = 4000  # characters of a rank's output that a failure shows

JOB = "RANKS_DIRECTORY"  # the environment variable by which a job's processes are known

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Open MPI polls while it waits; with more ranks than cores it must let the others compute
    # (and sleeps instead, see sleeping_yield.c).
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # Containers forbid process_vm_readv, Open MPI's way to copy between processes.
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    # A collective that some rank never joins raises on the ranks that wait in it, so that the
    # failure names the test's own line instead of a deadline. A busy machine may well stand still
    # for some seconds.
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "30",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60",
}


@functools.cache
def environment() -> dict[str, str]:
    """What all ranks of tests find in their environment."""
    library = Path(_servers().name) / "sleeping_yield.so"
    source = Path(__file__).with_name("sleeping_yield.c")
    subprocess.run(
        ["c++", "-x", "c", "-O2", "-shared", "-fPIC", "-o", library, source], check=True
    )
    return {**_ENVIRONMENT, "LD_PRELOAD": str(library)}


def run_ranks(
    n: int,
    function: Callable[..., R],
    *args: object,
    env: Mapping[str, str] | None = None,
    timeout: float = 180.0,
    launcher: str = "mpi",
    framework: str | None = "auto",
) -> list[R]:
    """Call ``function(*args)`` on n ranks and return what each returned, in the order of ranks.

    Args:
        n: How many ranks.
        function: A module-level function of a module beside this one.
        args: Its arguments; they and the results travel as pickles.
        env: Environment variables for the ranks, over `environment`.
        timeout: Seconds until a rank is ended; `LONGEST` at most.
        launcher: ``"mpi"`` (mpirun) or ``"gloo"`` (horovodrun --gloo).
        framework: One of `rank_server.FRAMEWORKS`, which all ranks find imported, as they are
            forked. With None they are new interpreters, where ``env`` is there before any import.
            ``"auto"`` is the framework that the function's module imports, None if both or none.

    Raises:
        AssertionError: A rank raised, hung or died; the message has every rank's traceback.
    """
    _check_limit(timeout)
    if framework == "auto":
        framework = framework_of(function.__module__)
    call = Call(function.__module__, function.__qualname__, args, timeout)
    with Launched(n, call, env, launcher, framework) as launched:
        code = launched.wait(timeout + GRACE)
        outcomes = [launched.outcome(rank) for rank in range(n)]
        if code or not all(good for good, _ in outcomes):
            title = f"{function.__module__}:{function.__qualname__} failed on {n} ranks"
            raise AssertionError(_report(title, code, outcomes, launched.directory))
        return [value for _, value in outcomes]  # type: ignore[misc]


class Call(NamedTuple):
    """What every rank calls, and the seconds until it ends itself; see `rank_main`."""

    module: str
    name: str
    args: tuple[object, ...]
    timeout: float


class Launched:
    """Ranks that make a call; the end of the context ends them, whatever they do."""

    def __init__(
        self,
        n: int,
        call: Call,
        env: Mapping[str, str] | None,
        launcher: str,
        framework: str | None,
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="ranks-")
        self.directory = Path(self._temporary.name)
        (self.directory / "call.pickle").write_bytes(pickle.dumps(call))
        entry = _forked(framework, n) if framework else [sys.executable, str(ENTRY)]
        command = [*_launch(launcher, n), *entry, str(self.directory)]
        self._process = _start(command, self.directory, dict(env or {}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._process, self.directory)
        self._temporary.cleanup()

    def runs(self) -> bool:
        """Whether the launcher has not ended."""
        return self._process.poll() is None

    def wait(self, timeout: float) -> int | None:
        """Return the launcher's exit status; end the ranks that run after so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        _end(self._process, self.directory)
        return self._process.returncode

    def outcome(self, rank: int) -> tuple[bool, object]:
        """Return whether a rank ended well, and its result, its traceback or its last output."""
        return _outcome(self.directory, rank)

    def tail(self, who: str) -> str:
        """Return the end of the output of a rank, by its number, or of the ``"launcher"``."""
        return _tail(self.directory, who)


def run_script(
    n: int, *command: str, env: Mapping[str, str] | None = None, timeout: float = 120.0
) -> str:
    """Run ``horovodrun -np n python COMMAND`` by `launch`, and return what it printed."""
    return run_program([*HOROVODRUN, "-np", str(n), sys.executable, *command], env, timeout)


def run_program(
    command: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 120.0
) -> str:
    """Run a command that starts ranks in its own way, and return what it printed."""
    _check_limit(timeout)
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        directory = Path(name)
        code = _run(command, directory, dict(env or {}), timeout)
        output = (directory / "log.launcher").read_text(errors="replace")
        assert code == 0, f"{' '.join(command)}: exit status {code}\n{output}"
        return output


def once(job: Callable[P, R]) -> Callable[P, R]:
    """Run a job when it is first asked for; repeat its result, or its failure, from then on.

    Launching costs seconds, so tests share jobs, and a job that hung must not hang in each test:
    what ended it is raised again, pytest's own time limit included.
    """

    @functools.cache
    def outcome(*args: P.args, **kwargs: P.kwargs) -> tuple[R | None, BaseException | None]:
        try:
            return job(*args, **kwargs), None
        except (KeyboardInterrupt, pytest.exit.Exception):  # these end all tests
            raise
        except BaseException as error:  # pytest-timeout's is no Exception
            return None, error.with_traceback(None)

    @functools.wraps(job)
    def result(*args: P.args, **kwargs: P.kwargs) -> R:
        value, error = outcome(*args, **kwargs)
        if error is not None:
            raise error.with_traceback(None)
        return value  # type: ignore[return-value]

    return result


def _check_limit(timeout: float) -> None:
    if timeout > LONGEST:
        raise ValueError(
            f"timeout={timeout} s of a job is above ranks.LONGEST, {LONGEST} s: pytest would end "
            "the test first, and not say where ranks hang. Split the job, or raise both limits."
        )


def _launch(launcher: str, n: int) -> list[str]:
    if launcher == "mpi":
        options = ["--oversubscribe", "--allow-run-as-root", "--bind-to", "none"]
        return ["mpirun", "-np", str(n), *options]
    assert launcher == "gloo", launcher
    return [*HOROVODRUN, "-np", str(n), "--gloo"]


def framework_of(module: str) -> str | None:
    """The framework that a module imports; None where it imports none, or both."""
    words = {
        word
        for value in vars(sys.modules[module]).values()
        if isinstance(value, ModuleType)
        for word in value.__name__.split(".")[:2]
    }
    found = {"torch"} & words | ({"tensorflow"} if words & {"tensorflow", "keras"} else set())
    return found.pop() if len(found) == 1 else None


def _forked(framework: str, n: int) -> list[str]:
    """The command of a client that has `rank_server` fork a rank."""
    for rank in range(min(n, 2)):
        _serve(framework, rank)
    return [sys.executable, "-I", "-S", rank_server.__file__, "ask", _servers().name, framework]


LONGEST_FOLDER = 60  # with names of 40 characters, what Linux takes as a socket's path


@functools.cache
def _servers() -> tempfile.TemporaryDirectory[str]:
    usual = tempfile.gettempdir()
    return tempfile.TemporaryDirectory(
        prefix="servers-", dir=usual if len(usual) < LONGEST_FOLDER else "/tmp"
    )


@functools.cache
def _serve(framework: str, rank: int) -> None:
    """Start a server, which lives as long as this process; clients wait until it is ready."""
    name = rank_server.address(_servers().name, framework, rank)
    with socket.socket(socket.AF_UNIX) as listener, Path(f"{name}.log").open("wb") as log:
        listener.bind(name)
        listener.listen()
        number = listener.fileno()
        server = subprocess.Popen(
            [sys.executable, rank_server.__file__, "serve", framework, str(number)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[number],
            env=inherited() | environment(),
            start_new_session=True,
        )
    atexit.register(server.communicate)


def _run(
    command: Sequence[str], directory: Path, env: dict[str, str], timeout: float
) -> int | None:
    """Run a launcher; return its exit status. All of its processes have ended by then."""
    launched = _start(command, directory, env)
    try:
        with suppress(subprocess.TimeoutExpired):
            launched.wait(timeout)
    finally:  # a KeyboardInterrupt comes this way, too
        _end(launched, directory)
    return launched.returncode


def _start(
    command: Sequence[str], directory: Path, env: dict[str, str]
) -> subprocess.Popen[bytes]:
    with (directory / "log.launcher").open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=inherited() | environment() | env | {JOB: str(directory)},
            start_new_session=True,
        )


def inherited() -> dict[str, str]:
    """The environment, less what would choose for the test; all tests may run by one carrier."""
    keep = ("HVD_PIPE_CARRIER",)
    return {k: v for k, v in os.environ.items() if not k.startswith("HVD_PIPE_") or k in keep}


def _end(launched: subprocess.Popen[bytes], directory: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if launched.poll() is None:
            os.killpg(launched.pid, number)
            with suppress(subprocess.TimeoutExpired):
                launched.wait(GRACE)
    deadline = time.monotonic() + GRACE
    while (left := processes_of(directory)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def processes_of(directory: Path) -> list[int]:
    """The live processes of the job with this directory, whoever is their parent by now."""
    mark = f"{JOB}={directory}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile, or another user's
            marked = mark in (process / "environ").read_bytes().split(b"\0")
            # A forked rank shows the environment of its server, and writes to the job's directory.
            if marked or directory in (process / "fd/1").readlink().parents:
                found.append(int(process.name))
    return found


def _outcome(directory: Path, rank: int) -> tuple[bool, object]:
    file = directory / f"outcome.{rank}"
    if file.exists():
        good, value = pickle.loads(file.read_bytes())
        return good, value
    return False, "ended without a result; the end of its output:\n" + _tail(directory, str(rank))


def _tail(directory: Path, who: str) -> str:
    file = directory / f"log.{who}"
    return file.read_text(errors="replace")[-TAIL:] if file.exists() else "(it never started)"


def _report(
    title: str, code: int | None, outcomes: list[tuple[bool, object]], directory: Path
) -> str:
    lines = [f"{title} (the launcher's exit status: {code})"]
    for rank, (good, value) in enumerate(outcomes):
        lines.append(f"--- rank {rank}: {'ended well' if good else value}")
    if all(good for good, _ in outcomes):
        # All results are there, so what went wrong did so in the shutdown after them.
        lines += [_tail(directory, str(rank)) for rank in range(len(outcomes))]
    return "\n".join([*lines, "--- the launcher:", _tail(directory, "launcher")])
