"""Keras checkpoints that earlier versions have written, as `test_saved` has those of PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import saved_keras
from on_ranks import on_ranks
from saved_problem import FIRST, assert_same, cases_of, unpacked

import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.tensorflow import pipedream

# nightly: codecs that keep no more than others do, Adam but for one, options but for one of each
# kind, other versions of weights, and what "first" loads as well
NIGHTLY = (
    "-(bf16|bf16-feedback|int8)-1-7$|(wfbp|sgd)-momentum-fp16-|(wfbp|sgd|4|local)-adam-|"
    "-(2bw|flush)-|warmup|prediction-local|average-momentum|weights|first .*-none-|"
    "own (merged|pipe).*-int8-feedback-1-7|(wfbp|sgd)-momentum-none-1-7-keras|4-momentum-none-3-7"
)


UNCODED = [case for case in FIRST if case.codec == "none"]
"""With a codec, b1f2cc3 gave all ranks the residuals of rank 0. `test_keras_states` has what
becomes of them now."""


@on_ranks(2, init=pipedream.init, framework="tensorflow")
@pytest.mark.parametrize(("archive", "case"), cases_of("keras", UNCODED, NIGHTLY))
def test_a_keras_run_goes_on(
    archive: Path, case: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    runs = saved_keras.SAVER.runs_from(unpacked(archive, tmp_path_factory))
    assert_same(runs[case](), archive, case, hvd.rank())
