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
   job's directory in its environment, and ended by its pid.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

import pytest

P = ParamSpec("P")
R = TypeVar("R")

HOROVODRUN = [sys.executable, str(Path(__file__).with_name("launch.py"))]
ENTRY = Path(__file__).with_name("rank_main.py")
GRACE = 5.0  # seconds that ranks get to end by themselves after their deadline
LONGEST = 420.0  # seconds; a job's own limit must come before pytest's, and say where ranks hang
TAIL = 4000  # characters of a rank's output that a failure shows

JOB = "RANKS_DIRECTORY"  # the environment variable by which a job's processes are known

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Open MPI polls while it waits; with more ranks than cores it must let the others compute.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # Containers forbid process_vm_readv, Open MPI's way to copy between processes.
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    # The cycle is how long Horovod gathers messages, 1 ms by default: most of a small all-reduce.
    "HOROVOD_CYCLE_TIME": "0.1",
    # A collective that some rank never joins raises on the ranks that wait in it, so that the
    # failure names the test's own line instead of a deadline.
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "10",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "20",
}


def run_ranks(
    n: int,
    function: Callable[..., R],
    *args: object,
    env: Mapping[str, str] | None = None,
    timeout: float = 180.0,
    launcher: str = "mpi",
) -> list[R]:
    """Call ``function(*args)`` on n ranks and return what each returned, in the order of ranks.

    Args:
        n: How many ranks.
        function: A module-level function of a module beside this one.
        args: Its arguments; they and the results travel as pickles.
        env: Environment variables for the ranks, over `ENVIRONMENT`.
        timeout: Seconds until a rank is ended; `LONGEST` at most.
        launcher: ``"mpi"`` (mpirun) or ``"gloo"`` (horovodrun --gloo).

    Raises:
        AssertionError: A rank raised, hung or died; the message has every rank's traceback.
    """
    _check_limit(timeout)
    call = (function.__module__, function.__qualname__, args, timeout)
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        directory = Path(name)
        (directory / "call.pickle").write_bytes(pickle.dumps(call))
        command = [*_launch(launcher, n), sys.executable, str(ENTRY), name]
        code = _run(command, directory, dict(env or {}), timeout + GRACE)
        outcomes = [_outcome(directory, rank) for rank in range(n)]
        if code or not all(good for good, _ in outcomes):
            title = f"{function.__module__}:{function.__qualname__} failed on {n} ranks"
            raise AssertionError(_report(title, code, outcomes, directory))
        return [value for _, value in outcomes]  # type: ignore[misc]


def run_script(
    n: int, *command: str, env: Mapping[str, str] | None = None, timeout: float = 120.0
) -> str:
    """Run ``horovodrun -np n python COMMAND`` by `launch`, and return what it printed.

    Raises:
        AssertionError: It failed, or took longer than ``timeout`` seconds.
    """
    _check_limit(timeout)
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        directory = Path(name)
        whole = [*HOROVODRUN, "-np", str(n), sys.executable, *command]
        code = _run(whole, directory, dict(env or {}), timeout)
        output = (directory / "log.launcher").read_text(errors="replace")
        assert code == 0, f"{' '.join(command)} on {n} ranks: exit status {code}\n{output}"
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


def _run(
    command: Sequence[str], directory: Path, env: dict[str, str], timeout: float
) -> int | None:
    """Run a launcher; return its exit status. All of its processes have ended by then."""
    with (directory / "log.launcher").open("wb") as log:
        launched = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_inherited() | ENVIRONMENT | env | {JOB: str(directory)},
            start_new_session=True,
        )
    try:
        with suppress(subprocess.TimeoutExpired):
            launched.wait(timeout)
    finally:  # a KeyboardInterrupt comes this way, too
        _end(launched, directory)
    return launched.returncode


def _inherited() -> dict[str, str]:
    """The environment, less what would choose a strategy in place of the test."""
    return {key: value for key, value in os.environ.items() if not key.startswith("HVD_PIPE_")}


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
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # ended meanwhile, or another user's
            if mark in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
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
