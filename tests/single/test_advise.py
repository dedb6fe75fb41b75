"""Advice: what is recommended where, at what price, and what it says when nothing helps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from planning_cases import ALL, codecs, comm_models, profiles

from hvd_pipe.planning.advise import Advice, Row, advise
from hvd_pipe.planning.choice import candidates, fitted_buckets, predict
from hvd_pipe.planning.cluster import Cluster, Link, Network
from hvd_pipe.planning.comm import CodecCost, CommModel
from hvd_pipe.planning.methods import DEFAULT_BUCKET_BYTES, LocalSGD, delayed_rate, stable_rate
from hvd_pipe.planning.partition import partition
from hvd_pipe.planning.pipeline_plans import pipeline_cost
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.planning.stages import parse_replicas
from hvd_pipe.planning.timing import step_time
from hvd_pipe.strategy import CoCoD, MergedGradient, PipeSGD
from hvd_pipe.strategy import parse as parse_strategy

# Ten equal layers: 10 ms forward, 20 ms backward, 40 MB.
MODEL = ModelProfile(
    tuple(LayerProfile(f"l{i}", 4_000_000, 2e-3, 1e-3, 1_000_000) for i in range(10)), batch=32
)


def cluster(bandwidth: float, workers: int = 8, **rest: Any) -> Cluster:
    return Cluster(workers, Network(Link.of(bandwidth, latency=1e-5)), **rest)


def row(advice: Advice, strategy: str, codec: str = "none") -> Row:
    return next(r for r in advice.rows if (r.strategy, r.codec) == (strategy, codec))


@pytest.mark.parametrize(
    ("bandwidth", "best"),
    [  # a ring of 8 moves 70 MB a worker for 40 MB of gradients; c = 30 ms
        (1e11, "merged-gradient"),  # 0.7 ms
        (1e10, "merged-gradient"),  # 7 ms, behind backward
        (2.5e9, "pipe-sgd"),  # 28 ms
        (1e9, "cocod:period=3"),  # 70 ms
        (1e8, "cocod:period=24"),  # 701 ms
    ],
)
def test_what_is_best_where(bandwidth: float, best: str) -> None:
    advice = advise(MODEL, cluster(bandwidth))
    assert advice.best.strategy == best
    assert advice.best in advice.rows
    assert [r.time.total_s for r in advice.rows] == sorted(r.time.total_s for r in advice.rows)
    assert parse_strategy(advice.best.strategy)
    assert best in advice.reason
    assert not advice.warnings  # cocod hides what nothing else does


def test_the_table() -> None:
    advice = advise(MODEL, cluster(2.5e9), codecs=("none", "bf16"))
    copies = [r for r in advice.rows if r.pipeline is None]
    own = [(r.strategy, r.codec) for r in copies if not r.baseline]
    forward = "merged-gradient:overlap=forward"
    names = ("merged-gradient", forward, "pipe-sgd", "cocod:period=2")
    assert sorted(own) == sorted((name, codec) for name in names for codec in ("none", "bf16"))
    beside = {r.strategy for r in advice.rows if r.baseline}
    assert beside == {"merged-gradient:plan=wfbp", "merged-gradient:plan=single", "horovod"}
    pipe = row(advice, "pipe-sgd")
    assert pipe.time == step_time(PipeSGD(), MODEL, cluster(2.5e9).comm())
    assert pipe.samples_per_s == pytest.approx(8 * 32 / pipe.time.total_s)
    assert pipe.speedup == pytest.approx(8 * 30e-3 / pipe.time.total_s)
    assert pipe.memory_bytes == 4 * 40_000_000
    assert (pipe.staleness, pipe.identical, pipe.exact, pipe.usable) == (1, True, False, True)
    assert pipe.batches is None
    assert "30 ms of computation and 28.1 ms of communication a step (1 message)" in pipe.reason
    assert "all hidden: 100.0% of what its limit of 30 ms allows" in pipe.reason
    merged = row(advice, "merged-gradient", "bf16")
    assert (merged.exact, merged.compression) == (False, "hvd.Compression.bf16")
    assert row(advice, "merged-gradient").exact
    rounds = row(advice, "cocod:period=2")
    assert (rounds.staleness, rounds.identical) == (3, False)


def test_the_default_stays_where_nothing_exact_is_much_faster() -> None:
    forward = "merged-gradient:overlap=forward"
    exact = ["merged-gradient", forward]
    slow, quick = cluster(2.5e9), cluster(250e9)
    assert advise(MODEL, slow, exact).best.strategy == forward
    assert advise(MODEL, quick, exact, margin=0.05).best.strategy == "merged-gradient"
    assert advise(MODEL, slow, exact, margin=1.0).best.strategy == "merged-gradient"


@pytest.mark.parametrize(
    ("method", "staleness", "identical", "exact"),
    [
        ("conventional", 0, True, True),
        ("wfbp", 0, True, True),
        ("horovod", 0, True, True),
        ("merged-gradient:overlap=forward", 0, True, True),
        ("pipe-sgd:prediction=local", 1, False, False),
        ("pipe-sgd:prediction=previous", 1, True, False),
        ("wide-pipe-sgd:width=4", 3, True, False),
        ("local-sgd:period=4", 3, False, False),
        ("cocod:period=1", 1, False, False),
    ],
)
def test_what_an_update_applies(method: str, staleness: int, identical: bool, exact: bool) -> None:
    found = advise(MODEL, cluster(1e9), methods=[method]).best
    assert (found.staleness, found.identical, found.exact) == (staleness, identical, exact)


def test_an_exact_one_is_kept_unless_another_is_faster_by_more_than_the_margin() -> None:
    merged, pipe = (
        step_time(m, MODEL, cluster(2.5e9).comm()).total_s for m in (MergedGradient(), PipeSGD())
    )
    gain = merged / pipe - 1
    assert advise(MODEL, cluster(2.5e9), margin=gain * 0.99).best.strategy == "pipe-sgd"
    assert not pipelines(advise(MODEL, cluster(2.5e9), methods=["pipe-sgd"]))
    kept = advise(MODEL, cluster(2.5e9), margin=gain * 1.01)
    assert kept.best.strategy == "merged-gradient"
    assert "changes the mathematics" in kept.reason


def test_warns_when_nothing_hides_the_communication() -> None:
    advice = advise(MODEL, cluster(1e9), methods=["merged-gradient", "pipe-sgd"])
    (warning,) = advice.warnings
    assert warning.startswith("no strategy hides the communication: pipe-sgd leaves least, 40.")
    assert "compress" in warning


def test_instability() -> None:
    facts = {"learning_rate": 0.1, "curvature": 2.0, "momentum": 0.9}
    advice = advise(MODEL, cluster(2.5e9), methods=["merged-gradient", "pipe-sgd"], **facts)
    pipe = row(advice, "pipe-sgd")
    (warning,) = pipe.warnings
    assert "diverges: it is stable only while lr * curvature < 0.1 (momentum 0.9" in warning
    assert "0.1 * 2 = 0.2; take a learning rate below 0.05" in warning
    assert not pipe.usable
    assert advice.best.strategy == "merged-gradient"  # though it takes longer
    ahead = advise(MODEL, cluster(2.5e9), methods=["pipe-sgd:prediction=local"], **facts)
    assert not ahead.best.warnings


@pytest.mark.parametrize(
    ("facts", "parts"),
    [
        (
            {},
            ["< 1 without momentum, < 0.1 with 0.9 (synchronous SGD: 2, 3.8)", "give --momentum"],
        ),
        ({"momentum": 0.9}, ["< 0.1 (momentum 0.9; synchronous SGD: 3.8)", "38 times smaller"]),
        ({"momentum": 0.5, "learning_rate": 0.25}, ["6 times smaller", "a curvature below 2"]),
    ],
)
def test_stability_where_not_all_is_known(facts: dict[str, float], parts: list[str]) -> None:
    advice = advise(MODEL, cluster(2.5e9), **facts)
    (warning,) = row(advice, "pipe-sgd").warnings
    for part in parts:
        assert part in warning
    assert row(advice, "pipe-sgd").usable
    assert not row(advice, "merged-gradient").warnings


def test_memory_is_a_limit() -> None:
    """pipe-sgd needs 160 MB and 10 MB of activations; merged-gradient 120 MB."""
    methods = ["merged-gradient", "pipe-sgd", "cocod:period=2"]
    advice = advise(MODEL, cluster(2.5e9, memory_bytes=165_000_000), methods)
    assert advice.best.strategy == "merged-gradient"
    (warning, _) = sorted(row(advice, "pipe-sgd").warnings)
    assert warning == "needs 160 MB and 10 MB of activations, more than a worker's 165 MB"
    none = advise(MODEL, cluster(2.5e9, memory_bytes=1000))
    assert "no partition on 8 workers fits" in none.notes[0]
    assert none.reason.endswith("None is usable as it is: see its warnings.")


def test_unequal_workers_get_unequal_batches() -> None:
    unequal = cluster(1e9, workers=4, speeds=(1.0, 1.0, 1.0, 0.2))
    advice = advise(MODEL, unequal)
    rounds = next(r for r in advice.rows if r.strategy.startswith("cocod"))
    assert rounds.batches == (40, 40, 40, 8)
    assert sum(rounds.batches) == 4 * 32
    assert rounds.strategy == "cocod:period=2,weights=40/40/40/8"
    assert parse_strategy(rounds.strategy)
    # 40 of 32 samples at speed 1, and 8 of 32 at 0.2: 1.25 times a step of 30 ms.
    assert rounds.time.compute_s == pytest.approx(37.5e-3)
    merged = row(advice, "merged-gradient")
    assert merged.time.compute_s == pytest.approx(150e-3)
    (warning,) = merged.warnings
    assert "150 ms of computation where batches in proportion to speed take 37.5 ms" in warning
    assert "(40/40/40/8, with each loss scaled" in warning
    unknown = advise(replace(MODEL, batch=None), unequal)
    assert "weights=1/1/1/0.2" in unknown.best.strategy
    assert unknown.best.samples_per_s is None


def test_jitter_is_simulated() -> None:
    steady, shaken = advise(MODEL, cluster(2.5e9)), advise(MODEL, cluster(2.5e9, jitter=0.2))
    for name in ("merged-gradient", "pipe-sgd", "horovod"):
        assert row(shaken, name).time.total_s > row(steady, name).time.total_s


@given(profiles(), comm_models(), codecs())
def test_any_profile_on_any_network(
    profile: ModelProfile, comm: CommModel, codec: CodecCost
) -> None:
    network = Network(None, measured=comm, measured_workers=4)
    if not profile.gradient_bytes().size:
        with pytest.raises(ValueError, match="no layer with a gradient"):
            advise(profile, Cluster(4, network))
        return
    advice = advise(profile, Cluster(4, network), methods=ALL, codecs=[codec])
    assert len(advice.rows) >= len(ALL)
    assert not advice.best.baseline
    for one in advice.rows:
        assert one.time.limit_s <= one.time.total_s * (1 + 1e-12)
        assert one.reason
    text = json.dumps(advice.to_json())
    found = json.loads(text)
    assert found["schema"] == "hvd_pipe.advice/1"
    assert found["best"]["strategy"] == advice.best.strategy
    assert found["rows"][0]["time"]["exposed_s"] == advice.rows[0].time.exposed_s


def test_a_method_that_is_asked_for_is_no_baseline() -> None:
    advice = advise(MODEL, cluster(1e9), methods=["wfbp", "horovod"])
    (beside,) = (one for one in advice.rows if one.baseline)
    assert beside.strategy == "merged-gradient:plan=single"
    assert row(advice, "horovod").exact


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"methods": ["magic"]}, r"unknown method"),
        ({"codecs": []}, r"nothing to choose from"),
        ({"codecs": ["zip"]}, r"unknown codec 'zip': use one of 'none', 'fp16', 'bf16', 'int8'"),
        ({"margin": -1.0}, r"margin must be finite and at least 0, got -1"),
        ({"learning_rate": float("nan")}, r"learning_rate must be finite and at least 0"),
        ({"momentum": 1.0}, r"momentum must be from 0 to below 1, got 1"),
        ({"optimizer_ratio": -1.0}, r"bytes a byte of weights must be at least 0"),
        ({"methods": [CoCoD(weights=(1, 2))]}, r"2 weights, 8 workers"),
        ({"methods": [LocalSGD(), 3]}, r"a method is a string"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        advise(MODEL, cluster(1e9), **arguments)


def test_pipe_sgd_gets_the_buckets_that_hide_its_latencies() -> None:
    """16 buckets of 8 MB cost 16 latencies; larger ones have the whole step to travel in, too.

    What no size is given for is planned; a job under auto begins with the usual ones.
    """
    layers = tuple(LayerProfile(f"l{i}", 2**23, 2e-3, 1e-3) for i in range(16))
    model = ModelProfile(layers)  # c = 48 ms
    for latency, mib in ((1e-3, None), (4e-3, 16), (8e-3, 32), (20e-3, 64), (60e-3, 128)):
        net = CommModel.linear(latency, 0.0)
        assert candidates(model, net)[1] == PipeSGD()
        assert step_time(PipeSGD(), model, net).messages == 1
        pipe = fitted_buckets(PipeSGD(), model, net)
        assert pipe.bucket_bytes == (None if mib is None else mib * 2**20)
    # Where the bytes stick out, latencies of some permille are not worth an option.
    net = CommModel.linear(1e-6, 1e-8)
    assert fitted_buckets(PipeSGD(), model, net) == PipeSGD()
    usual = PipeSGD(bucket_bytes=DEFAULT_BUCKET_BYTES)
    assert predict(PipeSGD(), model, net).seconds == step_time(usual, model, net).total_s


def test_the_delay_counts_for_the_period() -> None:
    net = CommModel((0.0,), (0.0,), (1e-9,), delay=0.1)  # 40 ms + 100 ms, c = 30 ms
    *_, rounds = candidates(MODEL, net)
    assert rounds.period == 5


def test_what_diverges_comes_with_what_does_not() -> None:
    """CoCoD's replicas leave each other at momentum 0.9 where synchronous SGD is far from it."""
    facts = {"learning_rate": 0.1, "curvature": 4.0, "momentum": 0.9}
    advice = advise(MODEL, cluster(4e8), **facts)  # period 6
    rounds = [r for r in advice.rows if r.strategy.startswith("cocod")]
    assert [r.usable for r in rounds] == [False, True, True]
    assert "diverges" in rounds[0].warnings[0]
    pulled, parted = rounds[1:]
    assert pulled.strategy == "cocod:period=6,pull_back=0.6"
    assert parted.strategy == "cocod:period=6,fragments=6"
    assert advice.best == pulled
    assert row(advice, "pipe-sgd:prediction=local").usable


