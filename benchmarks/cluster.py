#!/usr/bin/env python3
r"""Several hosts on one machine, joined by links of a known bandwidth.

    sudo python benchmarks/cluster.py --hosts 4 --rate 1gbit -- \
        horovodrun -np 4 -H h1:1,h2:1,h3:1,h4:1 python torch_examples/digits.py

The command runs on h1, as if logged in there. A host is a set of Linux namespaces: it has an
address, a name, an ``/etc/hosts``, an sshd and processes of its own, and shares the disk.

    h1  eth0 --- p1 +--------+ p2 --- eth0  h2        tbf (token bucket filter) limits the rate
    10.88.0.11      | bridge |              10.88.0.12       at eth0, outwards, and at p1, inwards
    h3  eth0 --- p3 +--------+ p4 --- eth0  h4

Nothing has a name outside the namespaces, and each host's processes end with its first one, which
ends with this process: even a SIGKILL of this process leaves nothing behind. The machine's own
network is never touched.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from hvd_pipe.units import format_bytes, parse_bandwidth

MOST_HOSTS = 64
START_S = 60.0  # until sshd must answer
TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "setpriv": "util-linux",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
# What passes faster than the rate, and what may wait, in seconds at the rate: the more of either,
# the less a message's time says of the rate; with less, TCP does not reach it at 1 Gbit/s.
BURST_SECONDS = 2e-3
QUEUE_SECONDS = 25e-3
LEAST_BYTES = 16 * 1024
SUBNET = "10.88.0.0/24"
CONGESTION_CONTROL = "cubic"  # as most machines have; BBR takes a limited rate for a policer's

SWITCH = "ip link set lo up; ip link add br0 type bridge stp_state 0 forward_delay 0 &&\
 ip link set br0 up && echo up && exec sleep infinity"

HOST = """
set -e
mount -t tmpfs none /run; mount -t tmpfs none /dev/shm
mkdir -p /run/sshd; mkdir /run/ssh; umask 077
printf '%s' "$CLUSTER_HOSTS" >/run/hosts; printf '%s' "$CLUSTER_KEY" >/run/ssh/key
printf '%s' "$CLUSTER_PUBLIC" >/run/ssh/key.pub
printf '%s\\n' "$CLUSTER_NAME" >/run/hostname; chmod 644 /run/hosts /run/hostname
cat >/run/ssh/ssh_config <<END
IdentityFile /etc/ssh/key
UserKnownHostsFile /dev/null
StrictHostKeyChecking no
LogLevel ERROR
END
cat >/run/ssh/sshd_config <<END
HostKey /etc/ssh/key
AuthorizedKeysFile /etc/ssh/key.pub
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
UseDNS no
MaxStartups 200
MaxSessions 200
PidFile none
END
chmod 755 /run/ssh; chmod 644 /run/ssh/ssh_config
mount --bind /run/hosts /etc/hosts; mount --bind /run/hostname /etc/hostname
mount --bind /run/ssh /etc/ssh
hostname "$CLUSTER_NAME"; ip link set lo up
unset CLUSTER_HOSTS CLUSTER_KEY CLUSTER_PUBLIC CLUSTER_NAME
echo up; exec "$(command -v sshd)" -D
"""


class ClusterError(Exception):
    """The cluster cannot be made here; the text says what is missing."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that have crossed a host's link since it was made, frames and headers included."""

    sent: int
    received: int

    def __sub__(self, before: Traffic) -> Traffic:
        return Traffic(self.sent - before.sent, self.received - before.received)


