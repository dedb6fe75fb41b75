"""A rank is killed, stopped, raises, or is interrupted: the others end soon, and say why.

Nothing is left of the job then, and its last checkpoint loads.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from faults import NEVER_S, STEPS, TIMEOUT_S, Job

# nightly: each fault takes a job of new interpreters; one job a kind of fault stays in make test.
LAUNCHERS = [pytest.param("mpi", marks=pytest.mark.nightly), "gloo"]
LOST = 1


@pytest.mark.parametrize(
    ("launcher", "strategy", "ranks"),
    [
        pytest.param("mpi", "merged-gradient", 3, marks=pytest.mark.nightly),
        pytest.param("mpi", "pipe-sgd+int8", 2, marks=pytest.mark.nightly),
        pytest.param("mpi", "cocod:period=2", 2, marks=pytest.mark.nightly),
        # nightly: the watch must name it before Gloo gives up; test_pipedream_wrong stops one
        pytest.param("gloo", "pipe-sgd", 2, marks=pytest.mark.nightly),
    ],
)
def test_a_rank_is_stopped(launcher: str, strategy: str, ranks: int) -> None:
    """Open MPI would wait for ever; Gloo for half a minute, and name nobody.

    With three ranks, a thread of the first one writes meanwhile. The end of any rank cut that off.
    """
    writes = ranks == 3
    words = ["write beside"] if writes else []
    with Job(launcher, strategy, *words, timeout_s=TIMEOUT_S, ranks=ranks) as job:
        job.train(2 * STEPS)
        os.kill(job.pid(LOST), signal.SIGSTOP)
        job.ended()
        assert job.launched.returncode != 0
        job.told_who_is_lost(LOST)
        assert "has been silent" in job.output
        assert (job.folder / "written").exists() == writes, job.output
        assert ("have finished their work" in job.output) == writes, job.output
        assert job.checkpoint()["step"] >= STEPS - 10


@pytest.mark.nightly
def test_all_others_stand_still_where_a_rank_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """With dynamic process sets, every call that sends waits for a lock, and keeps Python's.

    No thread of these ranks could say that they were alive: each was called stopped by the others,
    and the job hung where all stood still. Where Horovod's thread waits for the stopped rank
    without that lock, the others go on sending until Gloo gives up, and name the rank then.
    """
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    wrong = "all stand still"
    with Job("gloo", "merged-gradient", wrong, timeout_s=TIMEOUT_S, ranks=3) as job:
        job.started()
        job.ended()
        assert job.launched.returncode != 0
        job.told_who_is_lost(LOST)
        assert "it is stopped, by a signal" in job.output, job.output


@pytest.mark.parametrize(
    ("launcher", "strategy", "told"),
    [
        pytest.param(
            *("mpi", "cocod:period=2", f"process rank {LOST} "),  # says mpirun
            marks=pytest.mark.nightly,
        ),
        ("gloo", "merged-gradient", f"Process name: {LOST}\n"),  # says horovodrun
    ],
)
def test_a_rank_is_killed(launcher: str, strategy: str, told: str) -> None:
    """The launcher is the first to know; what ranks would say is in tests/single."""
    with Job(launcher, strategy, timeout_s=NEVER_S) as job:
        job.train()
        os.kill(job.pid(LOST), signal.SIGKILL)
        job.ended()
        assert job.launched.returncode != 0
        assert told in job.output, job.output
        assert job.checkpoint()["step"] >= STEPS - 10


@pytest.mark.parametrize(
    ("launcher", "strategy", "wrong"),
    [
        ("mpi", "pipe-sgd", "raise"),
        pytest.param("gloo", "cocod:period=2", "raise, and hide it", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_raises(launcher: str, strategy: str, wrong: str) -> None:
    """Where a later sys.excepthook called no other, the rank was said to have ended its script."""
    with Job(launcher, strategy, wrong, timeout_s=NEVER_S) as job:
        job.started()
        job.ended()
        assert job.launched.returncode != 0
        told = f"because of another: rank {LOST} on "
        assert told in job.output, job.output
        assert "raised ValueError: bad sample 17 (workers_faults.py:" in job.output
        assert job.checkpoint()["step"] >= STEPS - 10


@pytest.mark.nightly
def test_a_rank_raises_and_does_not_end() -> None:
    """Python waits for its threads first; the others cannot wait so long."""
    wrong = "raise, and a thread goes on"
    with Job("mpi", "merged-gradient", wrong, timeout_s=TIMEOUT_S) as job:
        job.started()
        job.ended()
        assert f"lost: rank {LOST} on " in job.output, job.output
        assert "raised ValueError: bad sample 17" in job.output


@pytest.mark.nightly
def test_a_rank_ends_before_the_others() -> None:
    with Job("mpi", "pipe-sgd", "leave", timeout_s=NEVER_S) as job:
        job.started()
        job.ended()
        assert f"because of another: rank {LOST} on " in job.output, job.output
        assert "Give every rank as many steps" in job.output


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_interrupt_from_the_terminal(launcher: str) -> None:
    """Ctrl-C: the launcher's whole process group gets a SIGINT."""
    with Job(launcher, "pipe-sgd", timeout_s=NEVER_S) as job:
        job.train()
        os.killpg(job.launched.pid, signal.SIGINT)
        job.ended()
        # Not the launcher's status: horovodrun's was 0 once, as it ends the ranks itself.
        assert not any((job.folder / f"end.{rank}").exists() for rank in job.ranks)
        assert job.checkpoint()["step"] >= STEPS - 10


@pytest.mark.nightly  # it stops a rank for seconds, in a job that must train for longer
def test_a_pause_is_no_fault() -> None:
    """A debugger, a machine that swaps: shorter than the limit, and the job goes on."""
    with Job("mpi", "pipe-sgd", "", "600", timeout_s=9 * TIMEOUT_S) as job:
        job.train()
        os.kill(job.pid(LOST), signal.SIGSTOP)
        with pytest.raises(AssertionError):
            job.wait_for(lambda: job.launched.poll() is not None, bound_s=5)
        os.kill(job.pid(LOST), signal.SIGCONT)
        job.ended()
        assert job.launched.returncode == 0, job.output
        first, *others = (torch.load(job.folder / f"end.{rank}") for rank in job.ranks)
        for other in others:
            assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for one checkpoint of the job and its log, and not for another."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@pytest.mark.nightly
def test_the_disk_is_full_at_a_checkpoint(small_disk: Path) -> None:
    with Job("mpi", "pipe-sgd", timeout_s=NEVER_S, folder=small_disk) as job:
        job.train()
        with (small_disk / "other").open("ab", buffering=0) as other:
            while job.launched.poll() is None:  # a checkpoint that is replaced leaves pages again
                with suppress(OSError):  # or takes the last page first
                    other.write(b"\0" * _free(small_disk))
                time.sleep(0.02)
        job.ended()
        assert job.launched.returncode != 0
        told = r"because of another: rank 0 on .* raised \w+: .*(inline_container|No space left)"
        assert re.search(told, job.output), job.output
        assert job.checkpoint()["step"] >= STEPS - 10


def _free(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_bsize
