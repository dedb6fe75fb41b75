"""What is in flight goes on in other buckets, from earlier states, and from those of rank 0."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
from keras_problem import weights_of
from keras_training import (
    METHODS,
    Small,
    Trainer,
    assert_alike,
    assert_same,
    init_nodes,
    left_of,
    overflow_on_one_rank,
    small_model,
)
from on_ranks import gather, on_ranks

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.tensorflow import elastic
from hvd_pipe.tensorflow.messages.reduction import RESIDUAL

two = on_ranks(2, init=hvd.init)
on_nodes = on_ranks(4, init=init_nodes)

EARLIER = Path(__file__).parent.parent / "data" / "keras_states.npz"
"""Of hvd_pipe at commit 5b68a74, by rank and method: variables and what is in flight after step 7
of `Trainer`, and the weights that it ended with after step 12."""

EARLIER_METHODS = [name for name in METHODS if "outer" not in name]  # that one came later

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "smaller buckets": ({}, {"strategy": "pipe-sgd:bucket_bytes=64"}),
    "a bucket of all": ({"strategy": "pipe-sgd:bucket_bytes=64"}, {}),
    "other groups": ({"groups": 2}, {"groups": 5}),
    "prediction": (
        {"strategy": "pipe-sgd:prediction=local"},
        {"strategy": "pipe-sgd:prediction=local,bucket_bytes=64"},
    ),
}


def built(weights: list[Any], rate: float = 1.0, **options: Any) -> Any:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate), **options)
    optimizer.build(weights)
    return optimizer


def ended(model: Small) -> Any:
    model.train(7, 12)
    model.optimizer.synchronize()
    return model.values()


@two
@pytest.mark.parametrize("name", EARLIER_METHODS)
def test_states_of_an_earlier_version_load(name: str) -> None:
    """With int8, another processor may round a value to the next level."""
    trainer = Trainer(**METHODS[name])
    trainer.optimizer.build(trainer.model.trainable_variables)
    prefix = f"{hvd.rank()}/{name}"
    with np.load(EARLIER) as file:
        for i, each in enumerate([*trainer.model.variables, *trainer.optimizer.variables]):
            each.assign(file[f"{prefix}/variable/{i}"])
        trainer.optimizer.hvd_pipe.deserialize(file[f"{prefix}/flight"].tobytes())
        wanted = file[f"{prefix}/ended"]
    trainer.train(7, 12)
    trainer.optimizer.synchronize()
    exactness = 1e-4 if "int8" in name else 1e-10
    np.testing.assert_allclose(weights_of(trainer.model), wanted, rtol=0, atol=exactness)


@two
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_pending_gradient_goes_on_in_other_buckets(name: str, tmp_path: Path) -> None:
    """It was restored by bucket: with other buckets it was lost, and zeros were applied."""
    whole, other = (Small(**{"strategy": "pipe-sgd", **options}) for options in LAYOUTS[name])
    whole.train(0, 7)
    other.saver.read(whole.saver.write(str(tmp_path / "own")))
    np.testing.assert_allclose(ended(other), ended(whole), rtol=0, atol=1e-12)


@two
def test_a_pending_gradient_reaches_its_own_variables() -> None:
    """Buckets of equal sizes in other groups sent gradients to other variables.

    Both have two buckets of four numbers.
    """
    weights = [keras.Variable(np.zeros(2), name=f"w{i}") for i in range(4)]
    first, second = weights[:2], weights[2:]
    gradients = [tf.ones(2, tf.float64) * (i + 1.0) * (hvd.rank() + 1) for i in range(4)]
    optimizer, other = (
        built(weights, strategy="pipe-sgd", groups=groups)
        for groups in ([first, second], [second, first])
    )
    optimizer.apply(gradients, weights)
    other.hvd_pipe.deserialize(optimizer.hvd_pipe.serialize())
    for each in weights:
        each.assign(each * 0)
    other.apply(gradients, weights)
    np.testing.assert_array_equal([each.numpy()[0] for each in weights], [-1.5, -3.0, -4.5, -6.0])


@two
@pytest.mark.parametrize("strategy", ["pipe-sgd", "cocod:period=2"])
def test_states_of_bfloat16_are_read(strategy: str) -> None:
    """NumPy's files do not know bfloat16, and what was read could not be assigned."""
    weight = keras.Variable(np.zeros(3), dtype="bfloat16", name="weight")
    gradient = tf.ones(3, tf.bfloat16) * float(hvd.rank() + 1)
    optimizer, other = (
        built([weight], 0.5, strategy=strategy, compression=hvd.Compression.bf16) for _ in range(2)
    )
    for _ in range(3):
        optimizer.apply([gradient], [weight])
    other.hvd_pipe.deserialize(optimizer.hvd_pipe.serialize())
    other.apply([gradient], [weight])
    other.synchronize()
    np.testing.assert_array_equal(np.array(weight, np.float32), -3.0)


