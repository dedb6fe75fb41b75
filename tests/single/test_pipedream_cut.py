"""Cutting a model: stages in turn are the model, whatever the model and wherever the cut."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given
from pipedream_models import (
    MODELS,
    Attention,
    Language,
    Plain,
    tensors,
    train,
    train_stages,
)
from torch import Tensor, fx, nn

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.pipeline.messages import TensorSpec
from hvd_pipe.torch.pipedream.graph import StageModule, Traced, cut, specs, trace

pytestmark = pytest.mark.slow


def made(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    factory, sample = MODELS[name]
    model, inputs = factory().double(), sample()
    return model, tuple(x.double() if x.is_floating_point() else x for x in inputs)


def names_of(traced: Traced) -> list[str]:
    return [layer.name for layer in traced.layers]


def tables(traced: Traced) -> list[list[list[str]]]:
    """Every cut in two, and as many stages as there are layers."""
    names = names_of(traced)
    return [[names[:at], names[at:]] for at in range(1, len(names))] + [[[n] for n in names]]


def cut_everywhere(model: Any, inputs: tuple[Tensor, ...]) -> Iterator[list[StageModule]]:
    traced = trace(model, inputs)
    values = specs(traced, inputs)
    for table in tables(traced):
        yield cut(traced, table, values)


def check_equal(
    model: nn.Module,
    stages: list[StageModule],
    inputs: tuple[Tensor, ...],
    exact_gradients: bool = True,
) -> None:
    """Compare results, gradients and buffers of a model and its stages, bit for bit."""
    model.zero_grad()
    buffers = copy.deepcopy(dict(model.named_buffers()))
    result = train_stages(stages, inputs)
    mine = {key: p.grad for key, p in model.named_parameters()}
    changed = copy.deepcopy(dict(model.named_buffers()))
    for key, buffer in model.named_buffers():
        buffer.data.copy_(buffers[key])
    wanted, gradients = train(model, inputs)
    assert type(result) is type(wanted)
    for found, right in zip(tensors(result), tensors(wanted), strict=True):
        assert torch.equal(found, right)
    for key, right in gradients.items():
        if right is None:
            assert mine[key] is None or not mine[key].any(), key
        elif exact_gradients:
            assert torch.equal(mine[key], right), key
        else:
            torch.testing.assert_close(mine[key], right, rtol=1e-12, atol=1e-12)
    for key, buffer in model.named_buffers():
        assert torch.equal(buffer, changed[key]), key


def check_state(traced: Traced, model: nn.Module, stages: list[StageModule]) -> None:
    """Stages have the model's keys and its very tensors; parameters are in one stage each."""
    found: dict[str, Tensor] = {}
    owners: dict[int, int] = {}
    for number, stage in enumerate(stages):
        found.update(stage.module.state_dict(keep_vars=True))
        for parameter in stage.module.parameters():
            assert owners.setdefault(id(parameter), number) == number
    right = model.state_dict(keep_vars=True)
    assert set(found) | set(traced.unused) == set(right)
    assert not set(found) & set(traced.unused)
    assert all(tensor is right[key] for key, tensor in found.items())


@pytest.mark.parametrize("name", MODELS)
def test_every_cut_is_the_model(name: str) -> None:
    model, inputs = made(name)
    before = copy.deepcopy(model.state_dict())
    traced = trace(model, inputs)
    values = specs(traced, inputs)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert len(traced.layers) >= 2
    for table in tables(traced):
        stages = cut(traced, table, values)
        check_state(traced, model, stages)
        assert stages[-1].outputs == ()
        for one, after in itertools.pairwise(stages):
            assert one.outputs == after.inputs
        for batch in (inputs, tuple(x[:2] for x in inputs)):
            for training in (True, False):
                model.train(training)
                for stage in stages:
                    stage.module.train(training)
                check_equal(model, stages, batch)


def test_exported_models_are_refused() -> None:
    model, inputs = made("plain")
    exported = torch.export.export(model, inputs).module()
    with pytest.raises(TypeError, match=r"torch.export keeps the mode .* give the plain model"):
        trace(exported, inputs)
    for stages in cut_everywhere(torch.fx.symbolic_trace(model.eval()), inputs):
        check_equal(model, stages, inputs)


def test_optional_inputs_are_traced_where_they_are_given() -> None:
    model = Language()
    tokens, state = torch.randint(0, 11, (4, 5)), torch.randn(4, 1, 6)
    for inputs in ((tokens,), (tokens, state)):
        for stages in cut_everywhere(model, inputs):
            check_equal(model, stages, inputs)
    with pytest.raises(TypeError, match="takes 1 to 2 inputs, but the sample has 3"):
        trace(model, (tokens, state, state))


