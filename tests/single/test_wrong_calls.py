"""Wrong calls, in one process: each is refused with what to do instead, and nothing is lost."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import COCOD, GROUPS, MERGED, OTHER_PLAN, PASSES, PIPE, Refusal, id_of, refusals
from torch import nn
from torch.optim import SGD, Optimizer

import hvd_pipe.torch as hvd
from hvd_pipe.torch.distributed import DistributedMixin

LR = 2.0**-4
STRATEGIES = (MERGED, PIPE, COCOD)

Call = Callable[[nn.Module, Optimizer], object]


@pytest.fixture(autouse=True, scope="module")
def initialised() -> None:
    """No shutdown: MPI starts once a process."""
    hvd.init()


def two_layers() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()


def momentum(model: nn.Module) -> Optimizer:
    """An optimizer that has made a step, so that there is something to lose."""
    optimizer = SGD(model.parameters(), lr=LR, momentum=0.5)
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(1, 3, dtype=torch.float64)).sum()


def given(**arguments: Any) -> Call:
    """A call with these arguments, and the model's names where there are none."""

    def call(model: nn.Module, plain: Optimizer) -> object:
        names = {"named_parameters": model.named_parameters()} | arguments
        return hvd.DistributedOptimizer(plain, **names)

    return call


def named(names: Callable[[nn.Module], Any]) -> Call:
    """A call with what this makes of the model for ``named_parameters``."""
    return lambda model, plain: hvd.DistributedOptimizer(plain, names(model))


def grouped(groups: Callable[[list[nn.Parameter]], Any]) -> Call:
    """A call with what this makes of the parameters for ``groups``."""
    return lambda model, plain: given(groups=groups(list(model.parameters())))(model, plain)