@two
def test_momenta_are_averaged_once() -> None:
    """Keras' list of all slots was taken for one of momenta, where layers have equal shapes.

    An earlier version averaged some momenta twice, and left the states of that.
    """
    weights = [keras.Variable(np.ones((3, 3)), name=f"w{i}") for i in range(4)]

    def made() -> Any:
        plain = keras.optimizers.Adam(0.1)
        optimizer = hvd.DistributedOptimizer(plain, strategy="cocod:period=2,momentum=average")
        optimizer.build(weights)
        return optimizer

    def step(optimizer: Any, count: int) -> None:
        for number in range(count):
            gradient = tf.ones((3, 3), tf.float64) * (number + 1.0 + hvd.rank())
            optimizer.apply([gradient] * 4, weights)

    optimizer, other = made(), made()
    step(optimizer, 3)
    (session,) = optimizer._hvd_pipe
    momenta = [id(each.variable) for each in session.engine.settings.momenta]
    assert len(momenta) == len(set(momenta)) == 8
    states = optimizer._hvd_pipe.states()
    for kind in ("start", "sent"):
        states[0][f"momenta.{kind}.0"] = np.zeros(100)
    other._hvd_pipe.go_back(states)
    step(other, 3)
    other.synchronize()
    first, second = gather(np.array([each.numpy() for each in weights]))
    assert np.isfinite(first).all()
    np.testing.assert_array_equal(first, second)


RULES = {
    "pull-back": "cocod:period=2,pull_back=0.6,anchor_momentum=0.7",
    "outer": "cocod:period=2,outer=nesterov",
    "cocod": "cocod:period=2",
}


@two
@pytest.mark.parametrize(
    ("before", "after"), [("pull-back", "outer"), ("outer", "pull-back"), ("outer", "cocod")]
)
def test_a_state_of_another_rule_leaves_nothing_behind(before: str, after: str) -> None:
    """An anchor was taken for an outer model, and its momentum for one of another sign.

    So one optimizer has the state of the other rule, and one has none.
    """
    trained = Small(strategy=RULES[before])
    trained.train(0, 7)
    trained.optimizer.synchronize()
    fresh, loaded = (Small(strategy=RULES[after]) for _ in range(2))
    for other in (fresh, loaded):
        for variable, value in zip(other.weights, trained.weights, strict=True):
            variable.assign(value)
    loaded.optimizer.hvd_pipe.deserialize(trained.optimizer.hvd_pipe.serialize())
    np.testing.assert_array_equal(ended(loaded), ended(fresh))


@two
def test_a_class_is_made_once_and_keeps_no_model() -> None:
    """Each optimizer had a class of its own, which held ``groups`` and so the model for ever.

    Here optimizers come and go with their models, of a class that Keras has registered.
    """
    registered = keras.saving.register_keras_serializable("tests")
    cls = registered(type("Registered", (keras.optimizers.SGD,), {}))

    def made(strategy: str) -> tuple[type[Any], Any]:
        weight = keras.Variable(np.zeros(2), name="weight")
        optimizer = hvd.DistributedOptimizer(cls(1.0), strategy=strategy, groups=[[weight]])
        optimizer.apply([tf.ones(2, tf.float64)], [weight])
        return type(optimizer), weakref.ref(weight)

    optimizers = [made(strategy) for strategy in ("pipe-sgd", "pipe-sgd", "merged-gradient")]
    assert left_of([weight for _, weight in optimizers]) == 0
    (one, _), (same, _), (other, _) = optimizers
    assert one is same
    assert one is not other


INT8 = hvd.Int8(chunk=4, error_feedback=True)


def trained(strategy: str, compression: Any) -> tuple[Any, Any, Any]:
    """A weight after two steps, its optimizer, and the state that an elastic job has of them."""
    weight = keras.Variable(np.zeros(8), dtype="float32", name="weight")
    optimizer = built([weight], strategy=strategy, compression=compression)
    for number in range(2):
        values = np.linspace(1.0, 2.0 + number, 8) * (1 + hvd.rank())
        optimizer.apply([tf.constant(values, tf.float32)], [weight])
    return weight, optimizer, hvd_tf.elastic.TensorFlowState([weight, *optimizer.variables])


def lost(optimizer: Any) -> dict[str, Any]:
    (session,) = optimizer._hvd_pipe
    state = session.engine.state()
    return {name: array for name, array in state.items() if name.startswith(RESIDUAL)}


