"""CoCoD's options against their equations, carried out for n workers in one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from horovod.torch.mpi_ops import ProcessSet
from on_ranks import gather, on_ranks
from problem import OPTIMIZERS as COMMON
from problem import STEPS, Weights, loss_of, make_model, train
from serial import PER_NODE, make_workers
from serial import CoCoD as CoCoDWorkers
from torch import nn
from torch.optim import Adam, Optimizer
from trajectories import assert_close, compare

import hvd_pipe.torch as hvd
from hvd_pipe.errors import HvdPipeError, RanksDisagreeError
from hvd_pipe.runtime.process_sets import make_process_sets
from hvd_pipe.strategy import CoCoD
from hvd_pipe.torch.compression import Compression, Int8
from hvd_pipe.torch.measuring.probes import worker_speeds

TOLERANCE = 1e-12


def _hasty_adam(model: nn.Module) -> Optimizer:
    """Second moments that fall quickly, so that mean + (end - start) can be below zero."""
    return Adam(model.parameters(), lr=0.01, betas=(0.9, 0.2), eps=1e-3)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {**COMMON, "hasty adam": _hasty_adam}


@dataclass(frozen=True)
class Case:
    """One run; ``weights`` beyond the number of ranks are left out."""

    options: CoCoD
    optimizer: str = "momentum"
    drains: tuple[int, ...] = ()
    compression: str = "none"
    dtype: torch.dtype = torch.float64

    def strategy(self, n: int) -> CoCoD:
        weights = self.options.weights
        return CoCoD(**{**vars(self.options), "weights": weights and weights[:n]})

    def __str__(self) -> str:
        what = [f"{k}={v}" for k, v in vars(self.options).items() if v != getattr(CoCoD(), k)]
        what += [self.optimizer, self.compression, str(self.dtype).removeprefix("torch.")]
        return ", ".join([*what, *([f"drained after {self.drains}"] if self.drains else [])])


COMPRESSIONS: dict[str, Any] = {
    "none": Compression.none,
    "fp16": Compression.fp16,
    "bf16": Compression.bf16,
    "int8": Compression.int8,
    "int8 with feedback": Int8(error_feedback=True),
}

WEIGHTS = (3.0, 1.0, 2.5, 1.5)
PULL = {"pull_back": 0.6, "anchor_momentum": 0.7}
OUTER = {"outer": "nesterov", "outer_lr": 0.3, "outer_momentum": 0.6}

EXACT = [
    Case(CoCoD(weights=WEIGHTS)),
    Case(CoCoD(weights=WEIGHTS), "adam", drains=(13, 14)),
    Case(CoCoD(3, 4, weights=WEIGHTS)),
    Case(CoCoD(3, 4, weights=WEIGHTS), "adam", drains=(2, 13)),
    Case(CoCoD(momentum="average")),
    Case(CoCoD(momentum="average"), "adam"),
    Case(CoCoD(momentum="average"), "hasty adam", drains=(13, 14)),
    Case(CoCoD(3, 4, momentum="average", weights=WEIGHTS), "adam", drains=(2, 13)),
    Case(CoCoD(pull_back=0.6)),
    Case(CoCoD(pull_back=0.6), "adam", drains=(13, 14)),
    Case(CoCoD(**PULL)),
    Case(CoCoD(2, 5, **PULL), "adam", drains=(2, 13)),
    Case(CoCoD(momentum="average", weights=WEIGHTS, **PULL), "momentum", drains=(13,)),
    Case(CoCoD(**OUTER)),
    Case(CoCoD(2, 5, **OUTER), "adam", drains=(2, 13, 14)),
    Case(CoCoD(momentum="average", weights=WEIGHTS, **OUTER), "adam", drains=(13,)),
    Case(CoCoD(fragments=2)),
    Case(CoCoD(6, 4, fragments=3), "adam", drains=(2, 13, 14)),
    Case(CoCoD(fragments=4, weights=WEIGHTS), "adam", drains=(13,)),
    Case(CoCoD(fragments=2, **PULL), "adam", drains=(15,)),
    Case(CoCoD(4, 3, fragments=4, **OUTER), drains=(12,)),
]
WITHIN = [
    Case(CoCoD(within="node")),
    Case(CoCoD(3, 4, within="node", weights=WEIGHTS), "adam", drains=(13,)),
    Case(CoCoD(fragments=4, within="node", **OUTER), "adam", drains=(2, 14)),
    Case(CoCoD(2, within="node", momentum="average"), drains=(7,)),
]
COMPRESSED = [
    Case(CoCoD(), compression="fp16", drains=(13,)),
    Case(CoCoD(3, 4), "adam", compression="fp16"),
    Case(CoCoD(weights=WEIGHTS), compression="fp16"),
    Case(CoCoD(momentum="average", **PULL), "adam", compression="fp16"),
    Case(CoCoD(2, **OUTER), compression="fp16", drains=(13,)),
    Case(CoCoD(fragments=4), compression="fp16", drains=(14,)),
]
CODED = [
    Case(CoCoD(), compression="bf16", drains=(13,)),
    Case(CoCoD(), compression="int8"),
    Case(CoCoD(weights=WEIGHTS), compression="int8 with feedback", drains=(13,)),
    Case(CoCoD(fragments=2), compression="int8 with feedback", drains=(13,)),
]
HALF = [
    Case(CoCoD(), dtype=torch.float16),
    Case(CoCoD(weights=WEIGHTS, momentum="average"), dtype=torch.float16),
    Case(CoCoD(pull_back=0.6), dtype=torch.float16),
    Case(CoCoD(), dtype=torch.bfloat16),
]


def wrap(
    model: nn.Module, case: Case, *, n: int | None = None, plain: Optimizer | None = None
) -> Any:
    """Wrap an optimizer; ``n`` is how many ranks there are to be."""
    return hvd.DistributedOptimizer(
        plain or OPTIMIZERS[case.optimizer](model),
        model.named_parameters(),
        compression=COMPRESSIONS[case.compression],
        strategy=case.strategy(n or hvd.size()),
    )


@cache
def trajectory(case: Case) -> Weights:
    """As `problem.train` does it, also for a dtype that numpy lacks."""
    model = make_model(case.dtype)
    optimizer, records = wrap(model, case), []

    def record() -> None:
        wide = torch.promote_types(case.dtype, torch.float32)
        records.append(torch.cat([p.detach().flatten() for p in model.parameters()]).to(wide))

    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        record()
        if step in case.drains or step == STEPS - 1:
            optimizer.synchronize()
            record()
    return torch.stack(records).numpy()


def make_reference(case: Case, n: int, leaves_after: int | None = None) -> CoCoDWorkers:
    """Workers in one process that do as ranks do."""
    workers = make_workers(
        case.strategy(n),
        n,
        make_model,
        OPTIMIZERS[case.optimizer],
        halves=case.compression == "fp16" and n > 1,
        leaves_after=leaves_after,
    )
    assert isinstance(workers, CoCoDWorkers)
    return workers


@cache
def expected(case: Case, n: int) -> Weights:
    return make_reference(case, n).train(STEPS, drains={*case.drains, STEPS - 1})


def init() -> None:
    hvd.init(process_sets="dynamic")


two = on_ranks(2, init=hvd.init)
three = on_ranks(3, init=init)
four = on_ranks(4, init=init)  # two nodes of two ranks


def on_each(
    cases: list[Case], on_three: Callable[[Case], bool] = lambda _: False
) -> pytest.MarkDecorator:
    """Parameters: the number of ranks, and a case."""
    return pytest.mark.parametrize(
        ("n", "case"),
        [
            pytest.param(n, case, marks=ranks, id=f"{n}-{case}")
            for n, ranks in ((2, two), (3, three))
            for case in cases
            if n == 2 or on_three(case)
        ],
    )


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be on a node of two ranks, as launchers say it."""
    monkeypatch.setenv("HOROVOD_HOSTNAME", f"node-{hvd.rank() // PER_NODE}")


