"""Run a training script with ``HVD_PIPE_PROFILE`` set, until its profile is written."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hvd_pipe.cli.output import InputError
from hvd_pipe.errors import HvdPipeError
from hvd_pipe.planning.profile import ModelProfile

__all__ = ["profile_script"]

_POLL_S = 0.2
_GRACE_S = 10.0


def profile_script(command: Sequence[str], target: Path, rank: int, size: int) -> None:
    """Run a script and return when it has written its profile to ``target``.

    Alone, the script is ended then: nobody waits for the rest of a training. Under a launcher it
    runs to its end, because a rank that leaves early is a failure to the others. What the script
    prints goes to stderr: stdout is the command's own.

    Args:
        command: The script and its arguments.
        target: Where the profile goes; replaced only by a whole one.
        rank: This process's; rank 0 writes.
        size: How many ranks there are.

    Raises:
        HvdPipeError: The script failed, or ended without a profile.
    """
    if not Path(command[0]).is_file():
        raise InputError(f"{command[0]}: No such file")
    part = target.with_name(f".{target.name}.part")
    if rank == 0:
        part.write_text("")  # a target that cannot be written is told now, not after the training
    process = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        env=os.environ | {"HVD_PIPE_PROFILE": str(part.resolve())},
    )
    try:
        while process.poll() is None and (size > 1 or _read(part) is None):
            time.sleep(_POLL_S)
        code = process.poll()
        if rank == 0 and not code and (profile := _read(part)) is not None:
            part.unlink()
            name = profile.name or Path(command[0]).stem
            dataclasses.replace(profile, name=name).save(target)
        elif code:
            how = f"exit status {code}" if code > 0 else f"{signal.Signals(-code).name}"
            raise HvdPipeError(f"{command[0]} failed ({how}); its own message is above")
        elif rank == 0:
            raise HvdPipeError(
                f"{command[0]} ended before its profile was written: it must train with "
                "hvd_pipe.torch's DistributedOptimizer, for at least 20 steps"
            )
    finally:  # a KeyboardInterrupt comes this way, too
        _end(process)
        if rank == 0:
            part.unlink(missing_ok=True)


def _read(part: Path) -> ModelProfile | None:
    """Return the profile once it is there, and not half of it."""
    try:
        return ModelProfile.load(part)
    except (OSError, ValueError):
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    for end in (process.terminate, process.kill):
        if process.poll() is None:
            end()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
