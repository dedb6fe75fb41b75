"""Two values of every argument and field, one for each of two ranks, in both frameworks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from hvd_pipe.strategy import Auto, CoCoD, MergedGradient, PipeSGD

STRATEGIES: dict[str, tuple[Any, Any]] = {
    "MergedGradient.plan": (MergedGradient("wfbp"), MergedGradient("single")),
    "MergedGradient.bucket_bytes": tuple(MergedGradient(bucket_bytes=n) for n in (64, 128)),
    "MergedGradient.overlap": (MergedGradient(), MergedGradient(overlap="forward")),
    "PipeSGD.warmup_steps": tuple(PipeSGD(warmup_steps=n) for n in (3, 5)),
    "PipeSGD.bucket_bytes": tuple(PipeSGD(bucket_bytes=n) for n in (64, 128)),
    "PipeSGD.prediction": tuple(PipeSGD(prediction=guess) for guess in ("local", "previous")),
    "CoCoD.period": tuple(CoCoD(period=n) for n in (2, 4)),
    "CoCoD.warmup_steps": tuple(CoCoD(warmup_steps=n) for n in (1, 2)),
    "CoCoD.weights": tuple(CoCoD(weights=weights) for weights in ((3, 1), (1, 3))),
    "CoCoD.momentum": tuple(CoCoD(momentum=rule) for rule in ("local", "average")),
    "CoCoD.pull_back": tuple(CoCoD(pull_back=alpha) for alpha in (0.5, 0.6)),
    "CoCoD.anchor_momentum": tuple(
        CoCoD(pull_back=0.5, anchor_momentum=beta) for beta in (0.1, 0.2)
    ),
    "CoCoD.outer": tuple(CoCoD(outer=rule) for rule in ("none", "nesterov")),
    "CoCoD.outer_lr": tuple(CoCoD(outer="nesterov", outer_lr=rate) for rate in (0.5, 0.6)),
    "CoCoD.outer_momentum": tuple(CoCoD(outer="nesterov", outer_momentum=mu) for mu in (0.5, 0.6)),
    "CoCoD.fragments": tuple(CoCoD(fragments=n) for n in (2, 4)),
    "CoCoD.within": tuple(CoCoD(within=group) for group in ("none", "node")),
    "Auto.allow": tuple(Auto(("merged-gradient", *more)) for more in ((), ("pipe-sgd",))),
    "Auto.steps": tuple(Auto(steps=n) for n in (9, 10)),
}


class Differing(NamedTuple):
    """What ranks 0 and 1 pass, and what each of them has according to the message."""

    values: tuple[Mapping[str, Any], Mapping[str, Any]]
    shown: tuple[str, str]


def common(hvd: Any) -> dict[str, Differing]:
    """Return what both frameworks have: arguments, fields of strategies and of codecs."""
    codecs = {
        "Int8.chunk": (hvd.Int8(), hvd.Int8(chunk=128)),
        "Int8.error_feedback": (hvd.Int8(), hvd.Int8(error_feedback=True)),
        "BF16.error_feedback": (hvd.BF16(), hvd.BF16(error_feedback=True)),
    }
    rows = {
        **{key: fields("compression", key, *both) for key, both in codecs.items()},
        **{key: fields("strategy", key, *both) for key, both in STRATEGIES.items()},
    }
    return rows | {
        "strategy": argument("strategy", "merged-gradient", "pipe-sgd", "MergedGrad", "PipeSGD"),
        "compression": argument(
            "compression", hvd.Compression.fp16, hvd.Compression.none, "FP16Compressor", "NoneComp"
        ),
        "op": argument("op", hvd.Average, hvd.Sum, "Average", "Sum"),
        "gradient_predivide_factor": argument("gradient_predivide_factor", 2.0, 1.0),
        "backward_passes_per_step": argument("backward_passes_per_step", 1, 2),
        "sparse_as_dense": argument("sparse_as_dense", True, False),
    }


def argument(name: str, one: Any, other: Any, *shown: str) -> Differing:
    """Return a row of two values, which the message shows as they are where nothing is said."""
    first, second = shown or (str(one), str(other))
    return Differing(({name: one}, {name: other}), (f"has {first}", f"has {second}"))


def fields(name: str, key: str, one: Any, other: Any) -> Differing:
    """Return a row of two objects of which one field differs."""
    _, _, field = key.partition(".")
    differ = [each.name for each in dataclasses.fields(one) if _of(one, each) != _of(other, each)]
    assert differ == [field]
    first, second = (f"{field}={getattr(each, field)!r}" for each in (one, other))
    return Differing(({name: one}, {name: other}), (first, second))


def _of(instance: Any, field: dataclasses.Field[Any]) -> Any:
    return getattr(instance, field.name)


def fields_of(*classes: Any) -> set[str]:
    """Return all fields of dataclasses as rows name them."""
    return {f"{cls.__name__}.{each.name}" for cls in classes for each in dataclasses.fields(cls)}


def arguments_in(rows: Iterable[Differing]) -> set[str]:
    """Return the arguments that differ in some row."""
    return {name for row in rows for each in row.values for name in each}


def check(message: str, row: Differing) -> None:
    """Check that a message has both ranks' values, each on its side."""
    _, _, sides = message.partition("rank 0 ")
    ours, _, theirs = sides.partition("rank 1 ")
    assert row.shown[0] in ours, message
    assert row.shown[1] in theirs, message