def first_two() -> ProcessSet:
    """Return the process set of ranks 0 and 1, which may be there for their node."""
    return make_process_sets([(0, 1)], hvd.global_process_set, needed="")[0, 1]


# Equations ---------------------------------------------------------------------------------------


def check(case: Case, atol: float, equation: Case | None = None) -> None:
    """Compare with a case's equation; replicas are equal after a last ``synchronize()`` alone."""
    wanted = functools.partial(expected, equation or case, hvd.size())
    first, *others = compare(trajectory(case), wanted, atol)
    for other in others:
        assert np.array_equal(other[-1], first[-1])
        assert not np.array_equal(other[-2], first[-2])


def uncompressed(case: Case) -> Case:
    return Case(case.options, case.optimizer, case.drains)


@on_each(EXACT, lambda case: bool(case.options.weights and case.drains))
def test_trajectory(n: int, case: Case) -> None:
    check(case, TOLERANCE)


@on_each(COMPRESSED, lambda case: case.options in (CoCoD(), CoCoD(weights=WEIGHTS)))
def test_differences_are_what_float16_rounds(n: int, case: Case) -> None:
    """Two float16 numbers have one sum; of three, it depends on who adds first."""
    check(case, 1e-12 if n < 3 else 1e-4)


@on_each(CODED)
def test_coded_differences(n: int, case: Case) -> None:
    check(case, 1e-2, uncompressed(case))


