"""The engine of a distributed optimizer: made at its first step, given up when Horovod ends.

A copy of an optimizer (``copy.deepcopy``, pickle) has no engine until its first ``step()``, which
all ranks make; until then it sends nothing, so that one rank alone may copy and save it. After
``hvd.shutdown()``, and in an elastic job before the workers' first rendezvous, it is the same.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.runtime.restarts import is_elastic
from hvd_pipe.strategy import Auto, MergedGradient
from hvd_pipe.torch import checkpoint, workers
from hvd_pipe.torch.amp import LossScale
from hvd_pipe.torch.arguments import Arguments, Checked, check_everywhere
from hvd_pipe.torch.auto_choice import AutoChoice, say_left_out
from hvd_pipe.torch.checkpoint import SavedState
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.overlap_start import OverlapStart
from hvd_pipe.torch.parameters import NewGradients, owned_by
from hvd_pipe.torch.partial_updates import Options, update_quietly
from hvd_pipe.torch.strategies.base import Engine
from hvd_pipe.torch.strategies.make_engine import make_engine
from hvd_pipe.torch.strategies.pending_parameters import memory_of

_log = logging.getLogger("hvd_pipe")


class EngineHolder(torch.optim.Optimizer):
    """An optimizer with an engine, or with what the next engine is made of."""

    _hvd_pipe: Engine | None
    _hvd_pipe_arguments: Arguments
    _hvd_pipe_names: list[str]
    _hvd_pipe_gradients: NewGradients
    _hvd_pipe_scale: LossScale
    _hvd_pipe_saved: SavedState | None = None
    _hvd_pipe_auto: AutoChoice | OverlapStart | None = None
    """What may change the engine after a step."""
    _hvd_pipe_sent = 0.0

    def _owned(self) -> list[torch.Tensor]:
        return owned_by(self)

    def _start(self, checked: Checked) -> Engine:
        workers.note(self)
        say_left_out(checked)
        self._hvd_pipe = engine = make_engine(checked, weakref.ref(self))
        if isinstance(checked.strategy, Auto):
            self._hvd_pipe_auto = AutoChoice(checked, self, engine)
        elif isinstance(checked.strategy, MergedGradient) and checked.strategy.overlaps_forward:
            is_given = checked.strategy != MergedGradient(overlap="forward")
            is_given = is_given or checked.settings.groups is not None
            self._hvd_pipe_auto = OverlapStart(memory_of(checked.settings.parameters), is_given)
        return engine

    def _resumed(
        self, engine: Engine, in_flight: SavedState | None
    ) -> tuple[Engine, SavedState | None]:
        """Go on with what `Auto` had chosen when this was saved."""
        if self._hvd_pipe_auto is not None:
            engine, in_flight = self._hvd_pipe_auto.resume(engine, in_flight)
            self._hvd_pipe = engine
        return engine, in_flight

    def _engine(self) -> Engine:
        """Return the engine; a copy gets its own here."""
        if self._hvd_pipe is not None:
            return self._hvd_pipe
        if not mpi_ops.is_initialized():
            raise HvdPipeError(
                "Horovod was shut down, and this optimizer needs it: call hvd.init() again, "
                "on all ranks, or hvd.shutdown() later."
            )
        workers.begin()
        checked = check_everywhere(self, self._named_arguments())
        fresh = self._has_new_gradients()  # of what a state leads to, none is
        engine, in_flight = self._resumed(self._start(checked), self._hvd_pipe_saved)
        if in_flight is not None or not is_elastic():  # there, none is nothing to warn of
            checkpoint.load(engine, in_flight, self._owned())
        engine.check_position()
        self._hvd_pipe_saved = None
        engine.has_new_gradients = fresh
        if not fresh:
            self._note_old()
        return engine

    def _named_arguments(self) -> Arguments:
        """Return the arguments with this optimizer's parameters instead of their names."""
        arguments, groups = self._hvd_pipe_arguments, self._hvd_pipe_arguments.groups
        named = dict(zip(self._hvd_pipe_names, self._owned(), strict=True))
        if groups is not None:
            groups = [[named[name] for name in group] for group in groups]
        return dataclasses.replace(arguments, named_parameters=named.items(), groups=groups)

    def _has_new_gradients(self) -> bool:
        """Return whether gradients wait to be applied, wherever they have come from."""
        return self._hvd_pipe_gradients.any_new(self._owned())

    def _note_old(self) -> None:
        """Take what is in ``p.grad`` for applied, dropped, or prepared."""
        self._hvd_pipe_gradients.note_old(self._owned())

    def _state_in_flight(self) -> SavedState | None:
        engine = self._hvd_pipe
        if engine is None:
            return self._hvd_pipe_saved
        if (
            engine.has_new_gradients
            and engine.current is not None
            and (engine.has_state_in_flight or engine.remembers_residuals)
        ):
            raise HvdPipeError(
                "a state was asked for after backward() and before step(), while gradients are on "
                "their way: save or copy after step()."
            )
        return self._saved_state(engine)

    def _finish_deferred(self) -> None:
        """Apply what the last step has deferred; sends nothing."""
        if self._hvd_pipe is not None:
            self._hvd_pipe.finish()

    def _saved_state(self, engine: Engine) -> SavedState:
        found = checkpoint.save(engine, self._owned())
        auto = self._hvd_pipe_auto
        return auto.note(found) if isinstance(auto, AutoChoice) else found

    # What ends with Horovod: `hvd.shutdown()`, and an elastic job's resets.

    def _release_engine(self, keep: bool) -> str | None:
        """Give the engine up; the next step, or `_start_new_engine`, makes another."""
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
        if self._hvd_pipe_auto is not None:
            self._hvd_pipe_auto.close()
        self._hvd_pipe_sent += engine.reduction.traffic.sent_bytes
        self._hvd_pipe = self._hvd_pipe_auto = None
        self._hvd_pipe_scale.clear()
        return engine.name

    def _finish(self) -> None:
        """Leave nothing in flight; not in the middle of a step, which is given up."""
        engine = self._hvd_pipe
        if engine is not None and engine.has_state_in_flight and not engine.has_new_gradients:
            engine.synchronize()
            self._note_old()

    def _start_new_engine(self) -> None:
        """Start on other workers than before, without a codec's residuals."""
        found = self._hvd_pipe_saved
        if found is not None:
            self._hvd_pipe_saved = found.shared()
        # Gradients that are still there belong to an earlier step.
        self._engine().has_new_gradients = False
        self._note_old()

    # What the engine asks for: see `Settings.optimizer`.

    def _update(self) -> None:
        with timeline.updating():
            super().step()

    def _step_without_hooks(self) -> None:
        step = super().step
        plain = getattr(step, "__wrapped__", None)  # beneath torch's wrapper for hooks
        step() if plain is None else plain(self)

    def _update_some(self, parameters: Sequence[torch.Tensor], options: Options) -> None:
        first = parameters[0].grad
        version = None if first is None else first._version
        with timeline.updating():
            update_quietly(self, self._step_without_hooks, parameters, options)
        if first is not None and first._version != version:
            self._hvd_pipe_gradients.note_written(parameters)

    def _predict_update(self) -> None:
        """Make an update that moves the weights only: without hooks, on a copy of the state."""
        kept = dict(self.state)
        groups = [dict(group) for group in self.param_groups]
        self.state.clear()
        for parameter, state in kept.items():
            self.state[parameter] = {key: _copied(value) for key, value in state.items()}
        try:
            self._step_without_hooks()
        finally:
            self.state.clear()
            self.state.update(kept)
            for group, before in zip(self.param_groups, groups, strict=True):
                group.update(before)

    def _joining(self, known: set[int]) -> dict[str, torch.Tensor]:
        joining: dict[str, torch.Tensor] = {}
        owned = self._owned()
        if all(id(each) in known or not each.requires_grad for each in owned):
            return joining
        engine, here = self._hvd_pipe, {id(each) for each in owned}
        assert engine is not None
        named = zip(engine.settings.names, engine.settings.parameters, strict=True)
        kept = {id(parameter): name for name, parameter in named if id(parameter) in here}
        # Places in the groups may have shifted: a name that is still another's is not taken.
        taken, before, names = {*kept.values(), ""}, self._hvd_pipe_names, []
        for i, parameter in enumerate(owned):
            name = kept.get(id(parameter), before[i] if i < len(before) else "")
            if id(parameter) not in kept and name in taken:
                name = f"param.joined.{len(engine.settings.names)}.{i}"
            names.append(name)
            if id(parameter) not in known and parameter.requires_grad:
                joining[name] = parameter
        before[:] = names
        return joining


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)
