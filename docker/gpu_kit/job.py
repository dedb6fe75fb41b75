"""How the kit runs commands and ranks: in its environment, with limits, for what they find."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


class SectionError(Exception):
    """A section cannot be carried out; the message says why."""


@dataclass
class Kit:
    """What the sections share."""

    out: Path
    cpu: bool
    scale: float
    log: Path
    way: str = "none"
    """How two ranks share the GPU, once a probe has shown that they do."""
    state: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        return self.out / "venv" / "bin" / "python"

    @property
    def device(self) -> str:
        return "cpu" if self.cpu else "cuda"

    def environment(self) -> dict[str, str]:
        """Return what commands run under: this environment's programs, before its parent's."""
        folders = [str(self.python.parent), str(Path(sys.executable).parent)]
        return {
            **os.environ,
            "PATH": os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)]),
            "HVD_PIPE_CACHE": os.environ.get("HVD_PIPE_CACHE", str(self.out / "cache")),
            "PYTHONUNBUFFERED": "1",
            "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
            # A pool of compilers takes longer to start than these small models to compile.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4"),
        }

    def run(self, command: Sequence[object], limit_s: float, **more: str) -> str:
        """Run a command to its end and return what it printed.

        Raises:
            SectionError: It failed, or was stopped at the limit with all that it had started.
        """
        words = [str(word) for word in command]
        with self.log.open("a") as log:
            log.write(f"\n$ {' '.join(words)}\n")
            log.flush()
            begin = log.tell()
            process = subprocess.Popen(
                words,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**self.environment(), **more},
                cwd=ROOT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(max(1.0, limit_s))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        said = self.log.read_bytes()[begin:].decode(errors="replace")
        if code is None:
            raise SectionError(f"stopped after {limit_s:.0f} s, when its time was over")
        if code != 0:
            raise SectionError(f"ended with {code}: {_last_words(said)}")
        return said

    def ranks(
        self, section: str, ranks: int, limit_s: float, label: str = "", **more: str
    ) -> list[dict[str, Any]]:
        """Run a section of rank.py on some ranks; return what each job found on all of them."""
        name = re.sub(r"\W+", "-", f"{section}-{ranks}-{label}").strip("-")
        result = self.out / "results" / f"{name}.json"
        result.parent.mkdir(exist_ok=True)
        for old in result.parent.glob(f"{result.stem}.*"):
            old.unlink()
        if ranks > 1:
            more = {**self.sharing(self.way), **more}
        more["KIT_STORE"] = str(result.with_suffix(".store"))
        horovodrun = self.python.with_name("horovodrun")
        command = [horovodrun, "-np", ranks, "--gloo", self.python, HERE / "rank.py", section]
        small = ["--small"] if self.cpu else []
        trouble = None
        try:
            self.run([*command, "--out", result, "--device", self.device, *small], limit_s, **more)
        except SectionError as error:
            trouble = error
        rows = joined([_read(result.with_suffix(f".{rank}.json")) for rank in range(ranks)])
        for row in rows:
            row["name"] = f"{label}{row['name']}"
        if trouble is not None:
            rows.append({"name": f"{label}{section}", "good": False, "text": str(trouble)})
        return rows

    def sharing(self, way: str) -> dict[str, str]:
        """Return the variables with which two ranks share a GPU."""
        return {
            "multi-rank": {"KIT_RANKS_ON_A_GPU": "multi-rank", "NCCL_MULTI_RANK_GPU_ENABLE": "1"},
            "host-id": {"KIT_RANKS_ON_A_GPU": "host-id"},
            "host": {
                "KIT_RANKS_ON_A_GPU": "host",
                "PYTHONPATH": str(self.out / "staged"),
            },
        }.get(way, {})


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what a command has left behind: it has a process group of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(8)  # horovodrun ends its ranks, which have groups of their own
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_words(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b\w*(Error|error)\b", line)]
    return (errors or lines or ["nothing was printed"])[-1][:300]


def _read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else []


def joined(ranks: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return each job once: the first rank's, or that of a rank which says that it is not good.

    A job that some rank has no result of is not good.
    """
    by_name: dict[str, list[dict[str, Any]]] = {}
    for rows in ranks:
        for row in rows:
            by_name.setdefault(row["name"], []).append(row)
    found = []
    for name, rows in by_name.items():
        bad = [row for row in rows if row["good"] is False]
        row = dict((bad or rows)[0])
        if len(rows) < len(ranks) and not bad:
            row |= {"good": False, "text": f"only {len(rows)} of {len(ranks)} ranks finished it"}
        row["name"] = name
        found.append(row)
    return found
