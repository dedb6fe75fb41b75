"""Carries out a worker's instructions, one after the other, on a stage and a transport.

Sends return at once and receives are posted ahead, so while a worker computes, its messages
travel; it waits only where an instruction needs what is not there yet. In a timeline::

    compute   | forward 2 | wait | backward 0 | update 1 |     passes, waits, updates
    network               |s|                 |s|              sends; a replica's all-reduces

A send lasts until the message is handed over, not until it has arrived. A wait for a message that
is there already lasts as long as it takes to unpack. ``3.1`` is microbatch 1 of minibatch 3.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hvd_pipe.pipeline.stage import MicrobatchIndex, Stage
from hvd_pipe.pipeline.transport import Kind, Layout, Transport
from hvd_pipe.planning.schedule import (
    AllReduce,
    Backward,
    Forward,
    Instruction,
    RecvActivation,
    RecvGradient,
    SendActivation,
    SendGradient,
    Update,
    Worker,
)
from hvd_pipe.runtime.timeline import OFF, Recorder


@dataclass
class Times:
    """How long a worker has computed and waited, in seconds."""

    total_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    steady_s: float = 0.0
    steady_compute_s: float = 0.0
    backward_ends: list[float] = field(default_factory=list)

    @property
    def utilisation(self) -> float:
        """The part of the steady state, or of an epoch that has none, in which it computes."""
        if not self.steady_s:  # one minibatch, or fewer than the pipeline holds
            return self.compute_s / self.total_s if self.total_s else 0.0
        return self.steady_compute_s / self.steady_s


# Architecture: D1
def execute(
    program: Sequence[Instruction],
    stage: Stage,
    transport: Transport,
    layout: Layout,
    *,
    cut: bool,
    recorder: Recorder = OFF,
    progress: Callable[[], object] | None = None,
) -> Times:
    """Carry out a worker's program; all workers do this at the same time."""
    _announce(program, transport, layout)
    times = Times()
    worker = _Worker(program, stage, transport, layout, times)
    passes = [at for at, step in enumerate(program) if isinstance(step, Forward | Backward)]
    first_backward = next((a for a in passes if isinstance(program[a], Backward)), -1)
    last_forward = max((a for a in passes if isinstance(program[a], Forward)), default=-1)
    clock = time.perf_counter
    began = clock()
    steady: tuple[float, float] | None = None

    recorder.in_pipeline = recorder.is_on
    try:
        for at, step in enumerate(program):
            begun = clock()
            if at == first_backward:
                steady = begun, times.compute_s
            category = worker.carry_out(at, step)
            ended = clock()
            if category in {"forward", "backward", "update"}:
                times.compute_s += ended - begun
            if at == last_forward and steady is not None:
                times.steady_s = ended - steady[0]
                times.steady_compute_s = times.compute_s - steady[1]
            if isinstance(step, Backward):
                times.backward_ends.append(ended - began)
                if progress is not None:
                    progress()
            if recorder.is_on:
                name = f"{_WORDS.get(type(step), category)} {_name(step, cut)}"
                recorder.record_external(category, name, begun)
    finally:
        recorder.in_pipeline = False
    transport.flush()
    times.total_s = clock() - began
    return times


