"""One rank's entry: ``python rank_main.py DIRECTORY``; `ranks.run_ranks` is the other side."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import sys
import time
import traceback
from pathlib import Path

from publish import publish, rank_and_size

PATIENCE = 8.0  # seconds a failed rank gives the others to report as well


def main(directory: Path) -> None:
    rank, size = rank_and_size()
    log = os.open(directory / f"log.{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    module, name, args, timeout = pickle.loads((directory / "call.pickle").read_bytes())
    faulthandler.dump_traceback_later(timeout, exit=True)
    # Collections are a third of the time in which TensorFlow traces many small graphs.
    gc.set_threshold(50_000, 50, 50)
    try:
        outcome = True, getattr(importlib.import_module(module), name)(*args)
    except BaseException:
        outcome = False, traceback.format_exc()
    publish(directory / f"outcome.{rank}", pickle.dumps(outcome))
    if not outcome[0]:
        # Leaving makes the launcher end every other rank, the ones that wait for this one
        # included, so ranks that fail for the same reason get a moment to say so.
        patience = time.monotonic() + PATIENCE
        while len(list(directory.glob("outcome.*"))) < size and time.monotonic() < patience:
            time.sleep(0.05)
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
