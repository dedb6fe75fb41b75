"""Strategies: what can be written, and what each mistake is answered with."""

import doctest
import re
from pathlib import Path

import pytest

from hvd_pipe import strategy as module
from hvd_pipe.planning.plan import Plan
from hvd_pipe.strategy import CoCoD, MergedGradient, PipeSGD, Strategy, parse

PLAN = Plan((("fc.weight", "fc.bias"),), "given")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("merged-gradient", MergedGradient()),
        ("merged-gradient:plan=wfbp", MergedGradient(plan="wfbp")),
        ("merged-gradient:bucket_bytes=1048576", MergedGradient(bucket_bytes=1048576)),
        ("merged-gradient:plan=runs/plan.json", MergedGradient(plan="runs/plan.json")),
        ("pipe-sgd", PipeSGD()),
        ("Pipe_SGD", PipeSGD()),
        (" pipe-sgd : warmup_steps = 20 , bucket_bytes = 64 ", PipeSGD(20, 64)),
        ("cocod:period=8,warmup_steps=3", CoCoD(8, 3)),
        (CoCoD(2), CoCoD(2)),
    ],
)
def test_parse(written: str | Strategy, meant: Strategy) -> None:
    assert parse(written) == meant


def test_the_environment_chooses_where_the_script_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HVD_PIPE_STRATEGY", raising=False)
    assert parse() == MergedGradient()
    monkeypatch.setenv("HVD_PIPE_STRATEGY", "cocod:period=3")
    assert parse() == CoCoD(3)
    assert parse("pipe-sgd") == PipeSGD()
    monkeypatch.setenv("HVD_PIPE_STRATEGY", "cocoa")
    with pytest.raises(ValueError, match=r"HVD_PIPE_STRATEGY='cocoa'.*did you mean 'cocod'"):
        parse()


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("", "unknown strategy: use one of 'merged-gradient', 'pipe-sgd', 'cocod'"),
        ("pipe-sdg", "did you mean 'pipe-sgd'?"),
        ("horovod", "use one of 'merged-gradient', 'pipe-sgd', 'cocod'"),
        ("cocod:perod=4", "'perod=4' is not an option of cocod (did you mean 'period'?)"),
        ("cocod:period", "write OPTION=VALUE"),
        ("cocod:period=2,period=3", "once each"),
        ("cocod:period=0", "period must be >= 1, got 0"),
        ("cocod:period=-1", "period must be >= 1, got -1"),
        ("cocod:period=4,bucket_bytes=9", "one of period, warmup_steps"),
        ("pipe-sgd:warmup_steps=-3", "warmup_steps must be >= 0, got -3"),
        ("pipe-sgd:bucket_bytes=0", "bucket_bytes must be >= 1, got 0"),
        ("merged-gradient:plan=gredy", "unknown plan 'gredy' (did you mean 'greedy'?)"),
        ("merged-gradient:plan=single,bucket_bytes=9", "contradict each other"),
    ],
)
def test_wrong_words(written: str, answer: str) -> None:
    with pytest.raises(ValueError, match=re.escape(answer)):
        parse(written)


@pytest.mark.parametrize(
    ("make", "answer"),
    [
        (lambda: parse(8), "strategy must be a string or one of MergedGradient, PipeSGD, CoCoD"),
        (lambda: parse("cocod:period=two"), "period must be an int, got 'two'"),
        (lambda: CoCoD(2.5), "period must be an int, got 2.5"),
        (lambda: CoCoD(True), "period must be an int, got True"),
        (lambda: PipeSGD(warmup_steps=None), "warmup_steps must be an int, got None"),
        (lambda: MergedGradient(plan=7), "a Plan or the path of a saved plan, got 7"),
        (lambda: MergedGradient(bucket_bytes="8"), "bucket_bytes must be an int, got '8'"),
    ],
)
def test_wrong_types(make: object, answer: str) -> None:
    with pytest.raises(TypeError, match=re.escape(answer)):
        make()  # type: ignore[operator]


def test_a_given_plan_is_loaded(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert MergedGradient().load_plan() is None
    assert MergedGradient(plan="single").load_plan() is None
    assert MergedGradient(plan=PLAN).load_plan() == PLAN
    assert MergedGradient(plan=tmp_path / "plan.json").load_plan() == PLAN
    assert MergedGradient(plan=str(tmp_path / "plan.json")).load_plan() == PLAN
    with pytest.raises(FileNotFoundError):
        MergedGradient(plan=str(tmp_path / "none.json")).load_plan()


def test_doctests() -> None:
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted >= 4
