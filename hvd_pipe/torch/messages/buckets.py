"""Flat gradient buckets: one buffer and one all-reduce a bucket, gradients are views into it.

A round of a plan with two buckets::

    parameters      w0        w1    w2              (ready order: w2, w1, w0)
                     |         |     |
    views          [ ---g0--- ] [-g1-][--g2--]      p.grad after backward
                        |          |
    flat buffers   [ bucket 1 |ccc][ bucket 0 ]     each leaves when its last gradient is ready
                        |               |
                    launch / wait, in place         c: the control flags, in the last bucket
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from horovod.torch.mpi_ops import Average

from hvd_pipe.errors import HvdPipeError, RanksDisagreeError
from hvd_pipe.runtime import check_mode
from hvd_pipe.torch.agree import check_alike, poison, refuse_changed
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.messages import pending
from hvd_pipe.torch.messages.allreduce import (
    CheckedMessage,
    Feedback,
    Message,
    Reduction,
    Residuals,
)
from hvd_pipe.torch.messages.compressed_allreduce import message_for
from hvd_pipe.torch.messages.control_flags import COUNT, Changes, ControlFlags
from hvd_pipe.torch.messages.pending import host_values
from hvd_pipe.torch.messages.sparse import SparseGradients, empty_sparse
from hvd_pipe.torch.parameters import gradient_dtype

if TYPE_CHECKING:
    from hvd_pipe.torch.strategies.settings import Settings


class Bucket:
    """Gradients of one dtype and device, and ``extra`` control flags, in one message."""

    def __init__(
        self,
        name: str,
        parameters: Sequence[torch.Tensor],
        reduction: Reduction,
        extra: int = 0,
        keep_local: bool = False,
        feedback: Feedback | None = None,
        message: Callable[..., Message] = message_for,
    ) -> None:
        numel = sum(parameter.numel() for parameter in parameters)
        first = parameters[0] if parameters else torch.empty(0)  # control flags alone
        self.name, self._parameters = name, parameters
        dtype = gradient_dtype(first)
        self.flat = torch.zeros(numel + extra, dtype=dtype, device=first.device)
        self.control = self.flat[numel:]
        self.views = self.views_of(self.flat)
        self._local = torch.zeros_like(self.flat) if keep_local else None
        self.local = [] if self._local is None else self.views_of(self._local)
        """This rank's own gradients of the round in flight, if they are kept."""
        self.coming = self.waiting = len(self.views)
        """How many gradients are not complete, and how many are not in the buffer."""
        self.launched = False
        self._filled_version: int | None = None
        make = partial(message, reduction, name=name, exact=extra, feedback=feedback)
        self._checked = CheckedMessage(self.flat, extra, make) if check_mode.active.on else None
        # The network writes through an alias: a new version means that other code has written.
        self.message: Message = self._checked or make(self.flat.data)

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of such a buffer, each in its parameter's shape and memory format."""
        views, offset = [], 0
        for p in self._parameters:
            size, numel = p.size(), p.numel()
            if p.is_contiguous() or not p.is_contiguous(memory_format=torch.channels_last):
                views.append(flat[offset : offset + numel].view(size))
            else:
                views.append(flat.as_strided(size, p.stride(), offset))
            offset += numel
        return views

    def note_full(self) -> None:
        """Register that the last gradient is complete."""
        self._filled_version = self.flat._version
        if self._checked is not None:
            self._checked.take_snapshot()
        timeline.active.ready(self.name)

    @property
    def touched(self) -> bool:
        """Whether code has changed gradients in place since the bucket was full."""
        return self._filled_version not in (None, self.flat._version)

    def take_changed(self) -> int | None:
        """Return, once, which gradient a check has seen change after the bucket was full."""
        element = None if self._checked is None else self._checked.take_changed()
        if element is None:
            return None
        ends = itertools.accumulate(parameter.numel() for parameter in self._parameters)
        return bisect.bisect_right(list(ends), element)

    # Architecture: G3
    def launch(self) -> None:
        """Send the bucket; its buffer belongs to the network until `wait`."""
        self.launched = True
        if self._local is not None:
            self._local.copy_(self.flat)
        self.message.launch()

    def wait(self) -> None:
        """Block until the averaged gradients are in the views; be ready for the next round."""
        self.message.wait()
        poison(self._local)
        self.launched = False
        self.coming = self.waiting = len(self.views)
        self._filled_version = None


