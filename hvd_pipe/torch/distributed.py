"""The class of a distributed optimizer: the user's class, with an engine that moves gradients."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.planning.plan import Plan
from hvd_pipe.runtime.argument_checks import check_passes
from hvd_pipe.runtime.restarts import is_elastic
from hvd_pipe.strategy import Auto
from hvd_pipe.torch import checkpoint, workers
from hvd_pipe.torch.amp import read_by_grad_scaler
from hvd_pipe.torch.arguments import Arguments, Checked, check_alone, check_everywhere
from hvd_pipe.torch.horovod_api import broadcast_optimizer_state, root_of_horovods
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.measuring.step_times import JobProfile, profile_job
from hvd_pipe.torch.parameters import NewGradients, is_zero, owned_by, unscale
from hvd_pipe.torch.strategies.auto import AutoChoice
from hvd_pipe.torch.strategies.engine import Engine
from hvd_pipe.torch.strategies.engines import make_engine

__all__ = ["DistributedMixin", "distribute"]

_log = logging.getLogger("hvd_pipe")


class DistributedMixin(torch.optim.Optimizer):
    """What a distributed optimizer does beside its user's class; the engine does the work.

    A copy (``copy.deepcopy``, pickle) has no engine until its first ``step()``, which all ranks
    make; until then it sends nothing, so that one rank alone may copy and save it. After
    ``hvd.shutdown()``, and in an elastic job before workers have met, it is the same.
    """

    _hvd_pipe: Engine | None
    _hvd_pipe_arguments: Arguments
    _hvd_pipe_names: list[str]
    _hvd_pipe_saved: checkpoint.Saved | None = None
    _hvd_pipe_auto: AutoChoice | None = None
    _hvd_pipe_profile: JobProfile | None = None
    _hvd_pipe_sent = 0.0
    _hvd_pipe_skip = False
    _hvd_pipe_loss_scale: float | None = None
    _hvd_pipe_late_scaler = False
    _hvd_pipe_coming = ""
    """What Horovod's `broadcast_optimizer_state` calls next: "step", then "state_dict".

    If it fails before its step, the next call is the script's: `zero_grad`, a backward pass and
    `step`, `load_state_dict`, or the broadcast once more. Each of them forgets this.
    """
    _hvd_pipe_drained = False
    _hvd_pipe_gradients: NewGradients

    @property
    def plan(self) -> Plan | None:
        """The buckets in the order in which they are sent; None where none are (CoCoD)."""
        return None if self._hvd_pipe is None else self._hvd_pipe.plan

    @property
    def sent_bytes(self) -> float:
        """Bytes this rank has put on the wire for gradients and models so far.

        Counted as ``2 (n-1)/n`` of each message in the form in which it travels (compressed, with
        scales and padding), the least that an all-reduce over n workers needs.
        """
        engine, before = self._hvd_pipe, self._hvd_pipe_sent
        return before if engine is None else before + engine.reduction.traffic.sent_bytes

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """The name of each parameter, as Horovod's optimizers have it and scripts read it."""
        return dict(zip(self._owned(), self._hvd_pipe_names, strict=True))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of the strategy; ``closure`` is called once, at the start.

        LBFGS calls it as often as it likes: loss and gradients are averaged each time.
        """
        if self._hvd_pipe_coming == "step" and not self._heard_of_gradients():
            self._hvd_pipe_coming = "state_dict"  # and no step, which would decay weights
            self._note_old()
            return None
        self._hvd_pipe_coming = ""
        engine = self._engine()
        if isinstance(self, torch.optim.LBFGS):
            spans = _Updates()
            found = super().step(self._averaged(engine, closure, spans))
            spans.end()
            self._note_old()
            if timeline.active is not None:
                timeline.active.end_step()
            return found
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if engine.synchronized and not self._hvd_pipe_skip and not self._hvd_pipe_late_scaler:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(): write "
                "`with optimizer.skip_synchronize(): optimizer.step()`.",
                stacklevel=2,
            )
        if self._hvd_pipe_skip and engine.fresh and not engine.synchronized:
            raise HvdPipeError(
                "step() inside skip_synchronize(), but gradients were computed since the last "
                "synchronize(): call optimizer.synchronize() after backward() and before this."
            )
        if "found_inf" in self.__dict__ and not engine.synchronized:
            raise HvdPipeError(
                "a gradient scaler that is not torch.amp.GradScaler has looked at gradients that "
                "were not averaged: call optimizer.synchronize(loss_scale=scaler.get_scale()) "
                "after backward(), and scaler.step(optimizer) inside "
                "`with optimizer.skip_synchronize():`."
            )
        if self._hvd_pipe_skip and self._hvd_pipe_drained:
            self._check_not_old(engine)
        updating = engine.before_update()
        if "found_inf" in self.__dict__:
            updating = self._unscaled(engine) and updating
        trace = timeline.active
        begun = None if trace is None else trace.moment()
        if updating:
            engine.note_gradients()
        try:
            result = super().step() if updating else None
        except BaseException:
            # GradScaler removes these when step() returns, and would multiply by them after.
            self.__dict__.pop("grad_scale", None)
            self.__dict__.pop("found_inf", None)
            raise
        if trace is not None and begun is not None and updating:
            trace.update(begun)
        engine.after_update()
        engine.compare_replicas()
        if trace is not None:
            trace.end_step()
        if self._hvd_pipe_profile is not None and not self._hvd_pipe_profile.end_step():
            self._hvd_pipe_profile = None
        if self._hvd_pipe_auto is not None:
            self._hvd_pipe = self._hvd_pipe_auto.after_step(engine)
        self._hvd_pipe_loss_scale, self._hvd_pipe_late_scaler = None, False
        self._hvd_pipe_drained = False
        self._note_old()
        return result if closure is None else loss

    # torch wraps a class's step for its hooks; the user's class has been wrapped already.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the user's class; not between ``backward()`` and ``step()``: gradients travel.

        After `synchronize`, it drops the gradients that were prepared.
        """
        self._hvd_pipe_coming = ""
        engine = self._hvd_pipe
        if engine is not None:
            if engine.fresh and not engine.synchronized and engine.current is not None:
                raise HvdPipeError(
                    "zero_grad() after backward() and before step() would clear gradients that "
                    "are being sent: call it before backward() or after step(). To give this "
                    "step up, call synchronize() before it, on every rank."
                )
            if engine.synchronized or engine.current is None:
                engine.abandon()
        super().zero_grad(*args, **kwargs)
        self._note_old()

    def synchronize(self, loss_scale: float | None = None) -> None:
        """Finish what is in flight.

        After ``backward()``, the gradients become those that ``step()`` will apply: clip them,
        then step inside `skip_synchronize`. Else it drains: Pipe-SGD applies its pending gradient;
        CoCoD makes all replicas equal.

        Gradients that are set by hand count as those of ``backward()`` do: ``p.grad = g``, or in
        place, ``p.grad.copy_(g)``; not by ``p.grad.data``. Zeros in place, in all gradients of a
        rank, count as cleared: write ``p.grad = g`` where that may be.

        Args:
            loss_scale: ``scaler.get_scale()``, before ``scaler.unscale_(optimizer)``: Pipe-SGD
                applies gradients that may have been computed under another one, and ranks agree
                on an overflow. ``merged-gradient`` does not need it.
        """
        if loss_scale is not None and not 0.0 < float(loss_scale) < math.inf:
            raise ValueError(
                f"loss_scale must be a number above 0, got {loss_scale!r}: pass "
                "scaler.get_scale()."
            )
        engine = self._engine()
        by_hand = not engine.fresh and self._has_new()
        preparing = (engine.fresh or by_hand) and not engine.synchronized
        self._hvd_pipe_drained = not (preparing or engine.synchronized)
        engine.synchronize(by_hand)
        self._note_old()
        if loss_scale is None or not preparing:
            return
        self._hvd_pipe_loss_scale = loss_scale
        engine.agree_on_overflow()
        engine.note_scale(loss_scale)
        due = engine.gradient_scale
        if due is not None and due != loss_scale:
            unscale(engine.settings.parameters, due / loss_scale)

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
        engine, passes = self._engine(), check_passes(passes)
        if engine.fresh and engine.current is not None:
            raise HvdPipeError(
                "set_backward_passes_per_step() after backward() and before step(): call it after "
                "step()."
            )
        engine.passes = passes
        self._hvd_pipe_arguments = dataclasses.replace(
            self._hvd_pipe_arguments, backward_passes_per_step=passes
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the user's class, between two steps; the new parameters join at the next step."""
        engine = self._hvd_pipe
        if engine is not None and engine.fresh:
            raise HvdPipeError(
                "add_param_group() after backward() and before step(): call it after step()."
            )
        super().add_param_group(param_group)
        names = self._hvd_pipe_names
        names += [f"param.joined.{i}" for i in range(len(names), len(self._owned()))]

    def state_dict(self) -> dict[str, Any]:
        """As the user's class, with what is in flight under the key ``"hvd_pipe"``.

        The rest has the plain layout: torch and Horovod load it and ignore the key. Any one rank
        may call this alone; it waits for what that rank has sent.
        """
        root_rank = root_of_horovods(sys._getframe(1))
        if root_rank is not None:
            self._take_from(root_rank)
        state: dict[str, Any] = super().state_dict()
        state[checkpoint.KEY] = self._in_flight()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the user's class; what was in flight when it was saved goes on from there.

        A state without the key ``"hvd_pipe"`` (of Horovod, of plain torch) starts with nothing in
        flight, as does one of another strategy; this warns where something is lost.
        """
        self._hvd_pipe_coming = ""
        in_flight = checkpoint.check(state_dict.get(checkpoint.KEY))
        if self._hvd_pipe is None:
            super().load_state_dict(state_dict)
            self._hvd_pipe_saved = in_flight
            return
        before = self._hvd_pipe
        message, had_begun = before.others_message, before.rounds > 0
        before.discard()
        super().load_state_dict(state_dict)
        engine, in_flight = self._resumed(before, in_flight)
        checkpoint.load(engine, in_flight, self._owned())
        if engine.keeps and (had_begun or engine.rounds > 0):
            engine.note_load(message)
        self._note_old()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler asks for this before it looks at gradients: the time to average them.

        Each rank alone would else decide whether to step. It then always calls ``step()``, which
        leaves the update out where the average has overflowed. For other readers it is just true.
        """
        if not read_by_grad_scaler():
            return True
        engine = self._engine()
        if not engine.synchronized:
            self._hvd_pipe_late_scaler = True
            engine.prepare_now()
            engine.agree_on_overflow()
        return True

    def __reduce_ex__(self, protocol: Any) -> Any:
        base, state = type(self).__mro__[2], self.__getstate__()
        arguments, names = self._hvd_pipe_arguments, self._hvd_pipe_names
        return _revive, (base, state, arguments, names, self._in_flight())

    # What the engine asks for: see `hvd_pipe.torch.strategies.engine.Owner`.

    def _update(self) -> None:
        trace = timeline.active
        begun = None if trace is None else trace.moment()
        super().step()
        if trace is not None and begun is not None:
            trace.update(begun)

    def _peek(self) -> None:
        """Make an update that moves the weights only: without hooks, on a copy of the state."""
        kept = dict(self.state)
        groups = [dict(group) for group in self.param_groups]
        self.state.clear()
        for parameter, state in kept.items():
            self.state[parameter] = {key: _copied(value) for key, value in state.items()}
        try:
            step = super().step
            plain = getattr(step, "__wrapped__", None)  # beneath torch's wrapper for hooks
            step() if plain is None else plain(self)
        finally:
            self.state.clear()
            self.state.update(kept)
            for group, before in zip(self.param_groups, groups, strict=True):
                group.update(before)

    def _joining(self, known: set[int]) -> dict[str, torch.Tensor]:
        found = {}
        for place, parameter in enumerate(self._owned()):
            if parameter.requires_grad and id(parameter) not in known:
                found[self._hvd_pipe_names[place]] = parameter
        return found

    # Within.

    def _take_from(self, root_rank: int) -> None:
        """Take the root's state and what it has in flight, in Horovod's own broadcast of states.

        That finds equal states on all ranks then, and sends the tensors once more. Where the root
        has none yet it sets gradients to zero, calls `step`, and asks for the state again.
        """
        second, self._hvd_pipe_coming = self._hvd_pipe_coming == "state_dict", ""
        if second:
            return
        if is_elastic():
            self._rest(keep=True)
        broadcast_optimizer_state(self, root_rank)
        if is_elastic():
            self._start_anew()
        if not self.state:
            self._hvd_pipe_coming = "step"

    def _owned(self) -> list[torch.Tensor]:
        return owned_by(self)

    def _start(self, checked: Checked) -> Engine:
        workers.note(self)
        self._hvd_pipe = engine = make_engine(checked, _Owner(weakref.ref(self)))
        if isinstance(checked.strategy, Auto):
            self._hvd_pipe_auto = AutoChoice(checked, self, engine)
        return engine

    def _resumed(
        self, engine: Engine, in_flight: checkpoint.Saved | None
    ) -> tuple[Engine, checkpoint.Saved | None]:
        """Go on with what `Auto` had chosen when this was checkpoint."""
        if self._hvd_pipe_auto is not None:
            engine, in_flight = self._hvd_pipe_auto.resume(engine, in_flight)
            self._hvd_pipe = engine
        return engine, in_flight

    def _engine(self) -> Engine:
        """Return the engine; a copy gets its own here."""
        if self._hvd_pipe is None:
            if not mpi_ops.is_initialized():
                raise HvdPipeError(
                    "Horovod was shut down, and this optimizer needs it: call hvd.init() again, "
                    "on all ranks, or hvd.shutdown() later."
                )
            workers.begin()
            named = dict(zip(self._hvd_pipe_names, self._owned(), strict=True))
            arguments, groups = self._hvd_pipe_arguments, self._hvd_pipe_arguments.groups
            if groups is not None:
                groups = [[named[name] for name in group] for group in groups]
            arguments = dataclasses.replace(
                arguments, named_parameters=named.items(), groups=groups
            )
            checked = check_everywhere(self, arguments)
            fresh = self._has_new()  # of what a state leads to, none is
            engine, in_flight = self._resumed(self._start(checked), self._hvd_pipe_saved)
            if in_flight is not None or not is_elastic():  # there, none is nothing to warn of
                checkpoint.load(engine, in_flight, self._owned())
            engine.check_position()
            self._hvd_pipe_saved = None
            engine.fresh = fresh
            if not fresh:
                self._note_old()
            return engine
        return self._hvd_pipe

    def _heard_of_gradients(self) -> bool:
        return self._hvd_pipe is not None and self._hvd_pipe.fresh

    def _has_new(self) -> bool:
        """Return whether gradients wait to be applied, wherever they have come from."""
        return self._hvd_pipe_gradients.any_new(self._owned())

    def _note_old(self) -> None:
        """Take what is in ``p.grad`` for applied, dropped, or prepared."""
        self._hvd_pipe_gradients.note_old(self._owned())

    def _check_not_old(self, engine: Engine) -> None:
        """Refuse to apply again what `synchronize` has just applied."""
        old = (p.grad for p in self._owned() if p.grad is not None)
        if engine.keeps and not self._has_new() and not all(map(is_zero, old)):
            raise HvdPipeError(
                "step() inside skip_synchronize(), but synchronize() found no new gradient: what "
                "is in p.grad was applied before. Set gradients before synchronize(), by "
                "p.grad = g or p.grad.copy_(g); a change by p.grad.data cannot be seen, and zeros "
                "that are written in place count as cleared: write p.grad = g."
            )

    def _in_flight(self) -> checkpoint.Saved | None:
        engine = self._hvd_pipe
        if engine is None:
            return self._hvd_pipe_saved
        if engine.fresh and engine.current is not None and engine.remembers:
            raise HvdPipeError(
                "a state was asked for after backward() and before step(), while gradients are on "
                "their way: save or copy after step()."
            )
        return self._noted(engine)

    def _noted(self, engine: Engine) -> checkpoint.Saved:
        found = checkpoint.save(engine, self._owned())
        return found if self._hvd_pipe_auto is None else self._hvd_pipe_auto.note(found)

    # What ends with Horovod: `hvd.shutdown()`, and an elastic job's resets.

    def _rest(self, keep: bool) -> str | None:
        """Give the engine up; the next step, or `_start_anew`, makes another.

        Args:
            keep: Whether all that was sent has arrived, so that it goes along; else the gradients,
                which may lie in buffers of the network, are dropped with it.

        Returns:
            The strategy's name; None where there is no engine.
        """
        engine = self._hvd_pipe
        if engine is None:
            return None
        self._hvd_pipe_saved = None
        if keep:
            try:
                self._hvd_pipe_saved = self._noted(engine)
                self._tell_of_replicas(self._hvd_pipe_saved)
            except Exception as error:  # whatever it is, Horovod must end
                _log.warning("what %s had in flight is lost: %s", engine.name, error)
        else:
            for parameter in self._owned():
                parameter.grad = None
        engine.retire()
        if self._hvd_pipe_auto is not None:
            self._hvd_pipe_auto.close()
        self._hvd_pipe_sent += engine.reduction.traffic.sent_bytes
        self._hvd_pipe = self._hvd_pipe_auto = None
        self._hvd_pipe_loss_scale, self._hvd_pipe_late_scaler = None, False
        return engine.name

    def _tell_of_replicas(self, found: checkpoint.Saved) -> None:
        if is_elastic() and "average" in found["tensors"] and mpi_ops.rank() == 0:
            _log.warning(
                "elastic: replicas under %s have gone apart since their last average, and all of "
                "them become rank 0's now. hvd_pipe.torch.elastic.run averages them first, which "
                "horovod.torch.elastic.run does not know of.",
                found["strategy"],
            )

    def _finish(self) -> None:
        """Leave nothing in flight; not in the middle of a step, which is given up."""
        engine = self._hvd_pipe
        if engine is not None and engine.keeps and not engine.fresh:
            engine.synchronize()
            self._note_old()

    def _start_anew(self) -> None:
        """Start on other workers than before: what a codec has left over stays behind."""
        found = self._hvd_pipe_saved
        if found is not None:
            self._hvd_pipe_saved = checkpoint.shared(found)
        self._engine().fresh = False  # gradients that are still there belong to an earlier step
        self._note_old()

    def _unscaled(self, engine: Engine) -> bool:
        """Take GradScaler's part: divide the gradients by their scale; False on an overflow."""
        scale: torch.Tensor | None = self.__dict__["grad_scale"]
        found_inf: torch.Tensor = self.__dict__["found_inf"]
        if scale is None:
            if self._hvd_pipe_late_scaler:
                raise HvdPipeError(
                    "scaler.unscale_(optimizer) came before the gradients were averaged: call "
                    "optimizer.synchronize(loss_scale=scaler.get_scale()) after backward() and "
                    "before unscale_, and scaler.step(optimizer) inside "
                    "`with optimizer.skip_synchronize():`."
                )
            if engine.needs_loss_scale and self._hvd_pipe_loss_scale is None:
                raise HvdPipeError(
                    "with scaler.unscale_() this strategy must know the loss scale: call "
                    "optimizer.synchronize(loss_scale=scaler.get_scale()) before unscale_."
                )
        # An optimizer that knows of scales (fused=True) must not divide once more.
        self.__dict__.update(grad_scale=None, found_inf=None)
        if scale is not None:
            engine.note_scale(float(scale))
        if float(found_inf) != 0.0:
            return False
        if scale is not None:
            due = engine.gradient_scale
            unscale(engine.settings.parameters, float(scale) if due is None else due)
        return True

    def _averaged(
        self, engine: Engine, closure: Callable[[], Any] | None, spans: _Updates
    ) -> Callable[[], Any]:
        """Return the closure with its loss and gradients averaged, so that ranks decide alike."""
        if closure is None:
            raise TypeError("LBFGS needs a closure that computes the loss: step(closure).")

        def averaged() -> Any:
            spans.end()
            with torch.enable_grad():
                loss = closure()
            mean = torch.as_tensor(loss).detach().clone().double().reshape(1)
            engine.before_update()
            engine.after_update()
            if not engine.reduction.alone:
                engine.reduction.reduce(mean, f"{engine.settings.tag}.loss")
            spans.begin()
            return mean[0]

        return averaged


class _Owner:
    """Leads an engine to its optimizer without keeping that alive."""

    def __init__(self, reference: weakref.ref[DistributedMixin]) -> None:
        self._reference = reference

    def _optimizer(self) -> DistributedMixin:
        owner = self._reference()
        if owner is None:
            raise HvdPipeError("the DistributedOptimizer of these parameters is gone: keep it.")
        return owner

    def update(self) -> None:
        self._optimizer()._update()

    def peek(self) -> None:
        self._optimizer()._peek()

    def note_old(self) -> None:
        self._optimizer()._note_old()

    def state(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer().state.get(parameter, {})
        return state

    def joining(self, known: set[int]) -> dict[str, torch.Tensor]:
        return self._optimizer()._joining(known)


class _Updates:
    """The timeline's updates of an optimizer that calls its closure in between."""

    def __init__(self) -> None:
        self._begun: timeline.Moment | None = None

    def begin(self) -> None:
        if timeline.active is not None:
            self._begun = timeline.active.moment()

    def end(self) -> None:
        if timeline.active is not None and self._begun is not None:
            timeline.active.update(self._begun)
        self._begun = None


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
            arguments, groups=[[names[place] for place in group] for group in groups]
        )
    arguments = dataclasses.replace(arguments, named_parameters=None, for_copy=True)
    wrapped = _twin(optimizer, arguments, checked.all_names)
    if not elastic:
        wrapped._start(checked)
    settings = checked.settings
    wrapped._hvd_pipe_profile = profile_job(
        wrapped, settings.names, settings.parameters, settings.reduction.process_set
    )
    return wrapped


def _twin(
    optimizer: torch.optim.Optimizer, arguments: Arguments, names: list[str]
) -> DistributedMixin:
    """Return an instance of the distributed class over the optimizer's ``__dict__``."""
    cls = _distributed_class(type(optimizer))  # type: ignore[arg-type]
    wrapped = cls.__new__(cls)
    wrapped.__dict__ = optimizer.__dict__
    wrapped._hvd_pipe = None
    wrapped._hvd_pipe_arguments, wrapped._hvd_pipe_names = arguments, names
    wrapped._hvd_pipe_gradients = NewGradients()
    wrapped._note_old()
    if "step" in wrapped.__dict__:
        wrapped.__dict__["step"] = _scheduled_step(weakref.ref(wrapped))
    return wrapped


def _revive(
    base: type[torch.optim.Optimizer],
    state: dict[str, Any],
    arguments: Arguments,
    names: list[str],
    in_flight: checkpoint.Saved | None,
) -> DistributedMixin:
    """Make a copy, which gets its engine at its first step."""
    plain = base.__new__(base)
    plain.__setstate__(state)
    wrapped = _twin(plain, arguments, names)
    wrapped._hvd_pipe_saved = in_flight
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


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)
