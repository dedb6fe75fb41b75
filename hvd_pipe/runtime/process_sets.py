"""Process sets of Horovod's that are made while a job runs; the ranks of each node."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Sequence

from horovod.common import process_sets
from horovod.common.process_sets import ProcessSet

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.runtime.consensus import Agreement, Description, members

_log = logging.getLogger("hvd_pipe")

NODES = (
    'within="node" needs a Horovod process set for the ranks of each node, and Horovod was '
    'initialised so that none can be added: call hvd.init(process_sets="dynamic"), or set '
    "HOROVOD_DYNAMIC_PROCESS_SETS=1 in the environment of every rank."
)


_DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"


def make_process_sets(
    groups: Iterable[tuple[int, ...]], world: ProcessSet, needed: str
) -> dict[tuple[int, ...], ProcessSet]:
    """Return a process set of each group of ranks; all ranks call this with the same groups.

    Sets that are there already are used again, and stay until Horovod shuts down.
    """
    everyone, sets = tuple(members(world)), dict[tuple[int, ...], ProcessSet]()
    numbers = {
        tuple(ranks): number
        for number, ranks in process_sets._basics._get_process_set_ids_and_ranks().items()
    }
    for group in sorted({tuple(sorted(group)) for group in groups}):
        if group == everyone:
            sets[group] = world
        elif group in numbers:
            sets[group] = ProcessSet(list(group))
            sets[group].process_set_id = numbers[group]
        else:
            try:
                sets[group] = process_sets.add_process_set(list(group))
            except ValueError as error:
                if _DYNAMIC not in str(error):
                    raise
                raise HvdPipeError(needed) from error
    return sets


def refuse_static_sets() -> None:
    """Raise HvdPipeError where no process set can be added for a node, before anything is sent."""
    if os.environ.get(_DYNAMIC, "0").strip() in ("", "0"):
        raise HvdPipeError(NODES)


def find_node(
    agreement: Agreement, name: str, world: ProcessSet, weights: Sequence[float] | None
) -> tuple[ProcessSet, tuple[float, ...]] | None:
    """Return the process set of this rank's node, and the weights of its ranks.

    All ranks call this, anew where Horovod has started anew: its process sets end with it. A node
    is what the launcher calls a host; without a launcher, what calls itself one.
    """
    everyone, rank = members(world), members(world)[int(world.rank())]
    host = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    hosts = agreement.gather(host, f"{name}.names", world)
    nodes: dict[str, tuple[int, ...]] = {}
    for member, member_host in zip(everyone, hosts, strict=True):
        nodes[member_host] = (*nodes.get(member_host, ()), member)

    def make() -> tuple[dict[tuple[int, ...], ProcessSet], Description]:
        groups = [ranks for ranks in nodes.values() if len(ranks) > 1]
        return make_process_sets(groups, world, NODES), []

    sets = agreement.checked(make, f"{name}.process_sets", world)
    ranks = nodes[host]
    if len(ranks) == 1:
        return None
    if len(nodes) == 1 and rank == everyone[0]:
        text = "cocod:within=node: all %d ranks are on one node, and synchronous"
        _log.warning(text, len(ranks))
    return sets[ranks], tuple(weights[member] for member in ranks) if weights else ()
