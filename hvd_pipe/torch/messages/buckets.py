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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from horovod.torch.mpi_ops import Average, allgather_async

from hvd_pipe.errors import HvdPipeError, RanksDisagreeError
from hvd_pipe.runtime import check_mode
from hvd_pipe.runtime.timeline import NOT_SHOWN, PendingOperation
from hvd_pipe.torch.agree import check_alike, gather, poison, refuse_changed
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.messages import pending
from hvd_pipe.torch.messages.allreduce import (
    CheckedMessage,
    Feedback,
    Message,
    Reduction,
    Residuals,
    sendable,
)
from hvd_pipe.torch.messages.compressed_allreduce import message_for
from hvd_pipe.torch.messages.control_flags import COUNT, Changes, ControlFlags
from hvd_pipe.torch.messages.pending import host_values
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
        self.waiting = len(self.views)
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

    def fill(self) -> bool:
        """Count one gradient that is complete; return whether that was the last one."""
        self.waiting -= 1
        if self.waiting > 0:
            return False
        self._filled_version = self.flat._version
        if self._checked is not None:
            self._checked.take_snapshot()
        return True

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
        self.waiting = len(self.views)
        self._filled_version = None


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
        self.buckets: list[Bucket] = []
        for i, group in enumerate(dense):
            name, parameters = f"{self._tag}.{i}", [self.parameters[index] for index in group]
            extra = COUNT if i == len(dense) - 1 else 0
            feedback = None if like is None else like.buckets[i].message.feedback
            bucket = Bucket(
                name, parameters, self._reduction, extra, keep_local, feedback, message
            )
            self.buckets.append(bucket)
        self.slots: dict[int, tuple[Bucket, torch.Tensor]] = {
            index: (bucket, view)
            for group, bucket in zip(dense, self.buckets, strict=True)
            for index, view in zip(group, bucket.views, strict=True)
        }
        """The bucket of each dense gradient, and the view into it, by index."""
        self._shown = {index: view.detach() for index, (_, view) in self.slots.items()}
        """What is in ``p.grad``: others may make it lead elsewhere (``p.grad.data = ...``)."""
        self._places = {index: view.data_ptr() for index, (_, view) in self.slots.items()}
        self.groups = dense
        self._left: dict[int, torch.Tensor | None] = {}
        self.frozen: set[int] = set()
        """Indices of the parameters that got no gradient in this round as they do not train."""
        self.flags = self._local_flags = ControlFlags()
        """The means of all ranks' control flags, after a `wait`."""
        self._restored = False
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
    def last_message(self) -> Message:
        """What every rank sends in every round."""
        return self.buckets[-1].message

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
        return gradient.data_ptr() == self._places[index]

    # A round: gradients become ready, the rest is flushed, all is waited for.

    # Architecture: G2
    def ready(self, index: int) -> None:
        """Register a gradient; send its bucket once full, but for the last one, with the flags."""
        sparse = self.sparse
        if not self.completed:
            self._poison_free()
        self.completed.append(index)
        gradient, slot = self.parameters[index].grad, self.slots.get(index)
        assert gradient is not None
        travels_alone = gradient.is_sparse and not sparse.as_dense
        if travels_alone:
            sparse.add(index, gradient)
        elif slot is None:
            sparse.add(index, gradient.to_sparse(1))  # dense for once; the others' are not
        if slot is None:
            return
        bucket, view = slot
        if travels_alone:
            view.zero_()
        else:
            self._fill(index, view, gradient)
            if gradient.is_sparse and index not in sparse.known:
                sparse.unannounced[index] = gradient.detach()
        if bucket.fill():
            timeline.active.ready(bucket.name)
            if bucket is not self.buckets[-1]:
                bucket.launch()

    def _fill(self, index: int, view: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Put a gradient into its view, and ``p.grad`` as well, copying only what is not there."""
        if gradient is None:
            view.zero_()
        elif gradient.is_sparse:
            view.copy_(gradient.detach().to_dense())
            return
        elif gradient.data_ptr() == self._places[index]:
            return
        elif gradient.requires_grad:
            view.copy_(gradient.detach())
            return  # backward(create_graph=True): keep the graph
        else:
            view.copy_(gradient)
        self.parameters[index].grad = self.shown(index)

    def shown(self, index: int) -> torch.Tensor:
        """Return what shows a dense gradient to users: a tensor over the memory of its view."""
        shown = self._shown[index]
        if shown.data_ptr() != self._places[index]:
            shown = self._shown[index] = self.slots[index][1].detach()
        return shown

    def show_missing(self) -> dict[int, torch.Tensor]:
        """Put zeros, as `flush` sends them, where there is no gradient; return them by index."""
        shown = {}
        for index, (_, view) in self.slots.items():
            parameter = self.parameters[index]
            if parameter.grad is None and parameter.requires_grad:
                view.zero_()
                is_sparse = index in self.as_dense  # on all ranks
                zeros = _sparse(parameter, None) if is_sparse else self.shown(index)
                shown[index] = parameter.grad = zeros
        return shown

    def _poison_free(self) -> None:
        """Under checks, fill with NaN the views that gradients of this round will overwrite."""
        if not check_mode.active.on:
            return
        with torch._C.DisableTorchFunctionSubclass():  # others may be pending
            for index, (_, view) in self.slots.items():
                if not self.holds(index):
                    poison(view)

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
            if not complete:
                self._poison_free()
            for index, (_, view) in self.slots.items():
                if index not in complete:
                    parameter = self.parameters[index]
                    if parameter.grad is None and not parameter.requires_grad:
                        self.frozen.add(index)
                    self._fill(index, view, parameter.grad)
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
        for bucket in self.buckets:
            if not bucket.launched:
                bucket.launch()
        self.is_flushed = True

    def _touched(self, complete: set[int]) -> str:
        """Return the failure to report where code has changed a gradient on the wire, or ""."""
        changes = self.changes or Changes()
        touched = [bucket for bucket in self.buckets if bucket.touched and not changes.failure]
        for index, (bucket, _) in self.slots.items() if touched else ():
            is_reported = index in changes.left or index in self.sparse.unannounced
            if bucket in touched and index in complete and not is_reported:
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
            for parameter in self.parameters:  # or another step() would apply them
                parameter.grad = None
            self.end_round()
            raise

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
        """Drop a round that is not complete, and its residuals, once its messages have arrived."""
        for bucket in self.buckets:
            bucket.wait()
            bucket.take_changed()
            for residual in bucket.message.residuals.values():
                residual.zero_()
        self.sparse.complete()
        self.sparse.clear()
        self.end_round()
        self.completed, self.is_flushed, self.changes = [], False, None

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

    # Architecture: G10
    def bind_gradients(self, shown_in: Mapping[int, torch.Tensor] | None = None) -> None:
        """Set each ``p.grad`` to what is to be applied, or to None; this ends the round."""
        shown_in = shown_in or {}
        for index in self.slots:
            self._bind(index, shown_in.get(index))
        for index, gathered in self.sparse.gathered.items():
            gradient = None if self.is_dropped else _in_place_of(shown_in.get(index), gathered)
            self.parameters[index].grad = gradient
        self.end_round()

    def bind_some(self, shown: Mapping[int, torch.Tensor]) -> None:
        """Set ``p.grad`` to the gradients that have arrived, by index; see `shown`."""
        unusual = self.is_dropped or self.frozen or self._left or self.as_dense
        for index, gradient in shown.items():
            if unusual or gradient.data_ptr() != self._places[index]:
                self._bind(index, None)
            else:
                self.parameters[index].grad = gradient

    def _bind(self, index: int, shown_in: torch.Tensor | None) -> None:
        gradient: torch.Tensor | None
        if self.is_dropped or index in self.frozen:
            gradient = None  # a frozen parameter must not move: no decay, no momentum
        elif index in self._left:
            gradient = self._left[index]
        elif index in self.as_dense:
            gradient = _in_place_of(shown_in, self.slots[index][1].to_sparse())
        else:
            gradient = self.shown(index)
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
        for index, (_, view) in self.slots.items():
            gradient = self.parameters[index].grad
            if gradient is not None and not gradient.is_sparse:
                self._fill(index, view, gradient)


def _in_place_of(held: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
    """Put the gradient into a tensor that the script holds, and return that; else the gradient."""
    if held is None or held is gradient:
        return gradient
    if held.is_sparse == gradient.is_sparse:
        held.data = gradient
    else:
        held.data = gradient.to_sparse(1) if held.is_sparse else gradient.to_dense()
    return held


class SparseGradients:
    """The sparse gradients of one round, ``known`` on all ranks.

    They travel as they are: every rank gathers all ranks' indices and values. A parameter shows
    only by its first gradient that it is sparse, and a rank that computed none cannot know: a
    control flag says that some rank has found one, and all ranks agree and gather after that
    round. Later buckets have no room for it.

    Those that travel ``as_dense`` stay in their buckets. Once known, they are sparse on all ranks
    before the update, which else differed in its last bits.
    """

    def __init__(self, settings: Settings, tag: str) -> None:
        self._parameters, self._reduction, self._tag = settings.parameters, settings.reduction, tag
        self.as_dense = settings.sparse_as_dense
        self.known = settings.known_as_dense if self.as_dense else settings.sparse
        self.alone: set[int] = set() if self.as_dense else self.known
        """Of these, the indices of the gradients that are in no bucket."""
        self.in_buckets: set[int] = self.known if self.as_dense else set()
        """Of these, the indices of the gradients that travel as dense ones."""
        self._gathers: dict[int, _Gather] = {}
        self.unannounced: dict[int, torch.Tensor] = {}
        """This rank's gradients that other ranks do not know to be sparse, by index."""
        self.gathered: dict[int, torch.Tensor] = {}
        """The reduced gradients, by index."""

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Register a gradient of this rank; send it if all ranks know it to be sparse."""
        if index in self.known:
            self._send(index, gradient)
        else:
            self.unannounced[index] = gradient.detach()  # p.grad becomes another tensor

    def flush(self) -> None:
        """Take part in the gathers of all gradients that are known to be sparse."""
        for index in sorted(self.alone):
            if index not in self._gathers:
                self._send(index, None)

    def agree(self) -> None:
        """Gather gradients that some rank has found sparse; all ranks call this together."""
        lists = [unannounced := sorted(self.unannounced.keys() - self._gathers.keys())]
        if not self._reduction.alone:
            lists = gather(unannounced, f"{self._tag}.sparse", self._reduction.process_set)
        indices = sorted(set[int]().union(*lists))
        for index in () if self.as_dense else indices:
            self._send(index, self.unannounced.get(index))
        self.known.update(indices)
        self.unannounced.clear()

    def end_round(self) -> None:
        """Forget what was sent, and be ready for the next round."""
        self._gathers.clear()

    def clear(self) -> None:
        """Drop the round; all has arrived."""
        for gradients in (self._gathers, self.gathered, self.unannounced):
            gradients.clear()

    def _send(self, index: int, gradient: torch.Tensor | None) -> None:
        """Start to gather a gradient; a rank that has none takes part with no entries."""
        local = _sparse(self._parameters[index], gradient).coalesce()
        parts = [local.indices().t().contiguous(), local.values().contiguous()]
        self._gathers[index] = gathering = _Gather(local.size(), local.dtype, parts)
        reduction, name = self._reduction, f"{self._tag}.sparse.{index}"
        if reduction.alone:
            return
        check_mode.active.delay()
        begun = timeline.active.now()
        for part, label in zip(parts, ("indices", "values"), strict=True):
            with pending.explaining():
                handle = allgather_async(
                    sendable(part), f"{name}.{label}", process_set=reduction.process_set
                )
            gathering.handles.append(pending.sent(handle))
            # An all-gather moves half of what an all-reduce of the gathered bytes would.
            reduction.traffic.add(part.nbytes * reduction.workers // 2, reduction.workers)
        nbytes = sum(part.nbytes for part in parts)
        gathering.operation = timeline.active.launched(name, nbytes, handle, begun=begun)

    def complete(self) -> None:
        """Block until all that was sent is in `gathered`."""
        for index, gathering in self._gathers.items():
            if gathering.handles:
                check_mode.active.delay()
                gathering.parts = [pending.wait(handle) for handle in gathering.handles]
                gathering.handles.clear()
                gathering.operation.complete()
            indices, values = gathering.parts
            if values.dtype != gathering.dtype:
                values = values.view(gathering.dtype)
            if self._reduction.op == Average:
                values = values / self._reduction.workers
            self.gathered[index] = torch.sparse_coo_tensor(
                indices.t(), values, gathering.size, check_invariants=False
            ).coalesce()


@dataclass
class _Gather:
    """One sparse gradient on its way: this rank's indices and values, then those of all ranks."""

    size: torch.Size
    dtype: torch.dtype
    parts: list[torch.Tensor]
    handles: list[int] = field(default_factory=list)
    operation: PendingOperation = NOT_SHOWN


def _sparse(parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    if gradient is None:
        # As nn.Embedding makes them: rows are listed, and dense in themselves.
        indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty(0, *parameter.shape[1:])
        return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
    return gradient.detach()


# What a checkpoint holds of buckets, by index.


def gradients_of(buckets: BucketSet) -> list[torch.Tensor | None]:
    """Return a copy of each gradient as the last `BucketSet.wait` has left it."""
    gradients: list[torch.Tensor | None] = [None] * len(buckets.parameters)
    for index, (_, view) in buckets.slots.items():
        value = view.to_sparse() if index in buckets.as_dense else view.clone()
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
            view = buckets.slots[index][1]
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