@pytest.mark.parametrize(("share", "usable"), [(0.74, True), (0.76, False)])
def test_fragments_keep_a_quarter_of_their_limit(share: float, usable: bool) -> None:
    """Curvature that couples fragments lowers it by up to an eighth: see `test_methods`."""
    limit = stable_rate(CoCoD(period=6, fragments=6), 0.9)
    facts = {"learning_rate": 0.1, "curvature": 10 * share * limit, "momentum": 0.9}
    advice = advise(MODEL, cluster(4e8), methods=["cocod:period=6,fragments=6"], **facts)
    assert row(advice, "cocod:period=6,fragments=6").usable == usable


DATA = Path(__file__).parent.parent / "data"
NAMES = ("vgg16", "alexnet", "resnet50", "gnmt")
MODELS = {name: ModelProfile.read(DATA / f"{name}.graph.txt") for name in NAMES}


def ethernet(workers: int = 16, bandwidth: float = 1.25e9, **rest: Any) -> Cluster:
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
    advice = advise(MODELS[name], ethernet())
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
    advice = advise(MODELS["resnet50"], ethernet())
    assert not pipelines(advice)
    assert "data parallelism is PipeDream's best partition here" in advice.notes[0]
    assert advice.best.strategy == "merged-gradient"


def test_a_row_is_what_its_plan_costs() -> None:
    """Samples a second: a pipeline's minibatch is one worker's batch."""
    model = replace(MODELS["vgg16"], batch=128)
    advice = advise(model, ethernet(), methods=["pipedream"])
    row = pipelines(advice)["stash"]
    assert row.pipeline is not None
    plan = partition(model, ethernet(), replicas=parse_replicas("15-1"))
    cost = pipeline_cost(plan, model, ethernet())
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
    advice = advise(ModelProfile(layers), ethernet(4), methods=["pipedream"])
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


