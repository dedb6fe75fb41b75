"""What all strategies share: gradients that become ready, passes, updates.

One engine belongs to one `DistributedOptimizer`. The optimizer calls it at four moments::

    backward   -> on_gradient                 a gradient of this pass is complete; it is pending
                  collect                     the same, until there are several
    a read     -> settle                      of a pending gradient: as synchronize() does
    step()     -> before_update() -> bool     p.grad is what to apply; False: no update
                  after_update()              after the user's optimizer has moved the weights
    synchronize()                             finish what is in flight
"""

from __future__ import annotations

import abc
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Average, rank

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.planning.plan import Plan
from hvd_pipe.runtime import check_mode
from hvd_pipe.runtime.consensus import Description, failed
from hvd_pipe.torch.agree import check_alike, compare_replicas
from hvd_pipe.torch.compression import Codec
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.messages.allreduce import Message, Reduction, meet, of_all_ranks
from hvd_pipe.torch.messages.group import Group, open_groups
from hvd_pipe.torch.parameters import check_parameter
from hvd_pipe.torch.pending_tensors import Settle, release
from hvd_pipe.torch.strategies.backward_passes import BackwardPasses
from hvd_pipe.torch.strategies.settings import GradientHooks, Settings, State, describe

if TYPE_CHECKING:
    from hvd_pipe.measuring.step_times import ReadyTimes
    from hvd_pipe.torch.messages.buckets import BucketSet


