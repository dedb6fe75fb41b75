"""The emulated cluster: jobs run across its hosts as on machines, and nothing outlasts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import as_root

from benchmarks.cluster import Cluster, ClusterError

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("worker_allreduce.py")
ELEMENTS = 2**20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(4, rate="1gbit") as made:
        yield made


HOSTS = "h1:1,h2:1,h3:1,h4:1"
LAUNCHERS = {
    "horovodrun --mpi": ["horovodrun", "-np", "4", "-H", HOSTS, "--mpi"],
    "horovodrun --gloo": ["horovodrun", "-np", "4", "-H", HOSTS, "--gloo"],
    "mpirun": ["mpirun", "-np", "4", "-H", HOSTS, "-x", "PATH"],
}


class TestJobs:
    pytestmark = as_root

    @pytest.mark.parametrize("launcher", LAUNCHERS)
    def test_a_job_spans_the_hosts_and_its_bytes_cross_the_links(
        self, cluster: Cluster, launcher: str, tmp_path: Path
    ) -> None:
        before = cluster.traffic()
        command = [*LAUNCHERS[launcher], "python", str(SCRIPT), str(tmp_path), str(ELEMENTS)]
        done = cluster.run("h1", command, timeout=400)
        assert done.returncode == 0, done.stdout
        found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
        assert [each["host"] for each in found] == ["h1", "h2", "h3", "h4"]
        assert [each["sum"] for each in found] == [0 + 1 + 2 + 3] * 4
        least = 2 * 3 / 4 * 4 * ELEMENTS  # bytes that each of 4 workers must send
        for host, after in cluster.traffic().items():
            crossed = after - before[host]
            assert crossed.sent >= least
            assert crossed.received >= least

    @pytest.mark.parametrize("ways", [("h1 h2", "h3 h2"), ("h2 h1", "h2 h3")])
    def test_a_rate_holds_each_way(self, cluster: Cluster, ways: tuple[str, str]) -> None:
        """Into a host that two send to, and out of one that sends to two.

        A busy machine makes a transfer slower, never faster: one of ten must be in time.
        """
        size, rate = 2**23, "40mbit"
        expected = len(ways) * size * 8 / 40e6
        cluster.rate(rate)
        try:
            for _ in range(10):
                start = time.monotonic()
                sends = []
                for source, target in map(str.split, ways):
                    send = f"head -c {size} /dev/zero | ssh {target} 'cat >/dev/null'"
                    sends.append(cluster.popen(source, ["sh", "-c", send]))
                assert [one.wait(120) for one in sends] == [0, 0]
                seconds = time.monotonic() - start
                assert seconds > 0.95 * expected
                if seconds < 1.5 * expected:
                    break
            assert seconds < 1.5 * expected
        finally:
            cluster.rate("1gbit")

    def test_a_cut_link_carries_nothing_until_it_is_healed(self, cluster: Cluster) -> None:
        ping = [sys.executable, "-c", PING]
        assert cluster.run("h1", ping, timeout=30).returncode == 0
        cluster.cut("h2")
        assert cluster.run("h1", ping, timeout=30).returncode == 1
        cluster.heal("h2")
        assert cluster.run("h1", ping, timeout=30).returncode == 0

    def test_a_host_without_power_ends_all_that_runs_on_it(self) -> None:
        with Cluster(2) as made:
            job = made.popen("h2", ["sleep", "600"])
            made.power_off("h2")
            assert job.wait(10) != 0
            assert list(made.traffic()) == ["h1"]
            with pytest.raises(ValueError, match="no host 'h2': this cluster has h1"):
                made.run("h2", ["true"])

    def test_a_command_that_takes_too_long_is_ended(self, cluster: Cluster) -> None:
        mark = "601.5"
        with pytest.raises(subprocess.TimeoutExpired):
            cluster.run("h3", ["sh", "-c", f"sleep {mark}; true"], timeout=1)
        assert not running(mark)


PING = """
import socket, sys
try:
    socket.create_connection(("h2", 22), timeout=2).close()
except OSError:
    sys.exit(1)
"""


class TestEnd:
    pytestmark = as_root

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    def test_nothing_is_left_however_it_ends(self, number: signal.Signals) -> None:
        mark = f"60{number}.25"
        made = subprocess.Popen(
            [sys.executable, "-c", HOLD, mark],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert made.stdout is not None
        inits = made.stdout.readline().split()
        assert len(inits) == 3  # the switch's and two hosts'
        assert running(mark)
        made.send_signal(number)
        made.wait(30)
        deadline = time.monotonic() + 20
        while (running(mark) or living(inits)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not running(mark)
        assert not living(inits)


HOLD = """
import signal, sys, time
from benchmarks.cluster import Cluster
signal.signal(signal.SIGINT, signal.default_int_handler)
with Cluster(2) as cluster:
    cluster.popen("h2", ["sleep", sys.argv[1]])
    time.sleep(0.5)
    print(cluster._switch, *cluster._inits.values(), flush=True)
    time.sleep(600)
"""


def running(mark: str) -> list[str]:
    """The processes with this word, but for the one that holds the cluster."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in b" ".join(words) and b"-c" not in words[:2]:
            found.append(folder.name)
    return found


def living(processes: list[str]) -> list[str]:
    return [each for each in processes if Path("/proc", each).exists()]


def test_who_is_not_root_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="only root can make network namespaces: run this with"):
        Cluster(2)
