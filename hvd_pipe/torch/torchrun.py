"""Horovod in a job that `torchrun` has started: its ranks, and a rendezvous server on rank 0.

Horovod's launchers tell each process its rank and where the others are, in variables. `torchrun`
has variables of its own, and a store, by which rank 0 says where its server is.
"""

from __future__ import annotations

import http.client
import os
import secrets
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import psutil  # type: ignore[import-untyped]  # Horovod needs it, too
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
from horovod.torch import mpi_ops

from hvd_pipe.errors import HvdPipeError

LIMIT_S = 120.0  # for rank 0 to be reached
_INTERFACE, _KEY = "HOROVOD_GLOO_IFACE", "hvd_pipe.horovod"
_kept: list[Any] = []  # server and store, until the process ends


def begin() -> None:
    """Tell Horovod of `torchrun`'s ranks, unless horovodrun or an earlier call has done so.

    torchrun may itself have been started by mpirun or srun, once a node, whose ranks are others.

    Raises:
        HvdPipeError: Horovod is built without Gloo, or runs already by itself; nodes have unequal
            numbers of processes; or there is no way to rank 0.
    """
    env = os.environ
    if "TORCHELASTIC_RUN_ID" not in env or "HOROVOD_RANK" in env:
        return
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    local_size = int(env["LOCAL_WORLD_SIZE"])
    node, nodes = int(env["GROUP_RANK"]), int(env["GROUP_WORLD_SIZE"])
    local_rank = rank - node * local_size
    if mpi_ops.is_initialized() and mpi_ops.size() != size:
        raise HvdPipeError(
            f"torchrun started {size} ranks, and horovod.torch.init() has made each a job of its "
            "own: call hvd_pipe.torch.init() in its place, or start with horovodrun."
        )
    if not mpi_ops.gloo_built():
        raise HvdPipeError(
            "torchrun starts Horovod over Gloo, and this Horovod is built without: "
            "`hvd-pipe build-horovod` builds it with Gloo."
        )
    if nodes * local_size != size or not 0 <= local_rank < local_size:
        raise HvdPipeError(
            f"{size} ranks on {nodes} nodes, of which this one has {local_size}: Horovod needs as "
            "many on each. Give all nodes the same --nproc-per-node."
        )
    interface, address = _network(nodes)
    address, port = _server(rank, size, address)
    ours = {
        **{"HOSTNAME": f"node{node}", "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo"},
        **{"RANK": rank, "LOCAL_RANK": local_rank, "CROSS_RANK": node},
        **{"SIZE": size, "LOCAL_SIZE": local_size, "CROSS_SIZE": nodes},
        **{"GLOO_RENDEZVOUS_ADDR": address, "GLOO_RENDEZVOUS_PORT": port, "GLOO_IFACE": interface},
    }
    env.update({f"HOROVOD_{name}": str(value) for name, value in ours.items()})


def _network(nodes: int) -> tuple[str, str]:
    """Return the interface to the other ranks, and this node's address on it."""
    all_of = {
        name: [one.address for one in addresses if one.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
    interface, master, own = os.environ.get(_INTERFACE, ""), os.environ["MASTER_ADDR"], "127.0.0.1"
    if not interface and nodes > 1:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((master, 9))  # sends nothing: it asks the kernel for the way there
                own = probe.getsockname()[0]
        except OSError as error:
            raise HvdPipeError(f"no way by IPv4 to {master}, MASTER_ADDR: {error}.") from error
        if own.startswith("127."):
            raise HvdPipeError(
                f"MASTER_ADDR {master} is the loopback of this node, of {nodes}: give "
                "--master-addr (or --local-addr) an address that other nodes reach, or set "
                f"{_INTERFACE}."
            )
    for name, addresses in all_of.items():
        if addresses and (name == interface or (not interface and own in addresses)):
            return name, addresses[0] if interface else own
    raise HvdPipeError(f"no interface {interface or own} has an IPv4 address: set {_INTERFACE}.")


def _server(rank: int, size: int, address: str) -> tuple[str, int]:
    """Return where rank 0's server is, once it has answered; on rank 0, start it."""
    from torch.distributed.rendezvous import rendezvous  # noqa: PLC0415 - not all torch have it

    store, _, _ = next(iter(rendezvous("env://", rank, size)))
    if rank == 0:
        # Horovod's own way to start it listens on all interfaces.
        server, token = (
            RendezvousHTTPServer((address, 0), RendezvousHandler, 0),
            secrets.token_hex(),
        )
        server.cache[_KEY] = {token: b"here"}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        _kept.extend((server, store))
        store.set(_KEY, f"{address} {server.server_address[1]} {token}")
    # The store outlives restarts, so what is there may be of a server that has ended.
    said, deadline = "", time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            store.wait([_KEY], timedelta(seconds=LIMIT_S))
            said = store.get(_KEY).decode()
            host, port, token = said.split()
            connection = http.client.HTTPConnection(host, int(port), timeout=5)
            connection.request("GET", f"/{_KEY}/{token}")
            if connection.getresponse().status == http.client.OK:
                return host, int(port)
        except (OSError, RuntimeError, http.client.HTTPException):
            pass  # not there yet, or a stranger has the port by now
        time.sleep(0.2)
    raise HvdPipeError(
        f"rank 0's rendezvous server ({said.rpartition(' ')[0] or 'not told'}) was not reached "
        f"within {LIMIT_S:.0f} s: nodes must reach each other on all ports, or rank 0 has failed."
    )
