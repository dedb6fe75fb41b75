"""What ``strategy="auto"`` predicts and chooses, by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hvd_pipe.planning.choice import (
    OwnTimes,
    Prediction,
    choose,
    least_of,
    predict,
    profile_of,
    report,
)
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.plan import Plan
from hvd_pipe.planning.timing import step_time
from hvd_pipe.strategy import CoCoD, MergedGradient, Method, PipeSGD

PLAIN, FORWARD = MergedGradient(), MergedGradient(overlap="forward")
SLOW = CommModel.linear(0.0, 1.0)
WFBP = Plan((("c",), ("b",), ("a",)), "wfbp")

# Backward: c at 0, b at 2, a at 4. Forward takes 4, which is spread as 2 for a and 2 for b: b is
# needed at 2, c at 4. The link carries c from 0 to 4 (of backward), a from 4 to 5, b from 5 to 6.
OWN = OwnTimes(4.0, [4.0, 2.0, 0.0], 0.0)
PROFILE = profile_of(OWN, ["a", "b", "c"], [1, 1, 4])


def test_forward_is_taken_to_be_spread_as_backward_is() -> None:
    """The next step begins at 4: a is waited for until 5, and b, needed at 7, has come by then.

    Were all weights needed at the end of what comes before backward, nothing would be waited for.
    """
    assert predict(MergedGradient(plan=WFBP), PROFILE, SLOW).seconds == 4 + 6
    given = MergedGradient(plan=WFBP, overlap="forward")
    assert step_time(given, PROFILE, SLOW).total_s == 8 + 1
    found = predict(FORWARD, PROFILE, SLOW)
    assert found.method == FORWARD
    assert found.seconds == pytest.approx(8 + 1)


def test_a_given_plan_is_no_option_of_what_is_chosen() -> None:
    given = MergedGradient(plan=WFBP, overlap="forward")
    assert predict(given, PROFILE, SLOW) == Prediction(FORWARD, 9.0)
    assert predict(MergedGradient(plan=WFBP), PROFILE, SLOW) == Prediction(PLAIN, 10.0)


def test_without_times_of_backward_forward_is_spread_evenly() -> None:
    """Two gradients that are ready at once: the first weight is needed at 0, the second at 1.

    The step ends at 2; a travels until 3, b until 4. Both are waited for.
    """
    profile = profile_of(OwnTimes(2.0, [0.0, 0.0], 0.0), ["a", "b"], [1, 1])
    plan = Plan((("b",), ("a",)), "wfbp")
    method = MergedGradient(plan=plan, overlap="forward")
    assert predict(method, profile, SLOW).seconds == 2 + 1
    one = profile_of(OwnTimes(2.0, [0.0], 0.0), ["a"], [4])
    assert predict(FORWARD, one, SLOW).seconds == pytest.approx(2 + 4)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ((1.0, 0.96, 0.96), PLAIN),
        ((1.0, 0.95, 0.95), FORWARD),
        ((1.0, 0.94, 0.90), FORWARD),
        ((1.0, 0.94, 0.89), PipeSGD()),
        # Beside an exact method that is nearly as fast, pipe-sgd does not pay, chosen or not.
        ((1.0, 0.96, 0.94), PLAIN),
        ((1.0, 0.96, 0.91), PipeSGD()),
        ((1.0, 1.10, 0.96), PLAIN),
        ((1.0, 1.10, 0.94), PipeSGD()),
    ],
)
def test_what_is_not_simpler_must_be_faster_by_the_margin(
    seconds: Sequence[float], chosen: Method
) -> None:
    methods: list[Method] = [PLAIN, FORWARD, PipeSGD()]
    found = [Prediction(method, s) for method, s in zip(methods, seconds, strict=True)]
    assert choose(found).method == chosen
    assert choose(found[::-1]).method == chosen


def test_the_least_change_of_mathematics_comes_first() -> None:
    assert least_of([CoCoD(), FORWARD, PLAIN]) == PLAIN
    assert least_of([PipeSGD(), FORWARD]) == FORWARD


def test_the_report_tells_both_exact_methods_apart() -> None:
    found = [Prediction(PLAIN, 1.0), Prediction(FORWARD, 0.8)]
    said = "chose merged-gradient:overlap=forward: predicted 800.0 ms a step"
    assert report(found[1], found) == f"{said} (merged-gradient 1000.0 ms)"
