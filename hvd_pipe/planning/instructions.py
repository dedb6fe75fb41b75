"""Instructions of a pipeline's schedule, and the workers that carry them out.

An instruction says what one worker does next, and nothing about how. A *microbatch* is named by
its minibatch and its place in that; a *version* of a stage's weights is the number of updates that
made it. A runtime keeps to this:

- Forward of the first stage reads the inputs, of the last stage the targets too.
- Receives block; sends do not.
- Messages between two workers arrive in the order in which they were sent.
- AllReduce sums what the stage's backward passes have left since the last update. A worker that
  had none brings zeros, and the sum is divided by the contributors.
- A version may go once it is not the newest and no later instruction of the worker names it.

Source: instructions apart from their executor are DeepSpeed's idea.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Worker(NamedTuple):
    """One replica of one stage.

    Example:
        >>> print(Worker(stage=1, replica=0))
        stage 1 replica 0
    """

    stage: int
    replica: int

    def __str__(self) -> str:
        return f"stage {self.stage} replica {self.replica}"


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the stage forward with these weights, and keep what backward needs."""

    minibatch: int
    microbatch: int
    version: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the stage backward with the weights of its forward; add to the stage's gradient."""

    minibatch: int
    microbatch: int
    version: int


@dataclass(frozen=True, slots=True)
class SendActivation:
    """Send the stage's output to a replica of the next stage."""

    minibatch: int
    microbatch: int
    peer: Worker


@dataclass(frozen=True, slots=True)
class RecvActivation:
    """Wait for the stage's input from a replica of the stage before."""

    minibatch: int
    microbatch: int
    peer: Worker


@dataclass(frozen=True, slots=True)
class SendGradient:
    """Send the gradient of the stage's input to the replica that it came from."""

    minibatch: int
    microbatch: int
    peer: Worker


@dataclass(frozen=True, slots=True)
class RecvGradient:
    """Wait for the gradient of the stage's output from the replica that it went to."""

    minibatch: int
    microbatch: int
    peer: Worker


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Average the gradient that makes ``version`` over those replicas that have one."""

    version: int
    contributors: int


@dataclass(frozen=True, slots=True)
class Update:
    """Apply the gradient to the newest weights, which makes ``version``; clear the gradient."""

    version: int


Send = SendActivation | SendGradient
Recv = RecvActivation | RecvGradient
Instruction = Forward | Backward | Send | Recv | AllReduce | Update


@dataclass(frozen=True)
class Schedule:
    """The instructions of all workers, in rank order: stage by stage."""

    method: str
    replicas: tuple[int, ...]
    minibatches: int
    microbatches: int
    programs: Mapping[Worker, tuple[Instruction, ...]]
    in_transit: int = 0

    def __str__(self) -> str:
        return "\n".join(f"{worker}: {brief(steps)}" for worker, steps in self.programs.items())


def brief(instructions: Iterable[Instruction]) -> str:
    """Instructions in a line, without the messages: F and B of a microbatch, A and U of a version.

    Example:
        >>> brief([Forward(3, 0, 2), Backward(3, 0, 2), AllReduce(3, 2), Update(3)])
        'F3 B3 A3 U3'
    """
    steps = list(instructions)
    cut = any(isinstance(step, Forward) and step.microbatch for step in steps)
    words = []
    for step in steps:
        if isinstance(step, Forward | Backward):
            words.append(f"{type(step).__name__[0]}{step.minibatch}")
            words[-1] += f".{step.microbatch}" if cut else ""
        elif isinstance(step, AllReduce | Update):
            words.append(f"{type(step).__name__[0]}{step.version}")
    return " ".join(words)


# Steps of a worker: (True, k) is the forward pass of its k-th microbatch, (False, k) the backward.
Passes = Iterable[tuple[bool, int]]


def instructions_of(
    stage: int,
    replicas: Sequence[int],
    replica: int,
    minibatches: int,
    microbatches: int,
    passes: Passes,
    version: Callable[[int], int],
) -> Iterator[Instruction]:
    """Passes with what must come before and after each: messages, all-reduces, updates."""
    width, last = replicas[stage], len(replicas) - 1
    # One minibatch is one round; without microbatches, each replica brings a whole one.
    a_round = microbatches if microbatches > 1 else width
    units = minibatches * microbatches
    rounds, done = -(-units // a_round), 0
    updates = 0

    def update() -> Iterator[Instruction]:
        if width > 1:
            yield AllReduce(updates, min(width, units - (updates - 1) * a_round))
        yield Update(updates)

    for forward, k in passes:
        unit = k * width + replica
        where = divmod(unit, microbatches)
        before = Worker(stage - 1, unit % replicas[stage - 1])
        after = Worker(stage + 1, unit % replicas[min(stage + 1, last)])
        if forward:
            if stage > 0:
                yield RecvActivation(*where, before)
            yield Forward(*where, version(unit))
            if stage < last:
                yield SendActivation(*where, after)
            continue
        if stage < last:
            yield RecvGradient(*where, after)
        yield Backward(*where, version(unit))
        if stage > 0:
            yield SendGradient(*where, before)
        done += 1
        if done * width % a_round == 0:
            updates += 1
            yield from update()
    if updates < rounds:
        # The last round of 1F1B-RR is short, and has no minibatch for this worker.
        updates += 1
        yield from update()
