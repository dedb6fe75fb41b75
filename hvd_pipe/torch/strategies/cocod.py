"""CoCoD-SGD: the models of the round's start are averaged while k local steps run.

start of round s   snapshot x_i[s] is copied and sent
k local steps      the user's optimizer, on local gradients
end of round       x_i[s+1] = mean_j x_j[s] + (x_i - x_i[s])     then the next round starts

`ModelAverage` has the arithmetic, and the other rules for the end of a round. With fragments, each
has a `ModelAverage` of its own, and they take turns::

    period 4, 2 fragments     step   1    2    3    4    5    6
                              sent   |--- 0 ---|--- 1 ---|--- 0 --

With ``within="node"`` gradients are averaged in buckets over the ranks of a node. Horovod carries
one message after another, so the models' message delays those that are ready behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from horovod.torch.compression import Compression

from hvd_pipe.cocod import assign_fragments
from hvd_pipe.runtime import check_mode
from hvd_pipe.runtime.consensus import Description
from hvd_pipe.runtime.process_sets import find_node
from hvd_pipe.strategy import CoCoD
from hvd_pipe.torch.agree import agreement, check_alike, compare_replicas
from hvd_pipe.torch.messages.allreduce import REDUCED, SENT, Message, Reduction, Traffic
from hvd_pipe.torch.messages.buckets import BucketSet, residuals_of, restore_residuals
from hvd_pipe.torch.strategies.base import Engine
from hvd_pipe.torch.strategies.model_average import (
    IN_FLIGHT,
    PREFIX,
    UNSETTLED,
    AveragedMomenta,
    ModelAverage,
    ModelBuffers,
    Part,
    state_of,
)
from hvd_pipe.torch.strategies.settings import Settings, State


class CoCoDEngine(Engine):
    """Local steps, with the average of the round's start in flight behind them."""

    name = CoCoD.name
    has_state_in_flight = True

    def __init__(self, settings: Settings, strategy: CoCoD) -> None:
        super().__init__(settings)
        self._strategy, self.can_join = strategy, strategy.within == "none"
        self._local_steps = self._turn = 0
        self._started = False
        self._buffers = ModelBuffers()
        self._fragment_of: list[int] = []
        self.build()

    @property
    def next_messages(self) -> list[Message]:
        # A node's message reaches its ranks; the models' message reaches other nodes.
        nodes = [] if self.current is None else self.current.messages
        if self._is_warm:
            return nodes
        turn = (self._turn + self._started) % self._strategy.fragments
        parts = self._all_parts() if self.reduction.group is not None else self._parts
        averages = [part.average for part in parts if part.fragment == turn]
        count = len(averages) if self.reduction.group is not None else 1
        return [*nodes, *(average.next_message for average in averages[:count])]

    @property
    def is_averaged(self) -> bool:
        return self._is_warm

    @property
    def _global_reduction(self) -> Reduction:
        """How models are averaged, and gradients in warm-up."""
        return replace(self.settings.reduction, weights=self._strategy.weights or ())

    def build(self) -> None:
        settings, strategy = self.settings, self._strategy
        self._is_warm = self.rounds < strategy.warmup_steps
        self._node = None
        if strategy.within == "node":
            self._node = within_node(settings, strategy)
        self._choose_buckets()
        self._cut()
        self._momenta: AveragedMomenta | None = None
        if strategy.momentum == "average":
            self._momenta = AveragedMomenta(settings, self._global_reduction, strategy)
        self._buffers.want(settings.parameters)

    def _cut(self) -> None:
        """Make the parts of the model; parameters that have a fragment stay in it."""
        settings, strategy, reduction = self.settings, self._strategy, self._global_reduction
        index = settings.index
        self._fragment_of = assign_fragments(index.nbytes, strategy.fragments, self._fragment_of)
        self._parts: list[Part] = []
        for fragment in range(strategy.fragments):
            members = [i for i, number in enumerate(self._fragment_of) if number == fragment]
            for indices in index.dtype_groups(members):
                parameters, number = [settings.parameters[i] for i in indices], len(self._parts)
                average = ModelAverage(
                    parameters,
                    partial(_values, parameters),
                    reduction,
                    f"{settings.tag}.model.{number}",
                    strategy,
                    words=int(strategy.momentum == "average" and number == 0),
                )
                self._parts.append(Part(fragment, [(i, "") for i in indices], average))

    def _choose_buckets(self) -> None:
        """Make buckets if gradients are averaged: over all ranks in warm-up, else over a node."""
        settings, self.current = self.settings, None
        reduction, tag = (
            (self._global_reduction, "warmup") if self._is_warm else (self._node, "node")
        )
        if reduction is not None:
            groups = settings.index.default_groups(range(len(settings.names)))
            # Sparse gradients that travel by themselves know no weights, and go as dense ones.
            as_dense = settings.sparse_as_dense or bool(reduction.weights)
            settings = replace(
                settings, reduction=reduction, sparse_as_dense=as_dense, known_as_dense=set()
            )
            self.current = BucketSet(settings, groups, tag)

    def position(self) -> Description:
        lines = [*super().position(), ("local steps of the round", str(self._local_steps))]
        if self._strategy.fragments > 1:
            lines.append(("the parameters' fragments", str(self._fragment_of)))
        return lines

    def prepare(self, shown_in: Mapping[int, torch.Tensor]) -> bool:
        self._buffers.step()
        updates = True
        if self.current is not None:
            self.current.flush()
            self.current.wait()
            updates = not self.current.is_dropped
            self.current.bind_gradients(shown_in)
        if not self._is_warm and not self._started:
            self._start()
        return updates

    def after_update(self) -> None:
        super().after_update()
        if self._is_warm:
            self._update_warmup()
            return
        self._local_steps += 1
        if self._local_steps < (self._turn + 1) * self._strategy.turn:
            return
        for average in self._averages(in_turn=True):
            average.finish()
        if self._momenta is not None and float(self._parts[0].average.words):
            self._momenta.rounds_to_agree = max(self._momenta.rounds_to_agree, 1)
        self._turn = (self._turn + 1) % self._strategy.fragments
        if self._turn == 0:
            self._local_steps = 0
        self._start()

    def drain(self) -> None:
        """Make all replicas equal: the average of the models and buffers as they are now.

        Without an outer model or anchor, what is in flight need not be added; those stay.
        """
        steps = [("the number of steps", str(self.rounds))]
        reduction, tag = self.settings.reduction, self.settings.tag
        if not reduction.alone:
            for average in self._averages():
                average.complete()
            self.meet()  # raises where another rank goes on to its next round
            check_alike(steps, f"{tag}.drain", reduction.process_set)
        if self._momenta is not None:
            self._momenta.agree()
            self._momenta.rounds_to_agree = UNSETTLED
        for average in self._averages():
            average.average_now()
        self._pause()
        self._buffers.average(reduction, f"{tag}.buffers")
        if check_mode.active.on and not reduction.alone:
            names, weights = self.settings.names, self.settings.parameters
            process_set = reduction.process_set
            compare_replicas(names, weights, [], "after synchronize()", process_set, tag)

    def skip_round(self) -> None:
        if self._is_warm:
            self.rounds += 1
            self._update_warmup()
            return
        if self._started:
            self._turn = (self._turn + 1) % self._strategy.fragments
        for average in self._averages(in_turn=True):
            average.due = True
        self._started = True

    def after_join(self) -> None:
        self._reset_rounds(joining=True, rounds=self._strategy.warmup_steps)

    def discard(self) -> None:
        self._reset_rounds(joining=False, rounds=0)

    def _update_warmup(self) -> None:
        """Enter or leave the warm-up by `rounds`, with the buckets for it."""
        was_warm, self._is_warm = self._is_warm, self.rounds < self._strategy.warmup_steps
        if was_warm != self._is_warm:
            self._choose_buckets()

    def _reset_rounds(self, joining: bool, rounds: int) -> None:
        super().discard()
        for average in self._averages():
            average.discard(joining)
        if self._momenta is not None:
            self._momenta.rounds_to_agree = UNSETTLED
        self._pause()
        self.rounds = rounds
        self._update_warmup()

    def state(self) -> State:
        tensors = state_of(self._all_parts(), len(self.settings.parameters))
        if self._is_warm and self.current is not None:
            tensors |= residuals_of(self.current)  # the models' own are zero until then
        counters: dict[str, Any] = {"rounds": self.rounds, "local_steps": self._local_steps}
        if self._strategy.fragments > 1:
            fragments = dict(zip(self.settings.names, self._fragment_of, strict=True))
            counters["fragment_of"] = fragments
        if self._momenta is not None:
            counters["unsettled"] = self._momenta.rounds_to_agree
            # Whether some rank has momenta that others do not know of.
            counters["news"] = int(self._started and bool(self._parts[0].average.words))
        return State(counters, tensors)

    def load(self, state: State) -> None:
        counters = state.counters
        momenta = {k: v for k, v in state.tensors.items() if k.startswith(PREFIX)}
        models = {k: v for k, v in state.tensors.items() if k not in momenta}
        self.rounds, local_steps = counters["rounds"], counters["local_steps"]
        self._update_warmup()
        if self._is_warm and self.current is not None:
            restore_residuals(self.current, models)
            models = {k: v for k, v in models.items() if k not in (SENT, REDUCED)}
        # Parameters of a known cut that have nothing have joined since; of another one, a part has
        # nothing unless all of its parameters do.
        enough = any if self._adopt_fragments(counters.get("fragment_of", {})) else all
        last = self._strategy.fragments - 1
        self._turn = min(local_steps // self._strategy.turn, last)
        for part in self._parts:
            saved = {k: [v[i] for i, _ in part.places] for k, v in models.items()}
            part.average.load(
                {
                    label: values
                    for label, values in saved.items()
                    if enough(value is not None for value in values)
                    and (part.fragment == self._turn or label not in IN_FLIGHT)
                }
            )
        due = all(part.average.due for part in self._parts if part.fragment == self._turn)
        if due:
            self._started, self._local_steps = True, local_steps
        else:
            self._pause()
        if self._momenta is not None:
            self._momenta.load(momenta, counters.get("unsettled"))
            self._parts[0].average.words.fill_(counters.get("news") or 0)

    def _adopt_fragments(self, saved: Mapping[str, int]) -> bool:
        """Cut the model as it was when a state was saved, if it can be; return whether it is."""
        count, names = self._strategy.fragments, self.settings.names
        other_names = bool(saved) and saved.keys().isdisjoint(names)
        if other_names or max(saved.values(), default=0) + 1 != count:
            return False
        known = [saved.get(name) for name in names]
        fragment_of = assign_fragments(self.settings.index.nbytes, count, known)
        if len(set(fragment_of)) == count and fragment_of != self._fragment_of:
            self._fragment_of = fragment_of
            self._cut()
        return fragment_of == self._fragment_of

    def _averages(self, in_turn: bool = False) -> list[ModelAverage]:
        """Return all averages; ``in_turn``, those of the current fragment."""
        parts = self._all_parts()
        return [p.average for p in parts if p.fragment == self._turn or not in_turn]

    def _all_parts(self) -> list[Part]:
        return self._parts if self._momenta is None else [*self._parts, *self._momenta.parts]

    def _start(self) -> None:
        if self._momenta is not None:
            self._parts[0].average.words.fill_(float(self._momenta.agree_if_due()))
        for average in self._averages(in_turn=True):
            average.start()
        self._started = True

    def _pause(self) -> None:
        self._started = False
        self._local_steps = self._turn = 0


def _values(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in parameters]


def within_node(settings: Settings, strategy: CoCoD) -> Reduction | None:
    """Return how the ranks of this node average gradients; None where it has one rank."""
    world = settings.reduction.process_set
    node_and_weights = find_node(agreement, f"{settings.tag}.node", world, strategy.weights)
    if node_and_weights is None:
        return None
    node, weights = node_and_weights
    return replace(
        settings.reduction,
        process_set=node,
        weights=weights,
        compression=Compression.none,  # a node's own links are fast
        traffic=Traffic(),  # bytes within a node are not on the wire
    )
