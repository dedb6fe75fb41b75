"""From what the user asks for to the stages of a pipeline."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from hvd_pipe.pipeline.plans import Options, choose
from hvd_pipe.planning.cluster import Cluster, Link, Network
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.planning.schedule import MODES
from hvd_pipe.planning.stages import Partition

LAYERS = 4
MODEL = ModelProfile(
    tuple(LayerProfile(f"layer{at}", 4000, 0.01, 0.01, 400) for at in range(LAYERS))
)


def options(mode: str, plan: str | Partition = "straight", **more: int | None) -> Options:
    given: dict[str, Any] = dict.fromkeys(field.name for field in fields(Options))
    return Options(**given | {"mode": mode, "plan": plan} | more)


def memory_of(mode: str, limit: int | None) -> tuple[int, ...]:
    """What the stages of a straight pipeline are said to hold."""
    cluster = Cluster(LAYERS, Network(Link.of(1e9, 0.0)), memory_bytes=limit)
    found, _ = choose(options(mode), lambda _: MODEL, cluster, 1.0)
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
    cluster = Cluster(LAYERS, Network(Link.of(1e9, 0.0)))
    count = 12 if MODES[mode].coalesces else None

    def chosen(plan: str | Partition, in_transit: int | None) -> tuple[Partition, str]:
        asked = options(mode, plan, microbatches=count, in_transit=in_transit)
        return choose(asked, lambda _: MODEL, cluster, 1.0)

    saved, _ = chosen("straight", 0)
    more, _ = chosen("straight", 2)
    found, why = chosen(saved, 2)
    assert found.stages == more.stages
    assert (found.in_transit, found.in_flight) == (2, more.in_flight)
    assert found.simulated_s is None  # the links are not known
    assert why.startswith("as given; 10-7-4-1 are in flight, by stage (in_transit=2), for ")
    if mode not in ("flush", "gpipe"):
        assert found.stages[0].memory_bytes > saved.stages[0].memory_bytes
    for same in (None, 0):
        assert chosen(saved, same) == (saved, "as given")
