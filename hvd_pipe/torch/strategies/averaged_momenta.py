"""The tensors of the user's optimizer that follow the models, under ``momentum="average"``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from hvd_pipe.torch.agree import gather
from hvd_pipe.torch.strategies.settings import Settings

if TYPE_CHECKING:
    from hvd_pipe.torch.strategies.model_average import ModelAverage, Tensors, Values

__all__ = ["PREFIX", "AveragedMomenta"]

PREFIX = "momenta."
"""Begins the names of their tensors in a checkpoint."""


class MakeAverage(Protocol):
    """Makes the average of some momenta, uncompressed."""

    def __call__(
        self, like: Sequence[torch.Tensor], values: Values, name: str, nonnegative: Sequence[bool]
    ) -> ModelAverage:
        """Make it; arguments as those of `ModelAverage`."""


class AveragedMomenta:
    """The tensors in the optimizer's state that are averaged as the parameters are.

    Which there are shows only as training goes on, and differs where a parameter has had no
    gradient on some rank. Ranks agree on them as training starts and after the first round, when
    they usually come up; later a rank that has others says so by a control flag of its model, and
    all agree at the end of that round. A rank that lacks one contributes zeros.

    They travel uncompressed: float16 would make zeros of Adam's second moments.
    """

    def __init__(self, settings: Settings, make_average: MakeAverage) -> None:
        self._settings, self._make_average = settings, make_average
        self._keys: list[tuple[int, str]] = []
        self._keys_of: list[list[tuple[int, str]]] = []
        self.averages: list[ModelAverage] = []
        self.unsettled = _UNSETTLED
        """How many more rounds start with an agreement."""

    def settle(self) -> None:
        """Agree with the other ranks, if that is due."""
        if self.unsettled:
            self.unsettled -= 1
            self.agree()

    def settle_anew(self) -> None:
        """Be as at the start of training."""
        self.unsettled = _UNSETTLED

    def has_news(self) -> bool:
        """Return whether this rank has tensors that the others do not know of."""
        return not set(self._own()) <= set(self._keys)

    def heard(self, news: torch.Tensor) -> None:
        """Take the control flag of all ranks."""
        if float(news):
            self.unsettled = max(self.unsettled, 1)

    def agree(self) -> None:
        """Take what any rank has."""
        everyone, tag = [self._own()], f"{self._settings.tag}.momenta.keys"
        reduction = self._settings.reduction
        if not reduction.alone:
            everyone = gather(everyone[0], tag, reduction.process_set)
        self._adopt(sorted({(index, key) for keys in everyone for index, key in keys}))

    def state(self) -> Tensors:
        """Return what is in flight, when it has arrived, by index."""
        tensors: Tensors = {}
        for keys, average in zip(self._keys_of, self.averages, strict=True):
            for label, values in average.state().items():
                for (index, key), value in zip(keys, values, strict=True):
                    nobody: list[torch.Tensor | None] = [None] * len(self._settings.parameters)
                    tensors.setdefault(f"{PREFIX}{label}.{key}", nobody)[index] = value
        return tensors

    def load(self, tensors: Tensors, unsettled: int | None) -> None:
        """Go on from a `state`, which may have other entries as well."""
        self.unsettled = _UNSETTLED if unsettled is None else unsettled
        found: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
        for name, values in tensors.items():
            if name.startswith(PREFIX):
                label, key = name.removeprefix(PREFIX).split(".", 1)
                here = {(index, key): v for index, v in enumerate(values) if v is not None}
                found.setdefault(label, {}).update(here)
        self._adopt(sorted({key for one in found.values() for key in one}))
        for keys, average in zip(self._keys_of, self.averages, strict=True):
            average.load({label: [one[key] for key in keys] for label, one in found.items()})

    def _own(self) -> list[tuple[int, str]]:
        return [
            (index, key)
            for index, parameter in enumerate(self._settings.parameters)
            for key in self._settings.owner.state(parameter)
            if self._tensor(index, key) is not None
        ]

    def _tensor(self, index: int, key: str) -> torch.Tensor | None:
        parameter = self._settings.parameters[index]
        value = self._settings.owner.state(parameter).get(key)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return None
        return value if value.shape == parameter.shape and key not in _SCALARS else None

    def _adopt(self, keys: list[tuple[int, str]]) -> None:
        if keys == self._keys:
            return
        for average in self.averages:
            average.discard()
        parameters = self._settings.parameters
        self._keys = keys
        groups = self._settings.index.dtype_groups(list(dict.fromkeys(i for i, _ in keys)))
        self._keys_of = [[key for key in keys if key[0] in group] for group in map(set, groups)]
        self.averages = [
            self._make_average(
                [parameters[index] for index, _ in same],
                partial(self._tensors, same),
                f"{self._settings.tag}.momenta.{i}",
                [key in _NONNEGATIVE for _, key in same],
            )
            for i, same in enumerate(self._keys_of)
        ]

    def _tensors(self, keys: Sequence[tuple[int, str]]) -> list[torch.Tensor | None]:
        return [self._tensor(index, key) for index, key in keys]


_UNSETTLED = 2

# Numbers that torch's optimizers keep as tensors: not momenta even where a parameter is one, too.
_SCALARS = frozenset({"eta", "mu", "mu_product", "step"})

# What torch's optimizers take a root of, or bound steps with.
_NONNEGATIVE = frozenset({"acc_delta", "exp_avg_sq", "exp_inf", "max_exp_avg_sq"})
_NONNEGATIVE |= {"square_avg", "step_size", "sum", "variance"}
