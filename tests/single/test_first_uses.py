"""Where parameters are used first, also where that is not in the module that owns them."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from hvd_pipe.torch.measuring.first_uses import FirstUses, Uses

STEPS = 3

Loss = Callable[[Any, int], torch.Tensor]


class Watched:
    """Steps of a model that are watched as an engine watches them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = [name for name, _ in model.named_parameters()]
        self.parameters = [p for _, p in model.named_parameters()]
        self.watch = FirstUses(self.parameters)
        for index, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(self.hook(index))

    def hook(self, index: int) -> Callable[[torch.Tensor], None]:
        return lambda _: self.watch.mark(index)

    def run(self, loss: Loss, after: Callable[[Any, int], object] = lambda m, i: None) -> Uses:
        for step in range(STEPS):
            self.watch.begin()
            after(self.model, step)
            loss(self.model, step).backward()
            self.watch.end_step()
        found = self.watch.uses()
        self.watch.close()
        return found


def sites(uses: Uses, watched: Watched) -> dict[str, set[str]]:
    """The modules at which a parameter is waited for, by names."""
    names = {module: name for name, module in watched.model.named_modules()}
    return {
        watched.names[index]: {names[module] for module in modules}
        for index, modules in uses.modules.items()
    }


def outside(uses: Uses, watched: Watched) -> set[str]:
    return {watched.names[index] for index in uses.outside}


def plain(model: nn.Module, _: int) -> torch.Tensor:
    return model(torch.ones(2, 4)).sum()  # type: ignore[no-any-return]


def test_a_plain_model() -> None:
    watched = Watched(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    uses = watched.run(plain)
    assert sites(uses, watched) == {
        "0.weight": {"0"},
        "0.bias": {"0"},
        "2.weight": {"2"},
        "2.bias": {"2"},
    }
    assert uses.roots == [watched.model]
    assert not uses.outside
    assert not uses.compiled
    assert watched.watch.steps == STEPS
    first, last = uses.needed_s[0], uses.needed_s[2]
    assert 0.0 <= first < last <= uses.forward_s
    assert 0.0 <= uses.ready_s[2] < uses.ready_s[0] <= uses.backward_s
    assert min(uses.ready_s) == 0.0


def test_attention_reads_the_weights_of_a_child() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.attention(x[None], x[None], x[None])[0]
            return found

    watched = Watched(Model())
    found = sites(watched.run(plain), watched)
    for name in ("weight", "bias"):
        assert "attention" in found[f"attention.out_proj.{name}"]
    assert found["attention.in_proj_weight"] == {"attention"}


def test_tied_weights() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.head(self.embedding(x.long().flatten()))
            return found

    watched = Watched(Model())
    assert sites(watched.run(plain), watched) == {"embedding.weight": {"embedding", "head"}}


def test_a_parent_that_reads() -> None:
    """By a function of torch, by an operator, by ``.data``, in a list, by keyword."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(5))
            self.own = nn.Parameter(torch.ones(4))
            self.late = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b, c, d, e = (part.weight for part in self.parts)
            x = nn.functional.linear(x, a) @ b + c.data.sum()
            x = torch.cat([x, d]).sum(0) * self.own
            return self.late(torch.nn.functional.linear(input=x, weight=e))  # type: ignore[no-any-return]

    watched = Watched(Model())
    uses = watched.run(plain)
    found = sites(uses, watched)
    for i in (0, 1, 3, 4):
        assert "" in found[f"parts.{i}.weight"], i
    assert "" in found["parts.2.weight"]
    assert found["own"] == {""}
    assert found["late.weight"] == {"late"}
    assert not uses.outside


def test_shape_and_kind_are_no_use() -> None:
    def asks(model: nn.Module, _: int) -> torch.Tensor:
        weight = model.get_parameter("0.weight")
        assert weight.shape == weight.size() == (4, 4)
        assert weight.is_floating_point()
        assert (weight.dtype, weight.device.type, weight.requires_grad) == (
            torch.float32,
            "cpu",
            True,
        )
        assert weight.numel() == 16
        assert len(weight) == 4
        assert weight in {weight}
        return plain(model, 0)

    watched = Watched(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    uses = watched.run(asks)
    assert not uses.outside
    assert sites(uses, watched)["0.weight"] == {"0"}


def test_uses_outside_of_modules() -> None:
    """Of a norm that is added to the loss, and that comes too late: after forward, it is there."""

    def loss(model: nn.Module, _: int) -> torch.Tensor:
        norm = model.get_parameter("1.weight").norm()
        late = plain(model, 0)
        return late + norm + model.get_parameter("0.weight").norm()

    watched = Watched(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    uses = watched.run(loss)
    assert outside(uses, watched) == {"1.weight"}


@pytest.mark.parametrize("often", [1, 2, 3])
def test_what_is_read_now_and_then(often: int) -> None:
    """A script that writes weights down in one of the steps has nothing to wait for in others."""

    def reads(model: nn.Module, step: int) -> None:
        if step < often:
            for p in model.parameters():
                p.detach().clone()

    watched = Watched(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    uses = watched.run(plain, reads)
    assert len(uses.outside) == (4 if 2 * often > STEPS else 0)
    if often < STEPS:
        assert sites(uses, watched)["1.weight"] == {"1"}


@pytest.mark.parametrize("whole", [True, False])
def test_a_checkpoint_is_no_use(whole: bool) -> None:
    """state_dict() waits by itself; before the first forward pass nobody knows the modules."""

    def saves(model: nn.Module, step: int) -> None:
        if step:
            torch.save((model if whole else model[1]).state_dict(), io.BytesIO())  # type: ignore[index]

    watched = Watched(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    uses = watched.run(plain, saves)
    assert not uses.outside
    assert sites(uses, watched)["0.weight"] == {"0"}


def test_a_parameter_that_nobody_uses() -> None:
    """No gate is needed for it but its owner's; one of no called module is updated in step()."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)  # type: ignore[no-any-return]

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.apart = Model(), nn.Linear(2, 2)

    watched = Watched(Held())
    uses = watched.run(lambda model, _: model.inner.used(torch.ones(2, 4)).sum())
    assert uses.roots == [watched.model.inner.used]  # type: ignore[union-attr]
    assert outside(uses, watched) == {
        f"{part}.{name}" for part in ("inner.unused", "apart") for name in ("weight", "bias")
    }
    watched = Watched(Model())
    uses = watched.run(plain)
    assert not uses.outside
    assert sites(uses, watched)["unused.weight"] == {"unused"}
    used, unused = (watched.names.index(f"{each}.weight") for each in ("used", "unused"))
    assert uses.needed_s[used] < uses.needed_s[unused] <= uses.forward_s


def test_an_lstm() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(4, 3, 2, bidirectional=True), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.lstm(x)[0])  # type: ignore[no-any-return]

    watched = Watched(Model())
    uses = watched.run(plain)
    found = sites(uses, watched)
    assert {name: where for name, where in found.items() if where != {"lstm"}} == {
        "out.weight": {"out"},
        "out.bias": {"out"},
    }
    assert len(found) == 18
    assert not uses.outside


