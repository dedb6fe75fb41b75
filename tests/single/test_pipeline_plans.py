"""From what the user asks for to the stages of a pipeline."""

from __future__ import annotations

import pytest

from hvd_pipe.pipeline.options import Request
from hvd_pipe.pipeline.plans import choose
from hvd_pipe.planning.cluster import Cluster, Link, Network
from hvd_pipe.planning.modes import MODES
from hvd_pipe.planning.profile import LayerProfile, ModelProfile

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
