"""How gradients are averaged over the ranks of a node."""

from __future__ import annotations

import logging
from dataclasses import replace

from hvd_pipe.runtime.consensus import members
from hvd_pipe.runtime.process_sets import node_process_set
from hvd_pipe.strategy import CoCoD
from hvd_pipe.tensorflow.agree import agreement
from hvd_pipe.tensorflow.messages.reduction import Reduction
from hvd_pipe.tensorflow.strategies.base import Settings

__all__ = ["within_node"]

_log = logging.getLogger("hvd_pipe")


def within_node(settings: Settings, strategy: CoCoD) -> Reduction | None:
    """Return how the ranks of this node average gradients; None where it has one rank.

    All ranks call this, anew where Horovod has started anew: its process sets end with it.
    """
    world = settings.reduction.process_set
    node = node_process_set(agreement, f"{settings.tag}.node", world)
    if node is None:
        return None
    ranks = members(node)
    if len(ranks) == world.size() and world.rank() == 0:
        _log.warning(
            "cocod:within=node: all %d ranks are on one node, and synchronous", len(ranks)
        )
    weights = tuple(strategy.weights[rank] for rank in ranks) if strategy.weights else ()
    # A node's own links are fast: nothing is compressed.
    return replace(settings.reduction.lossless(), process_set=node, weights=weights)
