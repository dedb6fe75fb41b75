"""Keras models as calls of layers, as blocks, and as the stages of a pipeline."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.tensorflow.layer_times import LOSS, measure_profile
from hvd_pipe.tensorflow.pipedream.graph import (
    blocks_of,
    cut,
    graph_of,
    merged,
    shapes_of,
)

layers = keras.layers


def branching() -> Any:
    """Two inputs, a nested model, a shared layer, a skip connection, two outputs."""
    a, b = layers.Input((4,), name="a"), layers.Input((3,), name="b")
    inner = keras.Sequential(
        [layers.Input((4,)), layers.Dense(5, name="one"), layers.Dropout(0.5, name="two")],
        name="inner",
    )
    shared = layers.Dense(4, activation="tanh", name="shared")
    first = layers.Concatenate(name="join")([inner(a), b])
    second = shared(layers.Dense(4, name="narrow")(first))
    third = layers.Add(name="sum")([shared(second), a])
    fourth = layers.Dense(2, name="head")(third)
    return keras.Model([a, b], [fourth, layers.Dense(1, name="other")(first)])


def feed(model: Any, samples: int = 6) -> list[Any]:
    generator = np.random.default_rng(0)
    return [
        tf.constant(generator.standard_normal((samples, *each.shape[1:])), "float32")
        for each in model.inputs
    ]


def run(parts: list[Any], x: list[Any], training: bool = False) -> list[Any]:
    """All stages, one after the other, with nothing but what crosses each cut."""
    values = x
    for part in parts:
        for spec, value in zip(part.inputs, values, strict=False):
            spec.check(value.shape, value.dtype.name, "here")
        values = part.run(values, training)
    return values


def test_calls_have_the_names_and_the_order_of_the_profiler() -> None:
    model = branching()
    profile = measure_profile(
        model, feed(model), lambda out: tf.reduce_mean(out[0]) + tf.reduce_mean(out[1]), steps=1
    )
    names = [call.name for call in graph_of(model).calls]
    assert names == [layer.name for layer in profile.layers if layer.name != LOSS]
    assert "inner/one" in names
    assert "shared#2" in names


def sequential() -> Any:
    return keras.Sequential(
        [layers.Input((2,)), layers.Dense(2, name="a"), layers.Dense(1, name="b")]
    )


def tied() -> Any:
    twice = layers.Dense(2, name="twice")
    x = layers.Input((2,))
    return keras.Model(x, layers.Dense(1, name="end")(twice(layers.ReLU(name="relu")(twice(x)))))


def relu_twice() -> Any:
    relu, x = layers.ReLU(name="relu"), layers.Input((3,))
    return keras.Model(x, relu(layers.Dense(2, name="b")(relu(layers.Dense(2, name="a")(x)))))


def masked() -> Any:
    words = layers.Input((7,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True, name="words")(words)
    return keras.Model(words, layers.Dense(2, name="head")(layers.LSTM(3, name="lstm")(x)))


class OwnCall(keras.Model):
    def __init__(self) -> None:
        super().__init__(name="own")
        self.dense = layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.dense(x)


def nested() -> Any:
    x = layers.Input((3,))
    return keras.Model(x, layers.Dense(1, name="end")(OwnCall()(x)))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        # what has no variables may be called in two stages, what shares weights may not
        (relu_twice, ["a", "relu", "b", "relu#2"]),
        (tied, ["twice .. twice#2", "end"]),
        # masks ride on tensors, not in them: no message would have them
        (masked, ["words .. lstm", "head"]),
        (nested, ["own", "end"]),
    ],
)
def test_blocks_are_what_must_stay_together(make: Any, names: list[str]) -> None:
    model = make()
    graph = graph_of(model)
    assert list(blocks_of(graph)) == names
    x = tf.constant([[1, 2, 0, 0, 0, 0, 0], [3, 4, 5, 6, 7, 8, 1]][:2])
    inputs = [x if make is masked else tf.cast(x[:, : model.inputs[0].shape[1]], tf.float32)]
    parts = cut(graph, [[name] for name in names], shapes_of(graph, inputs))
    np.testing.assert_allclose(run(parts, inputs)[0], model(inputs[0]), rtol=1e-6)


@settings(max_examples=25)
@given(st.data())
def test_any_cut_of_a_random_model_computes_what_the_model_does(data: st.DataObject) -> None:
    """Random graphs of layers, cut at random places, values and gradients."""
    keras.utils.set_random_seed(data.draw(st.integers(0, 99)))
    x = layers.Input((3,))
    values = [x]
    for number in range(data.draw(st.integers(2, 7))):
        kind = data.draw(st.sampled_from(["dense", "add", "norm", "relu"]))
        pick = st.integers(0, len(values) - 1)
        one, other = values[data.draw(pick)], values[data.draw(pick)]
        made = {
            "dense": lambda n=number, a=one: layers.Dense(3, "tanh", name=f"dense{n}")(a),
            "add": lambda n=number, a=one, b=other: layers.Add(name=f"add{n}")([a, b]),
            "norm": lambda n=number, a=one: layers.LayerNormalization(name=f"norm{n}")(a),
            "relu": lambda n=number, a=one: layers.ReLU(name=f"relu{n}")(a),
        }[kind]()
        values.append(made)
    model = keras.Model(x, [layers.Dense(1, name="end")(values[-1]), values[-1]])
    graph = graph_of(model)
    names = list(blocks_of(graph))
    count = data.draw(st.integers(1, len(names)))
    ends = sorted(data.draw(st.permutations(range(1, len(names))))[: count - 1])
    stages = [names[i:j] for i, j in zip([0, *ends], [*ends, len(names)], strict=True)]
    inputs = feed(model)
    parts = cut(graph, stages, shapes_of(graph, inputs))
    with tf.GradientTape(persistent=True) as tape:
        expected, actual = model(inputs[0]), run(parts, inputs)
        losses = [sum(tf.reduce_sum(each * each) for each in out) for out in (expected, actual)]
    for a, b in zip(expected, actual, strict=True):
        assert np.array_equal(a, b)
    weights = [v.value for v in model.trainable_variables]
    for a, b in zip(*(tape.gradient(loss, weights) for loss in losses), strict=True):
        assert np.allclose(a, b, atol=1e-5)
    assert [v.path for part in parts for v in part.variables]
    assert {id(v) for part in parts for v in part.variables} == {id(v) for v in model.variables}


def test_a_value_is_passed_on_until_its_last_use() -> None:
    model = branching()
    graph = graph_of(model)
    names = list(blocks_of(graph))
    inputs = feed(model)
    parts = cut(graph, [[name] for name in names], shapes_of(graph, inputs))
    for out, expected in zip(run(parts, inputs), model(inputs), strict=True):
        assert np.array_equal(out, expected)
    for before, after in itertools.pairwise(parts):
        assert before.outputs == after.inputs
        assert [spec.name for spec in before.outputs] == [
            graph.values[number].name for number in after.takes
        ]
    crossing = {spec.name: spec for spec in parts[0].outputs}
    assert crossing["a"].gradient is False  # an input of the model, used by the sum
    assert crossing["inner/one"].gradient is True
    assert crossing["inner/one"].dynamic == (0,)
    assert crossing["inner/one"].shape == (6, 5)


def test_what_depends_on_no_trained_weight_gets_no_gradient() -> None:
    frozen = layers.Dense(3, name="frozen", trainable=False)
    model = keras.Sequential([layers.Input((2,)), frozen, layers.Dense(1, name="head")])
    graph = graph_of(model)
    first, _ = cut(graph, [["frozen"], ["head"]], shapes_of(graph, tf.ones((4, 2))))
    assert [spec.gradient for spec in first.outputs] == [False]


def test_merged_profiles_keep_the_sums() -> None:
    model = branching()
    graph = graph_of(model)
    blocks = blocks_of(graph)
    names = [call.name for call in graph.calls]
    single = [LayerProfile(name, 4 * i, 2.0**i, 3.0**i, 10**i) for i, name in enumerate(names)]
    end = LayerProfile(LOSS, 0, 0.5, 0.25, 8)
    edges = tuple(
        dict.fromkeys(
            (names[graph.values[number].made], call.name)
            for call in graph.calls
            for number in call.inputs
            if graph.values[number].made >= 0
        )
    )
    ends = tuple((names[graph.values[number].made], LOSS) for number in graph.outputs)
    whole = merged(ModelProfile((*single, end), (*edges, *ends)), graph, blocks)
    assert [layer.name for layer in whole.layers] == list(blocks)
    for what in ("forward_s", "backward_s", "gradient_bytes"):
        total = sum(getattr(layer, what) for layer in (*single, end))
        assert sum(getattr(layer, what) for layer in whole.layers) == pytest.approx(total)
    assert whole.edges is not None
    for name, layer in zip(blocks, whole.layers, strict=True):
        inside = {names[place] for place in blocks[name]}
        sources = {a for a, b in (*edges, *ends) if a in inside and b not in {*inside, LOSS}}
        to_loss = {a for a, b in ends if a in inside and name != list(blocks)[-1]}
        leaving = sources | to_loss
        assert layer.activation_bytes == sum(10 ** names.index(a) for a in leaving), name


def test_shapes_change_nothing() -> None:
    model = keras.Sequential(
        [layers.Input((2,)), layers.BatchNormalization(), layers.Dropout(0.5)]
    )
    before = [v.numpy() for v in model.variables]
    graph = graph_of(model)
    assert shapes_of(graph, tf.ones((3, 2))) == [(3, 2)] * 3
    assert all(np.array_equal(a, v.numpy()) for a, v in zip(before, model.variables, strict=True))


def test_inputs_by_name() -> None:
    model = branching()
    graph = graph_of(model)
    a, b = feed(model)
    for x in ([a, b], (a, b), {"b": b, "a": a}):
        assert all(map(np.array_equal, graph.feed(x), [a, b]))


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        (OwnCall, ValueError, "OwnCall has a call.. of its own.*keras.Model.inputs, outputs"),
        (lambda: keras.Sequential([layers.Dense(2)]), ValueError, "not built.*keras.Input"),
        (lambda: 3, TypeError, "keras.Model, got int"),
    ],
)
def test_models_that_cannot_be_cut(model: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        graph_of(model())


@pytest.mark.parametrize(
    ("model", "stages", "words"),
    [
        (sequential, [["a"], ["c"]], "stage 1 names the layer 'c'.* none of that name"),
        (sequential, [["a"]], "no stage has 'b'"),
        (sequential, [["a", "b"], ["b"]], "'b' is in stage 0 and again in stage 1"),
        (sequential, [["a", "b"], []], "stage 1 has no layer"),
        (sequential, [["b"], ["a"]], "'b' in stage 0 uses what 'a' in stage 1 makes"),
        (tied, [["twice", "relu"], ["twice#2", "end"]], "must be in one stage.*stages .0, 1."),
    ],
)
def test_stages_that_cannot_be(model: Any, stages: list[list[str]], words: str) -> None:
    graph = graph_of(model())
    with pytest.raises(ValueError, match=words):
        cut(graph, stages, shapes_of(graph, tf.ones((3, 2))))


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.ones((3, 4)), r"shape \[None, 2\], and a batch brings \[3, 4\]"),
        ([np.ones((3, 2))] * 2, "has 1 inputs .*holds 2"),
    ],
)
def test_inputs_that_are_not_the_models(x: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        graph_of(sequential()).feed(x)
