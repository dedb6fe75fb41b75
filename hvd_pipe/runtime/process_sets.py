"""Process sets of Horovod's that are made while a job runs; the ranks of each node."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Mapping, Sequence

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


def make_process_sets(
    groups: Iterable[tuple[int, ...]], world: ProcessSet, needed: str
) -> dict[tuple[int, ...], ProcessSet]:
    """Return a process set of each group of ranks; all ranks call this with the same groups.

    Sets that are there already are used again, and stay until Horovod shuts down.
    """
    everyone = members(world)
    wanted = sorted({tuple(sorted(group)) for group in groups})
    sets: dict[tuple[int, ...], ProcessSet] = {}
    found = {
        tuple(ranks): number
        for number, ranks in process_sets._basics._get_process_set_ids_and_ranks().items()
    }
    for group in wanted:
        if list(group) == everyone:
            sets[group] = world
        elif group in found:
            sets[group] = ProcessSet(list(group))
            sets[group].process_set_id = found[group]
        else:
            sets[group] = _added(group, needed)
    return sets


def refuse_static_sets(environment: Mapping[str, str] = os.environ) -> None:
    """Raise HvdPipeError where no process set can be added for a node, before anything is sent."""
    if environment.get(_DYNAMIC, "0").strip() in ("", "0"):
        raise HvdPipeError(NODES)


def this_node(environment: Mapping[str, str] = os.environ) -> str:
    """Return the name by which the launcher knows this rank's host, else the host's own."""
    return environment.get("HOROVOD_HOSTNAME") or socket.gethostname()


def find_node(
    agreement: Agreement, name: str, world: ProcessSet, weights: Sequence[float] | None
) -> tuple[ProcessSet, tuple[float, ...]] | None:
    """Return the process set of this rank's node, and the weights of its ranks.

    All ranks call this, anew where Horovod has started anew: its process sets end with it.
    """
    everyone, told = members(world), agreement.gather(this_node(), f"{name}.names", world)
    nodes = by_node(everyone, told)

    def made() -> tuple[dict[tuple[int, ...], ProcessSet], Description]:
        groups = [ranks for ranks in nodes if len(ranks) > 1]
        return make_process_sets(groups, world, NODES), []

    sets = agreement.checked(made, f"{name}.process_sets", world)
    rank = everyone[int(world.rank())]
    mine = next(ranks for ranks in nodes if rank in ranks)
    if mine not in sets:
        return None
    if len(nodes) == 1 and rank == everyone[0]:
        text = "cocod:within=node: all %d ranks are on one node, and synchronous"
        _log.warning(text, len(mine))
    return sets[mine], tuple(weights[each] for each in mine) if weights else ()


def by_node(ranks: Sequence[int], nodes: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the ranks of each node, in the order of its first rank.

    >>> by_node([0, 1, 2], ["a", "b", "a"])
    [(0, 2), (1,)]
    """
    found: dict[str, list[int]] = {}
    for rank, node in zip(ranks, nodes, strict=True):
        found.setdefault(node, []).append(rank)
    return [tuple(one) for one in found.values()]


def _added(group: tuple[int, ...], needed: str) -> ProcessSet:
    try:
        return process_sets.add_process_set(list(group))
    except ValueError as error:
        if _DYNAMIC not in str(error):
            raise
        raise HvdPipeError(needed) from error


_DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"
