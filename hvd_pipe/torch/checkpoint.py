"""What a checkpoint holds of an engine: the value under ``state_dict()["hvd_pipe"]``.

Tensors are listed by the parameter's number in ``param_groups``, as torch lists its own state.
Labels that begin with `OWN` belong to one rank: what its codec has left over.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from hvd_pipe.torch.strategies.engine import Engine, State

__all__ = ["KEY", "Saved", "check", "load", "save", "shared"]

KEY = "hvd_pipe"
VERSION = 1
OWN = "own."

Saved = dict[str, Any]


def save(engine: Engine, owned: Sequence[torch.Tensor]) -> Saved:
    """Return what the engine has in flight.

    Args:
        engine: Of the optimizer that is saved.
        owned: All parameters of the optimizer, in the order of its groups.
    """
    state, numbers = engine.state(), _numbers(engine, owned)
    return {
        "version": VERSION,
        "strategy": engine.name,
        "workers": engine.reduction.workers,
        "rank": _rank(engine),
        "counters": state.counters,
        "tensors": {
            label: {
                number: tensor
                for number, tensor in zip(numbers, tensors, strict=True)
                if tensor is not None
            }
            for label, tensors in state.tensors.items()
        },
    }


def shared(saved: Saved) -> Saved:
    """Return what `save` has returned, without what belongs to one rank alone."""
    tensors = saved.get("tensors", {})
    kept = {label: found for label, found in tensors.items() if not label.startswith(OWN)}
    return {**saved, "tensors": kept}


def check(saved: Any) -> Saved | None:
    """Return what a state dict has under `KEY`, if `load` can read it.

    Raises:
        ValueError: It cannot.
    """
    kinds = {"strategy": str, "workers": int, "rank": int, "counters": dict, "tensors": dict}
    if saved is None or (isinstance(saved, dict) and saved.get("version") not in (None, VERSION)):
        return saved  # `load` says what it does about another version
    if not isinstance(saved, dict) or not all(
        isinstance(saved.get(key), kind) for key, kind in kinds.items()
    ):
        raise ValueError(
            f"the state dict's {KEY!r} is not what optimizer.state_dict() puts there: delete "
            f"state_dict[{KEY!r}] to start with nothing in flight."
        )
    return saved


def load(engine: Engine, saved: Saved | None, owned: Sequence[torch.Tensor]) -> None:
    """Let the engine go on from what `save` returned; nothing is in flight.

    Another number of workers is fine: averages stay averages; a plan, which was made for the
    other number, and what a codec had left over on another rank are not taken.
    """
    if saved is None:
        if engine.keeps:
            _warn(f"holds nothing in flight: {engine.name} starts with nothing in flight.")
        return
    if saved.get("version") != VERSION:
        _warn(f"is of version {saved.get('version')}, not {VERSION}: nothing in flight is taken.")
        return
    if saved["strategy"] != engine.name:
        if any(saved["tensors"].values()):
            _warn(
                f"was saved under {saved['strategy']!r}, and {engine.name!r} cannot go on with "
                f"what is in flight ({', '.join(saved['tensors'])}): call optimizer.synchronize() "
                "before saving."
            )
        return
    alike = saved["workers"] == engine.reduction.workers
    mine = alike and saved["rank"] == _rank(engine)
    counters = {key: value for key, value in saved["counters"].items() if alike or key != "plan"}
    tensors = {
        label: [found.get(number) for number in _numbers(engine, owned)]
        for label, found in saved["tensors"].items()
        if mine or not label.startswith(OWN)
    }
    engine.load(State(counters, tensors))
    engine.held = {
        label: {id(p): found[i] for i, p in enumerate(owned) if i in found}
        for label, found in saved["tensors"].items()
        if label in tensors
    }


def _numbers(engine: Engine, owned: Sequence[torch.Tensor]) -> list[int]:
    number = {id(parameter): i for i, parameter in enumerate(owned)}
    return [number[id(parameter)] for parameter in engine.settings.parameters]


def _rank(engine: Engine) -> int:
    process_set = engine.reduction.process_set
    return int(process_set.rank()) if process_set.included() else -1


def _warn(what: str) -> None:
    warnings.warn(f"the optimizer state that was loaded {what}", stacklevel=4)
