"""From what the user asks for to the stages of a pipeline."""

from __future__ import annotations

import pytest

from hvd_pipe.pipeline.plans import Request, choose
from hvd_pipe.planning.cluster import Cluster, Link, Network
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.planning.schedule import MODES

LAYERS = 4
MODEL = ModelProfile(
    tuple(LayerProfile(f"layer{at}", 4000, 0.01, 0.01, 400) for at in range(LAYERS))
)


def memory_of(mode: str, limit: int | None) -> tuple[int, ...]:
    """What the stages of a straight pipeline are said to hold."""
    cluster = Cluster(LAYERS, Network(Link.of(1e9, 0.0)), memory_bytes=limit)
    pieces = LAYERS if MODES[mode].coalesces else 1
    request = Request(replicas=(1,) * LAYERS)
    found, _ = choose(request, lambda: MODEL, cluster, MODES[mode], 1.0, pieces, None, False)
    return tuple(stage.memory_bytes for stage in found.stages)


@pytest.mark.parametrize("mode", MODES)
def test_a_limit_of_memory_is_kept_in_every_mode(mode: str) -> None:
    """Also in those that hold more than the search for stages counts."""
    most = max(memory_of(mode, None))
    assert max(memory_of(mode, most)) == most
    with pytest.raises(ValueError, match=r"memory_bytes = \d+"):
        memory_of(mode, most - 1)


@pytest.mark.parametrize("mode", MODES)
def test_a_saved_plan_has_the_memory_of_its_number(mode: str) -> None:
    """More in transit is more in flight; the memory of the saved number does not go along."""
    pieces = 12 if MODES[mode].coalesces else 1
    count = pieces if pieces > 1 else None
    cluster = Cluster(LAYERS, Network(Link.of(1e9, 0.0)))
    straight = Request(replicas=(1,) * LAYERS)
    arguments = (lambda: MODEL, cluster, MODES[mode], 1.0, pieces, count, False)
    saved, _ = choose(straight, *arguments, 0)
    more, _ = choose(straight, *arguments, 2)
    found, why = choose(Request(stages=saved), *arguments, 2)
    assert found.stages == more.stages
    assert (found.in_transit, found.in_flight) == (2, more.in_flight)
    assert found.simulated_s is None  # the links are not known
    assert why.startswith("as given; 10-7-4-1 are in flight, by stage (in_transit=2), for ")
    if mode not in ("flush", "gpipe"):
        assert found.stages[0].memory_bytes > saved.stages[0].memory_bytes
    for same in (None, 0):
        assert choose(Request(stages=saved), *arguments, same) == (saved, "as given")
