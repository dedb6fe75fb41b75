"""What each worker of a pipeline does, in order: generators of instructions, and no execution.

Words: *stage* s of n is held by R_s *replicas*; a worker is a (stage, replica). A *minibatch* is
cut into m *microbatches* (m = 1 for 1F1B), numbered throughout: microbatch k of minibatch b is
u = b m + k, and goes to replica u mod R_s of every stage, forward and backward. A *version* of a
stage's weights is the number of updates that made it. All numbers start at 0.

==================  =====================  =======================  =============================
method              order of a worker      versions                 version of minibatch b
==================  =====================  =======================  =============================
1f1b                warm-up F, then F B    stash: own newest one    b - (n - 1 - s), straight
1f1b-vertical-sync  warm-up F, then F B    what the input's had     b - (n - 1), straight
1f1b-flush          the same, each batch   one                      b
gpipe               all F, then all B      one                      b
2bw                 warm-up F, then F B    two                      b - 1
==================  =====================  =======================  =============================

A negative version stands for 0. With k minibatches in transit between two stages, 1F1B's versions
are ``b - (1 + k) (n - 1 - s)`` and ``b - (1 + k) (n - 1)``. Every schedule drains: each forward
has its backward, and each gradient is applied once.

1F1B's replicas (1F1B-RR) make one update a round of R_s minibatches; in a last round with fewer,
the others bring zeros, so all make equally many. With unequal replicas, vertical sync takes the
newest version that has seen no minibatch which the input's has not, ``floor(version R_0 / R_s)``.
1f1b-flush has no more microbatches in flight than the pipeline is deep, and those in transit. In
2bw, a minibatch must cover what is in flight, or a third version would be needed.

An instruction says what one worker does next, and nothing about how. A runtime keeps to this:

- Forward of the first stage reads the inputs, of the last stage the targets too.
- Receives block; sends do not.
- Messages between two workers arrive in the order in which they were sent.
- AllReduce sums what the stage's backward passes have left since the last update. A worker that
  had none brings zeros, and the sum is divided by the contributors.
- A version may go once it is not the newest and no later instruction of the worker names it.

Sources: PipeDream (SOSP 2019); GPipe, arXiv 1811.06965; PipeDream-2BW and PipeDream-Flush, arXiv
2006.09503.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvd_pipe.planning._checks import check_integer


class Worker(NamedTuple):
    """One replica of one stage."""

    stage: int
    replica: int

    def __str__(self) -> str:
        return f"stage {self.stage} replica {self.replica}"


@dataclass(frozen=True, slots=True)
class _Pass:
    minibatch: int
    microbatch: int
    version: int


class Forward(_Pass):
    """Run the stage forward with these weights, and keep what backward needs."""


class Backward(_Pass):
    """Run the stage backward with the weights of its forward; add to the stage's gradient."""


@dataclass(frozen=True, slots=True)
class _Message:
    minibatch: int
    microbatch: int
    peer: Worker


class SendActivation(_Message):
    """Send the stage's output to a replica of the next stage."""


class RecvActivation(_Message):
    """Wait for the stage's input from a replica of the stage before."""


class SendGradient(_Message):
    """Send the gradient of the stage's input to the replica that it came from."""


class RecvGradient(_Message):
    """Wait for the gradient of the stage's output from the replica that it went to."""


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


@dataclass(frozen=True)
class Mode:
    """One way to run a pipeline."""

    name: str  # the user's word for it
    method: str  # one of METHODS
    versions: str  # what the planner counts: `hvd_pipe.planning.partition.VERSIONS`
    coalesces: bool  # an update takes a minibatch of several microbatches
    synchronous: bool = False  # all stages end a minibatch before the next begins


MODES = {
    mode.name: mode
    for mode in (
        Mode("stash", "1f1b", "stash", coalesces=False),
        Mode("vertical-sync", "1f1b-vertical-sync", "stash", coalesces=False),
        Mode("2bw", "2bw", "2bw", coalesces=True),
        Mode("flush", "1f1b-flush", "flush", coalesces=True, synchronous=True),
        Mode("gpipe", "gpipe", "flush", coalesces=True, synchronous=True),
    )
}


def mode_named(name: str) -> Mode:
    """Return a mode by its name."""
    if name not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {name!r}")
    return MODES[name]


METHODS = ("1f1b", "1f1b-vertical-sync", "1f1b-flush", "gpipe", "2bw")
_ONE_MINIBATCH = ("1f1b", "1f1b-vertical-sync")  # an update takes one of each replica
_FLUSHED = ("1f1b-flush", "gpipe")


def warm_up(stage: int, replicas: Sequence[int], in_transit: int = 0) -> int:
    """Forward passes of a worker before its first backward pass.

    ``floor((N_s - 1 + k (n - 1 - s)) / R_s)``, N_s workers in this stage and those behind it; one
    more are then in flight. For the input stage and k = 0 that is NOAM = ceil(N / R_0).

    NOAM counts a minibatch in each worker, and none between two stages. Messages of 2c seconds
    there and back take ``2c / period`` minibatches of their own (Little's law), so k = 1 hides
    them where links are not busy all of the time.

    Source: PipeDream's runtime, whose num_versions is this plus one, for k = 0.
    """
    _check_place(stage, replicas, 0)
    check_integer("in_transit", in_transit, least=0)
    waiting = sum(replicas[stage:]) - 1 + in_transit * (len(replicas) - 1 - stage)
    return waiting // replicas[stage]


