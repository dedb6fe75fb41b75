"""PipeDream in the advice: where it wins, by how much, at what price, and where there is none."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvd_pipe.planning.advise import Advice, Row, advise
from hvd_pipe.planning.cluster import Cluster, Link, Network
from hvd_pipe.planning.methods import delayed_rate
from hvd_pipe.planning.partition import partition
from hvd_pipe.planning.pipeline_plans import pipeline_cost
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.planning.stages import parse_replicas

DATA = Path(__file__).parent.parent / "data"
NAMES = ("vgg16", "alexnet", "resnet50", "gnmt")
MODELS = {name: ModelProfile.read(DATA / f"{name}.graph.txt") for name in NAMES}


def cluster(workers: int = 16, bandwidth: float = 1.25e9, **rest: Any) -> Cluster:
    return Cluster(workers, Network(Link.of(bandwidth, latency=3e-5)), **rest)


def pipelines(advice: Advice) -> dict[str, Row]:
    """Rows of PipeDream, by mode."""
    return {row.pipeline.mode: row for row in advice.rows if row.pipeline is not None}


@pytest.mark.parametrize(
    ("name", "plan", "least"),
    [  # 16 workers at 10 Gbit/s; speedup over data parallelism with a barrier, at least
        ("vgg16", "15-1", 1.4),
        ("alexnet", "15-1", 2.2),
        ("gnmt", "1-1-10-1-1-1-1", 3.5),  # the paper's is straight, and reaches 2.9
    ],
)
def test_where_the_paper_splits_layers(name: str, plan: str, least: float) -> None:
    """The plans of the paper's Table 1; its speedups are of slower data parallelism."""
    advice = advise(MODELS[name], cluster())
    found = pipelines(advice)
    row = found["stash"]
    assert row.pipeline is not None
    assert row.pipeline.plan == plan
    (parallel,) = (r.time.total_s for r in advice.rows if r.strategy == "merged-gradient")
    assert parallel / row.time.total_s > least
    exact = min(r.time.total_s for r in advice.rows if r.exact and r.pipeline is None)
    assert {"stash", "2bw"} <= set(found) <= {"stash", "2bw", "flush"}
    assert all(r.time.total_s < exact for r in found.values())  # others are not worth a row
    assert not advice.notes


def test_where_the_paper_splits_nothing() -> None:
    advice = advise(MODELS["resnet50"], cluster())
    assert not pipelines(advice)
    assert "data parallelism is PipeDream's best partition here" in advice.notes[0]
    assert advice.best.strategy == "merged-gradient"


def test_a_row_is_what_its_plan_costs() -> None:
    """Samples a second: a pipeline's minibatch is one worker's batch."""
    model = replace(MODELS["vgg16"], batch=128)
    advice = advise(model, cluster(), methods=["pipedream"])
    row = pipelines(advice)["stash"]
    assert row.pipeline is not None
    plan = partition(model, cluster(), replicas=parse_replicas("15-1"))
    cost = pipeline_cost(plan, model, cluster())
    assert row.time.total_s == pytest.approx(16 * cost.period_s)
    assert row.samples_per_s == pytest.approx(128 / cost.period_s)
    assert row.speedup == pytest.approx(model.compute_s / cost.period_s)
    assert row.pipeline.memory_bytes == cost.memory_bytes
    assert row.pipeline.saved == pytest.approx(cost.saved())
    assert (row.pipeline.staleness, row.pipeline.versions) == ((1, 0), (2, 1))
    assert (row.staleness, row.identical, row.exact, row.usable) == (1, True, False, True)
    assert row.pipeline.paste == (
        'PipeDream(model, loss_fn, optimizer_fn, plan="15-1", mode="stash")'
    )
    merged = next(row for row in advice.rows if row.strategy == "merged-gradient")
    assert merged.samples_per_s == pytest.approx(16 * 128 / merged.time.total_s)


