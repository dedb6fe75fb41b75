"""Wrong calls, in one process: each is refused with what to do instead, and nothing is lost."""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Optimizer

import hvd_pipe.torch as hvd
from hvd_pipe.torch.distributed import DistributedMixin

LR = 2.0**-4
MERGED, PIPE, COCOD = STRATEGIES = ("merged-gradient", "pipe-sgd", "cocod:period=3")

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


@dataclass(frozen=True)
class Wrong:
    """A call that is refused when the optimizer is built.

    Args:
        name: What is wrong.
        kind: The class of the exception.
        says: A part of the message: what to do instead.
        call: Gets a model and its plain optimizer.
        make_model: Makes the model.
        make_optimizer: Makes its optimizer.
    """

    name: str
    kind: type[Exception]
    says: str
    call: Call
    make_model: Callable[[], nn.Module] = two_layers
    make_optimizer: Callable[[nn.Module], Optimizer] = momentum


def given(**arguments: Any) -> Call:
    """A call with these arguments, and the model's names where there are none."""

    def call(model: nn.Module, plain: Optimizer) -> object:
        names = {"named_parameters": model.named_parameters()} | arguments
        return hvd.DistributedOptimizer(plain, **names)

    return call


def named(names: Callable[[nn.Module], Any]) -> Call:
    """A call with what this makes of the model for ``named_parameters``."""
    return lambda model, plain: hvd.DistributedOptimizer(plain, names(model))


def grouped(groups: Callable[[list[nn.Parameter]], Any], **more: Any) -> Call:
    """A call with what this makes of the parameters for ``groups``."""
    return lambda model, plain: given(groups=groups(list(model.parameters())), **more)(
        model, plain
    )


def exhausted(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A generator that somebody has looked through."""
    names = model.named_parameters()
    list(names)
    return names


def frozen() -> nn.Module:
    return two_layers().requires_grad_(False)


def plain_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=LR)


def emptied(model: nn.Module) -> Optimizer:
    """An optimizer without parameters, which torch does not make from an empty list."""
    optimizer = plain_sgd(model)
    optimizer.param_groups[0]["params"] = []
    return optimizer


class Odd(nn.Module):
    """A model whose only parameter has a dtype of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.zeros(3).to(dtype))


def odd(dtype: torch.dtype) -> dict[str, Any]:
    return {"make_model": lambda: Odd(dtype), "make_optimizer": plain_sgd}


def on_meta() -> nn.Module:
    return two_layers().to("meta")


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


def missing_plan(model: nn.Module, plain: Optimizer) -> object:
    return given(strategy="merged-gradient:plan=./nowhere.json")(model, plain)


def from_environment(model: nn.Module, plain: Optimizer) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVD_PIPE_STRATEGY", "pipesgd")
        return given()(model, plain)


OTHER_PLAN = hvd.Plan((("fc.weight", "fc.bias"),), "given")

NAMES = "pass model.named_parameters(), not model.parameters()"
PASSES = "backward_passes_per_step must be an int >= 1"
PREDIVIDE = "gradient_predivide_factor must be"
GROUPS = "groups must be"
ADASUM = "op=hvd.Adasum does not go with"
NO_GRADIENTS = "use {}, or strategy='merged-gradient' or 'pipe-sgd'"

