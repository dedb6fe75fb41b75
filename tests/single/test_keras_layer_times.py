"""Times of a Keras model's layers: whose they are, how they hang together, and the command."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hvd_pipe.planning.profile import ModelProfile

keras = pytest.importorskip("keras")
np = pytest.importorskip("numpy")
tf = pytest.importorskip("tensorflow")

from hvd_pipe.tensorflow import layer_times  # noqa: E402
from hvd_pipe.tensorflow.layer_times import measure_profile  # noqa: E402

pytestmark = pytest.mark.slow

layers = keras.layers
SLEEP = 0.05


class Slow(layers.Layer):  # type: ignore[misc]
    """Sleeps in forward, and three times as long in backward."""

    def call(self, x: Any) -> Any:
        def wait(seconds: float, x: Any) -> Any:
            def sleep(x: Any) -> Any:
                time.sleep(seconds)
                return x

            found = tf.numpy_function(sleep, [x], x.dtype)
            found.set_shape(x.shape)
            return found

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def through(x: Any) -> Any:
            return wait(SLEEP, x), lambda g: wait(3 * SLEEP, g)

        return through(x)

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


def residual() -> Any:
    """Two inputs, a nested model, a layer that is called twice, and a skip connection."""
    parts = [layers.Dense(4, name="wide"), layers.ReLU(name="relu")]
    block = keras.Sequential(parts, name="block")
    shared = layers.Dense(4, name="shared")
    words = keras.Input((3,), dtype="int32", name="words")
    numbers = keras.Input((4,), name="numbers")
    x = layers.Embedding(10, 4, name="table")(words)
    x = layers.Flatten(name="flat")(x)
    x = layers.Dense(4, name="narrow")(x)
    y = shared(layers.BatchNormalization(name="norm")(numbers))
    x = layers.Add(name="add")([x, shared(block(x)), y])
    return keras.Model([words, numbers], layers.Dense(1, name="out")(x), name="residual")


def residual_inputs(batch: int = 6) -> list[Any]:
    return [tf.ones((batch, 3), tf.int32), tf.random.normal((batch, 4))]


def bytes_of(weights: Any) -> int:
    return sum(int(np.prod(each.shape)) * 4 for each in weights)


def test_a_chain() -> None:
    model = keras.Sequential(
        [layers.Input((8, 8, 1)), layers.Conv2D(3, 3, name="conv"), layers.Flatten(name="flat"),
         layers.Dense(5, name="fc")]
    )  # fmt: skip
    profile = measure_profile(model, [tf.ones((7, 8, 8, 1))], steps=3, skip=1)
    assert [layer.name for layer in profile.layers] == ["conv", "flat", "fc", "(loss)"]
    assert [layer.gradient_bytes for layer in profile.layers] == [
        bytes_of(model.layers[0].trainable_weights),
        0,
        bytes_of(model.layers[2].trainable_weights),
        0,
    ]
    outputs = [4 * 7 * 6 * 6 * 3, 4 * 7 * 6 * 6 * 3, 4 * 7 * 5, 4]
    assert [layer.activation_bytes for layer in profile.layers] == outputs
    assert profile.layers[0].description == "Conv2D (7, 6, 6, 3)"
    assert profile.edges is None
    assert profile.batch == 7
    assert profile.name == model.name
    assert profile.update_s == 0.0
    assert all(each.forward_s > 0 and each.backward_s >= 0 for each in profile.layers)


def test_a_graph() -> None:
    model = residual()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1), "mse")
    before = [np.array(each) for each in model.variables]
    profile = measure_profile(model, residual_inputs(), steps=2, skip=0)
    assert all(map(np.array_equal, before, model.variables))
    assert profile.update_s > 0
    assert int(model.optimizer.iterations) == 0
    names = [layer.name for layer in profile.layers]
    assert names[-1] == "(loss)"
    assert set(names) == {
        "table", "flat", "narrow", "norm", "shared", "shared#2", "block/wide", "block/relu", "add",
        "out", "(loss)",
    }  # fmt: skip
    assert profile.edges is not None
    used = {name: {a for a, b in profile.edges if b == name} for name in names}
    assert used["block/wide"] == {"narrow"}
    assert {"narrow"} < used["add"]  # past the block
    assert used["add"] == {"narrow", "shared", "shared#2"}
    assert used["table"] == used["norm"] == set()
    assert used["(loss)"] == {"out"}
    assert int(profile.gradient_bytes().sum()) == bytes_of(model.trainable_weights)
    sizes = {layer.name: layer.gradient_bytes for layer in profile.layers}
    assert (sizes["shared"], sizes["shared#2"]) == (4 * (16 + 4), 0)  # whole at the first call
    assert sizes["table"] == 4 * 40
    assert all(each.forward_s > 0 and each.backward_s >= 0 for each in profile.layers)


def test_whose_the_time_is() -> None:
    """Sleeps are a lower bound for their layer, however busy the machine is.

    Backward does not come to what no weight is behind of.
    """
    model = keras.Sequential(
        [layers.Input((2,)), Slow(name="early"), layers.Dense(3, name="first"), Slow(name="slow"),
         layers.Dense(3, name="last")]
    )  # fmt: skip
    start = time.perf_counter()
    profile = measure_profile(model, [tf.ones((2, 2))], steps=5, skip=1)
    whole = time.perf_counter() - start
    assert profile.layers[0].name == "early"
    assert profile.layers[0].backward_s == 0.0
    (slow,) = (layer for layer in profile.layers if layer.name == "slow")
    assert slow.forward_s + slow.backward_s >= 2 * SLEEP
    # A step takes no more than all of them together, and no less than its sleeps.
    assert 3 * SLEEP <= profile.forward_s + profile.backward_s < whole
    assert slow.forward_s > 0
    assert slow.backward_s > 0


class Own(keras.Model):  # type: ignore[misc]
    """Subclassed, of layers alone; its bias is nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers.Dense(4, name="first"), layers.Dense(2, name="second")
        self.bias = self.add_weight(shape=(2,), name="bias")

    def call(self, x: Any) -> Any:
        return self.second(self.first(x)) + self.first(x)[:, :2]


