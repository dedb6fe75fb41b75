"""CoCoD with fragments and within nodes: it goes on from any moment, and ranks decide alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
from keras_problem import make_model, weights_of
from keras_training import (
    Small,
    Trainer,
    assert_alike,
    assert_same,
    init_nodes,
    overflow_on_one_rank,
    small_model,
)
from on_ranks import gather, on_ranks

import hvd_pipe.tensorflow.keras as hvd

two = on_ranks(2, init=hvd.init)
on_nodes = on_ranks(4, init=init_nodes)

PERIOD, TOTAL = 6, 14
FRAGMENTED: dict[str, dict[str, Any]] = {
    "outer": {"strategy": f"cocod:period={PERIOD},fragments=3,outer=nesterov,outer_lr=0.4"},
    "int8": {
        "strategy": f"cocod:period={PERIOD},fragments=2,pull_back=0.5,anchor_momentum=0.5",
        "compression": hvd.Int8(chunk=16, error_feedback=True),
    },
}
WITHIN = f"cocod:period={PERIOD},fragments=2,within=node"

Arrays = dict[str, npt.NDArray[Any]]


def is_last() -> bool:
    return bool(hvd.rank() == hvd.size() - 1)


@pytest.mark.parametrize(
    "options",
    [
        *(pytest.param(options, id=name, marks=two) for name, options in FRAGMENTED.items()),
        pytest.param({"strategy": WITHIN}, id="within", marks=on_nodes),
    ],
)
def test_training_goes_on_from_every_moment_of_a_round(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Bit for bit, with all that is in flight, of whichever fragment."""
    whole, other = Trainer(**options), Trainer(**options)
    paths = {}
    for step in range(1, TOTAL + 1):
        whole.train(step - 1, step)
        if step <= PERIOD + 1:
            paths[step] = whole.saver.write(str(tmp_path / str(step)))
    wanted = whole.all()
    assert any("sent" in name for name in wanted)
    for step, path in paths.items():
        other.saver.read(path)
        other.train(step, TOTAL)
        assert_same(other.all(), wanted)


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


@two
def test_ranks_with_unlike_variables_are_told() -> None:
    """AutoGraph puts an error of a traced step into one of its own."""
    make = small_model if is_last() else make_model
    trainer = Trainer(make, strategy="cocod:period=4,fragments=2")
    told = r"(?s)RanksDisagreeError: ranks disagree on .*variables that are not local"
    with pytest.raises(Exception, match=told):
        trainer.train(0, 1)


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
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), strategy=strategy)
    optimizer.build([weight])
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
