"""What the ranks of test_harness.py do; no framework, so they start fast."""

from __future__ import annotations

import faulthandler
import os
import time
from pathlib import Path

from publish import publish


def rank() -> int:
    return int(os.environ["OMPI_COMM_WORLD_RANK"])


def ten_times_rank(addend: int) -> int:
    # Later ranks first, so that the order of results is not the order of arrival.
    time.sleep(0.2 * (2 - rank()))
    return 10 * rank() + addend


def fail_on_rank_1() -> int:
    if rank() == 1:
        raise ZeroDivisionError("only here")
    return rank()


def die_on_rank_1() -> int:
    if rank() == 1:
        print("last words")
        os._exit(3)
    time.sleep(60)
    return rank()


def hang_on_rank_1(directory: str, deaf: bool) -> int:
    """Leave the pids of all ranks behind, then hang; a deaf rank has lost its own deadline."""
    publish(Path(directory) / f"rank{rank()}", str(os.getpid()))
    if deaf:
        faulthandler.cancel_dump_traceback_later()
    if rank() == 1:
        time.sleep(600)
    return rank()


def variable(name: str) -> str | None:
    return os.environ.get(name)