class Opaque(Own):
    def call(self, x: Any) -> Any:
        return tf.raw_ops.Tanh(x=self.first(x))


def test_a_subclassed_model_of_layers() -> None:
    profile = measure_profile(Own(), [tf.ones((3, 5))], steps=1, skip=0)
    names = [layer.name for layer in profile.layers]
    assert names[0] == "(unused)"
    assert {"first", "first#2", "second"} < set(names)
    sizes = {layer.name: layer.gradient_bytes for layer in profile.layers}
    assert (sizes["(unused)"], sizes["first"], sizes["second"]) == (8, 4 * 24, 4 * 10)


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (Opaque, {}, r"Opaque cannot be told apart.* write it as keras.Model\(inputs, outputs\)"),
        (lambda: keras.Sequential([layers.ReLU()]), {}, "has no weight to train"),
        (Own, {"steps": 0}, "steps must be at least 1"),
        (Own, {"loss": lambda output: output}, r"one number with a gradient, got a \[3, 2\]"),
        (Own, {"loss": lambda output: tf.constant(1)}, "tensor of int32"),
    ],
)
def test_what_cannot_be_measured(make: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        measure_profile(make(), [tf.ones((3, 5))], **options)


def test_examples() -> None:
    result = doctest.testmod(layer_times)
    assert result.failed == 0 < result.attempted


NETS = """
import keras
from keras import layers

def known():
    return keras.Sequential([layers.Input((8,)), layers.Dense(16), layers.Dense(4)], name="known")

def unknown():
    return keras.Sequential([layers.Dense(16), layers.Dense(4)])

def open_sizes():
    x = keras.Input((None, 3))
    return keras.Model(x, layers.Dense(2)(x))

def words():
    x = keras.Input((5,), dtype="int32")
    return keras.Model(x, layers.Embedding(9, 4)(x))

def loss(output):
    return keras.ops.mean(output ** 2)

def number():
    return 3
"""


INVOKE = """
import json, sys
from click.testing import CliRunner
from hvd_pipe.cli.main import main

results = []
for command in json.loads(sys.argv[1]):
    run = CliRunner().invoke(main, command.split(), prog_name="hvd-pipe")
    results.append((run.exit_code, run.stdout, run.stderr))
assert "torch" not in sys.modules
open("results.json", "w").write(json.dumps(results))
"""


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    commands = [
        "profile nets.py:known --steps 2",
        "profile nets.py:unknown --input 5,8 --loss nets.py:loss --steps 2 --json",
        "profile nets.py:words --steps 1 --device cpu -o w.json",
        "profile nets.py:unknown",
        "profile nets.py:open_sizes",
        "profile nets.py:known --input 5,9",
        "profile nets.py:known --input 5,8 --input 5,8",
        "profile nets.py:known --device cuda:7",
        "profile nets.py:number",
    ]
    # In one process, as importing TensorFlow takes seconds.
    run = subprocess.run(
        [sys.executable, "-c", INVOKE, json.dumps(commands)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert run.returncode == 0, run.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    good, wrong = results[:3], results[3:]
    assert [code for code, _, _ in good] == [0] * 3, good
    profile = ModelProfile.load(tmp_path / "known.profile.json")
    assert (profile.name, profile.batch) == ("known", 32)
    assert int(profile.gradient_bytes().sum()) == 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert "slowest layers" in good[0][1]
    document = json.loads(good[1][1])
    assert (document["batch"], document["profile"]["name"]) == (5, "unknown")
    assert ModelProfile.load(tmp_path / "w.json").layers[0].gradient_bytes == 4 * 36
    lines = [
        "Sequential does not know the shape of its input: say what it is fed, such as --input",
        "leaves open: say what it is fed, --input 32,?,3 with numbers for the question marks",
        "the model does not take --input 5,9: ValueError",
        "the model has 1 inputs, and 2 were given",
        "--device cuda:7: TensorFlow sees no such device here",
        "returned int, not a torch.nn.Module or a keras.Model",
    ]
    for (code, stdout, stderr), said in zip(wrong, lines, strict=True):
        assert code == 2, stderr
        assert said in " ".join(stderr.split())
        assert not stdout
        assert "Traceback" not in stderr
