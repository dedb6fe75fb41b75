"""Make the engine of a strategy, and switch to another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, assert_never

from horovod.torch.mpi_ops import Adasum

from hvd_pipe.planning.plan import Plan
from hvd_pipe.strategy import Auto, CoCoD, MergedGradient, Method, PipeSGD
from hvd_pipe.torch.strategies.adasum import AdasumEngine
from hvd_pipe.torch.strategies.base import Engine
from hvd_pipe.torch.strategies.cocod import CoCoDEngine
from hvd_pipe.torch.strategies.merged_gradient import MergedGradientEngine
from hvd_pipe.torch.strategies.pipe_sgd import PipeSGDEngine
from hvd_pipe.torch.strategies.settings import Settings, State

if TYPE_CHECKING:
    from hvd_pipe.torch.arguments import Checked


def make_engine(checked: Checked, owner: Callable[[], Any]) -> Engine:
    """Return the engine for arguments that all ranks have found good."""
    settings, strategy = dataclasses.replace(checked.settings, owner=owner), checked.strategy
    if settings.reduction.op == Adasum:
        return AdasumEngine(settings)
    if isinstance(strategy, Auto):
        return MergedGradientEngine(settings, MergedGradient(), None, strategy.steps)
    return _make(settings, strategy, checked.plan)


def switch(engine: Engine, strategy: Method) -> Engine:
    """Return an engine of another strategy, with nothing in flight; residuals go along."""
    settings = engine.settings
    plan = strategy.load_plan() if isinstance(strategy, MergedGradient) else None
    successor = _make(settings, strategy, plan)
    residuals = engine.state().tensors
    if isinstance(engine, MergedGradientEngine) and isinstance(successor, PipeSGDEngine):
        successor.load(State({"rounds": 0}, residuals))
    successor.held = engine.held
    return successor


def _make(settings: Settings, strategy: Method, plan: Plan | None) -> Engine:
    match strategy:
        case MergedGradient():
            if strategy.overlaps_forward and strategy.bucket_bytes is not None:
                # Their order comes from the steps that are watched.
                every = range(len(settings.names))
                plan = settings.index.first_plan(strategy, settings.groups, every)
                strategy = dataclasses.replace(strategy, plan=plan, bucket_bytes=None)
            return MergedGradientEngine(settings, strategy, plan)
        case PipeSGD():
            return PipeSGDEngine(settings, strategy)
        case CoCoD():
            return CoCoDEngine(settings, strategy)
    assert_never(strategy)
