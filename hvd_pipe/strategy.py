"""Which published method moves the gradients: one small validated object, or its name as a string.

=================  ==================================================  ==================
class              what it does                                        string
=================  ==================================================  ==================
`MergedGradient`   exact synchronous SGD in merged messages (MG-WFBP)  "merged-gradient"
`PipeSGD`          applies last step's average, sent behind this step  "pipe-sgd"
`CoCoD`            averages models behind ``period`` local steps       "cocod"
`Auto`             measures, then goes on with the fastest of these    "auto"
=================  ==================================================  ==================

Options follow a colon: ``"cocod:period=8,warmup_steps=100"``. The environment variable
``HVD_PIPE_STRATEGY`` holds such a string for scripts that pass no strategy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, get_args

from hvd_pipe.cocod import CoCoD
from hvd_pipe.errors import is_number, nearest, require_int, require_one_of
from hvd_pipe.planning.plan import Plan

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "Auto",
    "CoCoD",
    "MergedGradient",
    "Method",
    "PipeSGD",
    "Strategy",
    "parse",
]

ENVIRONMENT_VARIABLE = "HVD_PIPE_STRATEGY"

_PLANS = ("auto", "greedy", "wfbp", "single")
_PREDICTIONS = ("none", "local", "previous")
_OVERLAPS = ("auto", "backward", "forward")
_NUMBERS = ("pull_back", "anchor_momentum", "outer_lr", "outer_momentum")


@dataclass(frozen=True)
class MergedGradient:
    """Exact synchronous SGD; gradients travel in the groups that finish first.

    ``w[t+1] = w[t] - lr * mean_i g_i(w[t])``, as stock Horovod computes it. What changes is which
    gradients share a message: after some measured steps, the grouping with the earliest finish.

    Args:
        plan: ``"auto"`` measures, then takes the exact optimum; ``"greedy"`` takes the paper's
            rule instead; ``"wfbp"`` sends one message a tensor; ``"single"`` one message in all; a
            `Plan` or the path of a saved one is used as it is.
        bucket_bytes: Fill buckets up to this many bytes instead of planning.
        overlap: ``"backward"``: all gradients have arrived when ``step()`` returns. ``"forward"``
            (PyTorch, Keras' ``fit``): they travel behind the next forward pass, until layers run.
            ``"auto"``: where torch carries the messages, steps are timed with and without that,
            unless a plan is given, and the faster way stays; elsewhere as ``"backward"``. A plan
            that has an order is ``"forward"``'s.

    Raises:
        TypeError, ValueError: An argument of the wrong kind or range, or both given.

    Example:
        >>> MergedGradient(plan="wfbp")
        MergedGradient(plan='wfbp', bucket_bytes=None, overlap='auto')

    Source: Shi, Chu, Li, "MG-WFBP" (INFOCOM 2019, TPDS 2021); for ``overlap="forward"``,
    Jayarajan et al., "Priority-based Parameter Propagation" (MLSys 2019, arXiv 1905.03960).
    """

    name: ClassVar[str] = "merged-gradient"
    plan: str | Path | Plan = "auto"
    bucket_bytes: int | None = None
    overlap: str = "auto"

    def __post_init__(self) -> None:
        require_one_of(self, "overlap", _OVERLAPS)
        if not isinstance(self.plan, (str, Path, Plan)):
            raise TypeError(
                f"MergedGradient: plan must be one of {', '.join(map(repr, _PLANS))}, a Plan or "
                f"the path of a saved plan, got {self.plan!r}."
            )
        if self.bucket_bytes is not None:
            require_int(self, "bucket_bytes", 1)
            if self.plan != "auto":
                raise ValueError(
                    f"MergedGradient: plan={self.plan!r} and bucket_bytes={self.bucket_bytes} "
                    "contradict each other: give one of them."
                )
        if isinstance(self.plan, str) and not (
            self.plan in _PLANS or self.plan.endswith(".json") or os.sep in self.plan
        ):
            raise ValueError(
                f"MergedGradient: unknown plan {self.plan!r}{nearest(self.plan, _PLANS)}: use "
                f"one of {', '.join(map(repr, _PLANS))}, a Plan, or a saved plan's path (*.json)."
            )

    @property
    def overlaps_forward(self) -> bool:
        """Whether messages shall travel behind the next forward pass."""
        return self.overlap == "forward"

    @property
    def plans(self) -> bool:
        """Whether the plan comes from measured times alone."""
        return self.plan == "auto" and self.bucket_bytes is None

    def load_plan(self) -> Plan | None:
        """Return the plan that was given (read from its file), None when one is to be made."""
        if isinstance(self.plan, Plan):
            return self.plan
        if self.plan in _PLANS:
            return None
        if not Path(self.plan).is_file():
            raise FileNotFoundError(
                f"no plan at {str(self.plan)!r}: every host needs the file that "
                "optimizer.plan.save(path) wrote on one rank."
            )
        return Plan.load(self.plan)


@dataclass(frozen=True)
class PipeSGD:
    """Apply the averaged gradient of the step before; this step's average travels meanwhile.

    ``w[t+1] = w[t] - lr * mean_i g_i(w[t-1])``: staleness is exactly 1 on every worker, so
    replicas stay identical. With momentum mu it is stable only while ``lr * curvature < 1 - mu``
    (synchronous SGD: ``< 2 (1 + mu)``). With prediction, gradients are computed where the update
    that is still missing is expected to lead: ``"local"`` is stable up to 1 whatever the momentum
    (on several workers), ``"previous"`` up to 0.5 at mu = 0.9, and 0.618 at 0, less than without.

    Args:
        warmup_steps: Synchronous steps before the pipeline starts.
        bucket_bytes: Fill buckets up to this many bytes. None: 8 MiB, and PyTorch tries more.
        prediction: The guess of the missing gradient: ``"none"``, this rank's own (``"local"``),
            or the last average (``"previous"``). Costs a copy of the model and a second update a
            step; evaluate after ``synchronize()``, which puts the true weights back.

    Raises:
        TypeError, ValueError: An argument of the wrong kind or range.

    Example:
        >>> parse("pipe-sgd:warmup_steps=100")
        PipeSGD(warmup_steps=100, bucket_bytes=None, prediction='none')

    Source: Li et al., "Pipe-SGD" (NeurIPS 2018); Chen et al., "SAPipe" (NeurIPS 2022).
    """

    name: ClassVar[str] = "pipe-sgd"
    warmup_steps: int = 0
    bucket_bytes: int | None = None
    prediction: str = "none"

    def __post_init__(self) -> None:
        require_int(self, "warmup_steps", 0)
        if self.bucket_bytes is not None:
            require_int(self, "bucket_bytes", 1)
        require_one_of(self, "prediction", _PREDICTIONS)


Method = MergedGradient | PipeSGD | CoCoD

_ALLOWED = (MergedGradient.name, "merged-gradient:overlap=forward", PipeSGD.name, CoCoD.name)


@dataclass(frozen=True)
class Auto:
    """Measure the first steps, predict each allowed method's speed, go on with the fastest.

    The measured steps are synchronous, as under ``merged-gradient``. Then the first rank compares
    ``max(c, m)`` of Pipe-SGD, ``max(k c, m) / k`` of CoCoD and the planned finish of
    merged-gradient (c: a worker's own work a step, m: its messages), and all ranks change over at
    the same step. Without names it allows merged-gradient alone, and changes nothing unasked.

    Args:
        allow: Names of the methods to choose from; in a string, ``allow=pipe-sgd/cocod``. One
            that changes what is computed must be 5% faster to be chosen, and so must
            ``merged-gradient:overlap=forward`` (PyTorch), which asks more of a script. CoCoD's
            period is the shortest that hides the average.
        steps: Steps that are measured, after 3 that are not.

    Raises:
        TypeError, ValueError: An argument of the wrong kind or range.

    Example:
        >>> parse("auto:allow=merged-gradient/pipe-sgd")
        Auto(allow=('merged-gradient', 'pipe-sgd'), steps=10)
    """

    name: ClassVar[str] = "auto"
    allow: tuple[str, ...] = (MergedGradient.name,)
    steps: int = 10

    def __post_init__(self) -> None:
        if not isinstance(self.allow, tuple) or not all(isinstance(n, str) for n in self.allow):
            raise TypeError(
                "Auto: allow must be a tuple of names, such as ('merged-gradient', 'pipe-sgd') or "
                f"'merged-gradient/pipe-sgd' in a string, got {self.allow!r}."
            )
        if not self.allow or len(set(self.allow)) < len(self.allow):
            raise ValueError(
                f"Auto: allow must name each method to choose from, once, got {self.allow!r}."
            )
        for allowed in self.allow:
            if allowed not in _ALLOWED:
                raise ValueError(
                    f"Auto: allow has {allowed!r}, no method{nearest(allowed, _ALLOWED)}: use "
                    f"some of {', '.join(map(repr, _ALLOWED))}, without other options."
                )
        require_int(self, "steps", 1)


Strategy = Method | Auto

_STRATEGIES: dict[str, type[Strategy]] = {cls.name: cls for cls in get_args(Strategy)}


def parse(strategy: str | Strategy | None = None) -> Strategy:
    """Return the strategy that a string, a strategy or (for None) the environment names.

    Args:
        strategy: A strategy (returned as it is), a string like ``"cocod:period=8"``, or None for
            ``HVD_PIPE_STRATEGY``, which defaults to ``"merged-gradient"``.

    Raises:
        TypeError, ValueError: An unknown name or option; the message lists what there is.

    Example:
        >>> parse("merged-gradient:bucket_bytes=1048576").bucket_bytes
        1048576
    """
    if isinstance(strategy, Strategy):
        return strategy
    if strategy is None:
        text, source = os.environ.get(ENVIRONMENT_VARIABLE, ""), f"{ENVIRONMENT_VARIABLE}="
        text = text.strip() or MergedGradient.name
    elif isinstance(strategy, str):
        text, source = strategy.strip(), "strategy="
    else:
        raise TypeError(
            "strategy must be a string or one of "
            f"{', '.join(cls.__name__ for cls in _STRATEGIES.values())}, got {strategy!r}"
            f"{': make one, with ()' if isinstance(strategy, type) else ''}."
        )
    name, _, tail = text.partition(":")
    cls = _STRATEGIES.get(name.strip().lower().replace("_", "-"))
    if cls is None:
        raise ValueError(
            f"{source}{text!r}: unknown strategy{nearest(name, _STRATEGIES)}: use one of "
            f"{', '.join(map(repr, _STRATEGIES))}."
        )
    options = parse_options(cls, f"{source}{text!r}", tail, _value)
    try:
        return cls(**options)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise type(error)(f"{source}{text!r}: {error}") from None


def parse_options(
    cls: type[Any], text: str, tail: str, value: Callable[[str, str], object]
) -> dict[str, object]:
    """Return the options behind a method's colon, by the names of its fields.

    Args:
        cls: The method's dataclass. A field's metadata may have the ``option`` that it is written
            as, in place of its name.
        text: The whole string, for errors.
        tail: Options, separated by commas.
        value: Makes a field's value of its name and its text.
    """
    names = {field.metadata.get("option", field.name): field.name for field in fields(cls)}
    options: dict[str, object] = {}
    for part in filter(None, (part.strip() for part in tail.split(","))):
        key, equals, written = (piece.strip() for piece in part.partition("="))
        if key in names and not equals:
            raise ValueError(f"{text}: {key!r} has no value: write OPTION=VALUE.")
        if key not in names or names[key] in options:
            raise ValueError(
                f"{text}: {part!r} is not an option of {cls.name}{nearest(key, names)}: write "
                "OPTION=VALUE, once each, with OPTION one of "
                f"{', '.join(names) or '(it has none)'}."
            )
        options[names[key]] = value(names[key], written)
    return options


def _value(key: str, text: str) -> object:
    """Return an option's value; what is no number stays a string, which its class refuses.

    >>> _value("period", "8"), _value("pull_back", "0.6"), _value("weights", "3/1")
    (8, 0.6, (3, 1))
    >>> _value("allow", "merged-gradient:overlap=forward/pipe_sgd")
    ('merged-gradient:overlap=forward', 'pipe-sgd')
    """
    if key == "allow":
        return tuple(part.strip().lower().replace("_", "-") for part in text.split("/"))
    if key == "weights":
        parts = tuple(_number(part.strip()) for part in text.split("/"))
        return parts if all(map(is_number, parts)) else text
    return _number(text) if key in _NUMBERS or text.lstrip("-").isdigit() else text


def _number(text: str) -> float | str:
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return text
