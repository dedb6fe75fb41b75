"""What CoCoD sends: one flat vector of models (or of momenta) a round, and what becomes of it.

    start()    the values x_i as they are are copied and sent         [ x_i ... | present ]
    arrive()   the message holds their mean                           [ mean .. | present ]
    finish()   progress    x_i = mean + (x_i - x_i at the start)      CoCoD-SGD
               outer       x_i = g + (x_i - x_i at the start)         DiLoCo's outer optimizer
               pull-back   x_i = x_i - alpha (x_i - z)                Overlap-Local-SGD

With a codec, all rounds but the first send ``x_i - (last round's mean)``, or, with an outer
optimizer, ``x_i - g``: what is lost then is a part of a small difference, not of the model.

Each rank sets its element of the tail ``present`` to 1 (with equal weights, they share one). A
rank that has left by ``hvd.join()`` sends zeros, which must not count as a model.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import broadcast_

from hvd_pipe.cocod import CoCoD
from hvd_pipe.errors import HvdPipeError
from hvd_pipe.runtime.consensus import members
from hvd_pipe.torch.agree import check_alike, gather, poison
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.messages import pending
from hvd_pipe.torch.messages.allreduce import Message, Reduction
from hvd_pipe.torch.messages.compressed_allreduce import message_for
from hvd_pipe.torch.parameters import ModelFinder
from hvd_pipe.torch.strategies.settings import Settings

Tensors = dict[str, list[torch.Tensor | None]]
"""By name, one tensor a value, or None: see `engine.State`."""

IN_FLIGHT = ("average", "start")
"""The labels in a `state` of what has been sent in a round that is not over."""

_HALF = (torch.float16, torch.bfloat16)


class ModelAverage:
    """Averages ``values`` of one dtype and device behind a round; halves, in float32."""

    def __init__(
        self,
        like: Sequence[torch.Tensor],
        values: Callable[[], Sequence[torch.Tensor | None]],
        reduction: Reduction,
        name: str,
        rule: CoCoD,
        words: int = 0,
        nonnegative: Sequence[bool] = (),
    ) -> None:
        self._like, self._values, self._reduction, self._rule = like, values, reduction, rule
        self._name, self._nonnegative = name, nonnegative
        first, numel = like[0], sum(tensor.numel() for tensor in like)
        dtype = torch.float32 if first.dtype in _HALF else first.dtype
        slots = max(1, len(reduction.weights))
        flat = torch.zeros(numel + slots + words + 1, dtype=dtype, device=first.device)
        self._mean, self._present = flat[:numel], flat[numel : numel + slots]
        self.words, self._meets = flat[numel + slots : -1], flat[-1:]
        """Set before `start`; the mean over all ranks after `complete`."""
        self._weights = flat.new_tensor(reduction.weights or (1.0,))
        codec = reduction.compression is not Compression.none and not reduction.alone
        plain = dataclasses.replace(reduction, compression=Compression.none)
        self._whole = message_for(plain, flat, name, slots + words + 1)
        self._difference: Message | None = None
        if codec:
            difference = f"{name}.difference"
            self._difference = message_for(reduction, flat, difference, slots + words + 1)
        self._sent: Message | None = None
        self.due = False
        """Whether a round is on, which `finish` ends."""
        self._start: torch.Tensor | None = None
        self._base: torch.Tensor | None = None
        self._anchor: torch.Tensor | None = None
        self._velocity: torch.Tensor | None = None
        self._is_left = False
        """Whether the outer model (or anchor) is from before ranks joined after unlike rounds."""

    @property
    def next_message(self) -> Message:
        """What the coming `start` sends."""
        if self._difference is None or (self._base is None and not self.due):
            return self._whole
        return self._difference

    def start(self) -> None:
        """Take a snapshot and send it."""
        if self._is_left:  # the outer model of the last rank was not broadcast
            self.discard()
        message = self.next_message
        self._copy_into(self._mean)
        if self._rule.pull_back is None:
            self._start = _copy(self._mean, self._start)
        if self._base is not None and message is self._difference:
            self._mean.sub_(self._base)
        self.due = True
        self._send(message)

    def complete(self) -> None:
        """Wait for the mean of what all ranks have sent, if that has not been done."""
        if self._sent is None:
            return
        message, self._sent = self._sent, None
        trace, begun = timeline.active, timeline.active.now()
        message.wait()
        trace.waited(begun, self._name)
        if self._reduction.alone:
            return
        size = self._reduction.workers
        if float(self._meets) != 0.0:
            raise HvdPipeError(pending.APART)
        present = (self._present * size).round_()
        total = self._weights.sum() if self._reduction.weights else size
        self._mean.mul_(total / (self._weights * present).sum())  # by 1 where all take part
        if message is self._difference and self._base is not None:
            self._mean.add_(self._base)

    def finish(self) -> None:
        """Give every value the mean and its own progress, by the rule."""
        self.complete()
        self.due = False
        if self._rule.outer != "none":
            self._move_outer()
        if self._difference is not None:
            self._base = _copy(self._mean, self._base)
        if self._rule.pull_back is None:
            assert self._start is not None
            self._add_to_values(self._mean.sub_(self._start))
        else:
            if self._rule.anchor_momentum:
                self._move_outer()
            values, views = self._pairs_in(self._mean)
            torch._foreach_sub_(views, values)
            self._add_to_values(self._mean.mul_(self._rule.pull_back))
        poison(self._mean, self._start)

    def average_now(self) -> None:
        """Make every value the average of all ranks' ones; the anchor moves in the next round."""
        self.complete()
        self.due = False
        self._copy_into(self._mean)
        self._send(self._whole)
        self.complete()
        if self._difference is not None:
            self._base = _copy(self._mean, self._base)
        torch._foreach_copy_(*self._pairs_in(self._mean))
        poison(self._mean, self._start)

    def discard(self, joining: bool = False) -> None:
        """Drop what is in flight and all residuals; if ``joining``, keep outer models."""
        self.complete()
        self.due, self._is_left = False, joining
        self._base = None
        if not joining:
            self._anchor = self._velocity = None
        for residual in self._residuals().values():
            residual.zero_()

    def state(self) -> Tensors:
        """Return copies of what the coming rounds need; waits for what has been sent."""
        self.complete()
        flats = {"base": self._base, **self._residuals()}
        flats |= dict(zip(self._rule.kept, (self._anchor, self._velocity), strict=False))
        if self.due:
            flats |= dict(zip(IN_FLIGHT, (self._mean, self._start), strict=True))
        return {
            label: [view.clone() for view in self._views(flat)]
            for label, flat in flats.items()
            if flat is not None
        }

    def load(self, state: Tensors) -> None:
        """Restore a `state`; a value it lacks starts as it is now, its velocity from zero."""
        self.discard()
        current = torch.empty_like(self._mean)
        self._copy_into(current)

        def flat(label: str) -> torch.Tensor | None:
            if label not in state:
                return None
            at_rest = label.endswith("velocity") or label.startswith("own.")
            whole = torch.zeros_like(current) if at_rest else current.clone()
            for view, tensor in zip(self._views(whole), state[label], strict=True):
                if tensor is not None:
                    view.copy_(tensor)
            return whole

        average, self._start = flat("average"), flat("start")
        self._anchor, self._velocity = map(flat, self._rule.kept or ("", ""))
        # The base of differences must have the same bits on all ranks, which is not known of a
        # value that joins: the next message is whole.
        if self._difference is not None and None not in state.get("base", []):
            self._base = flat("base")
        for label, residual in self._residuals().items():
            saved = flat(label)
            residual.zero_() if saved is None else residual.copy_(saved)
        if self._difference is not None:
            self._difference.drop_foreign_residuals()
        self.due = average is not None and (self._rule.pull_back or self._start) is not None
        if average is not None:
            self._mean.copy_(average)

    def _residuals(self) -> dict[str, torch.Tensor]:
        """Return what the codec has lost so far and adds to the next message: this rank's own."""
        residuals = {} if self._difference is None else self._difference.residuals
        return {label: flat[: self._mean.numel()] for label, flat in residuals.items()}

    def _send(self, message: Message) -> None:
        weights = self._reduction.weights
        self._present.zero_()
        self._meets.zero_()
        slot = self._reduction.process_set.rank() if weights and not self._reduction.alone else 0
        self._present[slot] = 1.0
        self._sent = message
        timeline.active.ready(self._name)
        message.launch()

    def _move_outer(self) -> None:
        """Move the outer model, or the anchor; then ``_mean`` holds it.

        The outer model: ``u = mu u + d, g = g - lr (d + mu u)`` with ``d = g - mean``; the anchor:
        ``v = beta v + (mean - z), z = z + v``.
        """
        if self._anchor is None or self._velocity is None:
            self._anchor, self._velocity = self._mean.clone(), torch.zeros_like(self._mean)
        rule, model, velocity, mean = self._rule, self._anchor, self._velocity, self._mean
        if rule.outer == "none":
            velocity.mul_(rule.anchor_momentum).add_(mean.sub_(model))
            model.add_(velocity)
        else:
            change, momentum = torch.sub(model, mean, out=mean), rule.outer_momentum
            velocity.mul_(momentum).add_(change)
            model.sub_(change.add_(velocity, alpha=momentum), alpha=rule.outer_lr)
        mean.copy_(model)

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = torch.split(flat, [tensor.numel() for tensor in self._like])
        return [part.view(t.size()) for part, t in zip(parts, self._like, strict=True)]

    def _pairs_in(self, flat: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the values that this rank has, and their places in ``flat``."""
        places = zip(self._values(), self._views(flat), strict=True)
        pairs = [(value, view) for value, view in places if value is not None]
        return [value for value, _ in pairs], [view for _, view in pairs]

    def _copy_into(self, flat: torch.Tensor) -> None:
        """Copy the values into ``flat``, zeros for those that this rank lacks."""
        values, views = self._pairs_in(flat)
        if len(values) < len(self._like):
            flat.zero_()
        torch._foreach_copy_(views, values)

    def _add_to_values(self, flat: torch.Tensor) -> None:
        torch._foreach_add_(*self._pairs_in(flat))
        for value, clamps in zip(self._values(), self._nonnegative, strict=False):
            if clamps and value is not None:
                value.clamp_(min=0.0)


def _copy(source: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    """Copy into ``target``, or into a new tensor where there is none yet."""
    return source.clone() if target is None else target.copy_(source)


Place = tuple[int, str]
"""A parameter's index, and the key of a tensor in its optimizer's state; "" for itself."""


@dataclass(frozen=True)
class Part:
    """Values of one dtype and fragment, and what averages them."""

    fragment: int
    places: Sequence[Place]
    average: ModelAverage


def state_of(parts: Iterable[Part], count: int) -> Tensors:
    """Wait for what is in flight, and return it by label and index of ``count`` parameters."""
    tensors: Tensors = {}
    for part in parts:
        for label, values in part.average.state().items():
            for (index, key), value in zip(part.places, values, strict=True):
                name = f"{PREFIX}{label}.{key}" if key else label
                tensors.setdefault(name, [None] * count)[index] = value
    return tensors


class ModelBuffers:
    """The buffers (BatchNorm statistics) of the models that have run with the parameters."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[torch.nn.Module]] = []
        self._known: set[int] = set()
        self._finder = ModelFinder(self._add_model, steps=1, through_graph=True)

    def want(self, parameters: Sequence[torch.Tensor]) -> None:
        """Look for the models of these parameters as well."""
        self._finder.look_for(p for p in parameters if id(p) not in self._known)

    def step(self) -> None:
        """Count a step; the search ends at the second, which follows a whole forward pass."""
        self._finder.end_step()

    def _add_model(self, module: torch.nn.Module, identities: set[int]) -> None:
        self._known |= identities
        if all(reference() is not module for reference in self._models):
            self._models.append(weakref.ref(module))

    def average(self, reduction: Reduction, name: str) -> None:
        """Average floating buffers over the ranks; other buffers take the first rank's values."""
        if reduction.alone:
            return
        buffers = [
            (f"{i}.{label}", buffer)
            for i, model in enumerate(filter(None, (reference() for reference in self._models)))
            for label, buffer in model.named_buffers()
        ]
        lines = [(f"buffer {n}", f"{b.dtype} {tuple(b.shape)}") for n, b in buffers]
        check_alike(lines, f"{name}.check", reduction.process_set)
        first = members(reduction.process_set)[0]
        for label, buffer in buffers:
            if buffer.is_floating_point():
                wide = buffer.float() if buffer.dtype == torch.bfloat16 else buffer
                reduction.reduce(wide, f"{name}.{label}")
                buffer.copy_(wide)
            else:
                broadcast_(buffer, first, f"{name}.{label}", process_set=reduction.process_set)


# The tensors of the user's optimizer that follow the models, under ``momentum="average"``.


UNSETTLED = 2
PREFIX = "momenta."
"""Begins the names of their tensors in a checkpoint."""


class AveragedMomenta:
    """The tensors in the optimizer's state that are averaged as the parameters are.

    A parameter without a gradient has none, so ranks agree on which there are: as training starts,
    after the first round, and where a control flag says so. A rank that lacks one sends zeros.

    They travel uncompressed, as float16 would make zeros of Adam's second moments, and know no
    momentum of an anchor or an outer optimizer, which could carry these below zero.
    """

    def __init__(self, settings: Settings, reduction: Reduction, strategy: CoCoD) -> None:
        self._settings, self._rule = settings, CoCoD(pull_back=strategy.pull_back)
        self._reduction = dataclasses.replace(reduction, compression=Compression.none)
        self._places: list[Place] = []
        self.parts: list[Part] = []
        self.rounds_to_agree = UNSETTLED
        """How many more rounds start with an agreement."""

    def agree_if_due(self) -> bool:
        """Agree if that is due; return whether this rank has tensors unknown to others."""
        if self.rounds_to_agree:
            self.rounds_to_agree -= 1
            self.agree()
        return not set(self._local_places()) <= set(self._places)

    def agree(self) -> None:
        """Average the tensors that any rank has."""
        everyone, tag = [self._local_places()], f"{self._settings.tag}.momenta.keys"
        reduction = self._settings.reduction
        if not reduction.alone:
            everyone = gather(everyone[0], tag, reduction.process_set)
        self._adopt(sorted({(index, key) for keys in everyone for index, key in keys}))

    def load(self, tensors: Tensors, unsettled: int | None) -> None:
        """Go on from a `state`, which may have other entries as well."""
        self.rounds_to_agree = UNSETTLED if unsettled is None else unsettled
        by_label: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
        for name, values in tensors.items():
            if name.startswith(PREFIX):
                label, key = name.removeprefix(PREFIX).split(".", 1)
                by_place = {(index, key): v for index, v in enumerate(values) if v is not None}
                by_label.setdefault(label, {}).update(by_place)
        self._adopt(sorted({key for by_place in by_label.values() for key in by_place}))
        for part in self.parts:
            part.average.load(
                {k: [v[place] for place in part.places] for k, v in by_label.items()}
            )

    def _local_places(self) -> list[Place]:
        return [
            (index, key)
            for index, parameter in enumerate(self._settings.parameters)
            for key in self._settings.optimizer.state.get(parameter, {})
            if self._tensor(index, key) is not None
        ]

    def _tensor(self, index: int, key: str) -> torch.Tensor | None:
        parameter = self._settings.parameters[index]
        value = self._settings.optimizer.state.get(parameter, {}).get(key)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return None
        return value if value.shape == parameter.shape and key not in _SCALARS else None

    def _adopt(self, places: list[Place]) -> None:
        if places == self._places:
            return
        for part in self.parts:
            part.average.discard()
        parameters, self._places, self.parts = self._settings.parameters, places, []
        groups = self._settings.index.dtype_groups(list(dict.fromkeys(i for i, _ in places)))
        for i, group in enumerate(map(set, groups)):
            members = [place for place in places if place[0] in group]
            average = ModelAverage(
                [parameters[index] for index, _ in members],
                partial(self._tensors, members),
                self._reduction,
                f"{self._settings.tag}.momenta.{i}",
                self._rule,
                nonnegative=[key in _NONNEGATIVE for _, key in members],
            )
            self.parts.append(Part(0, members, average))

    def _tensors(self, places: Sequence[Place]) -> list[torch.Tensor | None]:
        return [self._tensor(*place) for place in places]


# Numbers that torch's optimizers keep as tensors: not momenta even where a parameter is one, too.
_SCALARS = frozenset({"eta", "mu", "mu_product", "step"})

# What torch's optimizers take a root of, or bound steps with.
_NONNEGATIVE = frozenset({"acc_delta", "exp_avg_sq", "exp_inf", "max_exp_avg_sq"})
_NONNEGATIVE |= {"square_avg", "step_size", "sum", "variance"}
