"""`DistributedOptimizer`: the user's optimizer, with a strategy that moves its gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Average, ProcessSet, global_process_set, is_initialized

from hvd_pipe.errors import HvdPipeError, RanksDisagreeError
from hvd_pipe.planning.plan import Plan
from hvd_pipe.strategy import MergedGradient, PipeSGD, Strategy
from hvd_pipe.torch.agree import Description, check_alike, failed
from hvd_pipe.torch.arguments import Arguments, Checked, check_passes
from hvd_pipe.torch.cocod import CoCoDEngine
from hvd_pipe.torch.engine import Engine
from hvd_pipe.torch.merged_gradient import MergedGradientEngine
from hvd_pipe.torch.pipe_sgd import PipeSGDEngine

__all__ = ["DistributedOptimizer"]

# Numbers the optimizers of each process set, whose members all count the same ones.
_counts: defaultdict[object, Iterator[int]] = defaultdict(itertools.count)


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
    state, param_groups, defaults and hooks; schedulers made before or after both work. It has
    Horovod's ``synchronize()``, ``skip_synchronize()`` and ``set_backward_passes_per_step()``, and
    ``plan``. Call ``synchronize()`` at the end of training and before evaluation or a checkpoint:
    Pipe-SGD then applies its last gradient, CoCoD makes the replicas equal, BatchNorm buffers too.

    Args:
        optimizer: Any `torch.optim.Optimizer` but LBFGS.
        named_parameters: ``model.named_parameters()``; names all parameters of the optimizer.
        compression: A Horovod compressor, ``hvd.Compression.none`` or ``.fp16``, for buckets.
        backward_passes_per_step: Backward passes that are accumulated into one gradient.
        op: ``hvd.Average`` or ``hvd.Sum``.
        gradient_predivide_factor: Divide by this before the sum, and by n over it after.
        num_groups: Horovod's older name for an int ``groups``.
        groups: Lists of parameters that share a message, or a number of messages: the plan.
        sparse_as_dense: Send sparse gradients as dense ones.
        process_set: The workers that take part.
        strategy: ``"merged-gradient"``, ``"pipe-sgd"``, ``"cocod"``, one of these with options as
            in ``"cocod:period=8"``, or a strategy object; None takes ``HVD_PIPE_STRATEGY``.

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
        named_parameters,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        groups,
        sparse_as_dense,
        process_set,
        strategy,
    )
    return _wrap(optimizer, _check_everywhere(optimizer, arguments))


def _check_everywhere(optimizer: torch.optim.Optimizer, arguments: Arguments) -> Checked:
    """Check the arguments on this rank, then against all others.

    A rank that finds something wrong still takes part, so that the others hear of it instead of
    waiting for it.
    """
    process_set = arguments.process_set
    if not isinstance(process_set, ProcessSet) or process_set.process_set_id is None:
        process_set = global_process_set  # it is refused below, but all ranks must hear of it
    number = process_set.process_set_id
    count = next(_counts[number])
    failure: Exception | None = None
    description: Description
    try:
        checked = arguments.check(optimizer, f"hvd_pipe.{number}.{count}")
        description = [
            ("the number of optimizers made before", str(count)),
            ("the optimizer", type(optimizer).__name__),
            *checked.describe(),
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
    return checked


class DistributedMixin(torch.optim.Optimizer):
    """What a distributed optimizer does beside its user's class; the engine does the work."""

    _hvd_pipe: Engine
    _hvd_pipe_skip: bool

    @property
    def plan(self) -> Plan | None:
        """The buckets in the order in which they are sent; None where none are (CoCoD)."""
        return self._hvd_pipe.plan

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of the strategy; ``closure`` is called once, at the start."""
        engine, loss = self._hvd_pipe, None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if engine.synchronized and not self._hvd_pipe_skip:
            warnings.warn(
                "optimizer.step() after optimizer.synchronize(): write "
                "`with optimizer.skip_synchronize(): optimizer.step()`.",
                stacklevel=2,
            )
        if self._hvd_pipe_skip and engine.fresh and not engine.synchronized:
            raise HvdPipeError(
                "step() inside skip_synchronize(), but gradients were computed since the last "
                "synchronize(): call optimizer.synchronize() after backward() and before this."
            )
        self._refuse_newcomers()
        updating = engine.before_update()
        result = super().step() if updating else None
        engine.after_update()
        return result if closure is None else loss

    # torch wraps a class's step for its hooks; the user's class has been wrapped already.
    step.hooked = True  # type: ignore[attr-defined]

    def _update(self) -> None:
        super().step()

    def _refuse_newcomers(self) -> None:
        """A parameter that no bucket knows would be updated with this rank's gradient alone."""
        known = self._hvd_pipe.known
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in known:
                    raise HvdPipeError(
                        f"a parameter of shape {tuple(parameter.shape)} joined or was unfrozen "
                        "after DistributedOptimizer was made: make a new optimizer and wrap it "
                        "once the parameters that train are settled."
                    )

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the user's class; not between ``backward()`` and ``step()``: gradients travel."""
        engine = self._hvd_pipe
        if engine.fresh and not engine.synchronized and engine.current is not None:
            raise HvdPipeError(
                "zero_grad() after backward() and before step() would clear gradients that are "
                "being sent: call it before backward() or after step()."
            )
        super().zero_grad(*args, **kwargs)

    def synchronize(self) -> None:
        """Finish what is in flight.

        After ``backward()``, the gradients become those that ``step()`` will apply: clip them,
        then step inside `skip_synchronize`. Else it drains: Pipe-SGD applies its pending gradient;
        CoCoD makes all replicas equal.
        """
        self._hvd_pipe.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step()`` take gradients as `synchronize` and the user have left them.

        Example::

            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        """
        self._hvd_pipe_skip = True
        try:
            yield
        finally:
            self._hvd_pipe_skip = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate this many backward passes into one gradient; call it after ``step()``."""
        self._hvd_pipe.passes = check_passes(passes)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the user's class; what is in flight belongs to the old state and is dropped."""
        self._hvd_pipe.discard()
        super().load_state_dict(state_dict)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler asks for this before it steps; the strategies that it would break refuse."""
        if not isinstance(self._hvd_pipe, MergedGradientEngine):
            raise HvdPipeError(
                "GradScaler and this strategy do not go together: gradients of another step have "
                "another scale, and a rank would skip a step alone. Use bfloat16 autocast without "
                "a scaler, or strategy='merged-gradient'."
            )
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise HvdPipeError(
            "a distributed optimizer is tied to its job and cannot be copied or pickled: save "
            "optimizer.state_dict(), or copy the optimizer before DistributedOptimizer."
        )


def _wrap(optimizer: torch.optim.Optimizer, checked: Checked) -> DistributedMixin:
    """Make the distributed twin; it shares the optimizer's ``__dict__``, so nothing is lost."""
    cls = _distributed_class(type(optimizer))  # type: ignore[arg-type]
    wrapped = cls.__new__(cls)
    wrapped.__dict__ = optimizer.__dict__
    reference = weakref.ref(wrapped)
    if "step" in wrapped.__dict__:
        wrapped.__dict__["step"] = _scheduled_step(reference)

    def update() -> None:
        owner = reference()
        if owner is not None:
            owner._update()

    settings = dataclasses.replace(checked.settings, update=update)
    strategy = checked.strategy
    if isinstance(strategy, MergedGradient):
        wrapped._hvd_pipe = MergedGradientEngine(settings, strategy, checked.plan)
    elif isinstance(strategy, PipeSGD):
        wrapped._hvd_pipe = PipeSGDEngine(settings, strategy)
    else:
        wrapped._hvd_pipe = CoCoDEngine(settings, strategy)
    wrapped._hvd_pipe_skip = False
    return wrapped


@functools.cache
def _distributed_class(cls: type[torch.optim.Optimizer]) -> type[DistributedMixin]:
    return type(cls.__name__, (DistributedMixin, cls), {})


def _scheduled_step(reference: weakref.ref[DistributedMixin]) -> Callable[..., Any]:
    """Return what a learning-rate scheduler made before wrapping finds as ``optimizer.step``.

    The scheduler put its own step on the instance; it would call the user's class and skip ours.
    """

    @functools.wraps(DistributedMixin.step)
    def step(*args: Any, **kwargs: Any) -> Any:
        owner = reference()
        if owner is None:
            raise HvdPipeError("the DistributedOptimizer of this optimizer is gone: keep it.")
        owner._opt_called = True  # type: ignore[attr-defined]
        return DistributedMixin.step(owner, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step