def schedule(
    method: str,
    replicas: Sequence[int],
    minibatches: int,
    microbatches: int = 1,
    in_transit: int = 0,
) -> Schedule:
    """The schedule of a method for all workers.

    Example:
        >>> print(schedule("1f1b", [2, 1], minibatches=4))
        stage 0 replica 0: F0 F2 B0 A1 U1 B2 A2 U2
        stage 0 replica 1: F1 F3 B1 A1 U1 B3 A2 U2
        stage 1 replica 0: F0 B0 U1 F1 B1 U2 F2 B2 U3 F3 B3 U4
    """
    _check_method(method, microbatches)
    _check_place(0, replicas, 0)
    workers = [Worker(s, r) for s, width in enumerate(replicas) for r in range(width)]
    programs = {
        worker: tuple(program(method, replicas, worker, minibatches, microbatches, in_transit))
        for worker in workers
    }
    return Schedule(method, tuple(replicas), minibatches, microbatches, programs, in_transit)


def program(
    method: str,
    replicas: Sequence[int],
    worker: Worker,
    minibatches: int,
    microbatches: int = 1,
    in_transit: int = 0,
) -> Iterator[Instruction]:
    """The instructions of one worker, made as they are asked for.

    Example:
        >>> print(brief(program("1f1b-flush", [1, 1], Worker(0, 0), 1, microbatches=3)))
        F0.0 F0.1 B0.0 F0.2 B0.1 B0.2 U1
        >>> print(brief(program("gpipe", [1, 1], Worker(0, 0), 1, microbatches=3)))
        F0.0 F0.1 F0.2 B0.2 B0.1 B0.0 U1
        >>> print(brief(program("2bw", [1, 1], Worker(0, 0), 2, microbatches=2)))
        F0.0 F0.1 B0.0 F1.0 B0.1 U1 F1.1 B1.0 B1.1 U2
    """
    _check_method(method, microbatches)
    stage, replica = worker
    _check_place(stage, replicas, replica)
    check_integer("minibatches", minibatches)
    if method not in _ONE_MINIBATCH:
        _check_microbatches(method, replicas, microbatches, in_transit)
    width, warm = replicas[stage], warm_up(stage, replicas, in_transit)
    first_warm = warm_up(0, replicas, in_transit)

    def version(unit: int) -> int:
        match method:
            case "1f1b":
                return max(0, unit // width - warm)
            case "1f1b-vertical-sync":
                passed = max(0, unit // replicas[0] - first_warm) * replicas[0]
                return passed // width
            case "2bw":
                return max(0, unit // microbatches - 1)
        return unit // microbatches

    flushes = minibatches if method in _FLUSHED else 1
    share = len(range(replica, minibatches // flushes * microbatches, width))
    order = _fill_then_empty if method == "gpipe" else _alternate
    passes = (step for at in range(flushes) for step in order(at * share, share, warm))
    return _instructions(stage, replicas, replica, minibatches, microbatches, passes, version)


# Steps of a worker: (True, k) is the forward pass of its k-th microbatch, (False, k) the backward.
Passes = Iterable[tuple[bool, int]]


def _instructions(
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


def _alternate(first: int, count: int, warm: int) -> Passes:
    # warm-up | steady            | drain      count = 5, warm = 2
    # F0 F1   | F2 B0 F3 B1 F4 B2 | B3 B4
    for k in range(count + warm):
        if k < count:
            yield True, first + k
        if k >= warm:
            yield False, first + k - warm


def _fill_then_empty(first: int, count: int, warm: int) -> Passes:
    # F0 F1 F2 F3 B3 B2 B1 B0: the last forward is the first backward, as autograd would have it.
    yield from ((True, first + k) for k in range(count))
    yield from ((False, first + k) for k in reversed(range(count)))


def _check_method(method: str, microbatches: int) -> None:
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
    if method in _ONE_MINIBATCH and microbatches != 1:
        raise ValueError(
            f"{method} updates after every minibatch, so it has no microbatches, got "
            f"{microbatches}; 2bw and 1f1b-flush do"
        )


def _check_place(stage: int, replicas: Sequence[int], replica: int) -> None:
    if not replicas:
        raise ValueError("replicas must hold the workers of each stage, got none")
    for s, width in enumerate(replicas):
        check_integer(f"replicas of stage {s}", width)
    if not 0 <= stage < len(replicas):
        raise ValueError(f"stage must be in 0..{len(replicas) - 1}, got {stage}")
    if not 0 <= replica < replicas[stage]:
        raise ValueError(
            f"replica of stage {stage} must be in 0..{replicas[stage] - 1}, got {replica}"
        )


def _check_microbatches(
    method: str, replicas: Sequence[int], microbatches: int, in_transit: int
) -> None:
    check_integer("microbatches", microbatches)
    step = math.lcm(*replicas)
    if microbatches % step:
        below = microbatches // step * step
        raise ValueError(
            f"microbatches must be a multiple of {step}, so that all replicas of each stage "
            f"{tuple(replicas)} do equal work, got {microbatches}; try "
            f"{f'{below} or ' if below else ''}{below + step}"
        )
    least = max(width * (warm_up(s, replicas, in_transit) + 1) for s, width in enumerate(replicas))
    if method == "2bw" and microbatches < least:
        raise ValueError(
            f"2BW keeps two versions, so a minibatch must cover what is in flight: microbatches "
            f"must be at least {least} for replicas {tuple(replicas)}"
            + (f" and in_transit={in_transit}" if in_transit else "")
            + f", got {microbatches}; {-(-least // step) * step} would do"
        )