@on_each(HALF)
def test_half_precision_parameters(n: int, case: Case) -> None:
    check(case, 8 * torch.finfo(case.dtype).eps, uncompressed(case))


@pytest.mark.parametrize(
    ("n", "case"),
    [
        pytest.param(n, case, marks=ranks, id=f"{n}-{case}")
        for n, ranks, cases in ((3, three, WITHIN[:2]), (4, four, WITHIN))
        for case in cases
    ],
)
@pytest.mark.usefixtures("nodes")
def test_workers_of_a_node_stay_equal(n: int, case: Case) -> None:
    """In every bit at all times; those of other nodes are equal after a drain."""
    ranks = compare(trajectory(case), functools.partial(expected, case, n), TOLERANCE)
    for rank, actual in enumerate(ranks):
        assert np.array_equal(actual, ranks[rank // PER_NODE * PER_NODE])
        assert np.array_equal(actual[-1], ranks[0][-1])
        assert np.array_equal(actual[-2], ranks[0][-2]) == (rank < PER_NODE)


@three
@pytest.mark.parametrize("case", WITHIN[1:3], ids=str)
@pytest.mark.usefixtures("nodes")
def test_going_on_within_nodes(case: Case) -> None:
    """From a state in the middle of a round; a run that is saved is not disturbed."""
    model, other = make_model(), make_model()
    optimizer, second = wrap(model, case), wrap(other, case)
    train(model, optimizer, hvd.rank(), steps=6)
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    whole = train(model, optimizer, hvd.rank(), first=6, steps=8)
    other.load_state_dict(state[0])
    second.load_state_dict(state[1])
    np.testing.assert_array_equal(train(other, second, hvd.rank(), first=6, steps=8), whole)
    for one in (optimizer, second):
        one.synchronize()


# Ranks that leave, or lack something -------------------------------------------------------------

LEAVES_AFTER = 6


@three
def test_a_rank_that_left_has_no_weight() -> None:
    """The last rank has fewer batches than the others."""
    case, model, last = Case(CoCoD(weights=WEIGHTS[:3])), make_model(), hvd.rank() == 2
    rows = train(model, wrap(model, case), hvd.rank(), steps=LEAVES_AFTER if last else 14)
    hvd.join()
    want = make_reference(case, 3, LEAVES_AFTER).train(14, drains={13})[hvd.rank()]
    assert_close([rows], [want[: len(rows)]], TOLERANCE)


@three
@pytest.mark.parametrize("broadcasts", [True, False], ids=["broadcast", "alone"])
@pytest.mark.parametrize(
    "options", [CoCoD(2, outer="nesterov"), CoCoD(2, pull_back=0.5, anchor_momentum=0.5)], ids=str
)
def test_what_goes_on_over_rounds_after_a_join(options: CoCoD, broadcasts: bool) -> None:
    """The last rank's outer model (or anchor), which began anew, where it is broadcast."""
    model = make_model()
    optimizer = wrap(model, Case(options))
    train(model, optimizer, hvd.rank(), steps=LEAVES_AFTER + 4 * hvd.rank())

    def kept() -> Any:
        tensors = optimizer._hvd_pipe.state().tensors
        values = [value for label in options.kept for value in tensors[label]]
        return np.concatenate([value.numpy().ravel() for value in values])

    last = hvd.join()
    assert last == 2
    everyone = gather(kept())
    assert not np.array_equal(everyone[0], everyone[last])
    hvd.broadcast_parameters(model.state_dict(), last)
    if broadcasts:
        hvd.broadcast_optimizer_state(optimizer, last)
        np.testing.assert_array_equal(kept(), everyone[last])
    train(model, optimizer, hvd.rank(), steps=4)
    first, *others = gather(kept())
    for other in others:
        np.testing.assert_array_equal(first, other)


@three
def test_weights_are_those_of_a_process_set() -> None:
    """The third rank is no member and trains alone."""
    options = CoCoD(3, 4, weights=(3.0, 1.0), momentum="average")
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model),
        model.named_parameters(),
        process_set=first_two(),
        strategy=options,
    )
    ranks = gather(train(model, optimizer, hvd.rank(), drains={13, STEPS - 1}))
    assert_close(ranks[:2], expected(Case(options, drains=(13,)), 2), TOLERANCE)


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.b = nn.Parameter(torch.ones(2, dtype=torch.float64))


