"""What each worker of a pipeline does, in order: generators of instructions, and no execution.

Words: *stage* s of n is held by R_s *replicas*; a worker is a (stage, replica). A *minibatch* is
cut into m *microbatches* (m = 1 for 1F1B), numbered throughout: microbatch k of minibatch b is
u = b m + k, and goes to replica u mod R_s of every stage, forward and backward. A *version* of a
stage's weights is the number of updates that made it. All numbers start at 0.

==================  =====================  =======================  =============================
generator           order of a worker      versions                 version of minibatch b
==================  =====================  =======================  =============================
one_f_one_b         warm-up F, then F B    stash: own newest one    b - (n - 1 - s), straight
one_f_one_b         warm-up F, then F B    vertical-sync            b - (n - 1), straight
one_f_one_b_flush   the same, each batch   flush: one               b
gpipe               all F, then all B      flush: one               b
two_bw              warm-up F, then F B    2bw: two                 b - 1
==================  =====================  =======================  =============================

A negative version stands for 0. With k minibatches in transit between two stages, 1F1B's versions
are ``b - (1 + k) (n - 1 - s)`` and ``b - (1 + k) (n - 1)``. Every schedule drains: each forward
has its backward, and each gradient is applied once.

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


def one_f_one_b(
    stage: int,
    replicas: Sequence[int],
    replica: int,
    minibatches: int,
    versions: str = "stash",
    in_transit: int = 0,
) -> Iterator[Instruction]:
    """1F1B, and 1F1B-RR where stages are replicated: one forward, one backward, an update each.

    With "stash", forward takes the newest weights of its own stage, which for n stages of one
    worker gives ``w[t+1] = w[t] - lr * grad f(w_1[t-n+1], w_2[t-n+2], ..., w_n[t])``. With
    "vertical-sync" all stages take what the input stage took, ``grad f(w[t-n+1])``; where stages
    have unequal replicas, the newest version that has seen no minibatch that the input's has not,
    ``floor(version R_0 / R_s)``.

    Each round of R_s minibatches ends in one update. In a last round with fewer, the other
    replicas bring zeros: all make equally many updates, and all minibatches are used.

    Source: PipeDream, SOSP 2019, sections 3.2 and 3.3.
    """
    _check_place(stage, replicas, replica)
    check_integer("minibatches", minibatches)
    if versions not in {"stash", "vertical-sync"}:
        raise ValueError(
            f"versions of 1F1B must be 'stash' or 'vertical-sync', got {versions!r}; one version "
            "is one_f_one_b_flush, two are two_bw"
        )
    width, warm = replicas[stage], warm_up(stage, replicas, in_transit)
    first_warm = warm_up(0, replicas, in_transit)

    def stashed(unit: int) -> int:
        return max(0, unit // width - warm)

    def synchronised(unit: int) -> int:
        seen = max(0, unit // replicas[0] - first_warm) * replicas[0]
        return seen // width

    version = stashed if versions == "stash" else synchronised
    passes = _alternate(0, len(range(replica, minibatches, width)), warm)
    return instructions_of(stage, replicas, replica, minibatches, 1, passes, version)


def one_f_one_b_flush(
    stage: int,
    replicas: Sequence[int],
    replica: int,
    minibatches: int,
    microbatches: int,
    in_transit: int = 0,
) -> Iterator[Instruction]:
    """PipeDream-Flush: 1F1B within a minibatch, drained before its one update.

    ``w[t+1] = w[t] - lr * grad f(w[t])``, as GPipe, but with no more microbatches in flight than
    the pipeline is deep, and those in transit.

    Example:
        >>> print(brief(one_f_one_b_flush(0, [1, 1], 0, 1, microbatches=3)))
        F0.0 F0.1 B0.0 F0.2 B0.1 B0.2 U1

    Source: PipeDream-2BW, arXiv 2006.09503.
    """
    share = _check_microbatches(stage, replicas, replica, minibatches, microbatches)
    warm = warm_up(stage, replicas, in_transit)
    passes = (
        step
        for first in range(0, share * minibatches, share)
        for step in _alternate(first, share, min(warm, share))
    )
    return instructions_of(
        stage, replicas, replica, minibatches, microbatches, passes, lambda u: u // microbatches
    )


def gpipe(
    stage: int, replicas: Sequence[int], replica: int, minibatches: int, microbatches: int
) -> Iterator[Instruction]:
    """GPipe: all forward passes of a minibatch, its backward passes last to first, one update.

    Example:
        >>> print(brief(gpipe(0, [1, 1], 0, 1, microbatches=3)))
        F0.0 F0.1 F0.2 B0.2 B0.1 B0.0 U1

    Source: GPipe, arXiv 1811.06965.
    """
    share = _check_microbatches(stage, replicas, replica, minibatches, microbatches)
    passes = (
        step
        for first in range(0, share * minibatches, share)
        for step in _fill_then_empty(first, share)
    )
    return instructions_of(
        stage, replicas, replica, minibatches, microbatches, passes, lambda u: u // microbatches
    )


def two_bw(
    stage: int,
    replicas: Sequence[int],
    replica: int,
    minibatches: int,
    microbatches: int,
    in_transit: int = 0,
) -> Iterator[Instruction]:
    """PipeDream-2BW: 1F1B without a flush; one update a minibatch, two versions, one late.

    ``w[t+1] = w[t] - lr * grad f(w[t-1])`` at every stage. A worker's share of the microbatches
    must cover what it has in flight, or a third version would be needed: m >= depth for stages of
    equally many replicas, each pipeline having its own m.

    Example:
        >>> print(brief(two_bw(0, [1, 1], 0, minibatches=2, microbatches=2)))
        F0.0 F0.1 B0.0 F1.0 B0.1 U1 F1.1 B1.0 B1.1 U2

    Source: PipeDream-2BW, arXiv 2006.09503.
    """
    share = _check_microbatches(stage, replicas, replica, minibatches, microbatches)
    least = max(width * (warm_up(s, replicas, in_transit) + 1) for s, width in enumerate(replicas))
    if microbatches < least:
        step = math.lcm(*replicas)
        raise ValueError(
            f"2BW keeps two versions, so a minibatch must cover what is in flight: microbatches "
            f"must be at least {least} for replicas {tuple(replicas)}"
            + (f" and in_transit={in_transit}" if in_transit else "")
            + f", got {microbatches}; {-(-least // step) * step} would do"
        )
    passes = _alternate(0, share * minibatches, warm_up(stage, replicas, in_transit))

    def version(unit: int) -> int:
        return max(0, unit // microbatches - 1)

    return instructions_of(stage, replicas, replica, minibatches, microbatches, passes, version)


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
    """One worker's part of a :func:`schedule`, without making those of all others."""
    _check_method(method, microbatches)
    stage, replica = worker
    if method in _ONE_MINIBATCH:
        versions = "stash" if method == "1f1b" else "vertical-sync"
        return one_f_one_b(stage, replicas, replica, minibatches, versions, in_transit)
    if method == "gpipe":
        return gpipe(stage, replicas, replica, minibatches, microbatches)
    generator = two_bw if method == "2bw" else one_f_one_b_flush
    return generator(stage, replicas, replica, minibatches, microbatches, in_transit)


def _alternate(first: int, count: int, warm: int) -> Passes:
    # warm-up | steady            | drain      count = 5, warm = 2
    # F0 F1   | F2 B0 F3 B1 F4 B2 | B3 B4
    for k in range(count + warm):
        if k < count:
            yield True, first + k
        if k >= warm:
            yield False, first + k - warm


def _fill_then_empty(first: int, count: int) -> Passes:
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
    stage: int, replicas: Sequence[int], replica: int, minibatches: int, microbatches: int
) -> int:
    """The share of a worker of this stage in the microbatches of a minibatch."""
    _check_place(stage, replicas, replica)
    check_integer("minibatches", minibatches)
    check_integer("microbatches", microbatches)
    step = math.lcm(*replicas)
    if microbatches % step:
        below = microbatches // step * step
        raise ValueError(
            f"microbatches must be a multiple of {step}, so that all replicas of each stage "
            f"{tuple(replicas)} do equal work, got {microbatches}; try "
            f"{f'{below} or ' if below else ''}{below + step}"
        )
    return microbatches // replicas[stage]
