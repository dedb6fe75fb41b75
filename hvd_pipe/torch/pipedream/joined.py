"""Which nodes of a model's graph stay together: the rules of :mod:`.graph`, carried out."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

import torch
from torch import fx, nn

from hvd_pipe.torch.pipedream.nodes import (
    attribute,
    called,
    is_in_place,
    may_alias,
    questions,
    state,
    takes_part,
    tensors_of,
)

__all__ = ["Joined"]


class Joined:
    """The calls of a graph in groups that are never cut; a group goes by its first call.

    Args:
        made: The graph and what it calls.
        chain: Its calls are stages that the user gave: they may change their input in place.
    """

    def __init__(self, made: fx.GraphModule, chain: bool) -> None:
        self.made = made
        nodes = list(made.graph.nodes)
        self.place = {node: at for at, node in enumerate(nodes)}
        self.asks = questions(made.graph)
        self.calls = [n for n in nodes if n.op.startswith("call_") and n not in self.asks]
        self.group: dict[fx.Node, fx.Node] = {node: node for node in self.calls}
        self.chain = chain
        self._join_parts()
        self._join_weights()
        if not chain:
            self._join_in_place()
        self._join_between()

    def groups(self) -> dict[fx.Node, list[fx.Node]]:
        """Return the calls of each group, in an order of forward."""
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in self.calls:
            found.setdefault(self._find(node), []).append(node)
        return {first: found[first] for first in _ordered(found, self.before(), self.place)}

    # What is joined.

    def _join_parts(self) -> None:
        for node in self.calls:
            if takes_part(node):
                for source in self._sources(node):
                    self._join(source, node)
            if not node.users and not self._sources(node) and not self._placeholders(node):
                # It only counts a buffer up (torch.export's BatchNorm): no layer of its own.
                later = [n for n in self.calls if self.place[n] > self.place[node]]
                self._join(node, later[0] if later else self.calls[0])

    def _join_weights(self) -> None:
        users: dict[int, list[fx.Node]] = {}
        changed: set[int] = set()
        fixed: set[fx.Node] = set()  # from no input of the model
        weights: set[fx.Node] = set()  # those from parameters
        for node in self.calls:
            tensors = self.tensors(node)
            for tensor, changes in tensors.items():
                users.setdefault(tensor, []).append(node)
                if changes:
                    changed.add(tensor)
            inputs = [each for each in node.all_input_nodes if each not in self.asks]
            if not all(n in fixed or n.op == "get_attr" for n in inputs):
                continue
            fixed.add(node)
            if any(n in weights or self._is_parameter(n) for n in inputs):
                weights.add(node)
            if node in weights or (len(node.users) == 1 and not self.chain):
                for user in node.users:
                    if user in self.group:
                        self._join(node, user)
        for tensor, nodes in users.items():
            if tensor in changed:
                for node in nodes:
                    self._join(nodes[0], node)

    def _join_in_place(self) -> None:
        for node in self.calls:
            if not is_in_place(node, self.made):
                continue
            root = self._changed(node)
            if root is None:
                continue
            aliases, queue = {root}, [root]
            for alias in queue:
                for user in alias.users:
                    if user in self.group and self.place[user] <= self.place[node]:
                        self._join(node, user)
                        if may_alias(user, self.made) and user not in aliases:
                            aliases.add(user)
                            queue.append(user)
            if root in self.group:
                self._join(node, root)

    def _changed(self, node: fx.Node) -> fx.Node | None:
        """Return what a call in place changes, behind all views of it."""
        root = node.args[0] if node.args else next(iter(node.all_input_nodes), None)
        while (
            isinstance(root, fx.Node)
            and root in self.group
            and may_alias(root, self.made)
            and root.args
            and isinstance(root.args[0], fx.Node)
        ):
            root = root.args[0]
        return root if isinstance(root, fx.Node) else None

    def _join_between(self) -> None:
        """Join what lies on paths within a group: the strongly connected groups."""
        before = self.before()
        seen: dict[fx.Node, int] = {}
        low: dict[fx.Node, int] = {}
        stack: list[fx.Node] = []
        done: set[fx.Node] = set()
        for start in before:
            if start in seen:
                continue
            work = [(start, iter(before[start]))]
            seen[start] = low[start] = len(seen)
            stack.append(start)
            while work:
                at, rest = work[-1]
                other = next(rest, None)
                if other is not None:
                    if other not in seen:
                        seen[other] = low[other] = len(seen)
                        stack.append(other)
                        work.append((other, iter(before[other])))
                    elif other not in done:
                        low[at] = min(low[at], seen[other])
                    continue
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[at])
                if low[at] == seen[at]:
                    while True:
                        member = stack.pop()
                        done.add(member)
                        self._join(at, member)
                        if member is at:
                            break

    # Groups.

    def _find(self, node: fx.Node) -> fx.Node:
        while self.group[node] is not node:
            above = self.group[node]
            self.group[node] = self.group[above]
            node = above
        return node

    def _join(self, a: fx.Node, b: fx.Node) -> None:
        a, b = self._find(a), self._find(b)
        if self.place[a] > self.place[b]:
            a, b = b, a
        self.group[b] = a

    def before(self) -> dict[fx.Node, dict[fx.Node, None]]:
        """Return the groups whose tensors each group uses."""
        found: dict[fx.Node, dict[fx.Node, None]] = {}
        for node in self.calls:
            mine = self._find(node)
            needs = found.setdefault(mine, {})
            for source in self._sources(node):
                if self._find(source) is not mine:
                    needs[self._find(source)] = None
        return found

    # What a node uses.

    def _uses(self, node: fx.Node) -> list[fx.Node]:
        """Return the tensors behind a node's arguments, sizes asked from them included."""
        return tensors_of(node, self.asks)

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        return [found for found in self._uses(node) if found in self.group]

    def _placeholders(self, node: fx.Node) -> list[fx.Node]:
        return [found for found in self._uses(node) if found.op == "placeholder"]

    def _is_parameter(self, node: fx.Node) -> bool:
        return node.op == "get_attr" and isinstance(
            attribute(self.made, node.target), nn.Parameter
        )

    def tensors(self, node: fx.Node) -> dict[int, bool]:
        """Return the parameters and buffers that a node uses, and which may not be in two stages.

        Those are parameters, and buffers that it may change.
        """
        found: dict[int, bool] = {}
        if node.op == "call_module":
            module = self.made.get_submodule(str(node.target))
            found.update((id(tensor), True) for tensor in state(module))
        changes = node.op == "call_function" and "norm" in called(node)
        target = self._changed(node) if is_in_place(node, self.made) else None
        for each in dict.fromkeys([*self._uses(node), *([] if target is None else [target])]):
            if each.op == "get_attr":
                value = attribute(self.made, each.target)
                if isinstance(value, nn.Module):
                    found.update((id(tensor), True) for tensor in state(value))
                elif isinstance(value, torch.Tensor):
                    single = changes or each is target or isinstance(value, nn.Parameter)
                    found[id(value)] = found.get(id(value), False) or single
        return found


def _ordered(
    groups: Mapping[fx.Node, object],
    before: Mapping[fx.Node, Iterable[fx.Node]],
    place: Mapping[fx.Node, int],
) -> list[fx.Node]:
    """Return groups so that each comes after those it uses, else in the order of forward."""
    after: dict[fx.Node, list[fx.Node]] = {first: [] for first in groups}
    missing = {first: len(list(before[first])) for first in groups}
    for first in groups:
        for source in before[first]:
            after[source].append(first)
    ready: list[tuple[int, fx.Node]] = [(place[n], n) for n in groups if not missing[n]]
    heapq.heapify(ready)
    found = []
    while ready:
        _, first = heapq.heappop(ready)
        found.append(first)
        for user in after[first]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (place[user], user))
    return found
