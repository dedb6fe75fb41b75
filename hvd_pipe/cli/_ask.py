"""Ask a probe of `hvd_pipe.cli._probe`, here or on another host, and never wait for ever."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_pipe.cli._probe import MARK

__all__ = ["Answer", "ask", "ask_host", "ask_ranks"]

_GRACE_S = 5.0
_RAISED = re.compile(r"(\[\d+,\d+\]<\w+>:)?[\w.]*(Error|Exception): ")
_MODULE = "hvd_pipe.cli._probe"
# TensorFlow speaks of the processor unless told not to; Open MPI refuses root unless told.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True)
class Answer:
    """What a probe found, or in ``error`` why it found nothing."""

    found: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def ask(probe: str, seconds: int) -> Answer:
    """Run a probe in a process of its own."""
    return _run([sys.executable, "-m", _MODULE, probe, str(seconds)], seconds)


def ask_host(host: str, port: int | None, probe: str, seconds: int) -> Answer:
    """Run a probe on another host, with this Python's path and directory, as launchers do."""
    command = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={min(seconds, 5)}"]
    if port is not None:
        command += ["-p", str(port)]
    there = shlex.join([sys.executable, "-m", _MODULE, probe, str(seconds)])
    # The directory matters to relative paths only; a host that lacks it may still be fit.
    remote = f"cd {shlex.quote(str(Path.cwd()))} 2>/dev/null; {there}"
    return _run([*command, host, remote], seconds)


def ask_ranks(
    horovodrun: str, ranks: int, seconds: int, hosts: Sequence[str] = (), port: int | None = None
) -> Answer:
    """Run the self-test under horovodrun, on this machine or with one rank on each host."""
    command = [horovodrun, "-np", str(ranks)]
    if hosts:
        command += ["-H", ",".join(f"{host}:1" for host in hosts)]
    if port is not None:
        command += ["-p", str(port)]
    return _run([*command, sys.executable, "-m", _MODULE, "self_test", str(seconds)], seconds)


def _run(command: Sequence[str], seconds: int) -> Answer:
    root = _ROOT if os.geteuid() == 0 else {}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**_QUIET, **root, **os.environ},
            start_new_session=True,
        )
    except OSError as error:
        return Answer(error=f"{command[0]}: {error.strerror}")
    try:
        output, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return Answer(error=f"no answer within {seconds} s")
    finally:
        _end(process)  # a KeyboardInterrupt comes this way, too
    return _answer(output, said, process.returncode)


def _end(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_GRACE_S)


def _answer(output: str, said: str, code: int) -> Answer:
    _, mark, rest = output.partition(MARK)
    if mark:
        answer, _ = json.JSONDecoder().raw_decode(rest)  # a launcher may add a rank behind it
        return Answer(**answer)
    if code == -signal.SIGALRM:
        return Answer(error="no answer in time")
    if code < 0:
        return Answer(error=f"the process was ended by {signal.Signals(-code).name}")
    # Launchers end with a banner, so the line that tells best is seldom the last.
    lines = [line.strip() for line in (said or output).splitlines() if line.strip(" -*=\t")]
    raised = [line for line in lines if _RAISED.match(line)][-1:]
    telling = [x for x in lines if "error" in x.lower() or "denied" in x.lower()]
    best = (raised or telling or lines[-1:] or ["no output"])[0]
    return Answer(error=f"{best[:300]} (exit status {code})")
