"""What is measured of a model: what may cross, and what each layer takes and keeps."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pipedream_models import MODELS, Language, Plain, Residual, UNet
from torch import Tensor, nn

from hvd_pipe.pipeline.messages import TensorSpec
from hvd_pipe.planning.partition import partition
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.torch.pipedream.graph import StageModule, cut, specs, trace
from hvd_pipe.torch.pipedream.measure import profile


def specs_by_name(model: Any, inputs: tuple[Tensor, ...]) -> dict[str, TensorSpec]:
    values = specs(trace(model, inputs), inputs)
    return {spec.name: spec for found in values.values() for spec in found}


def test_specs() -> None:
    inputs = (torch.randint(0, 11, (6, 5)),)
    values = specs_by_name(Language(), inputs)
    assert values["tokens"] == TensorSpec("tokens", (6, 5), "int64", (0,), gradient=False)
    assert values["norm"] == TensorSpec("norm", (6, 5, 6), "float32", (0,), gradient=True)
    assert values["view"].shape == (30, 11)
    assert values["view"].dynamic == (0,)
    found = [spec for spec in values.values() if spec.shape == (1, 6, 6)]
    assert found
    assert all(spec.dynamic == (1,) for spec in found)  # the state's batch is its second dimension


def test_what_needs_no_gradient() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.mine = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
            self.norm = nn.LayerNorm(4).bfloat16()

        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            y = self.frozen(x)
            z = self.mine(y)
            kept = z.detach() * 2
            order = z.argsort()
            return (self.norm(z.bfloat16()) + kept.gather(1, order)) * (z > 0) + at

    values = specs_by_name(Net(), (torch.randn(4, 4), torch.ones(4)))
    gradient = {name: spec.gradient for name, spec in values.items()}
    assert gradient == {
        "x": False,
        "at": False,
        "frozen": False,
        "mine": True,
        "detach": False,
        "mul": False,
        "argsort": False,
        "bfloat16": True,
        "norm": True,
        "gather": False,
        "add": True,
        "gt": False,
        "mul_1": True,
        "add_1": True,
    }
    assert values["norm"].dtype == "bfloat16"
    assert values["gt"].dtype == "bool"


def test_a_model_of_one_batch_size_has_no_dynamic_dimensions() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).view(8, 2)

    values = specs_by_name(Fixed(), (torch.randn(8, 4),))
    assert all(spec.dynamic == () for spec in values.values())
    with pytest.raises(ValueError, match="dimension 0 does not follow the batch"):
        values["x"].check((4, 4), "float32", "stage 0")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("run", [specs, lambda *args: profile(*args, steps=1, skip=0)])
def test_nothing_is_left_behind(name: str, run: Callable[..., Any]) -> None:
    factory, sample = MODELS[name]
    torch.manual_seed(3)
    model, inputs = factory(), sample()
    for number, module in enumerate(model.modules()):
        module.training = number % 3 != 0
    flags = [module.training for module in model.modules()]
    state = copy.deepcopy(model.state_dict())
    given, numbers = copy.deepcopy(inputs), torch.get_rng_state()
    run(trace(model, inputs), inputs)
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(inputs, given, strict=True))
    assert torch.equal(torch.get_rng_state(), numbers)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("sample", "error", "text"),
    [
        ((), ValueError, r"takes 1 inputs \(x\), but the sample has 0"),
        ((torch.ones(2), torch.ones(2)), ValueError, "but the sample has 2"),
        ((3,), TypeError, "input 'x' must be a tensor, got int"),
        ((torch.tensor(1.0),), ValueError, "the first dimension of the first input is the batch"),
        ((torch.ones(0, 2, 8, 8),), ValueError, "at least 1 sample"),
        (torch.ones(1, 2, 8, 8), TypeError, "sample is a tuple"),
    ],
)
def test_wrong_samples(sample: Any, error: type[Exception], text: str) -> None:
    traced = trace(*big("plain"))
    for run in (specs, profile):
        with pytest.raises(error, match=text):
            run(traced, sample)


def test_a_dtype_that_cannot_travel() -> None:
    sample = (torch.ones(2, 2),)
    traced = trace(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), sample)
    with pytest.raises(
        ValueError, match=r"tensor 'input' is of dtype float8_e4m3fn, which cannot"
    ):
        specs_by_name([_Cast(), nn.Linear(2, 2)], (sample[0].to(torch.float8_e4m3fn),))
    with pytest.raises(ValueError, match="steps is at least 1"):
        profile(traced, sample, steps=0)


class _Cast(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input.float()


# Profiles.


def test_profile() -> None:
    model, inputs = Plain(), MODELS["plain"][1]()
    traced = trace(model, inputs)
    found = profile(traced, inputs, steps=2, skip=1, progress=True)
    assert found.name == "Plain"
    assert found.batch == 6
    assert found.edges == traced.edges
    assert [layer.name for layer in found.layers] == [layer.name for layer in traced.layers]
    assert all(layer.forward_s > 0 for layer in found.layers)
    assert all(layer.backward_s > 0 for layer in found.layers)
    used = [p for n, p in model.named_parameters() if n not in traced.unused]
    assert sum(layer.gradient_bytes for layer in found.layers) == sum(p.nbytes for p in used)
    by_name = {layer.name: layer for layer in found.layers}
    assert by_name["features.0"].activation_bytes == 6 * 4 * 8 * 8 * 4
    assert by_name["features.0"].description.startswith("Conv2d(2, 4")
    assert by_name["add_1"].activation_bytes == 0  # nothing but the loss uses it
    assert ModelProfile.from_json(found.to_json()) == found


def test_frozen_parameters_have_no_gradient_bytes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    sample = (torch.ones(2, 4),)
    found = profile(trace(model, sample), sample, steps=1)
    assert [layer.gradient_bytes for layer in found.layers] == [0, 0, 80]
    # The input of the last layer is kept, and was made by the one before it.
    assert [layer.saved_bytes for layer in found.layers] == [0, 32, 0]
    assert [layer.backward_s > 0 for layer in found.layers] == [False, False, True]


class Storages:
    """The storages that autograd keeps while it is entered, by address, but those of a model."""

    def __init__(self, model: nn.Module) -> None:
        state = [*model.parameters(), *model.buffers()]
        self.without = {tensor.untyped_storage().data_ptr() for tensor in state}
        self.kept: dict[int, torch.UntypedStorage] = {}

    def add(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.without:
            self.kept[storage.data_ptr()] = storage
        return tensor

    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.kept.values())


def kept_bytes(
    model: nn.Module, stages: Sequence[StageModule], inputs: Sequence[Tensor]
) -> list[tuple[int, int]]:
    """Each stage's bytes that autograd and its input keep, and the same with its output."""
    found = []
    values: Sequence[Tensor] = inputs
    for number, stage in enumerate(stages):
        storages = Storages(model)
        gets = [
            value.detach().clone().requires_grad_(spec.gradient)
            for value, spec in zip(values, stage.inputs, strict=True)
        ]
        with torch.autograd.graph.saved_tensors_hooks(storages.add, lambda t: t):
            values = stage.module(*gets)
        for value in gets if number else ():
            storages.add(value)
        least = storages.bytes()
        if stage.outputs:
            for value in values:
                storages.add(value)
        found.append((least, storages.bytes()))
    return found


