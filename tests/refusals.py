"""Wrong arguments that both frameworks refuse alike: the arguments, the error, its words.

What strategies say of their options is in ``tests/single/test_strategy.py``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hvd_pipe.planning.plan import Plan
from hvd_pipe.strategy import MergedGradient, PipeSGD

MERGED, PIPE, COCOD = "merged-gradient", "pipe-sgd", "cocod:period=3"
COMPRESSION = "compression must be hvd.Compression.none, .fp16, .bf16, .int8"
PASSES = "backward_passes_per_step must be an int >= 1"
GROUPS = "groups must be"
NO_GRADIENTS = "use {}, or strategy='merged-gradient' or 'pipe-sgd'"
STRATEGY = "strategy must be a string or one of"
ONE = "both say what to merge: give one of them"

Refusal = tuple[dict[str, Any], type[Exception], str]


def refusals(hvd: Any) -> list[Refusal]:
    """The rows, in terms of a framework's module."""

    def each(
        name: str, kind: type[Exception], words: str, *wrong: object, **more: Any
    ) -> list[Refusal]:
        return [({name: value, **more}, kind, words) for value in wrong]

    return [
        *each("compression", TypeError, COMPRESSION, "fp16", None, 8, hvd.Compression),
        *each("compression", TypeError, "is the class Int8: write hvd.Int8()", hvd.Int8),
        *each("op", ValueError, "op must be hvd.Average", "sum", None, 99, []),
        *each("backward_passes_per_step", ValueError, PASSES, 0, -1, 1.5, True, "2", None),
        *each(
            "gradient_predivide_factor",
            ValueError,
            "must be > 0 and needs op=hvd.Average",
            *(0, -1, float("nan"), float("inf")),
        ),
        *each("gradient_predivide_factor", TypeError, "must be a number", "2", True, None),
        *each("groups", ValueError, GROUPS, 0.5, 0, -1, ["w"], "two", True, (2,)),
        *each("sparse_as_dense", TypeError, "must be True or False", "yes", 1, None),
        *each("process_set", TypeError, "hvd.ProcessSet", None, 0, [0]),
        *each("process_set", ValueError, "hvd.add_process_set(...) on every", hvd.ProcessSet([0])),
        *each("strategy", ValueError, "did you mean 'pipe-sgd'?", "pipesgd"),
        *each("strategy", ValueError, "period must be >= 1", "cocod:period=0"),
        *each("strategy", TypeError, STRATEGY, PipeSGD, 17),
        *each(
            "strategy",
            FileNotFoundError,
            "optimizer.plan.save",
            MergedGradient(Path()),
            "merged-gradient:plan=./nowhere.json",
        ),
        # What does not go together.
        *each("gradient_predivide_factor", ValueError, "needs op=hvd.Average", 2.0, op=hvd.Sum),
        *each(
            "strategy",
            ValueError,
            ONE,
            "merged-gradient:plan=wfbp",
            "merged-gradient:bucket_bytes=64",
            "pipe-sgd:bucket_bytes=64",
            groups=2,
        ),
        *each("op", ValueError, NO_GRADIENTS.format("op=hvd.Average"), hvd.Sum, strategy=COCOD),
        *each(
            "gradient_predivide_factor",
            ValueError,
            NO_GRADIENTS.format("1.0"),
            2.0,
            strategy=COCOD,
        ),
        *each("groups", ValueError, NO_GRADIENTS.format("groups=None"), 2, strategy=COCOD),
        *each("strategy", ValueError, "give one weight a rank", "cocod:weights=3/1/2"),
    ]


OTHER_PLAN = MergedGradient(Plan((("nobody/kernel",),), "given"))


def id_of(value: Any) -> str:
    """Name a case by its arguments, without the addresses of objects, which differ by run."""
    if not isinstance(value, dict):
        return ""
    return ", ".join(f"{k}={re.sub(' at 0x[0-9a-f]+', '', repr(v))}" for k, v in value.items())
