"""The watch of hundreds of ranks on one machine, without Horovod between them.

    python benchmarks/watch_scale.py --ranks 64 256 1024 2048

Rank 0 is real: its watch (`hvd_pipe.runtime.watch.rank_side`) and its small process, with one
connection to every other rank. The others are threads of one more process, each with its own
connection and its own `Watcher`, and no small process. What they would ask each other by Horovod's
collectives goes over a pipe. All share this machine's cores, so times are upper bounds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import markdown, write_json

from hvd_pipe.runtime.consensus import Agreement
from hvd_pipe.runtime.watch import rank_side
from hvd_pipe.runtime.watch.child_process import Link, Status, Watcher, beat_s, encode
from hvd_pipe.runtime.watch.rendezvous import connect

TICKS = os.sysconf("SC_CLK_TCK")
LIMIT_S = 120.0
QUIET_S = 30.0  # at 2,048 ranks a beat is 15 s
LONGEST_S = 300.0  # for what a machine that is very busy takes


@dataclass(frozen=True)
class Ranks:
    """Stands for a process set."""

    count: int
    own: int = 0
    ranks: None = None
    process_set_id: int = 0

    def size(self) -> int:
        return self.count

    def rank(self) -> int:
        return self.own

    def included(self) -> bool:
        return True


# The other ranks ------------------------------------------------------------------------------


class Seen:
    """A rank as the process beside it sees it, by a socket of this process."""

    beat_s = 1.0

    def __init__(self, rank: int) -> None:
        self.there, control = socket.socketpair()
        self.control = Link(rank, control)

    def status(self) -> Status:
        return Status(waits=True, since_s=1.0)

    def is_gone(self) -> bool:
        return False

    def end(self, text: str) -> None:
        """Live on."""


class Heart(Watcher):
    """The process beside a rank, as a thread of this one."""

    def __init__(self, names: list[str], rank: int, link: socket.socket, limit_s: float) -> None:
        self._seen: Any = Seen(rank)
        super().__init__(names, {0: link}, limit_s, self._seen)
        threading.Thread(target=self.run, daemon=True).start()

    def leave(self) -> None:
        """Tell the others that this rank goes."""
        self._seen.there.sendall(encode({"left": True}))

    def stop(self) -> None:
        """End without a word."""
        self._seen.there.shutdown(socket.SHUT_RDWR)
        self._links[0].socket.shutdown(socket.SHUT_RDWR)


class Others:
    """Ranks 1 to n - 1, as threads; rank 0's process tells them what to do."""

    def __init__(self, ranks: int, limit_s: float) -> None:
        self.count, self.limit_s = ranks, limit_s
        self.links: dict[int, Any] = {}
        self.hearts: dict[int, Heart] = {}

    def offer(self, value: dict[str, Any]) -> list[tuple[str, bool]]:
        """Connect all at once; say who has got through."""

        def join(rank: int) -> None:
            self.links[rank] = connect(value["addresses"], value["secret"], rank)

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(1, self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [
            (f"rank {rank} on here (pid {rank})", self.links[rank] is not None)
            for rank in range(1, self.count)
        ]

    def met(self, told: list[tuple[str, bool]]) -> None:
        """Begin to watch."""
        names = [name for name, _ in told]
        for rank, link in self.links.items():
            if link is not None:
                self.hearts[rank] = Heart(names, rank, link, self.limit_s)

    def lose(self, rank: int) -> float:
        """End one without a word; return when every other one has named it."""
        self.hearts.pop(rank).stop()
        return self.named(rank)

    def named(self, lost: int) -> float:
        """Return when every rank has named the one that is lost."""
        for rank, heart in self.hearts.items():
            while (loss := heart._find_loss(LONGEST_S)) is None:
                time.sleep(0.01)
            if loss[0] != lost:
                raise RuntimeError(f"rank {lost} was lost, and rank {rank} says: {loss[1]}")
        return time.monotonic()

    def leave(self, _: None) -> float:
        """End all; return when all know of one that has left, but for that one."""
        for heart in self.hearts.values():
            heart.leave()
        while sum(heart._left is None for heart in self.hearts.values()) > 1:
            time.sleep(0.01)
        return time.monotonic()


def others(ranks: int, limit_s: float) -> None:
    """Do as rank 0's process says: a line each, a method and its argument."""
    them = Others(ranks, limit_s)
    for line in sys.stdin:
        method, argument = json.loads(line)
        print(json.dumps(getattr(them, method)(argument)), flush=True)
    os._exit(0)


# Rank 0 ----------------------------------------------------------------------------------------


@dataclass
class Watch:
    """What the watch of n ranks took; `WATCH` says what the figures are."""

    ranks: int
    beat_s: float
    join_s: float = 0.0
    missed: int = 0
    files: int = 0
    child_files: int = 0
    child_mb: float = 0.0
    threads: int = 0
    cpu_percent: float = 0.0
    lost_s: float = 0.0
    leave_s: float = 0.0
    leave_cpu_s: float = 0.0


def measure_watch(ranks: int, limit_s: float = LIMIT_S) -> Watch:
    """Watch so many ranks, lose one, and let the rest leave."""
    os.environ[rank_side.ENVIRONMENT_VARIABLE] = str(limit_s)
    command = [sys.executable, __file__, "--others", str(ranks), "--limit", str(limit_s)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdin is not None
    assert process.stdout is not None
    told, answers = process.stdin, process.stdout

    def tell(method: str, argument: Any) -> None:
        told.write(json.dumps([method, argument]) + "\n")
        told.flush()

    def ask(method: str, argument: Any) -> Any:
        tell(method, argument)
        return json.loads(answers.readline())

    def gather_bytes(data: bytes, name: str, _: Any) -> list[bytes]:
        if name.endswith(".offer"):
            tell("offer", json.loads(data)["value"])
            return [data] + [b"null"] * (ranks - 1)
        everyone = [json.loads(data), *json.loads(answers.readline())]
        found.missed = sum(not has_met for _, has_met in everyone)
        ask("met", everyone)
        return [json.dumps(one).encode() for one in everyone]

    found = Watch(ranks, beat_s(ranks, limit_s))
    job = rank_side.Job(
        Ranks(ranks),
        Agreement(gather_bytes),
        lambda _: None,
        lambda _: False,  # type: ignore[arg-type]
    )
    try:
        begun = time.monotonic()
        rank_side.start(job)
        found.join_s = time.monotonic() - begun
        watch = rank_side._watch
        assert watch is not None
        assert watch.child is not None
        child = watch.child.pid
        found.files, found.child_files = _files(os.getpid()), _files(child)
        found.threads = threading.active_count()
        before, begun = _cpu_s(child), time.monotonic()
        time.sleep(QUIET_S)
        found.cpu_percent = 100 * (_cpu_s(child) - before) / (time.monotonic() - begun)
        found.child_mb = _rss_mb(child)
        begun = time.monotonic()
        found.lost_s = ask("lose", ranks // 2) - begun
        before, begun = _cpu_s(child), time.monotonic()
        found.leave_s = ask("leave", None) - begun
        found.leave_cpu_s = _cpu_s(child) - before
    finally:
        rank_side.stop()
        told.close()
        answers.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()
    return found


def _files(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def _rss_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


WATCH = {
    "beat_s": "seconds between two messages of a rank",
    "join_s": "all connected and watched after, s",
    "missed": "ranks that could not connect",
    "files": "open files of rank 0",
    "child_files": "open files of its small process",
    "child_mb": "memory of its small process, MB",
    "threads": "Python threads of rank 0",
    "cpu_percent": "processor of its small process, % of a core",
    "lost_s": "a rank ends: all others have its name after, s",
    "leave_s": "all leave at once: all know it after, s",
    "leave_cpu_s": "processor of the small process for that, s",
}


def table(found: list[dict[str, Any]]) -> str:
    """Return a line for each figure, and a column for each number of ranks."""
    body = [[label, *(_short(job[key]) for job in found)] for key, label in WATCH.items()]
    return markdown(["ranks", *(str(job["ranks"]) for job in found)], body)


def _short(value: float) -> str:
    """Write a number with two digits or all of them before the point."""
    return f"{value:.0f}" if value >= 10 or value == 0 else f"{value:.2g}"


def main() -> int:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 2048])
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="HVD_PIPE_TIMEOUT")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--others", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.others is not None:
        others(options.others, options.limit)
    if min(options.ranks) < 3:
        parser.error(f"--ranks must be at least 3, as one is lost; got {min(options.ranks)}")
    results: list[dict[str, Any]] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 20000)), hard))
    for ranks in options.ranks:
        results.append(asdict(measure_watch(ranks, options.limit)))
        print(f"{ranks} ranks: load {os.getloadavg()[0]:.1f}", flush=True)
        if options.json is not None:
            write_json(options.json, results)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
