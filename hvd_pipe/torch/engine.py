"""What all strategies share: gradients that become ready, passes, updates.

One engine belongs to one `DistributedOptimizer`. The optimizer calls it at four moments::

    backward   -> on_gradient(place)          a gradient of this pass is complete
    step()     -> before_update() -> bool     p.grad is what to apply; False: no update
                  after_update()              after the user's optimizer has moved the weights
    synchronize()                             finish what is in flight
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.planning.plan import Plan
from hvd_pipe.torch.buckets import BucketSet
from hvd_pipe.torch.reduction import Reduction

__all__ = ["DEFAULT_BUCKET_BYTES", "Engine", "Settings", "State", "all_joined", "kinds"]

DEFAULT_BUCKET_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Settings:
    """What a `DistributedOptimizer` was asked for, in terms of its parameters' places.

    Args:
        names: The parameters' names, in an order that all ranks share.
        parameters: The parameters, in the same order.
        reduction: How gradients are reduced.
        passes: Backward passes that make one gradient.
        sparse_as_dense: Whether sparse gradients may travel as dense ones.
        tag: Begins the names of all messages.
        groups: Gradients that the user groups by hand (places), or None.
        update: Makes one update of the user's optimizer with the gradients as they are.
    """

    names: Sequence[str]
    parameters: Sequence[torch.Tensor]
    reduction: Reduction
    passes: int
    sparse_as_dense: bool
    tag: str
    groups: Sequence[Sequence[int]] | None
    update: Callable[[], None]

    def nbytes(self, place: int) -> int:
        """Return the size of a gradient in bytes."""
        return self.parameters[place].numel() * self.parameters[place].element_size()

    def wire_bytes(self) -> list[int]:
        """Return the size of each gradient as it is sent, after compression, in bytes."""
        sizes = [0] * len(self.parameters)
        for places in kinds(self.parameters):
            ratio = self.reduction.ratio(self.parameters[places[0]])
            for place in places:
                sizes[place] = round(self.nbytes(place) * ratio)
        return sizes

    def make_buckets(self, groups: Sequence[Sequence[int]], suffix: str) -> BucketSet:
        return BucketSet(self.parameters, groups, self.reduction, f"{self.tag}.{suffix}")

    def as_plan(self, groups: Sequence[Sequence[int]], method: str) -> Plan:
        """Return groups of places as a plan of names."""
        return Plan(tuple(tuple(self.names[i] for i in group) for group in groups), method)


@dataclass(frozen=True)
class State:
    """What an engine needs to go on bit for bit, beside the model and the user's optimizer.

    Args:
        counters: Numbers and strings by name: steps taken, a plan.
        tensors: By name, one tensor a parameter (by place), or None where there is none: a
            gradient in flight, a model's start of the round, what a codec has left over.
    """

    counters: dict[str, Any]
    tensors: dict[str, list[torch.Tensor | None]]


class Engine(abc.ABC):
    """Carries one strategy out; see the module's docstring for who calls what."""

    plan: Plan | None = None
    """The buckets in use."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.passes = settings.passes
        self.rounds = 0
        """Gradients (or sets of local gradients) prepared so far; all ranks count the same."""
        self.fresh = False
        """Whether a gradient was computed since the last step()."""
        self.synchronized = False
        """Whether synchronize() has prepared the gradients of the coming step()."""
        self.known = frozenset(map(id, settings.parameters))
        """Identities of the parameters that take part."""
        self._has_update = False
        self._passes_done = [0] * len(settings.parameters)
        # The newest optimizer of a parameter hears of its gradients, as when one is made anew.
        for other in list(_live):
            if other.known == self.known:
                other.detach()
        _live.add(self)
        engine = weakref.ref(self)
        hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                _hook(engine, place)
            )
            for place, parameter in enumerate(settings.parameters)
        ]
        self.detach: Callable[[], object] = weakref.finalize(self, _remove, hooks)
        """Stop hearing of gradients."""

    # What a strategy defines.

    @property
    @abc.abstractmethod
    def current(self) -> BucketSet | None:
        """The buckets that take this step's gradients; None while gradients stay local."""

    @abc.abstractmethod
    def prepare(self) -> bool:
        """Make the gradients what the update shall apply; return whether there is one to apply."""

    @abc.abstractmethod
    def drain(self) -> None:
        """Finish what is in flight when no gradient waits to be applied."""

    @abc.abstractmethod
    def after_join(self) -> None:
        """Go to a state that all ranks share, however many steps each has taken."""

    @abc.abstractmethod
    def state(self) -> State:
        """Return what is in flight, in copies, when it has arrived; training can go on after."""

    @abc.abstractmethod
    def load(self, state: State) -> None:
        """Go on from a `state`; nothing is in flight (the engine is new, or was discarded).

        A place whose tensors are None belongs to a parameter that joins now.
        """

    def discard(self) -> None:  # noqa: B027 - most strategies have nothing in flight here
        """Forget what is in flight, as a state that is loaded replaces it."""

    def after_update(self) -> None:
        """Do what follows an update."""
        self.fresh = False

    # What the optimizer calls.

    def on_gradient(self, place: int) -> None:
        """Take a gradient that backward has just completed."""
        self.fresh = True
        self.synchronized = False
        self._passes_done[place] += 1
        done, name = self._passes_done[place], self.settings.names[place]
        if done > self.passes and self.current is not None:
            raise HvdPipeError(
                f"the gradient of {name!r} was computed {done} times before step(), but "
                f"backward_passes_per_step is {self.passes}: call step() or synchronize() after "
                f"every {self.passes} backward passes, or raise backward_passes_per_step to "
                "accumulate gradients locally."
            )
        if self.current is None:
            return
        gradient = self.settings.parameters[place].grad
        if gradient is not None and gradient.is_sparse and not self.settings.sparse_as_dense:
            raise HvdPipeError(
                f"the gradient of {name!r} is sparse: pass sparse_as_dense=True to "
                "DistributedOptimizer, or build its layer with sparse=False."
            )
        if done == self.passes:
            self.current.ready(place)

    def before_update(self) -> bool:
        """Return whether the user's optimizer shall update now."""
        if not self.synchronized:
            self._prepare()
        self.synchronized = False
        return self._has_update

    def synchronize(self) -> None:
        """Prepare the coming update where gradients wait for one, else `drain`."""
        if self.synchronized:
            return
        if self.fresh:
            self._prepare()
            self.synchronized = True
        else:
            self.drain()

    def _prepare(self) -> None:
        self._passes_done = [0] * len(self._passes_done)
        self._has_update = self.prepare()
        self.rounds += 1


_live: weakref.WeakSet[Engine] = weakref.WeakSet()


def all_joined() -> None:
    """Note that all ranks have met in ``hvd.join()``, after different numbers of steps."""
    for engine in list(_live):
        engine.after_join()


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _hook(engine: weakref.ref[Engine], place: int) -> Callable[[torch.Tensor], None]:
    def on_gradient(_: torch.Tensor) -> None:
        owner = engine()
        if owner is not None:
            owner.on_gradient(place)

    return on_gradient


def kinds(parameters: Sequence[torch.Tensor]) -> list[list[int]]:
    """Group places by dtype and device: only equals share a buffer. Order is kept."""
    found: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, parameter in enumerate(parameters):
        found.setdefault((parameter.dtype, parameter.device), []).append(place)
    return list(found.values())
