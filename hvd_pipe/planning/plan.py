"""The plan: which gradients travel together, in which order, as every rank carries it out."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass

from hvd_pipe.planning._checks import Document, read_fields, read_object

__all__ = ["Plan"]

SCHEMA = "hvd_pipe.plan/1"


_WORDS = {
    "buckets": "a list of lists of tensor names",
    "order": "a list of bucket numbers",
    "tried": "a list of pairs, messages and seconds",
    "tried_forward": "a list of pairs, messages and seconds",
}


@dataclass(frozen=True)
class Plan(Document):
    """The buckets of one backward pass.

    Args:
        buckets: names of the tensors of each bucket, in the order in which they are sent.
        method: what made the plan: a method of :func:`hvd_pipe.planning.merge.plan`, or "given".
        predicted_s, exposed_s: finish of the last message, seconds after backward starts, and the
            part of it after the last gradient is ready.
        order: where messages may travel behind the next forward pass, the numbers of the buckets
            in the order of sending; a bucket that stands there k times travels in k pieces. None:
            each bucket in one message, in their order, all of them before the update.
        tried, tried_forward: of plans that were tried in training before this one stayed, how many
            messages each had, and the seconds of its steps; likewise behind the next forward pass.

    Raises:
        ValueError: no buckets, an empty one, a name twice, a negative time, or an order that
            leaves out a bucket.

    Example:
        >>> print(Plan((("fc",), ("conv2", "conv1")), "exact", predicted_s=0.01, exposed_s=0.002))
        exact: 3 tensors in 2 buckets, finished after 10.000 ms, 2.000 ms of it exposed
        bucket  tensors  names
             0        1  fc
             1        2  conv2 .. conv1
    """

    _BINARY = "this is no plan, but binary data"

    buckets: tuple[tuple[str, ...], ...]
    method: str
    predicted_s: float | None = None
    exposed_s: float | None = None
    order: tuple[int, ...] | None = None
    tried: tuple[tuple[int, float], ...] = ()
    tried_forward: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "buckets", tuple(tuple(bucket) for bucket in self.buckets))
        if not self.buckets:
            raise ValueError("a plan needs at least one bucket, got none")
        empty = [number for number, bucket in enumerate(self.buckets) if not bucket]
        if empty:
            raise ValueError(f"buckets must not be empty, but these are: {empty}; leave them out")
        twice = [name for name, count in Counter(self.names).items() if count > 1]
        if twice:
            raise ValueError(f"a tensor travels once, but these are planned twice: {twice}")
        for field in ("predicted_s", "exposed_s"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{field} must be finite and at least 0 seconds, got {value}")
        if self.order is not None:
            object.__setattr__(self, "order", tuple(self.order))
            if set(self.order) != set(range(len(self.buckets))):
                raise ValueError(
                    f"order must have the number of each of the {len(self.buckets)} buckets at "
                    f"least once, and no other, got {list(self.order)}"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors in the order in which they are sent."""
        return tuple(name for bucket in self.buckets for name in bucket)

    def __str__(self) -> str:
        head = f"{self.method}: {len(self.names)} tensors in {len(self.buckets)} buckets"
        if self.predicted_s is not None:
            head += f", finished after {self.predicted_s * 1e3:.3f} ms"
        if self.exposed_s is not None:
            head += f", {self.exposed_s * 1e3:.3f} ms of it exposed"
        lines = [head, "bucket  tensors  names"]
        for number, bucket in enumerate(self.buckets):
            names = bucket[0] if len(bucket) == 1 else f"{bucket[0]} .. {bucket[-1]}"
            lines.append(f"{number:6d}  {len(bucket):7d}  {names}")
        if self.order is not None:
            lines.append(f"sent as {' '.join(map(str, self.order))}, behind the next forward pass")
        for tried, where in ((self.tried, ""), (self.tried_forward, "behind the next forward, ")):
            if tried:
                seen = ", ".join(
                    f"{count} message{'s' * (count != 1)}: {s * 1e3:.1f} ms" for count, s in tried
                )
                lines.append(f"tried in training, {where}a step with {seen}")
        if self.tried_forward and self.order is None:
            lines.append("the barrier stays, as its steps were no slower")
        return "\n".join(lines)

    def to_json(self) -> str:
        data = {"schema": SCHEMA, **asdict(self)}
        if self.order is None:  # as plans were written before there was one
            del data["order"]
        for key in ("tried", "tried_forward"):
            if not data[key]:
                del data[key]
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan in a JSON document; ValueError says what makes it none."""
        keys = {"buckets", "method", "predicted_s", "exposed_s"}
        data = read_object(text, SCHEMA, keys, optional={"order", "tried", "tried_forward"})
        return read_fields(cls, data, _WORDS)
