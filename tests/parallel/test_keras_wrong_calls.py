"""What users get wrong with Keras is told with the rule and the way out."""

from __future__ import annotations

import re

import pytest
from ranks import once, run_ranks
from workers_keras_wrong_calls import TABLE, Wrong, mistakes

told = once(lambda: run_ranks(1, mistakes)[0])


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.what)
def test_a_mistake_is_explained(row: Wrong) -> None:
    found = told()[row.what]
    assert found is not None, "nothing was raised"
    kind, text = found
    assert kind == row.kind.__name__, text
    assert re.search(row.words, text, re.DOTALL), text
