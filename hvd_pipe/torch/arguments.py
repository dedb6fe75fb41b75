"""Check what `DistributedOptimizer` was given, on this rank and against all others.

`Checked` has the arguments in the terms of the engines.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import Adasum, Average, ProcessSet, Sum, global_process_set

from hvd_pipe.cocod import assign_fragments
from hvd_pipe.errors import HvdPipeError, nearest
from hvd_pipe.planning.plan import Plan
from hvd_pipe.runtime import arguments, check_mode
from hvd_pipe.runtime.consensus import Description, members
from hvd_pipe.runtime.restarts import is_elastic
from hvd_pipe.strategy import Auto, CoCoD, MergedGradient, Method, Strategy
from hvd_pipe.torch import workers
from hvd_pipe.torch.agree import agreement
from hvd_pipe.torch.compression import Codec, codec_for
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.messages.allreduce import Reduction
from hvd_pipe.torch.messages.group import Group
from hvd_pipe.torch.parameters import all_names, gradient_dtype, owned_by, trainable
from hvd_pipe.torch.strategies.base import unused_groups
from hvd_pipe.torch.strategies.settings import Settings, describe

_log = logging.getLogger("hvd_pipe")

CARRIER = "HVD_PIPE_CARRIER"
HOROVOD, TORCH = CARRIERS = ("horovod", "torch")


@dataclass(frozen=True, kw_only=True)
class Arguments(arguments.Arguments):
    """What the user passed beside the optimizer."""

    ops: ClassVar = {Average: arguments.AVERAGE, Sum: "Sum", Adasum: "Adasum"}
    codec = Codec
    noun = "parameter"
    member = torch.Tensor

    named_parameters: Iterable[tuple[str, torch.Tensor]] | None
    carrier: str | None = None
    for_copy: bool = False
    """Whether the optimizer is a copy of a distributed one, and not the user's plain one."""

    def check(self, optimizer: torch.optim.Optimizer, tag: str) -> Checked:
        """Return the checked form, or raise TypeError or ValueError; sends nothing."""
        _check_optimizer(optimizer, self.for_copy)
        strategy = self.check_values()
        names = all_names(optimizer, self.named_parameters)
        named = trainable(optimizer, names)
        parameters = list(named.values())
        settings = Settings(
            names=list(named),
            parameters=parameters,
            reduction=Reduction(
                self.op, self.gradient_predivide_factor, self.compression, self.process_set
            ),
            passes=self.backward_passes_per_step,
            sparse_as_dense=self.sparse_as_dense,
            tag=tag,
            groups=None,
            owner=lambda: None,
        )
        if self.groups is not None:
            indices = range(len(parameters))
            frozen = owned_by(optimizer)
            lists = arguments.user_groups(self.groups, parameters, indices, frozen, self.noun)
            groups = [part for group in lists for part in settings.index.dtype_groups(group)]
            settings = dataclasses.replace(settings, groups=groups)
        candidates: tuple[Method, ...] = ()
        left_out: dict[str, str] = {}
        if isinstance(strategy, Auto):
            candidates, left_out = self.choices(
                strategy, lambda method: self._check_with(optimizer, method)
            )
            if self.op == Adasum or isinstance(optimizer, torch.optim.LBFGS):
                (strategy,), candidates = candidates, ()  # nothing to choose from
        else:
            self._check_with(optimizer, strategy)
        if isinstance(strategy, CoCoD):
            assign_fragments(settings.index.nbytes, strategy.fragments)
        plan = None
        if isinstance(strategy, MergedGradient):
            plan = strategy.load_plan()
        if plan is not None:
            settings.index.plan_groups(plan, range(len(parameters)))
        carrier = self._carrier(parameters, (strategy, *candidates), len(names))
        return Checked(self, settings, strategy, plan, names, carrier, candidates, left_out)

    @property
    def asked_carrier(self) -> str | None:
        """What was asked for, by the script or by the variable."""
        return self.carrier or os.environ.get(CARRIER)

    def _carrier(
        self, parameters: Sequence[torch.Tensor], methods: Sequence[Strategy], count: int
    ) -> str:
        """Return what carries the messages: what was asked for, where that can be.

        There may be an optimizer for each parameter, and connections for each would be too many.
        """
        carrier = self.asked_carrier or (default_carrier() if count > 1 else HOROVOD)
        if carrier not in CARRIERS:
            name, meant = "carrier" if self.carrier else CARRIER, nearest(carrier, CARRIERS)
            raise ValueError(f"{name} must be 'horovod' or 'torch', got {carrier!r}{meant}.")
        if carrier == HOROVOD:
            return carrier
        within = any(isinstance(one, CoCoD) and one.within == "node" for one in methods)
        for wrong, what in (
            (sys.platform != "linux", f"{sys.platform}: it needs Linux"),
            (any(p.device.type != "cpu" for p in parameters), "parameters on a GPU"),
            (self.op == Adasum, "op=hvd.Adasum"),
            (within, "within='node'"),
        ):
            if wrong and self.carrier == TORCH:
                raise ValueError(f"carrier='torch' does not go with {what}: use 'horovod'.")
            if wrong:
                return HOROVOD
        return TORCH if len(members(self.process_set)) > 1 else HOROVOD

    def _check_with(self, optimizer: torch.optim.Optimizer, method: Method) -> None:
        """Raise ValueError where a strategy does not go with the optimizer and the arguments."""
        is_lbfgs = isinstance(optimizer, torch.optim.LBFGS)
        if is_lbfgs and not isinstance(method, MergedGradient):
            raise ValueError(
                f"LBFGS compares losses and gradients of the same weights, which {method.name} "
                "does not give it: use strategy='merged-gradient', or another optimizer."
            )
        if self.op == Adasum:
            self._check_adasum(optimizer, method)
        self.check_method(method)
        if is_lbfgs and isinstance(method, MergedGradient) and method.overlaps_forward:
            raise ValueError(
                "LBFGS updates all parameters at once, several times a step: leave "
                "overlap='forward' out, or use another optimizer."
            )

    def _check_adasum(self, optimizer: torch.optim.Optimizer, strategy: Method) -> None:
        # Adasum weighs updates tensor by tensor: nothing can be merged, delayed or quantised.
        workers = len(members(self.process_set))
        is_plain = strategy in (MergedGradient(), MergedGradient(overlap="backward"))
        options = f"strategy={strategy.name!r} with its options"
        for is_wrong, subject, fix in (
            (not is_plain, options, "'merged-gradient' as it is"),
            (self.groups is not None, "groups", "groups=None"),
            (isinstance(self.compression, Codec), f"{self.compression}", "hvd.Compression.fp16"),
            (self.process_set.process_set_id != 0, "a process_set", "the global one"),
            (isinstance(optimizer, torch.optim.LBFGS), "LBFGS", "another optimizer"),
            (workers & (workers - 1) != 0, f"{workers} workers", "a power of two"),
            (not mpi_ops.mpi_enabled(), "a job without MPI", "horovodrun --mpi"),
        ):
            if is_wrong:
                raise ValueError(
                    f"op=hvd.Adasum does not go with {subject}: use {fix}, or op=hvd.Average."
                )


