"""Which version of its weights each stage of a pipeline has for each minibatch."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_pipe.planning.schedule import Forward, schedule

METHODS = {
    "stash": "1f1b",
    "vertical-sync": "1f1b-vertical-sync",
    "2bw": "2bw",
    "flush": "1f1b-flush",
    "gpipe": "gpipe",
}
COALESCING = ("2bw", "flush", "gpipe")


def straight_version(
    mode: str, stages: int, stage: int, minibatch: int, in_transit: int = 0
) -> int:
    """v_s(b) of n stages of one worker each, with k minibatches in transit between two."""
    late = {
        "stash": (1 + in_transit) * (stages - 1 - stage),
        "vertical-sync": (1 + in_transit) * (stages - 1),
        "2bw": 1,
        "flush": 0,
        "gpipe": 0,
    }[mode]
    return max(0, minibatch - late)


def scheduled_versions(
    mode: str, replicas: Sequence[int], minibatches: int, microbatches: int, in_transit: int = 0
) -> list[dict[int, int]]:
    """For each stage: the version of each minibatch, from the schedule's forward passes."""
    found: list[dict[int, int]] = [{} for _ in replicas]
    whole = schedule(METHODS[mode], replicas, minibatches, microbatches, in_transit)
    for worker, program in whole.programs.items():
        for step in program:
            if isinstance(step, Forward):
                version = found[worker.stage].setdefault(step.minibatch, step.version)
                assert version == step.version, "microbatches of one minibatch at two versions"
    return found


def versions_of(
    mode: str, replicas: Sequence[int], minibatches: int, microbatches: int, in_transit: int = 0
) -> list[dict[int, int]]:
    """For each stage: the version of each minibatch, in closed form where none has replicas."""
    if set(replicas) != {1} and mode not in ("flush", "gpipe"):  # there all are as one worker
        return scheduled_versions(mode, replicas, minibatches, microbatches, in_transit)
    stages = len(replicas)
    return [
        {b: straight_version(mode, stages, s, b, in_transit) for b in range(minibatches)}
        for s in range(stages)
    ]
