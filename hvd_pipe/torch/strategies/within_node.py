"""Gradients that are averaged over the ranks of a node, and a meeting of ranks of all nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from horovod.torch.compression import Compression

from hvd_pipe.runtime.process_sets import find_node
from hvd_pipe.strategy import CoCoD
from hvd_pipe.torch.agree import agreement
from hvd_pipe.torch.messages.allreduce import Message, Reduction, Traffic
from hvd_pipe.torch.strategies.settings import Settings

__all__ = ["Meeting", "within_node"]


class Meeting(Message):
    """What ranks meet by where each of several messages is sent by some that others do not reach.

    The messages of a node tell its ranks, and the models' those of other nodes.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages

    def launch(self) -> None:
        for message in self._messages:
            message.launch()

    @property
    def arrived(self) -> bool:
        return all(message.arrived for message in self._messages)

    def wait(self) -> None:
        for message in self._messages:
            message.wait()

    def meet(self) -> None:
        for message in self._messages:
            message.meet()


def within_node(settings: Settings, strategy: CoCoD) -> Reduction | None:
    """Return how the ranks of this node average gradients; None where it has one rank."""
    world = settings.reduction.process_set
    found = find_node(agreement, f"{settings.tag}.node", world, strategy.weights)
    if found is None:
        return None
    node, weights = found
    return replace(
        settings.reduction,
        process_set=node,
        weights=weights,
        compression=Compression.none,  # a node's own links are fast
        traffic=Traffic(),  # bytes within a node are not on the wire
    )
