"""Checkpoints: a run that is resumed goes on as if it had never stopped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import workers_resume as jobs
from cases import of_case
from problem import loss_of, make_model
from ranks import once, run_ranks
from serial import PipeSGD, make_workers
from workers_resume import (
    CASES,
    DRAINED,
    LED,
    MOVED,
    ON_RANK_0,
    OPTIMIZERS,
    STRATEGIES,
    Array,
    Case,
    loaded,
    runs_on,
)

TOLERANCE = 1e-12

results = once(lambda n: run_ranks(n, jobs.run, n))


@once
def moved(n: int) -> list[dict[str, list[Array]]]:
    """What became on n ranks of what two ranks have saved."""
    files = {str(case): of_case(results(2), f"to move: {case}")[0] for case in MOVED}
    return run_ranks(n, jobs.run_moved, files)  # type: ignore[return-value]


def continued(
    content: bytes, case: Case, n: int, *, in_flight: bool = True
) -> Sequence[list[Array]]:
    """The rows of n workers in one process that go on from a checkpoint.

    Args:
        content: The checkpoint, which all of them load.
        case: Under which strategy, and with which optimizer.
        n: How many workers.
        in_flight: Whether they take what Pipe-SGD has in flight, too.
    """
    checkpoint = loaded(content)
    workers = make_workers(case.strategy, n, make_model, OPTIMIZERS[case.optimizer])
    for model, optimizer in zip(workers.models, workers.optimizers, strict=True):
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(loaded(content)["optimizer"])  # which keeps its tensors
    saved = checkpoint["optimizer"].get("hvd_pipe") if in_flight else None
    if saved is not None and isinstance(workers, PipeSGD):
        # Tensors are numbered as in param_groups.
        groups = workers.optimizers[0].param_groups
        number = {id(p): i for i, p in enumerate(p for group in groups for p in group["params"])}
        numbers = [number[id(p)] for p in workers.models[0].parameters()]
        tensors = saved["tensors"]
        if "pending" in tensors:
            workers._pending = [tensors["pending"][i] for i in numbers]
        if "weights" in tensors:
            workers._true = [[tensors["weights"][i] for i in numbers] for _ in range(n)]
        workers._steps = case.saved
    for number in range(case.saved, case.steps):
        workers.backward(loss_of, number)
        workers.step()
        workers.record()
    workers.synchronize()
    workers.record()
    return list(workers.trajectory)


# nightly: three ranks repeat what two show, where sums have another order.
NUMBERS = [2, pytest.param(3, marks=pytest.mark.nightly)]


def on_ranks(cases: Sequence[Case]) -> list[Any]:
    return [
        pytest.param(case, n, marks=[pytest.mark.nightly] * (n > 2), id=f"{case}-{n}")
        for n in (2, 3)
        for case in cases
        if runs_on(case, n)
    ]


def assert_close(actual: Sequence[Sequence[Array]], expected: Sequence[Sequence[Array]]) -> None:
    for mine, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.array(mine), np.array(wanted), rtol=0, atol=TOLERANCE)


def assert_equal(resumed: Sequence[Array], whole: Sequence[Array]) -> None:
    """Bit for bit."""
    assert len(resumed) == len(whole)
    wrong = [
        place
        for place, (one, other) in enumerate(zip(resumed, whole, strict=True))
        if not np.array_equal(one, other)
    ]
    assert not wrong, f"rows {wrong} of {len(whole)} differ"


@pytest.mark.parametrize(("case", "n"), on_ranks(CASES))
def test_each_rank_goes_on_from_its_own_file(case: Case, n: int) -> None:
    for whole, resumed, _ in of_case(results(n), f"own file: {case}"):
        assert_equal(resumed, whole)


@pytest.mark.parametrize(("case", "n"), on_ranks(CASES))
def test_a_rank_may_save_alone(case: Case, n: int) -> None:
    for whole, _, disturbed in of_case(results(n), f"own file: {case}"):
        assert_equal(disturbed, whole)


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize(("case", "n"), on_ranks([*ON_RANK_0, *DRAINED[:-1]]))
def test_all_ranks_go_on_from_what_rank_0_has_loaded(case: Case, before: int, n: int) -> None:
    for whole, resumed, _ in of_case(results(n), f"{before} before: {case}"):
        assert_equal(resumed, whole)


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize(("case", "n"), on_ranks([DRAINED[-1], *LED]))
def test_what_is_local_is_rank_0s_after_a_broadcast(case: Case, n: int, before: int) -> None:
    """CoCoD's local momenta (`synchronize()` makes models equal), a model that leads."""
    ranks = of_case(results(n), f"{before} before: {case}")
    rows = case.steps - case.saved + 1
    actual = [resumed[:rows] for _, resumed, _ in ranks]
    assert_close(actual, continued(ranks[0][2], case, n))


@pytest.mark.parametrize("n", [1, NUMBERS[1]])
@pytest.mark.parametrize("case", MOVED, ids=str)
def test_another_number_of_ranks_goes_on(case: Case, n: int) -> None:
    content = of_case(results(2), f"to move: {case}")[0]
    assert_close(of_case(moved(n), str(case)), continued(content, case, n))


@pytest.mark.parametrize("n", NUMBERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stock_horovods_checkpoint_loads_here(strategy: str, n: int) -> None:
    ranks = of_case(results(n), f"from stock: {strategy}")
    content = ranks[0][0]
    assert_close([rows for *_, rows in ranks], continued(content, Case(strategy), n))
    for _, warned, theirs, rows in ranks:
        if strategy == "merged-gradient":
            assert warned == []
            assert_close([rows[:-1]], [theirs])
        else:
            assert len(warned) == 1
            assert "holds nothing in flight" in warned[0]


@pytest.mark.parametrize("n", NUMBERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_of_ours_loads_into_others(strategy: str, n: int) -> None:
    """Into stock Horovod, which goes on from it, and into plain torch."""
    ranks = of_case(results(n), f"into stock: {strategy}")
    want = continued(ranks[0][0], Case("merged-gradient"), n, in_flight=False)
    for (_, unlike, rows), wanted in zip(ranks, want, strict=True):
        assert unlike == [[], []]
        assert_close([rows], [wanted[:-1]])


@pytest.mark.parametrize("n", NUMBERS)
@pytest.mark.parametrize("other", STRATEGIES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_another_strategy_starts_clean(strategy: str, other: str, n: int) -> None:
    """It warns of what is lost, which under merged-gradient is nothing."""
    if strategy == other:
        return
    ranks = of_case(results(n), f"{strategy} into {other}")
    want = continued(ranks[0][0], Case(other), n, in_flight=False)
    assert_close([rows for *_, rows in ranks], want)
    for _, warned, _ in ranks:
        if strategy == "merged-gradient":
            assert warned == []
        else:
            assert len(warned) == 1
            assert f"was saved under {strategy.partition(':')[0]!r}" in warned[0]


def test_a_checkpoint_has_the_plain_layout() -> None:
    """And one more key, with plain values and tensors."""
    checkpoint = loaded(of_case(results(2), "into stock: pipe-sgd")[0][0])["optimizer"]
    assert set(checkpoint) == {"state", "param_groups", "hvd_pipe"}
    pending = checkpoint["hvd_pipe"]["tensors"]["pending"]
    assert sorted(pending) == list(range(6))
    assert all(torch.is_tensor(tensor) for tensor in pending.values())
