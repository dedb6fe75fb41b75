"""What the executor asks of a stage: a framework's part of a pipeline."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hvd_pipe.pipeline.norms import Norms

__all__ = ["Buffer", "Stage", "Tally", "Unit"]

Buffer = npt.NDArray[np.uint8]
"""A message's bytes; a framework may hand over another object with the buffer interface."""


class Unit(NamedTuple):
    """A microbatch, by its minibatch and its place in that; numbers start at 0 in each run."""

    minibatch: int
    microbatch: int


class Tally(NamedTuple):
    """What the last stage's workers add up in a run; zeros in all others.

    Args:
        loss: Sum of the losses, each times its weight.
        metric: Likewise.
        weight: In training a microbatch's share of its minibatch, else its samples.
        samples: How many there were.
    """

    loss: float = 0.0
    metric: float = 0.0
    weight: float = 0.0
    samples: int = 0


class Stage(Protocol):
    """The layers of one worker, and their weights in all versions that are needed.

    For each unit the calls come in this order, those of several units interleaved::

        [take_input] forward [output]  ...  [take_gradient] backward [input_gradient]

    The first stage has no take_input and input_gradient: it reads its inputs itself; the last has
    no output and take_gradient: it computes the loss. Messages are whole ones of
    :mod:`hvd_pipe.pipeline.wire`, header included. A run that is no training has no gradients.
    """

    @property
    def norms(self) -> Norms:
        """What it knows of the gradients of all stages."""

    def take_input(self, unit: Unit, message: Buffer) -> None:
        """Take what the stage before has sent."""

    def forward(self, unit: Unit, version: int) -> None:
        """Run forward with this version of the weights, and keep what backward needs."""

    def output(self, unit: Unit) -> Buffer:
        """Return the message to the next stage; it is the caller's from then on."""

    def take_gradient(self, unit: Unit, message: Buffer) -> None:
        """Take the gradient of the output from the next stage."""

    def backward(self, unit: Unit, version: int) -> None:
        """Run backward with the version of the forward pass; add to the stage's gradient."""

    def input_gradient(self, unit: Unit) -> Buffer:
        """Return the message to the stage before; it is the caller's from then on."""

    def average(self, contributors: int) -> None:
        """Wait until the gradient is the average, or sum, over the replicas that have one."""

    def update(self, version: int, keep: bool) -> None:
        """Apply the gradient to the newest weights, which makes ``version``; clear the gradient.

        Args:
            version: The newest from now on.
            keep: Whether the version before is still needed: updating must not change it.
        """

    def release(self, version: int) -> None:
        """Forget a version that nobody needs any more."""

    def begin(self, training: bool) -> None:
        """Get ready for a run; where it is no training, forward keeps nothing but the output."""

    def tally(self) -> Tally:
        """Return what the run has added up, and begin anew."""
