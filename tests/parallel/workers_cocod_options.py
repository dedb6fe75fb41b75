"""CoCoD's options, case by case: test_cocod_options.py has the equations."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from cases import Raised, run_cases
from problem import OPTIMIZERS as COMMON
from problem import STEPS, Weights, loss_of, make_model, train
from torch import nn
from torch.optim import Adam, Optimizer

import hvd_pipe.torch as hvd
from hvd_pipe.strategy import CoCoD
from hvd_pipe.torch.agree import (
    agree_on_clock,
    check_alike,
    found_by_first,
    from_first,
    gather,
    largest,
)
from hvd_pipe.torch.compression import Compression, Int8
from hvd_pipe.torch.measuring import probes
from hvd_pipe.torch.measuring.probes import worker_speeds
from hvd_pipe.torch.strategies.settings import State


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

_WEIGHTS = (3.0, 1.0, 2.5, 1.5)
_PULL = {"pull_back": 0.6, "anchor_momentum": 0.7}
_OUTER = {"outer": "nesterov", "outer_lr": 0.3, "outer_momentum": 0.6}

EXACT = [
    Case(CoCoD(weights=_WEIGHTS)),
    Case(CoCoD(weights=_WEIGHTS), "adam", drains=(13, 14)),
    Case(CoCoD(3, 4, weights=_WEIGHTS)),
    Case(CoCoD(3, 4, weights=_WEIGHTS), "adam", drains=(2, 13)),
    Case(CoCoD(momentum="average")),
    Case(CoCoD(momentum="average"), "adam"),
    Case(CoCoD(momentum="average"), "hasty adam", drains=(13, 14)),
    Case(CoCoD(3, 4, momentum="average", weights=_WEIGHTS), "adam", drains=(2, 13)),
    Case(CoCoD(pull_back=0.6)),
    Case(CoCoD(pull_back=0.6), "adam", drains=(13, 14)),
    Case(CoCoD(**_PULL)),
    Case(CoCoD(2, 5, **_PULL), "adam", drains=(2, 13)),
    Case(CoCoD(momentum="average", weights=_WEIGHTS, **_PULL), "momentum", drains=(13,)),
    Case(CoCoD(**_OUTER)),
    Case(CoCoD(2, 5, **_OUTER), "adam", drains=(2, 13, 14)),
    Case(CoCoD(momentum="average", weights=_WEIGHTS, **_OUTER), "adam", drains=(13,)),
    Case(CoCoD(fragments=2)),
    Case(CoCoD(6, 4, fragments=3), "adam", drains=(2, 13, 14)),
    Case(CoCoD(fragments=4, weights=_WEIGHTS), "adam", drains=(13,)),
    Case(CoCoD(fragments=2, **_PULL), "adam", drains=(15,)),
    Case(CoCoD(4, 3, fragments=4, **_OUTER), drains=(12,)),
]
WITHIN = [
    Case(CoCoD(within="node")),
    Case(CoCoD(3, 4, within="node", weights=_WEIGHTS), "adam", drains=(13,)),
    Case(CoCoD(fragments=4, within="node", **_OUTER), "adam", drains=(2, 14)),
    Case(CoCoD(2, within="node", momentum="average"), drains=(7,)),
]
COMPRESSED = [
    Case(CoCoD(), compression="fp16", drains=(13,)),
    Case(CoCoD(3, 4), "adam", compression="fp16"),
    Case(CoCoD(weights=_WEIGHTS), compression="fp16"),
    Case(CoCoD(momentum="average", **_PULL), "adam", compression="fp16"),
    Case(CoCoD(2, **_OUTER), compression="fp16", drains=(13,)),
    Case(CoCoD(fragments=4), compression="fp16", drains=(14,)),
]
CODED = [
    Case(CoCoD(), compression="bf16", drains=(13,)),
    Case(CoCoD(), compression="int8"),
    Case(CoCoD(weights=_WEIGHTS), compression="int8 with feedback", drains=(13,)),
    Case(CoCoD(fragments=2), compression="int8 with feedback", drains=(13,)),
]
HALF = [
    Case(CoCoD(), dtype=torch.float16),
    Case(CoCoD(weights=_WEIGHTS, momentum="average"), dtype=torch.float16),
    Case(CoCoD(pull_back=0.6), dtype=torch.float16),
    Case(CoCoD(), dtype=torch.bfloat16),
]


def _name_node() -> None:
    """Be on a node of two ranks, as launchers say it."""
    os.environ["HOROVOD_HOSTNAME"] = f"node-{hvd.rank() // PER_NODE}"


def run(n: int) -> dict[Case, Weights | Raised]:
    hvd.init()
    cases = [*EXACT, *COMPRESSED, *CODED, *HALF]
    return run_cases({case: partial(trajectory, case, n) for case in cases})


def run_within(n: int) -> dict[Case, Weights | Raised]:
    hvd.init(process_sets="dynamic")
    _name_node()
    return run_cases({case: partial(trajectory, case, n) for case in WITHIN})


def wrap(model: nn.Module, case: Case, n: int, plain: Optimizer | None = None) -> Any:
    return hvd.DistributedOptimizer(
        plain or OPTIMIZERS[case.optimizer](model),
        model.named_parameters(),
        compression=COMPRESSIONS[case.compression],
        strategy=case.strategy(n),
    )


def trajectory(case: Case, n: int) -> Weights:
    """As `problem.train` does it, also for a dtype that numpy lacks."""
    model = make_model(case.dtype)
    optimizer, records = wrap(model, case, n), []

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


# Going on from a state ---------------------------------------------------------------------------

MORE = 6
RESUMED = [
    *EXACT,
    Case(CoCoD(3, 4), "adam", compression="fp16"),
    Case(CoCoD(momentum="average", weights=_WEIGHTS, **_PULL), "adam", compression="fp16"),
    Case(CoCoD(2, weights=_WEIGHTS), compression="int8 with feedback", drains=(5,)),
    Case(CoCoD(3, 4), compression="int8 with feedback", drains=(1,)),
    Case(CoCoD(fragments=2), compression="int8 with feedback", drains=(5,)),
]
MOMENTS = (2, 4, 7, 8, 14)
"""Steps after which a state is taken: in warm-up, in a round, at its end, after a drain."""

PER_NODE = 2
"""Ranks of a node, of which the last may have fewer."""


class Resumed(NamedTuple):
    """The weights after each of ``MORE`` steps, in four ways that must be one."""

    straight: Weights
    saved: Weights
    saved_on_rank_0: Weights
    resumed: Weights


def run_resumed(n: int) -> dict[tuple[Case, int], Resumed | Raised]:
    hvd.init()
    return run_cases(
        {
            (case, moment): partial(resumed, case, moment, n)
            for case in RESUMED
            for moment in MOMENTS
        }
    )


def run_resumed_within(n: int) -> dict[tuple[Case, int], Resumed | Raised]:
    hvd.init(process_sets="dynamic")
    _name_node()
    return run_cases(
        {
            (case, moment): partial(resumed, case, moment, n)
            for case in WITHIN[1:3]
            for moment in MOMENTS[1:4]
        }
    )


def resumed(case: Case, moment: int, n: int) -> Resumed:
    straight, _, _, _ = _go(case, moment, n, save=False)
    saved, weights, momenta, state = _go(case, moment, n, save=True)
    on_rank_0, _, _, _ = _go(case, moment, n, save=hvd.rank() == 0)
    model = make_model()
    model.load_state_dict(weights)
    plain = OPTIMIZERS[case.optimizer](model)
    plain.load_state_dict(momenta)
    optimizer = wrap(model, case, n, plain)
    assert state is not None
    optimizer._hvd_pipe.load(state)
    return Resumed(straight, saved, on_rank_0, _steps(model, optimizer, case, moment, MORE))


def _go(case: Case, moment: int, n: int, save: bool) -> tuple[Weights, Any, Any, State | None]:
    model = make_model()
    plain = OPTIMIZERS[case.optimizer](model)
    optimizer = wrap(model, case, n, plain)
    _steps(model, optimizer, case, 0, moment)
    state = optimizer._hvd_pipe.state() if save else None
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    momenta = torch.optim.Optimizer.state_dict(plain)
    momenta = {
        **momenta,
        "state": {
            i: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in own.items()}
            for i, own in momenta["state"].items()
        },
    }
    return _steps(model, optimizer, case, moment, MORE), weights, momenta, state


def _steps(model: nn.Module, optimizer: Any, case: Case, first: int, count: int) -> Weights:
    def later(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return loss_of(model, rank, first + step)

    drains = {drain - first for drain in case.drains}
    return train(model, optimizer, hvd.rank(), loss=later, steps=count, drains=drains)


# Ranks that leave, or lack something -------------------------------------------------------------

LEAVES_AFTER = 6


TWO = hvd.ProcessSet([0, 1])


def run_others() -> dict[str, Any]:
    hvd.init(process_sets=[TWO])
    return run_cases(
        {
            "a rank leaves": a_rank_leaves,
            "two of three": two_of_three,
            "a parameter comes to life on one rank": a_parameter_comes_to_life,
            "a parameter joins": partial(a_parameter_joins, Compression.none, CoCoD()),
            "a parameter joins, fp16": partial(a_parameter_joins, Compression.fp16, CoCoD()),
            "other rules": other_rules,
            "unfrozen before": unfrozen_before,
            "wrong number of weights": wrong_number_of_weights,
            "unequal weights": unequal_weights,
            "speeds": speeds,
            "a step fails": a_step_fails,
        }
    )


def a_rank_leaves() -> Weights:
    """The last rank has fewer batches than the others."""
    model = make_model()
    optimizer = wrap(model, Case(CoCoD(weights=_WEIGHTS)), hvd.size())
    last = hvd.rank() == hvd.size() - 1
    records = train(model, optimizer, hvd.rank(), steps=LEAVES_AFTER if last else 14)
    hvd.join()
    return records


def two_of_three() -> Weights:
    """The third rank is no member of the process set and trains alone."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model),
        model.named_parameters(),
        process_set=TWO,
        strategy=CoCoD(3, 4, weights=(3.0, 1.0), momentum="average"),
    )
    return train(model, optimizer, hvd.rank(), drains={13, STEPS - 1})


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.b = nn.Parameter(torch.ones(2, dtype=torch.float64))


