"""CoCoD-SGD: the models of the round's start are averaged while k local steps run.

start of round s   snapshot x_i[s] is copied and sent
k local steps      the user's optimizer, on local gradients
end of round       x_i[s+1] = mean_j x_j[s] + (x_i - x_i[s])     then the next round starts

`ModelAverage` has the arithmetic, and the other rules for the end of a round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from horovod.torch.compression import Compression

from hvd_pipe.runtime import check_mode
from hvd_pipe.strategy import CoCoD
from hvd_pipe.torch.agree import Description, check_alike, gather
from hvd_pipe.torch.checking import compare_replicas
from hvd_pipe.torch.messages.allreduce import REDUCED, SENT, Message, Reduction
from hvd_pipe.torch.messages.buckets import BucketSet
from hvd_pipe.torch.messages.saved import residuals_of, restore_residuals
from hvd_pipe.torch.model_buffers import ModelBuffers
from hvd_pipe.torch.strategies.base import Engine
from hvd_pipe.torch.strategies.model_average import ModelAverage, Rule, Tensors
from hvd_pipe.torch.strategies.settings import (
    Settings,
    State,
)

__all__ = ["CoCoDEngine"]


@dataclass(frozen=True)
class CoCoDState:
    """What a checkpoint holds of this strategy.

    Args:
        rounds: The steps so far.
        local_steps: Those of them since the round began.
        models: As `ModelAverage.state`, with an entry a parameter; while gradients are averaged,
            the residuals of these.
        momenta: As `_Momenta.state`; empty unless momenta are averaged.
        unsettled: As `_Momenta.unsettled`; None unless momenta are averaged.
        news: Whether some rank has told of momenta that others do not know of; likewise.
    """

    rounds: int
    local_steps: int
    models: Tensors
    momenta: Tensors
    unsettled: int | None = None
    news: int | None = None

    def to_state(self) -> State:
        """Return the form in which checkpoints have it."""
        counters = {"rounds": self.rounds, "local_steps": self.local_steps}
        if self.unsettled is not None and self.news is not None:
            counters |= {"unsettled": self.unsettled, "news": self.news}
        return State(counters, self.models | self.momenta)

    @classmethod
    def from_state(cls, state: State) -> CoCoDState:
        """Return what a checkpoint holds."""
        momenta = {k: v for k, v in state.tensors.items() if k.startswith(_MOMENTA)}
        models = {k: v for k, v in state.tensors.items() if k not in momenta}
        numbers = state.counters
        rounds, local_steps = numbers["rounds"], numbers["local_steps"]
        unsettled, news = numbers.get("unsettled"), numbers.get("news")
        return cls(rounds, local_steps, models, momenta, unsettled, news)


class CoCoDEngine(Engine):
    """Local steps, with the average of the round's start in flight behind them."""

    name = CoCoD.name
    has_state_in_flight = True

    def __init__(self, settings: Settings, strategy: CoCoD) -> None:
        super().__init__(settings)
        self._strategy = strategy
        self._local_steps = 0
        self._started = False
        self._buffers = ModelBuffers()
        self.build()

    @property
    def next_message(self) -> Message:
        if self.current is not None:
            return self.current.last_message
        return self._models[0].next_message

    def build(self) -> None:
        settings, strategy = self.settings, self._strategy
        reduction = replace(settings.reduction, weights=strategy.weights or ())
        self.current = None
        self._warm_up()
        follow = strategy.momentum == "average"
        self._indices = settings.index.dtype_groups(range(len(settings.names)))
        self._models = [
            ModelAverage(
                [settings.parameters[index] for index in indices],
                partial(_values, settings.parameters, indices),
                reduction,
                f"{settings.tag}.model.{i}",
                Rule.of(strategy),
                words=int(follow and i == 0),
            )
            for i, indices in enumerate(self._indices)
        ]
        self._momenta: _Momenta | None = None
        if follow:
            # Without the momentum of an anchor or an outer optimizer, which could carry a second
            # moment below zero.
            self._momenta = _Momenta(settings, reduction, Rule(strategy.pull_back))
        self._buffers.want(settings.parameters)

    def _warm_up(self) -> None:
        """Have buckets while gradients are averaged, before the first round."""
        settings, strategy = self.settings, self._strategy
        if self.current is None and self.rounds < strategy.warmup_steps:
            groups = settings.index.default_groups(range(len(settings.names)))
            reduction = replace(settings.reduction, weights=strategy.weights or ())
            self.current = _warmup_buckets(settings, reduction, groups)

    def position(self) -> Description:
        return [*super().position(), ("local steps of the round", str(self._local_steps))]

    def prepare(self) -> bool:
        self._buffers.step()
        if self.current is not None:
            self.current.flush()
            self.current.wait()
            self.current.bind_gradients()
        elif not self._started:
            self._start()
        return True

    def after_update(self) -> None:
        super().after_update()
        if self.current is not None:
            if self.rounds >= self._strategy.warmup_steps:
                self.current = None
            return
        self._local_steps += 1
        if self._local_steps >= self._strategy.period:
            for average in self._averages():
                average.finish()
            if self._momenta is not None:
                self._momenta.heard(self._models[0].words)
            self._start()

    def drain(self) -> None:
        """Make all replicas equal: the average of the models and buffers as they are now.

        With y the average in flight, mean_i (y + x_i - start_i) = mean_i x_i, so what is in flight
        need not be added. An anchor stays, and takes the result in at the end of the next round.
        """
        steps = [("the number of steps", str(self.rounds))]
        reduction, tag = self.settings.reduction, self.settings.tag
        if not reduction.alone:
            for average in self._averages():
                average.complete()
            self.next_message.meet()  # with a rank that goes on to its next round, to be told
            check_alike(steps, f"{tag}.drain", reduction.process_set)
        if self._momenta is not None:
            self._momenta.agree()
            self._momenta.settle_anew()
        for average in self._averages():
            average.average_now()
        self._pause()
        self._buffers.average(reduction, f"{tag}.buffers")
        if check_mode.active.on and not reduction.alone:
            names, weights = self.settings.names, self.settings.parameters
            process_set = reduction.process_set
            compare_replicas(names, weights, [], "after synchronize()", process_set, tag)

    def after_join(self) -> None:
        self._end_rounds()
        self.current = None
        self.rounds = self._strategy.warmup_steps

    def discard(self) -> None:
        self._end_rounds()
        self.rounds = 0
        self._warm_up()

    def _end_rounds(self) -> None:
        super().discard()
        for average in self._averages():
            average.discard()
        if self._momenta is not None:
            self._momenta.settle_anew()
        self._pause()

    def state(self) -> State:
        models = [average.state() for average in self._models]
        tensors: Tensors = {}
        for indices, state in zip(self._indices, models, strict=True):
            for label, values in state.items():
                whole = tensors.setdefault(label, [None] * len(self.settings.parameters))
                for index, value in zip(indices, values, strict=True):
                    whole[index] = value
        if self.current is not None:
            tensors |= residuals_of(self.current)  # the models' own are zero until then
        if self._momenta is not None:
            unheard = bool(self._models[0].words) if self._started else False
            return CoCoDState(
                self.rounds,
                self._local_steps,
                tensors,
                self._momenta.state(),
                self._momenta.unsettled,
                int(unheard),
            ).to_state()
        return CoCoDState(self.rounds, self._local_steps, tensors, {}).to_state()

    def load(self, state: State) -> None:
        saved = CoCoDState.from_state(state)
        self.rounds = saved.rounds
        if self.rounds >= self._strategy.warmup_steps:
            self.current = None
        models = saved.models
        if self.current is not None:
            restore_residuals(self.current, models)
            models = {k: v for k, v in models.items() if k not in (SENT, REDUCED)}
        for indices, average in zip(self._indices, self._models, strict=True):
            average.load(
                {label: [values[index] for index in indices] for label, values in models.items()}
            )
        self._started = all(average.due for average in self._models)
        self._local_steps = saved.local_steps if self._started else 0
        if self._momenta is not None:
            self._momenta.load(saved.momenta, saved.unsettled)
            self._models[0].words.fill_(saved.news or 0)

    def _averages(self) -> Iterator[ModelAverage]:
        yield from self._models
        if self._momenta is not None:
            yield from self._momenta.averages

    def _start(self) -> None:
        if self._momenta is not None:
            self._momenta.settle()
            self._models[0].words.fill_(float(self._momenta.has_news()))
        for average in self._averages():
            average.start()
        self._started = True
        self._local_steps = 0

    def _pause(self) -> None:
        self._started = False
        self._local_steps = 0


