"""What the ranks of test_harness.py do."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path

from publish import publish


def rank() -> int:
    return int(os.environ["OMPI_COMM_WORLD_RANK"])


def fail_on_rank_1() -> int:
    if rank() == 1:
        raise ZeroDivisionError("only here")
    return rank()


def die_on_rank_1(number: int) -> None:
    """Have rank 1 end by a signal."""
    if rank() == 1:
        print("last words", flush=True)
        os.kill(os.getpid(), number)
    signal.pause()


def hang_on_rank_1(directory: str, deaf: bool) -> int:
    """Leave the pids of all ranks behind, then hang; a deaf rank has lost its own deadline."""
    publish(Path(directory) / f"rank{rank()}", str(os.getpid()))
    if deaf:
        faulthandler.cancel_dump_traceback_later()
    if rank() == 1:
        time.sleep(600)
    return rank()