WRONG = [
    # Parameters.
    Wrong(
        "parameters on the meta device",
        ValueError,
        "model.to_empty(device=...)",
        given(),
        on_meta,
        plain_sgd,
    ),
    Wrong(
        "complex parameters",
        ValueError,
        "real and imaginary parts as two parameters",
        given(),
        **odd(torch.complex64),
    ),
    Wrong(
        "float8 parameters",
        ValueError,
        "keep parameters in float32, float64, float16 or bfloat16",
        given(),
        **odd(torch.float8_e4m3fn),
    ),
    Wrong("frozen parameters alone", ValueError, "requires_grad", given(), frozen, plain_sgd),
    Wrong("no parameters", ValueError, "has no parameters", given(), two_layers, emptied),
    # Names.
    Wrong(
        "a name twice",
        ValueError,
        "model.named_parameters(prefix='generator')",
        named(lambda model: [("same", p) for p in model.parameters()]),
    ),
    Wrong(
        "names missing",
        ValueError,
        "pass the names of every model",
        named(lambda model: list(model.named_parameters())[1:]),
    ),
    Wrong(
        "(parameter, name)",
        TypeError,
        "write (name, parameter), not (parameter, name)",
        named(lambda model: [(p, name) for name, p in model.named_parameters()]),
    ),
    Wrong("parameters as names", ValueError, NAMES, named(lambda model: model.parameters())),
    Wrong(
        "an exhausted generator",
        ValueError,
        "named_parameters lacks 4 of the optimizer's 4 parameters",
        named(exhausted),
    ),
    Wrong("names of another model", ValueError, "lacks 4 of", named(lambda _: names_of_another())),
    Wrong(
        "a number as names",
        TypeError,
        "as model.named_parameters() gives them",
        named(lambda model: 4),
    ),
    Wrong(
        "a method as names",
        TypeError,
        "as model.named_parameters() gives them",
        named(lambda model: model.named_parameters),
    ),
    Wrong("a model as names", TypeError, "model.named_parameters()", named(lambda _: nn.ReLU())),
    Wrong("a string as names", ValueError, NAMES, named(lambda model: "weights")),
    Wrong("a dict as names", ValueError, NAMES, named(lambda m: dict(m.named_parameters()))),
    Wrong(
        "a nested list as names",
        ValueError,
        NAMES,
        named(lambda model: [list(model.named_parameters())]),
    ),
    Wrong(
        "names of no tensors",
        ValueError,
        "named_parameters lacks 4",
        named(lambda model: [(name, name) for name, _ in model.named_parameters()]),
    ),
    # What is no optimizer, or cannot be wrapped.
    Wrong(
        "a model for an optimizer",
        TypeError,
        "optimizer must be a torch.optim.Optimizer, got Sequential",
        lambda model, plain: hvd.DistributedOptimizer(model, model.named_parameters()),
    ),
    Wrong(
        "an optimizer's class",
        TypeError,
        "optimizer must be a torch.optim.Optimizer",
        lambda model, plain: hvd.DistributedOptimizer(SGD, model.named_parameters()),
    ),
    Wrong("wrapped twice", ValueError, "wrap it once", wrap_twice),
    Wrong("step replaced", ValueError, "replace step after", replace_step),
    # Arguments.
    *(
        Wrong(
            f"compression={value!r}",
            TypeError,
            "compression must be hvd.Compression.none, .fp16, .bf16, .int8",
            given(compression=value),
        )
        for value in ("fp16", None, 8, hvd.Compression)
    ),
    Wrong("a codec's class", TypeError, "hvd.Int8()", given(compression=hvd.Int8)),
    Wrong("op, a list", ValueError, "op must be hvd.Average, hvd.Sum", given(op=[])),
    *(
        Wrong(f"op={value!r}", ValueError, "op must be hvd.Average, hvd.Sum", given(op=value))
        for value in ("sum", None, 99, hvd.Max)
    ),
    *(
        Wrong(f"passes {value!r}", ValueError, PASSES, given(backward_passes_per_step=value))
        for value in (0, -1, 1.5, True, "2", None)
    ),
    *(
        Wrong(f"predivide {value!r}", kind, PREDIVIDE, given(gradient_predivide_factor=value))
        for value, kind in (
            (0, ValueError),
            (-1, ValueError),
            (float("nan"), ValueError),
            (float("inf"), ValueError),
            ("2", TypeError),
            (True, TypeError),
            (None, TypeError),
        )
    ),
    Wrong(
        "predivide with Sum",
        ValueError,
        "needs op=hvd.Average",
        given(op=hvd.Sum, gradient_predivide_factor=2.0),
    ),
    *(
        Wrong(f"groups {value!r}", ValueError, GROUPS, given(groups=value))
        for value in (0.5, -1, [[1]], [["0.weight"]], ["0.weight"], "two", True, (2,))
    ),
    Wrong(
        "groups with a parameter twice",
        ValueError,
        "only once in groups",
        grouped(lambda p: [[p[0]], [p[0], p[1]]]),
    ),
    Wrong("groups, a flat list", ValueError, GROUPS, grouped(lambda p: p[:2])),
    Wrong(
        "groups of another model",
        ValueError,
        "groups must list parameters that are trained here",
        grouped(lambda p: [[q for _, q in names_of_another()]]),
    ),
    Wrong("num_groups below zero", ValueError, GROUPS, given(num_groups=-2)),
    *(
        Wrong(
            f"sparse_as_dense={value!r}",
            TypeError,
            "sparse_as_dense must be True or False",
            given(sparse_as_dense=value),
        )
        for value in ("yes", 1, None)
    ),
    Wrong("process_set, None", TypeError, "hvd.ProcessSet", given(process_set=None)),
    Wrong("process_set, a number", TypeError, "hvd.ProcessSet", given(process_set=0)),
    Wrong("process_set, a list", TypeError, "hvd.ProcessSet", given(process_set=[0])),
    Wrong(
        "process_set that is not registered",
        ValueError,
        "call hvd.add_process_set(...) on every rank",
        given(process_set=hvd.ProcessSet([0])),
    ),
    # Strategies.
    *(
        Wrong(f"strategy={value!r}", kind, says, given(strategy=value))
        for value, kind, says in (
            ("merged", ValueError, "use one of 'merged-gradient', 'pipe-sgd', 'cocod'"),
            ("pipesgd", ValueError, "did you mean 'pipe-sgd'?"),
            ("", ValueError, "use one of 'merged-gradient'"),
            ("cocod:perid=3", ValueError, "did you mean 'period'?"),
            ("cocod:period", ValueError, "write OPTION=VALUE"),
            ("cocod:period=0", ValueError, "period must be >= 1"),
            ("cocod:period=x", TypeError, "period must be an int"),
            ("cocod:period=2,period=3", ValueError, "once each"),
            ("cocod:period=2;warmup_steps=3", TypeError, "period must be an int"),
            ("cocod:period=2.5", TypeError, "period must be an int"),
            ("cocod:period=-1", ValueError, "period must be >= 1"),
            ("cocod:bucket_bytes=64", ValueError, "with OPTION one of period"),
            ("cocod:pull_back=x", TypeError, "pull_back must be a number"),
            ("cocod:pull_back=nan", ValueError, "above 0 and below 1"),
            ("cocod:pull_back=0.6,anchor_momentum=1", ValueError, "from 0 to below 1"),
            ("cocod:weights=-1", ValueError, "positive numbers"),
            ("cocod:weights=nan", ValueError, "positive numbers"),
            ("cocod:momentum=both", ValueError, "'local', 'average'"),
            ("pipe-sgd:bucket_bytes=0", ValueError, "bucket_bytes must be >= 1"),
            ("pipe-sgd:bucket_bytes=8MB", TypeError, "bucket_bytes must be an int"),
            ("merged-gradient:plan=gredy", ValueError, "did you mean 'greedy'?"),
            ("merged-gradient:plan=", ValueError, "use one of 'auto', 'greedy'"),
            ("merged-gradient:plan=3", TypeError, "'auto', 'greedy', 'wfbp', 'single'"),
            ("pipe-sgd:prediction=sideways", ValueError, "'none', 'local', 'previous'"),
            ("pipe-sgd:period=3", ValueError, "with OPTION one of warmup_steps"),
            ("pipe-sgd:warmup_steps=-1", ValueError, "warmup_steps must be >= 0"),
            ("cocod:pull_back=2", ValueError, "above 0 and below 1"),
            ("cocod:anchor_momentum=0.5", ValueError, "give pull_back=0.6"),
            ("cocod:weights=3/1", ValueError, "give one weight a rank"),
            ("cocod:weights=0", ValueError, "positive numbers"),
            ("cocod:weights=a/b", TypeError, "tuple of numbers"),
            ("cocod:momentum=none", ValueError, "'local', 'average'"),
            ("merged-gradient:plan=best", ValueError, "use one of 'auto', 'greedy'"),
            ("merged-gradient:bucket_bytes=0", ValueError, "bucket_bytes must be >= 1"),
            ("merged-gradient:plan=wfbp,bucket_bytes=9", ValueError, "give one of them"),
            (hvd.PipeSGD, TypeError, "strategy must be a string or one of"),
            (17, TypeError, "strategy must be a string or one of"),
            (hvd.MergedGradient(OTHER_PLAN), ValueError, "make a new one with plan='auto'"),
        )
    ),
    Wrong("a plan that is not there", FileNotFoundError, "optimizer.plan.save", missing_plan),
    Wrong(
        "a plan that is a folder",
        FileNotFoundError,
        "optimizer.plan.save",
        given(strategy=hvd.MergedGradient(Path())),
    ),
    Wrong(
        "a strategy in the environment",
        ValueError,
        "HVD_PIPE_STRATEGY='pipesgd': unknown strategy (did you mean 'pipe-sgd'?)",
        from_environment,
    ),
    # What does not go together.
    Wrong(
        "groups with a plan",
        ValueError,
        "both say what to merge: give one of them",
        given(groups=2, strategy="merged-gradient:plan=wfbp"),
    ),
    *(
        Wrong(
            f"groups with bucket_bytes of {name}",
            ValueError,
            "both say what to merge: give one of them",
            given(groups=2, strategy=f"{name}:bucket_bytes=64"),
        )
        for name in (MERGED, PIPE)
    ),
    *(
        Wrong(
            f"LBFGS with {strategy}",
            ValueError,
            "use strategy='merged-gradient', or another optimizer",
            given(strategy=strategy),
            make_optimizer=lambda model: LBFGS(model.parameters()),
        )
        for strategy in (PIPE, COCOD)
    ),
    *(
        Wrong(f"Adasum with {what}", ValueError, says, given(op=hvd.Adasum, **arguments))
        for what, says, arguments in (
            ("cocod", "use 'merged-gradient' as it is", {"strategy": COCOD}),
            ("pipe-sgd", "use 'merged-gradient' as it is", {"strategy": PIPE}),
            (
                "a plan",
                "use 'merged-gradient' as it is",
                {"strategy": "merged-gradient:plan=wfbp"},
            ),
            ("groups", "use groups=None", {"groups": 2}),
            ("int8", "use hvd.Compression.fp16", {"compression": hvd.Compression.int8}),
        )
    ),
    Wrong(
        "Sum with cocod",
        ValueError,
        NO_GRADIENTS.format("op=hvd.Average"),
        given(op=hvd.Sum, strategy=COCOD),
    ),
    Wrong(
        "predivide with cocod",
        ValueError,
        NO_GRADIENTS.format("1.0"),
        given(gradient_predivide_factor=2.0, strategy=COCOD),
    ),
    Wrong(
        "groups with cocod",
        ValueError,
        NO_GRADIENTS.format("groups=None"),
        given(groups=2, strategy=COCOD),
    ),
]


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