def test_uses_in_other_steps_are_joined() -> None:
    """A head that some steps use, and a weight that a parent reads in one of them."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)
            self.number = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.number == 1:
                return nn.functional.linear(x, self.left.weight)
            return (self.left if self.number == 0 else self.right)(x)  # type: ignore[no-any-return]

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        model.number = step  # type: ignore[assignment]
        return plain(model, step)

    watched = Watched(Model())
    uses = watched.run(loss)
    assert sites(uses, watched) == {
        "left.weight": {"left", ""},
        "left.bias": {"left"},
        "right.weight": {"right"},
        "right.bias": {"right"},
    }


def test_an_exception_in_a_forward_pass() -> None:
    """What runs after it is in the right module."""

    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("not now")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.failing, self.after = Failing(), nn.Linear(4, 2, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with pytest.raises(ValueError, match="not now"):
                self.failing(x)
            return nn.functional.linear(x, self.after.weight)

    watched = Watched(Model())
    assert sites(watched.run(plain), watched) == {"after.weight": {"", "after"}}


def test_steps_without_a_backward_pass_do_not_count() -> None:
    watched = Watched(nn.Linear(4, 2))
    watched.watch.begin()
    plain(watched.model, 0)
    watched.watch.end_step()
    assert watched.watch.steps == 0
    watched.watch.end_step()  # it has ended


def test_a_compiled_module_is_noted() -> None:
    model = nn.Linear(4, 2)
    watched = Watched(model)
    compiled: Any = torch.compile(model, backend="eager")
    assert watched.run(lambda _, step: compiled(torch.ones(2, 4)).sum()).compiled


class Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_modes_of_a_script_stay() -> None:
    """One is entered before, another meanwhile, and left after the watch has ended."""
    watched = Watched(nn.Linear(4, 2))
    before, meanwhile = Counting(), Counting()
    with before:
        watched.watch.begin()
        meanwhile.__enter__()
        plain(watched.model, 0).backward()
        watched.watch.end_step()
        assert _get_current_function_mode_stack() == [before, meanwhile]  # type: ignore[no-untyped-call]
        assert before.calls
        assert meanwhile.calls
        meanwhile.__exit__(None, None, None)
        assert _get_current_function_mode_stack() == [before]  # type: ignore[no-untyped-call]
    assert _get_current_function_mode_stack() == []  # type: ignore[no-untyped-call]


def test_close_leaves_no_hook() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    watched = Watched(model)
    uses = watched.run(plain)
    watched.watch.begin()
    model(torch.ones(2, 4))
    watched.watch.close()
    found = torch.nn.modules.module
    assert not found._global_forward_pre_hooks
    assert not found._global_forward_hooks
    for module in model.modules():
        assert not module._state_dict_pre_hooks
        assert not module._state_dict_hooks
    assert _get_current_function_mode_stack() == []  # type: ignore[no-untyped-call]
    assert uses.roots == [model]
