"""Strategies: what can be written, and what each mistake is answered with."""

import doctest
import re
from pathlib import Path

import pytest

from hvd_pipe import strategy as module
from hvd_pipe.planning.plan import Plan
from hvd_pipe.strategy import Auto, CoCoD, MergedGradient, PipeSGD, Strategy, parse

FORWARD = "merged-gradient:overlap=forward"
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
        ("cocod:weights=3/1", CoCoD(weights=(3, 1))),
        ("cocod:weights=0.5 / 1.5 / 1,period=2", CoCoD(2, weights=(0.5, 1.5, 1))),
        ("cocod:momentum=average", CoCoD(momentum="average")),
        ("cocod:pull_back=0.6,anchor_momentum=0.7", CoCoD(pull_back=0.6, anchor_momentum=0.7)),
        ("cocod:pull_back=5e-1", CoCoD(pull_back=0.5)),
        ("cocod:period=32,outer=nesterov", CoCoD(32, outer="nesterov")),
        ("cocod:fragments=4,within=node", CoCoD(fragments=4, within="node")),
        (
            "cocod:outer=nesterov,outer_lr=1,outer_momentum=0",
            CoCoD(outer="nesterov", outer_lr=1, outer_momentum=0),
        ),
        (CoCoD(2), CoCoD(2)),
        ("auto", Auto(("merged-gradient",))),
        ("auto:allow=pipe-sgd", Auto(("pipe-sgd",))),
        (
            "auto:allow=merged-gradient / Pipe_SGD,steps=4",
            Auto(("merged-gradient", "pipe-sgd"), 4),
        ),
        (
            "auto:allow=Merged_Gradient / merged_gradient:overlap=forward / pipe-sgd , steps=4",
            Auto(("merged-gradient", "merged-gradient:overlap=forward", "pipe-sgd"), 4),
        ),
        (Auto(steps=5), Auto(steps=5)),
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
    monkeypatch.setenv("HVD_PIPE_STRATEGY", f"auto:allow=merged-gradient/{FORWARD}")
    assert parse() == Auto(("merged-gradient", FORWARD))
    assert parse(FORWARD) == MergedGradient(overlap="forward")
    monkeypatch.setenv("HVD_PIPE_STRATEGY", "cocod:period=x")
    with pytest.raises(TypeError, match=r"HVD_PIPE_STRATEGY='cocod:period=x': CoCoD: period must"):
        parse()
    monkeypatch.setenv("HVD_PIPE_STRATEGY", "cocoa")
    with pytest.raises(ValueError, match=r"HVD_PIPE_STRATEGY='cocoa'.*did you mean 'cocod'"):
        parse()


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("", "unknown strategy: use one of 'merged-gradient', 'pipe-sgd', 'cocod', 'auto'"),
        ("pipe-sdg", "did you mean 'pipe-sgd'?"),
        ("horovod", "use one of 'merged-gradient', 'pipe-sgd', 'cocod', 'auto'"),
        ("cocod:period", "'period' has no value"),
        ("cocod:perod=4", "'perod=4' is not an option of cocod (did you mean 'period'?)"),
        ("cocod:period", "write OPTION=VALUE"),
        ("cocod:period=2,period=3", "once each"),
        ("cocod:period=0", "period must be >= 1, got 0"),
        ("cocod:period=-1", "period must be >= 1, got -1"),
        ("cocod:period=4,bucket_bytes=9", "one of period, warmup_steps"),
        ("cocod:weights=3/0", "weights must be positive numbers, one a rank, got (3, 0)"),
        ("cocod:weights=3/-1", "weights must be positive numbers, one a rank, got (3, -1)"),
        ("cocod:weights=inf/1", "weights must be positive numbers"),
        ("cocod:weights=nan/1", "weights must be positive numbers"),
        ("cocod:momentum=averge", "'local', 'average', got 'averge' (did you mean 'average'?)"),
        ("cocod:pull_back=0", "pull_back must be above 0 and below 1, got 0"),
        ("cocod:pull_back=1", "at 1 every round would end where it began"),
        ("cocod:pull_back=nan", "pull_back must be above 0 and below 1, got nan"),
        ("cocod:pull_back=.5,anchor_momentum=1", "from 0 to below 1, got 1"),
        ("cocod:pull_back=.5,anchor_momentum=-.1", "from 0 to below 1, got -0.1"),
        ("cocod:anchor_momentum=0.7", "anchor_momentum=0.7 needs pull_back"),
        ("cocod:outer=adam", "outer must be one of 'none', 'nesterov', got 'adam'"),
        ("cocod:outer=nestrov", "did you mean 'nesterov'"),
        ("cocod:outer=nesterov,outer_lr=0", "outer_lr must be a positive number, got 0"),
        ("cocod:outer=nesterov,outer_lr=nan", "outer_lr must be a positive number, got nan"),
        ("cocod:outer=nesterov,outer_lr=inf", "outer_lr must be a positive number, got inf"),
        ("cocod:outer=nesterov,outer_momentum=1", "outer_momentum must be from 0 to below 1"),
        ("cocod:outer_lr=0.5", "outer_lr=0.5 and outer_momentum=0.9 need an outer optimizer"),
        ("cocod:outer_momentum=0.5", "give outer='nesterov', or leave them out"),
        ("cocod:outer=nesterov,pull_back=0.6", "two rules for the end of a round"),
        ("cocod:fragments=3", "fragments=3 must divide period=4"),
        ("cocod:fragments=0", "fragments must be >= 1, got 0"),
        ("cocod:fragments=2,momentum=average", "do not go together"),
        ("cocod:within=host", "within must be one of 'none', 'node', got 'host'"),
        ("pipe-sgd:warmup_steps=-3", "warmup_steps must be >= 0, got -3"),
        ("pipe-sgd:bucket_bytes=0", "bucket_bytes must be >= 1, got 0"),
        ("merged-gradient:plan=gredy", "unknown plan 'gredy' (did you mean 'greedy'?)"),
        ("merged-gradient:plan=single,bucket_bytes=9", "contradict each other"),
        ("auto:allow=", "Auto: allow has '', no method: use some of 'merged-gradient',"),
        (
            "auto:allow=pipe-sdg",
            "Auto: allow has 'pipe-sdg', no method (did you mean 'pipe-sgd'?)",
        ),
        (
            "auto:allow=cocod:period=2",
            "'cocod:period=2', no method: use some of 'merged-gradient',",
        ),
        (
            "auto:allow=merged-gradient:overlap=foward",
            "no method (did you mean 'merged-gradient:overlap=forward'?): use some of "
            "'merged-gradient', 'merged-gradient:overlap=forward', 'pipe-sgd', 'cocod'",
        ),
        ("auto:allow=merged-gradient:overlap=backward", "no method"),
        (f"auto:allow={FORWARD}/{FORWARD}", "must name each method to choose from, once"),
        ("auto:allow=cocod/cocod", "must name each method to choose from, once"),
        ("auto:allow=auto", "without other options"),
        ("auto:steps=0", "Auto: steps must be >= 1, got 0"),
        ("auto:step=3", "(did you mean 'steps'?)"),
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
        (lambda: CoCoD(weights=[3, 1]), "weights must be a tuple of numbers, one a rank"),
        (lambda: CoCoD(weights=("3", 1)), "weights must be a tuple of numbers, one a rank"),
        (lambda: parse("cocod:weights=3;1"), "'3/1' in a string, got '3;1'"),
        (lambda: CoCoD(pull_back="0.5"), "pull_back must be a number, got '0.5'"),
        (lambda: CoCoD(pull_back=True), "pull_back must be a number, got True"),
        (lambda: CoCoD(outer_lr="0.7"), "outer_lr must be a number, got '0.7'"),
        (lambda: CoCoD(outer_momentum=None), "outer_momentum must be a number, got None"),
        (lambda: CoCoD(anchor_momentum=None), "anchor_momentum must be a number, got None"),
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
