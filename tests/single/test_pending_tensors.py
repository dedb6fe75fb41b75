"""Pending tensors: what asks for values settles them, and what does not leaves them pending."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hvd_pipe.torch.pending_tensors import hold, is_pending, release


class Own(nn.Parameter):
    """A subclass of the user's."""


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "tensor": lambda: torch.zeros(3),
    "parameter": lambda: nn.Parameter(torch.zeros(3)),
    "subclass": lambda: Own(torch.zeros(3)),
}


class Held:
    """A pending tensor, whose values are 7 once they are settled."""

    def __init__(self, kind: str) -> None:
        self.tensor = KINDS[kind]()
        self.plain = type(self.tensor)
        self.asked: list[Any] = []
        hold(self.tensor, self._settle)

    def _settle(self, tensor: torch.Tensor, func: Any, args: tuple[Any, ...]) -> None:
        assert tensor is self.tensor
        self.asked.append(func)
        release(tensor)
        with torch.no_grad():
            tensor.fill_(7.0)


@pytest.fixture(params=KINDS)
def held(request: pytest.FixtureRequest) -> Held:
    return Held(request.param)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda t: t.sum(),
    "item": lambda t: t[0].item(),
    "data": lambda t: t.data.mean(),
    "detach": lambda t: t.detach().mean(),
    "numpy": lambda t: np.mean(t.detach().numpy()),
    "clone": lambda t: t.clone().mean(),
    "foreach": lambda t: torch._foreach_norm([t])[0],
    "within a list": lambda t: torch.stack([t, t]).mean(),
    "a keyword": lambda t: torch.add(torch.zeros(3), other=t).mean(),
    "deepcopy": lambda t: copy.deepcopy(t).mean(),
    "copy": lambda t: copy.copy(t).mean(),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)).mean(),
    "vmap": lambda t: torch.func.vmap(lambda x: x * 2)(t).sum(),
    "repr": repr,
}


@pytest.mark.parametrize("look", READS.values(), ids=READS)
def test_who_reads_meets_settled_values(held: Held, look: Callable[[torch.Tensor], Any]) -> None:
    found = look(held.tensor)
    wanted = KINDS["tensor"]().fill_(7.0)
    if isinstance(found, str):
        assert "7., 7., 7." in found
    else:
        assert float(found) == pytest.approx(float(look(wanted)))
    assert len(held.asked) == 1
    assert type(held.tensor) is held.plain


def test_who_writes_writes_onto_settled_values(held: Held) -> None:
    with torch.no_grad():
        held.tensor.mul_(2.0)
    assert held.tensor.tolist() == [14.0] * 3


METADATA: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda t: t.shape,
    "dtype": lambda t: t.dtype,
    "device": lambda t: t.device,
    "len": len,
    "numel": lambda t: t.numel(),
    "grad": lambda t: t.grad,
    "requires_grad": lambda t: t.requires_grad,
    "is_leaf": lambda t: t.is_leaf,
    "is_sparse": lambda t: t.is_sparse,
    "is_floating_point": torch.is_floating_point,
    "hash": hash,
    "isinstance": lambda t: isinstance(t, torch.Tensor),
    "set to None": lambda t: setattr(t, "grad", None),
    "freeze": lambda t: t.requires_grad_(False),
}


@pytest.mark.parametrize("look", METADATA.values(), ids=METADATA)
def test_who_asks_for_no_value_settles_nothing(
    held: Held, look: Callable[[torch.Tensor], Any]
) -> None:
    look(held.tensor)
    assert not held.asked
    assert is_pending(held.tensor)
    assert isinstance(held.tensor, held.plain)


def test_one_call_settles_all_that_it_gets() -> None:
    first, second = Held("parameter"), Held("tensor")
    assert float((first.tensor + second.tensor).sum()) == 42.0
    assert not is_pending(second.tensor)


def test_a_tensor_that_is_not_released_is_shown_as_it_is() -> None:
    tensor = torch.ones(3)
    hold(tensor, lambda *_: None)
    assert float(tensor.sum()) == 3.0
    assert is_pending(tensor)
    release(tensor)
    assert type(tensor) is torch.Tensor


def test_an_error_while_settling_is_the_readers() -> None:
    tensor = torch.ones(3)

    def settle(tensor: torch.Tensor, *_: Any) -> None:
        release(tensor)
        raise RuntimeError("a message was lost")

    hold(tensor, settle)
    with pytest.raises(RuntimeError, match="a message was lost"):
        tensor.sum()
    assert float(tensor.sum()) == 3.0


def test_releasing_what_is_not_pending_does_nothing() -> None:
    parameter = nn.Parameter(torch.ones(2))
    release(parameter)
    assert type(parameter) is nn.Parameter


def test_compiled_functions_settle_what_they_are_given_and_what_they_close_over() -> None:
    torch.compiler.reset()
    held = [Held("parameter"), Held("parameter")]
    given, closed_over = (each.tensor for each in held)

    @torch.compile(backend="eager")
    def mean(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor * 2.0).mean() + (closed_over * 3.0).mean()

    for _ in range(3):
        assert mean(given).item() == 35.0
        for each in held:
            assert len(each.asked) == 1
            with torch.no_grad():
                each.tensor.zero_()
            each.asked.clear()
            hold(each.tensor, each._settle)


def test_a_compiled_step_of_an_optimizer_settles() -> None:
    torch.compiler.reset()
    held = Held("parameter")
    held.tensor.grad = torch.ones(3)
    optimizer = torch.optim.SGD([held.tensor], lr=1.0)
    torch.compile(optimizer.step, backend="eager")()
    assert held.tensor.tolist() == [6.0] * 3