@two
@pytest.mark.parametrize("hosts_change", [True, False], ids=["hosts change", "a worker fails"])
def test_the_gradient_in_flight_becomes_that_of_all_or_of_rank_0(hosts_change: bool) -> None:
    """Hosts that change wait for it; a worker that fails leaves each rank with its own."""
    weight, optimizer, state = trained("pipe-sgd", hvd.Compression.none)
    first, last = (np.linspace(1.0, end, 8) for end in (2.0, 3.0))
    if hosts_change:
        elastic._finish(state)
    state.sync()
    optimizer.synchronize()
    expected = -1.5 * first - (1.5 if hosts_change else 1.0) * last
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-6)


@two
@pytest.mark.parametrize(
    "codec",
    # nightly: nothing is lost, or as with int8
    [
        pytest.param(INT8, id="int8"),
        pytest.param(hvd.Compression.fp16, id="fp16", marks=pytest.mark.nightly),
        pytest.param(hvd.BF16(error_feedback=True), id="bf16", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("strategy", ["merged-gradient", "pipe-sgd", "cocod:period=2"])
def test_rank_0s_file_on_all_ranks(strategy: str, codec: Any, tmp_path: Path) -> None:
    """Residuals of rank 0 were added on every rank to what it sent next."""
    weight, optimizer, _ = trained(strategy, codec)
    path = gather(str(tmp_path / "rank 0's"))[0]
    if hvd.rank() == 0:
        tf.train.Checkpoint(weight=weight.value, optimizer=optimizer).write(path)
    gather("written")
    before = lost(optimizer)
    weight, optimizer, _ = trained(strategy, codec)
    tf.train.Checkpoint(weight=weight.value, optimizer=optimizer).read(path)
    after = lost(optimizer)
    assert after.keys() == before.keys()
    assert bool(after) == (codec is not hvd.Compression.fp16)
    for name, array in after.items():
        np.testing.assert_array_equal(array, before[name] if hvd.rank() == 0 else 0.0)
    for number in range(4):
        values = np.linspace(1.0, 2.0 + number, 8) * (1 + hvd.rank())
        optimizer.apply([tf.constant(values, tf.float32)], [weight])
    optimizer.synchronize()
    assert_alike(weight.numpy())


@two
@pytest.mark.parametrize("strategy", ["merged-gradient", "pipe-sgd"])
def test_residuals_are_dropped_on_all_ranks(strategy: str) -> None:
    _, optimizer, state = trained(strategy, INT8)
    assert any(array.any() for array in lost(optimizer).values())
    state.sync()
    after = lost(optimizer)
    assert len(after) == 2
    assert not any(array.any() for array in after.values())


# In every moment of a round, in other fragments, and within nodes.

PERIOD, TOTAL = 6, 14
WITHIN = f"cocod:period={PERIOD},fragments=2,within=node"
CODED = {"compression": hvd.Int8(chunk=16, error_feedback=True)}
GOING_ON: dict[str, dict[str, Any]] = {
    "merged-gradient": CODED,
    "pipe-sgd": CODED,
    "pipe-sgd:prediction=local": CODED,
    "cocod:period=3,momentum=average": CODED,
    f"cocod:period={PERIOD},fragments=2,pull_back=0.5,anchor_momentum=0.5": CODED,
    f"cocod:period={PERIOD},fragments=2,outer=nesterov,outer_lr=0.4": {},
    WITHIN: {},
}

Arrays = dict[str, npt.NDArray[Any]]


def is_last() -> bool:
    return bool(hvd.rank() == hvd.size() - 1)


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=on_nodes if name == WITHIN else two) for name in GOING_ON],
)
def test_training_goes_on_from_every_moment_of_a_round(strategy: str, tmp_path: Path) -> None:
    """Bit for bit, with all that is in flight, also where it was read and written again.

    A plain optimizer reads it.
    """
    whole, between, other = (
        Trainer(small_model, strategy=strategy, **GOING_ON[strategy]) for _ in range(3)
    )
    paths = {}
    for step in range(1, TOTAL + 1):
        whole.train(step - 1, step)
        if step <= PERIOD + 1:
            paths[step] = whole.saver.write(str(tmp_path / str(step)))
    wanted = whole.all()
    assert strategy == "merged-gradient" or any("flight" in name for name in wanted)
    for step, path in paths.items():
        between.saver.read(path)
        other.saver.read(between.saver.write(str(tmp_path / "again")))
        other.train(step, TOTAL)
        assert_same(other.all(), wanted)
    model, plain = small_model(), keras.optimizers.SGD(0.05, momentum=0.9)
    plain.build(model.trainable_variables)
    tf.train.Checkpoint(model=model, optimizer=plain).read(paths[PERIOD])
    # Pipe-SGD's last gradient was in flight.
    assert int(plain.iterations) == PERIOD - strategy.startswith("pipe-sgd")


def engine_of(model: Small) -> Any:
    (session,) = model.optimizer._hvd_pipe
    return session.engine