def exhausted(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A generator that somebody has looked through."""
    names = model.named_parameters()
    list(names)
    return names


def wrap_twice(model: nn.Module, plain: Optimizer) -> object:
    copied = copy.deepcopy(plain)
    names = list(zip("abcd", copied.param_groups[0]["params"], strict=True))
    return hvd.DistributedOptimizer(hvd.DistributedOptimizer(copied, names), names)


def replace_step(model: nn.Module, plain: Optimizer) -> object:
    plain.step = lambda: None  # type: ignore[method-assign]
    try:
        return given()(model, plain)
    finally:
        del plain.step


def from_environment(model: nn.Module, plain: Optimizer) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVD_PIPE_STRATEGY", "pipesgd")
        return given()(model, plain)


NAMES = "pass model.named_parameters(), not model.parameters()"
AS_NAMED = "as model.named_parameters() gives them"
AS_IT_IS = "use 'merged-gradient' as it is"

# Of a model of two layers, and an optimizer that has made a step: what is given, and the error.
ARGUMENTS: list[Refusal] = [
    *refusals(hvd),
    ({"groups": [["0.weight"]]}, ValueError, GROUPS),
    ({"num_groups": -2}, ValueError, GROUPS),
    ({"strategy": OTHER_PLAN}, ValueError, "make a new one with plan='auto'"),
    ({"op": hvd.Adasum, "strategy": COCOD}, ValueError, AS_IT_IS),
    ({"op": hvd.Adasum, "strategy": PIPE}, ValueError, AS_IT_IS),
    ({"op": hvd.Adasum, "strategy": "merged-gradient:plan=wfbp"}, ValueError, AS_IT_IS),
    ({"op": hvd.Adasum, "groups": 2}, ValueError, "use groups=None"),
    (
        {"op": hvd.Adasum, "compression": hvd.Compression.int8},
        ValueError,
        "use hvd.Compression.fp16",
    ),
]

CALLS: dict[str, tuple[Call, type[Exception], str]] = {
    "a name twice": (
        named(lambda model: [("same", p) for p in model.parameters()]),
        ValueError,
        "model.named_parameters(prefix='generator')",
    ),
    "names missing": (
        named(lambda model: list(model.named_parameters())[1:]),
        ValueError,
        "pass the names of every model",
    ),
    "(parameter, name)": (
        named(lambda model: [(p, name) for name, p in model.named_parameters()]),
        TypeError,
        "write (name, parameter), not (parameter, name)",
    ),
    "parameters as names": (named(lambda model: model.parameters()), ValueError, NAMES),
    "a number as names": (named(lambda model: 4), TypeError, AS_NAMED),
    "a model as names": (named(lambda _: nn.ReLU()), TypeError, "model.named_parameters()"),
    "an exhausted generator": (named(exhausted), ValueError, "lacks 4 of the optimizer's 4"),
    "a model for an optimizer": (
        lambda model, plain: hvd.DistributedOptimizer(model, model.named_parameters()),
        TypeError,
        "optimizer must be a torch.optim.Optimizer, got Sequential",
    ),
    "wrapped twice": (wrap_twice, ValueError, "wrap it once"),
    "step replaced": (replace_step, ValueError, "replace step after"),
    "groups with a parameter twice": (
        grouped(lambda p: [[p[0]], [p[0], p[1]]]),
        ValueError,
        "only once in groups",
    ),
    "groups of another model": (
        grouped(lambda p: [[q for _, q in names_of_another()]]),
        ValueError,
        "groups must list parameters that are trained here",
    ),
    "a strategy in the environment": (
        from_environment,
        ValueError,
        "HVD_PIPE_STRATEGY='pipesgd': unknown strategy (did you mean 'pipe-sgd'?)",
    ),
}


def names_of_another() -> list[tuple[str, nn.Parameter]]:
    return list(two_layers().named_parameters())


def contents(plain: Optimizer) -> dict[str, Any]:
    """All of an optimizer, and whether anybody listens to its parameters."""
    parameters = [p for group in plain.param_groups for p in group["params"]]
    return {
        "class": type(plain),
        "attributes": {key: id(value) for key, value in plain.__dict__.items()},
        "groups": [
            {**group, "params": [id(p) for p in group["params"]]} for group in plain.param_groups
        ],
        "state": repr(plain.state_dict()),
        "hooks": [bool(p._post_accumulate_grad_hooks) for p in parameters],
    }


def check_refused(
    model: nn.Module, plain: Optimizer, call: Call, kind: type[Exception], says: str
) -> None:
    """And that nothing has changed."""
    before = contents(plain)
    with pytest.raises(kind) as caught:
        call(model, plain)
    assert type(caught.value) is kind
    assert says in str(caught.value)
    assert contents(plain) == before


@pytest.mark.filterwarnings("ignore:num_groups is Horovod's old name")
@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        *(pytest.param(given(**row[0]), *row[1:], id=id_of(row[0])) for row in ARGUMENTS),
        *(pytest.param(*row, id=name) for name, row in CALLS.items()),
    ],
)
def test_a_wrong_call_is_refused_and_leaves_all_as_it_was(
    call: Call, kind: type[Exception], says: str
) -> None:
    model = two_layers()
    plain = momentum(model)
    check_refused(model, plain, call, kind, says)
    trains_as_plain_torch(model, plain)


def test_the_old_name_of_groups_warns_and_works() -> None:
    model = two_layers()
    with pytest.warns(DeprecationWarning, match="num_groups is Horovod's old name: use groups"):
        given(num_groups=1)(model, momentum(model))


class Odd(nn.Module):
    """A model whose only parameter has a dtype of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.zeros(3).to(dtype))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (two_layers().to("meta"), "model.to_empty(device=...)"),
        (two_layers().requires_grad_(False), "requires_grad"),
        (Odd(torch.complex64), "real and imaginary parts as two parameters"),
        (
            Odd(torch.float8_e4m3fn),
            "keep parameters in float32, float64, float16 or bfloat16",
        ),
    ],
    ids=["meta", "frozen", "complex", "float8"],
)
def test_parameters_that_cannot_be_trained(model: nn.Module, says: str) -> None:
    check_refused(model, SGD(model.parameters(), lr=LR), given(), ValueError, says)


def trains_as_plain_torch(model: nn.Module, plain: Optimizer) -> None:
    """What was refused can be wrapped and trained."""
    twin, reference = copy.deepcopy((model, plain))
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    assert isinstance(optimizer, DistributedMixin)
    for each, stepper in ((model, optimizer), (twin, reference)):
        for _ in range(2):
            stepper.zero_grad()
            loss_of(each).square().backward()
            stepper.step()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)


# Misuses of an optimizer that was built well.


