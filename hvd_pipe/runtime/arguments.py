"""What an optimizer or a tape is given beside the model, in both frameworks: Horovod's arguments.

`Arguments` checks them on this rank, without a message, and describes them for the other ranks.
Each framework's own `Arguments` adds what it alone has.
"""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from horovod.common.process_sets import ProcessSet

from hvd_pipe.planning.plan import Plan
from hvd_pipe.runtime.consensus import Description, members
from hvd_pipe.runtime.process_sets import refuse_static_sets
from hvd_pipe.runtime.timeline import DIRECTORY
from hvd_pipe.strategy import Auto, CoCoD, MergedGradient, Method, Strategy, parse

AVERAGE = "Average"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Horovod's arguments, as the user passed them, and the strategy."""

    ops: ClassVar[Mapping[Any, str]]
    """The names of the reductions that the framework has."""
    codec: ClassVar[type]
    """The class of our own compressors."""
    noun: ClassVar[str]
    """What has a gradient: a parameter or a variable."""
    member: ClassVar[type] = object
    """The class of these, where ``groups`` must have nothing else."""

    compression: Any
    op: Any
    gradient_predivide_factor: float
    groups: Any
    sparse_as_dense: bool
    process_set: ProcessSet
    strategy: str | Strategy | None
    backward_passes_per_step: int = 1

    def check_values(self) -> Strategy:
        """Return the strategy, or raise where an argument by itself is wrong."""
        strategy = parse(self.strategy)
        if not isinstance(self.op, int) or self.op not in self.ops:
            *first, last = (f"hvd.{name}" for name in self.ops.values())
            raise ValueError(f"op must be {', '.join(first)} or {last}, got {self.op!r}.")
        self._check_scaling()
        self._check_compression()
        self.check_type("sparse_as_dense", bool, "True or False")
        if not isinstance(self.process_set, ProcessSet):
            raise TypeError(f"process_set must be an hvd.ProcessSet, got {self.process_set!r}.")
        if self.process_set.process_set_id is None:
            raise ValueError(
                f"{self.process_set} is not registered: call hvd.add_process_set(...) on every "
                "rank, or list it in hvd.init(process_sets=[...])."
            )
        check_passes(self.backward_passes_per_step)
        if self.groups is not None:
            _check_groups(self.groups, self.noun, self.member)
        return strategy

    def check_type(self, name: str, kind: type, words: str) -> None:
        """Raise TypeError unless an argument is of this type."""
        value = getattr(self, name)
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be {words}, got {value!r}.")

    def check_method(self, method: Method) -> None:
        """Raise ValueError where a strategy does not go with the other arguments."""
        if isinstance(method, CoCoD):
            self._check_cocod(method)
        elif self.groups is not None:
            is_planned = isinstance(method, MergedGradient) and method.plan != "auto"
            if is_planned or method.bucket_bytes is not None:
                raise ValueError(f"groups and {method} both say what to merge: give one of them.")

    def choices(
        self, auto: Auto, check: Callable[[Method], None]
    ) -> tuple[tuple[Method, ...], dict[str, str]]:
        """Return the allowed methods that pass a check, and by name why the others do not."""
        methods: list[Method] = []
        left_out: dict[str, str] = {}
        for name in auto.allow:
            method = parse(name)
            assert not isinstance(method, Auto)
            try:
                check(method)
                methods.append(method)
            except ValueError as error:
                left_out[name] = str(error)
        if not methods:
            name, why = next(iter(left_out.items()))
            raise ValueError(f"{auto} leaves nothing to choose from. With {name!r}: {why}")
        return tuple(methods), left_out

    def check_elastic(self, strategy: Strategy) -> None:
        """Raise ValueError for what names ranks, which come and go in an elastic job."""
        has_weights = isinstance(strategy, CoCoD) and strategy.weights is not None
        for wrong, noun, fix in (
            (has_weights, "CoCoD's weights, one a rank", "weights=None, and equal batches"),
            (self.process_set.process_set_id != 0, "a process_set of ranks", "the global one"),
        ):
            if wrong:
                raise ValueError(
                    f"{noun}, mean nothing in an elastic job, where ranks come and go: use {fix}."
                )
        if os.environ.get(DIRECTORY):
            warnings.warn(f"{DIRECTORY}: elastic jobs write no timeline", stacklevel=5)

    def describe_values(self, strategy: Strategy, plan: Plan | None) -> Description:
        """Return the lines that all ranks must have alike."""
        codec = self.compression
        name = getattr(codec, "__name__", type(codec).__name__)
        return [
            ("strategy", _describe_strategy(strategy, plan)),
            ("op", self.ops[self.op]),
            ("gradient_predivide_factor", str(self.gradient_predivide_factor)),
            ("compression", repr(codec) if isinstance(codec, self.codec) else str(name)),
            ("backward_passes_per_step", str(self.backward_passes_per_step)),
            ("sparse_as_dense", str(self.sparse_as_dense)),
        ]

    def _check_scaling(self) -> None:
        factor = self.gradient_predivide_factor
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            raise TypeError(f"gradient_predivide_factor must be a number, got {factor!r}.")
        if not 0 < factor < math.inf or (factor != 1.0 and self.ops[self.op] != AVERAGE):
            raise ValueError(
                f"gradient_predivide_factor must be > 0 and needs op=hvd.Average, got {factor!r}."
            )

    def _check_compression(self) -> None:
        compression = self.compression
        if isinstance(compression, type) and issubclass(compression, self.codec):
            name = compression.__name__
            raise TypeError(f"compression is the class {name}: write hvd.{name}().")
        if not all(hasattr(compression, part) for part in ("compress", "decompress")):
            raise TypeError(
                "compression must be hvd.Compression.none, .fp16, .bf16, .int8, or another "
                f"object with compress() and decompress(), got {compression!r}."
            )

    def _check_cocod(self, method: CoCoD) -> None:
        """CoCoD sends models: say so instead of ignoring arguments about gradients."""
        for wrong, noun, fix in (
            (self.ops[self.op] != AVERAGE, "op=hvd.Sum", "op=hvd.Average"),
            (self.gradient_predivide_factor != 1.0, "gradient_predivide_factor", "1.0"),
            (self.groups is not None, "groups", "groups=None"),
        ):
            if wrong:
                raise ValueError(
                    f"{noun} has no meaning under CoCoD, which averages models, not gradients: "
                    f"use {fix}, or strategy='merged-gradient' or 'pipe-sgd'."
                )
        ranks = len(members(self.process_set))
        if method.weights is not None and len(method.weights) != ranks:
            raise ValueError(
                f"CoCoD has {len(method.weights)} weights, and the process set has {ranks} "
                "ranks: give one weight a rank, or weights=None."
            )
        if method.within == "node":
            if self.process_set.process_set_id != 0:
                raise ValueError(
                    "within='node' makes process sets of its own, and process_set is "
                    f"{self.process_set}: leave one of them out."
                )
            refuse_static_sets()


