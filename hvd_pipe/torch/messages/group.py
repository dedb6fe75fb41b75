"""A group of torch.distributed over Horovod's ranks, which carries messages without negotiation.

All ranks launch the same messages in the same order, so no rank asks whether the others are ready,
and no name travels. Horovod exchanges the addresses; there is no launcher's help, no store that
listens, and torch's default group stays the script's own.

Connections are trusted as Horovod's own are: Gloo encrypts nothing. They use Horovod's network
alone, and after they are made all ranks compare, by Horovod, what came over them.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psutil  # type: ignore[import-untyped]  # Horovod needs it, too
import torch
import torch.distributed as dist
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.mpi_ops import ProcessSet
from torch._C._distributed_c10d import AllgatherOptions

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.runtime.consensus import failed, members
from hvd_pipe.runtime.watch.waits import waiting_for
from hvd_pipe.torch.agree import check_alike, gather
from hvd_pipe.torch.messages import pending
from hvd_pipe.torch.messages.connections import Connections

CONNECT = timedelta(seconds=60)
TIMEOUT = timedelta(days=1)
"""A rank may evaluate for long while others wait; the watch sees to those that are lost."""
BETWEEN_SIGNALS = timedelta(milliseconds=100)
"""Python handles none, such as that of Ctrl-C, while a thread waits for a message."""
CONNECTIONS = 1
"""Between two ranks; more gain nothing (benchmarks/carriers.py)."""
THREADS = 8
"""Messages that travel at once: more than two, or bursts of small ones queue."""
INTERFACES = ("HOROVOD_GLOO_IFACE", "OMPI_MCA_btl_tcp_if_include", "NCCL_SOCKET_IFNAME")
"""Where launchers say which network Horovod uses."""


class Group:
    """Gloo's connections between the members of a process set, for messages of CPU tensors.

    Sums, and the two phases of encoded messages, have connections of their own: the order in which
    messages of one kind are launched is the same on all ranks, and no other order need be.

    Args:
        process_set: The ranks; all of them make the group together.
        name: Begins the names of Horovod's messages that make it.
        encodes: Whether encoded messages are to travel; they can, where a rank says so.
        unused: Groups that this rank needs no more; those that no rank needs are closed.

    Raises:
        HvdPipeError: Some ranks cannot connect; raised on every rank.
    """

    def __init__(
        self,
        process_set: ProcessSet,
        name: str,
        encodes: bool = False,
        unused: Sequence[Group] = (),
    ) -> None:
        self.name, self.ranks = name, members(process_set)
        self.user: Any = None
        """The engine, which stays as long as this does: other ranks may still send to this one."""
        unused_here = [group.name for group in unused if group.ranks == self.ranks]
        everyone = gather(
            (socket.gethostname(), unused_here, encodes), f"{name}.hosts", process_set
        )
        hosts, unused_names, encoding = zip(*everyone, strict=True)
        self.encodes = any(encoding)  # ranks may have unlike frozen parameters
        for group in unused:
            if all(group.name in names for names in unused_names):
                group.close()
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout, options._threads = CONNECT, THREADS
        self._connections = Connections()
        self._error: HorovodInternalError | None = None
        failure: Exception | None = None
        try:
            options._devices = [_device(hosts) for _ in range(CONNECTIONS)]
            lost_s = float(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", "30"))
        except (OSError, RuntimeError, ValueError) as error:
            failure = error
        self._agree(failure, f"{name}.devices", process_set)
        listeners = gather(self._connections.take_listener(), f"{name}.listeners", process_set)
        addresses = {(host, port) for part in listeners for host, port in part}
        size, rank = len(self.ranks), int(process_set.rank())
        self._groups: list[Any] = []
        self._stores: list[_Store] = []
        for kind in ("sums", "slices", "replies") if self.encodes else ("sums",):
            store = _Store(f"{name}.{kind}", process_set)
            self._stores.append(store)
            try:
                self._groups.append(dist.ProcessGroupGloo(store, rank, size, options))
            except RuntimeError as error:
                failure = error
                store.exchange()  # the other ranks do
            self._connections.take_connected(addresses, lost_s)
            self._agree(failure, f"{name}.{kind}.connected", process_set)
        self._check(process_set, name)
        open_groups.add(self)

    def _agree(self, failure: Exception | None, name: str, process_set: ProcessSet) -> None:
        try:
            check_alike([] if failure is None else failed(failure), name, process_set)
            if failure is not None:  # the same on all ranks
                raise HvdPipeError(f"{failure}.")
        except HvdPipeError as error:
            self._groups = []
            self._connections.abort()
            raise HvdPipeError(
                f"ranks cannot connect to each other for carrier='torch': {error} Name the "
                f"network's interface in {INTERFACES[0]}, or use carrier='horovod'."
            ) from failure

    def _check(self, process_set: ProcessSet, name: str) -> None:
        """Compare what came over the connections with what Horovod says: no stranger is in it."""
        own, name = secrets.randbits(32), f"{name}.check"
        numbers = torch.zeros(len(self.ranks), 1, dtype=torch.int64)
        numbers[process_set.rank()] = own
        rows = torch.full_like(numbers, own)
        received, failure = [], None
        try:
            posted = [self.launch(numbers, name)]
            if self.encodes:
                posted += [self.launch_slices(rows, name), self.launch_reply(rows[0], name)]
            received = [one.wait().flatten().tolist() for one in posted]
            self._connections.refuse_strangers()
        except (HorovodInternalError, OSError) as error:
            failure = error
        expected = gather(own, name, process_set)
        if failure is None and any(one != expected for one in received):
            failure = HorovodInternalError("another program has connected")
        self._agree(failure, f"{name}ed", process_set)

    def launch(self, tensor: torch.Tensor, name: str) -> Posted:
        """Start to sum a tensor over the ranks, in place; all ranks launch in the same order."""
        self._raise_error()
        return Posted(self, self._groups[0].allreduce([tensor], _SUM), name, tensor)

    def launch_slices(self, rows: torch.Tensor, name: str) -> Posted:
        """Start to send row i to rank i; the result has a row from every rank, in their order."""
        self._raise_error()
        received = torch.empty_like(rows)
        work = self._groups[1].alltoall_base(received, rows, [], [], _SLICES)
        return Posted(self, work, name, received)

    def launch_reply(self, row: torch.Tensor, name: str) -> Posted:
        """Start to send a row to all ranks; the result has a row from every rank."""
        self._raise_error()
        received = row.new_empty(len(self.ranks), row.numel())
        work = self._groups[2]._allgather_base(received.view(-1), row.view(-1), _REPLY)
        return Posted(self, work, name, received)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def fail(self, error: Exception) -> HorovodInternalError:
        """Give up after an error, here and on the ranks that wait for this one; return it."""
        if self._error is None:
            self._error = HorovodInternalError(f"messages are lost: {error}")
            pending.forget()
            self._connections.abort()
        return self._error

    def close(self) -> None:
        """End the connections; nothing is sent any more."""
        if self._error is None:
            self._error = HorovodInternalError("Horovod was shut down")
        self._connections.abort()
        self._groups, self.user = [], None
        open_groups.discard(self)


class Posted:
    """A message on its way."""

    __slots__ = ("_group", "_name", "_received", "_work")

    def __init__(self, group: Group, work: dist.Work, name: str, received: torch.Tensor) -> None:
        self._group, self._work, self._name, self._received = group, work, name, received

    @property
    def arrived(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return bool(self._work.is_completed())

    def wait(self) -> torch.Tensor:
        """Block until it has arrived, and return it; the thread sleeps meanwhile."""
        try:
            with waiting_for(self._name):
                while not self._work.is_completed():
                    with suppress(RuntimeError):  # it is not here yet: handle signals, and go on
                        self._work.wait(BETWEEN_SIGNALS)
                self._work.wait()
        except RuntimeError as error:
            raise self._group.fail(error) from error
        return self._received


class _Store(dist.Store):  # type: ignore[misc,name-defined]
    """Where Gloo writes its addresses; the first read exchanges those of all ranks by Horovod."""

    def __init__(self, name: str, process_set: ProcessSet) -> None:
        super().__init__()
        self._name, self._process_set = name, process_set
        self._own: dict[str, str] = {}
        self._all: dict[str, bytes] | None = None

    def exchange(self) -> dict[str, bytes]:
        """Return what all ranks have set; the first time, all of them call this."""
        if self._all is None:
            parts = gather(self._own, self._name, self._process_set)
            self._all = {
                key: bytes.fromhex(value) for part in parts for key, value in part.items()
            }
        return self._all

    def set(self, key: str, value: bytes | str) -> None:
        self._own[key] = (value.encode() if isinstance(value, str) else bytes(value)).hex()

    def get(self, key: str) -> bytes:
        if key not in self.exchange():
            raise RuntimeError("another rank has no address, as it has failed")
        return self.exchange()[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def wait(self, keys: list[str], timeout: timedelta = CONNECT) -> None:
        self.multi_get(keys)

    def has_extended_api(self) -> bool:
        return False


def _device(hosts: Sequence[str]) -> Any:
    """Return Gloo's listener and thread on the network that Horovod uses."""
    make = dist.ProcessGroupGloo.create_device
    for variable in INTERFACES:
        interface = os.environ.get(variable, "").partition(",")[0]
        if interface in psutil.net_if_addrs():
            return make(interface=interface, lazy_init=False)
    others = [host for host in hosts if host != socket.gethostname()]
    if not others:
        return make(hostname="127.0.0.1", lazy_init=False)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((others[0], 9))  # sends nothing: it asks the kernel for the way there
        return make(hostname=probe.getsockname()[0], lazy_init=False)


_SUM, _SLICES, _REPLY = dist.AllreduceOptions(), dist.AllToAllOptions(), AllgatherOptions()
for _options in (_SUM, _SLICES, _REPLY):
    _options.timeout = TIMEOUT

open_groups: set[Group] = set()


def _close_in_child() -> None:
    for group in open_groups:
        group._connections.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)


def _close_all() -> None:
    for group in list(open_groups):
        group.close()


pending.before_shutdown(_close_all)