class Engine(abc.ABC):
    """Carries one strategy out; see the module's docstring for who calls what."""

    name: str
    """The strategy's name, as a checkpoint has it."""
    has_state_in_flight = False
    """Whether anything is in flight between steps, which a checkpoint should hold."""
    needs_loss_scale = False
    """Whether gradients may have another loss scale than the step's."""
    can_join = True
    """Whether a rank may leave by ``hvd.join()``, which knows the global process set only."""
    plan: Plan | None = None
    """The buckets in use."""
    current: BucketSet | None = None
    """The buckets that take this step's gradients; None while gradients stay local."""
    may_defer = False
    """Whether `prepare` may leave the update to be made later; gradients stay pending then."""
    is_due = False
    """Whether this rank has deferred an update, which `finish` makes."""
    ready_times: ReadyTimes | None = None
    """Where the moments at which gradients become ready are recorded, if they are."""
    takes_together = False
    """Whether `on_gradient` need not hear of all gradients: only of the first one of a pass."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rounds = 0
        """Gradients (or sets of local gradients) prepared so far; all ranks count the same."""
        self.known: set[int] = set()
        """Identities of the parameters that take part."""
        self.held: dict[str, dict[int, torch.Tensor]] = {}
        """Tensors of a loaded `State`, by identity of parameters that will join."""
        self.loaded_before: list[Message] = []
        """After a state was loaded, messages that ranks without a load send in a coming step."""
        self.has_new_gradients = False
        """Whether a gradient was computed since the last step()."""
        self.synchronized = False
        """Whether the gradients of the coming step() are prepared."""
        self.waited_early = False
        """Whether those of the last one were, before it was called."""
        self.was_read = False
        """Whether they are prepared because the script has read or changed them."""
        self.syncs = True
        """Whether new gradients are sent; see ``no_sync()``."""
        self.stepped = False
        """Whether step() was called since gradients were prepared the last time."""
        self._warned_of_dropped = False
        self._has_update = False
        self._uncompared_steps = 0
        if check_mode.active.on:
            check_mode.active.begin(int(rank()))
        self._hooks_are_alone = False
        """Whether no other hook could read gradients of this pass."""
        self._collecting: int | None = None
        """The backward pass (its graph task) whose gradients `collect` keeps."""
        self._collected: list[tuple[int, torch.Tensor]] = []
        self._passes = BackwardPasses()
        self._settle: Settle = partial(_settle_by, weakref.WeakMethod(self._settling))
        self._retired = False
        weakref.finalize(self, settings.hooks.end)
        self._register_hooks(settings.parameters)
        # The newest optimizer of a parameter gets its gradients, as when one is made anew.
        for other in live_engines():
            if not other.known.isdisjoint(self.known):
                other.finish()
                other.retire()
        if self.reduction.group is not None:
            self.reduction.group.user = self
        _live.add(self)

    def _register_hooks(self, parameters: Sequence[torch.Tensor]) -> None:
        hooks = self.settings.hooks
        hooks.attach(self, parameters, _hook(hooks))
        self._passes.add(len(parameters) - len(self.known))
        self.known = set(map(id, parameters))

    @property
    def reduction(self) -> Reduction:
        """How gradients are reduced."""
        return self.settings.reduction

    @property
    def remembers_residuals(self) -> bool:
        """Whether a lossy codec keeps residuals."""
        compression = self.reduction.compression
        return isinstance(compression, Codec) and bool(compression.error_feedback)

    def retire(self) -> None:
        """Take no further part."""
        self._collecting, self._collected = None, []
        self._passes.end()
        self.settings.hooks.end(self)
        self._retired = True
        _live.discard(self)

    # What a strategy defines.

    @property
    def next_messages(self) -> list[Message]:
        """Messages by which ranks meet: each rank sends one of them in this step or later."""
        assert self.current is not None
        return self.current.messages

    def meet(self) -> None:
        """Wait for all ranks under the names of messages that others may be about to send."""
        meet(self.next_messages)

    def skip_round(self) -> None:  # noqa: B027 - the messages of most are always the same
        """Go on to the next round of messages, as this rank has left by ``hvd.join()``."""

    @abc.abstractmethod
    def build(self) -> None:
        """Make the buffers for the parameters in ``settings``; parameters may have joined."""

    def state(self) -> State:
        """Return what is in flight, in copies, when it has arrived; training can go on after."""
        return State({}, {})

    def load(self, state: State) -> None:  # noqa: B027 - where nothing is in flight
        """Restore a `state`, with nothing in flight; parameters without tensors in it are new."""

    @abc.abstractmethod
    def prepare(self, shown_in: Mapping[int, torch.Tensor]) -> bool:
        """Make gradients, in tensors ``shown_in``, what to apply; return whether there is any."""

    def drain(self) -> None:  # noqa: B027 - where nothing is in flight between steps
        """Finish what is in flight when no gradient waits to be applied."""

    def finish(self) -> None:  # noqa: B027 - most have nothing pending that they need not wait for
        """Apply what this rank has deferred; sends nothing, and one rank alone may call it."""

    def finish_before_others(self) -> None:  # noqa: B027 - as above
        """As `finish`, before a load replaces weights or state; also works after a failure."""

    def complete_round(self) -> None:  # noqa: B027 - most have nothing in flight between steps
        """Wait for what all ranks have sent, and compare what they report of it, as all do."""

    def joined(self) -> None:
        """At ``hvd.join()``: reset what depends on how many steps this rank has taken."""
        self._uncompared_steps = 0
        self.after_join()

    def after_join(self) -> None:  # noqa: B027 - where every step begins with equal models
        """Go to a state that all ranks share, however many steps each has taken."""

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
        """Whether all ranks have just made the same update."""
        return False

    def weights(self) -> Sequence[torch.Tensor]:
        """Return the weights as updates have left them."""
        return self.settings.parameters

    def discard(self) -> None:
        """Drop what is in flight: a loaded state replaces it."""
        self._collecting, self._collected = None, []
        self.abandon()
        self._passes.end()
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
        """Record the loss scale of the gradients that were computed in this step."""

    # What all ranks do alike between two steps: take in parameters, go on from a state.

    def position(self) -> Description:
        """Describe how far training has come, which all ranks must have alike."""
        return [("the number of steps", str(self.rounds))]

    def check_position(self) -> None:
        """Compare `position` over the ranks; all of them call this."""
        if not self.reduction.alone:
            name = f"{self.settings.tag}.position"
            check_alike(self.position(), name, self.reduction.process_set)

    def _begin_step(self) -> None:
        self._agree_on_load()
        self.add_parameters()

    def _agree_on_load(self) -> None:
        """Raise on all ranks where one alone has loaded a state: they would wait for ever."""
        messages, self.loaded_before = self.loaded_before, []
        if not messages or self.reduction.alone:
            return
        meet(messages)
        present, name = torch.ones(1), f"{self.settings.tag}.present"
        plain = replace(self.reduction, op=Average, compression=Compression.none)
        plain.reduce(present, name)
        if float(present) > 1 - 0.5 / self.reduction.workers:
            self.check_position()

    def add_parameters(self) -> None:
        """Take in parameters that have joined, between the same two steps on all ranks."""
        joining = self.settings.optimizer._joining(self.known)
        if not joining:
            return
        state, process_set = self.state(), self.reduction.process_set
        failure: Exception | None = None
        try:
            for name, parameter in joining.items():
                check_parameter(name, parameter)
                self.reduction.check_carried(name, parameter)
        except ValueError as error:
            failure = error
        if not self.reduction.alone:
            self.meet()
            description = describe(joining) if failure is None else failed(failure)
            check_alike(description, f"{self.settings.tag}.joining", process_set)
        if failure is not None:
            raise failure
        before, self.settings = self.settings, self.settings.with_parameters(joining)
        parameters = self.settings.parameters
        self._register_hooks(parameters)
        residuals = of_all_ranks(state.tensors, self.reduction, f"{self.settings.tag}.residuals")
        self.build()
        tensors = {}
        for label, values in residuals.items():
            by_id = dict(zip(map(id, before.parameters), values, strict=True))
            known = {**self.held.get(label, {}), **by_id}
            tensors[label] = [known.get(id(p)) for p in parameters]
        self.held.clear()
        self.load(State(state.counters, tensors))

    # What the optimizer calls.

    # Architecture: G1
    def on_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Register ``p.grad``, which backward has just completed."""
        if check_mode.active.on:
            check_mode.active.delay()
        if timeline.active.is_on:
            timeline.active.gradient()
        self._end_collecting()
        if self._passes.begins(self._end_pass):
            self._hooks_are_alone = self.takes_together and self.settings.hooks.are_alone()
            self._begin_pass(index)
            self._passes.resume()
        if not self.has_new_gradients:
            self._begin_step()
            shown = self.settings.parameters[index].grad
            if shown is None:
                return  # another parameter has just taken this one's place
            gradient = shown
        self.has_new_gradients = True
        if self.current is not None and self.current.is_flushed and not self.synchronized:
            self.give_up()
            raise HvdPipeError(
                f"the gradient of {self.settings.names[index]!r} was computed after another "
                "optimizer's step() had sent as many gradients of this optimizer as in the step "
                "before: call backward() for all losses before the first step(), or this "
                "optimizer's step() first. No gradient of this step was applied."
            )
        self.synchronized = self.was_read = False
        done = self._passes.count(index, self.syncs)
        if self.current is None:
            return
        passes = self.settings.passes
        if done > passes:
            self._refuse_pass(index, done)
        if done == passes:
            self.current.note(index)
            [gradient] = self.current.ready([(index, gradient)])
        self._passes.hold(index, gradient, self._settle)
        if self.ready_times is not None:
            self.ready_times.mark(index)
        self._collecting = self._collectable()

    def _refuse_pass(self, index: int, done: int) -> None:
        raise HvdPipeError(
            f"the gradient of {self.settings.names[index]!r} was computed {done} times before "
            f"step(), but backward_passes_per_step is {self.settings.passes}: to accumulate "
            "gradients over several backward passes, pass their number as "
            "backward_passes_per_step=, or write `with optimizer.no_sync():` around all but the "
            "last one."
        )

    def _collectable(self) -> int | None:
        """Return the running pass, if its other gradients may be taken together."""
        task = torch._C._current_graph_task_id()
        one_by_one = (
            not self._hooks_are_alone
            or self.settings.passes > 1
            or not self.syncs
            or self.ready_times is not None
            or check_mode.active.on
            or timeline.active.is_on
        )
        return None if one_by_one or task == -1 else task

    def collect(self, index: int, gradient: torch.Tensor) -> bool:
        """Keep ``p.grad`` until there are more to take; return False for `on_gradient` to do it.

        Between layers that compute, the code for a gradient is in no cache: several at a time
        cost some microseconds less than one by one.
        """
        if self._collecting != torch._C._current_graph_task_id():
            return False
        current = self.current
        assert current is not None
        self._collected.append((index, gradient))
        if current.note(index) or current.noted_bytes > _MOST_COLLECTED_BYTES:
            self._take_collected()
        return True

    def _end_collecting(self) -> None:
        """Take what was collected; other gradients are taken one by one."""
        self._collecting = None
        if self._collected:
            self._take_collected()

    def _take_collected(self) -> None:
        assert self.current is not None
        collected, self._collected = self._collected, []
        indices = [index for index, _ in collected]
        for index in indices:
            done = self._passes.count(index, True)
            if done > 1:
                self._refuse_pass(index, done)
        for index, gradient in zip(indices, self.current.ready(collected), strict=True):
            self._passes.hold(index, gradient, self._settle)

    def _begin_pass(self, index: int) -> None:
        """Drop gradients that an earlier pass has sent, if the script has cleared them."""
        if self.current is None or torch.is_grad_enabled():  # create_graph replaces gradients
            return
        if self._is_dropped:
            if not self.current.completed:
                self._passes.end()
                return
            if not self._warned_of_dropped:
                self._warned_of_dropped = True
                _log.warning(
                    "gradients (of %r, among others) were sent and then cleared before step(): "
                    "where another optimizer's backward pass computes them, requires_grad_(False) "
                    "on their parameters meanwhile saves both (said once)",
                    self.settings.names[0],
                )
            self.give_up()
            return
        if not self.synchronized or self.accumulates:
            return
        others = (p for i, p in enumerate(self.settings.parameters) if i != index)
        if self.current.holds(index) or any(parameter.grad is not None for parameter in others):
            raise HvdPipeError(
                f"backward() once more before step(), after the gradient of "
                f"{self.settings.names[index]!r} had been read, changed or synchronized: a sum of "
                f"averages cannot be sent again under {self.name} with these arguments. Read and "
                "change gradients after the last backward pass, and write "
                "`with optimizer.no_sync():` around the others; to drop them, call "
                "optimizer.zero_grad() (model.zero_grad(set_to_none=False) is not seen)."
            )

    def _end_pass(self, is_last: bool) -> None:
        """Show the zeros that ``step()`` sends: ranks that clip list the same gradients then."""
        self._end_collecting()
        current = self.current
        if not is_last or current is None or current.is_flushed or not self.has_new_gradients:
            return
        if isinstance(self.settings.owner(), torch.optim.SparseAdam):
            return  # it takes no dense ones
        if len(current.completed) < len(current.slots):
            for index, gradient in current.show_missing().items():
                self._passes.hold(index, gradient, self._settle)

    @property
    def _is_dropped(self) -> bool:
        """Whether the script has cleared all gradients that were sent."""
        if self.synchronized or self.current is None:
            return False
        held, parameters = self._passes.held.items(), self.settings.parameters
        return bool(held) and all(parameters[i].grad is not gradient for i, gradient in held)

    @property
    def accumulates(self) -> bool:
        """Whether another gradient may be added to an average, and the sum be averaged."""
        return False

    def give_up(self) -> None:
        """Complete a round whose gradients are not to be applied; all ranks do so alike."""
        assert self.current is not None
        self._record_changes(self.current)
        changes = self.current.changes
        if changes is not None:  # the next gradient may be in the place of one
            self.current.changes = replace(changes, left=dict.fromkeys(changes.left))
        self._passes.end()
        self.send()
        self.current.wait()
        for index, parameter in enumerate(self.settings.parameters):
            # Other ranks' gradients, where this one had none.
            if self.current.holds(index) or index in self.current.as_dense:
                parameter.grad = None
        self.current.end_round()
        self.abandon()

    def _record_changes(self, current: BucketSet) -> None:
        complete = set(current.completed)
        if not current.is_flushed:
            current.changes = self._passes.changes(self.settings.parameters, complete)
            current.is_early = bool(self.was_read and len(self._passes.held) and not complete)

    def _check_unchanged(self, current: BucketSet) -> None:
        """Refuse what was done to gradients after another optimizer's ``step()`` had sent them."""
        now = self._passes.changes(self.settings.parameters, set(current.completed))
        before = current.changes.left if current.changes else {}
        late = sorted(now.left.keys() - before.keys()) if now else []
        if late:
            self.give_up()
            raise HvdPipeError(
                f"the gradient of {self.settings.names[late[0]]!r} was cleared or replaced after "
                "another optimizer's step() had sent it: do so before the first step() after "
                "backward(), or change its values in place. No gradient of this step was applied."
            )

    def _settling(self, gradient: torch.Tensor, func: Any, args: tuple[Any, ...]) -> None:
        """Settle all gradients, as ``func`` is about to read or change one."""
        assert self.current is not None
        if self.settings.owner() is None:
            release(gradient)  # no optimizer will apply it
            return
        held, running = self._passes.held, self._passes.is_running
        # Another thread may have taken it off.
        index = next((i for i, g in held.items() if g is gradient), -1)
        if not self.syncs or (running and index not in self.current.completed):
            return  # a local gradient
        if running:
            name = self.settings.names[index]
            raise HvdPipeError(
                f"the gradient of {name!r} was read or changed within backward(), after it was "
                "handed over to be sent: do so after backward(), where it is the average; or in a "
                "hook that was registered before the optimizer was wrapped, where it is local."
            )
        if self.synchronized:  # an average, which is watched for a scaler
            if func is not torch._amp_foreach_non_finite_check_and_unscale_:
                return
            self._passes.end()
        release(gradient)
        self.settings.optimizer._gradients_are_read(func, args)

    def send(self) -> None:
        """Send the remaining gradients of a step whose gradients are computed."""
        if self.current is not None:
            self.current.flush()

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
        self.waited_early = self.synchronized
        self.prepare_now()
        self._passes.end()
        self.synchronized, self.was_read, self.stepped = False, False, True
        return self._has_update

    def settle(self) -> None:
        """Prepare the coming update, as the script reads or changes its gradients."""
        if not self.synchronized:
            self.was_read = True
            self.prepare_now()

    def synchronize(self, by_hand: bool = False, knows_scale: bool = False) -> None:
        """Prepare the coming update where gradients wait for one, else `drain`."""
        if self.synchronized:
            return
        self._end_collecting()
        if self._is_dropped:
            self.give_up()
        cleared = all(parameter.grad is None for parameter in self.settings.parameters)
        if by_hand or (self.has_new_gradients and not cleared):
            self.was_read = True  # by code that holds one of them
            self.prepare_now()
            self.was_read, self.has_new_gradients = False, True
            if self.needs_loss_scale and not knows_scale:
                self.watch_for_scaler()
        else:
            self._agree_on_load()
            self.drain()

    def watch_for_scaler(self) -> None:
        """Hold prepared gradients, so that a gradient scaler's check is noticed."""
        for index, parameter in enumerate(self.settings.parameters):
            if parameter.grad is not None:
                self._passes.hold(index, parameter.grad, self._settle)

    def note_gradients(self) -> None:  # noqa: B027 - most need not know
        """Record ``p.grad``, which the user's optimizer is about to apply."""

    def prepare_now(self) -> None:
        """Prepare the coming update, if that has not been done."""
        if self.synchronized:
            return
        self._end_collecting()
        timeline.active.end_backward()
        if not self.has_new_gradients:
            self._begin_step()
        if self.current is not None and self.current.is_flushed:
            self._check_unchanged(self.current)
        elif self.current is not None:
            self._record_changes(self.current)
        had_new_gradients, self.has_new_gradients = self.has_new_gradients, False
        held = self._passes.end(stay_pending=self.may_defer)
        for other in live_engines():  # another rank may wait for one of these first
            if self._retired and not other.known.isdisjoint(self.known):
                self._take_over_from(other)
            if other is self or other.synchronized or other.current is None:
                continue
            other._end_collecting()
            if other.current.is_whole:
                other._record_changes(other.current)
                other.send()
        self._has_update = self.prepare(held if self.was_read or self.may_defer else {})
        self.has_new_gradients = had_new_gradients
        self.synchronized = True
        self.rounds += 1
        _live.add(self)  # also one that another has replaced, and that is used all the same

    def _take_over_from(self, other: Engine) -> None:
        """Have gradients averaged that a newer optimizer of the same parameters has registered."""
        if other is self:
            return
        if not self.accumulates:
            raise HvdPipeError(
                f"step() or synchronize() of an optimizer of {self.settings.names[0]!r}, which "
                f"another DistributedOptimizer has as well, and was made later. Under {self.name} "
                "with these arguments optimizers cannot take turns: wrap the one to go on with "
                "anew, or use strategy='merged-gradient'."
            )
        if other.has_new_gradients and not other.synchronized:
            other.settings.optimizer._gradients_are_read(None, ())

    def abandon(self) -> None:
        """Drop gradients that were prepared and are not to be applied."""
        self.synchronized = self.was_read = self.has_new_gradients = False

    def note_cleared(self) -> None:
        """Register that all gradients are cleared; those that have left are dropped later."""
        self._end_collecting()
        if self.synchronized or self.current is None or not self.current.completed:
            self._passes.end()
            self.abandon()


