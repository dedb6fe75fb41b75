"""What `import hvd_pipe.tensorflow` refuses and patches, and files of it without hvd_pipe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import keras
import pytest
import tensorflow as tf

from hvd_pipe.runtime.keras_version import check_keras
from hvd_pipe.tensorflow.keras import DistributedOptimizer


def test_keras_3_on_tensorflow_is_fine() -> None:
    check_keras()


@pytest.mark.parametrize("version", ["2.15.0", "2.13.1rc0"])
def test_keras_2_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow 2.15 and older, where ``keras`` is Keras 2."""
    monkeypatch.setattr(keras, "__version__", version)
    monkeypatch.setattr(tf, "__version__", "2.15.1")
    with pytest.raises(ImportError) as refused:
        check_keras()
    text = str(refused.value)
    assert f"this is Keras {version} with TensorFlow 2.15.1" in text
    assert "TensorFlow 2.16 and newer" in text
    assert "pip install" in text
    assert "horovod.tensorflow" in text


def test_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ImportError, match="KERAS_BACKEND is 'jax': set KERAS_BACKEND=tensorflow"):
        check_keras()


def test_an_optimizer_of_the_legacy_package_is_refused() -> None:
    """TF_USE_LEGACY_KERAS makes ``tf.keras`` the package tf_keras, beside Keras 3.

    Tapes work with that, so that importing is no mistake yet.
    """
    legacy = type("Adam", (), {"__module__": "tf_keras.src.optimizers.adam"})()
    with pytest.raises(TypeError, match=r"got tf_keras\.src\.optimizers\.adam\.Adam.*: unset it"):
        DistributedOptimizer(legacy)


def run(script: str, *arguments: str) -> str:
    """Return what a new interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SAVE = """
import os, sys
import keras, numpy as np
import hvd_pipe
import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.tensorflow.keras_patches import PATCHES

def now(): return [getattr(each.owner, each.name) for each in PATCHES]

before, ours = now(), os.path.dirname(hvd_pipe.__file__)
assert not any(each.__code__.co_filename.startswith(ours) for each in before)
hvd.init()
assert len(before) == 6 and not set(before) & set(now())
assert all(each.reason for each in PATCHES)
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), strategy="pipe-sgd")
model.compile(optimizer, keras.losses.MeanSquaredError())
x = np.arange(64.0).reshape(16, 4) / 64
model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)
model.save(sys.argv[1])
print(int(model.optimizer.iterations), model.optimizer.variables[2].numpy().sum())
"""
LOAD = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("hvd_pipe", "horovod"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import keras, numpy as np

model = keras.models.load_model(sys.argv[1])
print(int(model.optimizer.iterations), model.optimizer.variables[2].numpy().sum())
x = np.arange(64.0).reshape(16, 4) / 64
model.fit(x, x[:, :1], batch_size=4, verbose=0)
assert int(model.optimizer.iterations) == 12
assert type(model.optimizer) is keras.optimizers.Adam
assert not any(name.startswith(("hvd_pipe", "horovod")) for name in sys.modules)
"""


@pytest.mark.slow
def test_importing_patches_nothing_and_a_file_loads_without_hvd_pipe(tmp_path: Path) -> None:
    """`hvd.init()` patches Keras, or the first optimizer or tape where scripts call Horovod's."""
    file = str(tmp_path / "model.keras")
    saved = run(SAVE, file)
    assert saved == run(LOAD, file)
    assert saved.startswith("8 ")