def a_parameter_comes_to_life() -> list[tuple[float, npt.NDArray[np.float64]] | None]:
    """On rank 1, b has gradients from step 5 on: its gradient and its momentum, step by step."""
    model = TwoParts()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = CoCoD(period=2, momentum="average")
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), strategy=options)
    records: list[tuple[float, npt.NDArray[np.float64]] | None] = []
    for step in range(16):
        optimizer.zero_grad()
        loss = (model.a * (step + hvd.rank())).sum()
        if hvd.rank() == 1 and step >= 5:
            loss = loss + float(step) * model.b.sum()
        loss.backward()
        optimizer.step()
        momentum = optimizer.state[model.b].get("momentum_buffer")
        records.append(None if momentum is None else (float(step), momentum.numpy().copy()))
    optimizer.synchronize()
    return records


JOINS_AT = 5


def a_parameter_joins(compression: Any, strategy: CoCoD) -> list[float]:
    """In the middle of the second round of four steps, b is unfrozen: its value after each step.

    Its gradient is 1 on rank 0, 2 on rank 1 and so on, and the learning rate 0.125.
    """
    model = TwoParts()
    model.b.requires_grad_(False)
    plain = torch.optim.SGD(model.parameters(), lr=0.125)
    named = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(plain, named, compression=compression, strategy=strategy)
    records = []
    for step in range(16):
        model.b.requires_grad_(step >= JOINS_AT)
        optimizer.zero_grad()
        ((model.a.sum() + model.b.sum()) * (hvd.rank() + 1)).backward()
        optimizer.step()
        records.append(float(model.b[0].detach()))
    optimizer.synchronize()
    return [*records, float(model.b[0].detach())]


