"""The class of a distributed optimizer: the user's class, with an engine that moves gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import Average, ProcessSet, global_process_set, is_initialized

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.measuring.step_times import JobProfile, profile_job
from hvd_pipe.planning.methods import spell
from hvd_pipe.planning.plan import Plan
from hvd_pipe.runtime.arguments import check_passes
from hvd_pipe.runtime.restarts import is_elastic
from hvd_pipe.strategy import Strategy
from hvd_pipe.torch import amp, checkpoint, workers
from hvd_pipe.torch.arguments import Arguments, Checked, check_alone, check_everywhere
from hvd_pipe.torch.auto_choice import AutoChoice, chooser_of, say_left_out
from hvd_pipe.torch.checkpoint import SavedState
from hvd_pipe.torch.compression import Compression
from hvd_pipe.torch.horovod_api import broadcast_optimizer_state, root_of_horovods
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.overlap_start import OverlapStart
from hvd_pipe.torch.parameters import NewGradients, is_zero, owned_by
from hvd_pipe.torch.partial_updates import Options, update_quietly
from hvd_pipe.torch.strategies.base import Engine
from hvd_pipe.torch.strategies.make_engine import make_engine

_log = logging.getLogger("hvd_pipe")


class DistributedMixin(torch.optim.Optimizer):
    """What users call: it checks the order of the calls and drives the engine.

    A copy (``copy.deepcopy``, pickle) has no engine until its first ``step()``, which all ranks
    make; until then it sends nothing, so that one rank alone may copy and save it. After
    ``hvd.shutdown()``, and in an elastic job before the workers' first rendezvous, it is the same.
    """

    _hvd_pipe: Engine | None
    _hvd_pipe_arguments: Arguments
    _hvd_pipe_names: list[str]
    _hvd_pipe_gradients: NewGradients
    _hvd_pipe_scale: float | None
    """The loss scale by which the coming step's gradients are divided, where it is known."""
    _hvd_pipe_saved: SavedState | None = None
    _hvd_pipe_chooser: AutoChoice | OverlapStart | None = None
    """What may change the engine after a step."""
    _hvd_pipe_sent = 0.0
    _hvd_pipe_profile: JobProfile | None = None
    _hvd_pipe_skip = False
    _hvd_pipe_expects = ""
    """What Horovod's `broadcast_optimizer_state` calls next: "step", then "state_dict"."""
    _hvd_pipe_drained = False

    @property
    def plan(self) -> Plan | None:
        """The buckets in the order in which they are sent; None where none are (CoCoD)."""
        return None if self._hvd_pipe is None else self._hvd_pipe.plan

    @property
    def sent_bytes(self) -> float:
        """Bytes this rank has put on the wire for gradients and models so far.

        Counted as ``2 (n-1)/n`` of each message as it travels, the least that an all-reduce needs.
        """
        engine, before = self._hvd_pipe, self._hvd_pipe_sent
        return before if engine is None else before + engine.reduction.traffic.sent_bytes

    @property
    def state(self) -> Any:
        """The user's optimizer's state, after the updates that the last step has deferred."""
        engine = self._hvd_pipe
        if engine is not None and engine.is_due:
            engine.finish()
        try:
            return self.__dict__["state"]
        except KeyError:  # as in a wrapper of this class, which asks by itself
            raise AttributeError("state") from None

    @state.setter
    def state(self, state: Any) -> None:
        self._finish_deferred()
        self.__dict__["state"] = state

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """The name of each parameter, as Horovod's optimizers have it and scripts read it."""
        return dict(zip(self._owned(), self._hvd_pipe_names, strict=True))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of the strategy; ``closure`` is called once, at the start.

        LBFGS calls it as often as it likes: loss and gradients are averaged each time.
        """
        hooked = self._hvd_pipe is not None and self._hvd_pipe.has_new_gradients
        if self._hvd_pipe_expects == "step" and not hooked:
            self._hvd_pipe_expects = "state_dict"  # and no step, which would decay weights
            self._note_old()
            return None
        self._hvd_pipe_expects = ""
        engine = self._engine()
        if isinstance(self, torch.optim.LBFGS):
            return self._step_of_lbfgs(engine, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_step(engine)
        updating = engine.before_update()
        if amp.is_scaled(self):
            updating = amp.unscale_in_step(self, engine, self._hvd_pipe_scale) and updating
        result = self._apply(engine) if updating else None
        engine.after_update()
        engine.compare_replicas()
        timeline.active.end_step()
        if self._hvd_pipe_profile is not None and not self._hvd_pipe_profile.end_step():
            self._hvd_pipe_profile = None
        if self._hvd_pipe_chooser is not None:
            self._hvd_pipe = self._hvd_pipe_chooser.after_step(engine)
        self._hvd_pipe_scale, self._hvd_pipe_drained = None, False
        self._note_old()
        return result if closure is None else loss

    # torch wraps a class's step for its hooks; the user's class has been wrapped already.
    step.hooked = True  # type: ignore[attr-defined]

    def _check_step(self, engine: Engine) -> None:
        """Raise, or warn, where the calls before this step do not go with it."""
        if engine.synchronized and not (engine.was_read or self._hvd_pipe_skip):
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(): write "
                "`with optimizer.skip_synchronize(): optimizer.step()`.",
                stacklevel=3,
            )
        if self._hvd_pipe_skip and engine.has_new_gradients and not engine.synchronized:
            raise HvdPipeError(
                "step() inside skip_synchronize(), but gradients were computed since the last "
                "synchronize(): call optimizer.synchronize() after backward() and before this."
            )
        if (  # `synchronize` has just applied these gradients
            self._hvd_pipe_skip
            and self._hvd_pipe_drained
            and engine.has_state_in_flight
            and not self._has_new_gradients()
            and not all(is_zero(p.grad) for p in self._owned() if p.grad is not None)
        ):
            raise HvdPipeError(
                "step() inside skip_synchronize(), but synchronize() found no new gradient: what "
                "is in p.grad was applied before. Set gradients before synchronize(), by "
                "p.grad = g or p.grad.copy_(g); a change by p.grad.data cannot be seen, and zeros "
                "that are written in place count as cleared: write p.grad = g."
            )

    # Architecture: G11
    def _apply(self, engine: Engine) -> Any:
        """Let the user's optimizer apply the gradients."""
        with timeline.active.during("update"):
            engine.note_gradients()
            try:
                return super().step()
            except BaseException:
                amp.forget_scaler(self)
                raise

    def _step_of_lbfgs(self, engine: Engine, closure: Callable[[], Any] | None) -> Any:
        """Let LBFGS step; each of its calls gets the mean of the ranks' losses and gradients."""
        if closure is None:
            raise TypeError("LBFGS needs a closure that computes the loss: step(closure).")
        updates = contextlib.ExitStack()

        def averaged() -> Any:
            updates.close()
            with torch.enable_grad():
                loss = closure()
            mean = torch.as_tensor(loss).detach().clone().double().reshape(1)
            engine.before_update()
            engine.after_update()
            if not engine.reduction.alone:
                engine.reduction.reduce(mean, f"{engine.settings.tag}.loss")
            updates.enter_context(timeline.active.during("update"))
            return mean[0]

        with updates:
            result = super().step(averaged)
        self._note_old()
        timeline.active.end_step()
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the user's class; after ``backward()`` it drops this step's gradients."""
        self._hvd_pipe_expects = ""
        to_none = (*args, *kwargs.values(), True)[0]
        if to_none and getattr(super().zero_grad, "__func__", None) is _CLEAR:
            with torch._C.DisableTorchFunctionSubclass():  # it reads no values
                super().zero_grad()
            self._hvd_pipe_gradients.note_none()
        else:
            super().zero_grad(*args, **kwargs)
            self._note_old()
        if self._hvd_pipe is not None:
            self._hvd_pipe.note_cleared()

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
        amp.check_loss_scale(loss_scale)
        engine = self._engine()
        by_hand = not engine.has_new_gradients and self._has_new_gradients()
        preparing = (engine.has_new_gradients or by_hand) and not engine.synchronized
        self._hvd_pipe_drained = not (preparing or engine.synchronized)
        engine.synchronize(by_hand, knows_scale=loss_scale is not None)
        self._note_old()
        if loss_scale is not None and preparing:
            self._hvd_pipe_scale = loss_scale
            amp.note_scale(loss_scale, engine)

    def _gradients_are_read(self, func: Any, args: tuple[Any, ...]) -> None:
        """Settle all gradients, as this function of torch is about to read one of them."""
        engine, scale = self._engine(), amp.scale_of(self, func, args)
        engine.settle()
        self._note_old()
        if scale is None and engine.needs_loss_scale:
            engine.watch_for_scaler()
        elif scale is not None:
            self._hvd_pipe_scale = scale
            amp.note_scale(scale, engine)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes add to gradients that are sent by a later one, or by ``step()``.

        As ``DistributedDataParallel.no_sync()``; `backward_passes_per_step` counts the passes
        outside of it alone.

        Example::

            with optimizer.no_sync():
                loss_of(first_half).backward()
            loss_of(second_half).backward()
            optimizer.step()
        """
        before = self._engine()
        synced, before.syncs = before.syncs, False
        try:
            yield
        finally:
            before.syncs = self._engine().syncs = synced

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
        if engine.has_new_gradients and engine.current is not None:
            raise HvdPipeError(
                "set_backward_passes_per_step() after backward() and before step(): call it after "
                "step()."
            )
        engine.settings = dataclasses.replace(engine.settings, passes=passes)
        self._hvd_pipe_arguments = dataclasses.replace(
            self._hvd_pipe_arguments, backward_passes_per_step=passes
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the user's class, between two steps; the new parameters join at the next step."""
        engine = self._hvd_pipe
        if engine is not None and engine.has_new_gradients:
            raise HvdPipeError(
                "add_param_group() after backward() and before step(): call it after step()."
            )
        self._finish_deferred()
        super().add_param_group(param_group)
        names = self._hvd_pipe_names
        names += [f"param.joined.{i}" for i in range(len(names), len(self._owned()))]

    def state_dict(self) -> dict[str, Any]:
        """As the user's class, with what is in flight under the key ``"hvd_pipe"``.

        The rest has the plain layout: torch and Horovod load it and ignore the key. Any one rank
        may call this alone; it waits for what that rank has sent.
        """
        self._finish_deferred()
        root_rank = root_of_horovods(sys._getframe(1))
        if root_rank is not None:
            self._receive_from_root(root_rank)
        state: dict[str, Any] = super().state_dict()
        state[checkpoint.KEY] = self._state_in_flight()
        return state

    def _receive_from_root(self, root_rank: int) -> None:
        """Take the root's state and what it has in flight, in Horovod's own broadcast."""
        expected, self._hvd_pipe_expects = self._hvd_pipe_expects, ""
        if expected == "state_dict":
            return
        if is_elastic():
            self._release_engine(keep=True)
        broadcast_optimizer_state(self, root_rank)
        if is_elastic():
            self._start_new_engine()
        if not self.state:
            self._hvd_pipe_expects = "step"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the user's class; what was in flight when it was saved goes on from there.

        A state without the key ``"hvd_pipe"`` (of Horovod, of plain torch) starts with nothing in
        flight, as does one of another strategy; this warns where something is lost.
        """
        self._hvd_pipe_expects = ""
        in_flight = SavedState.from_dict(state_dict.get(checkpoint.KEY))
        if self._hvd_pipe is None:
            super().load_state_dict(state_dict)
            self._hvd_pipe_saved = in_flight
            return
        engine = self._hvd_pipe
        engine.finish_before_others()
        messages = engine.loaded_before or engine.next_messages
        had_begun, plan, chooser = engine.rounds > 0, engine.plan, self._hvd_pipe_chooser
        tries = chooser is not None and chooser.tries
        engine.discard()
        super().load_state_dict(state_dict)
        engine = self._resumed(engine, in_flight)
        # A state may change what ranks must do alike: messages, plans, trials of plans.
        differs = engine.has_state_in_flight or tries or engine.plan is not plan
        if differs and (had_begun or engine.rounds > 0):
            engine.loaded_before = messages
        self._note_old()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler calls ``step()`` on an overflow, too: ranks count their steps."""
        engine = self._hvd_pipe
        fused = bool(self.__dict__.get("_step_supports_amp_scaling", False))
        return fused or (engine is not None and not engine.is_averaged)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._finish_deferred()
        base, in_flight = type(self).__bases__[1], self._state_in_flight()
        arguments, names = self._hvd_pipe_arguments, self._hvd_pipe_names
        return _revive, (base, self.__getstate__(), arguments, names, in_flight)

    # The engine: made at the first step, retired when Horovod ends.

    def _owned(self) -> list[torch.Tensor]:
        return owned_by(self)

    def _start(self, checked: Checked) -> Engine:
        workers.note(self)
        say_left_out(checked)
        self._hvd_pipe = engine = make_engine(checked, weakref.ref(self))
        self._hvd_pipe_chooser = chooser_of(checked, self, engine)
        return engine

    def _resumed(self, engine: Engine, in_flight: SavedState | None) -> Engine:
        """Go on with a saved state, and with the method that `Auto` had chosen."""
        if self._hvd_pipe_chooser is not None:
            engine, in_flight = self._hvd_pipe_chooser.resume(engine, in_flight)
            self._hvd_pipe = engine
        checkpoint.load(engine, in_flight, self._owned())
        return engine

    def _engine(self) -> Engine:
        """Return the engine; a copy gets its own here."""
        if self._hvd_pipe is not None:
            return self._hvd_pipe
        if not is_initialized():
            raise HvdPipeError(
                "Horovod was shut down, and this optimizer needs it: call hvd.init() again, "
                "on all ranks, or hvd.shutdown() later."
            )
        workers.begin()
        checked = check_everywhere(self, self._named_arguments())
        has_new = self._has_new_gradients()  # before a state is loaded
        engine, in_flight = self._start(checked), self._hvd_pipe_saved
        if in_flight is not None or not is_elastic():  # an elastic job may start without a state
            engine = self._resumed(engine, in_flight)
        engine.check_position()
        self._hvd_pipe_saved = None
        engine.has_new_gradients = has_new
        if not has_new:
            self._note_old()
        return engine

    def _named_arguments(self) -> Arguments:
        arguments, groups = self._hvd_pipe_arguments, self._hvd_pipe_arguments.groups
        named = dict(zip(self._hvd_pipe_names, self._owned(), strict=True))
        if groups is not None:
            groups = [[named[name] for name in group] for group in groups]
        return dataclasses.replace(arguments, named_parameters=named.items(), groups=groups)

    def _has_new_gradients(self) -> bool:
        return self._hvd_pipe_gradients.any_new(self._owned())

    def _note_old(self) -> None:
        self._hvd_pipe_gradients.note_old(self._owned())

    def _state_in_flight(self) -> dict[str, Any] | None:
        engine = self._hvd_pipe
        if engine is None:
            saved = self._hvd_pipe_saved
            return None if saved is None else saved.to_dict()
        if (
            engine.has_new_gradients
            and engine.current is not None
            and (engine.has_state_in_flight or engine.remembers_residuals)
        ):
            raise HvdPipeError(
                "a state was asked for after backward() and before step(), while gradients are on "
                "their way: save or copy after step()."
            )
        return self._saved_state(engine).to_dict()

    def _finish_deferred(self) -> None:
        """Apply what the last step has deferred; sends nothing."""
        if self._hvd_pipe is not None:
            self._hvd_pipe.finish()

    def _saved_state(self, engine: Engine) -> SavedState:
        chooser = self._hvd_pipe_chooser
        chosen = chooser.chosen if isinstance(chooser, AutoChoice) else None
        return checkpoint.save(engine, self._owned(), None if chosen is None else spell(chosen))

    # What ends with Horovod: `hvd.shutdown()`, and an elastic job's resets.

    def _release_engine(self, keep: bool) -> str | None:
        """Retire the engine; the next step, or `_start_new_engine`, makes another."""
        engine = self._hvd_pipe
        if engine is None:
            return None
        self._hvd_pipe_saved = None
        if keep:
            try:
                engine.finish()
                self._hvd_pipe_saved = saved = self._saved_state(engine)
                if is_elastic() and "average" in saved.tensors and mpi_ops.rank() == 0:
                    _log.warning(
                        "elastic: replicas under %s have gone apart since their last average, and "
                        "all of them become rank 0's now. hvd_pipe.torch.elastic.run averages "
                        "them first, which horovod.torch.elastic.run does not know of.",
                        saved.strategy,
                    )
            except Exception as error:  # whatever it is, Horovod must end
                _log.warning("what %s had in flight is lost: %s", engine.name, error)
        else:
            for parameter in self._owned():
                parameter.grad = None
        engine.retire()
        if self._hvd_pipe_chooser is not None:
            self._hvd_pipe_chooser.close()
        self._hvd_pipe_sent += engine.reduction.traffic.sent_bytes
        self._hvd_pipe = self._hvd_pipe_chooser = self._hvd_pipe_scale = None
        return engine.name

    def _start_new_engine(self) -> None:
        """Start on other workers than before, without a codec's residuals."""
        saved = self._hvd_pipe_saved
        if saved is not None:
            self._hvd_pipe_saved = saved.shared()
        # Gradients that are still there belong to an earlier step.
        self._engine().has_new_gradients = False
        self._note_old()

    # What the engine asks for: see `Settings.optimizer`.

    def _update(self) -> None:
        with timeline.active.during("update"):
            super().step()

    def _step_without_hooks(self) -> None:
        step = super().step
        plain = getattr(step, "__wrapped__", None)  # beneath torch's wrapper for hooks
        step() if plain is None else plain(self)

    def _update_some(self, parameters: Sequence[torch.Tensor], options: Options) -> None:
        first = parameters[0].grad
        version = None if first is None else first._version
        with timeline.active.during("update"):
            update_quietly(self, self._step_without_hooks, parameters, options)
        if first is not None and first._version != version:
            self._hvd_pipe_gradients.note_written(parameters)

    def _joining(self, known: set[int]) -> dict[str, torch.Tensor]:
        joining: dict[str, torch.Tensor] = {}
        owned = self._owned()
        if all(id(p) in known or not p.requires_grad for p in owned):
            return joining
        engine, owned_ids = self._hvd_pipe, {id(p) for p in owned}
        assert engine is not None
        named = zip(engine.settings.names, engine.settings.parameters, strict=True)
        old_names = {id(p): name for name, p in named if id(p) in owned_ids}
        # Places in the groups may have shifted: a name that is still another's is not taken.
        taken, before, names = {*old_names.values(), ""}, self._hvd_pipe_names, []
        for i, parameter in enumerate(owned):
            name = old_names.get(id(parameter), before[i] if i < len(before) else "")
            if id(parameter) not in old_names and name in taken:
                name = f"param.joined.{len(engine.settings.names)}.{i}"
            names.append(name)
            if id(parameter) not in known and parameter.requires_grad:
                joining[name] = parameter
        before[:] = names
        return joining


_CLEAR = torch.optim.Optimizer.zero_grad


def twin(
    optimizer: torch.optim.Optimizer, arguments: Arguments, names: list[str]
) -> DistributedMixin:
    """Return an instance of the distributed class over the optimizer's ``__dict__``."""
    cls = _distributed_class(type(optimizer))  # type: ignore[arg-type]
    wrapped = cls.__new__(cls)
    wrapped.__dict__ = optimizer.__dict__
    wrapped._hvd_pipe = wrapped._hvd_pipe_scale = None
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
    in_flight: dict[str, Any] | None,
) -> DistributedMixin:
    """Make a copy, which gets its engine at its first step."""
    plain = base.__new__(base)
    plain.__setstate__(state)
    wrapped = twin(plain, arguments, names)
    wrapped._hvd_pipe_saved = SavedState.from_dict(in_flight)
    return wrapped


