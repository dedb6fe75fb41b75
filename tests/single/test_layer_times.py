"""Times of layers: whose each moment is, in models of every kind, and nothing left behind."""

from __future__ import annotations

import doctest
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvd_pipe.measuring.clock import Stopwatch
from hvd_pipe.measuring.step_times import JobTimes
from hvd_pipe.planning import choice
from hvd_pipe.planning.choice import profile_of
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.torch import layer_times
from hvd_pipe.torch.layer_times import LayerTimes, measure_profile

SLEEP = 0.004


@pytest.mark.parametrize("module", [layer_times, choice])
def test_examples(module: Any) -> None:
    found = doctest.testmod(module)
    assert found.failed == 0 < found.attempted


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock on which each look takes a second."""
    moments = [0.0]

    def now(_: Stopwatch) -> float:
        moments.append(moments[-1] + 1.0)
        return moments[-1]

    monkeypatch.setattr(Stopwatch, "now", now)
    return moments  # type: ignore[return-value]


class Slow(torch.autograd.Function):
    """Sleeps in forward and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        time.sleep(2 * SLEEP)
        return g * 2


class Of(nn.Module):
    """A model of these parts, with this forward pass."""

    def __init__(self, run: Callable[[Any, torch.Tensor], Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._run = run

    def forward(self, x: torch.Tensor) -> Any:
        return self._run(self, x)


def sleeper() -> nn.Module:
    return Of(lambda _, x: Slow.apply(x))  # type: ignore[no-untyped-call]


def fail(*_: object) -> None:
    raise RuntimeError("no")


def step_of(model: nn.Module, *inputs: Any) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        output = model(*inputs)
        while not isinstance(output, torch.Tensor):
            output = next(iter(output.values() if isinstance(output, dict) else output))
        output.pow(2).mean().backward()
        optimizer.step()

    return step


def layers_of(profile: ModelProfile) -> dict[str, LayerProfile]:
    return {layer.name: layer for layer in profile.layers}


def measured(model: nn.Module, *inputs: Any) -> dict[str, LayerProfile]:
    return layers_of(measure_profile(model, step_of(model, *(inputs or [torch.ones(2, 3)]))))


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    ) + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def test_whose_each_moment_is(ticks: list[float]) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    profile = measure_profile(model, step_of(model, torch.ones(5, 2)), batch=5, name="small")
    seconds = [(x.name, x.forward_s, x.backward_s) for x in profile.layers]
    # Forward: into the model and each layer. Backward: each output, then the layer's parameters.
    assert seconds == [("0", 2.0, 2.0), ("1", 1.0, 1.0), ("2", 1.0, 3.0), ("(loss)", 1.0, 0.0)]
    assert profile.update_s == 1.0
    assert (profile.name, profile.batch) == ("small", 5)
    assert profile.gradient_order() == ("2", "0")
    assert profile.gradient_bytes().tolist() == [16, 36]
    assert [x.activation_bytes for x in profile.layers] == [60, 60, 20, 0]
    assert profile.layers[0].description.startswith("Linear(in_features=2")
    assert ModelProfile.from_json(profile.to_json()) == profile


def test_a_slow_layer_is_found_and_the_sums_are_the_passes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), sleeper(), nn.Linear(4, 1), sleeper())
    step, start = step_of(model, torch.ones(2, 4)), time.perf_counter()
    profile = measure_profile(model, step, steps=5, skip=1)
    spent = time.perf_counter() - start
    layers = layers_of(profile)
    for name in ("1", "3"):
        assert layers[name].forward_s >= 0.95 * SLEEP
        assert layers[name].backward_s >= 1.9 * SLEEP
    assert 6 * SLEEP * 0.95 <= profile.compute_s <= spent
    assert profile.ready_times()[0] >= 1.9 * SLEEP
    assert profile.ready_times()[1] >= 3.8 * SLEEP


def test_what_containers_compute_counts_with_a_layer(ticks: list[float]) -> None:
    """Functions between layers, a container's own parameter, an identity, an unused layer."""
    model = Of(
        lambda m, x: m.last(m.same(torch.tanh(m.first(x) + m.token))),
        first=nn.Linear(3, 3),
        same=nn.Identity(),
        last=nn.Linear(3, 1),
        token=nn.Parameter(torch.zeros(3)),
        unused=nn.Linear(7, 1),
    )
    layers = measured(model)
    assert list(layers) == ["(unused)", "first", "same", "last", "(loss)"]
    assert layers["(unused)"].gradient_bytes == 4 * 8
    total = sum(p.numel() * 4 for p in model.parameters())
    assert sum(layer.gradient_bytes for layer in layers.values()) == total
    assert layers["same"].backward_s == 0.0
    assert layers["last"].gradient_bytes == 16 + 12  # the token's is complete before `first`'s