@three
def test_a_momentum_that_one_rank_has() -> None:
    """Others contribute zeros, from the start of the round before which all have heard of it.

    Rank 1 has it from step 5, the end of the third round; it says so as the fourth starts, so the
    fifth round (steps 8 and 9) is the first that averages it.
    """
    model = TwoParts()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = CoCoD(period=2, momentum="average")
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), strategy=options)
    momenta = [0.0] * 5
    for step in range(16):
        optimizer.zero_grad()
        loss = (model.a * (step + hvd.rank())).sum()
        if hvd.rank() == 1 and step >= 5:
            loss = loss + float(step) * model.b.sum()
        loss.backward()
        optimizer.step()
        momentum = optimizer.state[model.b].get("momentum_buffer")
        if hvd.rank() != 1 or step < 5:
            assert momentum is None
            continue
        want = 0.9 * momenta[step - 1] + step
        if step >= 9 and step % 2 == 1:
            want += momenta[step - 2] / 3 - momenta[step - 2]
        np.testing.assert_allclose(momentum, want, rtol=0, atol=1e-12)
        momenta.append(float(momentum[0]))
    optimizer.synchronize()


JOINS_AT = 5


def parameter_joins(strategy: CoCoD, compression: Any = Compression.none) -> list[float]:
    """In the middle of the second round of four steps, b is unfrozen: its value after each step.

    Its gradient is 1 on rank 0, 2 on rank 1 and so on, and the learning rate 0.125.
    """
    model = TwoParts()
    model.b.requires_grad_(False)
    plain = torch.optim.SGD(model.parameters(), lr=0.125)
    named = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(plain, named, compression=compression, strategy=strategy)
    values = []
    for step in range(16):
        model.b.requires_grad_(step >= JOINS_AT)
        optimizer.zero_grad()
        ((model.a.sum() + model.b.sum()) * (hvd.rank() + 1)).backward()
        optimizer.step()
        values.append(float(model.b[0].detach()))
    optimizer.synchronize()
    return [*values, float(model.b[0].detach())]


def equation_of_joining(gradients: Collection[float]) -> list[list[float]]:
    """For workers with these gradients: b's value after each step, and after a drain."""
    now = start = [1.0 for _ in gradients]
    rows = []
    for step in range(16):
        if step >= JOINS_AT:
            now = [x - 0.125 * gradient for x, gradient in zip(now, gradients, strict=True)]
        if step in (11, 15):
            mean = sum(start) / len(start)
            now = [mean + (x - begin) for x, begin in zip(now, start, strict=True)]
        if step % 4 == 3:
            start = now
        rows.append(now)
    return [*rows, [sum(now) / len(now) for _ in now]]


