"""A file that was saved with hvd_pipe loads where neither it nor Horovod is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("tensorflow")

SAVE = """
import sys
import keras, numpy as np
import hvd_pipe.tensorflow.keras as hvd

hvd.init()
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


def test_it_loads_without_hvd_pipe(tmp_path: Path) -> None:
    file = str(tmp_path / "model.keras")
    said = [
        subprocess.run(
            [sys.executable, "-c", script, file],
            capture_output=True,
            text=True,
            timeout=200,
            check=True,
        ).stdout
        for script in (SAVE, LOAD)
    ]
    assert said[0] == said[1]
    assert said[0].startswith("8 ")