def test_hooks_of_a_sequential_inside_are_kept() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    inner.register_forward_hook(lambda module, inputs, output: 2 * output)
    model, x = nn.Sequential(inner, nn.Linear(4, 3)), torch.ones(2, 4)
    assert torch.equal(trace(model, (x,)).graph_module(x), model(x))


class _Whole(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Sequential)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(4, 3), nn.ReLU())

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        return self.second(self.first(x)) * scale


def test_a_graph_of_the_users_own_tracer_keeps_its_layers() -> None:
    model = _Scaled()
    own = fx.GraphModule(model, _Whole().trace(model))
    x = torch.ones(2, 4)
    traced = trace(own, (x,))
    assert [layer.name for layer in traced.layers] == ["first", "second", "mul"]
    assert torch.equal(traced.graph_module(x), model(x))


def test_stages_of_the_user() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            y = self.linear(x) if x.sum() > 0 else -self.linear(x)
            return y, (x, y > 0)

    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, found: Any) -> Tensor:
            y, (x, positive) = found
            return self.linear(torch.where(positive, y, x))

    last = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2))
    plain = nn.Sequential(First(), Second(), last)
    inputs = (torch.randn(6, 4),)
    *_, stages = cut_everywhere([*plain], inputs)
    crossing = stages[0].outputs
    assert [spec.name for spec in crossing] == ["0[0]", "0[1][0]", "0[1][1]"]
    assert crossing[2] == TensorSpec("0[1][1]", (6, 4), "bool", (0,), gradient=False)
    assert set().union(*(s.module.state_dict() for s in stages)) == set(plain.state_dict())
    check_equal(plain, stages, inputs)


def test_in_place_stages_of_the_user() -> None:
    model = [nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2)]
    inputs = (torch.randn(5, 3),)
    *_, stages = cut_everywhere(model, inputs)
    assert len(stages) == 3
    check_equal(nn.Sequential(*model), stages, inputs)


# Layers.


class Asserting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        torch._assert((y < 100.0).all(), "too large")
        return self.b(y)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))
        self.register_buffer("seen", torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) + self.seen[0]
        self.seen[0].add_(1.0)
        x = self.b(x)
        return self.c(x) * self.seen[0]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        self.register_buffer("mask", torch.eye(3).bool())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) @ torch.zeros_like(self.mask, dtype=x.dtype).masked_fill_(self.mask, 2)
        return x


class Bridge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.inner, self.side = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        a = self.shared(x)
        return self.side(a) + self.shared(self.inner(a))


class Changes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        early = y * 1.0  # what the next line changes through a view
        y.view(-1).mul_(2.0)
        return self.b(early.cos()) + y.cos()


