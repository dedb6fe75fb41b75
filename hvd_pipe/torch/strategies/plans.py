"""Plans in terms of places: without a measurement, and from names."""

from __future__ import annotations

from hvd_pipe.planning import merge
from hvd_pipe.planning.plan import Plan
from hvd_pipe.torch.strategies.engine import Settings, kinds

__all__ = ["default_groups", "plan_groups"]


def default_groups(
    settings: Settings, bucket_bytes: int | None, first: int = 0
) -> list[list[int]]:
    """Fill buckets in reverse order of registration, about the order in which backward goes.

    Args:
        settings: The parameters.
        bucket_bytes: Size of a bucket at most; 1 for one tensor a bucket, None for one bucket.
        first: The first place that counts; places before it are left out.
    """
    groups: list[list[int]] = []
    for places in kinds(settings.parameters[first:]):
        order = [first + place for place in reversed(places)]
        sizes = [settings.nbytes(place) for place in order]
        start = 0
        for count in merge.by_bytes(sizes, bucket_bytes or sum(sizes)).tolist():
            groups.append(order[start : start + count])
            start += count
    return groups


def plan_groups(plan: Plan, settings: Settings) -> list[list[int]]:
    """Return the plan in terms of places.

    Raises:
        ValueError: The plan is not about these parameters, or mixes dtypes in one bucket.
    """
    place = {name: i for i, name in enumerate(settings.names)}
    unknown = [name for name in plan.names if name not in place]
    absent = [name for name in place if name not in set(plan.names)]
    if unknown or absent:
        what = f"names {unknown[0]!r}, no parameter" if unknown else f"lacks {absent[0]!r}, one"
        raise ValueError(
            f"the plan {what} of this optimizer's ({len(plan.names)} names in the plan, "
            f"{len(place)} trainable parameters): make a new one with plan='auto', or pass "
            "named_parameters=model.named_parameters() as when it was made."
        )
    groups = [[place[name] for name in bucket] for bucket in plan.buckets]
    for bucket, group in zip(plan.buckets, groups, strict=True):
        if len(kinds([settings.parameters[i] for i in group])) > 1:
            raise ValueError(
                f"the plan's bucket {bucket[0]!r} .. {bucket[-1]!r} mixes dtypes or devices: "
                "split it so that each bucket has one of each."
            )
    return groups
