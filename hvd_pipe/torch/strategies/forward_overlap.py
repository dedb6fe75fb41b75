"""Merged-gradient without the barrier: messages travel behind the next forward pass, too.

Synchronous SGD, ``w[t+1] = w[t] - lr * mean_i g_i(w[t])``, bit for bit: a layer's weights must be
new when its next forward pass begins, and no earlier::

    backward t   gradients become ready and are sent, what is needed first goes first
    step()       takes the optimizer's options as they are now, and returns
    forward t+1  a gate before each module: waits for the messages of its parameters, and lets the
                 user's optimizer update what has arrived
    backward t+1 its first gradient waits for the rest: the buffers are free from here on

Whoever looks earlier finishes what is pending first (`ForwardOverlapEngine.finish`): state dicts,
copies, `synchronize`, a broadcast. ``p.grad`` is None after ``step()``.

What a rank defers is its own affair. All ranks send the same messages in the same order, so one
that updates in ``step()`` (hooks on the optimizer, a scaler, clipping) goes along with others that
do not.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.planning.plan import Plan
from hvd_pipe.runtime import check_mode
from hvd_pipe.strategy import MergedGradient
from hvd_pipe.torch.checking import spoil
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.measuring.first_uses import Uses
from hvd_pipe.torch.messages.buckets import Bucket, BucketSet
from hvd_pipe.torch.messages.ordered import OrderedMessages
from hvd_pipe.torch.module_hooks import ModuleHook, copy_first
from hvd_pipe.torch.strategies.merged_gradient import MergedGradientEngine
from hvd_pipe.torch.strategies.settings import Settings

__all__ = ["ForwardOverlapEngine"]

_log = logging.getLogger("hvd_pipe")


class ForwardOverlapEngine(MergedGradientEngine):
    """Sends in the order of a plan; from `open_gates` on, updates wait for the forward pass.

    Args:
        settings: The parameters, none of whose gradients is sparse.
        plan: With an ``order``.
        measured: Whether the plan was made from measured times: a checkpoint holds it then.
    """

    def __init__(self, settings: Settings, plan: Plan, measured: bool) -> None:
        self._ordered: OrderedMessages | None = None
        self._outside: set[int] = set()
        super().__init__(settings, MergedGradient(plan=plan), plan)
        self._measured = measured
        self._opened = self._may_defer = False
        self._deferred = False
        """Whether the last step's averages were not all waited for in its ``step()``."""
        self._pending: list[int] = []
        """The buckets of the last step that are not applied yet."""
        self._applying = threading.RLock()
        self._options: list[dict[str, Any]] = []
        self._late: set[int] = set()
        self._true: dict[int, torch.Tensor] = {}
        self._said: set[str] = set()

    def open_gates(self, uses: Uses) -> None:
        """Defer updates to the modules that use the parameters.

        Args:
            uses: Where they are used.
        """
        self._outside = set(uses.outside)
        places: dict[int, tuple[torch.nn.Module, set[int]]] = {}
        for index, modules in uses.modules.items():
            for module in modules:
                places.setdefault(id(module), (module, set()))[1].add(index)
        for module, indices in places.values():
            gate = ModuleHook(_weakly(self, ForwardOverlapEngine.gate, frozenset(indices)))
            read = ModuleHook(_weakly(self, ForwardOverlapEngine.update, frozenset(indices)))
            self._hooks += [
                module.register_forward_pre_hook(gate, prepend=True),
                module.register_state_dict_pre_hook(read),  # type: ignore[no-untyped-call]
            ]
        finish = _weakly(self, ForwardOverlapEngine.finish)
        replaced = _weakly(self, ForwardOverlapEngine.finish_before_others)
        for module in {each for root in uses.roots for each in root.modules()}:
            self._hooks += [
                module.register_state_dict_pre_hook(ModuleHook(before_copy=finish)),  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(ModuleHook(replaced)),  # type: ignore[no-untyped-call]
            ]
            copy_first(module)
        self._opened = True

    def take(self, plan: Plan) -> None:
        """Send by another plan from the next step on; all ranks call this."""
        self.end_round()
        self._replace_buckets(plan)

    def is_measured(self) -> None:
        """Note that the plan comes from measured steps: a checkpoint holds it."""
        self._measured = True

    def message_seconds(self) -> list[tuple[int, float]]:
        """Return the bytes of each message of the plan, and how long the link was busy with it."""
        return [] if self._ordered is None else self._ordered.seconds()

    def build(self) -> None:
        before = len(self._bucket_of) if self._adopted else 0
        super().build()
        self._outside.update(range(before, len(self.settings.names)))  # no gate knows of them

    def retire(self) -> None:
        self._forget()
        super().retire()
        if self._ordered is not None:
            self._ordered.close()

    def _make_buckets(self, groups: Sequence[Sequence[int]]) -> BucketSet:
        assert self.plan is not None
        if self._ordered is not None:
            self._ordered.close()
        order = self.plan.order or tuple(range(len(groups)))
        self._ordered = OrderedMessages(order)
        return BucketSet(self.settings, groups, "gradients", message=self._ordered.make)

    # A step.

    # Architecture: F3
    def before_update(self) -> bool:
        self._may_defer = self._can_defer()
        try:
            return super().before_update()
        finally:
            self._may_defer = False

    def _can_defer(self) -> bool:
        compares = check_mode.active.on and self._uncompared_steps + 1 >= check_mode.COMPARE_STEPS
        if not self._opened or self.reduction.alone or compares:
            return False
        if self.synchronized:
            self._say_once("after synchronize(), as for clipping, and with a GradScaler")
        elif not self.settings.owner.updates_quietly():
            self._say_once("while a hook is registered on the optimizer, or for all optimizers")
        else:
            return True
        return False

    def _say_once(self, when: str) -> None:
        if when not in self._said:
            self._said.add(when)
            _log.warning("overlap='forward': updates stay in step() %s (said once)", when)

    # Architecture: F4
    def prepare(self) -> bool:
        if not self._may_defer:
            return super().prepare()
        self._send()
        self._deferred, self._pending = True, list(range(len(self.current.buckets)))
        _unfinished[self] = self.settings.owner.itself()
        self._options = self.settings.owner.options()
        self._late = set()
        for parameter in self.settings.parameters:
            parameter.grad = None  # it travels
        self._hide()
        self._apply({self._bucket_of[index] for index in self._outside})
        return False

    # Architecture: F5
    def gate(self, indices: frozenset[int]) -> None:
        """Bring these parameters up to date: they are about to be used."""
        self.update(indices)
        if not self._pending:
            _unfinished.pop(self, None)

    def update(self, indices: frozenset[int]) -> None:
        """Bring these parameters up to date: they are about to be read."""
        if self._late:
            self._late -= indices
        if self._pending:
            self._apply({self._bucket_of[index] for index in indices})

    def finish_before_others(self) -> None:
        """Finish before other weights take the place of these; they do so after a failure, too."""
        with contextlib.suppress(HorovodInternalError, HvdPipeError):
            self.finish()

    def finish(self) -> None:
        self._apply(self._pending)

    # Architecture: F10
    def end_round(self) -> None:
        """Finish, and read what all ranks have told; all of them come here before they go on."""
        if self._deferred:
            self.finish()
            self._forget()
            self._receive()
            self.current.end_round()

    # Architecture: F9
    def on_gradient(self, index: int) -> None:
        if self._deferred:
            left = set(self._pending)
            self._late = {i for i, bucket in self._bucket_of.items() if bucket in left}
            self.end_round()
        if index in self._late:
            raise HvdPipeError(
                f"{self.settings.names[index]!r} was used before its update had arrived, in a "
                "place where it was not used in the steps that were watched: call "
                "optimizer.synchronize() before such a use, or leave overlap='forward' out."
            )
        super().on_gradient(index)

    def prepare_now(self) -> None:
        self.end_round()
        super().prepare_now()

    def after_join(self) -> None:
        self.end_round()
        super().after_join()

    def discard(self) -> None:
        self._forget()
        if any(bucket.launched for bucket in self.current.buckets):
            for bucket in self.current.buckets:  # or what waits for its turn would never leave
                if not bucket.launched:
                    bucket.launch()
        super().discard()

    def _forget(self) -> None:
        """Take the last step's update for made, or for given up."""
        self._show()
        self._deferred, self._pending = False, []
        _unfinished.pop(self, None)

    @property
    def is_equal_everywhere(self) -> bool:
        return not self._deferred and super().is_equal_everywhere

    # Architecture: F6
    def _apply(self, wanted: Collection[int]) -> None:
        """Wait for these buckets, and update with all that has arrived."""
        with self._applying:  # a thread that writes a checkpoint may come here, too
            waited = [number for number in self._pending if number in wanted]
            if not waited:
                return
            try:
                self._update(waited)
            except Exception:
                self._forget()  # what has not been averaged must not be applied later
                raise

    def _update(self, waited: Sequence[int]) -> None:
        messages = [bucket.message for bucket in self.current.buckets]
        for number in waited:
            self._wait_for(self.current.buckets[number])
        # One update of many parameters takes less than many of few.
        due = [i for i in self._pending if i in waited or messages[i].arrived]
        for number in due:
            messages[number].wait()
        indices = [index for number in due for index in self.current.groups[number]]
        parameters = [self.settings.parameters[index] for index in indices]
        kept = [parameter.grad for parameter in parameters]
        self._show(indices)
        self.current.bind_gradients(indices)
        self._pending = [number for number in self._pending if number not in due]
        try:
            self.settings.owner.update_some(parameters, self._options)
        finally:
            for parameter, gradient in zip(parameters, kept, strict=True):
                parameter.grad = gradient

    def _wait_for(self, bucket: Bucket) -> None:
        trace, begun, arrived = timeline.active, timeline.active.now(), bucket.message.arrived
        bucket.message.wait()
        if not arrived:  # most gates find all there: the timeline shows those that do not
            trace.waited(begun, bucket.name)

    def _hide(self) -> None:
        """Under ``HVD_PIPE_CHECK``, fill weights with NaN until they are up to date."""
        if check_mode.active.on:
            for index, parameter in enumerate(self.settings.parameters):
                self._true[index] = parameter.detach().clone()
                spoil(parameter)

    def _show(self, indices: Sequence[int] | None = None) -> None:
        for index in list(self._true) if indices is None else indices:
            true = self._true.pop(index, None)
            if true is not None:
                self.settings.parameters[index].data.copy_(true)


_unfinished: dict[ForwardOverlapEngine, object] = {}
"""Engines with updates to come, and their optimizers: a script may have let them go by then."""


def _weakly(
    engine: ForwardOverlapEngine, method: Callable[..., object], *arguments: object
) -> Callable[[], None]:
    """Return a call of a method that does not keep its engine alive."""
    reference = weakref.ref(engine)

    def call() -> None:
        found = reference()
        if found is not None:
            method(found, *arguments)

    return call
