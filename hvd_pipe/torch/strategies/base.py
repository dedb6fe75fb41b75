"""What all strategies share: gradients that become ready, passes, updates.

One engine belongs to one `DistributedOptimizer`. The optimizer calls it at four moments::

    backward   -> on_gradient(index)          a gradient of this pass is complete
    step()     -> before_update() -> bool     p.grad is what to apply; False: no update
                  after_update()              after the user's optimizer has moved the weights
    synchronize()                             finish what is in flight
"""

from __future__ import annotations

import abc
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Average, rank
from torch.utils.hooks import RemovableHandle

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.planning.plan import Plan
from hvd_pipe.runtime import check_mode
from hvd_pipe.torch.agree import Description, check_alike, failed
from hvd_pipe.torch.checking import compare_replicas
from hvd_pipe.torch.compression import Codec
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.messages.allreduce import Message, Reduction
from hvd_pipe.torch.messages.saved import of_all_ranks
from hvd_pipe.torch.parameters import check_parameter
from hvd_pipe.torch.strategies.settings import Settings, State, describe

if TYPE_CHECKING:
    from hvd_pipe.torch.measuring.first_uses import FirstUses
    from hvd_pipe.torch.measuring.step_times import ReadyTimes
    from hvd_pipe.torch.messages.buckets import BucketSet

__all__ = ["Engine", "live_engines"]


