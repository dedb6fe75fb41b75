"""What is in flight goes on in other buckets, and from states of an earlier hvd_pipe."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import of_case
from workers_keras_mending import observed
from workers_keras_states import EARLIER_METHODS, LAYOUTS


def ranks_of(case: str) -> list[dict[str, Any]]:
    return of_case(observed(), case)


@pytest.mark.parametrize("name", EARLIER_METHODS)
def test_states_of_an_earlier_version_load(name: str) -> None:
    """With int8, another processor may round a value to the next level."""
    exactness = 1e-4 if "int8" in name else 1e-10
    for found in ranks_of(f"earlier {name}"):
        np.testing.assert_allclose(found["weights"], found["wanted"], rtol=0, atol=exactness)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_pending_gradient_goes_on_in_other_buckets(name: str) -> None:
    """It was restored by bucket: with other buckets it was lost, and zeros were applied."""
    for found in ranks_of(f"layout {name}"):
        np.testing.assert_allclose(found["resumed"], found["whole"], rtol=0, atol=1e-12)


def test_a_pending_gradient_reaches_its_own_variables() -> None:
    """Buckets of equal sizes in other groups sent gradients to other variables."""
    for found in ranks_of("equal sizes"):
        np.testing.assert_array_equal(found["weights"][:, 0], [-1.5, -3.0, -4.5, -6.0])


@pytest.mark.parametrize("strategy", ["pipe-sgd", "cocod:period=2"])
def test_states_of_bfloat16_are_read(strategy: str) -> None:
    """NumPy's files do not know bfloat16, and what was read could not be assigned."""
    for found in ranks_of(f"bfloat16 {strategy}"):
        np.testing.assert_array_equal(found["weight"], -3.0)


def test_momenta_are_averaged_once() -> None:
    """Keras' list of all slots was taken for one of momenta, where layers have equal shapes."""
    first, second = ranks_of("momenta")
    assert first["momenta"] == first["unlike"] == 8
    assert np.isfinite(first["weights"]).all()
    np.testing.assert_array_equal(first["weights"], second["weights"])


def test_a_state_of_another_rule_leaves_nothing_behind() -> None:
    """An anchor was taken for an outer model, and its momentum for one of another sign."""
    for found in ranks_of("other rules"):
        loaded = [name for name in found if name.endswith("loaded")]
        assert len(loaded) == 3
        for name in loaded:
            np.testing.assert_array_equal(
                found[name], found[name.replace("loaded", "fresh")], err_msg=name
            )


def test_a_class_is_made_once_and_keeps_no_model() -> None:
    """Each optimizer had a class of its own, which held ``groups`` and so the model for ever."""
    for found in ranks_of("classes"):
        assert found == {"same": True, "other": False, "kept": 0}
