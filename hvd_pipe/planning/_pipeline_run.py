"""The engine of :mod:`hvd_pipe.planning.simulate_pipeline`: programs on clocks and links."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvd_pipe.planning.instructions import (
    AllReduce,
    Backward,
    Forward,
    Recv,
    RecvActivation,
    RecvGradient,
    Schedule,
    Send,
    SendActivation,
    Update,
    Worker,
)
from hvd_pipe.timeline import Event

__all__ = ["PipelineRun", "StageCost", "check"]


@dataclass(frozen=True)
class StageCost:
    """What one microbatch (for 1F1B: minibatch) costs on one worker of a stage.

    Args:
        forward_s: Seconds of a forward pass.
        backward_s: Seconds of a backward pass.
        update_s: Seconds of an update.
        activation_bytes: Output to the next stage; the gradient that comes back is as large.
        allreduce_s: Seconds to average the stage's gradient over its replicas.

    Raises:
        ValueError: A number that is not finite or is negative.

    Example:
        >>> StageCost(forward_s=0.01, backward_s=0.02).activation_bytes
        0.0
    """

    forward_s: float
    backward_s: float
    update_s: float = 0.0
    activation_bytes: float = 0.0
    allreduce_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "update_s", "activation_bytes", "allreduce_s"):
            check(name, getattr(self, name))


@dataclass
class _Joined:
    """An all-reduce for which some replicas have registered."""

    members: set[Worker] = field(default_factory=set)
    ready_s: float = 0.0  # the last backward pass ends
    finish_s: float | None = None  # known once all have registered


class PipelineRun:
    """The state of a simulation; events are taken in the order of their times."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[StageCost],
        between: tuple[float, float],
        inside: tuple[float, float],
        per_node: int,
        recompute: bool,
    ) -> None:
        """Bandwidth (bytes/s) and latency of the links between machines and inside one."""
        self.schedule, self.stages = schedule, stages
        self.between, self.inside, self.per_node = between, inside, per_node
        self.recompute = recompute
        self.programs = schedule.programs
        self.ranks = {worker: rank for rank, worker in enumerate(self.programs)}
        self.factors: dict[Worker, list[float]] = {}
        self.at = dict.fromkeys(self.programs, 0)
        self.now = dict.fromkeys(self.programs, 0.0)
        self.busy = dict.fromkeys(self.programs, 0.0)
        self.way_out = dict.fromkeys(self.programs, 0.0)  # when it is free
        self.way_in = dict.fromkeys(self.programs, 0.0)
        self.arrivals: dict[tuple[object, ...], float] = {}
        self.joined: dict[tuple[int, int], _Joined] = {}
        self.completed = [0.0] * schedule.minibatches
        self.events: list[Event] = []
        self.waiting: dict[Worker, tuple[object, ...]] = {}  # and for what
        self.queue = [(0.0, rank, worker) for worker, rank in self.ranks.items()]

    def go(self) -> None:
        """Carry out all programs."""
        while self.queue:
            now, _, worker = heapq.heappop(self.queue)
            self.now[worker] = now
            if self.at[worker] < len(self.programs[worker]):
                self._step(worker)
        for worker, what in self.waiting.items():
            raise ValueError(
                f"the schedule does not run: {worker} waits for ever at instruction "
                f"{self.at[worker]} {what}: no instruction of another worker ends that"
            )

    def _step(self, worker: Worker) -> None:
        """Do the next instruction, or note what it waits for."""
        step, now = self.programs[worker][self.at[worker]], self.now[worker]
        if isinstance(step, Recv):
            key = (worker, type(step), step.minibatch, step.microbatch)
            if key not in self.arrivals:
                self.waiting[worker] = key
                return
            now = max(now, self.arrivals.pop(key))
        elif isinstance(step, AllReduce):
            finish = self._join(worker, step.version, now)
            if finish is None:
                self.waiting[worker] = (worker.stage, step.version)
                return
            now = max(now, finish)
        elif isinstance(step, Send):
            self._send(worker, step)
        else:
            now = self._compute(worker, step)
        self.at[worker] += 1
        heapq.heappush(self.queue, (now, self.ranks[worker], worker))

    def _wake(self, worker: Worker, what: tuple[object, ...], at: float) -> None:
        if self.waiting.get(worker) == what:
            del self.waiting[worker]
            heapq.heappush(self.queue, (at, self.ranks[worker], worker))

    def _compute(self, worker: Worker, step: Forward | Backward | Update) -> float:
        cost, now, index = self.stages[worker.stage], self.now[worker], self.at[worker]
        if isinstance(step, Forward):
            seconds = cost.forward_s
        elif isinstance(step, Backward):
            seconds = cost.backward_s + (cost.forward_s if self.recompute else 0.0)
        else:
            seconds = cost.update_s
        seconds *= self.factors[worker][index]
        self.busy[worker] += seconds
        name, args = type(step).__name__.lower(), {"version": step.version}
        text = str(step.version)
        if not isinstance(step, Update):
            args |= {"minibatch": step.minibatch, "microbatch": step.microbatch}
            text = self._name(step)
        self._note(f"{name} {text}", name, worker, "compute", now, seconds, args)
        if isinstance(step, Backward):
            if worker.stage == 0:
                done = self.completed[step.minibatch]
                self.completed[step.minibatch] = max(done, now + seconds)
            program, after = self.programs[worker], index + 1
            while after < len(program) and isinstance(program[after], Send):
                after += 1
            following = program[after] if after < len(program) else None
            if isinstance(following, AllReduce):
                self._join(worker, following.version, now + seconds)
        return now + seconds

    def _send(self, worker: Worker, step: Send) -> None:
        activation = isinstance(step, SendActivation)
        source = worker.stage if activation else worker.stage - 1
        size = self.stages[source].activation_bytes
        start = max(self.now[worker], self.way_out[worker], self.way_in[step.peer])
        machines = {self.ranks[end] // self.per_node for end in (worker, step.peer)}
        bandwidth, latency = self.inside if len(machines) == 1 else self.between
        seconds = latency + size / bandwidth
        end = start + seconds
        self.way_out[worker] = self.way_in[step.peer] = end
        kind = "activation" if activation else "gradient"
        name, args = f"{kind} {self._name(step)}", {"bytes": size}
        self._note(name, "send", worker, "network", start, seconds, args)
        self._note(name, "recv", step.peer, "network in", start, seconds, args)
        receive = RecvActivation if activation else RecvGradient
        key = (step.peer, receive, step.minibatch, step.microbatch)
        self.arrivals[key] = end
        self._wake(step.peer, key, end)

    def _join(self, worker: Worker, version: int, ready_s: float) -> float | None:
        """Register a replica whose gradient is ready then; the end, once all have."""
        stage = worker.stage
        joined = self.joined.setdefault((stage, version), _Joined())
        if worker in joined.members:
            return joined.finish_s
        joined.members.add(worker)
        joined.ready_s = max(joined.ready_s, ready_s)
        if len(joined.members) == self.schedule.replicas[stage]:
            start = self.now[worker]
            seconds = self.stages[stage].allreduce_s
            if seconds:
                start = max(start, *(max(self.way_out[w], self.way_in[w]) for w in joined.members))
            for member in joined.members if seconds else ():
                self.way_out[member] = self.way_in[member] = start + seconds
                name = f"all-reduce {version}"
                args = {"version": version}
                self._note(name, "allreduce", member, "network", start, seconds, args)
            joined.finish_s = max(start + seconds, joined.ready_s)
            for member in joined.members - {worker}:
                self._wake(member, (stage, version), joined.finish_s)
        return joined.finish_s

    def _name(self, step: Forward | Backward | Send) -> str:
        cut = self.schedule.microbatches > 1
        return f"{step.minibatch}.{step.microbatch}" if cut else str(step.minibatch)

    def _note(
        self,
        name: str,
        category: str,
        worker: Worker,
        lane: str,
        start_s: float,
        seconds: float,
        args: Mapping[str, object],
    ) -> None:
        if seconds:
            rank = self.ranks[worker]
            self.events.append(Event(name, category, rank, lane, start_s, seconds, args))


def check(name: str, value: float) -> None:
    """Raise ValueError unless it is finite and not negative."""
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{name} must be finite and at least 0, got {value}")