def test_the_first_stage_limits_the_learning_rate() -> None:
    layers = tuple(LayerProfile(f"l{at}", 10**8, 0.02, 0.01, 1000) for at in range(4))
    model, limit = ModelProfile(layers), delayed_rate(3, 0.9)
    facts = {"momentum": 0.9, "learning_rate": 1.0}
    low, high = (
        pipelines(advise(model, ethernet(4), curvature=limit * part, **facts))["stash"]
        for part in (0.99, 1.01)
    )
    assert low.usable
    assert not high.usable
    assert f"stable only while lr * curvature < {limit:.3g}" in high.warnings[0]


def test_memory_is_a_limit_of_each_stage() -> None:
    """Half of what 15-1 needs of each worker, in which no copy of the model fits either."""
    free = pipelines(advise(MODELS["vgg16"], ethernet()))["stash"].pipeline
    assert free is not None
    most = max(free.memory_bytes)
    tight = advise(MODELS["vgg16"], ethernet(memory_bytes=most // 2), methods=["pipedream"])
    for row in pipelines(tight).values():
        assert row.pipeline is not None
        assert max(row.pipeline.memory_bytes) <= most // 2
    assert set(pipelines(tight)) == {"stash", "2bw", "flush"}
    assert not any(row.usable for row in tight.rows if row.pipeline is None)
    assert tight.best.pipeline is not None
    none = advise(MODELS["vgg16"], ethernet(memory_bytes=10**6), methods=["pipedream"])
    assert not pipelines(none)
    assert "no partition on 16 workers fits" in none.notes[0]


@pytest.mark.parametrize(
    ("model", "made", "reason"),
    [
        (MODELS["vgg16"], ethernet(1), "there is one worker"),
        (MODELS["vgg16"], ethernet(2, speeds=(1.0, 0.5)), "workers of one speed"),
        (
            ModelProfile(tuple(LayerProfile(f"l{at}", 10**8, 0.01) for at in range(4))),
            ethernet(4),
            "has no activation_bytes",
        ),
    ],
)
def test_no_pipeline_is_said_why(model: ModelProfile, made: Cluster, reason: str) -> None:
    advice = advise(model, made)
    assert not pipelines(advice)
    assert reason in advice.notes[0]
    assert json.loads(json.dumps(advice.to_json()))["notes"] == list(advice.notes)
