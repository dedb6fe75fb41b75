"""A rank that trains until something happens to it: ``python workers_faults.py FOLDER STRATEGY``.

A third word says what this rank itself does wrong, and a fourth how many steps it takes.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import horovod.torch as horovod
import torch
from problem import OPTIMIZERS, loss_of, make_model
from publish import end_late_over_gloo, publish

import hvd_pipe.torch as hvd
from hvd_pipe.runtime.watch.waits import activity

DEADLINE_S = 120  # no rank outlives its test
STEPS = 1_000_000
EVERY = 10  # steps between two checkpoints
SOON = 30  # steps until the rank does something wrong
LATE = 1  # the rank that does


def save(path: Path, checkpoint: dict[str, Any]) -> None:
    """A checkpoint is whole or not there."""
    part = path.with_suffix(".part")
    torch.save(checkpoint, part)
    part.replace(path)


def parse(strategy: str) -> dict[str, Any]:
    name, _, compression = strategy.partition("+")
    return {"strategy": name} | ({"compression": hvd.Compression.int8} if compression else {})


def go_wrong(how: str) -> None:
    if how == "raise, and hide it":  # a logger's hook that calls no other
        sys.excepthook = lambda *_: print("an exception was logged", file=sys.stderr)
    if how in ("raise", "raise, and hide it"):
        raise ValueError("bad sample 17")
    if how == "raise, and a thread goes on":
        threading.Thread(target=time.sleep, args=(DEADLINE_S,)).start()
        raise ValueError("bad sample 17")
    if how == "leave":
        sys.exit()


def stand_still(folder: Path, rank: int) -> None:
    """Stop one rank; have the others stand still in calls that keep Python's interpreter lock.

    Horovod's thread asks all ranks for new process sets then, and holds a lock that calls need.
    """
    publish(folder / f"sends.{rank}", "")
    if rank == LATE:
        while not all((folder / f"sends.{other}").exists() for other in range(hvd.size())):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGSTOP)
    for number in itertools.count():
        horovod.allreduce_async(torch.ones(1), name=f"never.{number}")
        time.sleep(0.001)


def write_beside(folder: Path) -> None:
    """Write something in another thread, until long after another rank was stopped."""

    def write() -> None:
        pid = int((folder / f"pid.{LATE}").read_text())
        found = activity(pid, pid)
        while found is not None and found.state != "T":
            time.sleep(0.02)
            found = activity(pid, pid)
        end = time.monotonic() + 1.5 * float(os.environ["HVD_PIPE_TIMEOUT"])
        while time.monotonic() < end:
            time.sleep(0.02)
        publish(folder / "written", "")

    threading.Thread(target=write, name="checkpoint").start()


def with_a_child() -> None:
    """Fork as a data loader does; the child outlives the rank by up to a few seconds."""
    parent = os.getpid()
    if os.fork() == 0:
        while os.getppid() == parent:
            time.sleep(3)
        os._exit(0)


def main(folder: Path, strategy: str, wrong: str = "", steps: str = str(STEPS)) -> None:
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    torch.set_num_threads(1)
    if wrong:
        end_late_over_gloo()
    hvd.init()
    rank = hvd.rank()
    model = make_model()
    optimizer: Any = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), **parse(strategy)
    )
    with_a_child()
    publish(folder / f"pid.{rank}", str(os.getpid()))
    for step in range(int(steps)):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        if step % EVERY == 0:
            if rank == 0:
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save(folder / "checkpoint.pt", states | {"step": step})
            with suppress(OSError):  # on a full disk it is the checkpoint that must fail
                publish(folder / f"step.{rank}", str(step))
        if step == SOON and wrong == "write beside" and rank == 0:
            write_beside(folder)
        if step == SOON and wrong == "all stand still":
            stand_still(folder, rank)
        if step == SOON and rank == LATE:
            go_wrong(wrong)
        time.sleep(0.002)
    optimizer.synchronize()
    torch.save(model.state_dict(), folder / f"end.{rank}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