_MOST_COLLECTED_BYTES = 2**20  # until they are copied, they take memory beside the bucket's

_log = logging.getLogger("hvd_pipe")

_live: weakref.WeakSet[Engine] = weakref.WeakSet()


def live_engines() -> Iterator[Engine]:
    """Yield the engines in use, in an order that all ranks share; retire all others."""
    for engine in sorted(_live, key=lambda engine: engine.settings.tag):
        if (_optimizer := engine.settings.owner()) is not None:
            yield engine  # the reference keeps its optimizer alive meanwhile
        else:
            engine.retire()


def unused_groups() -> list[Group]:
    """Return the groups of optimizers that are gone; other ranks may still send to them."""
    users = {group: group.user for group in open_groups}
    return [g for g, user in users.items() if user is not None and user.settings.owner() is None]


def _hook(hooks: GradientHooks) -> Callable[[torch.Tensor], None]:
    def on_gradient(parameter: torch.Tensor) -> None:
        engine, index = hooks.engine(), hooks.places.get(id(parameter))
        gradient = parameter.grad
        if engine is None or index is None or gradient is None:
            return  # an earlier hook has applied and cleared it
        if engine.collect(index, gradient):
            return
        # The optimizer may be gone while the user's, which shares its hooks, is still used.
        if engine.settings.owner() is not None:
            engine.on_gradient(index, gradient)

    return on_gradient


def _settle_by(
    method: weakref.WeakMethod[Settle], gradient: torch.Tensor, func: Any, args: tuple[Any, ...]
) -> None:
    settle = method()
    if settle is None:
        release(gradient)  # no engine will apply it
    else:
        settle(gradient, func, args)
