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

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from horovod.torch.mpi_ops import Average

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.runtime import check_mode
from hvd_pipe.torch.agree import check_alike, gather, members
from hvd_pipe.torch.checking import spoil
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.messages.allreduce import Feedback, Message, Reduction
from hvd_pipe.torch.messages.bucket import Bucket, copy_in
from hvd_pipe.torch.messages.compressed_allreduce import message_for
from hvd_pipe.torch.messages.control_flags import COUNT, ControlFlags
from hvd_pipe.torch.messages.sparse import SparseGradients
from hvd_pipe.torch.messages.streams import host_values

__all__ = ["BucketSet"]


class BucketSet:
    """The buckets of one plan, for parameters that are known by their index in a list.

    Args:
        parameters: All parameters that take part, in an order that all ranks share.
        names: Their names.
        groups: The plan: indices of ``parameters``, grouped; each group of one dtype and device.
        reduction: How buffers are reduced.
        tag: Begins the messages' names; the same on all ranks, unique among what is in flight.
        sparse: The indices that all ranks know to be sparse, which this set adds to and which
            travel by themselves; None sends all gradients as dense ones.
        frozen: The indices that were frozen in the round before, which this set keeps up to date.
        keep_local: Whether `local` keeps this rank's own gradients.
        like: A set of the same buckets, which shares the residuals of lossy codecs.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        groups: Sequence[Sequence[int]],
        reduction: Reduction,
        tag: str,
        sparse: set[int] | None = None,
        frozen: set[int] | None = None,
        keep_local: bool = False,
        like: BucketSet | None = None,
    ) -> None:
        self._parameters, self._names, self._reduction = parameters, names, reduction
        self._tag, self._sparse = tag, SparseGradients(parameters, reduction, tag, sparse)
        self._last_frozen = set() if frozen is None else frozen
        known = sparse or set()
        dense = [[index for index in group if index not in known] for group in groups]
        dense = [group for group in dense if group] or [[]]
        last = len(dense) - 1
        self.buckets: list[Bucket] = [
            self._bucket(
                f"{tag}.{i}",
                group,
                COUNT * (i == last),
                keep_local,
                None if like is None else like.buckets[i].message.feedback,
            )
            for i, group in enumerate(dense)
        ]
        self._slots: dict[int, tuple[Bucket, torch.Tensor]] = {
            index: (bucket, view)
            for group, bucket in zip(dense, self.buckets, strict=True)
            for index, view in zip(group, bucket.views, strict=True)
        }
        self.groups = dense
        self._ready = [False] * len(parameters)
        self._as_dense: set[int] = set()
        self._frozen: set[int] = set()
        self._own = ControlFlags()
        self.flags = self._own
        """The means of all ranks' control flags, after a `wait`."""
        self._restored = False
        self.completed: list[int] = []
        """Indices in the order in which they became ready since the last `wait`."""

    def _bucket(
        self,
        name: str,
        group: Sequence[int],
        extra: int,
        keep_local: bool,
        feedback: Feedback | None,
    ) -> Bucket:
        def make_message(flat: torch.Tensor) -> Message:
            return message_for(self._reduction, flat, name, extra, feedback)

        parameters = [self._parameters[index] for index in group]
        return Bucket(name, parameters, make_message, extra, keep_local)

    @property
    def stale(self) -> bool:
        """Whether buckets hold room for gradients that are known to be sparse by now."""
        return any(index in self._slots for index in self._sparse.known or ())

    @property
    def last_message(self) -> Message:
        """What every rank sends in every round."""
        return self.buckets[-1].message

    @property
    def all_present(self) -> bool:
        """Whether no rank had left by ``hvd.join()`` in the last round."""
        return self.flags.all_present(self._reduction.workers)

    # A round: gradients become ready, the rest is flushed, all is waited for.

    def ready(self, index: int) -> None:
        """Take the gradient of ``parameters[index]``; send its bucket if that was the last one.

        The last bucket stays until `flush`, because it carries the control flags.
        """
        parameter, sparse = self._parameters[index], self._sparse
        if not self.completed:
            self._spoil_free()
        self._ready[index] = True
        self.completed.append(index)
        gradient, slot = parameter.grad, self._slots.get(index)
        is_sparse = gradient is not None and gradient.is_sparse
        if gradient is not None and is_sparse and sparse.known is not None:
            sparse.add(index, gradient)
        elif slot is None:
            assert gradient is not None
            sparse.add(index, gradient.to_sparse(1))  # dense for once; the others' are not
        if slot is None:
            return
        bucket, view = slot
        if sparse.takes(index):
            view.zero_()
        else:
            if is_sparse:
                self._as_dense.add(index)
            copy_in(parameter, view)
        if not bucket.fill():
            return
        if timeline.active is not None:
            timeline.active.ready(bucket.name)
        if bucket is not self.buckets[-1]:
            bucket.launch()

    def _spoil_free(self) -> None:
        """Spoil what gradients of this round, which are elsewhere or still to come, overwrite."""
        if not check_mode.active.on:
            return
        for index, (_, view) in self._slots.items():
            gradient = self._parameters[index].grad
            if gradient is None or gradient.is_sparse or gradient.data_ptr() != view.data_ptr():
                spoil(view)

    def flush(self, flags: ControlFlags | None = None) -> None:
        """Send what has not left; a gradient that was not computed counts as zero, as in Horovod.

        Args:
            flags: What this rank tells; ``sparse`` and ``frozen`` are filled in here.

        Raises:
            HvdPipeError: A gradient was cleared, replaced or changed after it was complete.
        """
        self._check_untouched()
        if not self.completed:
            self._spoil_free()
        for index, (_, view) in self._slots.items():
            if not self._ready[index]:
                parameter = self._parameters[index]
                if parameter.grad is None and not parameter.requires_grad:
                    self._frozen.add(index)
                copy_in(parameter, view)
        self._sparse.flush()
        found, froze = bool(self._sparse.found), self._frozen != self._last_frozen
        self._own = replace(flags or ControlFlags(), sparse=float(found), frozen=float(froze))
        control = self.buckets[-1].control
        for number, flag in enumerate(self._own.to_list()):
            control[number] = flag
        self._last_frozen.clear()
        self._last_frozen.update(self._frozen)
        for bucket in self.buckets:
            if not bucket.launched:
                bucket.launch()

    def _check_untouched(self) -> None:
        for index, (bucket, view) in self._slots.items():
            if not self._ready[index] or index in self._sparse.found:
                continue
            gradient, did = self._parameters[index].grad, None
            if gradient is None:
                did = "cleared"
            elif gradient is not view and gradient.data_ptr() != view.data_ptr():
                did = "replaced"
            elif bucket.touched:
                did = "changed"
            if did:
                raise HvdPipeError(
                    f"the gradient of {self._names[index]!r} (or one beside it) was {did} after "
                    "backward() and before step(), while it was being sent: call "
                    "optimizer.synchronize() after backward(), change gradients then, and step "
                    "inside `with optimizer.skip_synchronize():`. After this error, go on from a "
                    "state (optimizer.load_state_dict) that every rank loads."
                )

    def wait(self) -> None:
        """Block until all is reduced and the buckets can be filled again."""
        trace = timeline.active
        begun = 0.0 if trace is None else trace.now()
        # The last one first: if ranks have gone apart, it is the one that is sure to say so.
        for bucket in reversed(self.buckets):
            bucket.wait()
        if trace is not None:
            trace.waited(begun, self._tag)
        self.flags = self._mean_flags()
        if self.flags.sparse != 0.0:
            self._sparse.agree()
        if self.flags.frozen != 0.0:
            lines = [("a frozen parameter", self._names[i]) for i in sorted(self._frozen)]
            check_alike(lines, f"{self._tag}.frozen", self._reduction.process_set)
        self._sparse.complete()
        self._sparse.end_round()
        self._ready = [False] * len(self._parameters)
        self.completed = []
        if check_mode.active.on and self.all_present:
            self._check_unchanged()

    def _mean_flags(self) -> ControlFlags:
        """Read the control flags; a rank alone knows them, and need not wait for its device."""
        restored, self._restored = self._restored, False
        flags, last = self._own.to_list(), self.buckets[-1]
        if not self._reduction.alone:
            flags = host_values(last.control, settled=last.message.settled and not restored)
        weight = 1.0 if self._reduction.op == Average else float(self._reduction.workers)
        return ControlFlags(*(flag / weight for flag in flags))

    def _check_unchanged(self) -> None:
        """Raise on every rank where one has changed a gradient while it was being sent."""
        mine: str | None = None
        for group, bucket in zip(self.groups, self.buckets, strict=True):
            changed = bucket.take_changed()
            if changed is not None and mine is None:
                mine = self._names[group[changed]]
        everyone = [mine]
        if not self._reduction.alone:
            everyone = gather(mine, f"{self._tag}.changed", self._reduction.process_set)
        for rank, name in zip(members(self._reduction.process_set), everyone, strict=False):
            if name is not None:
                raise HvdPipeError(
                    f"the gradient of {name!r} was changed on rank {rank} after backward() and "
                    "before step(), while it was being sent, in a way that torch does not count "
                    "(p.grad.data, numpy): call optimizer.synchronize() after backward(), change "
                    "gradients then, and step inside `with optimizer.skip_synchronize():`."
                )

    def discard(self) -> None:
        """Drop a round that is not complete, once what has left of it has arrived."""
        for bucket in self.buckets:
            bucket.wait()
            bucket.take_changed()
        self._sparse.complete()
        self._sparse.clear()
        self._as_dense.clear()
        self._frozen.clear()
        self._ready = [False] * len(self._parameters)
        self.completed = []

    def complete(self) -> None:
        """Block until `values` are here; sends nothing, and leaves `wait` to be called.

        Raises:
            HvdPipeError: Ranks have yet to agree on a sparse gradient.
        """
        self.complete_buckets()
        self._sparse.complete()
        sent = ControlFlags(*map(float, self.buckets[-1].control.tolist()))
        if self._sparse.known is not None and sent.sparse != 0.0:
            raise HvdPipeError(
                "the first sparse gradients are on their way: save a state two steps later, or "
                "after optimizer.synchronize()."
            )

    def complete_buckets(self) -> None:
        """Block until all buckets are reduced, and leave `wait` to be called."""
        for bucket in self.buckets:
            bucket.message.wait()

    # What users see as ``p.grad``.

    def bind_gradients(self) -> None:
        """Make every gradient the view into its bucket (sparse again where it came sparse)."""
        for index, (_, view) in self._slots.items():
            gradient: torch.Tensor | None = view
            if index in self._as_dense:
                gradient = view.to_sparse()
            elif index in self._frozen:
                gradient = None  # a frozen parameter must not move: no decay, no momentum
            self._parameters[index].grad = gradient
        for index, gathered in self._sparse.gathered.items():
            self._parameters[index].grad = gathered
        self._as_dense.clear()
        self._frozen.clear()
        self._sparse.gathered = {}

    def zero(self) -> None:
        """Set every gradient to zero."""
        for bucket in self.buckets:
            bucket.flat.zero_()

    def copy_in(self) -> None:
        """Take dense gradients over from wherever they are, their values unchanged."""
        for index, (_, view) in self._slots.items():
            gradient = self._parameters[index].grad
            if gradient is not None and not gradient.is_sparse:
                copy_in(self._parameters[index], view)

    # Checkpoints: what the last round has left, by index.

    def values(self) -> list[torch.Tensor | None]:
        """Return a copy of each gradient as the last `wait` has left it, by index."""
        found: list[torch.Tensor | None] = [None] * len(self._parameters)
        for index, (_, view) in self._slots.items():
            found[index] = None if index in self._frozen else view.clone()
        for index, gathered in self._sparse.gathered.items():
            found[index] = gathered.clone()
        return found

    def local(self) -> list[torch.Tensor | None]:
        """Return this rank's own gradients of the round in flight, where they are kept."""
        found: list[torch.Tensor | None] = [None] * len(self._parameters)
        for group, bucket in zip(self.groups, self.buckets, strict=True):
            for index, own in zip(group, bucket.local, strict=False):
                found[index] = own
        return found

    def restore(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Make these the result of the last round, as `values` returned them."""
        self.buckets[-1].control.zero_()  # what was told in a round that is undone
        self._own, self._restored = ControlFlags(), True
        for index, gradient in enumerate(gradients):
            if gradient is not None and gradient.is_sparse and self._sparse.known is not None:
                self._sparse.gathered[index] = gradient
            elif index in self._slots:
                view = self._slots[index][1]
                if gradient is None:
                    view.zero_()
                    self._frozen.add(index)
                else:
                    view.copy_(gradient)

    def residuals(self) -> dict[str, list[torch.Tensor | None]]:
        """Return the residuals of lossy codecs, by label and index."""
        found: dict[str, list[torch.Tensor | None]] = {}
        for group, bucket in zip(self.groups, self.buckets, strict=True):
            for label, flat in bucket.message.residuals.items():
                whole = found.setdefault(label, [None] * len(self._parameters))
                for index, view in zip(group, bucket.views_of(flat), strict=True):
                    whole[index] = view.clone()
        return found

    def restore_residuals(self, residuals: Mapping[str, Sequence[torch.Tensor | None]]) -> None:
        """Take up what `residuals` returned, in these buckets or in others of the same ranks."""
        for group, bucket in zip(self.groups, self.buckets, strict=True):
            for label, flat in bucket.message.residuals.items():
                for index, view in zip(group, bucket.views_of(flat), strict=True):
                    saved = residuals[label][index] if label in residuals else None
                    if saved is not None:
                        view.copy_(saved)
            bucket.message.drop_foreign_residuals()

    def forget_residuals(self) -> None:
        """Set all residuals to zero: the gradients that they belong to were undone."""
        for bucket in self.buckets:
            for flat in bucket.message.residuals.values():
                flat.zero_()
