"""Pipelines of PyTorch's PipeDream: equal to the equations of the serial reference."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import workers_pipedream
from cases import of_case
from pipeline_problem import make_model, squared
from ranks import once, run_ranks
from workers_pipedream import CASES, EPOCHS, GLOO, HOPS, PROCESS_SETS, Result, expected

MAX_FUNCTIONS, MAX_FILES = 36, 10  # that a minibatch passes through on a middle stage

results = once(
    lambda workers, transport="auto": run_ranks(
        workers, workers_pipedream.run, workers, transport, timeout=290
    )
)
on_gloo = once(lambda: run_ranks(3, workers_pipedream.run_gloo, launcher="gloo"))
equations = functools.cache(lambda name: expected(CASES[name]))


def assert_equal(found: Result, wanted: Result, tolerance: float = 1e-12) -> None:
    close = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    close(found.losses, wanted.losses)
    for state, equation in zip(found.states, wanted.states, strict=True):
        assert list(state) == list(equation)
        for name, value in equation.items():
            assert state[name].dtype == value.dtype
            close(state[name], value, err_msg=name)
    close(found.evaluated, wanted.evaluated)


@pytest.mark.parametrize("name", CASES)
def test_pipelines_are_their_equations(name: str) -> None:
    """Losses and the whole model after each epoch, on every rank, and an evaluation."""
    wanted = CASES[name].plan
    ranks = of_case(results(wanted.workers), name)
    assert [rank.stage for rank in ranks] == [
        s for s, width in enumerate(wanted.replicas) for _ in range(width)
    ]
    for rank in ranks:
        assert_equal(rank, equations(name))


@pytest.mark.parametrize("name", GLOO)
def test_pipelines_without_mpi(name: str) -> None:
    for rank in of_case(on_gloo(), name):
        assert_equal(rank, equations(name))


@pytest.mark.parametrize("name", PROCESS_SETS)
def test_both_transports_carry_the_same(name: str) -> None:
    workers = CASES[name].plan.workers
    through_sets = of_case(results(workers, "process-sets"), name)
    for one, other in zip(through_sets, of_case(results(workers), name), strict=True):
        assert one.losses == other.losses
        for state, same in zip(one.states, other.states, strict=True):
            for key, value in state.items():
                assert np.array_equal(value, same[key]), key


@pytest.mark.parametrize("mode", ["flush", "gpipe"])
@pytest.mark.parametrize("config", ["1-1", "1-1-1-1", "2-1", "3-1", "1-2-1"])
def test_a_flushed_pipeline_is_one_worker(config: str, mode: str) -> None:
    """Weights and losses; replicas have running statistics of their own."""
    name = f"{config} {mode} momentum"
    case = CASES[name]
    model = make_model(case.model)
    optimizer = workers_pipedream.OPTIMIZERS[case.optimizer](list(model.parameters()))
    losses = []
    for number in range(EPOCHS):
        total, batches = 0.0, case.data(number)
        for x, target in batches:
            optimizer.zero_grad()
            for x_part, part in zip(
                x.tensor_split(case.microbatches),
                target.tensor_split(case.microbatches),
                strict=True,
            ):
                loss = squared(model(x_part), part) * len(part) / len(target)
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.item()
            optimizer.step()
        losses.append(total / len(batches))
    for rank in of_case(results(case.plan.workers), name):
        np.testing.assert_allclose(rank.losses, losses, rtol=1e-12)
        for key, p in model.named_parameters():
            np.testing.assert_allclose(
                rank.states[-1][key], p.detach().numpy(), rtol=1e-12, atol=1e-12, err_msg=key
            )


def test_a_minibatch_passes_few_functions() -> None:
    """From one update of the middle stage to the next; docs/architecture.md draws them."""
    _, hops, _ = of_case(results(3), HOPS)
    functions = "\n".join(f"{hop.file} {hop.function} ({hop.thread})" for hop in hops)
    assert {hop.thread for hop in hops} == {"MainThread", "hvd_pipe mpi"}, functions
    assert len(hops) <= MAX_FUNCTIONS, functions
    assert len({hop.file for hop in hops}) <= MAX_FILES, functions