def default_carrier() -> str:
    """Return what carries from processors unless it is said; MPI has more than sockets."""
    return HOROVOD if mpi_ops.mpi_enabled() or sys.platform != "linux" else TORCH


@dataclass(frozen=True)
class Checked:
    """Arguments that are valid on this rank."""

    arguments: Arguments
    settings: Settings
    strategy: Strategy
    plan: Plan | None
    all_names: list[str]
    """The names of all of the optimizer's parameters, frozen ones too."""
    carrier: str
    """What carries the messages."""
    candidates: tuple[Method, ...] = ()
    """What `Auto` may choose from."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """By name, what it was allowed and why it may not."""

    def describe(self) -> Description:
        """Describe in lines what all ranks must have alike."""
        settings = self.settings
        named = dict(zip(settings.names, settings.parameters, strict=True))
        return [
            *self.arguments.describe_values(self.strategy, self.plan),
            ("groups", str(settings.groups)),
            ("carrier", f"{self.carrier}{'' if self.arguments.asked_carrier else ', by default'}"),
            *describe(named),
        ]


def check_alone(optimizer: torch.optim.Optimizer, given: Arguments) -> Checked:
    """Check the arguments of a worker of an elastic job, which must not send anything yet."""
    checked = given.check(optimizer, "hvd_pipe")
    given.check_elastic(checked.strategy)
    return checked


def check_everywhere(optimizer: torch.optim.Optimizer, given: Arguments) -> Checked:
    """Check the arguments on this rank, then against all others; all of them hear of a mistake."""
    process_set = given.process_set
    if not isinstance(process_set, ProcessSet) or process_set.process_set_id is None:
        process_set = global_process_set  # it is refused below, but all ranks must hear of it
    number = process_set.process_set_id
    count = workers.count(number)

    def check() -> tuple[Checked, Description]:
        checked = given.check(optimizer, f"hvd_pipe.{number}.{count}")
        return checked, [
            ("the number of optimizers made before", str(count)),
            ("the optimizer", type(optimizer).__name__),
            (check_mode.CHECK, str(int(check_mode.active.on))),
            *checked.describe(),
            *([] if is_elastic() else timeline.describe()),  # files are named after ranks
        ]

    # One name for all, so that ranks which have made different numbers still meet here.
    checked = agreement.checked(check, f"hvd_pipe.{number}.construction", process_set)
    if process_set.process_set_id == global_process_set.process_set_id:
        workers.watch()
    if checked.carrier == TORCH and process_set.included():
        own = [p for group in optimizer.param_groups for p in group["params"]]
        try:
            checked = dataclasses.replace(checked, settings=_with_group(checked.settings, own))
        except HvdPipeError as error:  # on all ranks
            if given.asked_carrier is not None:
                raise
            _log.warning("Horovod carries the messages, as %s", error)
    timeline.start(checked.settings.parameters, process_set)
    return checked


def _with_group(settings: Settings, parameters: Sequence[torch.Tensor]) -> Settings:
    """Make the group that carries the messages of these parameters; all ranks do so."""
    reduction = settings.reduction
    codecs = [codec_for(reduction.compression, gradient_dtype(p)) for p in parameters]
    name, encodes = f"{settings.tag}.group", any(codec is not None for codec in codecs)
    group = Group(reduction.process_set, name, encodes, unused_groups())
    return dataclasses.replace(settings, reduction=dataclasses.replace(reduction, group=group))


def _check_optimizer(optimizer: object, for_copy: bool) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}."
        )
    if "_hvd_pipe" in optimizer.__dict__ and not for_copy:
        raise ValueError("this optimizer is distributed already: wrap it once.")
    step = optimizer.__dict__.get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ValueError(
            "optimizer.step was replaced on the instance, which would bypass the all-reduce: call "
            "DistributedOptimizer first and replace step after."
        )