def kept(model: Small) -> Arrays:
    """What goes from round to round, by variable."""
    arrays: Arrays = {}
    for part in engine_of(model)._parts:
        for kind in ("_anchor", "_velocity"):
            flats = getattr(part, kind)
            for index, value in (part.packing.unpack(flats) if flats else {}).items():
                arrays[f"{kind} {index}"] = value.numpy()
    return arrays


@two
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1), (1, 2)])
def test_a_model_in_other_fragments_keeps_its_anchors(
    before: int, after: int, tmp_path: Path
) -> None:
    """What was in flight of other fragments is dropped, and a round begins anew.

    Every fragment has an anchor, and another than the first is in flight.
    """
    one, other = (
        Small(strategy=f"cocod:period=4,outer=nesterov,outer_lr=0.4,fragments={count}")
        for count in (before, after)
    )
    one.train(0, 9)
    other.train(0, 9)
    other.saver.read(one.saver.write(str(tmp_path / "state")))
    assert len(kept(one)) == 12  # of six variables, in all fragments
    assert_same(kept(other), kept(one))
    np.testing.assert_array_equal(other.values(), one.values())
    assert not engine_of(other).is_ahead()
    assert int(engine_of(other)._local_steps) == 0
    other.train(9, TOTAL)
    assert engine_of(other).is_ahead()
    other.optimizer.synchronize()
    assert_alike(other.values())


@two
def test_more_fragments_than_variables_are_refused_on_every_rank() -> None:
    with pytest.raises(ValueError, match="give at most 6 fragments") as caught:
        Small(strategy="cocod:period=7,fragments=7").train(0, 1)
    first, second = gather(str(caught.value))
    assert first == second
    good = Small(strategy="cocod:period=6,fragments=6")
    good.train(0, 8)
    good.optimizer.synchronize()
    assert_alike(good.values())


@on_nodes
def test_a_rank_that_can_add_no_process_set_is_told_of_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_last():
        monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "0")
    with pytest.raises(hvd.HvdPipeError) as caught:
        Small(strategy=WITHIN)
    told = str(caught.value)
    if is_last():
        assert type(caught.value) is hvd.HvdPipeError
        assert told.startswith("within=")
    else:
        assert type(caught.value) is hvd.RanksDisagreeError
        assert told.startswith("rank 3 was given something wrong")
        assert 'hvd.init(process_sets="dynamic")' in told


@on_nodes
def test_nodes_are_of_all_ranks() -> None:
    ranks = hvd.add_process_set([0, 1, 2])
    plain = keras.optimizers.SGD(0.1)
    try:
        with pytest.raises(ValueError, match="within='node' makes process sets of its own"):
            hvd.DistributedOptimizer(plain, strategy="cocod:within=node", process_set=ranks)
    finally:
        hvd.remove_process_set(ranks)


@on_nodes
def test_an_overflow_on_one_rank_of_one_node_is_one_for_all() -> None:
    model = overflow_on_one_rank(WITHIN)
    scaler = model.optimizer
    assert float(scaler.dynamic_scale) == 2.0**14
    assert_alike(int(scaler.inner_optimizer.iterations))
    assert_alike(weights_of(model))


@on_nodes
def test_weights_are_as_exact_as_the_model() -> None:
    """Factors of a float64 mean were rounded to float32.

    Rank r's gradient is r + 1: in a step of all ranks, then in one of each node's.
    """
    shares = (3, 1, 1, 2)
    strategy = f"cocod:period=4,within=node,warmup_steps=1,weights={'/'.join(map(str, shares))}"
    weight = keras.Variable(np.zeros(2), name="weight")
    optimizer = built([weight], strategy=strategy)
    rows = []
    for _ in range(2):
        optimizer.apply([tf.ones(2, tf.float64) * (hvd.rank() + 1.0)], [weight])
        rows.append(weight.numpy()[0])
    optimizer.synchronize()
    gradients = np.arange(4) + 1.0
    everyone = np.average(gradients, weights=shares)
    nodes = [np.average(gradients[i : i + 2], weights=shares[i : i + 2]) for i in (0, 2)]
    ended = everyone + np.average(np.repeat(nodes, 2), weights=shares)
    wanted = [-everyone, -everyone - nodes[hvd.rank() // 2], -ended]
    np.testing.assert_allclose([*rows, weight.numpy()[0]], wanted, rtol=1e-14)


@on_nodes
def test_nodes_find_each_other_again_after_horovods_end() -> None:
    """Its process sets end with it, and graphs that were traced hold their numbers."""
    ends = []
    for again in (False, True):
        trainer = Trainer(strategy=f"{WITHIN},warmup_steps=2")
        trainer.train(0, 7)
        if again:
            gather("trained")  # a node may be ahead of the other, whose process set would be gone
            hvd.shutdown()
            hvd.init(process_sets="dynamic")
        trainer.train(7, TOTAL)
        ends.append(trainer.all())
    assert_same(ends[1], ends[0])
