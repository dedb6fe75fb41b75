"""What users ask of a pipeline in both frameworks, checked before anything is sent."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_pipe.pipeline.transport import check_transport
from hvd_pipe.planning._checks import check_count
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.schedule import Mode, mode_named
from hvd_pipe.planning.stages import Partition, parse_replicas
from hvd_pipe.runtime.consensus import Description

__all__ = [
    "Options",
    "Request",
    "check_function",
    "check_microbatches",
    "check_positive",
    "read_plan",
]


@dataclass(frozen=True)
class Request:
    """What the user asks for.

    Args:
        stages: The stages themselves; None for those that are found.
        replicas: Workers of each stage; None for the best.
    """

    stages: Partition | None = None
    replicas: tuple[int, ...] | None = None

    def __str__(self) -> str:
        if self.stages is not None:
            return self.stages.to_json()
        return "auto" if self.replicas is None else "-".join(map(str, self.replicas))


def read_plan(plan: str | os.PathLike[str] | Partition, workers: int) -> Request:
    """Read ``plan=``: "auto", "straight", "3-1", a partition, or the path of a saved one.

    Raises:
        TypeError, ValueError: It is none of these, or for another number of workers.

    Example:
        >>> read_plan("3-1", 4).replicas
        (3, 1)
        >>> read_plan("straight", 2).replicas
        (1, 1)
    """
    if plan == "auto":
        return Request()
    if not isinstance(plan, str | os.PathLike | Partition):
        raise TypeError(
            f"plan must be 'auto', 'straight', replicas as in '3-1', a Partition, or the path of "
            f"a saved one, got {plan!r}"
        )
    if isinstance(plan, str | os.PathLike):
        text = os.fspath(plan)
        if not (os.sep in text or text.endswith(".json")):
            return Request(replicas=parse_replicas(text, workers))
        plan = Partition.load(Path(text))
    if sum(plan.replicas) != workers:
        raise ValueError(
            f"the plan {plan.config} is for {sum(plan.replicas)} workers, but the job has "
            f"{workers}: start as many, or let plan='auto' find another"
        )
    return Request(stages=plan)


@dataclass
class Options:
    """The arguments that `PipeDream` of both frameworks has, by their names."""

    model: Any
    loss_fn: Callable[[Any, Any], Any]
    optimizer_fn: Callable[..., Any]
    plan: str | os.PathLike[str] | Partition
    mode: str
    microbatches: int | None
    transport: str
    in_transit: int | None
    recompute: bool
    wire_dtype: str | None
    scale_lr: bool
    max_grad_norm: float | None
    metric_fn: Callable[[Any, Any], Any] | None
    profile: ModelProfile | str | os.PathLike[str] | None
    bandwidth: float | None
    memory_bytes: float | None
    progress: bool

    @property
    def chosen_mode(self) -> Mode:
        """What ``mode`` names."""
        return mode_named(self.mode)

    def check(self, workers: int) -> Description:
        """Check them, and return what ranks must have alike."""
        mode = mode_named(self.mode)
        request = read_plan(self.plan, workers)
        for name in ("loss_fn", "optimizer_fn"):
            if not callable(getattr(self, name)):
                raise TypeError(f"{name} must be a function, got {getattr(self, name)!r}")
        check_function("metric_fn", self.metric_fn)
        check_transport(self.transport)
        if self.wire_dtype not in {None, "bfloat16"}:
            raise ValueError(f"wire_dtype must be None or 'bfloat16', got {self.wire_dtype!r}")
        for name in ("max_grad_norm", "bandwidth", "memory_bytes"):
            check_positive(name, getattr(self, name))
        check_microbatches(self.microbatches, mode)
        if self.in_transit is not None:
            check_count("in_transit", self.in_transit, least=0)
        if self.profile is not None and not isinstance(self.profile, ModelProfile):
            self.profile = ModelProfile.read(self.profile)
        names = ("transport", "recompute", "wire_dtype", "scale_lr", "max_grad_norm", "bandwidth")
        shown = [f"{name}={getattr(self, name)}" for name in names]
        shown += [f"{name}={getattr(self, name) is not None}" for name in ("profile", "metric_fn")]
        return [
            ("the mode of the pipeline", self.mode),
            ("the plan of the pipeline", str(request)),
            ("microbatches", str(self.microbatches)),
            ("in_transit", str(self.in_transit)),
            ("the pipeline's options", ", ".join(shown)),
        ]


def check_function(name: str, value: Any) -> None:
    """Check a function that may be left out."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a function or None, got {value!r}")


def check_positive(name: str, value: Any) -> None:
    """Check a number that may be left out.

    Raises:
        TypeError, ValueError: It is none, or not above 0.

    Example:
        >>> check_positive("bandwidth", 1e9)
    """
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number or None, got {value!r}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be finite and above 0, got {value}")


def check_microbatches(count: Any, mode: Mode) -> None:
    """Check into how many microbatches a minibatch is to be cut, where that is said.

    Raises:
        TypeError, ValueError: It is no such number, or the mode has none.

    Example:
        >>> from hvd_pipe.planning.schedule import MODES
        >>> check_microbatches(4, MODES["2bw"])
    """
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"microbatches must be an integer or None, got {count!r}")
    if count < 1:
        raise ValueError(f"microbatches must be at least 1, got {count}")
    if count > 1 and not mode.coalesces:
        raise ValueError(
            f"mode {mode.name!r} updates after every minibatch, so it has no microbatches, got "
            f"{count}: give the loader a smaller batch_size, or take mode='2bw' or 'flush'"
        )