class Quiet(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return x * 2


LAYERS: dict[str, tuple[nn.Module, tuple[Tensor, ...], list[str]]] = {
    "a chain": (
        *made("plain"),
        ["features.0", "features.1..features.2", "features.3", "features.4", "features.5"],
    ),
    "in-place activations": (
        *made("residual"),
        ["stem..relu_", "blocks.0.conv1", "blocks.0.bn1..blocks.0.relu"],
    ),
    "a weight at both ends": (*made("tied"), ["embedding..head"]),
    "a module called twice": (*made("twice"), ["first", "shared..norm_1"]),
    "a class token": (*made("transformer"), ["embedding", "expand..cat"]),
    "what nobody uses": (Asserting(), (torch.ones(2, 4),), ["a", "lt", "all_1", "_assert", "b"]),
    "a buffer that is changed": (Counts(), (torch.randn(4, 3),), ["a", "add..mul"]),
    "a mask filled from a buffer": (
        Masked(),
        (torch.ones(2, 3),),
        ["layers.0", "zeros_like..matmul"],
    ),
    "between two calls": (
        Bridge(),
        (torch.ones(2, 3),),
        ["shared..shared_1", "side", "add"],
    ),
    "changed through a view": (Changes().double(), (torch.randn(5, 4).double(),), ["a..mul_"]),
    "untraceable, with a tuple": (*made("branches"), ["before", "odd"]),
    "attention": (
        Attention().eval(),
        (torch.ones(2, 6, 8), torch.ones(6, 6).triu(1).bool()),
        ["norm", "attention"],
    ),
    "no gradient inside": (
        nn.Sequential(nn.Linear(2, 2), Quiet(), nn.Linear(2, 2)),
        (torch.ones(2, 2),),
        ["0", "1", "2"],
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    """Their names, of the first ones at least; all cuts between them are the model."""
    model, inputs, names = LAYERS[name]
    assert names_of(trace(model, inputs))[: len(names)] == names
    for stages in cut_everywhere(model, inputs):
        check_equal(model, stages, inputs)


def test_a_mask_that_is_only_read_joins_nothing() -> None:
    model, inputs = made("transformer")
    traced = trace(model, inputs)
    values = specs(traced, inputs)
    names = names_of(traced)
    assert {"blocks.0.attention", "blocks.1.attention"} <= set(names)
    at = names.index("blocks.1.norm")
    stages = cut(traced, [names[:at], names[at:]], values)
    assert all("causal" in stage.module.state_dict() for stage in stages)
    assert "causal" not in {spec.name for spec in stages[1].inputs}


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.linear(x)
        torch.tensor(1.0) + self.linear(x)
        if self.seen.sum() > 0:  # the line
            return self.seen
        return -self.seen


def test_a_model_that_cannot_be_traced_names_its_line() -> None:
    model = Untraceable()
    before = set(vars(model))
    with pytest.raises(HvdPipeError) as failure:
        trace(model, (torch.ones(1, 2),))
    text = str(failure.value)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = 1 + lines.index("        if self.seen.sum() > 0:  # the line")
    assert f"{__file__}:{line} (if self.seen.sum() > 0" in text
    assert text.startswith("Untraceable cannot be cut into layers")
    for way in ("PipeDream([stage0, stage1, ...]", "nn.Sequential"):
        assert way in text
    assert set(vars(model)) == before
    assert model.training is True
    model(torch.ones(1, 2))
    names = names_of(trace([model, nn.Linear(2, 2)], (torch.ones(1, 2),)))
    assert names == ["0", "1"]


def test_tracing_leaves_the_model_as_it_was() -> None:
    model = Plain().eval()
    model.features.train()
    before = [(dict(vars(module)), module.training) for module in model.modules()]
    sample = (torch.randn(4, 2, 8, 8),)
    traced = trace(model, sample)
    assert [(dict(vars(module)), module.training) for module in model.modules()] == before
    stages = cut(traced, [names_of(traced)], specs(traced, sample))
    assert stages[0].module.training is False
    assert stages[0].module.features.training is True


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        (nn.Identity, TypeError, "a module or a list"),
        ("linear", TypeError, "a module or a list"),
        ([], TypeError, "a module or a list"),
        ([nn.Linear(1, 1), 3], TypeError, "a stage must be a module, got 3"),
        (nn.Sequential(), HvdPipeError, "has no layer"),
    ],
)
def test_no_models(model: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        trace(model, (torch.ones(1, 1),))


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ([["0", "1"], ["3"]], "stages name '3', but the model's layers are 0, 1, 2"),
        ([["0", "1"], ["1", "2"]], "'1' is there 2 times"),
        ([["0"], ["2"]], "in none: 1"),
        ([["0", "1", "2"], []], "stage 1 has no layer"),
        ([["0", "2"], ["1"]], "'2' of stage 0 uses '1' of stage 1, which runs after"),
        ([], "in none: 0, 1, 2"),
    ],
)
def test_wrong_tables(table: list[list[str]], text: str) -> None:
    sample = (torch.ones(2, 2),)
    traced = trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), sample)
    with pytest.raises(ValueError, match=text):
        cut(traced, table, specs(traced, sample))


def test_what_is_no_tensor_does_not_cross() -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"x": x} if x.sum() < 9e9 else {}

    class Takes(nn.Module):
        def forward(self, found: dict[str, Tensor]) -> Tensor:
            return found["x"] * (1 if found["x"].sum() < 9e9 else 2)

    sample = (torch.ones(2, 2),)
    traced = trace([Named(), Takes(), nn.Linear(2, 2)], sample)
    values = specs(traced, sample)
    with pytest.raises(HvdPipeError, match=r"'0' crosses the cut behind stage 0 .* same stage"):
        cut(traced, [["0"], ["1", "2"]], values)
    assert len(cut(traced, [["0", "1"], ["2"]], values)) == 2


# Random models.