@pytest.mark.filterwarnings("ignore:num_groups is Horovod's old name")
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_a_wrong_call_is_refused_and_leaves_all_as_it_was(wrong: Wrong) -> None:
    model = wrong.make_model()
    plain = wrong.make_optimizer(model)
    before = contents(plain)
    with pytest.raises(wrong.kind) as caught:
        wrong.call(model, plain)
    assert type(caught.value) is wrong.kind
    assert wrong.says in str(caught.value)
    assert contents(plain) == before
    if wrong.make_model is two_layers and wrong.make_optimizer is momentum:
        trains_as_plain_torch(model, plain)


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


@dataclass(frozen=True)
class Misuse:
    """A call between ``backward()`` and ``step()`` that is refused.

    Args:
        name: What is wrong.
        kind: The class of the exception.
        says: A part of the message.
        call: Gets the optimizer.
        strategies: Under which it is refused.
    """

    name: str
    kind: type[Exception]
    says: str
    call: Callable[[Any], object]
    strategies: tuple[str, ...] = STRATEGIES


MISUSES = [
    Misuse(
        "step() in skip_synchronize() without synchronize()",
        hvd.HvdPipeError,
        "call optimizer.synchronize() after backward() and before this",
        step_alone,
    ),
    Misuse("add_param_group()", hvd.HvdPipeError, "call it after step()", add_group),
    *(
        Misuse(
            f"set_backward_passes_per_step({value!r})",
            ValueError,
            PASSES,
            lambda optimizer, value=value: optimizer.set_backward_passes_per_step(value),
        )
        for value in (0, 1.5)
    ),
]


