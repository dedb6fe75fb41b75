"""Run one long command of the set-up: its output goes to a log, its progress to the terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvd_pipe.errors import HvdPipeError

__all__ = ["SetupError", "run", "say"]

_PERCENT = re.compile(rb"\[\s*(\d{1,3})%\]")
_ERROR = re.compile(r"\berror\b|^E: |CMake Error|No space left", re.IGNORECASE)


class SetupError(HvdPipeError):
    """A set-up step failed; the message says what failed and what to do, in one line."""


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def _why(log: Path) -> str:
    """Return the line of a log that most likely says what went wrong (the first error)."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)]
    return (errors or lines or ["no output"])[0 if errors else -1][:300]


def run(
    label: str,
    command: Sequence[str | os.PathLike[str]],
    log: Path,
    remedy: str,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> None:
    """Run ``command``, writing its output to ``log`` and how far it is to the terminal.

    Lines like ``[ 42%]`` (CMake's) become a percentage; other commands show elapsed seconds. A
    terminal gets one line that is rewritten, a log file a new line every half minute.

    Raises:
        SetupError: The command failed or does not exist; says why, where the log is, the remedy.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    live = sys.stdout.isatty()
    every = 1.0 if live else 30.0
    start = last = time.monotonic()
    if not live:
        say(f"  {label} ...")
    with log.open("wb") as sink:
        try:
            process = subprocess.Popen(
                [os.fspath(part) for part in command],
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=None if env is None else dict(env),
                cwd=cwd,
            )
        except OSError as error:
            raise SetupError(f"{label} failed: {error}. {remedy}") from error
        try:
            while process.poll() is None:
                time.sleep(0.2)
                if time.monotonic() - last >= every:
                    last = time.monotonic()
                    _show(label, log, last - start, live)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    seconds = time.monotonic() - start
    if process.returncode != 0:
        if live:
            say("")
        raise SetupError(f"{label} failed: {_why(log)} (whole log: {log}). {remedy}")
    say(f"\r\033[K  {label}: {seconds:.0f} s" if live else f"  {label}: done in {seconds:.0f} s")


def _show(label: str, log: Path, seconds: float, live: bool) -> None:
    with log.open("rb") as source:
        source.seek(max(0, log.stat().st_size - 65536))
        percents = _PERCENT.findall(source.read())
    if percents:
        percent = int(percents[-1])
        done = percent // 4
        text = f"  {label}: [{'#' * done}{'.' * (25 - done)}] {percent:3d}% {seconds:.0f} s"
    else:
        text = f"  {label} ... {seconds:.0f} s"
    print(f"\r\033[K{text}" if live else text, end="" if live else "\n", flush=True)
