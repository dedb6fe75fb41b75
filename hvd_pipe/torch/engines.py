"""Which engine carries which strategy out."""

from __future__ import annotations

import dataclasses

from horovod.torch.mpi_ops import Adasum

from hvd_pipe.strategy import MergedGradient, PipeSGD
from hvd_pipe.torch.adasum import AdasumEngine
from hvd_pipe.torch.arguments import Checked
from hvd_pipe.torch.cocod import CoCoDEngine
from hvd_pipe.torch.engine import Engine, Owner
from hvd_pipe.torch.merged_gradient import MergedGradientEngine
from hvd_pipe.torch.pipe_sgd import PipeSGDEngine

__all__ = ["make_engine"]


def make_engine(checked: Checked, owner: Owner) -> Engine:
    """Return the engine for arguments that all ranks have found good."""
    settings, strategy = dataclasses.replace(checked.settings, owner=owner), checked.strategy
    if settings.reduction.op == Adasum:
        return AdasumEngine(settings)
    if isinstance(strategy, MergedGradient):
        return MergedGradientEngine(settings, strategy, checked.plan)
    if isinstance(strategy, PipeSGD):
        return PipeSGDEngine(settings, strategy)
    return CoCoDEngine(settings, strategy)
