"""Checks of Horovod's arguments and the strategy that do not depend on the framework."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from horovod.common.process_sets import ProcessSet

from hvd_pipe.planning.plan import Plan
from hvd_pipe.runtime.consensus import members
from hvd_pipe.runtime.process_sets import refuse_static_sets
from hvd_pipe.strategy import Auto, CoCoD, MergedGradient, Method, Strategy, parse

__all__ = [
    "allowed",
    "check_buckets",
    "check_compression",
    "check_groups",
    "check_passes",
    "check_process_set",
    "check_scaling",
    "describe_strategy",
    "refuse_for_cocod",
    "refuse_ranks",
    "user_groups",
]


def check_scaling(gradient_predivide_factor: Any, is_average: bool) -> None:
    """Raise unless the factor is a positive number, and 1 where nothing is averaged.

    >>> check_scaling(2.0, True)
    >>> check_scaling(2.0, False)
    Traceback (most recent call last):
      ...
    ValueError: gradient_predivide_factor must be > 0 and needs op=hvd.Average, got 2.0.
    """
    factor = gradient_predivide_factor
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        raise TypeError(f"gradient_predivide_factor must be a number, got {factor!r}.")
    if not 0 < factor < math.inf or (factor != 1.0 and not is_average):
        raise ValueError(
            f"gradient_predivide_factor must be > 0 and needs op=hvd.Average, got {factor!r}."
        )


def check_compression(compression: Any, codec: type) -> None:
    """Raise unless this is an object that compresses; ``codec`` is the class of our own."""
    if isinstance(compression, type) and issubclass(compression, codec):
        name = compression.__name__
        raise TypeError(f"compression is the class {name}: write hvd.{name}().")
    if not all(hasattr(compression, part) for part in ("compress", "decompress")):
        raise TypeError(
            "compression must be hvd.Compression.none, .fp16, .bf16, .int8, or another object "
            f"with compress() and decompress(), got {compression!r}."
        )


def check_passes(passes: int) -> int:
    """Return ``backward_passes_per_step`` if it is one."""
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step must be an int >= 1, got {passes!r}.")
    return passes


def check_process_set(process_set: Any) -> None:
    """Raise unless this is a process set that Horovod knows."""
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"process_set must be an hvd.ProcessSet, got {process_set!r}.")
    if process_set.process_set_id is None:
        raise ValueError(
            f"{process_set} is not registered: call hvd.add_process_set(...) on every "
            "rank, or list it in hvd.init(process_sets=[...])."
        )


def check_groups(groups: Any, noun: str, kind: type = object) -> None:
    """Raise unless ``groups`` is a positive int, or lists of different members."""
    is_count = isinstance(groups, int) and not isinstance(groups, bool) and groups > 0
    is_lists = isinstance(groups, list) and all(isinstance(group, list) for group in groups)
    if not is_count and not is_lists:
        raise ValueError(
            f"groups must be a positive int or a list of lists of {noun}s, got {groups!r}."
        )
    listed = [each for group in groups for each in group] if is_lists else []
    if not all(isinstance(each, kind) for each in listed):
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
    """Return Horovod's ``groups`` as groups of indices.

    Args:
        groups: Lists of members, or how many groups to cut ``indices`` into, the last first:
            about the order in which gradients are computed.
        members: The parameters or variables that are trained, by index.
        indices: What to group; what no list has is a group of its own.
        frozen: What lists may have beside ``members``, and does not count.
        noun: What a member is called.

    Raises:
        ValueError: A list has something else.

    Example:
        >>> user_groups(2, "abcd", [0, 1, 3])
        [[3], [1, 0]]
    """
    if isinstance(groups, int):
        count, backward = min(groups, len(indices)), list(reversed(indices))
        cuts = [len(indices) * i // count for i in range(count + 1)]
        return [backward[start:end] for start, end in itertools.pairwise(cuts)]
    index = {id(each): i for i, each in enumerate(members)}
    listed = [id(each) for group in groups for each in group]
    foreign = set(listed) - set(index) - set(map(id, frozen))
    if foreign:
        raise ValueError(
            f"groups must list {noun}s that are trained here, but {len(foreign)} of the "
            f"{len(listed)} listed are not: take them from the model that is trained."
        )
    wanted = set(indices)
    found = [[i for each in group if (i := index.get(id(each))) in wanted] for group in groups]
    grouped = {i for group in found for i in group}
    return [*found, *([i] for i in indices if i not in grouped)]


def check_buckets(strategy: Method, has_groups: bool) -> None:
    """Raise ValueError where the user's groups and the strategy both say what shares a bucket."""
    if not has_groups or isinstance(strategy, CoCoD):
        return
    is_planned = isinstance(strategy, MergedGradient) and strategy.plan != "auto"
    if is_planned or strategy.bucket_bytes is not None:
        raise ValueError(f"groups and {strategy} both say what to merge: give one of them.")


