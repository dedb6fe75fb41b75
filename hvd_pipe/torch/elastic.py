"""``hvd.elastic``: Horovod's elastic training, with optimizers that have something in flight.

Use it as Horovod's: `run` around the training function, `TorchState` for what all workers
share, ``state.commit()`` now and then. What becomes of what is in flight::

    hosts come or go     synchronize(), save, new workers, every rank goes on from rank 0's state
    a worker fails       what was sent since the last commit is dropped, the commit is loaded on
                         the workers that are left, every rank goes on from rank 0's

Either way optimizers get new engines on the new workers, as in a run that is resumed from a
checkpoint on another number of ranks: averages stay averages, plans are measured again, and the
residuals of error feedback are dropped on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from horovod.torch.elastic import state as _horovod
from horovod.torch.elastic.sampler import ElasticSampler

from hvd_pipe.runtime.restarts import elastic_run
from hvd_pipe.torch import horovod_api
from hvd_pipe.torch.distributed import DistributedMixin
from hvd_pipe.torch.horovod_api import broadcast_optimizer_state, broadcast_parameters
from hvd_pipe.torch.messages import pending

__all__ = ["ElasticSampler", "TorchState", "run"]

_log = logging.getLogger("hvd_pipe")


class TorchState(_horovod.TorchState):  # type: ignore[misc]
    """Horovod's ``TorchState``; it takes the same arguments and any optimizers, ours too.

    ``commit()`` waits for what this rank has sent and saves it with the optimizer.

    Example::

        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0, batch=0)
    """

    def save(self) -> None:
        """Save everything, or nothing: the last commit stays whole where a message fails."""
        kept = [(handler, dict(vars(handler))) for handler in self._handlers.values()]
        try:
            super().save()
        except BaseException:
            for handler, before in kept:
                vars(handler).update(before)
            raise

    def restore(self) -> None:
        """Go back to the last commit; `run` calls this when a worker has failed."""
        engines = [optimizer._hvd_pipe for optimizer in self._distributed()]
        names = sorted({engine.name for engine in engines if engine is not None})
        super().restore()
        _log.warning(
            "elastic: a worker has failed, back to the last commit%s",
            f": what {', '.join(names)} sent since then is dropped" if names else "",
        )

    def _finish(self) -> None:
        """Leave nothing in flight, and save that; a step that has begun is given up."""
        for optimizer in self._distributed():
            engine = optimizer._hvd_pipe
            if engine and engine.has_state_in_flight and not engine.has_new_gradients:
                engine.synchronize()
                optimizer._note_old()
        self.save()

    def _distributed(self) -> list[DistributedMixin]:
        values = (handler.value for handler in self._handlers.values())
        return [value for value in values if isinstance(value, DistributedMixin)]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function ``func(state, ...)``: it starts anew when workers change.

    As Horovod's ``run``, whose rules hold: no collectives between ``hvd.init()`` and this. In an
    elastic job `DistributedOptimizer` sends none: ranks compare their arguments when this starts.
    """

    def finish(state: Any) -> None:
        if isinstance(state, TorchState):
            state._finish()

    return elastic_run(func, finish, horovod_api)


class _ModelHandler(_horovod.ModelStateHandler):  # type: ignore[misc]
    """A model; Horovod's own cannot broadcast bfloat16."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class _OptimizerHandler(_horovod.OptimizerStateHandler):  # type: ignore[misc]
    """A plain optimizer; Horovod's own makes a step of weight decay on ranks without a state."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class _DistributedHandler(_OptimizerHandler):
    """A distributed optimizer; it has no engine between a reset and this."""

    value: DistributedMixin

    def restore(self) -> None:
        self.value._release_engine(keep=False)
        pending.forget()
        super().restore()

    def sync(self) -> None:
        self.value._release_engine(keep=True)
        super().sync()
        self.value._start_new_engine()


_horovod.set_handler_registry(
    [
        (DistributedMixin, _DistributedHandler),
        (torch.optim.Optimizer, _OptimizerHandler),
        (torch.nn.Module, _ModelHandler),
        *_horovod.get_handler_registry(),
    ]
)
