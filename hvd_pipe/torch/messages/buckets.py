"""Flat gradient buckets: one buffer and one all-reduce a bucket, gradients are views into it.

    parameters      w0        w1    w2              (ready order: w2, w1, w0)
                     |         |     |
    views          [ ---g0--- ] [-g1-][--g2--]      p.grad after backward
                        |          |
    flat buffers   [ bucket 1 |ccc][ bucket 0 ]     each leaves when its last gradient is ready
                        |               |
                    launch / wait, in place         c: the control words

The bucket that is sent last ends in six more elements, the control words, so that all ranks
learn some things at the same step without another message:

0. what the engine has to say ("my gradients come in another order", "I have drained");
1. one from every rank that takes part: a rank that has left by ``hvd.join()`` sends zeros;
2. not zero from a rank that has found a sparse gradient where none was known of;
3. not zero from a rank on which others are frozen than in the round before;
4. one from a rank that synchronizes without a gradient: it drains, or has no data in this step;
5. one from a rank that has made a step since the round before.

Words 4 and 5 tell ranks that have gone apart from ranks that have unlike data. A rank that drains
alone makes no step after that round, where the others do; in the next round all ranks know.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from horovod.torch.mpi_ops import Average

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.runtime import check_mode
from hvd_pipe.torch.agree import check_alike, gather, members
from hvd_pipe.torch.checking import CheckedMessage, spoil
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.messages.reduction import Message, Reduction
from hvd_pipe.torch.messages.residuals import REDUCED, SENT
from hvd_pipe.torch.messages.sparse import SparseGather
from hvd_pipe.torch.messages.streams import host_values

__all__ = ["Bucket", "BucketSet"]

_SAYS, _PRESENT, _SPARSE, _FROZE, _DRAINS, _STEPPED = range(6)
_WORDS = 6
_NOTHING_SAID = (0.0, 1.0, 0.0, 0.0, 0.0, 0.0)


class Bucket:
    """Gradients of one dtype and device that travel in one message.

    Args:
        name: The message's name.
        parameters: Whose gradients; of one dtype and device.
        reduction: How they are reduced.
        extra: How many control words follow the gradients.
        keep_local: Whether `local` keeps this rank's own gradients.
        like: A bucket of the same gradients, which shares what a lossy codec leaves over.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[torch.Tensor],
        reduction: Reduction,
        extra: int = 0,
        keep_local: bool = False,
        like: Bucket | None = None,
    ) -> None:
        numel = sum(parameter.numel() for parameter in parameters)
        first = parameters[0] if parameters else torch.empty(0)  # control words alone
        self.name = name
        self._parameters = parameters
        self.flat = torch.zeros(numel + extra, dtype=first.dtype, device=first.device)
        self.control = self.flat[numel:]
        self.views = _views(self.flat, parameters)
        self._local = torch.zeros_like(self.flat) if keep_local else None
        self.local = [] if self._local is None else _views(self._local, parameters)
        """This rank's own gradients of the round in flight, if they are kept."""
        self.waiting = len(self.views)
        self.launched = False
        self._filled_version: int | None = None
        feedback = None if like is None else like.message.feedback
        self._checked: CheckedMessage | None = None
        if check_mode.active.on:
            self._checked = CheckedMessage(
                self.flat, extra, lambda wire: reduction.message(wire, name, extra, feedback)
            )
        # The network writes through an alias, so that the version tells who else has written.
        self.message: Message = self._checked or reduction.message(
            self.flat.data, name, extra, feedback
        )

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a buffer of the bucket's size that belong to its parameters."""
        return _views(flat, self._parameters)

    def fill(self) -> bool:
        """Count one gradient that is complete; return whether that was the last one."""
        self.waiting -= 1
        if self.waiting == 0:
            self._filled_version = self.flat._version
            if self._checked is not None:
                self._checked.keep()
        return self.waiting == 0

    @property
    def touched(self) -> bool:
        """Whether somebody has changed gradients in place since the bucket was full."""
        return self._filled_version not in (None, self.flat._version)

    def take_changed(self) -> int | None:
        """Return which gradient was changed after the bucket was full, where checks have seen one.

        Forgets it, too.
        """
        element = None if self._checked is None else self._checked.take_changed()
        if element is None:
            return None
        ends = itertools.accumulate(parameter.numel() for parameter in self._parameters)
        return next(i for i, end in enumerate(ends) if element < end)

    def launch(self) -> None:
        """Send the bucket; its buffer belongs to the network until `wait`."""
        self.launched = True
        if self._local is not None:
            self._local.copy_(self.flat)
        self.message.launch()

    def wait(self) -> None:
        """Block until the averaged gradients are in the views; be ready for the next round."""
        self.message.wait()
        spoil(self._local)
        self.launched = False
        self.waiting = len(self.views)
        self._filled_version = None