def _warmup_buckets(
    settings: Settings, reduction: Reduction, groups: Sequence[Sequence[int]]
) -> BucketSet:
    # Sparse gradients that travel by themselves know no weights: with them, they go as dense ones.
    as_dense = settings.sparse_as_dense or bool(reduction.weights)
    settings = replace(settings, reduction=reduction, sparse_as_dense=as_dense)
    return BucketSet(settings, groups, "warmup")


def _values(parameters: Sequence[torch.Tensor], indices: Sequence[int]) -> list[torch.Tensor]:
    return [parameters[index].detach() for index in indices]


class _Momenta:
    """The tensors in the optimizer's state that are averaged as the parameters are.

    Which there are shows only as training goes on, and differs where a parameter has had no
    gradient on some rank. Ranks agree on them as training starts and after the first round, when
    they usually come up; later a rank that has others says so by a control flag of its model, and
    all agree at the end of that round. A rank that lacks one contributes zeros.

    They travel uncompressed: float16 would make zeros of Adam's second moments.
    """

    def __init__(self, settings: Settings, reduction: Reduction, rule: Rule) -> None:
        self._settings, self._rule = settings, rule
        self._reduction = replace(reduction, compression=Compression.none)
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
        if not self._reduction.alone:
            everyone = gather(everyone[0], tag, self._reduction.process_set)
        self._adopt(sorted({(index, key) for keys in everyone for index, key in keys}))

    def state(self) -> Tensors:
        """Return what is in flight, when it has arrived, by index."""
        tensors: Tensors = {}
        for keys, average in zip(self._keys_of, self.averages, strict=True):
            for label, values in average.state().items():
                for (index, key), value in zip(keys, values, strict=True):
                    nobody: list[torch.Tensor | None] = [None] * len(self._settings.parameters)
                    tensors.setdefault(f"{_MOMENTA}{label}.{key}", nobody)[index] = value
        return tensors

    def load(self, tensors: Tensors, unsettled: int | None) -> None:
        """Go on from a `state`, which may have other entries as well."""
        self.unsettled = _UNSETTLED if unsettled is None else unsettled
        found: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
        for name, values in tensors.items():
            if name.startswith(_MOMENTA):
                label, key = name.removeprefix(_MOMENTA).split(".", 1)
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
            ModelAverage(
                [parameters[index] for index, _ in same],
                partial(self._tensors, same),
                self._reduction,
                f"{self._settings.tag}.momenta.{i}",
                self._rule,
                nonnegative=[key in _NONNEGATIVE for _, key in same],
            )
            for i, same in enumerate(self._keys_of)
        ]

    def _tensors(self, keys: Sequence[tuple[int, str]]) -> list[torch.Tensor | None]:
        return [self._tensor(index, key) for index, key in keys]


_MOMENTA = "momenta."
_UNSETTLED = 2

# Numbers that torch's optimizers keep as tensors: not momenta even where a parameter is one, too.
_SCALARS = frozenset({"eta", "mu", "mu_product", "step"})

# What torch's optimizers take a root of, or bound steps with.
_NONNEGATIVE = frozenset({"acc_delta", "exp_avg_sq", "exp_inf", "max_exp_avg_sq"})
_NONNEGATIVE |= {"square_avg", "step_size", "sum", "variance"}
