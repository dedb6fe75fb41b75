"""Proof that a pipeline's schedule runs, and trains what its method says.

The first pass reads each worker's program alone: is everything done once, in order, with the right
weights, and sent to the right place? Each message then has one sender and one receiver, and the
second pass carries out all programs at once, in symbols, to see that nobody waits for ever.

==========  ===================================================================================
rule        what it says
==========  ===================================================================================
workers     there is a program for each replica of each stage, and for nobody else
route       microbatch u is the work of replica u mod R_s of every stage
once        a worker does everything that it has to do, once
order       input, forward, output, output's gradient, backward, input's gradient
version     forward takes the version that the method says and backward the same
update      an update applies the gradients of one round, averaged over the replicas before
in-flight   no more microbatches are in flight on a worker than warm-up + 1 (GPipe: its share)
messages    they are received in the order in which they were sent, between any two workers
deadlock    nobody waits for ever
==========  ===================================================================================
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hvd_pipe.planning.instructions import (
    AllReduce,
    Backward,
    Forward,
    Instruction,
    Recv,
    RecvActivation,
    RecvGradient,
    Schedule,
    Send,
    SendActivation,
    SendGradient,
    Update,
    Worker,
)
from hvd_pipe.planning.schedule import METHODS, warm_up

__all__ = ["Report", "ScheduleError", "validate"]

ONE = ("1f1b", "1f1b-vertical-sync")  # the methods that update after each round of minibatches
Rule = tuple[bool, str, str]  # does it hold; its name; what is wrong if not


class ScheduleError(ValueError):
    """A schedule breaks a rule.

    Args:
        worker: Whose program.
        index: Which of its instructions, from 0; its length if something is missing at the end.
        rule: One of the words in the table above.
        reason: What is wrong there.
        instruction: The instruction itself, for the message.
    """

    def __init__(
        self,
        worker: Worker,
        index: int,
        rule: str,
        reason: str,
        instruction: Instruction | None = None,
    ) -> None:
        what = "the end" if instruction is None else str(instruction)
        super().__init__(f"{worker}, instruction {index} ({what}), rule '{rule}': {reason}")
        self.worker, self.index, self.rule = worker, index, rule


@dataclass(frozen=True)
class Report:
    """What a valid schedule needs.

    Args:
        in_flight: Of each worker, the most microbatches between forward and backward.
        versions: Of each worker, the most versions of the weights alive: the newest, and older
            ones that an instruction still names.
        staleness: Of each stage, the most updates of it between the weights with which a gradient
            was made and the weights to which it is applied.
        rendezvous_deadlock: None if the schedule also runs where a send waits for its receive; if
            not, who would wait for whom.
    """

    in_flight: Mapping[Worker, int]
    versions: Mapping[Worker, int]
    staleness: tuple[int, ...]
    rendezvous_deadlock: str | None


def validate(schedule: Schedule) -> Report:
    """Prove that a schedule runs with blocking receives and buffered sends, and what it needs.

    Args:
        schedule: Of :func:`hvd_pipe.planning.schedule.schedule`, or made by hand.

    Returns:
        Microbatches in flight, versions alive, staleness. O(instructions).

    Raises:
        ScheduleError: A ValueError with ``worker``, ``index`` and ``rule`` of what is wrong.
        ValueError: An unknown method.

    Example:
        >>> from hvd_pipe.planning.schedule import schedule
        >>> report = validate(schedule("1f1b", [1, 1, 1], minibatches=8))
        >>> [*report.in_flight.values()], [*report.versions.values()], report.staleness
        ([3, 2, 1], [3, 2, 1], (2, 1, 0))
        >>> validate(schedule("2bw", [1, 1, 1], minibatches=8, microbatches=4)).staleness
        (1, 1, 1)
        >>> print(report.rendezvous_deadlock.splitlines()[0])
        stage 0 replica 0 waits at 5 (SendActivation) for stage 1 replica 0
    """
    if schedule.method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}; got {schedule.method!r}")
    _check_workers(schedule)
    checks = {}
    for worker, program in schedule.programs.items():
        checks[worker] = check = _Check(schedule, worker)
        for index, step in enumerate(program):
            check.read(index, step)
        check.read(len(program), None)
    stuck = _run(schedule, rendezvous=False)
    if stuck:
        worker, index = next(iter(stuck.items()))
        step = schedule.programs[worker][index]
        reason = "nobody can go on:\n" + _who_waits(schedule, stuck)
        raise ScheduleError(worker, index, "deadlock", reason, step)
    stuck = _run(schedule, rendezvous=True)
    return Report(
        {worker: check.most_in_flight for worker, check in checks.items()},
        {worker: _alive(schedule.programs[worker]) for worker in checks},
        tuple(
            max(check.staleness for worker, check in checks.items() if worker.stage == stage)
            for stage in range(len(schedule.replicas))
        ),
        _who_waits(schedule, stuck) if stuck else None,
    )


def _check_workers(schedule: Schedule) -> None:
    wanted = {Worker(s, r) for s, width in enumerate(schedule.replicas) for r in range(width)}
    for worker in sorted(wanted ^ schedule.programs.keys()):
        reason = "there is no program for it" if worker in wanted else "there is no such worker"
        raise ScheduleError(worker, 0, "workers", reason + f"; replicas are {schedule.replicas}")


class _Check:
    """Reads the program of one worker, and knows what it has done of what it has to do."""

    def __init__(self, schedule: Schedule, worker: Worker) -> None:
        self.schedule, self.worker = schedule, worker
        self.replicas = schedule.replicas
        self.width = schedule.replicas[worker.stage]
        self.last = len(schedule.replicas) - 1
        units = schedule.minibatches * schedule.microbatches
        self.units = range(worker.replica, units, self.width)
        # A round is what one update applies: for 1F1B a minibatch of each replica.
        self.round = self.width if schedule.method in ONE else schedule.microbatches
        self.rounds = -(-units // self.round)
        self.bound = warm_up(worker.stage, schedule.replicas, schedule.in_transit) + 1
        if schedule.method == "gpipe":
            self.bound = schedule.microbatches // self.width
        self.done: set[tuple[type[Instruction], int]] = set()
        self.versions: dict[int, int] = {}  # of the forward pass of each microbatch
        self.gradients: set[int] = set()  # microbatches that went backward since the last update
        self.reduced = False  # the all-reduce before the next update
        self.newest = self.in_flight = self.most_in_flight = self.staleness = 0

    def read(self, index: int, step: Instruction | None) -> None:
        """Check the next instruction; None is the end."""
        for holds, rule, reason in self._rules(step):
            if not holds:
                raise ScheduleError(self.worker, index, rule, reason, step)

    def _rules(self, step: Instruction | None) -> Iterator[Rule]:
        """What must hold at this instruction, while it is done."""
        if step is None:
            yield from self._at_the_end()
        elif isinstance(step, AllReduce | Update):
            yield from self._of_update(step)
        else:
            yield from self._of_microbatch(step)

    def _of_microbatch(self, step: Forward | Backward | Send | Recv) -> Iterator[Rule]:
        m, (stage, replica) = self.schedule.microbatches, self.worker
        unit = step.minibatch * m + step.microbatch
        yield (
            unit in self.units and 0 <= step.microbatch < m,
            "route",
            f"this worker has the microbatches u = {replica} mod {self.width} below "
            f"{self.schedule.minibatches * m}, and u = {step.minibatch} * {m} + {step.microbatch}",
        )
        yield (type(step), unit) not in self.done, "once", "it has been done before"
        if isinstance(step, Send | Recv):
            other = stage + (1 if isinstance(step, SendActivation | RecvGradient) else -1)
            yield 0 <= other <= self.last, "route", f"there is no stage {other} to speak with"
            peer = Worker(other, unit % self.replicas[other])
            yield step.peer == peer, "route", f"microbatch u = {unit} is with {peer}"
        for needed in self._needs(step):
            yield (needed, unit) in self.done, "order", f"there was no {needed.__name__} before"
        if isinstance(step, Forward):
            yield from self._of_version(step, unit)
            self.versions[unit] = step.version
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            yield (
                self.in_flight <= self.bound,
                "in-flight",
                f"{self.in_flight} microbatches would be in flight, at most {self.bound} may",
            )
        elif isinstance(step, Backward):
            version = self.versions[unit]
            yield step.version == version, "version", f"its forward took version {version}"
            yield not self.reduced, "update", "the gradient has been all-reduced already"
            self.gradients.add(unit)
            self.in_flight -= 1
            self.staleness = max(self.staleness, unit // self.round - version)
        self.done.add((type(step), unit))

    def _needs(self, step: Forward | Backward | Send | Recv) -> Iterator[type[Instruction]]:
        if isinstance(step, Forward) and self.worker.stage > 0:
            yield RecvActivation
        elif isinstance(step, SendActivation):
            yield Forward
        elif isinstance(step, Backward):
            yield Forward
            if self.worker.stage < self.last:
                yield RecvGradient
        elif isinstance(step, SendGradient):
            yield Backward

    def _warm(self, stage: int) -> int:
        return warm_up(stage, self.replicas, self.schedule.in_transit)

    def _of_version(self, step: Forward, unit: int) -> Iterator[Rule]:
        """The method's equation; a negative version stands for 0."""
        method = self.schedule.method
        yield step.version <= self.newest, "version", f"the newest one is {self.newest}"
        if method == "1f1b":
            # Straight: u - (n - 1 - s), DESIGN's w_s^(t-n+s) with stages from 1.
            wanted = unit // self.width - self._warm(self.worker.stage)
            yield step.version == self.newest, "version", f"the newest one is {self.newest}"
        elif method == "1f1b-vertical-sync":
            # Straight: u - (n - 1) everywhere.
            first = self.replicas[0]
            seen = max(0, unit // first - self._warm(0)) * first
            wanted = seen // self.width
        else:
            wanted = step.minibatch - (1 if method == "2bw" else 0)
        wanted = max(0, wanted)
        yield step.version == wanted, "version", f"{method} takes version {wanted} here"

    def _of_update(self, step: AllReduce | Update) -> Iterator[Rule]:
        version = self.newest + 1
        yield step.version == version, "update", f"the next version is {version}"
        yield version <= self.rounds, "update", f"there are but {self.rounds} updates to make"
        first = (version - 1) * self.round
        size = min(self.round, self.schedule.minibatches * self.schedule.microbatches - first)
        wanted = {unit for unit in range(first, first + size) if unit in self.units}
        yield (
            self.gradients == wanted,
            "update",
            f"it applies the microbatches {sorted(self.gradients)}, but its round is "
            f"{sorted(wanted)} on this worker",
        )
        if isinstance(step, AllReduce):
            yield self.width > 1, "update", "a stage of one worker has nobody to average with"
            yield not self.reduced, "once", "it has been done before"
            members = min(self.width, size)
            yield step.contributors == members, "update", f"{members} replicas have a gradient"
            self.reduced = True
        else:
            yield self.reduced or self.width == 1, "update", "there was no AllReduce before"
            self.newest, self.gradients, self.reduced = version, set(), False

    def _at_the_end(self) -> Iterator[Rule]:
        kinds: list[type[Instruction]] = [Forward, Backward]
        if self.worker.stage > 0:
            kinds.append(SendGradient)
        if self.worker.stage < self.last:
            kinds.append(SendActivation)
        for unit in self.units:
            for kind in kinds:
                yield (kind, unit) in self.done, "once", f"no {kind.__name__} of microbatch {unit}"
        yield (
            self.newest == self.rounds,
            "update",
            f"{self.newest} updates were made, but there are {self.rounds} to make",
        )


def _alive(program: Sequence[Instruction]) -> int:
    """The most versions alive: the newest, and older ones that are named later on."""
    last_use: dict[int, int] = {}
    for index, step in enumerate(program):
        if isinstance(step, Forward | Backward):
            last_use[step.version] = index
    most, newest, older = 1, 0, set[int]()
    for index, step in enumerate(program):
        if isinstance(step, Update):
            older = {v for v in older | {newest} if last_use.get(v, -1) > index}
            newest = step.version
            most = max(most, len(older) + 1)
    return most


def _run(schedule: Schedule, rendezvous: bool) -> dict[Worker, int]:
    """Carry out all programs in symbols; where each worker that cannot go on stands."""
    programs = schedule.programs
    at = dict.fromkeys(programs, 0)
    mail: dict[tuple[Worker, Worker], deque[Send]] = defaultdict(deque)
    reducing: dict[int, set[Worker]] = defaultdict(set)
    awake = list(programs)
    while awake:
        worker = awake.pop()
        while at[worker] < len(programs[worker]):
            step = programs[worker][at[worker]]
            if isinstance(step, Send):
                if rendezvous and not _meets(step, worker, programs[step.peer], at[step.peer]):
                    break
                mail[worker, step.peer].append(step)
                awake.append(step.peer)
            elif isinstance(step, Recv):
                box = mail[step.peer, worker]
                if not box:
                    peer, its = programs[step.peer], at[step.peer]
                    sending = peer[its] if its < len(peer) else None
                    if isinstance(sending, Send) and _pair(sending, step, worker):
                        awake.append(step.peer)  # it waits for us, at its send
                    break
                if not _pair(box[0], step, worker):
                    reason = f"the next message from {step.peer} is {box[0]}"
                    raise ScheduleError(worker, at[worker], "messages", reason, step)
                box.popleft()
            elif isinstance(step, AllReduce):
                there = reducing[worker.stage]
                there.add(worker)
                if len(there) < schedule.replicas[worker.stage]:
                    break
                for member in there - {worker}:
                    at[member] += 1
                    awake.append(member)
                there.clear()
            at[worker] += 1
    return {worker: index for worker, index in at.items() if index < len(programs[worker])}


def _meets(send: Send, sender: Worker, program: Sequence[Instruction], index: int) -> bool:
    """Does the receiver stand at the receive of this message?"""
    step = program[index] if index < len(program) else None
    return isinstance(step, Recv) and step.peer == sender and _pair(send, step, send.peer)


def _pair(send: Send, recv: Recv, receiver: Worker) -> bool:
    kinds = (SendActivation, RecvActivation), (SendGradient, RecvGradient)
    return (
        (type(send), type(recv)) in kinds
        and send.peer == receiver
        and (send.minibatch, send.microbatch) == (recv.minibatch, recv.microbatch)
    )


def _who_waits(schedule: Schedule, stuck: Mapping[Worker, int]) -> str:
    """From the first who is stuck, who waits for whom, up to the first who was named before."""
    lines: list[str] = []
    named: set[Worker] = set()
    worker = next(iter(stuck))
    while worker not in named and worker in stuck:
        named.add(worker)
        step = schedule.programs[worker][stuck[worker]]
        if isinstance(step, Send | Recv):
            peer = step.peer
        else:  # an all-reduce: for a replica that is not there
            stage = [w for w in schedule.programs if w.stage == worker.stage]
            away = [w for w in stage if w in stuck and schedule.programs[w][stuck[w]] != step]
            peer = away[0] if away else worker
        what = type(step).__name__
        lines.append(f"{worker} waits at {stuck[worker]} ({what}) for {peer}")
        worker = peer
    return "\n".join(lines)
