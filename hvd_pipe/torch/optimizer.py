"""`DistributedOptimizer`: the user's optimizer, with a strategy that moves its gradients."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from horovod.torch.mpi_ops import Average, ProcessSet, global_process_set, is_initialized

from hvd_pipe.runtime.restarts import is_elastic
from hvd_pipe.strategy import Strategy
from hvd_pipe.torch import workers
from hvd_pipe.torch.arguments import Arguments, check_alone, check_everywhere
from hvd_pipe.torch.compression import Compression
from hvd_pipe.torch.distributed import DistributedMixin, twin
from hvd_pipe.torch.measuring.step_times import profile_job

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    strategy: str | Strategy | None = None,
) -> Any:
    """Return the optimizer with its gradients (or models) averaged over the workers.

    With n workers, g_i worker i's gradient and x_i its model::

        merged-gradient   w[t+1] = w[t] - lr * mean_i g_i(w[t])
        pipe-sgd          w[t+1] = w[t] - lr * mean_i g_i(w[t-1])
        cocod             x_i[s+1] = mean_j x_j[s] + (x_i after k local steps - x_i[s])

    The result is an instance of a subclass of ``type(optimizer)`` and shares the optimizer's
    state, param_groups, defaults and hooks; schedulers made before or after both work, as do
    GradScaler, closures, ``add_param_group``, copies and pickles. It has Horovod's
    ``synchronize()``, ``skip_synchronize()`` and ``set_backward_passes_per_step()``, and ``plan``
    and ``sent_bytes``. Call ``synchronize()`` at the end of training and before evaluation:
    Pipe-SGD then applies its last gradient, CoCoD makes the replicas equal, BatchNorm buffers too.
    ``state_dict()`` holds what is in flight, under the key ``"hvd_pipe"``.

    Args:
        optimizer: Any `torch.optim.Optimizer`; LBFGS with ``merged-gradient``.
        named_parameters: ``model.named_parameters()``; names all parameters of the optimizer.
        compression: For buckets, and for what CoCoD's models have changed: ``none``, ``fp16``,
            ``bf16`` or ``int8`` of ``hvd.Compression``, ``hvd.Int8(error_feedback=True)``, or any
            Horovod compressor.
        backward_passes_per_step: Backward passes that are accumulated into one gradient.
        op: ``hvd.Average``; ``hvd.Sum``, not with CoCoD; ``hvd.Adasum``, with ``merged-gradient``.
        gradient_predivide_factor: Divide by this before the sum, and by n over it after.
        num_groups: Horovod's older name for an int ``groups``.
        groups: Lists of parameters that share a message, or a number of messages: the plan.
        sparse_as_dense: Send sparse gradients as dense ones.
        process_set: The workers that take part.
        strategy: ``"merged-gradient"``, ``"pipe-sgd"``, ``"cocod"``, one of these with options as
            in ``"cocod:period=8"``, or a strategy object; None takes ``HVD_PIPE_STRATEGY``.
            ``"auto:allow=merged-gradient/pipe-sgd"`` measures the first steps and goes on with the
            fastest of those named; ``state_dict()`` holds the choice.

    Returns:
        The optimizer to use from here on.

    Raises:
        TypeError, ValueError: An argument that cannot be, before training starts.
        RanksDisagreeError: Ranks came with different models, arguments, strategies or plans, or
            one of them failed here; raised on every rank with both sides of the difference.

    Example:
        >>> import hvd_pipe.torch as hvd
        >>> hvd.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> opt = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = hvd.DistributedOptimizer(opt, model.named_parameters(), strategy="pipe-sgd")
        >>> isinstance(opt, torch.optim.SGD)
        True
    """
    if not is_initialized():
        raise ValueError("Horovod is not initialised: call hvd.init() before this.")
    if num_groups:
        warnings.warn("num_groups is Horovod's old name: use groups", DeprecationWarning, 2)
        groups = num_groups if groups is None else groups
    arguments = Arguments(
        named_parameters=named_parameters,
        compression=compression,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        strategy=strategy,
    )
    return distribute(optimizer, arguments)


def distribute(optimizer: torch.optim.Optimizer, arguments: Arguments) -> DistributedMixin:
    """Make the distributed twin; it shares the optimizer's ``__dict__``, so nothing is lost.

    In an elastic job it sends nothing: when a worker that has come comes here, the others, which
    have been here long ago, wait for it elsewhere.
    """
    workers.begin()
    elastic = is_elastic()
    checked = (check_alone if elastic else check_everywhere)(optimizer, arguments)
    names, groups = checked.settings.names, checked.settings.groups
    if groups is not None:
        arguments = dataclasses.replace(
            arguments, groups=[[names[i] for i in group] for group in groups]
        )
    arguments = dataclasses.replace(arguments, named_parameters=None, for_copy=True)
    wrapped = twin(optimizer, arguments, checked.all_names)
    if not elastic:
        wrapped._start(checked)
    settings = checked.settings
    wrapped._hvd_pipe_profile = profile_job(
        wrapped, settings.names, settings.parameters, settings.reduction.process_set
    )
    return wrapped