def refuse_for_cocod(
    strategy: CoCoD,
    *,
    is_average: bool,
    gradient_predivide_factor: float,
    has_groups: bool,
    process_set: ProcessSet,
) -> None:
    """CoCoD sends models: say so instead of ignoring arguments about gradients."""
    for wrong, what, fix in (
        (not is_average, "op=hvd.Sum", "op=hvd.Average"),
        (gradient_predivide_factor != 1.0, "gradient_predivide_factor", "1.0"),
        (has_groups, "groups", "groups=None"),
    ):
        if wrong:
            raise ValueError(
                f"{what} has no meaning under CoCoD, which averages models, not gradients: "
                f"use {fix}, or strategy='merged-gradient' or 'pipe-sgd'."
            )
    ranks = len(members(process_set))
    if strategy.weights is not None and len(strategy.weights) != ranks:
        raise ValueError(
            f"CoCoD has {len(strategy.weights)} weights, and the process set has {ranks} "
            "ranks: give one weight a rank, or weights=None."
        )
    if strategy.within == "node":
        if process_set.process_set_id != 0:
            raise ValueError(
                f"within='node' makes process sets of its own, and process_set is {process_set}: "
                "leave one of them out."
            )
        refuse_static_sets()


def describe_strategy(strategy: Strategy, plan: Plan | None) -> str:
    """Say what a strategy does on this rank, for ranks to compare.

    Ranks may have files of other names with one plan. Messages are named by their places in it, so
    the order counts as well.
    """
    if plan is None:
        return str(strategy)
    assert isinstance(strategy, MergedGradient)
    text = f"MergedGradient(plan={plan.buckets}, overlap={strategy.overlap!r})"
    return text if plan.order is None else f"{text}, sent as {plan.order}"


def refuse_ranks(*, has_weights: bool, process_set: ProcessSet) -> None:
    """Refuse what names ranks, in an elastic job; ``has_weights`` is about CoCoD's."""
    for wrong, what, fix in (
        (has_weights, "CoCoD's weights, one a rank", "weights=None, and equal batches"),
        (process_set.process_set_id != 0, "a process_set of ranks", "the global one"),
    ):
        if wrong:
            raise ValueError(
                f"{what}, mean nothing in an elastic job, where ranks come and go: use {fix}."
            )


def allowed(
    auto: Auto, check: Callable[[Method], None]
) -> tuple[tuple[Method, ...], dict[str, str]]:
    """Return the allowed methods that go with the other arguments; and why others do not."""
    found: list[Method] = []
    left_out: dict[str, str] = {}
    for name in auto.allow:
        method = parse(name)
        assert not isinstance(method, Auto)
        try:
            check(method)
            found.append(method)
        except ValueError as error:
            left_out[name] = str(error)
    if not found:
        name, why = next(iter(left_out.items()))
        raise ValueError(f"{auto} leaves nothing to choose from. With {name!r}: {why}")
    return tuple(found), left_out