def big(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    if name == "sequential":
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(16 * 25, 64),
            nn.Sigmoid(), nn.Linear(64, 10),
        ), (torch.randn(8, 3, 16, 16),)  # fmt: skip
    factory, sample = MODELS[name]
    return factory(), sample()


@pytest.mark.parametrize("name", ["sequential", *MODELS])
def test_saved_bytes_add_up_to_what_stages_keep(name: str) -> None:
    """A stage's input and its layers' saved bytes are what autograd keeps, and no more than that
    with the output that it hands on.
    """
    model, inputs = big(name)
    traced = trace(model, inputs)
    values = specs(traced, inputs)
    layers = {layer.name: layer for layer in profile(traced, inputs, steps=1, skip=1).layers}
    names = list(layers)
    whole = sum(layer.held_bytes for layer in layers.values())
    assert kept_bytes(model, cut(traced, [names], values), inputs) == [(whole, whole)]
    chance = random.Random(7)
    estimates, truths = 0, 0
    for _ in range(10):
        count = min(len(names) - 1, chance.randint(1, 3))
        bounds = [0, *sorted(chance.sample(range(1, len(names)), count)), len(names)]
        table = [names[a:b] for a, b in itertools.pairwise(bounds)]
        stages = cut(traced, table, values)
        for stage, mine, (least, most) in zip(
            stages, table, kept_bytes(model, stages, inputs), strict=True
        ):
            received = sum(spec.nbytes for spec in stage.inputs) if stage is not stages[0] else 0
            estimate = received + sum(layers[name].held_bytes for name in mine)
            assert least <= estimate <= most, (table, mine)
            estimates, truths = estimates + estimate, truths + least
    if name not in ("twice", "branches"):  # their stages are a layer or two, and outputs count
        assert truths <= estimates <= 1.15 * truths


def test_the_partition_counts_saved_bytes() -> None:
    """A stage keeps its input and what its layers save, for each minibatch in flight."""
    layers = tuple(
        LayerProfile(f"l{at}", 0, 1.0, 1.0, activation_bytes=10, saved_bytes=saved)
        for at, saved in enumerate((100, None, 7, 0))
    )
    made = partition(ModelProfile(layers), [(2, 1e9)], straight=True)
    assert [stage.layers for stage in made.stages] == [("l0", "l1"), ("l2", "l3")]
    assert [stage.memory_bytes for stage in made.stages] == [2 * (100 + 10), 10 + 7 + 0]
    light = (LayerProfile("l0", 0, 1.0, 1.0, 10, saved_bytes=1), *layers[1:])
    with pytest.raises(ValueError, match="the one that needs least takes 22 bytes"):
        partition(ModelProfile(light), [(2, 1e9)], straight=True, memory_bytes=5)


@pytest.mark.parametrize("wrong", [-1, 1.5, "8", 2**60])
def test_wrong_saved_bytes(wrong: Any) -> None:
    with pytest.raises(ValueError, match="'fc': saved_bytes must be an integer from 0"):
        LayerProfile("fc", 0, 0.0, saved_bytes=wrong)


def test_saved_bytes_in_json() -> None:
    model = ModelProfile((LayerProfile("a", 0, 0.0, saved_bytes=0), LayerProfile("b", 0, 0.0)))
    assert ModelProfile.from_json(model.to_json()) == model
    assert model.to_json().count("saved_bytes") == 1


def test_a_profile_can_be_partitioned_and_cut() -> None:
    for model, inputs in ((Residual(), MODELS["residual"][1]()), (UNet(), MODELS["unet"][1]())):
        traced = trace(model, inputs)
        made = partition(profile(traced, inputs, steps=1), [(3, 1e12)], straight=True)
        stages = cut(traced, [stage.layers for stage in made.stages], specs(traced, inputs))
        assert len(stages) == 3
        assert [sum(s.nbytes for s in stage.outputs) for stage in stages][-1] == 0