@dataclass(eq=False, slots=True)
class Slot:
    """Where a dense gradient travels: the ``view`` into a bucket, which begins at ``place``."""

    parameter: torch.Tensor
    bucket: Bucket
    view: torch.Tensor
    place: int
    nbytes: int
    _shown: torch.Tensor

    @classmethod
    def of(cls, parameter: torch.Tensor, bucket: Bucket, view: torch.Tensor) -> Slot:
        return cls(parameter, bucket, view, view.data_ptr(), view.nbytes, view.detach())

    @property
    def shown(self) -> torch.Tensor:
        """What is in ``p.grad``: a tensor over the memory of the view."""
        if self._shown.data_ptr() != self.place:  # others have made it lead elsewhere
            self._shown = self.view.detach()
        return self._shown

    def fill(self, gradient: torch.Tensor) -> None:
        """Put a gradient into the view, unless it is there, and show it in ``p.grad``."""
        if gradient.data_ptr() == self.place:
            return
        self.view.copy_(gradient.detach())
        self.show(gradient)

    def show(self, gradient: torch.Tensor) -> torch.Tensor:
        """Put the view into ``p.grad``, in place of this gradient; return what is there then."""
        # A graph of backward(create_graph=True) stays, and what a script has put there.
        if gradient.requires_grad or self.parameter.grad is not gradient:
            return gradient
        self.parameter.grad = shown = self.shown
        return shown

    def fill_late(self, gradient: torch.Tensor | None) -> None:
        """Put what a step sends without a backward pass into the view: zeros, if nothing."""
        if gradient is None:
            self.view.zero_()
            self.parameter.grad = self.shown
        elif gradient.is_sparse:
            self.view.copy_(gradient.detach().to_dense())
        else:
            self.fill(gradient)


