"""Merged-gradient without the barrier: messages travel behind the next forward pass, too.

Synchronous SGD, ``w[t+1] = w[t] - lr * mean_i g_i(w[t])``, bit for bit: a weight must be new when
it is used next, and no earlier::

    backward t   gradients become ready and are sent, what is needed first goes first
    step()       takes the optimizer's options as they are now, and returns: parameters and
                 gradients are pending
    forward t+1  the first use of a parameter waits for its message, and lets the user's optimizer
                 update what has arrived
    backward t+1 its first gradient waits for the rest: the buffers are free from here on

Code that uses a parameter, a gradient or the optimizer's state earlier waits then, and gets the
values after ``step()``. The first update of a step waits for the message with the control flags,
so that no weight moves where a rank has reported an error.

Each rank may defer other updates. All ranks send the same messages in the same order, so a rank
that updates in ``step()`` (hooks on the optimizer, a scaler, clipping) can train with others that
do not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.measuring.step_times import FirstUses
from hvd_pipe.planning.plan import Plan
from hvd_pipe.runtime import check_mode
from hvd_pipe.strategy import MergedGradient
from hvd_pipe.torch import pending_tensors
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.messages.buckets import Bucket, BucketSet
from hvd_pipe.torch.messages.ordered import OrderedMessages
from hvd_pipe.torch.partial_updates import Options, updates_each_parameter, updates_quietly
from hvd_pipe.torch.strategies.merged_gradient import MergedGradientEngine
from hvd_pipe.torch.strategies.pending_parameters import Memory, PendingParameters
from hvd_pipe.torch.strategies.settings import Settings

_log = logging.getLogger("hvd_pipe")


class ForwardOverlapEngine(MergedGradientEngine):
    """Sends in the order of a plan; leaves updates to the first use of each parameter."""

    ready_times: FirstUses | None
    _sends_in_order = True

    said_at = logging.WARNING
    """At which level it says that updates are not deferred."""

    def __init__(
        self, settings: Settings, plan: Plan, measured: bool, memory: dict[int, Memory]
    ) -> None:
        self._memory = memory
        self.messages = OrderedMessages(())
        self._parameters = PendingParameters((), memory, self._use, self.finish_before_others)
        super().__init__(settings, MergedGradient(plan=plan), plan)
        self._measured = measured
        self._updater: int | None = None
        """The thread that is updating, in which nothing more is finished."""
        self._deferred = False
        """Whether the last step's averages were not all waited for in its ``step()``."""
        self._pending: list[int] = []
        """The buckets of the last step that are not applied yet."""
        self._applying = threading.RLock()
        self._options: Options | None = None
        self._gradients: dict[int, torch.Tensor] = {}
        self._warned_of_hooks = False

    def take(self, plan: Plan, measured: bool) -> None:
        """Send by another plan from the next step on; all ranks call this."""
        self.end_round()
        self._replace_buckets(plan)
        self._measured = measured

    def begin_watch(self) -> None:
        """`watch`, for the first time."""
        self.ready_times = FirstUses(self.settings.parameters)
        self.watch()

    def watch(self) -> None:
        """Time the first use of each parameter in the next pass; updates wait in ``step()``."""
        assert self.ready_times is not None
        self.ready_times.begin()
        self._parameters.watch()

    @property
    def sees_all_uses(self) -> bool:
        """Whether no parameter was used by code in C++ alone while uses were watched."""
        return self._parameters.sees_all_uses

    def end_watch(self) -> None:
        """Time no uses any more."""
        self.ready_times = None
        self._parameters.show_all()

    def build(self) -> None:
        super().build()
        self._is_closed, self.ready_times = False, None
        self._parameters.close()
        self._parameters = PendingParameters(
            self.settings.parameters, self._memory, self._use, self.finish_before_others
        )

    def retire(self) -> None:
        self._end_deferred()
        super().retire()
        self._is_closed = True
        self._parameters.close()
        self.messages.close()

    def _make_buckets(self, groups: Sequence[Sequence[int]]) -> BucketSet:
        assert self.plan is not None
        self.messages.close()
        order = self.plan.order or tuple(range(len(groups)))
        self.messages = OrderedMessages(order)
        return BucketSet(self.settings, groups, "gradients", message=self.messages.make)

    # A step.

    # Architecture: F3
    def before_update(self) -> bool:
        self.may_defer = self._can_defer()
        try:
            return super().before_update()
        finally:
            self.may_defer = False

    def _can_defer(self) -> bool:
        compares = check_mode.active.on and self._uncompared_steps + 1 >= check_mode.COMPARE_STEPS
        if self.synchronized or self.reduction.alone or compares or self.ready_times is not None:
            return False  # a pass that waits does not tell when it would use its weights
        optimizer = self.settings.optimizer
        if not updates_each_parameter(optimizer):
            return False
        if not updates_quietly(optimizer):
            if not self._warned_of_hooks:
                self._warned_of_hooks = True
                when = "while a hook is registered on the optimizer, or for all optimizers"
                text = "overlap='forward': updates stay in step() %s (said once)"
                _log.log(self.said_at, text, when)
            return False
        return True

    # Architecture: F4
    def prepare(self, shown_in: Mapping[int, torch.Tensor]) -> bool:
        self.send()
        if not self.may_defer:
            return super().prepare(shown_in)
        self._gradients = dict(shown_in)
        if self.current.compares:
            self._release_gradients()
            return super().prepare({})
        self._deferred, self._pending = True, list(range(len(self.current.buckets)))
        self.is_due = True
        _unfinished.add(self)
        self._options = Options.of(self.settings.optimizer)
        # A graph that is kept must not be run again on old weights.
        torch.autograd.graph.increment_version(self.settings.parameters)
        for index in self.current.slots.keys() - set(self.current.completed):  # zeros, or a part
            if index in self._gradients:
                pending_tensors.release(self._gradients[index])
            self._gradients[index] = gradient = self.current.slots[index].shown
            pending_tensors.hold(gradient, self._settle)
        now = self._parameters.hold(self.settings.owner())
        self._apply({self._bucket_of[index] for index in now | self.current.as_dense})
        return False

    # Architecture: F5
    def _use(self, indices: Collection[int]) -> None:
        """Update these parameters, which are about to be used."""
        if self.ready_times is not None:
            self.ready_times.use(indices)
        if self._pending:
            self._apply({self._bucket_of[index] for index in indices})

    def _settling(self, gradient: torch.Tensor, func: Any, args: tuple[Any, ...]) -> None:
        """After ``step()``, apply the bucket of a gradient that is read, not of a cleared one."""
        if not self._deferred:
            super()._settling(gradient, func, args)
        elif func in _CLEARS:  # zero_grad() of all gradients should not wait
            pending_tensors.release(gradient)
            gradient.data = torch.zeros_like(gradient)
        else:
            indices = (i for i, g in self._gradients.items() if g is gradient)
            self._apply({self._bucket_of[index] for index in indices})

    def finish_before_others(self, *_: object) -> None:
        """Finish before other weights are loaded, which may also follow a failure."""
        with contextlib.suppress(HorovodInternalError, HvdPipeError):
            self.finish()

    def finish(self) -> None:
        if self._pending:
            self._apply(self._pending)

    # Architecture: F10
    def end_round(self) -> None:
        """Finish, and read all ranks' control flags; all ranks call this before they go on."""
        if self._deferred:
            self.finish()
            self._end_deferred()
            self._receive()
            self.current.end_round()

    # Architecture: F9
    def on_gradient(self, index: int, gradient: torch.Tensor) -> None:
        if self._deferred:
            self.end_round()
        if self.ready_times is not None:
            self._parameters.note_gradient(index)
        super().on_gradient(index, gradient)

    def prepare_now(self) -> None:
        if self._is_closed:  # another optimizer of these parameters is newer, and they take turns
            self.build()
        self.end_round()
        super().prepare_now()

    def complete_round(self) -> None:
        self.end_round()

    def discard(self) -> None:
        self._end_deferred()
        super().discard()

    def _end_deferred(self) -> None:
        """End the deferred update, whether it was made or dropped."""
        self._parameters.show_all()
        self._release_gradients()
        self._deferred, self._pending, self._options = False, [], None
        self._end_due()

    def _release_gradients(self) -> None:
        for gradient in self._gradients.values():
            pending_tensors.release(gradient)
        self._gradients.clear()

    def _end_due(self) -> None:
        self.is_due = False
        _unfinished.discard(self)
        self._parameters.owner = None

    @property
    def is_equal_everywhere(self) -> bool:
        return not self._deferred and super().is_equal_everywhere

    # Architecture: F6
    def _apply(self, wanted: Collection[int]) -> None:
        """Wait for these buckets, and update with all that has arrived."""
        if self._updater == threading.get_ident():
            return  # the optimizer, or what it calls, is in the middle of an update
        with self._applying:  # a thread that writes a checkpoint may come here, too
            waited = [number for number in self._pending if number in wanted]
            if not waited:
                return
            assert self._options is not None
            self._updater = threading.get_ident()
            try:
                with self._options.context():
                    self._update(waited)
            except (HorovodInternalError, HvdPipeError):
                self._end_deferred()  # what has not been averaged must not be applied later
                raise
            finally:
                self._updater = None
            if not self._pending:
                self._end_due()

    def _update(self, waited: Sequence[int]) -> None:
        assert self._options is not None
        buckets = self.current.buckets
        if len(self._pending) == len(buckets):  # no weight has moved
            self._wait_for(buckets[-1])
            if self.current.mean_flags().are_unlike(self.reduction.workers):
                self._update_all(self._options)
                return
        for number in waited:
            self._wait_for(buckets[number])
        # One update of many parameters takes less than many of few.
        arrived = [i for i in self._pending if i in waited or buckets[i].message.arrived]
        for number in arrived:
            buckets[number].message.wait()
        indices = [index for number in arrived for index in self.current.groups[number]]
        parameters = [self.settings.parameters[index] for index in indices]
        self._parameters.show(indices)
        gradients = {index: self._gradients.pop(index) for index in indices}
        for gradient in gradients.values():
            pending_tensors.release(gradient)
        try:
            with self._bound(indices):
                self.current.bind_some(gradients)
                self.settings.optimizer._update_some(parameters, self._options)
        finally:
            self._pending = [number for number in self._pending if number not in arrived]

    def _update_all(self, options: Options) -> None:
        """Wait for all messages: ranks have to compare something before any weight moves."""
        every = range(len(self.settings.parameters))
        self._receive()
        self._release_gradients()
        self._parameters.show(every)
        try:
            with self._bound(every):
                self.current.bind_gradients()
                due = [p for p in self.settings.parameters if p.grad is not None]
                if due:
                    self.settings.optimizer._update_some(due, options)
        finally:
            self._end_deferred()

    @contextlib.contextmanager
    def _bound(self, indices: Collection[int]) -> Iterator[None]:
        """Let ``p.grad`` be the average within this, and then again what the script has set."""
        parameters = {index: self.settings.parameters[index] for index in indices}
        averages = set(self.current.as_dense)  # the script holds no tensor of these
        with torch._C.DisableTorchFunctionSubclass():  # other threads wait for the update
            kept = {index: parameter.grad for index, parameter in parameters.items()}
            try:
                yield
            finally:
                for index, parameter in parameters.items():
                    local = kept[index]
                    if local is not None and local.requires_grad:
                        continue  # backward(create_graph=True) has left this rank's
                    if parameter.grad is not None and index not in averages:
                        parameter.grad = local
                self._parameters.release(indices)

    def _wait_for(self, bucket: Bucket) -> None:
        trace, begun, arrived = timeline.active, timeline.active.now(), bucket.message.arrived
        bucket.message.wait()
        if not arrived:  # most gates find all there: the timeline shows those that do not
            trace.waited(begun, bucket.name)


_CLEARS = (torch.Tensor.zero_, torch._foreach_zero_)

_unfinished: weakref.WeakSet[ForwardOverlapEngine] = weakref.WeakSet()
"""Engines with updates to come."""


def _finish_all() -> None:
    """Finish before a fork: the child has no thread that could wait."""
    for engine in list(_unfinished):
        engine.finish()


os.register_at_fork(before=_finish_all)