def other_rules() -> list[tuple[Weights, Weights]]:
    """Train on under one rule, with the state of another one and with none."""
    found = []
    for before, after in ((_PULL, _OUTER), (_OUTER, _PULL), (_OUTER, {})):
        model = make_model()
        optimizer = wrap(model, Case(CoCoD(2, **before)), 3)
        train(model, optimizer, hvd.rank(), steps=9, drains={8})
        ends = []
        for state in (optimizer._hvd_pipe.state(), None):
            other = make_model()
            other.load_state_dict(model.state_dict())
            successor = wrap(other, Case(CoCoD(2, **after)), 3)
            if state is not None:
                successor._hvd_pipe.load(state)
                assert set(successor._hvd_pipe.state().tensors) <= set(CoCoD(2, **after).kept)
            ends.append(train(other, successor, hvd.rank(), steps=8, drains={7}))
        found.append((ends[0], ends[1]))
    return found


def unfrozen_before() -> list[Weights]:
    """Two tensors are unfrozen, and a checkpoint taken; it is loaded before and after that.

    And once where all parameters have other names.
    """

    def built(frozen: int, prefix: str = "") -> tuple[nn.Module, Any]:
        model = make_model()
        for parameter in list(model.parameters())[:frozen]:
            parameter.requires_grad_(False)
        return model, hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.02),
            [(f"{prefix}{name}", parameter) for name, parameter in model.named_parameters()],
            strategy=CoCoD(4, fragments=2, **_OUTER),
        )

    model, optimizer = built(2)
    train(model, optimizer, hvd.rank(), steps=5, drains=set())
    model.requires_grad_(True)
    train(model, optimizer, hvd.rank(), steps=5, drains=set())
    found = []
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for frozen, prefix in ((0, ""), (2, ""), (0, "renamed.")):
        other, successor = built(frozen, prefix)
        other.load_state_dict(saved[0])
        successor.load_state_dict(saved[1])
        other.requires_grad_(True)
        found.append(train(other, successor, hvd.rank(), steps=9, drains={8}))
    return [train(model, optimizer, hvd.rank(), steps=9, drains={8}), *found]


