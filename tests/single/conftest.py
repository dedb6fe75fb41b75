"""For tests in one process: Keras starts each module with single precision."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def single_precision() -> Iterator[None]:
    """Undo, for a module's tests, what reference models ask of Keras when they are imported."""
    keras = sys.modules.get("keras")
    if keras is None:
        yield
        return
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])