def test_modes_that_cut_a_minibatch() -> None:
    """Microbatches are workers' batches; the bubble of a flush is the pipeline's depth."""
    layers = tuple(LayerProfile(f"l{at}", 10**8, 0.02, 0.01, 1000) for at in range(4))
    advice = advise(ModelProfile(layers), cluster(4), methods=["pipedream"])
    found = pipelines(advice)
    assert {row.pipeline.plan for row in found.values() if row.pipeline} == {"straight"}
    bubble = found["flush"].time.total_s / (4 * 0.03)
    assert bubble == pytest.approx((4 + 3) / 4, rel=0.02)
    assert found["2bw"].time.total_s == pytest.approx(4 * 0.03, rel=0.02)
    two = found["2bw"].pipeline
    assert two is not None
    assert (two.microbatches, two.staleness, two.versions) == (4, (1,) * 4, (2,) * 4)
    assert two.paste.endswith('plan="straight", mode="2bw", microbatches=4)')
    assert (found["flush"].exact, found["flush"].staleness) == (True, 0)
    # Activations of what is in flight: one microbatch is as large as a worker's batch.
    flush = found["flush"].pipeline
    assert flush is not None
    assert flush.memory_bytes[0] == 3 * 10**8 + 4 * 1000


def test_a_batch_of_as_many_samples_as_data_parallelism() -> None:
    found = pipelines(advise(MODELS["vgg16"], cluster(), methods=["pipedream"]))
    counts = {mode: row.pipeline.microbatches for mode, row in found.items() if row.pipeline}
    assert counts == {"stash": 1, "flush": 15, "2bw": 30}  # 2BW must cover what is in flight


def test_the_first_stage_limits_the_learning_rate() -> None:
    layers = tuple(LayerProfile(f"l{at}", 10**8, 0.02, 0.01, 1000) for at in range(4))
    model, limit = ModelProfile(layers), delayed_rate(3, 0.9)
    facts = {"momentum": 0.9, "learning_rate": 1.0}
    low, high = (
        pipelines(advise(model, cluster(4), curvature=limit * part, **facts))["stash"]
        for part in (0.99, 1.01)
    )
    assert low.usable
    assert not high.usable
    assert f"stable only while lr * curvature < {limit:.3g}" in high.warnings[0]


def test_memory_is_a_limit_of_each_stage() -> None:
    """Half of what 15-1 needs of each worker, in which no copy of the model fits either."""
    free = pipelines(advise(MODELS["vgg16"], cluster()))["stash"].pipeline
    assert free is not None
    most = max(free.memory_bytes)
    tight = advise(MODELS["vgg16"], cluster(memory_bytes=most // 2), methods=["pipedream"])
    for row in pipelines(tight).values():
        assert row.pipeline is not None
        assert max(row.pipeline.memory_bytes) <= most // 2
    assert set(pipelines(tight)) == {"stash", "2bw", "flush"}
    assert not any(row.usable for row in tight.rows if row.pipeline is None)
    assert tight.best.pipeline is not None
    none = advise(MODELS["vgg16"], cluster(memory_bytes=10**6), methods=["pipedream"])
    assert not pipelines(none)
    assert "no partition on 16 workers fits" in none.notes[0]


@pytest.mark.parametrize(
    ("model", "made", "reason"),
    [
        (MODELS["vgg16"], cluster(1), "there is one worker"),
        (MODELS["vgg16"], cluster(2, speeds=(1.0, 0.5)), "workers of one speed"),
        (
            ModelProfile(tuple(LayerProfile(f"l{at}", 10**8, 0.01) for at in range(4))),
            cluster(4),
            "has no activation_bytes",
        ),
    ],
)
def test_no_pipeline_is_said_why(model: ModelProfile, made: Cluster, reason: str) -> None:
    advice = advise(model, made)
    assert not pipelines(advice)
    assert reason in advice.notes[0]
    assert json.loads(json.dumps(advice.to_json()))["notes"] == list(advice.notes)


def test_other_methods_alone_leave_it_out() -> None:
    advice = advise(MODELS["vgg16"], cluster(), methods=["pipe-sgd"])
    assert not pipelines(advice)
    assert not advice.notes


def test_machines_of_several_workers_and_slow_ones() -> None:
    network = Network(Link.of(1.25e8, 3e-5), per_node=4, inside=Link.of(1e10, 1e-5))
    found = pipelines(advise(MODELS["vgg16"], Cluster(16, network)))
    assert found
    slow, fast = (
        pipelines(advise(MODELS["vgg16"], cluster(bandwidth=bandwidth, speeds=(speed,) * 16)))
        for speed, bandwidth in ((0.5, 0.625e9), (1.0, 1.25e9))
    )
    assert slow["stash"].time.total_s == pytest.approx(2 * fast["stash"].time.total_s, rel=1e-3)
    for row in (*slow.values(), *found.values()):
        assert row.time.limit_s <= row.time.total_s * (1 + 1e-12)
        assert math.isfinite(row.time.comm_s)
