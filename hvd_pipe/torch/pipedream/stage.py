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
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.checkpoint import checkpoint

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.pipeline.messages import Boundary
from hvd_pipe.pipeline.stage import Buffer, Feed, Microbatch, MicrobatchIndex, Tally
from hvd_pipe.torch.pipedream.graph import StageModule
from hvd_pipe.torch.pipedream.measure import ActivationMeter, StageMemory
from hvd_pipe.torch.pipedream.weights import Updates, WeightVersions


@dataclass(frozen=True)
class Losses:
    """What the last stage computes of the model's output and the targets."""

    loss: Callable[[Any, Any], torch.Tensor]
    metric: Callable[[Any, Any], Any] | None
    shared: bool


@dataclass
class _Pending:
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
    """The stage of one worker; see :class:`hvd_pipe.pipeline.stage.Stage`."""

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
        """The minibatches of the first and the last stage; set before each run."""
        self.norms = updates.norms
        self.average, self.release = updates.average, self.versions.release
        self._losses, self._updates = losses, updates
        self._before, self._after = before, after
        self._recompute, self._recycle, self._device = recompute, recycle, device
        self._pending: dict[MicrobatchIndex, _Pending] = {}
        self._training = True
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)  # of losses and metrics
        self._weight, self._samples = 0.0, 0
        self._meter = ActivationMeter()
        self._key = torch.zeros((), requires_grad=True, device=device)

    # A run.

    def begin(self, training: bool) -> None:
        self._pending.clear()  # a run that has failed may have left some
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

    # Architecture: D4
    def take_input(self, index: MicrobatchIndex, message: Buffer) -> None:
        assert self._before is not None
        header, tensors = self._before.activations.unpack(index, message)
        self._pending[index] = _Pending(header.digest, tuple(tensors), messages=[message])
        self.norms.update(header.squared_norms, from_before=True)

    # Architecture: D6
    def forward(self, index: MicrobatchIndex, version: int) -> None:
        microbatch: Microbatch | None = None
        if self.feed is not None and (self._before is None or self._losses is not None):
            microbatch = self.feed.microbatch(index)
        if self._before is None:
            assert microbatch is not None
            inputs = tuple(moved(x, self._device) for x in microbatch.inputs)
            self._pending[index] = _Pending(microbatch.digest, inputs)
        pending = self._pending[index]
        if self._losses is not None:
            assert microbatch is not None
            _check_digest(pending.digest, microbatch.digest, index)
        self.versions.use(version)
        measures = self._training and not self._meter.is_done
        meter = self._meter.measuring(pending.inputs, self.module) if measures else nullcontext()
        with torch.set_grad_enabled(self._training), meter:
            output = self._run(pending)
            if self._losses is None:
                pending.outputs = tuple(output)
                if measures:
                    self._meter.add_outputs(pending.outputs)
            else:
                assert microbatch is not None
                self._finish(pending, output, microbatch, self._losses)
        if not self._training and self._losses is not None:
            self._complete(index)

    # Architecture: D8
    def output(self, index: MicrobatchIndex) -> Buffer:
        assert self._after is not None
        pending = self._pending[index]
        message = self._after.activations.pack(
            index, pending.outputs, pending.digest, self.norms.squared
        )
        if not self._training:
            self._complete(index)
        return message

    # Architecture: D10
    def take_gradient(self, index: MicrobatchIndex, message: Buffer) -> None:
        assert self._after is not None
        header, gradients = self._after.gradients.unpack(index, message)
        pending = self._pending[index]
        pending.gradients = gradients
        pending.messages.append(message)
        self.norms.update(header.squared_norms, from_before=False)

    # Architecture: D11
    def backward(self, index: MicrobatchIndex, version: int) -> None:
        if not self._meter.is_done:
            self._meter.end()
        pending = self._pending[index]
        self.versions.use(version)
        if pending.loss is not None:
            if pending.loss.requires_grad:
                pending.loss.backward()  # type: ignore[no-untyped-call]
        else:
            assert self._after is not None
            outputs = [pending.outputs[at] for at in self._after.differentiated]
            pairs = zip(outputs, pending.gradients, strict=True)
            # An output that has no graph, though one was planned, takes no gradient.
            wanted = [(x, gradient) for x, gradient in pairs if x.requires_grad]
            if wanted:
                torch.autograd.backward([x for x, _ in wanted], [g for _, g in wanted])
            self._copy_gradients(pending.gradients)
        pending.outputs, pending.loss, pending.gradients = (), None, []  # the graph goes with them
        if self._before is None:
            self._complete(index)

    # Architecture: D12
    def input_gradient(self, index: MicrobatchIndex) -> Buffer:
        assert self._before is not None
        pending = self._pending[index]
        gradients = [
            pending.entered[at] if at in pending.entered else torch.zeros_like(pending.inputs[at])
            for at in self._before.differentiated
        ]
        message = self._before.gradients.pack(index, gradients, pending.digest, self.norms.squared)
        self._complete(index)
        return message

    # Weights.

    # Architecture: D14
    def update(self, version: int, keep: bool) -> None:
        with self.versions.updating(version, keep):
            self._updates.apply()

    def memory(self) -> StageMemory:
        """Return what this worker has held at the most since it was made."""
        parameters = list(self.module.parameters())
        trained = sum(p.nbytes for p in parameters if p.requires_grad)
        frozen = sum(p.nbytes for p in parameters) - trained
        return StageMemory(
            self.versions.nbytes + frozen, trained, self._updates.nbytes, self._meter.most_bytes
        )

    # Inside.

    def _copy_gradients(self, received: list[torch.Tensor]) -> None:
        """Copy gradients that autograd has left as views of a received message."""
        message_memory = {gradient.untyped_storage().data_ptr() for gradient in received}
        with torch._C.DisableTorchFunctionSubclass():  # this reads no value
            for p in self.versions.parameters:
                if p.grad is not None and p.grad.untyped_storage().data_ptr() in message_memory:
                    p.grad = p.grad.clone()

    def _run(self, pending: _Pending) -> Any:
        inputs = pending.inputs
        if not self._training:
            return self.module(*inputs)
        if self._before is not None:
            wanted = self._before.differentiated
            inputs = tuple(
                _Enter.apply(self._key, pending.entered, at, x)  # type: ignore[no-untyped-call]
                if at in wanted
                else x
                for at, x in enumerate(inputs)
            )
        if not self._recompute:
            return self.module(*inputs)

        def run(*inputs: Any) -> Any:
            # The first layer may work in place, and its input is needed again.
            return self.module(*(tree_map(_copy, x) for x in inputs))

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            return nullcontext(), _buffers_kept(self.module)

        return checkpoint(run, *inputs, use_reentrant=False, context_fn=contexts)

    def _finish(
        self, pending: _Pending, output: Any, microbatch: Microbatch, losses: Losses
    ) -> None:
        targets = moved(microbatch.targets, self._device)
        try:
            loss = losses.loss(output, targets)
        except Exception as error:
            error.add_note(
                f"in loss_fn(output, targets) with an output of {_shapes(output)} and targets of "
                f"{_shapes(targets)}, of a minibatch's {microbatch.samples} samples"
            )
            raise
        if not isinstance(loss, torch.Tensor) or loss.dim():
            result = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise HvdPipeError(
                f"loss_fn(output, targets) must return a scalar tensor, the mean over the "
                f"minibatch, got {result}: use reduction='mean'."
            )
        if self._training:
            weight = microbatch.share if losses.shared else 1.0
            pending.loss = loss if weight == 1.0 else loss * weight
        else:
            weight = float(microbatch.samples)
        self._sums[0] += loss.detach() * weight
        if losses.metric is not None:
            with torch.no_grad():
                self._sums[1] += losses.metric(output, targets) * weight
        self._weight += weight
        self._samples += microbatch.samples

    def _complete(self, index: MicrobatchIndex) -> None:
        for message in self._pending.pop(index).messages:
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
    saved = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:  # recomputing ends by an exception, as soon as backward has all that it needs
        for buffer, values in saved:
            buffer.data.copy_(values)


def _shapes(value: Any) -> str:
    return str(tree_map(lambda x: list(getattr(x, "shape", ())), value))


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def moved(value: Any, device: torch.device) -> Any:
    """Return a value with all of its tensors on a device."""
    return tree_map_only(torch.Tensor, lambda x: x.to(device, non_blocking=True), value)


def _check_digest(travelled: int, local: int, index: MicrobatchIndex) -> None:
    if travelled != local:
        raise HvdPipeError(
            f"the first and the last stage read different minibatches: the targets of minibatch "
            f"{index.minibatch} differ. Loaders must yield the same minibatches in the same order "
            "on every rank: seed what shuffles them alike (DataLoader(..., shuffle=True, "
            "generator=torch.Generator().manual_seed(0))), and give them no DistributedSampler: "
            "replicas of a stage share the minibatches out."
        )