class Net(nn.Module):
    """Layers that each use one or two values before them."""

    def __init__(self, plan: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.plan = plan
        makers: dict[str, Any] = {
            "linear": lambda: nn.Linear(4, 4),
            "norm": lambda: nn.LayerNorm(4),
            "batch": lambda: nn.BatchNorm1d(4),
            "relu": lambda: nn.ReLU(inplace=True),
            "dropout": lambda: nn.Dropout(0.3),
            "lstm": lambda: nn.LSTM(4, 4, batch_first=True),
        }
        self.parts = nn.ModuleList(
            [makers[kind]() if kind in makers else nn.Identity() for kind, _, _ in plan]
        )
        self.shared = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        values = [x, y]
        for (kind, a, b), part in zip(self.plan, self.parts, strict=True):
            first, second = values[a], values[b]
            if kind == "add":
                found = first + second
            elif kind == "cat":
                found = torch.cat([first, second], dim=1)[:, 2:6]
            elif kind == "view":
                found = first.reshape(second.size(0), second.shape[1])
            elif kind == "chunk":
                left, right = first.chunk(2, dim=1)
                found = torch.cat([right, left], dim=1)
            elif kind == "lstm":
                found = part(first[:, None])[0][:, 0]
            elif kind == "relu":
                found = part(first * 1.5)
            elif kind == "shared":
                found = self.shared(first)
            elif kind == "in place":
                found = first * 1.0
                found.view(-1).add_(second.sum())
            elif kind == "functional":
                found = nn.functional.dropout(first, 0.4, self.training)
            else:
                found = part(first)
            values.append(found)
        return values[-1], values[len(values) // 2]


KINDS = ["linear", "norm", "batch", "relu", "dropout", "lstm", "add", "cat", "view", "chunk"]
KINDS += ["shared", "functional", "in place"]


@st.composite
def plans(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    size = draw(st.integers(2, 14))
    near = draw(st.integers(1, 6))
    found = []
    for at in range(size):
        reach = st.integers(max(0, at + 2 - near), at + 1)
        found.append((draw(st.sampled_from(KINDS)), draw(reach), draw(st.integers(0, at + 1))))
    return found


@given(plan=plans(), seed=st.integers(0, 99), training=st.booleans())
# A trained value is written into one that depends on no parameter, and that a stage sends.
@example(
    plan=[*[("linear", 0, 0)] * 2, ("in place", 1, 2), *[("linear", i, 0) for i in (2, 3, 4)]],
    seed=0,
    training=False,
)
def test_random_models_cut_at_random_places(
    plan: list[tuple[str, int, int]], seed: int, training: bool
) -> None:
    torch.manual_seed(seed)
    model = Net(plan).double().train(training)
    inputs = (torch.randn(6, 4).double(), torch.randn(6, 4).double())
    traced = trace(model, inputs)
    values = specs(traced, inputs)
    names, chance = names_of(traced), random.Random(seed)
    at = {name: number for number, name in enumerate(names)}
    assert all(at[a] < at[b] for a, b in traced.edges)
    # Along the order of forward.
    places = sorted(chance.sample(range(1, len(names)), min(len(names) - 1, chance.randint(0, 4))))
    bounds = [0, *places, len(names)]
    table = [names[a:b] for a, b in itertools.pairwise(bounds)]
    stages = cut(traced, table, values)
    check_state(traced, model, stages)
    for batch in (inputs, tuple(x[:3] for x in inputs)):
        if any(p.requires_grad for p in model.parameters()) and _has_gradient(model, batch):
            # A value with three users, or under two names (dropout in evaluation), gets the parts
            # of its gradient in another order where a cut lies between them.
            check_equal(model, stages, batch, exact_gradients=False)
    # Along edges alone: branches may go ahead.
    where: dict[str, int] = {}
    for name in names:
        least = max((where[a] for a, b in traced.edges if b == name), default=0)
        where[name] = chance.randint(least, max(least, 3))
    used = sorted(set(where.values()))
    table = [[name for name in names if where[name] == stage] for stage in used]
    model.eval()
    stages = cut(traced, table, values)
    for stage in stages:
        stage.module.eval()
    if _has_gradient(model, inputs):
        model.zero_grad()
        result = train_stages(stages, inputs)
        mine = {key: p.grad for key, p in model.named_parameters()}
        wanted, gradients = train(model, inputs)
        for found, right in zip(tensors(result), tensors(wanted), strict=True):
            assert torch.equal(found, right)
        for key, right in gradients.items():
            if right is not None:
                torch.testing.assert_close(mine[key], right, rtol=1e-12, atol=1e-12)


def _has_gradient(model: nn.Module, inputs: tuple[Tensor, ...]) -> bool:
    training = model.training
    model.eval()
    found = all(t.requires_grad for t in model(*inputs))
    model.train(training)
    return found


# What crosses.


@pytest.mark.parametrize(
    ("shape", "dtype", "text"),
    [
        ((32, 10), "float64", "stage 2: tensor 'relu' was planned as float32 .* convert them"),
        ((32, 10, 1), "float32", "must have 2 dimensions"),
        ((33, 10), "float32", r"but is float32 \(33, 10\): dimension 0 follows the batch"),
        ((32, 9), "float32", "dimension 1 does not follow the batch, so it must be 10"),
        ((32, 11), "float32", "pad or crop"),
    ],
)
def test_a_tensor_that_is_not_as_planned(shape: tuple[int, ...], dtype: str, text: str) -> None:
    planned = TensorSpec("relu", (32, 10), "float32", (0,), gradient=True)
    planned.check((1, 10), "float32", "stage 2")
    planned.check((32, 10), "float32", "stage 2")
    with pytest.raises(ValueError, match=text):
        planned.check(shape, dtype, "stage 2")
