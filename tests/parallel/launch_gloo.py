"""Start ranks over Gloo on this host: ``python launch_gloo.py N COMMAND...``

Ranks find the environment that ``horovodrun --gloo`` gives them. That command takes seconds, as it
looks for hosts, interfaces and frameworks first. The first rank that fails ends the others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer


def main(n: int, command: list[str]) -> int:
    """Run the command on n ranks; return the exit status of the first that fails, or 0."""
    slots = get_host_assignments(parse_hosts(f"localhost:{n}"), n)
    rendezvous = RendezvousServer()
    port = rendezvous.start()
    rendezvous.init(slots)
    shared = os.environ | create_run_env_vars("127.0.0.1", ["lo"], str(port))
    ranks: dict[int, subprocess.Popen[bytes]] = {}
    for slot in slots:
        rank = subprocess.Popen(command, env=shared | create_slot_env_vars(slot))
        ranks[rank.pid] = rank
    while ranks:
        pid, status = os.wait()
        del ranks[pid]
        if status:
            code = os.waitstatus_to_exitcode(status)
            how = f"on signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"with {code}"
            print(f"A rank exited {how}. The others are ended.", flush=True)
            for left in ranks:
                with suppress(ProcessLookupError):
                    os.kill(left, signal.SIGTERM)
            return abs(code)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
