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
from typing import TYPE_CHECKING

from hvd_pipe.pipeline.stage import Stage, Unit
from hvd_pipe.pipeline.transport import Kind, Layout, Transport
from hvd_pipe.planning.instructions import (
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
from hvd_pipe.runtime.timeline.recorder import COMPUTE, SENDS

if TYPE_CHECKING:
    from hvd_pipe.runtime.timeline.recorder import Recorder

__all__ = ["PipelineSpans", "Times", "evaluation_program", "execute"]


class PipelineSpans:
    """Notes a pipeline's runs in a recorder, which finds out nothing about passes meanwhile.

    A stage's replicas have a distributed optimizer, by whose hooks a recorder would find the same
    passes once more.

    Args:
        recorder: This process's.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> PipelineSpans:
        self._recorder.told = True
        return self

    def __exit__(self, *_: object) -> None:
        self._recorder.told = False
        self._recorder.file.flush()

    def now(self) -> float:
        """Return this moment, in seconds."""
        return self._recorder.now()

    def span(self, category: str, name: str, start: float, end: float, /) -> None:
        """Note what lasted from ``start`` to ``end``; both are moments of `now`."""
        lane = SENDS if category == "send" else COMPUTE
        if category == "wait":
            lane = self._recorder.wait_lane
        self._recorder.span(category, name, start, end, lane)
        if category == "update":
            self._recorder.next_step()


@dataclass
class Times:
    """How long a worker has computed and waited, in seconds.

    The steady state begins with its first backward pass and ends with its last forward pass: the
    pipeline is neither filling nor draining.
    """

    total_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    steady_s: float = 0.0
    steady_compute_s: float = 0.0
    backward_ends: list[float] = field(default_factory=list)

    @property
    def utilisation(self) -> float:
        """The part of the steady state in which the worker computes."""
        return self.steady_compute_s / self.steady_s if self.steady_s else 0.0


def execute(
    program: Sequence[Instruction],
    stage: Stage,
    transport: Transport,
    layout: Layout,
    *,
    cut: bool,
    spans: PipelineSpans | None = None,
    progress: Callable[[], object] | None = None,
) -> Times:
    """Carry out a worker's program; all workers do this at the same time.

    Args:
        program: This worker's instructions.
        stage: What computes.
        transport: What carries messages to and from the neighbours.
        layout: Which rank is who.
        cut: Whether minibatches have microbatches, for the names in a timeline.
        spans: Where to note what happens when.
        progress: Called after each backward pass.

    Returns:
        How long it has computed and waited.
    """
    _announce(program, transport, layout)
    last_use = _last_uses(program)
    times, newest = Times(), 0
    clock = time.perf_counter
    passes = [at for at, step in enumerate(program) if isinstance(step, Forward | Backward)]
    first_backward = next((a for a in passes if isinstance(program[a], Backward)), -1)
    last_forward = max((a for a in passes if isinstance(program[a], Forward)), default=-1)
    began = clock()
    steady: tuple[float, float] | None = None

    for at, step in enumerate(program):
        begun = clock()
        shown = 0.0 if spans is None else spans.now()
        if at == first_backward:
            steady = begun, times.compute_s
        match step:
            case RecvActivation() | RecvGradient():
                kind = Kind.ACTIVATION if isinstance(step, RecvActivation) else Kind.GRADIENT
                message = transport.receive(layout.rank(step.peer), kind)
                times.wait_s += clock() - begun
                take = stage.take_input if kind == Kind.ACTIVATION else stage.take_gradient
                take(Unit(step.minibatch, step.microbatch), message)
                category = "wait"
            case Forward():
                stage.forward(Unit(step.minibatch, step.microbatch), step.version)
                category = "forward"
            case Backward():
                stage.backward(Unit(step.minibatch, step.microbatch), step.version)
                category = "backward"
            case SendActivation():
                data = stage.output(Unit(step.minibatch, step.microbatch))
                transport.send(layout.rank(step.peer), Kind.ACTIVATION, data)
                category = "send"
            case SendGradient():
                data = stage.input_gradient(Unit(step.minibatch, step.microbatch))
                transport.send(layout.rank(step.peer), Kind.GRADIENT, data)
                category = "send"
            case AllReduce():
                stage.average(step.contributors)
                times.wait_s += clock() - begun
                category = "wait"
            case Update():
                keep = last_use.get(newest, -1) > at
                stage.update(step.version, keep)
                newest = step.version
                category = "update"
        ended = clock()
        if category in {"forward", "backward", "update"}:
            times.compute_s += ended - begun
        if isinstance(step, Forward | Backward):
            if last_use[step.version] == at and step.version != newest:
                stage.release(step.version)
            if at == last_forward and steady is not None:
                times.steady_s = ended - steady[0]
                times.steady_compute_s = times.compute_s - steady[1]
        if isinstance(step, Backward):
            times.backward_ends.append(ended - began)
            if progress is not None:
                progress()
        if spans is not None:
            name = f"{_WORDS.get(type(step), category)} {_name(step, cut)}"
            spans.span(category, name, shown, spans.now())
    transport.flush()
    times.total_s = clock() - began
    return times


def evaluation_program(
    layout: Layout, worker: Worker, minibatches: int, pieces: int
) -> list[Instruction]:
    """Return a worker's part in running minibatches of so many pieces forward.

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
    for unit in range(replica, minibatches * pieces, layout.replicas[stage]):
        where = divmod(unit, pieces)
        if stage > 0:
            before = Worker(stage - 1, unit % layout.replicas[stage - 1])
            program.append(RecvActivation(*where, before))
        program.append(Forward(*where, 0))
        if stage < layout.stages - 1:
            after = Worker(stage + 1, unit % layout.replicas[stage + 1])
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


def _last_uses(program: Sequence[Instruction]) -> dict[int, int]:
    """Return the place of the last instruction that names a version of the weights."""
    return {
        step.version: at for at, step in enumerate(program) if isinstance(step, Forward | Backward)
    }


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