@functools.cache
def _distributed_class(cls: type[torch.optim.Optimizer]) -> type[DistributedMixin]:
    return type(cls.__name__, (DistributedMixin, cls), {})


def _scheduled_step(reference: weakref.ref[DistributedMixin]) -> Callable[..., Any]:
    """Return a ``step`` for the instance where a scheduler has replaced it before wrapping."""

    @functools.wraps(DistributedMixin.step)
    def step(*args: Any, **kwargs: Any) -> Any:
        owner = reference()
        if owner is None:
            raise HvdPipeError("the DistributedOptimizer of this optimizer is gone: keep it.")
        owner._opt_called = True  # type: ignore[attr-defined]
        return DistributedMixin.step(owner, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


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
    carrier: str | None = None,
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
        carrier: ``"horovod"``, or ``"torch"``: a group of `torch.distributed` (docs/carriers.md).
            None takes ``HVD_PIPE_CARRIER``, or ``"torch"`` where Horovod runs over Gloo.

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
        carrier=carrier,
    )
    # In an elastic job this sends nothing: when a new worker gets here, the others have passed
    # this long ago, and wait for it elsewhere.
    workers.begin()
    elastic = is_elastic()
    checked = (check_alone if elastic else check_everywhere)(optimizer, arguments)
    settings = checked.settings
    if settings.groups is not None:
        named_groups = [[settings.names[i] for i in group] for group in settings.groups]
        arguments = dataclasses.replace(arguments, groups=named_groups)
    arguments = dataclasses.replace(arguments, named_parameters=None, for_copy=True)
    wrapped = twin(optimizer, arguments, checked.all_names)
    if not elastic:
        wrapped._start(checked)
    wrapped._hvd_pipe_profile = profile_job(
        wrapped, settings.names, settings.parameters, settings.reduction.process_set
    )
    return wrapped