@pytest.mark.parametrize(
    ("misuse", "strategy"),
    [(misuse, strategy) for misuse in MISUSES for strategy in misuse.strategies],
    ids=lambda each: each if isinstance(each, str) else each.name,
)
def test_a_misuse_is_refused_and_the_gradient_is_still_applied(
    misuse: Misuse, strategy: str
) -> None:
    model, optimizer = one_weight(strategy)
    groups = len(optimizer.param_groups)
    for _ in range(2):
        backward(model)
        with pytest.raises(misuse.kind) as caught:
            misuse.call(optimizer)
        assert misuse.says in str(caught.value)
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


@pytest.mark.parametrize("synchronizes", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unscale_needs_no_loss_scale(strategy: str, synchronizes: bool) -> None:
    """It was refused: the strategy sees by which number the gradients are divided."""
    model, optimizer = one_weight(strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model.weight.sum()).backward()
    if synchronizes:
        optimizer.synchronize()
    scaler.unscale_(optimizer)
    with optimizer.skip_synchronize() if synchronizes else contextlib.nullcontext():
        scaler.step(optimizer)
    optimizer.synchronize()
    assert -model.weight.item() / LR == 1


def test_lbfgs_without_a_closure() -> None:
    model = two_layers()
    optimizer = hvd.DistributedOptimizer(LBFGS(model.parameters()), model.named_parameters())
    with pytest.raises(TypeError, match=r"step\(closure\)"):
        optimizer.step()


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


BROKEN = {
    "no json": b"{buckets",
    "another dict": b"{}",
    "a list": b"[1, 2]",
    "buckets of numbers": b'{"buckets": [[1, 2]], "method": "given"}',
    "empty": b"",
    "a picture": b"\x89PNG\xff\xfe",
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_plan_file_that_is_none(tmp_path: Path, broken: str) -> None:
    file = tmp_path / "given.json"
    file.write_bytes(BROKEN[broken])
    model = two_layers()
    with pytest.raises(ValueError, match=r"given\.json.*[Pp]lan"):
        given(strategy=hvd.MergedGradient(file))(model, momentum(model))


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


def test_the_plain_optimizer_wrapped_twice() -> None:
    model = two_layers()
    plain = momentum(model)
    _kept = given()(model, plain)
    with pytest.raises(ValueError, match="wrap it once"):
        given()(model, plain)


def cleared(parameter: nn.Parameter) -> None:
    parameter.grad = None


def replaced(parameter: nn.Parameter) -> None:
    parameter.grad = torch.zeros_like(parameter)


def changed(parameter: nn.Parameter) -> None:
    nn.utils.clip_grad_norm_([parameter], 0.5)


@pytest.mark.parametrize(
    ("strategy", "change", "applied"),
    [
        (MERGED, cleared, 0.0),
        (MERGED, replaced, 0.0),
        (MERGED, changed, 0.5),
        (PIPE, cleared, 0.0),
        (PIPE, changed, 1.0),  # what is clipped is the average of the step before: there is none
        (COCOD, cleared, 0.0),
        (COCOD, replaced, 0.0),
        (COCOD, changed, 0.5),
    ],
)
def test_gradients_that_are_changed_while_they_travel(
    strategy: str, change: Callable[[nn.Parameter], None], applied: float
) -> None:
    model, optimizer = one_weight(strategy)
    backward(model)
    change(model.weight)
    optimizer.step()
    optimizer.synchronize()
    assert -model.weight.item() / LR == pytest.approx(applied)


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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_step_after_synchronize_is_told(strategy: str) -> None:
    model, optimizer = one_weight(strategy)
    backward(model)
    optimizer.synchronize()
    with pytest.warns(UserWarning, match=r"with optimizer.skip_synchronize\(\)"):
        optimizer.step()
    optimizer.synchronize()
    assert -model.weight.item() / LR == 1


def test_an_optimizer_that_is_not_kept() -> None:
    """A scheduler holds its step, and no more than that."""
    model = two_layers()
    plain = momentum(model)
    torch.optim.lr_scheduler.StepLR(plain, 1)
    given()(model, plain)
    with pytest.raises(hvd.HvdPipeError, match="keep it"):
        plain.step()