class Cluster:
    """Hosts ``h1``, ``h2``, ... on one switch, for as long as the context lasts."""

    def __init__(self, hosts: int, rate: str | None = None) -> None:
        if not 1 <= hosts <= MOST_HOSTS:
            raise ValueError(f"hosts must be 1 to {MOST_HOSTS}, got {hosts}.")
        if rate is not None:
            parse_bandwidth(rate)
        check_possible()
        self.hosts = [f"h{number + 1}" for number in range(hosts)]
        self._rate = rate
        self._ended = ExitStack()
        self._switch = 0
        self._inits: dict[str, int] = {}

    def __enter__(self) -> Cluster:
        with self._ended:  # what has been started ends where the rest fails
            self._switch = self._start(["--net"], SWITCH, {})
            private, public = make_key()
            names = "".join(f"{address(host)} {host}\n" for host in self.hosts)
            for host in self.hosts:
                files = {
                    "CLUSTER_NAME": host,
                    "CLUSTER_HOSTS": f"127.0.0.1 localhost\n{names}",
                    "CLUSTER_KEY": private,
                    "CLUSTER_PUBLIC": public,
                }
                init = self._start(["--net", "--uts", "--mount"], HOST, files)
                self._inits[host] = init
                wire = ["link", "add", port(host), "type", "veth", "peer", "name", "eth0"]
                self._ip(self._switch, *wire, "netns", str(init))
                self._ip(self._switch, "link", "set", port(host), "master", "br0", "up")
                self._ip(init, "addr", "add", f"{address(host)}/24", "dev", "eth0")
                self._ip(init, "link", "set", "eth0", "up")
                route = ["route", "replace", SUBNET, "dev", "eth0", "src", address(host)]
                self._ip(init, *route, "congctl", CONGESTION_CONTROL)
            self.rate(self._rate)
            self._wait_for_sshd()
            self._ended = self._ended.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.close()
        self._inits.clear()

    def rate(self, rate: str | None) -> None:
        """Limit every link to this rate each way, such as ``"100mbit"``; None for no limit."""
        limit: list[str] = []
        if rate is not None:
            per_second = parse_bandwidth(rate)
            burst = max(LEAST_BYTES, round(per_second * BURST_SECONDS))
            limit_bytes = burst + max(LEAST_BYTES, round(per_second * QUEUE_SECONDS))
            bits = f"{round(8 * per_second)}bit"
            limit = ["rate", bits, "burst", f"{burst}b", "limit", f"{limit_bytes}b"]
        for host, init in self._inits.items():
            for namespace, device in ((init, "eth0"), (self._switch, port(host))):
                tc = [*enter(namespace, "--net"), "tc", "qdisc"]
                if limit:
                    call([*tc, "replace", "dev", device, "root", "tbf", *limit])
                else:
                    call([*tc, "replace", "dev", device, "root", "pfifo_fast"])
        self._rate = rate

    def cut(self, host: str) -> None:
        """Pull the host's cable out of the switch; neither end is told."""
        self._plug(host, "nomaster")

    def heal(self, host: str) -> None:
        """Plug the cable in again."""
        self._plug(host, "master", "br0")

    def power_off(self, host: str) -> None:
        """End every process of the host at once, and its network with them."""
        os.kill(self._init(host), signal.SIGKILL)
        del self._inits[host]
        with suppress(ClusterError):  # the kernel may have been first
            self._ip(self._switch, "link", "del", port(host))

    def processes(self, host: str) -> list[int]:
        """Return all processes of a host, but for the first one, which answers ``ssh``."""
        first = self._init(host)
        place = Path(f"/proc/{first}/ns/pid").readlink()
        found = []
        for one in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if (one / "ns" / "pid").readlink() == place and int(one.name) != first:
                    found.append(int(one.name))
        return found

    def traffic(self) -> dict[str, Traffic]:
        """Return what has crossed each host's link."""
        found = {}
        for host, init in self._inits.items():
            text = call([*enter(init, "--net"), "cat", "/proc/net/dev"])
            fields = next(line for line in text.splitlines() if "eth0:" in line).split()
            found[host] = Traffic(sent=int(fields[9]), received=int(fields[1]))
        return found

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs ``command`` on the host, in this folder."""
        inside = enter(self._init(host), "--net", "--uts", "--mount", "--pid")
        return [*inside, "env", f"--chdir={Path.cwd()}", *command]

    def run(
        self,
        host: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host and return what it printed, errors included."""
        process = self.popen(
            host, command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except BaseException:
            end(process)
            raise
        if check and process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args, output)
        return subprocess.CompletedProcess(process.args, process.returncode, output)

    def popen(
        self,
        host: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a command on a host, in a session of its own; options are Popen's."""
        return subprocess.Popen(
            self.command(host, command),
            env=environment() | dict(env or {}),
            start_new_session=True,
            **options,
        )

    def _start(self, namespaces: Sequence[str], script: str, files: Mapping[str, str]) -> int:
        """Start the first process of new namespaces; return its id once its script is through."""
        # It ends with unshare, and unshare with this process, in whatever way that ends.
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces]
        command += ["--pid", "--fork", "--kill-child", "--mount-proc"]
        process = subprocess.Popen(
            [*command, "sh", "-c", script],
            env=environment() | dict(files),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._ended.callback(kill, process)
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline() != "up\n":
            process.wait(10)
            said = process.stderr.read().strip()
            raise ClusterError(
                f"no namespaces can be made here: {said}. Root in a container needs the "
                "capabilities SYS_ADMIN and NET_ADMIN (such as `docker run --privileged`)."
            )
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return int(children[0])

    def _wait_for_sshd(self) -> None:
        deadline = time.monotonic() + START_S
        for host in self.hosts:
            asked = ["timeout", f"{START_S:.0f}", "ssh", "-v", host, "true"]
            while (answer := self.run(self.hosts[0], asked)).returncode:
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"no answer from the sshd of {host} within {START_S:.0f} s: is this "
                        "machine busy with other things, or does a login script (~/.bashrc) wait "
                        f"for something? ssh says:\n{answer.stdout}"
                    )
                time.sleep(0.05)

    def _init(self, host: str) -> int:
        """Return the id of the host's first process."""
        if host not in self._inits:
            raise ValueError(f"no host {host!r}: this cluster has {', '.join(self._inits)}.")
        return self._inits[host]

    def _plug(self, host: str, *words: str) -> None:
        """Change what the host's port of the switch is plugged into."""
        self._init(host)
        self._ip(self._switch, "link", "set", port(host), *words)

    @staticmethod
    def _ip(namespace: int, *words: str) -> None:
        call([*enter(namespace, "--net"), "ip", *words])


