"""What a checkpoint holds of an engine: the value under ``state_dict()["hvd_pipe"]``.

Tensors are listed by the parameter's number in ``param_groups``, as torch lists its own state.
Labels that begin with `OWN` belong to one rank: its codec's residuals.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_pipe.torch.strategies.base import Engine
from hvd_pipe.torch.strategies.settings import State

KEY = "hvd_pipe"
VERSION = 1
OWN = "own."
_FIELDS = {"strategy": str, "workers": int, "rank": int, "counters": dict, "tensors": dict}


@dataclass(frozen=True)
class SavedState:
    """What one optimizer has in flight, on one rank."""

    strategy: str = ""
    workers: int = 0
    rank: int = -1  # in the process set; -1 outside of it
    counters: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)  # by label, number
    chosen: str | None = None
    """The method that ``strategy="auto"`` has chosen, spelled."""
    foreign: Mapping[str, Any] | None = None
    """A state of another version, as it is in the file."""

    def to_dict(self) -> dict[str, Any]:
        """Return the form in which a checkpoint holds this."""
        if self.foreign is not None:
            return dict(self.foreign)
        state = {"version": VERSION, **{key: getattr(self, key) for key in _FIELDS}}
        return state if self.chosen is None else {**state, "chosen": self.chosen}

    @classmethod
    def from_dict(cls, saved: Any) -> SavedState | None:
        """Return what a checkpoint holds; None where it holds nothing."""
        if saved is None:
            return None
        if not isinstance(saved, dict):
            raise _not_ours()
        if saved.get("version") not in (None, VERSION):
            return cls(foreign=saved)
        if not all(isinstance(saved.get(key), kind) for key, kind in _FIELDS.items()):
            raise _not_ours()
        if saved.get("version") is None:
            return cls(foreign=saved)
        return cls(**{key: saved[key] for key in _FIELDS}, chosen=saved.get("chosen"))

    def shared(self) -> SavedState:
        """Return the state without the tensors of one rank alone."""
        shared = {k: v for k, v in self.tensors.items() if not k.startswith(OWN)}
        return dataclasses.replace(self, tensors=shared)


def _not_ours() -> ValueError:
    return ValueError(
        f"the state dict's {KEY!r} is not what optimizer.state_dict() puts there: delete "
        f"state_dict[{KEY!r}] to start with nothing in flight."
    )


def save(engine: Engine, owned: Sequence[torch.Tensor], chosen: str | None) -> SavedState:
    """Return what the engine of the optimizer with these parameters has in flight."""
    state, numbers = engine.state(), _numbers(engine, owned)
    tensors = {
        label: {i: tensor for i, tensor in zip(numbers, values, strict=True) if tensor is not None}
        for label, values in state.tensors.items()
    }
    return SavedState(
        engine.name, engine.reduction.workers, _rank(engine), state.counters, tensors, chosen
    )


def load(engine: Engine, saved: SavedState | None, owned: Sequence[torch.Tensor]) -> None:
    """Let the engine go on from a `save`, but not with plans or residuals of other workers."""
    if saved is None:
        if engine.has_state_in_flight:
            _warn(f"holds nothing in flight: {engine.name} starts with nothing in flight.")
        return
    if saved.foreign is not None:
        version = saved.foreign.get("version")
        _warn(f"is of version {version}, not {VERSION}: nothing in flight is taken.")
        return
    if saved.strategy != engine.name:
        if any(saved.tensors.values()):
            _warn(
                f"was saved under {saved.strategy!r}, and {engine.name!r} cannot go on with "
                f"what is in flight ({', '.join(saved.tensors)}): call optimizer.synchronize() "
                "before saving."
            )
        return
    alike = saved.workers == engine.reduction.workers
    if not (alike and saved.rank == _rank(engine)):
        saved = saved.shared()
    counters = {key: value for key, value in saved.counters.items() if alike or key != "plan"}
    tensors = {
        label: [by_number.get(number) for number in _numbers(engine, owned)]
        for label, by_number in saved.tensors.items()
    }
    engine.load(State(counters, tensors))
    engine.held = {
        label: {id(p): by_number[i] for i, p in enumerate(owned) if i in by_number}
        for label, by_number in saved.tensors.items()
    }


def _numbers(engine: Engine, owned: Sequence[torch.Tensor]) -> list[int]:
    number = {id(parameter): i for i, parameter in enumerate(owned)}
    return [number[id(parameter)] for parameter in engine.settings.parameters]


def _rank(engine: Engine) -> int:
    process_set = engine.reduction.process_set
    return int(process_set.rank()) if process_set.included() else -1


def _warn(text: str) -> None:
    warnings.warn(f"the optimizer state that was loaded {text}", stacklevel=5)