def check_passes(passes: int) -> int:
    """Return ``backward_passes_per_step`` if it is one."""
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step must be an int >= 1, got {passes!r}.")
    return passes


def _check_groups(groups: Any, noun: str, kind: type) -> None:
    """Raise unless ``groups`` is a positive int, or lists of different members."""
    is_count = isinstance(groups, int) and not isinstance(groups, bool) and groups > 0
    is_lists = isinstance(groups, list) and all(isinstance(group, list) for group in groups)
    if not is_count and not is_lists:
        raise ValueError(
            f"groups must be a positive int or a list of lists of {noun}s, got {groups!r}."
        )
    listed = [item for group in groups for item in group] if is_lists else []
    if not all(isinstance(item, kind) for item in listed):
        raise ValueError(f"groups must be lists of {noun}s (tensors).")
    if len(set(map(id, listed))) < len(listed):
        raise ValueError(f"a {noun} can appear only once in groups.")


def user_groups(
    groups: int | list[list[Any]],
    members: Sequence[Any],
    indices: Sequence[int],
    frozen: Iterable[Any] = (),
    noun: str = "variable",
) -> list[list[int]]:
    """Return Horovod's ``groups`` as groups of indices; what no list has is a group of its own.

    A number of groups cuts ``indices``, the last first: about the order of the backward pass.

    >>> user_groups(2, "abcd", [0, 1, 3])
    [[3], [1, 0]]
    """
    if isinstance(groups, int):
        count, backward = min(groups, len(indices)), list(reversed(indices))
        cuts = [len(indices) * i // count for i in range(count + 1)]
        return [backward[start:end] for start, end in itertools.pairwise(cuts)]
    index = {id(item): i for i, item in enumerate(members)}
    listed = [id(item) for group in groups for item in group]
    foreign = set(listed) - set(index) - set(map(id, frozen))
    if foreign:
        raise ValueError(
            f"groups must list {noun}s that are trained here, but {len(foreign)} of the "
            f"{len(listed)} listed are not: take them from the model that is trained."
        )
    wanted = set(indices)
    chosen = [[i for item in group if (i := index.get(id(item))) in wanted] for group in groups]
    grouped = {i for group in chosen for i in group}
    return [*chosen, *([i] for i in indices if i not in grouped)]


def _describe_strategy(strategy: Strategy, plan: Plan | None) -> str:
    """Describe a strategy by its plan's contents: ranks may have it in files of other names."""
    if plan is None:
        return str(strategy)
    assert isinstance(strategy, MergedGradient)
    text = f"MergedGradient(plan={plan.buckets}, overlap={strategy.overlap!r})"
    # Messages are named by their places in the plan.
    return text if plan.order is None else f"{text}, sent as {plan.order}"