class _Worker:
    """Carries out single instructions of a program."""

    def __init__(
        self,
        program: Sequence[Instruction],
        stage: Stage,
        transport: Transport,
        layout: Layout,
        times: Times,
    ) -> None:
        self._stage, self._transport, self._times = stage, transport, times
        self._ranks = {layout.worker(rank): rank for rank in range(layout.size)}
        self._keeping, self._releasing = _lifetimes(program)

    # Architecture: D2
    def carry_out(self, at: int, step: Instruction) -> str:
        """Carry out one instruction, and return its category in a timeline."""
        stage, begun = self._stage, time.perf_counter()
        match step:
            case RecvActivation(minibatch, microbatch, peer):
                message = self._transport.receive(self._ranks[peer], Kind.ACTIVATION)
                self._times.wait_s += time.perf_counter() - begun
                stage.take_input(MicrobatchIndex(minibatch, microbatch), message)
                return "wait"
            case RecvGradient(minibatch, microbatch, peer):
                message = self._transport.receive(self._ranks[peer], Kind.GRADIENT)
                self._times.wait_s += time.perf_counter() - begun
                stage.take_gradient(MicrobatchIndex(minibatch, microbatch), message)
                return "wait"
            case Forward(minibatch, microbatch, version):
                stage.forward(MicrobatchIndex(minibatch, microbatch), version)
            case Backward(minibatch, microbatch, version):
                stage.backward(MicrobatchIndex(minibatch, microbatch), version)
            case SendActivation(minibatch, microbatch, peer):
                data = stage.output(MicrobatchIndex(minibatch, microbatch))
                self._transport.send(self._ranks[peer], Kind.ACTIVATION, data)
                return "send"
            case SendGradient(minibatch, microbatch, peer):
                data = stage.input_gradient(MicrobatchIndex(minibatch, microbatch))
                self._transport.send(self._ranks[peer], Kind.GRADIENT, data)
                return "send"
            case AllReduce():
                stage.average(step.contributors)
                self._times.wait_s += time.perf_counter() - begun
                return "wait"
            case Update():
                stage.update(step.version, at in self._keeping)
                return "update"
        if at in self._releasing:
            stage.release(step.version)
        return "forward" if isinstance(step, Forward) else "backward"


def evaluation_program(
    layout: Layout, worker: Worker, minibatches: int, microbatches: int
) -> list[Instruction]:
    """Return a worker's part in running minibatches of so many microbatches forward.

    Example:
        >>> for step in evaluation_program(Layout((2, 1)), Worker(0, 1), 2, 2):
        ...     print(step)
        Forward(minibatch=0, microbatch=1, version=0)
        SendActivation(minibatch=0, microbatch=1, peer=Worker(stage=1, replica=0))
        Forward(minibatch=1, microbatch=1, version=0)
        SendActivation(minibatch=1, microbatch=1, peer=Worker(stage=1, replica=0))
    """
    stage, replica = worker
    program: list[Instruction] = []
    for index in range(replica, minibatches * microbatches, layout.replicas[stage]):
        where = divmod(index, microbatches)
        if stage > 0:
            before = Worker(stage - 1, index % layout.replicas[stage - 1])
            program.append(RecvActivation(*where, before))
        program.append(Forward(*where, 0))
        if stage < layout.stages - 1:
            after = Worker(stage + 1, index % layout.replicas[stage + 1])
            program.append(SendActivation(*where, after))
    return program


def _announce(program: Sequence[Instruction], transport: Transport, layout: Layout) -> None:
    """Tell the transport how many messages will come from whom."""
    coming: Counter[tuple[int, Kind]] = Counter()
    for step in program:
        if isinstance(step, RecvActivation):
            coming[layout.rank(step.peer), Kind.ACTIVATION] += 1
        elif isinstance(step, RecvGradient):
            coming[layout.rank(step.peer), Kind.GRADIENT] += 1
    for (peer, kind), count in coming.items():
        transport.expect(peer, kind, count)


def _lifetimes(program: Sequence[Instruction]) -> tuple[set[int], set[int]]:
    """Return which updates keep the weights of before, and after which passes weights go."""
    passes = Forward | Backward
    last_uses = {step.version: at for at, step in enumerate(program) if isinstance(step, passes)}
    lasts = set(last_uses.values())
    keeping, releasing, newest = set(), set(), 0
    for at, step in enumerate(program):
        if isinstance(step, Update):
            if last_uses.get(newest, -1) > at:
                keeping.add(at)
            newest = step.version
        elif last_uses.get(newest) != at and at in lasts:
            releasing.add(at)
    return keeping, releasing


_WORDS: dict[type, str] = {
    RecvActivation: "activation",
    RecvGradient: "gradient",
    SendActivation: "activation",
    SendGradient: "gradient",
    AllReduce: "all-reduce",
}


def _name(step: Instruction, cut: bool) -> str:
    if isinstance(step, AllReduce | Update):
        return str(step.version)
    return f"{step.minibatch}.{step.microbatch}" if cut else str(step.minibatch)