def _error(job: Callable[[], Any]) -> str:
    try:
        job()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def wrong_number_of_weights() -> str:
    model = make_model()
    return _error(lambda: wrap(model, Case(CoCoD(weights=(1, 2))), 2))


def unequal_weights() -> str:
    model = make_model()
    weights = (1, 2, 3) if hvd.rank() else (3, 2, 1)
    return _error(lambda: wrap(model, Case(CoCoD(weights=weights)), 3))


def speeds() -> list[float]:
    now = 0.0

    def step() -> None:
        nonlocal now
        now += 0.1 * (hvd.rank() + 1) if now else 0.5

    with mock.patch.object(probes, "time", mock.Mock(perf_counter=lambda: now)):
        return worker_speeds(step, seconds=0.0)


def a_step_fails() -> str:
    def step() -> None:
        if hvd.rank() == 1:
            raise OSError("no data")

    return _error(lambda: worker_speeds(step, seconds=0.0))


# Nodes of two ranks, where ranks differ ---------------------------------------------------------

OVERFLOWS = (5, 6, 9)


def run_nodes() -> dict[str, Any]:
    hvd.init(process_sets="dynamic")
    _name_node()
    return run_cases(
        {
            "overflow": overflow_on_one_rank,
            "join": join_is_refused,
            "a parameter joins": partial(
                a_parameter_joins, Compression.none, CoCoD(within="node")
            ),
            "another number of fragments": another_number_of_fragments,
            "bytes": bytes_on_the_wire,
        }
    )


