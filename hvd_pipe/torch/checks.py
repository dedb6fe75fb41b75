"""Check a `DistributedOptimizer`'s arguments on every rank before anything is built."""

from __future__ import annotations

import os
import warnings

import torch
from horovod.torch.mpi_ops import ProcessSet, global_process_set

from hvd_pipe.errors import RanksDisagreeError
from hvd_pipe.runtime import check_mode
from hvd_pipe.runtime.argument_checks import refuse_ranks
from hvd_pipe.runtime.restarts import is_elastic
from hvd_pipe.strategy import CoCoD
from hvd_pipe.torch import workers
from hvd_pipe.torch.agree import Description, check_alike, failed
from hvd_pipe.torch.arguments import Arguments, Checked
from hvd_pipe.torch.measuring import timeline

__all__ = ["check_alone", "check_everywhere"]


def check_alone(optimizer: torch.optim.Optimizer, arguments: Arguments) -> Checked:
    """Check the arguments of a worker of an elastic job, which must not send anything yet.

    Raises:
        TypeError, ValueError: As `Arguments.check`; also what names ranks, which change.
    """
    checked = arguments.check(optimizer, "hvd_pipe")
    strategy, process_set = checked.strategy, arguments.process_set
    refuse_ranks(
        has_weights=isinstance(strategy, CoCoD) and strategy.weights is not None,
        process_set=process_set,
    )
    if os.environ.get(timeline.DIRECTORY):
        warnings.warn(f"{timeline.DIRECTORY}: elastic jobs write no timeline", stacklevel=4)
    return checked


def check_everywhere(optimizer: torch.optim.Optimizer, arguments: Arguments) -> Checked:
    """Check the arguments on this rank, then against all others.

    A rank that finds something wrong still takes part, so that the others hear of it instead of
    waiting for it.
    """
    process_set = arguments.process_set
    if not isinstance(process_set, ProcessSet) or process_set.process_set_id is None:
        process_set = global_process_set  # it is refused below, but all ranks must hear of it
    number = process_set.process_set_id
    count = workers.count(number)
    failure: Exception | None = None
    description: Description
    try:
        checked = arguments.check(optimizer, f"hvd_pipe.{number}.{count}")
        description = [
            ("the number of optimizers made before", str(count)),
            ("the optimizer", type(optimizer).__name__),
            (check_mode.CHECK, str(int(check_mode.active.on))),
            *checked.describe(),
            *([] if is_elastic() else timeline.describe()),  # files are named after ranks
        ]
    except Exception as error:  # whatever it is, the others must not wait for this rank
        failure = error
        description = failed(error)
    try:
        if process_set.included():
            # One name for all, so that ranks which have made different numbers still meet here.
            check_alike(description, f"hvd_pipe.{number}.construction", process_set)
    except RanksDisagreeError:
        if failure is None:
            raise
    if failure is not None:
        raise failure
    if process_set.process_set_id == global_process_set.process_set_id:
        workers.watch()
    timeline.start(checked.settings.parameters, process_set)
    return checked
