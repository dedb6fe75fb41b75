"""Plans as people write them, and the best cuts for them."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_partition import choices, compare, models

from hvd_pipe.planning.partition import partition
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.planning.stages import parse_replicas

CHAIN = ModelProfile(tuple(LayerProfile(f"l{at}", 100, 0.5, 0.5, 10) for at in range(3)))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_a_plan_is_read_as_partition_writes_it(replicas: list[int]) -> None:
    assert parse_replicas("-".join(map(str, replicas)), sum(replicas)) == tuple(replicas)


@pytest.mark.parametrize(
    ("text", "workers", "message"),
    [
        ("", None, "is no plan: write the workers of each stage"),
        ("3-", None, "is no plan"),
        ("3 1", None, "is no plan"),
        ("-3", None, "is no plan"),
        ("3.0-1", None, "is no plan"),
        ("stright", 4, 'or "straight" for one worker a stage'),
        ("3-0", None, "has a stage without workers"),
        ("straight", None, "say how many workers there are"),
        ("straight", 0, "workers must be at least 1, got 0"),
        ("3-1", 5, r'is for 4 workers, but there are 5: start 4, or .* such as "4-1"'),
        ("2", 1, "start 2, or write a plan whose numbers add up to 1$"),
    ],
)
def test_texts_that_are_no_plan(text: str, workers: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_replicas(text, workers)


def test_a_list_is_no_text() -> None:
    with pytest.raises(TypeError, match="got \\(3, 1\\)"):
        parse_replicas((3, 1))  # type: ignore[arg-type]


def compositions(workers: int) -> list[tuple[int, ...]]:
    """All plans for so many workers."""
    cuts = (c for n in range(workers) for c in itertools.combinations(range(1, workers), n))
    ends = ((0, *cut, workers) for cut in cuts)
    return [tuple(b - a for a, b in itertools.pairwise(end)) for end in ends]


@given(
    st.booleans().flatmap(lambda graph: models(graph=graph)),
    st.integers(1, 4).flatmap(lambda workers: st.sampled_from(compositions(workers))),
    choices(),
    st.floats(0, 1),
)
def test_best_cuts_for_given_replicas(
    model: ModelProfile, replicas: tuple[int, ...], options: dict[str, Any], limit: float
) -> None:
    del options["straight"]
    compare(model, [(sum(replicas), 512.0)], {**options, "replicas": replicas}, limit)


@pytest.mark.parametrize(
    ("levels", "given", "kind", "message"),
    [
        ([(4, 1e9)], {"replicas": "3-1"}, TypeError, r"parse_replicas reads '3-1'"),
        ([(4, 1e9)], {"replicas": ()}, TypeError, "one a stage"),
        ([(4, 1e9)], {"replicas": (3, 1.0)}, TypeError, "replicas of stage 1 must be an integer"),
        ([(4, 1e9)], {"replicas": (4, 0)}, ValueError, "replicas of stage 1 must be at least 1"),
        ([(4, 1e9)], {"replicas": (2, 1)}, ValueError, "are 3 workers, but there are 4"),
        ([(4, 1e9)], {"replicas": (3, 1), "straight": True}, ValueError, "leave these out"),
        ([(4, 1e9)], {"replicas": (3, 1), "use_fewer": True}, ValueError, "leave these out"),
        ([(4, 1e9)], {"replicas": (1,) * 4}, ValueError, "give fewer stages"),
        ([(2, 1e9), (2, 1e8)], {"replicas": (3, 1)}, ValueError, r"such as levels=[(4, 1e+08)]"),
    ],
)
def test_replicas_that_cannot_be(
    levels: list[tuple[int, float]], given: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        partition(CHAIN, levels, **given)
