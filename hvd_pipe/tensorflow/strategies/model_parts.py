"""What CoCoD averages: the model, whole or in fragments, and the optimizer's momenta.

In a state, the vectors of all fragments are numbered one after another, and ``fragments`` has the
fragment of each variable; where that is missing, there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvd_pipe.strategy import CoCoD
from hvd_pipe.tensorflow.agree import Description, checked
from hvd_pipe.tensorflow.arguments import shapes_of
from hvd_pipe.tensorflow.graphs import Arrays
from hvd_pipe.tensorflow.messages.buckets import Packing, Shapes
from hvd_pipe.tensorflow.strategies.base import Settings
from hvd_pipe.tensorflow.strategies.model_average import IN_FLIGHT, KEPT, ModelAverage

__all__ = ["FRAGMENTS", "Part", "as_cut", "model_parts", "momenta_part"]

FRAGMENTS = "fragments"
"""The name in a state of the variables' fragments."""


@dataclass(frozen=True)
class Part:
    """Variables that are averaged together: a fragment of the model, or the momenta.

    Args:
        variables: By index.
        packing: How its own ones lie in flat vectors.
        average: What becomes of these.
        fragment: Whose turn is its turn.
        first: The number of its first vector in a state.
        label: Begins the names of its state.
    """

    variables: Sequence[tf.Variable]
    packing: Packing
    average: ModelAverage
    fragment: int = 0
    first: int = 0
    label: str = ""

    def flats(self) -> list[tf.Tensor]:
        """Read the variables."""
        own = (index for group in self.packing.groups for index in group)
        return self.packing.pack({i: tf.convert_to_tensor(self.variables[i]) for i in own})

    def assign(self, flats: Sequence[tf.Tensor]) -> None:
        """Give the variables what lies in the vectors."""
        for flat, size in zip(flats, self.packing.sizes, strict=True):
            flat.set_shape([size])
        for index, value in self.packing.unpack(flats).items():
            self.variables[index].assign(value)

    def state(self) -> Arrays:
        """Return copies of what the coming rounds need."""
        found = {}
        for name, each in self.average.state().items():
            kind, _, number = name.rpartition(".")
            found[f"{self.label}{kind}.{self.first + int(number)}"] = each
        return found

    def load(self, state: Arrays, in_turn: bool) -> None:
        """Go on from a state of all parts; what is in flight is taken ``in_turn`` only."""
        own = {}
        for name, each in state.items():
            kind, _, text = name.removeprefix(self.label).rpartition(".")
            if not name.startswith(self.label) or not text.isdigit():
                continue
            number = int(text) - self.first
            if number in range(len(self.packing.groups)) and (in_turn or kind not in IN_FLIGHT):
                own[f"{kind}.{number}"] = each
        self.average.load(own)


def model_parts(settings: Settings, strategy: CoCoD, fragment_of: Sequence[int]) -> list[Part]:
    """Return the fragments of a model."""
    shapes = settings.shapes
    parts, first = [], 0
    for fragment, groups in enumerate(_cut(shapes, fragment_of)):
        packing = Packing(shapes, groups)
        tag = f"{settings.tag}.models" + f".{fragment}" * (strategy.fragments > 1)
        average = ModelAverage(settings.reduction, strategy, packing.sizes, tag)
        parts.append(Part(settings.variables, packing, average, fragment, first))
        first += len(groups)
    return parts


def momenta_part(settings: Settings, strategy: CoCoD) -> Part:
    """Return the momenta, which travel uncompressed: float16 makes zeros of second moments.

    They follow the pull-back, but no momentum of an anchor or an outer optimizer, which could
    carry a second moment below zero. Progress can, so that these stop at zero.

    Raises:
        RanksDisagreeError: Ranks have other momenta, as with a momentum of 0 on one of them.
    """

    def check() -> tuple[None, Description]:
        names = ", ".join(each.name for each in settings.momenta)
        return None, [("the optimizer's momenta, which are averaged", names or "none")]

    checked(check, f"{settings.tag}.momenta.names", settings.reduction.process_set)
    variables = [each.variable for each in settings.momenta]
    shapes = shapes_of(variables)
    groups, clamped = [], []
    for nonnegative in (False, True):
        indices = [i for i, m in enumerate(settings.momenta) if m.nonnegative == nonnegative]
        same = shapes.dtype_groups(indices)
        groups += same
        clamped += [nonnegative] * len(same)
    packing = Packing(shapes, groups)
    average = ModelAverage(
        settings.reduction.lossless(),
        CoCoD(weights=strategy.weights, pull_back=strategy.pull_back),
        packing.sizes,
        f"{settings.tag}.momenta",
        clamped,
    )
    return Part(variables, packing, average, label="momenta.")


def as_cut(state: Arrays, fragment_of: Sequence[int], shapes: Shapes) -> Arrays:
    """Return a state as that of a model which is cut into these fragments.

    Of a model in other fragments, all that is kept between two rounds stays, such as anchors: what
    was in flight is dropped, and residuals. Of other variables nothing stays.
    """
    saved_of = [int(each) for each in state.get(FRAGMENTS, [0] * len(shapes))]
    if len(saved_of) != len(shapes):
        return {}
    saved = Packing(shapes, [group for groups in _cut(shapes, saved_of) for group in groups])
    sizes = {f"{kind}.{i}": n for kind in (*IN_FLIGHT, *KEPT) for i, n in enumerate(saved.sizes)}
    if any(
        each.size != sizes.get(name)
        for name, each in state.items()
        if name.startswith(tuple(f"{kind}." for kind in (*IN_FLIGHT, *KEPT)))
    ):
        return {}
    if saved_of == list(fragment_of):
        return state
    groups = [group for groups in _cut(shapes, fragment_of) for group in groups]
    found: Arrays = {}
    for kind in KEPT:
        values: dict[int, npt.NDArray[Any]] = {}
        for i, group in enumerate(saved.groups):
            if f"{kind}.{i}" in state:
                ends = np.cumsum([shapes.numel[index] for index in group])
                pieces = np.split(state[f"{kind}.{i}"], ends[:-1])
                values |= dict(zip(group, pieces, strict=True))
        for i, group in enumerate(groups):
            if values.keys() >= set(group):
                found[f"{kind}.{i}"] = np.concatenate([values[index] for index in group])
    return found


def _cut(shapes: Shapes, fragment_of: Sequence[int]) -> list[list[list[int]]]:
    """Return for each fragment the indices of its variables, by dtype."""
    return [
        shapes.dtype_groups([i for i, own in enumerate(fragment_of) if own == fragment])
        for fragment in range(max(fragment_of, default=0) + 1)
    ]