class BucketSet:
    """The buckets of one plan, ``groups`` of parameters' indices.

    One that is made ``like`` another shares its residuals; ``suffix`` is unique in these settings.
    """

    def __init__(
        self,
        settings: Settings,
        groups: Sequence[Sequence[int]],
        suffix: str,
        keep_local: bool = False,
        like: BucketSet | None = None,
        message: Callable[..., Message] = message_for,
    ) -> None:
        self.parameters, self._names = settings.parameters, settings.names
        self._reduction, self._last_frozen = settings.reduction, settings.frozen
        self._tag = f"{settings.tag}.{suffix}"
        self.sparse = SparseGradients(settings, self._tag)
        alone, self.as_dense = self.sparse.alone, self.sparse.in_buckets
        dense = [[index for index in group if index not in alone] for group in groups]
        dense = [group for group in dense if group] or [[]]
        self._in_order = message is message_for and self._reduction.group is not None
        self.buckets: list[Bucket] = []
        for i, group in enumerate(dense):
            name, parameters = f"{self._tag}.{i}", [self.parameters[index] for index in group]
            extra = COUNT if i == len(dense) - 1 else 0
            feedback = None if like is None else like.buckets[i].message.feedback
            bucket = Bucket(
                name, parameters, self._reduction, extra, keep_local, feedback, message
            )
            self.buckets.append(bucket)
        self.slots = {
            index: Slot.of(self.parameters[index], bucket, view)
            for group, bucket in zip(dense, self.buckets, strict=True)
            for index, view in zip(group, bucket.views, strict=True)
        }
        """By index, of the gradients that are dense."""
        self.groups = dense
        self._left: dict[int, torch.Tensor | None] = {}
        self.frozen: set[int] = set()
        """Indices of the parameters that got no gradient in this round as they do not train."""
        self.flags = self._local_flags = ControlFlags()
        """The means of all ranks' control flags, after a `wait`."""
        self._restored = False
        self.noted_bytes = 0
        """Of gradients that were noted, and are not ready."""
        self.completed: list[int] = []
        """Indices in the order in which they became ready since the last `wait`."""
        self.changes: Changes | None = None
        """What became of this round's gradients before `flush`, if anything did."""
        self.is_early = False
        """Whether none has had its last backward pass."""
        self.is_dropped = False
        """Whether the gradients of the last round are not to be applied, on any rank."""
        self.is_flushed = False
        """Whether all of this round has been sent."""
        self._usual_count = len(self.parameters)

    @property
    def stale(self) -> bool:
        """Whether buckets hold room for gradients that are known to be sparse by now."""
        return any(index in self.slots for index in self.sparse.alone)

    @property
    def messages(self) -> list[Message]:
        """What every rank sends in every round, and in the same order."""
        return [bucket.message for bucket in self.buckets[0 if self._in_order else -1 :]]

    @property
    def all_present(self) -> bool:
        """Whether no rank had left by ``hvd.join()`` in the last round."""
        return self.flags.all_present(self._reduction.workers)

    @property
    def compares(self) -> bool:
        """Whether this rank has reported what all ranks must compare after this round."""
        return bool(
            self._local_flags.changed or self._local_flags.frozen or self._local_flags.sparse
        )

    @property
    def is_whole(self) -> bool:
        """Whether as many gradients are complete as in the round before."""
        return len(self.completed) >= self._usual_count

    def holds(self, index: int) -> bool:
        """Return whether the gradient of ``parameters[index]`` is in its bucket."""
        gradient = self.parameters[index].grad
        if gradient is None or gradient.is_sparse or index not in self.slots:
            return False
        return gradient.data_ptr() == self.slots[index].place

    # A round: gradients become ready, the rest is flushed, all is waited for.

    def note(self, index: int) -> bool:
        """Count a gradient that is complete; return whether it was the last one of its message."""
        slot = self.slots.get(index)
        if slot is None:
            return True  # a sparse one has its own
        slot.bucket.coming -= 1
        self.noted_bytes += slot.nbytes
        return slot.bucket.coming == 0

    # Architecture: G2
    def ready(self, noted: Sequence[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
        """Take gradients that were noted; send full buckets, but for the last one, with the flags.

        Returns what is in each ``p.grad`` from here on.
        """
        if check_mode.active.on and not self.completed:
            self._poison_free()
        slots, completed = self.slots, self.completed
        shown = [gradient for _, gradient in noted]
        moved, views, copied, buckets = [], [], [], []
        self.noted_bytes = 0
        for place, (index, gradient) in enumerate(noted):
            completed.append(index)
            slot = slots.get(index)
            if slot is None or gradient.is_sparse:
                self._take_sparse(index, gradient, slot)
            elif gradient.data_ptr() != slot.place:
                moved.append((place, slot))
                views.append(slot.view)
                copied.append(gradient)
            if slot is not None:
                buckets.append(slot.bucket)
        if views:
            with torch.no_grad():
                torch._foreach_copy_(views, copied)
        for place, slot in moved:
            shown[place] = slot.show(shown[place])
        for bucket in buckets:  # another thread may have filled another part of one
            bucket.waiting -= 1
            if bucket.waiting == 0:
                bucket.note_full()
                self._send_full(bucket)
        return shown

    def _take_sparse(self, index: int, gradient: torch.Tensor, slot: Slot | None) -> None:
        """Register a gradient that is sparse, or is known to be."""
        if slot is not None and self.sparse.as_dense:
            slot.view.copy_(gradient.detach().to_dense())
            if index not in self.sparse.known:
                self.sparse.unannounced[index] = gradient.detach()
            return
        # One that is dense for once goes as the others' do.
        self.sparse.add(index, gradient if gradient.is_sparse else gradient.to_sparse(1))
        if slot is not None:
            slot.view.zero_()

    def _send_full(self, full: Bucket) -> None:
        """Send a bucket; those that a group carries leave in their order."""
        if not self._in_order:
            if full is not self.buckets[-1]:
                full.launch()
            return
        for bucket in self.buckets[:-1]:
            if bucket.waiting > 0:
                return
            if not bucket.launched:
                bucket.launch()

    def show_missing(self) -> dict[int, torch.Tensor]:
        """Put zeros, as `flush` sends them, where there is no gradient; return them by index."""
        shown = {}
        for index, slot in self.slots.items():
            parameter = slot.parameter
            if parameter.grad is None and parameter.requires_grad:
                slot.view.zero_()
                is_sparse = index in self.as_dense  # on all ranks
                zeros = empty_sparse(parameter) if is_sparse else slot.shown
                shown[index] = parameter.grad = zeros
        return shown

    def _poison_free(self) -> None:
        """Under checks, fill with NaN the views that gradients of this round will overwrite."""
        with torch._C.DisableTorchFunctionSubclass():  # others may be pending
            for index, slot in self.slots.items():
                if not self.holds(index):
                    poison(slot.view)

    # Architecture: G7
    def flush(self, flags: ControlFlags | None = None) -> None:
        """Send what has not left, and flags; a missing gradient counts as zero, as in Horovod."""
        if self.is_flushed:
            return
        complete = set(self.completed)
        touched = self._touched(complete)
        if touched:
            self.changes = Changes(touched)
        changes = self.changes
        self.is_dropped = changes is not None and changes.are_all(self.completed)
        with torch._C.DisableTorchFunctionSubclass():  # what is not complete may be pending
            if check_mode.active.on and not complete:
                self._poison_free()
            for index in sorted(self.slots.keys() - complete):
                slot = self.slots[index]
                if slot.parameter.grad is None and not slot.parameter.requires_grad:
                    self.frozen.add(index)
                slot.fill_late(slot.parameter.grad)
            self.sparse.flush()
        self._local_flags = replace(
            flags or ControlFlags(),
            sparse=float(bool(self.sparse.unannounced)),
            frozen=float(self.frozen != self._last_frozen),
            changed=float(changes is not None),
            early=float(self.is_early),
            whole=float(bool(complete)),
        )
        control = self.buckets[-1].control
        local = self._local_flags.to_list()
        values = torch.tensor(local, dtype=control.dtype, pin_memory=control.is_cuda)
        control.copy_(values, non_blocking=True)  # the host waits for no kernel
        self._last_frozen.clear()
        self._last_frozen.update(self.frozen)
        self._launch_rest()
        self.is_flushed = True

    def _launch_rest(self) -> None:
        for bucket in self.buckets:
            if not bucket.launched:
                bucket.launch()

    def _touched(self, complete: set[int]) -> str:
        """Return the failure to report where code has changed a gradient on the wire, or ""."""
        changes = self.changes or Changes()
        touched = [bucket for bucket in self.buckets if bucket.touched and not changes.failure]
        for index, slot in self.slots.items() if touched else ():
            is_reported = index in changes.left or index in self.sparse.unannounced
            if slot.bucket in touched and index in complete and not is_reported:
                return (
                    f"the gradient of {self._names[index]!r} (or one beside it) was changed while "
                    "it was being sent, by code that torch's Python does not see (call "
                    "optimizer.synchronize() after backward(), and change gradients then)"
                )
        return ""

    # Architecture: G8
    def wait(self) -> None:
        """Block until all is reduced and the buckets can be filled again."""
        trace, begun = timeline.active, timeline.active.now()
        sent, self.completed, self.is_flushed = self.completed, [], False
        changes, self.changes = self.changes or Changes(), None
        # The last one first: if ranks have gone apart, it is the one that is sure to say so.
        for bucket in reversed(self.buckets):
            bucket.wait()
        trace.waited(begun, self._tag)
        self.flags, self._restored = self.mean_flags(), False
        if self.flags.meets != 0.0:
            self._drop_round()
            raise HvdPipeError(pending.APART)
        if self.flags.sparse != 0.0 and (self.all_present or not self.sparse.as_dense):
            self.sparse.agree()
        if self.flags.frozen != 0.0:
            lines = [("a frozen parameter", self._names[i]) for i in sorted(self.frozen)]
            check_alike(lines, f"{self._tag}.frozen", self._reduction.process_set)
        self.sparse.complete()
        self.sparse.end_round()
        self._usual_count = len(sent) or self._usual_count
        self._left = changes.left
        try:
            self._compare(changes, sent)
        except HvdPipeError:
            self._drop_round()
            raise

    def _drop_round(self) -> None:
        for parameter in self.parameters:  # or another step() would apply them
            parameter.grad = None
        self.end_round()

    def _compare(self, changes: Changes, sent: Sequence[int]) -> None:
        """Compare what ranks have reported of a round, before any weight moves."""
        if self.flags.changed != 0.0:
            self.flags.check_changed(self._reduction.workers)
            process_set = self._reduction.process_set if self.all_present else None
            self.is_dropped = changes.compare(self._names, sent, self._tag, process_set)
        if self.flags.early != 0.0 and self.flags.unlike_passes:
            raise RanksDisagreeError(
                "gradients were read before their last backward pass on some ranks, and not on "
                "others: no rank has applied them. Read gradients after the last pass, or between "
                "the same passes on every rank."
            )
        if check_mode.active.on and self.all_present:
            changed = [bucket.take_changed() for bucket in self.buckets]
            pairs = zip(self.groups, changed, strict=True)
            names = [self._names[group[i]] for group, i in pairs if i is not None]
            refuse_changed(names, f"{self._tag}.changed", self._reduction.process_set)

    def mean_flags(self) -> ControlFlags:
        """Return the means of all ranks' flags, as the reduced buckets have them."""
        if self._reduction.alone:
            return self._local_flags
        last = self.buckets[-1]
        flags = host_values(last.control, settled=last.message.settled and not self._restored)
        weight = 1.0 if self._reduction.op == Average else float(self._reduction.workers)
        return ControlFlags(*(flag / weight for flag in flags))

    def discard(self) -> None:
        """Drop a round that is not complete, and its residuals, once its messages have arrived.

        Of a round that has begun the rest is sent, too: other ranks may have sent more of it.
        """
        begun = not self.is_flushed and any(bucket.launched for bucket in self.buckets)
        if begun:
            self._local_flags, self._restored = ControlFlags(meets=1.0), False
            self.buckets[-1].control.copy_(torch.tensor(self._local_flags.to_list()))
            self._launch_rest()
        for bucket in self.buckets:
            bucket.wait()
        flags = self.mean_flags()
        for bucket in self.buckets:
            bucket.take_changed()
            for residual in bucket.message.residuals.values():
                residual.zero_()
        self.sparse.complete()
        self.sparse.clear()
        self.end_round()
        self.completed, self.is_flushed, self.changes = [], False, None
        # Others have sent it as it was to be, or had not begun it, and meet instead.
        if begun and abs(flags.present - flags.meets) > 0.5 / self._reduction.workers:
            raise HvdPipeError(pending.APART)

    def complete(self) -> None:
        """Block until all gradients are here; sends nothing, and leaves `wait` to be called."""
        self.complete_buckets()
        self.sparse.complete()
        if not self.sparse.as_dense and self.mean_flags().sparse != 0.0:
            raise HvdPipeError(
                "the first sparse gradients are on their way: save a state two steps later, or "
                "after optimizer.synchronize()."
            )

    def complete_buckets(self) -> None:
        """Block until all buckets are reduced, and leave `wait` to be called."""
        for bucket in self.buckets:
            bucket.message.wait()
        if self.mean_flags().meets != 0.0:
            raise HvdPipeError(pending.APART)

    # Architecture: G10
    def bind_gradients(self, shown_in: Mapping[int, torch.Tensor] | None = None) -> None:
        """Set each ``p.grad`` to what is to be applied, or to None; this ends the round."""
        shown_in = shown_in or {}
        unusual = shown_in or self.is_dropped or self.frozen or self._left or self.as_dense
        for index, slot in self.slots.items():
            if unusual:
                self._bind(index, shown_in.get(index))
            else:
                slot.parameter.grad = slot.shown
        for index, gathered in self.sparse.gathered.items():
            gradient = None if self.is_dropped else _in_place_of(shown_in.get(index), gathered)
            self.parameters[index].grad = gradient
        self.end_round()

    def bind_some(self, shown: Mapping[int, torch.Tensor]) -> None:
        """Set ``p.grad`` to the gradients that have arrived, by index; see `shown`."""
        unusual = self.is_dropped or self.frozen or self._left or self.as_dense
        for index, gradient in shown.items():
            slot = self.slots[index]
            if unusual or gradient.data_ptr() != slot.place:
                self._bind(index, None)
            else:
                slot.parameter.grad = gradient

    def _bind(self, index: int, shown_in: torch.Tensor | None) -> None:
        gradient: torch.Tensor | None
        if self.is_dropped or index in self.frozen:
            gradient = None  # a frozen parameter must not move: no decay, no momentum
        elif index in self._left:
            gradient = self._left[index]
        elif index in self.as_dense:
            gradient = _in_place_of(shown_in, self.slots[index].view.to_sparse())
        else:
            gradient = self.slots[index].shown
            if shown_in is not None:
                gradient = _in_place_of(shown_in, gradient)
        if gradient is None and shown_in is not None:  # the script holds it, and zeros are applied
            shown_in.data = torch.zeros_like(shown_in.data)
        self.parameters[index].grad = gradient

    def end_round(self) -> None:
        """Reset what was recorded about the gradients of this round: they have been applied."""
        self._left, self.is_dropped = {}, False
        self.frozen.clear()
        self.sparse.gathered = {}

    def forget_flags(self) -> None:
        """Reset the flags of a round that is undone: other gradients take its place."""
        self.buckets[-1].control.zero_()
        self._local_flags, self._restored = ControlFlags(), True

    def copy_in(self) -> None:
        """Copy dense gradients into these buckets, from wherever ``p.grad`` has them."""
        for slot in self.slots.values():
            gradient = slot.parameter.grad
            if gradient is not None and not gradient.is_sparse:
                slot.fill(gradient)


def _in_place_of(held: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
    """Put the gradient into a tensor that the script holds, and return that; else the gradient."""
    if held is None or held is gradient:
        return gradient
    if held.is_sparse == gradient.is_sparse:
        held.data = gradient
    else:
        held.data = gradient.to_sparse(1) if held.is_sparse else gradient.to_dense()
    return held


# What a checkpoint holds of buckets, by index.


def gradients_of(buckets: BucketSet) -> list[torch.Tensor | None]:
    """Return a copy of each gradient as the last `BucketSet.wait` has left it."""
    gradients: list[torch.Tensor | None] = [None] * len(buckets.parameters)
    for index, slot in buckets.slots.items():
        value = slot.view.to_sparse() if index in buckets.as_dense else slot.view.clone()
        gradients[index] = None if index in buckets.frozen else value
    for index, gathered in buckets.sparse.gathered.items():
        gradients[index] = gathered.clone()
    return gradients


def own_gradients_of(buckets: BucketSet) -> list[torch.Tensor | None]:
    """Return this rank's own gradients of the round in flight, where they are kept."""
    gradients: list[torch.Tensor | None] = [None] * len(buckets.parameters)
    for group, bucket in zip(buckets.groups, buckets.buckets, strict=True):
        for index, local in zip(group, bucket.local, strict=False):
            gradients[index] = local
    return gradients


def restore_gradients(buckets: BucketSet, gradients: Sequence[torch.Tensor | None]) -> None:
    """Make these the result of the last round, as `gradients_of` returned them."""
    buckets.forget_flags()
    for index, gradient in enumerate(gradients):
        if gradient is not None and gradient.is_sparse and not buckets.sparse.as_dense:
            buckets.sparse.gathered[index] = gradient
        elif index in buckets.slots:
            view = buckets.slots[index].view
            if gradient is None:
                view.zero_()
                buckets.frozen.add(index)
            else:
                if gradient.is_sparse:  # all ranks load the same
                    buckets.sparse.known.add(index)
                view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)


def residuals_of(buckets: BucketSet) -> Residuals:
    """Return the residuals of lossy codecs."""
    residuals: Residuals = {}
    for group, bucket in zip(buckets.groups, buckets.buckets, strict=True):
        for label, flat in bucket.message.residuals.items():
            whole = residuals.setdefault(label, [None] * len(buckets.parameters))
            for index, view in zip(group, bucket.views_of(flat), strict=True):
                whole[index] = view.clone()
    return residuals


def restore_residuals(
    buckets: BucketSet, residuals: Mapping[str, Sequence[torch.Tensor | None]]
) -> None:
    """Restore what `residuals_of` returned, from these buckets or others of the same ranks."""
    for group, bucket in zip(buckets.groups, buckets.buckets, strict=True):
        for label, flat in bucket.message.residuals.items():
            for index, view in zip(group, bucket.views_of(flat), strict=True):
                saved = residuals[label][index] if label in residuals else None
                if saved is not None:
                    view.copy_(saved)
        bucket.message.drop_foreign_residuals()
