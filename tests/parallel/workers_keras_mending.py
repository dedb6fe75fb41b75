"""The cases of several test files of Keras in one job, as launching costs seconds."""

from __future__ import annotations

import workers_keras_local
import workers_keras_states
import workers_keras_tapes
from cases import Raised, run_cases
from ranks import once, run_ranks
from workers_keras_features import Found

import hvd_pipe.tensorflow.keras as hvd

N = 2


def observations() -> dict[str, Found | Raised]:
    hvd.init()
    modules = (workers_keras_local, workers_keras_states, workers_keras_tapes)
    cases = {name: call for module in modules for name, call in module.CASES.items()}
    return run_cases({name: lambda call=call: call[0](*call[1:]) for name, call in cases.items()})


observed = once(lambda: run_ranks(N, observations, timeout=290))
