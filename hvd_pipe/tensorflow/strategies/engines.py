"""Which engine carries which strategy out."""

from __future__ import annotations

from hvd_pipe.strategy import MergedGradient, Method, PipeSGD
from hvd_pipe.tensorflow.strategies.cocod import CoCoDEngine
from hvd_pipe.tensorflow.strategies.engine import Engine, Settings
from hvd_pipe.tensorflow.strategies.merged_gradient import MergedGradientEngine
from hvd_pipe.tensorflow.strategies.pipe_sgd import PipeSGDEngine

__all__ = ["make_engine"]


def make_engine(settings: Settings, strategy: Method) -> Engine:
    """Return the engine for arguments that all ranks have found good."""
    if isinstance(strategy, MergedGradient):
        return MergedGradientEngine(settings, strategy, strategy.load_plan())
    if isinstance(strategy, PipeSGD):
        return PipeSGDEngine(settings, strategy)
    return CoCoDEngine(settings, strategy)