class BucketSet:
    """The buckets of one plan, for parameters that are known by their place in a list.

    Args:
        parameters: All parameters that take part, in an order that all ranks share.
        names: Their names.
        groups: The plan: places in ``parameters``, grouped; each group of one dtype and device.
        reduction: How buffers are reduced.
        tag: Begins the messages' names; the same on all ranks, unique among what is in flight.
        sparse: The places that all ranks know to be sparse, which this set adds to and which
            travel by themselves; None sends all gradients as dense ones.
        frozen: The places that were frozen in the round before, which this set keeps up to date.
        keep_local: Whether `local` keeps this rank's own gradients.
        like: A set of the same buckets, which shares what lossy codecs leave over.
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
        self._tag, self._sparse = tag, sparse
        self._last_frozen = set() if frozen is None else frozen
        known = sparse or set()
        dense = [[place for place in group if place not in known] for group in groups]
        dense = [group for group in dense if group] or [[]]
        last = len(dense) - 1
        self.buckets: list[Bucket] = [
            Bucket(
                f"{tag}.{i}",
                [parameters[place] for place in group],
                reduction,
                extra=_WORDS * (i == last),
                keep_local=keep_local,
                like=None if like is None else like.buckets[i],
            )
            for i, group in enumerate(dense)
        ]
        self._place: dict[int, tuple[Bucket, torch.Tensor]] = {
            place: (bucket, view)
            for group, bucket in zip(dense, self.buckets, strict=True)
            for place, view in zip(group, bucket.views, strict=True)
        }
        self.groups = dense
        self._ready = [False] * len(parameters)
        self._as_dense: set[int] = set()
        self._frozen: set[int] = set()
        self._found: dict[int, torch.Tensor] = {}
        self._gathers: dict[int, SparseGather] = {}
        self._gathered: dict[int, torch.Tensor] = {}
        self._own = self._words = list(_NOTHING_SAID)
        self._restored = False
        self.completed: list[int] = []
        """Places in the order in which they became ready since the last `wait`."""

    @property
    def stale(self) -> bool:
        """Whether buckets hold room for gradients that are known to be sparse by now."""
        return bool(self._sparse) and any(place in self._place for place in self._sparse or ())

    @property
    def last_message(self) -> Message:
        """What every rank sends in every round."""
        return self.buckets[-1].message

    def ready(self, place: int) -> None:
        """Take the gradient of ``parameters[place]``; send its bucket if that was the last one.

        The last bucket stays until `launch_rest`, because it carries the control words.
        """
        parameter = self._parameters[place]
        if not self.completed:
            self._spoil_free()
        self._ready[place] = True
        self.completed.append(place)
        gradient = parameter.grad
        is_sparse = gradient is not None and gradient.is_sparse
        if is_sparse and self._sparse is not None:
            self._take_sparse(place, gradient)
        elif place not in self._place:
            assert gradient is not None
            self._take_sparse(place, gradient.to_sparse(1))  # dense for once; the others' are not
        if place not in self._place:
            return
        bucket, view = self._place[place]
        if place in self._found or place in self._gathers:
            view.zero_()
        else:
            if is_sparse:
                self._as_dense.add(place)
            _into(parameter, view)
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
        for place, (_, view) in self._place.items():
            gradient = self._parameters[place].grad
            if gradient is None or gradient.is_sparse or gradient.data_ptr() != view.data_ptr():
                spoil(view)

    def _take_sparse(self, place: int, gradient: torch.Tensor | None) -> None:
        if place in (self._sparse or ()):
            self._gathers[place] = self._gather(place, gradient)
        elif gradient is not None:
            self._found[place] = gradient

    def _gather(self, place: int, gradient: torch.Tensor | None) -> SparseGather:
        name = f"{self._tag}.sparse.{place}"
        return SparseGather(self._parameters[place], gradient, self._reduction, name)

    def launch_rest(
        self, says: float = 0.0, *, drains: bool = False, stepped: bool = False
    ) -> None:
        """Send what has not left; a gradient that was not computed counts as zero, as in Horovod.

        Args:
            says: This rank's first control word.
            drains: Whether this rank synchronizes without a gradient.
            stepped: Whether this rank has made a step since the round before.

        Raises:
            HvdPipeError: A gradient was cleared, replaced or changed after it was complete.
        """
        self._check_untouched()
        if not self.completed:
            self._spoil_free()
        for place, (_, view) in self._place.items():
            if not self._ready[place]:
                parameter = self._parameters[place]
                if parameter.grad is None and not parameter.requires_grad:
                    self._frozen.add(place)
                _into(parameter, view)
        for place in sorted(self._sparse or ()):
            if place not in self._gathers:
                self._gathers[place] = self._gather(place, None)
        found, froze = bool(self._found), self._frozen != self._last_frozen
        self._own = [says, 1.0, *map(float, (found, froze, drains, stepped))]
        control = self.buckets[-1].control
        for number, word in enumerate(self._own):
            control[number] = word
        self._last_frozen.clear()
        self._last_frozen.update(self._frozen)
        for bucket in self.buckets:
            if not bucket.launched:
                bucket.launch()

    def _check_untouched(self) -> None:
        for place, (bucket, view) in self._place.items():
            if not self._ready[place] or place in self._found:
                continue
            gradient, did = self._parameters[place].grad, None
            if gradient is None:
                did = "cleared"
            elif gradient is not view and gradient.data_ptr() != view.data_ptr():
                did = "replaced"
            elif bucket.touched:
                did = "changed"
            if did:
                raise HvdPipeError(
                    f"the gradient of {self._names[place]!r} (or one beside it) was {did} after "
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
        weight = 1.0 if self._reduction.op == Average else float(self._reduction.workers)
        words, last = self._own, self.buckets[-1]
        if not self._reduction.alone:
            settled = last.message.settled and not self._restored
            words = host_values(last.control, settled=settled)
        self._restored = False
        self._words = [word / weight for word in words]
        if self._words[_SPARSE] != 0.0 and self._sparse is not None:
            self._agree_on_sparse(self._sparse)
        if self._words[_FROZE] != 0.0:
            lines = [("a frozen parameter", self._names[place]) for place in sorted(self._frozen)]
            check_alike(lines, f"{self._tag}.frozen", self._reduction.process_set)
        for place, gathering in self._gathers.items():
            self._gathered[place] = gathering.wait()
        self._gathers.clear()
        self._ready = [False] * len(self._parameters)
        self.completed = []
        if check_mode.active.on and self._all_present:
            self._check_unchanged()

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

    def _agree_on_sparse(self, known: set[int]) -> None:
        """Gather what some rank has found to be sparse, and tell all of it."""
        found = sorted(place for place in self._found if place not in self._gathers)
        lists = gather(found, f"{self._tag}.sparse", self._reduction.process_set)
        places = sorted({place for one in lists for place in one})
        for place in places:
            self._gathers[place] = self._gather(place, self._found.get(place))
        known.update(places)
        self._found.clear()

    def give_up(self) -> None:
        """Drop a round that is not complete, once what has left of it has arrived."""
        for bucket in self.buckets:
            bucket.wait()
            bucket.take_changed()
        for gathering in self._gathers.values():
            gathering.wait()
        for known in (self._gathers, self._gathered, self._found, self._as_dense, self._frozen):
            known.clear()
        self._ready = [False] * len(self._parameters)
        self.completed = []

    def arrive(self) -> None:
        """Block until `values` are here; sends nothing, and leaves `wait` to be called.

        Raises:
            HvdPipeError: Ranks have yet to agree on a sparse gradient.
        """
        self.land()
        for place, gathering in self._gathers.items():
            self._gathered[place] = gathering.wait()
        if self._sparse is not None and float(self.buckets[-1].control[_SPARSE]) != 0.0:
            raise HvdPipeError(
                "the first sparse gradients are on their way: save a state two steps later, or "
                "after optimizer.synchronize()."
            )

    def land(self) -> None:
        """Block until all buckets are reduced, and leave `wait` to be called."""
        for bucket in self.buckets:
            bucket.message.wait()

    def control(self) -> float | None:
        """Return the mean of the first control word after a `wait`.

        None if a rank has left by ``hvd.join()``: only all-reduces are possible then.
        """
        return self._words[_SAYS] if self._all_present else None

    @property
    def some_drained(self) -> bool:
        """Whether some ranks, and not all, had no gradient in the last round."""
        return self._divided(_DRAINS)

    @property
    def all_drained(self) -> bool:
        """Whether no rank that took part in the last round had a gradient."""
        others = self._words[_PRESENT] - self._words[_DRAINS]
        return others < 0.5 / self._reduction.workers

    @property
    def some_stepped(self) -> bool:
        """Whether some ranks, and not all, had made a step between the last two rounds."""
        return self._divided(_STEPPED)

    @property
    def _all_present(self) -> bool:
        return self._words[_PRESENT] > 1 - 0.5 / self._reduction.workers

    def _divided(self, word: int) -> bool:
        """Whether a word that is zero or one was not the same on all ranks."""
        half = 0.5 / self._reduction.workers
        return self._all_present and half < self._words[word] < 1 - half

    def show(self) -> None:
        """Make every gradient the view into its bucket (sparse again where it came sparse)."""
        for place, (_, view) in self._place.items():
            gradient: torch.Tensor | None = view
            if place in self._as_dense:
                gradient = view.to_sparse()
            elif place in self._frozen:
                gradient = None  # a frozen parameter must not move: no decay, no momentum
            self._parameters[place].grad = gradient
        for place, gathered in self._gathered.items():
            self._parameters[place].grad = gathered
        self._as_dense.clear()
        self._frozen.clear()
        self._gathered = {}

    def zero(self) -> None:
        """Set every gradient to zero."""
        for bucket in self.buckets:
            bucket.flat.zero_()

    def move_in(self) -> None:
        """Take dense gradients over from wherever they are, their values unchanged."""
        for place, (_, view) in self._place.items():
            gradient = self._parameters[place].grad
            if gradient is not None and not gradient.is_sparse:
                _into(self._parameters[place], view)

    def values(self) -> list[torch.Tensor | None]:
        """Return a copy of each gradient as the last `wait` has left it, by place."""
        found: list[torch.Tensor | None] = [None] * len(self._parameters)
        for place, (_, view) in self._place.items():
            found[place] = None if place in self._frozen else view.clone()
        for place, gathered in self._gathered.items():
            found[place] = gathered.clone()
        return found

    def local(self) -> list[torch.Tensor | None]:
        """Return this rank's own gradients of the round in flight, where they are kept."""
        found: list[torch.Tensor | None] = [None] * len(self._parameters)
        for group, bucket in zip(self.groups, self.buckets, strict=True):
            for place, own in zip(group, bucket.local, strict=False):
                found[place] = own
        return found

    def residuals(self) -> dict[str, list[torch.Tensor | None]]:
        """Return what lossy codecs have left over of each gradient, by label and place."""
        found: dict[str, list[torch.Tensor | None]] = {}
        for group, bucket in zip(self.groups, self.buckets, strict=True):
            for label, flat in _leftovers(bucket).items():
                places = found.setdefault(label, [None] * len(self._parameters))
                for place, view in zip(group, bucket.views_of(flat), strict=True):
                    places[place] = view.clone()
        return found

    def restore_residuals(self, residuals: Mapping[str, Sequence[torch.Tensor | None]]) -> None:
        """Take up what `residuals` returned, in these buckets or in others of the same ranks."""
        for group, bucket in zip(self.groups, self.buckets, strict=True):
            for label, flat in _leftovers(bucket).items():
                for place, view in zip(group, bucket.views_of(flat), strict=True):
                    left = residuals[label][place] if label in residuals else None
                    if left is not None:
                        view.copy_(left)
            bucket.message.drop_foreign_residuals()

    def forget_residuals(self) -> None:
        """Let nothing be left over: the gradients that it belongs to were undone."""
        for bucket in self.buckets:
            for flat in _leftovers(bucket).values():
                flat.zero_()

    def restore(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Make these the result of the last round, as `values` returned them."""
        self.buckets[-1].control.zero_()  # what was said in a round that is undone
        self._own, self._restored = list(_NOTHING_SAID), True
        for place, gradient in enumerate(gradients):
            if gradient is not None and gradient.is_sparse and self._sparse is not None:
                self._gathered[place] = gradient
            elif place in self._place:
                view = self._place[place][1]
                if gradient is None:
                    view.zero_()
                    self._frozen.add(place)
                else:
                    view.copy_(gradient)


def _leftovers(bucket: Bucket) -> dict[str, torch.Tensor]:
    feedback = bucket.message.feedback
    return {} if feedback is None else {SENT: feedback.sent, REDUCED: feedback.reduced}


def _into(parameter: torch.Tensor, view: torch.Tensor) -> None:
    """Put the parameter's gradient into ``view`` and make it the view, copying only if it is not.

    After ``zero_grad(set_to_none=True)`` autograd leaves a new tensor; writing it here takes the
    place of adding it to zeros, so a step moves no more bytes than with gradients kept in place.
    """
    gradient = parameter.grad
    if gradient is None:
        view.zero_()
    elif gradient.is_sparse:
        view.copy_(gradient.detach().to_dense())
    elif gradient.data_ptr() == view.data_ptr():
        return
    else:
        view.copy_(gradient.detach())
    parameter.grad = view


def _views(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    views, offset = [], 0
    for parameter in parameters:
        views.append(_view_like(flat, offset, parameter))
        offset += parameter.numel()
    return views


def _view_like(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of ``flat`` at ``offset`` in the parameter's shape and memory format."""
    if not parameter.is_contiguous() and parameter.is_contiguous(
        memory_format=torch.channels_last
    ):
        return flat.as_strided(parameter.size(), parameter.stride(), offset)
    return flat[offset : offset + parameter.numel()].view(parameter.size())
