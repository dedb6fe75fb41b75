"""Check what `DistributedOptimizer` was given, and put it into the terms of the engines."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Adasum, Average, ProcessSet, Sum

from hvd_pipe.planning.plan import Plan
from hvd_pipe.strategy import CoCoD, MergedGradient, Strategy, parse
from hvd_pipe.torch.agree import Description
from hvd_pipe.torch.engine import Settings, kinds
from hvd_pipe.torch.plans import plan_groups
from hvd_pipe.torch.reduction import Reduction

__all__ = ["Arguments", "Checked", "check_passes"]


@dataclass(frozen=True)
class Arguments:
    """What the user passed beside the optimizer: Horovod's arguments, and the strategy."""

    named_parameters: Iterable[tuple[str, torch.Tensor]] | None
    compression: Any
    backward_passes_per_step: int
    op: Any
    gradient_predivide_factor: float
    groups: Any
    sparse_as_dense: bool
    process_set: ProcessSet
    strategy: str | Strategy | None

    def check(self, optimizer: torch.optim.Optimizer, tag: str) -> Checked:
        """Return the checked form; looks at this rank only and sends nothing.

        Raises:
            TypeError, ValueError: What cannot be; the message says what to do.
        """
        _check_optimizer(optimizer)
        strategy = parse(self.strategy)
        passes = check_passes(self.backward_passes_per_step)
        self._check_reduction()
        named = named_trainable(optimizer, self.named_parameters)
        parameters = list(named.values())
        groups = user_groups(self.groups, parameters)
        if isinstance(strategy, CoCoD):
            self._refuse_for_cocod(groups)
        elif groups is not None and strategy.bucket_bytes is not None:
            raise ValueError(f"groups and {strategy} both say what to merge: give one of them.")
        settings = Settings(
            names=list(named),
            parameters=parameters,
            reduction=Reduction(
                self.op, self.gradient_predivide_factor, self.compression, self.process_set
            ),
            passes=passes,
            sparse_as_dense=bool(self.sparse_as_dense),
            tag=tag,
            groups=groups,
            update=_no_update,
        )
        plan = None
        if isinstance(strategy, MergedGradient):
            if groups is not None and strategy.plan != "auto":
                raise ValueError(
                    f"groups and plan={strategy.plan!r} both say what to merge: give one of them."
                )
            plan = strategy.load_plan()
        if plan is not None:
            plan_groups(plan, settings)
        return Checked(settings, strategy, plan)

    def _check_reduction(self) -> None:
        if self.op == Adasum:
            raise ValueError(
                "op=hvd.Adasum has no merged form: use op=hvd.Average here, or "
                "horovod.torch.DistributedOptimizer for Adasum."
            )
        if self.op not in (Average, Sum):
            raise ValueError(f"op must be hvd.Average or hvd.Sum, got {self.op!r}.")
        factor = self.gradient_predivide_factor
        if not factor > 0 or (factor != 1.0 and self.op != Average):
            raise ValueError(
                f"gradient_predivide_factor must be > 0 and needs op=hvd.Average, got {factor!r}."
            )
        if not all(hasattr(self.compression, part) for part in ("compress", "decompress")):
            raise TypeError(
                "compression must be a compressor such as hvd.Compression.fp16, got "
                f"{self.compression!r}."
            )
        if not isinstance(self.process_set, ProcessSet):
            raise TypeError(f"process_set must be an hvd.ProcessSet, got {self.process_set!r}.")
        if self.process_set.process_set_id is None:
            raise ValueError(
                f"{self.process_set} is not registered: call hvd.add_process_set(...) on every "
                "rank, or list it in hvd.init(process_sets=[...])."
            )

    def _refuse_for_cocod(self, groups: object) -> None:
        """CoCoD sends models: say so instead of ignoring arguments about gradients."""
        for wrong, what, fix in (
            (self.op != Average, "op=hvd.Sum", "op=hvd.Average"),
            (self.gradient_predivide_factor != 1.0, "gradient_predivide_factor", "1.0"),
            (self.compression is not Compression.none, "compression", "hvd.Compression.none"),
            (groups is not None, "groups", "groups=None"),
        ):
            if wrong:
                raise ValueError(
                    f"{what} has no meaning under CoCoD, which averages models, not gradients: "
                    f"use {fix}, or strategy='merged-gradient' or 'pipe-sgd'."
                )


