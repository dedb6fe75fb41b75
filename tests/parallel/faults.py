"""A job that trains while a test kills, stops or interrupts a part of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from problem import OPTIMIZERS, make_model
from ranks import HOROVODRUN, JOB, environment, inherited, processes_of

SCRIPT = Path(__file__).with_name("workers_faults.py")
START_S = 150.0  # for a start that takes seconds on a quiet machine
BOUND_S = 120.0  # for the end, likewise
# A live rank may be silent for some seconds where the machine is busy. Gloo gives up after 30 s.
TIMEOUT_S = 15.0
NEVER_S = 1000.0  # the fault is noticed by other means than silence
STEPS = 30  # that all ranks take before anything happens to one

LAUNCHERS = {
    "mpi": ["mpirun", "--oversubscribe", "--allow-run-as-root"],
    "gloo": [*HOROVODRUN, "--gloo"],
}


class Job:
    """Ranks that train under a launcher, until the context ends.

    ``strategy`` is as in ``strategy=``, with ``+int8`` for compression; the script is told it and
    ``words``. Checkpoints go to ``folder``; a new one by default.
    """

    def __init__(
        self,
        launcher: str,
        strategy: str,
        *words: str,
        timeout_s: float,
        folder: Path | None = None,
        ranks: int = 2,
        script: Path = SCRIPT,
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="ranks-")
        self.directory = Path(self._temporary.name)
        self.folder, self.ranks = folder or self.directory, range(ranks)
        self._log = self.directory / "log"
        with self._log.open("wb") as log:
            self.launched = subprocess.Popen(
                [
                    *LAUNCHERS[launcher],
                    "-np",
                    str(ranks),
                    sys.executable,
                    str(script),
                    str(self.folder),
                    strategy,
                    *words,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=inherited()
                | environment()
                | {
                    JOB: str(self.directory),
                    "HVD_PIPE_TIMEOUT": str(timeout_s),
                    # Horovod's own limit is not what is tested.
                    "HOROVOD_STALL_CHECK_DISABLE": "1",
                },
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.launched.pid, signal.SIGKILL)
        self.launched.wait()
        while left := processes_of(self.directory):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self._temporary.cleanup()

    @property
    def output(self) -> str:
        """What the job has printed."""
        return self._log.read_text(errors="replace")

    def step(self, rank: int) -> int:
        """A step that the rank has taken, at most ten before its last one."""
        file = self.folder / f"step.{rank}"
        return int(file.read_text()) if file.exists() else -1

    def started(self) -> None:
        """Wait until every rank has taken a step."""
        self.wait_for(lambda: min(map(self.step, self.ranks)) >= 0, START_S)

    def train(self, steps: int = STEPS) -> None:
        """Wait until every rank has taken so many steps more than the slowest one has now."""
        self.started()
        goal = min(map(self.step, self.ranks)) + steps
        self.wait_for(lambda: min(map(self.step, self.ranks)) >= goal)

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid.{rank}").read_text())

    def wait_for(self, true: Callable[[], object], bound_s: float = BOUND_S) -> float:
        """Return how many seconds it took until something became true."""
        begun = time.monotonic()
        while not true():
            seconds = time.monotonic() - begun
            assert seconds < bound_s, f"{bound_s} s are over. The job's output:\n{self.output}"
            time.sleep(0.02)
        return time.monotonic() - begun

    def ended(self) -> float:
        """Wait until the launcher and all that it has started are gone, by themselves."""
        return self.wait_for(
            lambda: self.launched.poll() is not None and not processes_of(self.directory)
        )

    def told_who_is_lost(self, rank: int) -> None:
        """Check that all ranks that end on account of another one name this one."""
        named = re.findall(r"(?:is lost|of another): rank (\d+) on", self.output)
        assert set(named) == {str(rank)}, self.output

    def told_who_raised(self, rank: int, error: str) -> None:
        """Check that they do, and say what it has raised."""
        self.told_who_is_lost(rank)
        assert f"raised {error}" in self.output, self.output

    def checkpoint(self) -> dict[str, Any]:
        """Load the last checkpoint as a plain script would; raises where it is not whole."""
        checkpoint: dict[str, Any] = torch.load(self.folder / "checkpoint.pt", weights_only=True)
        model = make_model()
        model.load_state_dict(checkpoint["model"])
        OPTIMIZERS["momentum"](model).load_state_dict(checkpoint["optimizer"])
        return checkpoint