def one_weight(strategy: str, **arguments: Any) -> tuple[nn.Linear, Any]:
    """A model whose gradient is 1 in every step, so that weights count what was applied."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    plain = SGD(model.parameters(), lr=LR)
    return model, hvd.DistributedOptimizer(
        plain, model.named_parameters(), strategy=strategy, **arguments
    )


def backward(model: nn.Module) -> None:
    for p in model.parameters():
        p.sum().backward()


def add_group(optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def step_alone(optimizer: Any) -> None:
    with optimizer.skip_synchronize():
        optimizer.step()


@pytest.mark.parametrize(
    ("misuse", "kind", "says"),
    [
        (step_alone, hvd.HvdPipeError, "call optimizer.synchronize() after backward()"),
        (add_group, hvd.HvdPipeError, "call it after step()"),
        (lambda optimizer: optimizer.set_backward_passes_per_step(0), ValueError, PASSES),
        (lambda optimizer: optimizer.set_backward_passes_per_step(1.5), ValueError, PASSES),
    ],
    ids=["step alone", "add_param_group", "no passes", "half a pass"],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_misuse_is_refused_and_the_gradient_is_still_applied(
    strategy: str, misuse: Callable[[Any], object], kind: type[Exception], says: str
) -> None:
    """Between ``backward()`` and ``step()``."""
    model, optimizer = one_weight(strategy)
    groups = len(optimizer.param_groups)
    for _ in range(2):
        backward(model)
        with pytest.raises(kind) as caught:
            misuse(optimizer)
        assert says in str(caught.value)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    assert len(optimizer.param_groups) == groups
    assert -model.weight.item() / LR == 2


@pytest.mark.parametrize("strategy", [MERGED, PIPE])
def test_one_backward_pass_too_many(strategy: str) -> None:
    model, _kept = one_weight(strategy)
    backward(model)
    with pytest.raises(hvd.HvdPipeError, match="pass their number as backward_passes_per_step="):
        backward(model)


@pytest.mark.parametrize("codec", [hvd.Compression.int8, hvd.Compression.bf16])
def test_a_codec_in_a_single_horovod_call(codec: Any) -> None:
    with pytest.raises(TypeError, match=r"DistributedOptimizer\(compression=\.\.\.\)"):
        hvd.allreduce(torch.ones(3), compression=codec)


BEFORE_INIT = """
import torch
import hvd_pipe.torch as hvd
model = torch.nn.Linear(1, 1)
try:
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
except ValueError as error:
    print(error)
"""


def test_before_init() -> None:
    command = [sys.executable, "-c", BEFORE_INIT]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout
    assert "call hvd.init() before this" in said


@pytest.mark.parametrize("more", [{"groups": 2}, {"bucket_bytes": 64}])
def test_a_plan_file_beside_another_grouping(tmp_path: Path, more: dict[str, int]) -> None:
    model = two_layers()
    names = tuple(name for name, _ in model.named_parameters())
    hvd.Plan((names,), "given").save(tmp_path / "plan.json")
    text = f"merged-gradient:plan={tmp_path / 'plan.json'}"
    given(strategy=text)(model, momentum(model))  # right by itself
    groups, size = more.get("groups"), more.get("bucket_bytes")
    with pytest.raises(ValueError, match="give one of them"):
        given(strategy=f"{text},bucket_bytes={size}" if size else text, groups=groups)(
            model, momentum(model)
        )


def replaced(parameter: nn.Parameter) -> None:
    parameter.grad = torch.zeros_like(parameter)


def test_a_gradient_that_is_replaced_where_another_one_is_due() -> None:
    model, optimizer = one_weight(PIPE)
    backward(model)
    replaced(model.weight)
    optimizer.step()
    with pytest.raises(hvd.HvdPipeError, match="which applies the average of the step before"):
        optimizer.synchronize()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_that_was_given_up_for_a_checkpoint(strategy: str) -> None:
    """As people do where a loss is not finite: no step(), back to the last good state."""
    model, optimizer = one_weight(strategy)
    state = copy.deepcopy(optimizer.state_dict())
    backward(model)
    optimizer.load_state_dict(state)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    optimizer.synchronize()
    assert -model.weight.item() / LR == 3