@pytest.mark.parametrize(
    ("options", "compression", "gradients"),
    [
        pytest.param(CoCoD(), Compression.none, (1, 2, 3), marks=three, id="none"),
        pytest.param(CoCoD(), Compression.fp16, (1, 2, 3), marks=three, id="fp16"),
        pytest.param(
            CoCoD(within="node"), Compression.none, (1.5, 1.5, 3.5, 3.5), marks=four, id="nodes"
        ),
    ],
)
@pytest.mark.usefixtures("nodes")
def test_a_parameter_that_joins_is_averaged_from_the_next_round_on(
    options: CoCoD, compression: Any, gradients: tuple[float, ...]
) -> None:
    """All numbers here are float16's own, so that compression changes nothing."""
    want = np.array(equation_of_joining(gradients))[:, hvd.rank()]
    found = parameter_joins(options, compression)
    np.testing.assert_allclose(found, want, rtol=0, atol=TOLERANCE)


@three
@pytest.mark.parametrize(
    ("before", "after"),
    [(PULL, OUTER), (OUTER, PULL), (OUTER, {})],
    ids=["pull to outer", "outer to pull", "outer to none"],
)
def test_a_state_of_another_rule_leaves_nothing_behind(before: Any, after: Any) -> None:
    """An anchor was taken for an outer model, and its momentum for one of another sign."""
    model = make_model()
    optimizer = wrap(model, Case(CoCoD(2, **before)))
    train(model, optimizer, hvd.rank(), steps=9, drains={8})
    ends = []
    for state in (optimizer._hvd_pipe.state(), None):
        other = make_model()
        other.load_state_dict(model.state_dict())
        successor = wrap(other, Case(CoCoD(2, **after)))
        if state is not None:
            successor._hvd_pipe.load(state)
            assert set(successor._hvd_pipe.state().tensors) <= set(CoCoD(2, **after).kept)
        ends.append(train(other, successor, hvd.rank(), steps=8, drains={7}))
    np.testing.assert_array_equal(*ends)


@three
def test_fragments_are_those_of_the_same_parameters() -> None:
    """They were saved by place: in a new process, one that was unfrozen has another place.

    Two tensors are unfrozen, and a checkpoint taken; it is loaded after that, before it, and where
    all parameters have other names.
    """

    def build(frozen: int, prefix: str = "") -> tuple[nn.Module, Any]:
        model = make_model()
        for parameter in list(model.parameters())[:frozen]:
            parameter.requires_grad_(False)
        return model, hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.02),
            [(f"{prefix}{name}", parameter) for name, parameter in model.named_parameters()],
            strategy=CoCoD(4, fragments=2, **OUTER),
        )

    model, optimizer = build(2)
    train(model, optimizer, hvd.rank(), steps=5)
    model.requires_grad_(True)
    train(model, optimizer, hvd.rank(), steps=5)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    ends = []
    for frozen, prefix in ((0, ""), (2, ""), (0, "renamed.")):
        other, successor = build(frozen, prefix)
        other.load_state_dict(saved[0])
        successor.load_state_dict(saved[1])
        other.requires_grad_(True)
        ends.append(train(other, successor, hvd.rank(), steps=9, drains={8}))
    straight = train(model, optimizer, hvd.rank(), steps=9, drains={8})
    resumed, *near = ends
    np.testing.assert_allclose(resumed, straight, rtol=0, atol=TOLERANCE)
    assert np.abs(np.subtract(near, straight)[:, -1]).max() < 0.1
    first, *others = gather([end[-1] for end in near])
    for other in others:
        np.testing.assert_array_equal(other, first)