def test_modules_that_are_called_several_times_and_return_structures() -> None:
    def run(m: Any, words: torch.Tensor) -> dict[str, torch.Tensor]:
        x, state = m.lstm(m.embed(words))
        h, c = state[0][0], state[1][0]
        for place in range(3):
            h, c = m.cell(x[:, place], (h, c))
        return {"words": m.out(h), "state": c}

    model = Of(
        run,
        embed=nn.Embedding(11, 4),
        cell=nn.LSTMCell(4, 4),
        lstm=nn.LSTM(4, 4, batch_first=True),
        out=nn.Linear(4, 11, bias=False),
    )
    model.out.weight = model.embed.weight
    layers = measured(model, torch.zeros(2, 3, dtype=torch.long))
    assert list(layers) == ["embed", "lstm", "cell", "out", "(loss)"]
    assert layers["embed"].gradient_bytes == 11 * 4 * 4  # tied: complete here, sent once
    assert layers["out"].gradient_bytes == 0
    assert layers["cell"].activation_bytes == 3 * 2 * 2 * 4 * 4
    assert all(layer.forward_s > 0 for layer in layers.values())
    assert all(layers[name].backward_s > 0 for name in ("embed", "lstm", "cell", "out"))


def test_attention_is_one_layer() -> None:
    """Its output projection is a module that never runs, with parameters that train."""
    attention = nn.MultiheadAttention(4, 2)
    model = Of(
        lambda m, x: m.out(m.attention(x, x, x)[0]), attention=attention, out=nn.Linear(4, 1)
    )
    layers = measured(model, torch.ones(3, 2, 4))
    assert list(layers) == ["attention", "out", "(loss)"]
    size = sum(p.numel() for p in attention.parameters())
    assert layers["attention"].gradient_bytes == 4 * size


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_part_of_backward(reentrant: bool) -> None:
    model = Of(
        lambda m, x: m.last(checkpoint(m.block, m.first(x), use_reentrant=reentrant)),
        first=nn.Linear(3, 3),
        block=nn.Sequential(nn.Linear(3, 3), sleeper()),
        last=nn.Linear(3, 1),
    )
    profile = measure_profile(model, step_of(model, torch.ones(2, 3)), steps=3)
    layers = layers_of(profile)
    assert list(layers) == ["first", "block.0", "block.1", "last", "(loss)"]
    assert layers["block.1"].forward_s >= 0.95 * SLEEP
    # Recomputation stops where nothing more is needed, so the sleeper may sleep in it or not.
    assert profile.backward_s >= 0.95 * 2 * SLEEP
    assert layers["block.0"].gradient_bytes == 48
    assert layers["block.1"].activation_bytes == 24  # recomputation is not counted again


def test_evaluation_between_steps_does_not_count(ticks: list[float]) -> None:
    model = chain()
    step = step_of(model, torch.ones(2, 3))

    def with_evaluation() -> None:
        step()
        with torch.no_grad():
            model(torch.ones(9, 3))
        with torch.inference_mode():
            model(torch.ones(9, 3))

    alone = measure_profile(model, step)
    assert measure_profile(model, with_evaluation) == alone


def test_hooks_are_gone_afterwards_and_training_is_the_same() -> None:
    weights = []
    for measured in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU(True), nn.Linear(3, 1))
        step = step_of(model, torch.arange(12.0).view(4, 3))
        if measured:
            measure_profile(model, step, steps=4, skip=1)
        else:
            for _ in range(5):
                step()
        assert hooks_of(model) == 0
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_step_that_raises_leaves_no_hooks_and_may_be_repeated() -> None:
    last = Of(fail)
    model = nn.Sequential(nn.Linear(3, 1), last)
    step = step_of(model, torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="no"):
        measure_profile(model, step)
    assert hooks_of(model) == 0
    with LayerTimes(model, skip=0) as times:
        with pytest.raises(RuntimeError, match="no"):
            step()
        times.step()
        last._run = lambda _, x: x
        step()
        times.step()
    assert times.profile().gradient_order() == ("0",)


def test_scripted_models_are_refused_with_the_way_out() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(3, 3)), nn.Linear(3, 1))
    with pytest.raises(ValueError, match=r"'0' is a Recursive.*before torch\.jit\.script"):
        measured(model)
    assert hooks_of(model[1:]) == 0


def test_the_update_of_a_step_that_computes_its_gradients(ticks: list[float]) -> None:
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    times = JobTimes(optimizer, list(model.parameters()))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(2, 3)).sum()
        loss.backward()
        return loss

    for _ in range(6):
        optimizer.step(closure)  # type: ignore[arg-type]
        times.end_step()
    own = times.close()
    assert own is not None
    assert own.update_s == 1.0  # from the last gradient on
    assert sorted(own.ready_s) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("alone", [False, True])
def test_times_seen_from_the_optimizer(ticks: list[float], alone: bool) -> None:
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = list(model.parameters())
    times = JobTimes(optimizer, parameters, alone=alone)
    for step in range(8):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        if step != 5:  # an overflow: no update, and no whole step
            optimizer.step()
        times.end_step()
    assert times.steps == 6  # the first has no step before it
    own = times.close()
    assert own is not None
    # Who is alone waits for nobody: what is between backward and update is its own work.
    update = 2.0 if alone else 1.0
    assert (own.before_s, own.update_s) == (1.0, update)
    assert sorted(own.ready_s) == [0.0, 1.0, 2.0, 3.0]
    assert max(own.ready_s[2:]) < min(own.ready_s[:2])
    assert hooks_of(model) == 0
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    profile = profile_of(own, names, [p.numel() * 4 for p in parameters])
    assert profile.compute_s == 1.0 + 3.0 + update
    assert profile.ready_times().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert profile.layers[0].name == "(forward)"
