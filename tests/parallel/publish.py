"""How a rank speaks to its test, or to Horovod, while both run: by files, and by its end."""

from __future__ import annotations

import atexit
import os
import time
from pathlib import Path


def publish(path: Path, content: str | bytes) -> None:
    """Write a file that another process may read at any moment: what it was before, or whole.

    ``Path.write_text`` empties the file first, and who reads it then finds no step, or no host.
    """
    part = path.with_name(f"part.{path.name}")
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    part.replace(path)


def end_late_over_gloo() -> None:
    """Let this rank end some seconds after it has failed.

    As soon as it ends, horovodrun ends the others, which may not have said yet why they do. To be
    called before Horovod is initialised, which then ends before the pause, not after it.
    """
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ:
        atexit.register(time.sleep, 3.0)


def rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks, as Open MPI or horovodrun says them."""
    launcher = "OMPI_COMM_WORLD" if "OMPI_COMM_WORLD_RANK" in os.environ else "HOROVOD"
    return int(os.environ[f"{launcher}_RANK"]), int(os.environ[f"{launcher}_SIZE"])