class Engine(abc.ABC):
    """Carries one strategy out; see the module's docstring for who calls what."""

    name: str
    """The strategy's, as a checkpoint has it."""
    has_state_in_flight = False
    """Whether anything is in flight between steps, which a checkpoint should hold."""
    needs_loss_scale = True
    """Whether gradients may have another loss scale than the step's, or stay local."""
    can_join = True
    """Whether a rank may leave by ``hvd.join()``, which knows the global process set only."""
    plan: Plan | None = None
    """The buckets in use."""
    current: BucketSet | None = None
    """The buckets that take this step's gradients; None while gradients stay local."""
    ready_times: ReadyTimes | FirstUses | None = None
    """Where the moments at which gradients become ready are recorded, if they are."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.passes = settings.passes
        self.rounds = 0
        """Gradients (or sets of local gradients) prepared so far; all ranks count the same."""
        self.has_new_gradients = False
        """Whether a gradient was computed since the last step()."""
        self.synchronized = False
        """Whether the gradients of the coming step() are prepared."""
        self.stepped = False
        """Whether step() was called since gradients were prepared the last time."""
        self.known: set[int] = set()
        """Identities of the parameters that take part."""
        self.held: dict[str, dict[int, torch.Tensor]] = {}
        """Tensors of a `State` that was loaded, for parameters (identities) that will join."""
        self._has_update = False
        self._meeting: Message | None = None
        self._uncompared_steps = 0
        if check_mode.active.on:
            check_mode.active.begin(int(rank()))
        self._passes_done: list[int] = []
        self._hooks: list[RemovableHandle] = []
        self.detach: Callable[[], object] = weakref.finalize(self, _remove, self._hooks)
        """Stop hearing of gradients."""
        self._listen(settings.parameters)
        # The newest optimizer of a parameter hears of its gradients, as when one is made anew.
        for other in live_engines():
            if other.known == self.known:
                other.finish()
                other.retire()
        _live.add(self)

    def _listen(self, parameters: Sequence[torch.Tensor]) -> None:
        engine, first = weakref.ref(self), len(self._passes_done)
        for index, parameter in enumerate(parameters, first):
            listen = parameter.register_post_accumulate_grad_hook
            self._hooks.append(listen(_hook(engine, index)))  # type: ignore[no-untyped-call]
        self.known.update(map(id, parameters))
        self._passes_done += [0] * len(parameters)

    @property
    def remembers(self) -> bool:
        """Whether what a step leaves behind belongs into a checkpoint."""
        return self.has_state_in_flight or self.remembers_residuals

    @property
    def remembers_residuals(self) -> bool:
        """Whether a lossy codec keeps residuals."""
        compression = self.reduction.compression
        return isinstance(compression, Codec) and bool(compression.error_feedback)

    @property
    def reduction(self) -> Reduction:
        """How gradients are reduced."""
        return self.settings.reduction

    def retire(self) -> None:
        """Take no further part."""
        self.detach()
        _live.discard(self)

    # What a strategy defines.

    @property
    @abc.abstractmethod
    def next_message(self) -> Message:
        """A message that every rank sends in this step or in a coming one."""

    @abc.abstractmethod
    def build(self) -> None:
        """Make the buffers for the parameters in ``settings``; parameters may have joined."""

    @abc.abstractmethod
    def prepare(self) -> bool:
        """Make the gradients what the update shall apply; return whether there is one to apply."""

    @abc.abstractmethod
    def drain(self) -> None:
        """Finish what is in flight when no gradient waits to be applied."""

    def finish(self) -> None:  # noqa: B027 - most have nothing pending that they need not wait for
        """Apply what this rank has deferred; sends nothing, and one rank alone may call it."""

    def finish_before_others(self) -> None:  # noqa: B027 - as above
        """Finish before other weights or another state take the place; after a failure, too."""

    def joined(self) -> None:
        """Go on after ``hvd.join()``: all ranks have met, after different numbers of steps."""
        self._uncompared_steps = 0
        self.after_join()

    @abc.abstractmethod
    def after_join(self) -> None:
        """Go to a state that all ranks share, however many steps each has taken."""

    @abc.abstractmethod
    def state(self) -> State:
        """Return what is in flight, in copies, when it has arrived; training can go on after."""

    @abc.abstractmethod
    def load(self, state: State) -> None:
        """Go on from a `state`; nothing is in flight (the engine is new, or was discarded).

        An index whose tensors are None belongs to a parameter that joins now.
        """

    @property
    def is_averaged(self) -> bool:
        """Whether the gradients that are applied are averages over all ranks."""
        return self.current is not None

    @property
    def measures(self) -> bool:
        """Whether a plan is to come from measured times."""
        return False

    @property
    def is_equal_everywhere(self) -> bool:
        """Whether all ranks have just made the same update, and are where this one is."""
        return False

    def weights(self) -> Sequence[torch.Tensor]:
        """Return the weights as updates have left them."""
        return self.settings.parameters

    def discard(self) -> None:
        """Forget what is in flight, as a state that is loaded replaces it."""
        self.abandon()
        self._passes_done = [0] * len(self._passes_done)
        if self.current is not None:
            self.current.discard()

    def after_update(self) -> None:
        """Do what follows an update."""
        self.has_new_gradients = False

    @property
    def gradient_scale(self) -> float | None:
        """The loss scale of the gradients that `prepare` has left; None for the step's own."""
        return None

    def note_scale(self, scale: float) -> None:  # noqa: B027 - most need not know
        """Take down the loss scale of the gradients that were computed in this step."""

    # What the optimizer calls.

    # Architecture: G1
    def on_gradient(self, index: int) -> None:
        """Take a gradient that backward has just completed."""
        check_mode.active.delay()
        timeline.active.gradient()
        if not self.has_new_gradients:
            self._begin_step()
        self.has_new_gradients = True
        self.synchronized = False
        self._passes_done[index] += 1
        done = self._passes_done[index]
        if self.current is None:
            return
        if done > self.passes:
            raise HvdPipeError(
                f"the gradient of {self.settings.names[index]!r} was computed {done} times before "
                f"step(), but backward_passes_per_step is {self.passes}: call step() or "
                f"synchronize() after every {self.passes} backward passes, or raise "
                "backward_passes_per_step to accumulate gradients locally."
            )
        if done == self.passes:
            self.current.ready(index)
        if self.ready_times is not None:
            self.ready_times.mark(index)

    def compare_replicas(self) -> None:
        """Under ``HVD_PIPE_CHECK``, compare weights and gradients every some steps, after one."""
        if not check_mode.active.on or self.reduction.alone:
            return
        self._uncompared_steps += 1
        if self._uncompared_steps < check_mode.COMPARE_STEPS or not self.is_equal_everywhere:
            return
        self._uncompared_steps = 0
        settings, when = self.settings, f"after step {self.rounds}"
        gradients, process_set = [p.grad for p in settings.parameters], self.reduction.process_set
        names, weights = settings.names, self.weights()
        compare_replicas(names, weights, gradients, when, process_set, settings.tag)

    # Architecture: G5
    def before_update(self) -> bool:
        """Return whether the user's optimizer shall update now."""
        self.prepare_now()
        self.synchronized, self.stepped = False, True
        return self._has_update

    def synchronize(self, by_hand: bool = False) -> None:
        """Prepare the coming update where gradients wait for one, else `drain`.

        Args:
            by_hand: Whether there are new gradients of which no hook has told.
        """
        if self.synchronized:
            return
        if self.has_new_gradients or by_hand:
            self.prepare_now()
            self.has_new_gradients = True
        else:
            self._agree_on_load()
            self.drain()

    def note_gradients(self) -> None:  # noqa: B027 - most need not know
        """Take note of what is in ``p.grad``: the user's optimizer is about to apply it."""

    @property
    def others_message(self) -> Message:
        """A message that ranks which have not loaded a state send in a coming step."""
        return self.next_message if self._meeting is None else self._meeting

    def note_load(self, message: Message) -> None:
        """Have ranks agree on a state that was loaded, as the next step begins.

        Args:
            message: `others_message` as it was before.
        """
        self._meeting = message

    def position(self) -> Description:
        """Say how far training has come, which all ranks must have alike."""
        return [("the number of steps", str(self.rounds))]

    def check_position(self) -> None:
        """Compare `position` over the ranks; all of them call this.

        Raises:
            RanksDisagreeError: They have loaded different states, or one has loaded none.
        """
        if not self.reduction.alone:
            name = f"{self.settings.tag}.position"
            check_alike(self.position(), name, self.reduction.process_set)

    def _begin_step(self) -> None:
        self._agree_on_load()
        self.add_parameters()

    def _agree_on_load(self) -> None:
        """Tell all ranks where one alone has loaded a state: they would wait for ever.

        Ranks that have loaded meet under the name of a message that the others are about to send.
        A rank that has left by ``hvd.join()`` takes part in all-reduces only.
        """
        message, self._meeting = self._meeting, None
        if message is None or self.reduction.alone:
            return
        message.meet()
        present, name = torch.ones(1), f"{self.settings.tag}.present"
        plain = dataclasses.replace(self.reduction, op=Average, compression=Compression.none)
        plain.reduce(present, name)
        if float(present) > 1 - 0.5 / self.reduction.workers:
            self.check_position()

    def prepare_now(self) -> None:
        """Prepare the coming update, if that has not been done."""
        if self.synchronized:
            return
        timeline.active.end_backward()
        if not self.has_new_gradients:
            self._begin_step()
        self._passes_done = [0] * len(self._passes_done)
        self._has_update = self.prepare()
        self.synchronized = True
        self.rounds += 1
        _live.add(self)  # also one that another has replaced, and that is used all the same

    def abandon(self) -> None:
        """Forget gradients that were prepared and are not to be applied."""
        self.synchronized = self.has_new_gradients = False

    def add_parameters(self) -> None:
        """Take in parameters that have joined: by add_param_group, or because they train now.

        All ranks do this between the same two steps, or are told: first they meet under the
        name of a message that a rank which admits nobody is about to send.
        """
        joining = self.settings.owner.new_parameters(self.known)
        if not joining:
            return
        state, process_set = self.state(), self.reduction.process_set
        failure: Exception | None = None
        try:
            for name, parameter in joining.items():
                check_parameter(name, parameter)
        except ValueError as error:
            failure = error
        if not self.reduction.alone:
            self.next_message.meet()
            description = describe(joining) if failure is None else failed(failure)
            check_alike(description, f"{self.settings.tag}.joining", process_set)
        if failure is not None:
            raise failure
        self.settings = self.settings.with_parameters(joining)
        self._listen(list(joining.values()))
        left = of_all_ranks(state.tensors, self.reduction, f"{self.settings.tag}.residuals")
        self.build()
        tensors = {}
        for label, indices in left.items():
            loaded = self.held.get(label, {})
            tensors[label] = [*indices, *(loaded.get(id(p)) for p in joining.values())]
        self.held.clear()
        self.load(State(state.counters, tensors))


_live: weakref.WeakSet[Engine] = weakref.WeakSet()


def live_engines() -> Iterator[Engine]:
    """Return the engines in use, each while its optimizer is kept alive; retire all others."""
    for engine in list(_live):
        if (_optimizer := engine.settings.owner.itself()) is not None:
            yield engine  # whose optimizer would else go while the engine is asked
        else:
            engine.retire()


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _hook(engine: weakref.ref[Engine], index: int) -> Callable[[torch.Tensor], None]:
    def on_gradient(_: torch.Tensor) -> None:
        owner = engine()
        if owner is not None:
            owner.on_gradient(index)

    return on_gradient