@dataclass(frozen=True)
class Checked:
    """Arguments that were found good on this rank."""

    settings: Settings
    strategy: Strategy
    plan: Plan | None

    def describe(self) -> Description:
        """Say in lines what this rank is about to do; all ranks must say the same."""
        settings, reduction = self.settings, self.settings.reduction
        strategy: object = self.strategy
        if self.plan is not None:
            strategy = f"MergedGradient(plan={self.plan.buckets})"
        compression = reduction.compression
        lines = [
            ("strategy", str(strategy)),
            ("op", _OP_NAMES[reduction.op]),
            ("gradient_predivide_factor", str(reduction.gradient_predivide_factor)),
            ("compression", str(getattr(compression, "__name__", type(compression).__name__))),
            ("backward_passes_per_step", str(settings.passes)),
            ("sparse_as_dense", str(settings.sparse_as_dense)),
            ("groups", str(settings.groups)),
        ]
        for place, (name, parameter) in enumerate(
            zip(settings.names, settings.parameters, strict=True)
        ):
            layout = "" if parameter.is_contiguous() else f" with strides {parameter.stride()}"
            dtype = str(parameter.dtype).removeprefix("torch.")
            shape = f"{parameter.device.type} {dtype} {tuple(parameter.shape)}"
            lines.append((f"parameter {place}", f"{name!r}: {shape}{layout}"))
        return lines


def _no_update() -> None:
    raise AssertionError("the optimizer is not wrapped yet")


_OP_NAMES = {Average: "Average", Sum: "Sum"}


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}."
        )
    if "_hvd_pipe" in optimizer.__dict__:
        raise ValueError("this optimizer is distributed already: wrap it once.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS evaluates the loss as often as each rank alone decides, so ranks would wait "
            "for each other for ever: use another optimizer, or average in the closure yourself."
        )
    step = optimizer.__dict__.get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ValueError(
            "optimizer.step was replaced on the instance, which would bypass the all-reduce: call "
            "DistributedOptimizer first and replace step after."
        )


def check_passes(passes: int) -> int:
    """Return ``backward_passes_per_step`` if it is one."""
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step must be an int >= 1, got {passes!r}.")
    return passes


def named_trainable(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[str, torch.Tensor]:
    """Return the optimizer's parameters that require a gradient, by name, in group order."""
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        names = {
            id(parameter): f"param.noname.{i}.{j}"
            for i, group in enumerate(optimizer.param_groups)
            for j, parameter in enumerate(group["params"])
        }
    else:
        pairs = list(named_parameters)
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise ValueError(
                "named_parameters must be (name, parameter) tuples: pass "
                "model.named_parameters(), not model.parameters()."
            )
        words = [name for name, _ in pairs]
        twice = (
            sorted({name for name in words if words.count(name) > 1})
            if len(set(words)) < len(words)
            else []
        )
        if twice:
            raise ValueError(
                f"named_parameters has {twice[0]!r} twice: give each model a prefix, as in "
                "model.named_parameters(prefix='generator')."
            )
        names = {id(parameter): name for name, parameter in reversed(pairs)}
        unnamed = [parameter for parameter in owned if id(parameter) not in names]
        if unnamed:
            raise ValueError(
                f"named_parameters lacks {len(unnamed)} of the optimizer's {len(owned)} "
                f"parameters (the first has shape {tuple(unnamed[0].shape)}): pass the names of "
                "every model that this optimizer updates."
            )
    trainable = {names[id(p)]: p for p in owned if p.requires_grad}
    if not trainable:
        raise ValueError("no parameter of this optimizer requires a gradient: nothing to train.")
    for name, parameter in trainable.items():
        kind = str(parameter.type()).replace(".", "_")
        if hasattr(mpi_ops.mpi_lib, f"horovod_torch_allreduce_async_{kind}"):
            continue
        fix = "keep parameters in float32, float64 or float16, with autocast for the arithmetic"
        if parameter.is_cuda and not mpi_ops.cuda_built():
            fix = "build Horovod for CUDA (make setup CUDA=1), or move the model to the CPU"
        raise ValueError(
            f"Horovod cannot all-reduce {name!r}, {parameter.dtype} on {parameter.device}: {fix}."
        )
    return trainable


def user_groups(groups: Any, parameters: Sequence[torch.Tensor]) -> list[list[int]] | None:
    """Return Horovod's ``groups`` argument as places in ``parameters``; None where not given."""
    if groups is None or (groups == 0 and not isinstance(groups, list)):
        return None
    place = {id(parameter): i for i, parameter in enumerate(parameters)}
    found: list[list[int]]
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        count, backward = min(groups, len(parameters)), range(len(parameters) - 1, -1, -1)
        cuts = [len(parameters) * i // count for i in range(count + 1)]
        found = [list(backward[start:end]) for start, end in itertools.pairwise(cuts)]
    elif isinstance(groups, list) and all(isinstance(group, list) for group in groups):
        members = [parameter for group in groups for parameter in group]
        if not all(isinstance(parameter, torch.Tensor) for parameter in members):
            raise ValueError("groups must be lists of parameters (tensors).")
        if len({id(parameter) for parameter in members}) < len(members):
            raise ValueError("a parameter can appear only once in groups.")
        found = [[place[id(p)] for p in group if id(p) in place] for group in groups]
        listed = {i for group in found for i in group}
        found += [[i] for i in range(len(parameters)) if i not in listed]
    else:
        raise ValueError(
            f"groups must be a positive int or a list of lists of parameters, got {groups!r}."
        )
    return [
        [group[i] for i in same]
        for group in found
        for same in kinds([parameters[i] for i in group])
    ]
