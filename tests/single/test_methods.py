"""Methods: written and read back, refused with what there is, and what they ask of a worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from planning_cases import methods

from hvd_pipe.planning.comm import CODECS
from hvd_pipe.planning.methods import (
    HorovodFusion,
    LocalSGD,
    Method,
    WidePipeSGD,
    label,
    memory_bytes,
    parse,
    spell,
    stable_rate,
)
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.strategy import CoCoD, MergedGradient, PipeSGD
from hvd_pipe.strategy import parse as parse_strategy


@given(methods())
def test_what_is_written_is_read_back(method: Method) -> None:
    assert parse(label(method)) == method
    assert parse(spell(method)) == method
    assert parse(method) is method
    if isinstance(method, MergedGradient | PipeSGD | CoCoD):
        assert parse_strategy(spell(method)) == method


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("merged-gradient", MergedGradient()),
        (" WFBP ", MergedGradient(plan="wfbp")),
        ("single:", MergedGradient(plan="single")),
        ("pipe-sgd:prediction=local", PipeSGD(prediction="local")),
        ("cocod:period=8,weights=3/0.5", CoCoD(period=8, weights=(3, 0.5))),
        ("horovod", HorovodFusion(128 * 2**20, 1e-3)),
        ("horovod: threshold = 64MB , cycle = 2ms", HorovodFusion(64_000_000, 2e-3)),
        ("local_sgd:period=3", LocalSGD(3)),
        ("wide-pipe-sgd:width=4,bucket_bytes=1MiB", WidePipeSGD(4, 2**20)),
    ],
)
def test_parse(text: str, method: Method) -> None:
    assert parse(text) == method


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", ValueError, r"unknown method: use one of 'merged-gradient', 'pipe-sgd', 'cocod'"),
        ("auto", ValueError, r"unknown method"),
        ("horovood", ValueError, r"unknown method \(did you mean 'horovod'\?\)"),
        ("wfbp:period=2", ValueError, r"takes no options: write 'merged-gradient:plan=wfbp'"),
        ("horovod:size=1MB", ValueError, r"OPTION one of threshold, cycle"),
        ("horovod:threshold", ValueError, r"'threshold' has no value: write OPTION=VALUE"),
        ("horovod:cycle=1ms,cycle=2ms", ValueError, r"once each"),
        ("horovod:threshold=64 lightyears", ValueError, r"threshold_bytes: .*lightyears"),
        ("horovod:cycle=5", ValueError, r"cycle_s: "),
        ("conventional:period=2", ValueError, r"OPTION one of \(it has none\)"),
        ("local-sgd:period=0", ValueError, r"LocalSGD: period must be >= 1, got 0"),
        ("local-sgd:period=two", ValueError, r"period: .*two"),
        ("wide-pipe-sgd:width=0", ValueError, r"width must be >= 1, got 0"),
        ("wide-pipe-sgd:width=3000", ValueError, r"width must be <= 64, got 3000: gradients that"),
        (3, TypeError, r"a method is a string such as 'pipe-sgd', got 3"),
    ],
)
def test_bad_text(text: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: LocalSGD(True), TypeError),
        (lambda: HorovodFusion(threshold_bytes=1.5), TypeError),  # type: ignore[arg-type]
        (lambda: HorovodFusion(cycle_s="1ms"), TypeError),  # type: ignore[arg-type]
        (lambda: HorovodFusion(cycle_s=float("nan")), ValueError),
        (lambda: WidePipeSGD(bucket_bytes=0), ValueError),
    ],
)
def test_bad_values(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


MODEL = ModelProfile((LayerProfile("fc", 1000, 1.0),))


@pytest.mark.parametrize(
    ("method", "codec", "copies"),
    [  # besides weights and momentum
        ("merged-gradient", "int8", 1),
        ("conventional", "none", 1),
        ("horovod:threshold=5000", "none", 6),
        ("pipe-sgd", "none", 2),
        ("pipe-sgd:prediction=previous", "none", 3),
        ("pipe-sgd:prediction=local", "none", 5),
        ("wide-pipe-sgd:width=4", "none", 4),
        ("local-sgd", "none", 2),
        ("cocod", "none", 3),
        ("cocod", "bf16", 4),
        ("cocod:momentum=average", "none", 5),
        ("cocod:pull_back=0.6", "none", 2),
        ("cocod:pull_back=0.6,anchor_momentum=0.7", "none", 4),
        ("cocod:outer=nesterov", "none", 5),
        ("cocod:fragments=2", "none", 3),
    ],
)
def test_memory(method: str, codec: str, copies: int) -> None:
    assert memory_bytes(parse(method), MODEL, CODECS[codec]) == (2 + copies) * 1000
    adam = memory_bytes(parse(method), MODEL, CODECS[codec], optimizer_ratio=2.0)
    assert adam == (3 + copies + 2 * ("average" in method)) * 1000


@pytest.mark.parametrize(
    ("momentum", "synchronous", "none", "previous", "local"),
    [(0, 2, 1, 0.618, 1), (0.5, 3, 0.5, 0.522, 1), (0.9, 3.8, 0.1, 0.5, 1)],
)
def test_stability_is_what_was_measured(
    momentum: float, synchronous: float, none: float, previous: float, local: float
) -> None:
    """The table of docs/pipe-sgd.md; tests/parallel/test_prediction.py has real ranks."""
    assert stable_rate(MergedGradient(), momentum) == pytest.approx(synchronous)
    assert stable_rate(LocalSGD(), momentum) == pytest.approx(synchronous)
    assert stable_rate(PipeSGD(), momentum) == pytest.approx(none)
    assert stable_rate(PipeSGD(prediction="local"), momentum) == local
    found = stable_rate(PipeSGD(prediction="previous"), momentum)
    assert found == pytest.approx(previous, abs=5e-4)


def replicas_of_cocod(method: CoCoD, rate: float, momentum: float) -> float:
    """The size of three replicas after many rounds of the rule of docs/cocod.md."""
    weights, velocity, rounds = np.array([1.0, -2.0, 1.5]), np.zeros(3), 1500
    anchors = np.array([[weights.mean(), 0.0], [0.0, 0.0]])  # of weights and velocity: z, v
    for _ in range(rounds):
        start = weights, velocity
        for _ in range(method.period // method.fragments):
            velocity = momentum * velocity + weights
            weights = weights - rate * velocity
        moved = []
        for place, (before, end) in enumerate(zip(start, (weights, velocity), strict=True)):
            if place and method.momentum == "local":
                moved.append(end)
            elif method.outer != "none" and place == 0:
                anchor, change = anchors[0], anchors[0][0] - before.mean()
                anchor[1] = method.outer_momentum * anchor[1] + change
                anchor[0] -= method.outer_lr * (change + method.outer_momentum * anchor[1])
                moved.append(anchor[0] + end - before)
            elif method.pull_back is None:
                moved.append(before.mean() + end - before)
            else:
                anchor = anchors[place]
                anchor[1] = method.anchor_momentum * anchor[1] + before.mean() - anchor[0]
                anchor[0] += anchor[1]
                moved.append(end - method.pull_back * (end - anchor[0]))
        weights, velocity = moved
        for _ in range(method.period - method.period // method.fragments):
            velocity = momentum * velocity + weights
            weights = weights - rate * velocity
        if not abs(weights).max() < 1e9:
            return float("inf")
    return float(abs(weights).max())


OUTER = [
    CoCoD(period=period, momentum=average, outer="nesterov", outer_lr=lr, outer_momentum=mu)
    for period in (1, 2, 4, 8)
    for average in ("local", "average")
    for lr, mu in ((1.0, 0.0), (0.7, 0.9), (0.2, 0.9), (0.7, 0.5))
]
FRAGMENTS = [
    CoCoD(period=period, fragments=count, **rest)
    for period, count in ((2, 2), (4, 2), (8, 4), (8, 8))
    for rest in (
        {},
        {"outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.5},
        {"pull_back": 0.6, "anchor_momentum": 0.7},
    )
]
COCODS = (
    OUTER
    + FRAGMENTS
    + [
        CoCoD(period=period, momentum=average, pull_back=alpha, anchor_momentum=beta)
        for period in (1, 2, 3, 4, 8)
        for average in ("local", "average")
        for alpha, beta in ((None, 0.0), (0.6, 0.0), (0.6, 0.7))
    ]
)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("method", COCODS, ids=label)
def test_replicas_of_cocod_stay_together_below_the_limit(method: CoCoD, momentum: float) -> None:
    """Its mean bears what synchronous SGD does; with momentum its replicas bear far less."""
    limit = stable_rate(method, momentum)
    assert replicas_of_cocod(method, 0.97 * limit, momentum) < 10
    if method.pull_back is None and limit > 1.01:  # else it grows by less than a permille a round
        assert replicas_of_cocod(method, 1.05 * limit, momentum) > 1e3


def test_limits_of_cocod() -> None:
    assert stable_rate(CoCoD(period=1)) == pytest.approx(1.0)  # pipe-sgd:prediction=local
    found = [stable_rate(CoCoD(period=k), 0.9) for k in (1, 2, 4, 8)]
    assert found == pytest.approx([1.9, 0.909, 0.278, 0.082], abs=6e-4)
    found = [stable_rate(CoCoD(period=k, momentum="average"), 0.9) for k in (1, 2, 4, 8)]
    assert found == pytest.approx([1.0, 0.284, 0.081, 0.025], abs=6e-4)


def test_fragments_bear_more() -> None:
    """The table of docs/cocod.md."""
    found = [
        [stable_rate(CoCoD(period=k, fragments=k), mu) for k in (2, 4, 8)] for mu in (0.5, 0.9)
    ]
    assert found[0] == pytest.approx([2.32, 2.74, 2.90], abs=6e-3)
    assert found[1] == pytest.approx([1.01, 1.42, 2.33], abs=6e-3)
    assert stable_rate(CoCoD(period=32, fragments=8), 0.9) > 400 * stable_rate(CoCoD(32), 0.9)
    outer = [stable_rate(CoCoD(8, fragments=p, outer="nesterov"), 0.9) for p in (1, 2, 4, 8)]
    assert outer == pytest.approx([0.0025, 0.080, 0.972, 2.028], abs=6e-4)


def coupled_radius(method: CoCoD, rate: float, momentum: float, hessian: Any) -> float:
    """Of a period, on what a replica of many weights differs by; weight i is of fragment i % P."""
    size = len(hessian)
    eye, fragment_of = np.eye(size), np.arange(size) % method.fragments
    step = np.block([[eye - rate * hessian, -momentum * eye], [rate * hessian, momentum * eye]])
    turn, whole = np.linalg.matrix_power(step, method.turn), np.eye(2 * size)
    for fragment in range(method.fragments):
        sent = np.concatenate([fragment_of == fragment, np.zeros(size, bool)])
        whole = (turn - np.diag(sent)) @ whole
    return float(np.abs(np.linalg.eigvals(whole)).max())


@pytest.mark.parametrize(
    ("period", "fragments", "momentum", "lowest"),
    [(4, 4, 0.5, 0.92), (8, 4, 0.9, 0.95)],
)
def test_curvature_that_couples_fragments_can_lower_their_limit_a_little(
    period: int, fragments: int, momentum: float, lowest: float
) -> None:
    """The limit is one weight's, whose fragment is alone; docs/cocod.md says how far it holds."""
    method = CoCoD(period=period, fragments=fragments)
    limit, random = stable_rate(method, momentum), np.random.default_rng(1)
    lowest_seen = 2.0
    for _ in range(30):
        factor = random.standard_normal((2 * fragments, 1 + random.integers(2 * fragments)))
        hessian = factor @ factor.T / np.linalg.norm(factor, 2) ** 2  # its largest eigenvalue is 1
        shares = np.arange(0.6, lowest_seen, 0.02)
        radii = (coupled_radius(method, share * limit, momentum, hessian) for share in shares)
        found = (share for share, r in zip(shares, radii, strict=True) if r > 1 + 1e-9)
        lowest_seen = min(lowest_seen, next(found, 2.0))
    assert 0.85 < lowest_seen <= lowest


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_bad_momentum(momentum: float) -> None:
    with pytest.raises(ValueError, match=r"from 0 to below 1"):
        stable_rate(PipeSGD(), momentum)