def overflow_on_one_rank() -> list[float]:
    """The loss scale after each step; the last rank's gradients overflow in some."""
    model = make_model(torch.float32)
    optimizer = wrap(model, Case(CoCoD(fragments=2, within="node"), dtype=torch.float32), 4)
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
    return scales


def join_is_refused() -> str:
    model = make_model()
    optimizer = wrap(model, Case(CoCoD(within="node")), 4)
    train(model, optimizer, hvd.rank(), steps=3, drains={2})
    found = _error(hvd.join)
    del optimizer
    return found


def another_number_of_fragments() -> list[Weights]:
    """States in the middle of a turn, that models in more and in fewer fragments take over."""
    found = []
    for saved, fragments in ((4, 4), (4, 2), (4, 1), (2, 4)):
        model = make_model()
        plain = OPTIMIZERS["momentum"](model)
        optimizer = wrap(model, Case(CoCoD(8, fragments=saved, **_OUTER)), 4, plain)
        train(model, optimizer, hvd.rank(), steps=11, drains=set())
        state = optimizer._hvd_pipe.state()
        other = make_model()
        other.load_state_dict(model.state_dict())
        successor = wrap(other, Case(CoCoD(8, fragments=fragments, **_OUTER)), 4)
        successor._hvd_pipe.load(state)
        parts = {part.fragment for part in successor._hvd_pipe._parts}
        assert parts == set(range(fragments))
        found.append(train(other, successor, hvd.rank(), steps=24, drains={23}))
    return found


def bytes_on_the_wire() -> tuple[float, float]:
    """What 8 steps count, with the gradients of a node and without."""
    found = []
    for options in (CoCoD(within="node"), CoCoD()):
        model = make_model()
        optimizer = wrap(model, Case(options), 4)
        train(model, optimizer, hvd.rank(), steps=8, drains=set())
        found.append(optimizer.sent_bytes)
    return found[0], found[1]


def shut_down_on_one_rank() -> list[str]:
    """The only rank of a node leaves, and those of the other node train on: what they hear.

    In training, and where they agree on something, as a new plan, afterwards.
    """
    hvd.init(process_sets="dynamic")
    node = hvd.add_process_set([0, 1])
    _name_node()
    model = make_model()
    optimizer = wrap(model, Case(CoCoD(1000, within="node")), 3)
    if hvd.rank() == 2:
        hvd.shutdown()
        return []
    return [
        _error(lambda: train(model, optimizer, hvd.rank(), steps=100_000, drains=set())),
        *(_error(partial(ask, "a plan", "of this test", node)) for ask in (gather, from_first)),
        _error(lambda: found_by_first(lambda: "a plan", "of this test", node)),
        _error(lambda: check_alike([("plan", "a")], "of this test", node)),
        _error(lambda: largest([1.0], "of this test", node)),
        _error(lambda: agree_on_clock(node)),
    ]


def static_sets() -> tuple[str, str]:
    """Horovod was not told that process sets come later; and a set of the user's own."""
    hvd.init(process_sets=[TWO])
    refused = _error(lambda: wrap(make_model(), Case(CoCoD(within="node")), 3))
    model = make_model()
    other = _error(
        lambda: hvd.DistributedOptimizer(
            OPTIMIZERS["momentum"](model),
            model.named_parameters(),
            process_set=TWO,
            strategy=CoCoD(within="node"),
        )
    )
    hvd.barrier()  # who leaves first ends Horovod for all
    return refused, other


def synchronize_alone(rank: int) -> None:
    """One rank, or both of one node, call ``synchronize()`` where the others train on."""
    hvd.init(process_sets="dynamic")
    _name_node()
    model = make_model()
    optimizer = wrap(model, Case(CoCoD(within="node")), 4)

    def loss(model: nn.Module, mine: int, step: int) -> torch.Tensor:
        if step == 6 and (mine == rank or (rank < 0 and mine < PER_NODE)):
            optimizer.synchronize()
        return loss_of(model, mine, step)

    train(model, optimizer, hvd.rank(), loss=loss)
