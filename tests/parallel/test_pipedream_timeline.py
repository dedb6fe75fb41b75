"""Timelines of pipelines: each pass once, in the order that data takes, on one clock."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from on_ranks import gather, on_ranks
from torch import nn

from hvd_pipe.runtime.timeline import DIRECTORY, OFF
from hvd_pipe.timeline import Event, Timeline
from hvd_pipe.torch import pipedream
from hvd_pipe.torch.measuring import timeline

WORKERS, MINIBATCHES, BATCH = 3, 7, 8
pytestmark = on_ranks(WORKERS, init=pipedream.init)

CASES = {
    # plan, mode, microbatches
    "straight": ("straight", "stash", None),
    "replicas": ("2-1", "stash", None),
    "last replicas": ("1-2", "vertical-sync", None),
    "microbatches": ("2-1", "2bw", 4),
    "flush": ("straight", "flush", 3),
}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (m for _ in range(3) for m in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()))
    return nn.Sequential(*layers, nn.Linear(16, 3))


def make_engine(plan: str, mode: str, microbatches: int | None) -> pipedream.PipeDream:
    return pipedream.PipeDream(
        make_model(),
        nn.functional.cross_entropy,
        partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        plan=plan,
        mode=mode,
        microbatches=microbatches,
        bandwidth=1e9,
        progress=False,
    )


def loader() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, 16, generator=generator), torch.arange(BATCH) % 3)
        for _ in range(MINIBATCHES)
    ]


def begin(directory: Path) -> None:
    """Be as a new process that writes there; what was written is on the disk."""
    timeline.active.close()
    timeline.active = OFF
    os.environ[DIRECTORY] = str(directory)


def end(directory: Path) -> Timeline:
    """Return what all ranks have written."""
    timeline.active.close()
    gather(None)
    return Timeline.load(directory)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank 0's, for all ranks."""
    return Path(gather(tmp_path_factory.mktemp("timelines"))[0])


class Written(NamedTuple):
    """A case, the timeline of an epoch, and the stage and the updates of each worker."""

    name: str
    timeline: Timeline
    stages: dict[int, int]
    updates: list[int]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, folder: Path) -> Written:
    name, directory = request.param, folder / request.param
    begin(directory)
    engine = make_engine(*CASES[name])
    engine.train_epoch(loader())
    stages = dict(enumerate(gather(engine.stage)))
    return Written(name, end(directory), stages, gather(timeline.active.steps))


def passes(written: Timeline, category: str) -> dict[tuple[int, str], Event]:
    """Return events by worker and microbatch; fails where there are two of one."""
    some = [e for e in written.events if e.category == category]
    found = {(e.worker, e.name.removeprefix(f"{category} ")): e for e in some}
    assert len(found) == len(some)
    return found


def units(name: str) -> set[str]:
    """Return the names of all microbatches of a case."""
    _, _, microbatches = CASES[name]
    if microbatches is None:
        return {str(at) for at in range(MINIBATCHES)}
    return {f"{at}.{piece}" for at in range(MINIBATCHES) for piece in range(microbatches)}


def test_each_stage_has_each_pass_once_and_passes_follow_the_data(case: Written) -> None:
    name, written, stages, _ = case
    by_stage = {}
    for category in ("forward", "backward"):
        some = passes(written, category)
        by_stage[category] = {(stages[w], unit): event for (w, unit), event in some.items()}
        expected = {(stage, unit) for stage in stages.values() for unit in units(name)}
        assert len(some) == len(expected)
        assert set(by_stage[category]) == expected
    forward, backward = by_stage["forward"], by_stage["backward"]
    last = max(stages.values())
    for (stage, unit), event in forward.items():
        assert event.end_s <= backward[stage, unit].start_s
        assert event.worker == backward[stage, unit].worker
        if stage < last:
            assert event.end_s <= forward[stage + 1, unit].start_s
            assert backward[stage + 1, unit].end_s <= backward[stage, unit].start_s


def test_a_worker_does_one_thing_after_another(case: Written) -> None:
    _, written, stages, _ = case
    for worker in stages:
        mine = [e for e in written.events if e.worker == worker and e.lane == "compute"]
        assert {e.category for e in mine} - {"ready"} == {"forward", "backward", "update", "wait"}
        busy = sorted((e for e in mine if e.category != "ready"), key=lambda e: e.start_s)
        for before, after in pairwise(busy):
            assert after.start_s >= before.end_s - 1e-8, (before, after)


def test_messages_are_in_the_network_s_lane(case: Written) -> None:
    name, written, stages, _ = case
    last, count = max(stages.values()), len(units(name))
    network = [e for e in written.events if e.lane == "network"]
    assert {e.category for e in network} <= {"send", "allreduce"}
    sends = Counter(
        (stages[e.worker], e.name.split(" ")[0]) for e in network if e.category == "send"
    )
    expected = {(stage, "activation"): count for stage in range(last)}
    assert sends == expected | {(stage + 1, "gradient"): count for stage in range(last)}
    replicated = {stage for stage, width in Counter(stages.values()).items() if width > 1}
    assert {stages[e.worker] for e in network if e.category == "allreduce"} == replicated


def test_steps_count_updates(case: Written) -> None:
    name, written, stages, _ = case
    for worker, stage in stages.items():
        updates = [e for e in written.events if (e.category, e.worker) == ("update", worker)]
        width = list(stages.values()).count(stage)
        each = 1 if CASES[name][2] else width  # minibatches an update takes
        assert len(updates) == -(-MINIBATCHES // each) == case.updates[worker]
        order = sorted(updates, key=lambda e: e.start_s)
        assert [e.args["step"] for e in order] == list(range(len(order)))
