"""Buckets on one rank: views, what goes into them, and what must never be written to."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

import hvd_pipe.torch as hvd
from hvd_pipe.errors import RanksDisagreeError
from hvd_pipe.torch.messages.allreduce import AllReduce, CheckedMessage, Reduction
from hvd_pipe.torch.messages.buckets import Bucket, BucketSet
from hvd_pipe.torch.messages.control_flags import ControlFlags
from hvd_pipe.torch.strategies.settings import Settings


@pytest.fixture(autouse=True, scope="module")
def initialised() -> None:
    hvd.init()  # for good: MPI cannot be initialised twice in a process


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((2, 3), (4,), (), (3, 1))]


def bucket_of(some: list[nn.Parameter], extra: int = 0) -> Bucket:
    return Bucket("b", some, Reduction(), extra)


def set_of(
    some: list[nn.Parameter], groups: list[list[int]], tag: str, sparse: set[int] | None = None
) -> BucketSet:
    as_dense, nobody = sparse is None, cast(Any, None)
    settings = Settings(
        "abcd"[: len(some)], some, Reduction(), 1, as_dense, tag, None, nobody, sparse or set()
    )
    return BucketSet(settings, groups, "set")


def test_a_view_has_the_memory_format_of_its_parameter() -> None:
    weight = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    (view,) = bucket_of([nn.Parameter(weight)]).views
    assert view.stride() == weight.stride()
    view.copy_(weight)
    assert torch.equal(view, weight)


def gradients_of(some: list[nn.Parameter], scale: float = 1.0) -> None:
    for number, parameter in enumerate(some, 1):
        parameter.grad = torch.full_like(parameter, number * scale)


def register(buckets: BucketSet, index: int) -> None:
    gradient = buckets.parameters[index].grad
    assert gradient is not None
    buckets.note(index)
    buckets.ready([(index, gradient)])


def test_gradients_move_into_the_buckets_whatever_they_were() -> None:
    some = parameters()
    buckets = set_of(some, [[3, 2], [0, 1]], "t")
    gradients_of(some)
    some[1].grad = None  # not computed: counts as zero
    some[3].grad = torch.full((3, 1), 4.0).to_sparse()
    for place in (3, 2, 0):
        register(buckets, place)
    assert buckets.completed == [3, 2, 0]
    buckets.flush(ControlFlags(reordered=1.0))
    buckets.wait()
    assert buckets.flags.reordered == 1.0
    assert buckets.completed == []
    buckets.bind_gradients()
    assert some[3].grad is not None
    assert some[3].grad.is_sparse
    assert buckets.buckets[0].flat.tolist() == [4, 4, 4, 3]
    flags = ControlFlags(reordered=1.0, sparse=1.0, whole=1.0).to_list()
    assert buckets.buckets[1].flat.tolist() == [1] * 6 + [0] * 4 + flags


def test_a_round_that_is_given_up_leaves_no_gradient_behind() -> None:
    """A sparse gradient that had arrived for a state came back with the next round's."""
    some = parameters()
    buckets = set_of(some, [[0, 1, 2, 3]], "given up", sparse={3})
    some[3].grad = torch.full((3, 1), 4.0).to_sparse(1)
    register(buckets, 3)
    buckets.flush()
    buckets.complete()
    buckets.discard()
    some[3].grad = None
    buckets.bind_gradients()
    assert some[3].grad is None


def test_a_dense_gradient_stays_dense_after_a_round_that_is_given_up() -> None:
    some = parameters()
    buckets = set_of(some, [[0, 1, 2, 3]], "given up, too")
    some[3].grad = torch.full((3, 1), 4.0).to_sparse()
    register(buckets, 3)
    buckets.discard()
    buckets.bind_gradients()
    assert some[3].grad is not None
    assert not some[3].grad.is_sparse


def test_new_buckets_take_the_values_that_users_see() -> None:
    some = parameters()
    old = set_of(some, [[0, 1, 2, 3]], "old")
    gradients_of(some)
    old.flush()
    old.wait()
    old.bind_gradients()
    some[2].grad = None
    new = set_of(some, [[3], [2], [1], [0]], "new")
    new.copy_in()
    assert some[2].grad is None
    assert some[0].grad is not None
    assert some[0].grad.data_ptr() == new.buckets[3].views[0].data_ptr()
    assert torch.equal(some[0].grad, torch.full((2, 3), 1.0))


def test_a_rank_alone_reads_no_control_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows what it has said; on a GPU, reading it waited for all kernels that were queued."""
    parameter = torch.nn.Parameter(torch.ones(3))
    buckets = set_of([parameter], [[0]], "alone")
    monkeypatch.setattr("hvd_pipe.torch.messages.buckets.host_values", None)
    parameter.sum().backward()
    register(buckets, 0)
    buckets.flush(ControlFlags(reordered=1.0))
    buckets.wait()
    assert buckets.flags.reordered == 1.0


def test_a_checked_message_drops_the_residuals_of_others() -> None:
    """With checks on, buckets that changed kept residuals of sums that other ranks encode."""

    class Inner(AllReduce):
        dropped = False

        def drop_foreign_residuals(self) -> None:
            self.dropped = True

    inner = Inner(Reduction(), torch.zeros(4), "inner")
    CheckedMessage(torch.zeros(4), 0, lambda _: inner).drop_foreign_residuals()
    assert inner.dropped


def test_changes_are_compared_by_flags_where_a_rank_has_left() -> None:
    """The rank that had changed something raised alone, and the others applied the rest."""
    ControlFlags(present=1.0, changed=1 / 3).check_changed(3)
    ControlFlags(present=2 / 3, changed=2 / 3).check_changed(3)
    with pytest.raises(RanksDisagreeError, match="while a rank has left"):
        ControlFlags(present=2 / 3, changed=1 / 3).check_changed(3)
