"""A worker's stage in PyTorch: its module in several versions, and what is in flight.

    take_input --> forward --> output             take_gradient --> backward --> input_gradient
    message   -->  module  --> message            message       --> autograd --> message

A received tensor enters the autograd graph by `_Enter`, which hands its gradient over, and lets a
module's first layer work in place on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.pipeline.messages import Boundary
from hvd_pipe.pipeline.norms import Norms
from hvd_pipe.pipeline.stage import Buffer, Feed, Piece, Tally, Unit
from hvd_pipe.torch.pipedream.cut import StageModule
from hvd_pipe.torch.pipedream.measure import ActivationMeter, StageMemory
from hvd_pipe.torch.pipedream.weights import Updates, WeightVersions

__all__ = ["Losses", "TorchStage"]


@dataclass(frozen=True)
class Losses:
    """What the last stage computes of the model's output and the targets.

    Args:
        loss: A mean over the samples.
        metric: A number to be reported, likewise a mean; None for none.
        shared: Whether a microbatch's loss counts as its share of the minibatch.
    """

    loss: Callable[[Any, Any], torch.Tensor]
    metric: Callable[[Any, Any], Any] | None
    shared: bool


@dataclass
class _Flight:
    """A microbatch between its forward and its backward pass."""

    digest: int
    inputs: tuple[Any, ...]
    outputs: tuple[torch.Tensor, ...] = ()
    loss: torch.Tensor | None = None
    gradients: list[torch.Tensor] = field(default_factory=list)
    entered: dict[int, torch.Tensor] = field(default_factory=dict)
    """Gradients of the inputs, by their places."""
    messages: list[Buffer] = field(default_factory=list)
    """Memory of received messages, of which tensors are views."""


class TorchStage:
    """The stage of one worker; see :class:`hvd_pipe.pipeline.stage.Stage`.

    Args:
        cut: Its module, and what it gets and gives.
        losses: What the last stage computes; None in all others.
        updates: How its gradients become updates.
        before, after: Its messages to and from its neighbours; None at the ends.
        recompute: Keep no activations, and run forward again before backward.
        recycle: Takes a received message's memory back.
        device: Where it computes.
    """

    def __init__(
        self,
        cut: StageModule,
        losses: Losses | None,
        updates: Updates,
        before: Boundary | None,
        after: Boundary | None,
        recompute: bool,
        recycle: Callable[[Buffer], object],
        device: torch.device,
    ) -> None:
        self.module: nn.Module = cut.module
        self.versions = WeightVersions(p for p in self.module.parameters() if p.requires_grad)
        self.feed: Feed | None = None
        """Where the first and the last stage read; to be set before each run."""
        self._losses, self._updates = losses, updates
        self._before, self._after = before, after
        self._recompute, self._recycle, self._device = recompute, recycle, device
        self._flights: dict[Unit, _Flight] = {}
        self._training = True
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)  # of losses and metrics
        self._weight, self._samples = 0.0, 0
        self._meter = ActivationMeter()
        self._key = torch.zeros((), requires_grad=True, device=device)

    @property
    def norms(self) -> Norms:
        """What it knows of the gradients of all stages."""
        return self._updates.norms

    # A run.

    def begin(self, training: bool) -> None:
        self._flights.clear()  # a run that has failed may have left some
        self.tally()
        self._training = training
        self.module.train(training)
        self.versions.restart()

    def tally(self) -> Tally:
        loss, metric = self._sums.tolist()
        tally = Tally(loss, metric, self._weight, self._samples)
        self._sums.zero_()
        self._weight, self._samples = 0.0, 0
        return tally

    # A microbatch.

    def take_input(self, unit: Unit, message: Buffer) -> None:
        assert self._before is not None
        header, tensors = self._before.activations.unpack(unit, message)
        self._flights[unit] = _Flight(header.digest, tuple(tensors), messages=[message])
        self.norms.heard(header.squared_norms, from_before=True)

    def forward(self, unit: Unit, version: int) -> None:
        piece: Piece | None = None
        if self.feed is not None and (self._before is None or self._losses is not None):
            piece = self.feed.piece(unit)
        if self._before is None:
            assert piece is not None
            inputs = tuple(_to(x, self._device) for x in piece.inputs)
            self._flights[unit] = _Flight(piece.digest, inputs)
        flight = self._flights[unit]
        if self._losses is not None:
            assert piece is not None
            _check_digest(flight.digest, piece.digest, unit)
        self.versions.use(version)
        with torch.set_grad_enabled(self._training), self._noting(flight):
            output = self._run(flight)
            if self._losses is None:
                flight.outputs = tuple(output)
                if self._training:
                    self._meter.note(flight.outputs)
            else:
                assert piece is not None
                self._finish(flight, output, piece, self._losses)
        if not self._training and self._losses is not None:
            self._land(unit)

    def output(self, unit: Unit) -> Buffer:
        assert self._after is not None
        flight = self._flights[unit]
        message = self._after.activations.pack(
            unit, flight.outputs, flight.digest, self.norms.squared
        )
        if not self._training:
            self._land(unit)
        return message

    def take_gradient(self, unit: Unit, message: Buffer) -> None:
        assert self._after is not None
        header, gradients = self._after.gradients.unpack(unit, message)
        flight = self._flights[unit]
        flight.gradients = gradients
        flight.messages.append(message)
        self.norms.heard(header.squared_norms, from_before=False)

    def backward(self, unit: Unit, version: int) -> None:
        self._meter.end()
        flight = self._flights[unit]
        self.versions.use(version)
        if flight.loss is not None:
            if flight.loss.requires_grad:
                flight.loss.backward()  # type: ignore[no-untyped-call]
        else:
            assert self._after is not None
            outputs = self._after.with_gradient(flight.outputs)
            pairs = zip(outputs, flight.gradients, strict=True)
            # One that was computed without a gradient, against what was planned, takes none.
            wanted = [(x, gradient) for x, gradient in pairs if x.requires_grad]
            if wanted:
                torch.autograd.backward([x for x, _ in wanted], [g for _, g in wanted])
            self._own_gradients(flight.gradients)
        flight.outputs, flight.loss, flight.gradients = (), None, []  # the graph goes with them
        if self._before is None:
            self._land(unit)

    def input_gradient(self, unit: Unit) -> Buffer:
        assert self._before is not None
        flight = self._flights[unit]
        wanted = self._before.with_gradient(tuple(range(len(flight.inputs))))
        gradients = [
            flight.entered[at] if at in flight.entered else torch.zeros_like(flight.inputs[at])
            for at in wanted
        ]
        message = self._before.gradients.pack(unit, gradients, flight.digest, self.norms.squared)
        self._land(unit)
        return message

    # Weights.

    def average(self, contributors: int) -> None:
        self._updates.average(contributors)

    def update(self, version: int, keep: bool) -> None:
        with self.versions.updating(version, keep):
            self._updates.apply()

    def release(self, version: int) -> None:
        self.versions.release(version)

    def memory(self) -> StageMemory:
        """Return what this worker has held at the most since it was made."""
        parameters = list(self.module.parameters())
        trained = sum(p.nbytes for p in parameters if p.requires_grad)
        frozen = sum(p.nbytes for p in parameters) - trained
        return StageMemory(
            self.versions.nbytes + frozen, trained, self._updates.nbytes, self._meter.most_bytes
        )

    # Inside.

    def _own_gradients(self, received: list[torch.Tensor]) -> None:
        """Copy a parameter's gradient that autograd has left in the memory of a message.

        It takes over what reaches a parameter by views alone, as that of ``x + bias[None]`` does
        where there is one sample, and the message's memory is about to be used again.
        """
        theirs = {gradient.untyped_storage().data_ptr() for gradient in received}
        for p in self.versions.parameters:
            if p.grad is not None and p.grad.untyped_storage().data_ptr() in theirs:
                p.grad = p.grad.clone()

    def _noting(self, flight: _Flight) -> AbstractContextManager[None]:
        if not self._training:
            return nullcontext()
        return self._meter.noting(flight.inputs, list(self.module.parameters()))

    def _run(self, flight: _Flight) -> Any:
        inputs = flight.inputs
        if not self._training:
            return self.module(*inputs)
        if self._before is not None:
            wanted = set(self._before.with_gradient(tuple(range(len(inputs)))))
            inputs = tuple(
                _Enter.apply(self._key, flight.entered, at, x)  # type: ignore[no-untyped-call]
                if at in wanted
                else x
                for at, x in enumerate(inputs)
            )
        if not self._recompute:
            return self.module(*inputs)

        def run(*inputs: Any) -> Any:
            # The first layer may work in place, and what it works on is needed again.
            return self.module(*(tree_map(_copy, x) for x in inputs))

        return checkpoint(run, *inputs, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _buffers_kept(self.module)

    def _finish(self, flight: _Flight, output: Any, piece: Piece, losses: Losses) -> None:
        targets = _to(piece.targets, self._device)
        try:
            loss = losses.loss(output, targets)
        except Exception as error:
            error.add_note(
                f"in loss_fn(output, targets) with an output of {_shapes(output)} and targets of "
                f"{_shapes(targets)}, of a minibatch's {piece.samples} samples"
            )
            raise
        if not isinstance(loss, torch.Tensor) or loss.dim():
            found = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise HvdPipeError(
                f"loss_fn(output, targets) must return a scalar tensor, the mean over the "
                f"minibatch, got {found}: use reduction='mean'."
            )
        if self._training:
            weight = piece.share if losses.shared else 1.0
            flight.loss = loss if weight == 1.0 else loss * weight
        else:
            weight = float(piece.samples)
        self._sums[0] += loss.detach() * weight
        if losses.metric is not None:
            with torch.no_grad():
                self._sums[1] += losses.metric(output, targets) * weight
        self._weight += weight
        self._samples += piece.samples

    def _land(self, unit: Unit) -> None:
        for message in self._flights.pop(unit).messages:
            self._recycle(message)


class _Enter(torch.autograd.Function):
    """A received tensor, which is no leaf of the graph, so that layers may work in place on it."""

    @staticmethod
    def forward(
        ctx: Any, key: torch.Tensor, entered: dict[int, torch.Tensor], at: int, x: torch.Tensor
    ) -> torch.Tensor:
        ctx.entered, ctx.at = entered, at
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.entered[ctx.at] = gradients[0]
        return None, None, None, None


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Leave BatchNorm's statistics as they are: the first forward pass has counted."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:  # recomputing ends by an exception, as soon as backward has all that it needs
        for buffer, values in kept:
            buffer.data.copy_(values)


def _shapes(value: Any) -> str:
    return str(tree_map(lambda x: list(getattr(x, "shape", ())), value))


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def _to(value: Any, device: torch.device) -> Any:
    move = lambda x: x.to(device, non_blocking=True) if isinstance(x, torch.Tensor) else x  # noqa: E731
    return tree_map(move, value)


def _check_digest(travelled: int, own: int, unit: Unit) -> None:
    if travelled != own:
        raise HvdPipeError(
            f"the first and the last stage read different minibatches: the targets of minibatch "
            f"{unit.minibatch} differ. Loaders must yield the same minibatches in the same order "
            "on every rank: seed what shuffles them alike (DataLoader(..., shuffle=True, "
            "generator=torch.Generator().manual_seed(0))), and give them no DistributedSampler: "
            "replicas of a stage share the minibatches out."
        )
