"""The harness itself: what it does with ranks that fail, die, hang or are interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import ranks
import workers_harness
from ranks import run_ranks


def test_a_failing_rank_is_reported_with_its_traceback() -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(2, workers_harness.fail_on_rank_1)
    rank_0, rank_1 = str(caught.value).split("--- rank ")[1:]
    assert rank_0.startswith("0: ended well")
    assert rank_1.startswith("1: Traceback")
    assert "in fail_on_rank_1" in rank_1
    assert "ZeroDivisionError: only here" in rank_1


def test_a_rank_that_dies_ends_its_job() -> None:
    with pytest.raises(AssertionError, match=r"rank 1: ended without a result(?s:.*)last words"):
        run_ranks(2, workers_harness.die_on_rank_1, signal.SIGKILL, timeout=60)
    with pytest.raises(AssertionError, match=r"exited on signal 11 \(Segmentation fault\)"):
        run_ranks(2, workers_harness.die_on_rank_1, signal.SIGSEGV, timeout=60)


# nightly: real deadlines; all other tests use the harness, too.
@pytest.mark.nightly
@pytest.mark.parametrize("deaf", [False, True], ids=["by its deadline", "by the harness"])
def test_a_rank_that_hangs_is_ended(
    tmp_path: Path, deaf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not deaf:  # by its own deadline: the harness leaves it far more
        monkeypatch.setattr(ranks, "GRACE", 60.0)
    hang, folder = workers_harness.hang_on_rank_1, str(tmp_path)
    with pytest.raises(AssertionError) as caught:
        run_ranks(2, hang, folder, deaf, timeout=12.0, framework="torch")
    assert "--- rank 1: ended without a result" in str(caught.value)
    if not deaf:
        assert "in hang_on_rank_1" in str(caught.value)
    _assert_gone(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_pytest(tmp_path: Path, number: signal.Signals) -> None:
    """Even where pytest could not end them itself."""
    (tmp_path / "test_hang.py").write_text(
        "import ranks, workers_harness\n"
        "def test():\n"
        f"    folder, hang = {str(tmp_path)!r}, workers_harness.hang_on_rank_1\n"
        "    ranks.run_ranks(2, hang, folder, True, framework='torch')"
    )
    with _pytest(tmp_path) as process:
        _wait_for(lambda: len(list(tmp_path.glob("rank*"))) == 2)
        assert _is_rank(_pids(tmp_path)[1])
        process.send_signal(number)
        ended = process.wait(120)
        assert ended == (-number if number == signal.SIGKILL else pytest.ExitCode.INTERRUPTED)
    _assert_gone(tmp_path)


@contextmanager
def _pytest(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the tests of a directory, and end them in any case."""
    here = Path(__file__).parent
    # "-p conftest": the project's conftest.py does not reach a file outside the project.
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "conftest", str(directory)],
        cwd=directory,  # not the folder of another conftest.py
        env=os.environ | {"PYTHONPATH": f"{here.parent}{os.pathsep}{here}"},
        stdout=subprocess.DEVNULL,
        # A shell's background jobs ignore SIGINT, and their children with them.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _pids(directory: Path) -> list[int]:
    """The pids that ranks left, rank 0 first; it may end by itself, the others hang."""
    return [int(file.read_text()) for file in sorted(directory.glob("rank*"))]


def _is_rank(pid: int) -> bool:
    """Whether the process lives and is a rank: its pid may be another's by now."""
    with suppress(OSError):
        return "rank_server.py" in Path(f"/proc/{pid}/cmdline").read_text()
    return False


def _assert_gone(directory: Path) -> None:
    pids = _pids(directory)
    assert len(pids) == 2
    # A killed process may take a moment to go.
    _wait_for(lambda: not any(_is_rank(pid) for pid in pids))


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