def check_possible() -> None:
    """Raise ClusterError with what to do where no cluster can be made."""
    if sys.platform != "linux":
        raise ClusterError("the emulated cluster needs Linux: its hosts are network namespaces.")
    if os.geteuid() != 0:
        raise ClusterError(
            "only root can make network namespaces: run this with sudo, or in a container "
            "started with `docker run --privileged`."
        )
    path = f"{os.environ.get('PATH', '')}:{SBIN}"
    missing = {TOOLS[tool] for tool in TOOLS if shutil.which(tool, path=path) is None}
    if missing:
        raise ClusterError(f"tools are missing: apt-get install {' '.join(sorted(missing))}")


def environment() -> dict[str, str]:
    """Return the variables with which a command runs on a host.

    This Python's scripts come first on the PATH; Open MPI may run as root, as there is no other
    user on these hosts, and gives up the processor while it waits, as all hosts share it.
    """
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), SBIN]
    return {
        **os.environ,
        "PATH": ":".join(path),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_orte_tmpdir_base": "/run",  # a host's own, gone with it
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3"),
        "TF_ENABLE_ONEDNN_OPTS": os.environ.get("TF_ENABLE_ONEDNN_OPTS", "0"),
    }


def address(host: str) -> str:
    """Return the host's address on the switch."""
    return f"10.88.0.{10 + int(host[1:])}"


def port(host: str) -> str:
    """Return the name of the host's port of the switch."""
    return f"p{host[1:]}"


def enter(process: int, *namespaces: str) -> list[str]:
    """Return the words that let a command run in namespaces of a process."""
    return ["nsenter", f"--target={process}", *namespaces, "--"]


def call(command: Sequence[str]) -> str:
    """Run a command and return its output; raise ClusterError with its errors."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    if done.returncode:
        raise ClusterError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def make_key() -> tuple[str, str]:
    """Return a new private and public key, for this cluster alone."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "key"
        call(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "cluster", "-f", str(file)])
        return file.read_text(), file.with_suffix(".pub").read_text()


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and wait until it is gone."""
    process.kill()
    process.communicate()


def end(process: subprocess.Popen[Any]) -> None:
    """End a command and what it has started in its session: asked first, then killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=5)
            return


def main() -> int:
    """Run a command, or a shell, on the first host of a cluster."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2, help="how many (default 2)")
    parser.add_argument("--rate", help="of each link, each way, such as 1gbit (default: no limit)")
    parser.add_argument("command", nargs="*", help="runs on h1 (default: a shell)")
    options = parser.parse_args()

    def run() -> int:
        with Cluster(options.hosts, options.rate) as cluster:
            before = cluster.traffic()
            command = options.command or [os.environ.get("SHELL", "sh")]
            code = subprocess.call(cluster.command("h1", command), env=environment())
            for host, after in cluster.traffic().items():
                crossed = after - before[host]
                sent, received = format_bytes(crossed.sent), format_bytes(crossed.received)
                print(f"{host}: sent {sent}, received {received}", file=sys.stderr)
        return code

    return exit_status("cluster", run)


def exit_status(name: str, run: Callable[[], int]) -> int:
    """Run a command on a cluster; return what a shell would, and print why there is none."""
    try:
        code = run()
    except (ClusterError, ValueError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
