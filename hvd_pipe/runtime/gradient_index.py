"""A job's gradients by index, and the buckets that each way of planning gives them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning import merge
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.merge import plan_dtype_groups
from hvd_pipe.planning.methods import DEFAULT_BUCKET_BYTES
from hvd_pipe.planning.plan import Plan
from hvd_pipe.strategy import MergedGradient

SKIP_STEPS = 3
"""Steps that are not recorded: caches fill, and libraries set themselves up."""
RECORD_STEPS = 10
"""Steps whose times are recorded for a profile."""

LARGEST_BYTES = 2**30
"""The most that gradients are merged to unasked: MPI counts elements in 32 bits."""

Groups = Sequence[Sequence[int]]
"""The indices of the gradients of each bucket."""


class GradientIndex:
    """The gradients of a job, in an order that all ranks share; an index names each.

    Gradients that share a bucket have the same of ``dtypes``: the dtype, and perhaps the device.
    """

    def __init__(
        self, names: Sequence[str], nbytes: Sequence[int], dtypes: Sequence[Hashable]
    ) -> None:
        self.names, self.nbytes, self.kinds = list(names), list(nbytes), list(dtypes)

    def __len__(self) -> int:
        return len(self.names)

    def dtype_groups(self, indices: Sequence[int]) -> list[list[int]]:
        """Group indices by dtype, keeping their order.

        >>> GradientIndex("abc", [4, 2, 4], ["float", "half", "float"]).dtype_groups([2, 1, 0])
        [[2, 0], [1]]
        """
        groups: dict[Hashable, list[int]] = {}
        for index in indices:
            groups.setdefault(self.kinds[index], []).append(index)
        return list(groups.values())

    def default_groups(
        self, indices: Sequence[int], bucket_bytes: int | None = DEFAULT_BUCKET_BYTES
    ) -> list[list[int]]:
        """Fill buckets with descending indices, about the order of the backward pass.

        Without ``bucket_bytes`` there is one bucket a dtype.

        >>> GradientIndex("abc", [4, 4, 4], ["float"] * 3).default_groups([0, 1, 2], 8)
        [[2, 1], [0]]
        >>> GradientIndex("abc", [4] * 3, ["half", "float", "half"]).default_groups([0, 1, 2])
        [[2, 0], [1]]
        """
        groups: list[list[int]] = []
        for group in self.dtype_groups(indices):
            order = sorted(group, reverse=True)
            sizes = [self.nbytes[index] for index in order]
            start = 0
            for count in merge.by_bytes(sizes, bucket_bytes or max(sum(sizes), 1)).tolist():
                groups.append(order[start : start + count])
                start += count
        return groups

    def fewer_and_fewer(self) -> list[Plan]:
        """Return the plans that are tried where any gradient may leave as late as the last one.

        The default buckets; about the square root of their number; one message a dtype, up to
        `LARGEST_BYTES`. A plan alone says that there is nothing to merge.

        >>> index = GradientIndex("abcd", [8 << 20] * 4, ["float"] * 4)
        >>> [len(plan.buckets) for plan in index.fewer_and_fewer()]
        [4, 2, 1]
        """
        total = sum(self.nbytes)
        limits = (DEFAULT_BUCKET_BYTES, math.isqrt(DEFAULT_BUCKET_BYTES * total), total)
        plans = []
        for limit in limits:
            most = max(DEFAULT_BUCKET_BYTES, min(limit, LARGEST_BYTES))
            plans.append(self.as_plan(self.default_groups(range(len(self)), most), "bytes"))
        return list({plan.buckets: plan for plan in plans}.values())

    def plan_groups(self, plan: Plan, indices: Sequence[int]) -> list[list[int]]:
        """Return the plan in terms of indices."""
        index = {self.names[i]: i for i in indices}
        unknown = [name for name in plan.names if name not in index]
        absent = [name for name in index if name not in set(plan.names)]
        if unknown or absent:
            flaw = f"names {unknown[0]!r}, no gradient" if unknown else f"lacks {absent[0]!r}, one"
            raise ValueError(
                f"the plan {flaw} that is sent here ({len(plan.names)} names in the plan, "
                f"{len(index)} gradients): make a new one with plan='auto', or give the names "
                "that it was made with (in torch, named_parameters=model.named_parameters())."
            )
        groups = [[index[name] for name in bucket] for bucket in plan.buckets]
        for bucket, group in zip(plan.buckets, groups, strict=True):
            if len(self.dtype_groups(group)) > 1:
                raise ValueError(
                    f"the plan's bucket {bucket[0]!r} .. {bucket[-1]!r} mixes dtypes or devices: "
                    "split it so that each bucket has one of each."
                )
        return groups

    def as_plan(self, groups: Groups, method: str) -> Plan:
        """Return groups of indices as a plan of names."""
        return Plan(tuple(tuple(self.names[i] for i in group) for group in groups), method)

    def first_plan(
        self, strategy: MergedGradient, given: Groups | None, indices: Sequence[int]
    ) -> Plan:
        """Return the plan that needs no measurement."""
        if given is not None:
            return self.as_plan(given, "given")
        if strategy.plan in ("wfbp", "single"):
            limit = 1 if strategy.plan == "wfbp" else None
            return self.as_plan(self.default_groups(indices, limit), str(strategy.plan))
        limit = strategy.bucket_bytes or DEFAULT_BUCKET_BYTES
        return self.as_plan(self.default_groups(indices, limit), "bytes")

    def best_plan(
        self,
        indices: Sequence[int],
        ready: npt.NDArray[np.float64],
        wire_bytes: npt.NDArray[np.float64],
        comm: CommModel,
        method: str,
        bucket_bytes: int | None = None,
    ) -> Plan:
        """Plan all gradients together; only those of one dtype group may share a bucket."""
        order = sorted(indices, key=lambda index: (float(ready[index]), -index))
        return plan_dtype_groups(
            [self.names[index] for index in order],
            ready[order],
            wire_bytes[order],
            [self.kinds[index] for index in order],
            comm,
            method=method,
            bucket_bytes=bucket_bytes,
        )


def measured_method(strategy: MergedGradient, given: Groups | None) -> str | None:
    """Return how plans are made from measured times; None where the plan is fixed.

    >>> measured_method(MergedGradient(plan="greedy"), None)
    'greedy'
    >>> measured_method(MergedGradient(plan="wfbp"), None) is None
    True
    """
    if given is not None:
        return None
    if strategy.bucket_bytes is not None:
        return "bytes"
    return {"auto": "exact", "greedy": "greedy"}.get(str(strategy.plan))