@three
def test_weights_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="CoCoD has 2 weights, and the process set has 3 ranks"):
        wrap(make_model(), Case(CoCoD(weights=(1, 2))), n=2)
    weights = (1, 2, 3) if hvd.rank() else (3, 2, 1)
    with pytest.raises(RanksDisagreeError, match=r"^ranks disagree on strategy") as caught:
        wrap(make_model(), Case(CoCoD(weights=weights)))
    assert "(3, 2, 1)" in str(caught.value)
    assert "(1, 2, 3)" in str(caught.value)


@three
def test_all_ranks_hear_of_a_step_that_fails() -> None:
    def step() -> None:
        if hvd.rank() == 1:
            raise OSError("no data")

    own = hvd.rank() == 1
    words = "^no data$" if own else "^the step failed on rank 1"
    with pytest.raises(OSError if own else RuntimeError, match=words):
        worker_speeds(step, seconds=0.0)


# Nodes of two ranks, where ranks differ ---------------------------------------------------------

OVERFLOWS = (5, 6, 9)


@four
@pytest.mark.usefixtures("nodes")
def test_an_overflow_on_one_rank_is_one_on_its_node() -> None:
    """Gradients are averages of a node: its ranks leave their local step out, and no others."""
    model = make_model(torch.float32)
    optimizer = wrap(model, Case(CoCoD(fragments=2, within="node"), dtype=torch.float32))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    scales = []
    for step in range(12):
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), step)
        if hvd.rank() == hvd.size() - 1 and step in OVERFLOWS:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(float(scaler.get_scale()))
    optimizer.synchronize()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    halved = 1024.0 / 2 ** len(OVERFLOWS)
    assert [each[-1] for each in gather(scales)] == [1024.0, 1024.0, halved, halved]
    assert len({str(each) for each in gather([p.tolist() for p in model.parameters()])}) == 1


@four
@pytest.mark.usefixtures("nodes")
def test_join_does_not_go_with_process_sets() -> None:
    model = make_model()
    optimizer = wrap(model, Case(CoCoD(within="node")))
    train(model, optimizer, hvd.rank(), steps=3, drains={2})
    with pytest.raises(HvdPipeError, match=r"^hvd\.join\(\) does not go with within='node'"):
        hvd.join()


@four
@pytest.mark.usefixtures("nodes")
def test_a_state_of_another_number_of_fragments() -> None:
    """What travels is dropped, but nothing is mixed: replicas end equal, and near the others.

    States are taken in the middle of a turn, and models in more and in fewer fragments go on.
    """
    ends = []
    for saved, fragments in ((4, 4), (4, 2), (4, 1), (2, 4)):
        model = make_model()
        optimizer = wrap(model, Case(CoCoD(8, fragments=saved, **OUTER)))
        train(model, optimizer, hvd.rank(), steps=11)
        state = optimizer._hvd_pipe.state()
        other = make_model()
        other.load_state_dict(model.state_dict())
        successor = wrap(other, Case(CoCoD(8, fragments=fragments, **OUTER)))
        successor._hvd_pipe.load(state)
        parts = {part.fragment for part in successor._hvd_pipe._parts}
        assert parts == set(range(fragments))
        ends.append(train(other, successor, hvd.rank(), steps=24, drains={23})[-1])
    assert np.isfinite(ends).all()
    assert np.abs(np.subtract(ends, ends[0])).max() < 0.1
    for theirs in gather(ends):
        np.testing.assert_array_equal(theirs, ends)


@two
def test_horovod_must_allow_process_sets_that_come_later() -> None:
    with pytest.raises(
        HvdPipeError, match=r'^within="node" needs a Horovod process set'
    ) as caught:
        wrap(make_model(), Case(CoCoD(within="node")))
    assert 'hvd.init(process_sets="dynamic")' in str(caught.value)


@three
def test_nodes_are_not_those_of_a_process_set() -> None:
    model, process_set = make_model(), first_two()
    if process_set.included():
        with pytest.raises(ValueError, match="within='node' makes process sets of its own"):
            hvd.DistributedOptimizer(
                OPTIMIZERS["momentum"](model),
                model.named_parameters(),
                process_set=process_set,
                strategy=CoCoD(within="node"),
            )
