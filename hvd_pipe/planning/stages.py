"""The answer of :mod:`hvd_pipe.planning.partition`: stages of layers, and their replicas."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields, replace

from hvd_pipe.planning._checks import Document, check_keys, read_fields, read_object
from hvd_pipe.planning.schedule import warm_up

__all__ = ["STRAIGHT", "Partition", "Stage", "parse_replicas"]


SCHEMA = "hvd_pipe.partition/1"
_ADDED = {"in_transit", "simulated_s"}  # documents that were written before have none


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline.

    Args:
        layers: names of its layers, in forward order.
        replicas: workers that hold it.
        compute_s: seconds that one worker computes on a minibatch.
        parameter_bytes: bytes of its parameters.
        activation_in_bytes: bytes of a minibatch that it gets from stages before it, those among
            them that it only passes on; 0 for the first.
        activation_out_bytes: bytes of a minibatch that it sends on; 0 for the last.
        memory_bytes: bytes that each of its workers holds.
        time_s: seconds per minibatch, its transfers and all-reduces included.
    """

    layers: tuple[str, ...]
    replicas: int
    compute_s: float
    parameter_bytes: int
    activation_in_bytes: int
    activation_out_bytes: int
    memory_bytes: int
    time_s: float


@dataclass(frozen=True)
class Partition(Document):
    """A model divided into the stages of a pipeline.

    Args:
        stages: first to last.
        workers: how many there are; more than the stages use only where that was allowed.
        period_s: seconds per minibatch once the pipeline is full: the slowest stage's ``time_s``.
        single_s, data_parallel_s: the same on one worker, and with the whole model on each.
        convention: the objective: ``"paper"``, or ``"original"`` in documents of older versions.
        in_flight: minibatches that a worker of each stage holds at once; the first is NOAM.
        exact: all cuts of the model were tried; else those that were are a part of them.
        in_transit: minibatches between each two stages, besides those that workers hold; they are
            counted in ``in_flight``. 0 is PipeDream's NOAM.
        simulated_s: seconds per minibatch that the schedule reaches in a simulation, where
            ``period_s`` takes all messages for hidden; None where it was not simulated.

    Raises:
        ValueError: no stages, not one number in flight a stage, or a negative number in transit.
    """

    _BINARY = "this is no partition, but binary data"

    stages: tuple[Stage, ...]
    workers: int
    period_s: float
    single_s: float
    data_parallel_s: float
    convention: str
    in_flight: tuple[int, ...]
    exact: bool = True
    in_transit: int = 0
    simulated_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        object.__setattr__(self, "in_flight", tuple(self.in_flight))
        if not self.stages or len(self.stages) != len(self.in_flight):
            raise ValueError(
                "a partition has at least one stage and as many numbers in flight, "
                f"got {len(self.stages)} stages and {len(self.in_flight)}"
            )
        if self.in_transit < 0:
            raise ValueError(f"in_transit must be at least 0, got {self.in_transit}")

    def with_in_transit(self, count: int) -> Partition:
        """The same stages with so many minibatches in transit; memory stays what it was."""
        if count == self.in_transit:
            return self
        numbers = range(len(self.stages))
        in_flight = tuple(warm_up(number, self.replicas, count) + 1 for number in numbers)
        return replace(self, in_transit=count, in_flight=in_flight, simulated_s=None)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Workers of each stage."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def config(self) -> str:
        """The replicas as the paper writes them: "15-1"."""
        return "-".join(map(str, self.replicas))

    def __str__(self) -> str:
        word = "stage" if len(self.stages) == 1 else "stages"
        lines = [
            f"{self.config}: {len(self.stages)} {word} on {sum(self.replicas)} of {self.workers} "
            f"workers, {self.period_s * 1e3:.3f} ms a minibatch ({self.convention} objective)",
            f"one worker {self.single_s * 1e3:.3f} ms, data-parallel "
            f"{self.data_parallel_s * 1e3:.3f} ms",
        ]
        if self.simulated_s is not None:
            lines.append(
                f"the schedule reaches {self.simulated_s * 1e3:.3f} ms, with {self.in_transit} "
                f"minibatches in transit between two stages and {self.in_flight[0]} in flight in "
                "each worker of the first"
            )
        if not self.exact:
            lines.append("found among a part of the model's cuts: raise max_states to try more")
        lines.append(
            "stage  replicas  in flight   time ms  compute ms  params MB  sends MB  memory MB  "
            "layers"
        )
        for number, (stage, in_flight) in enumerate(zip(self.stages, self.in_flight, strict=True)):
            ends = stage.layers[0], stage.layers[-1]
            lines.append(
                f"{number:5d}  {stage.replicas:8d}  {in_flight:9d}  {stage.time_s * 1e3:8.3f}  "
                f"{stage.compute_s * 1e3:10.3f}  {stage.parameter_bytes / 1e6:9.1f}  "
                f"{stage.activation_out_bytes / 1e6:8.1f}  {stage.memory_bytes / 1e6:9.0f}  "
                f"{ends[0] if len(stage.layers) == 1 else ' .. '.join(ends)}"
            )
        return "\n".join(lines)

    def to_json(self) -> str:
        """A JSON document; :meth:`from_json` reads it back exactly."""
        data = {"schema": SCHEMA, **asdict(self)}
        if not self.in_transit and self.simulated_s is None:  # as before there were any
            for name in _ADDED:
                del data[name]
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Partition:
        """The partition in a JSON document; ValueError says what makes it none."""
        required = {field.name for field in fields(cls)} - _ADDED
        data = read_object(text, SCHEMA, required, _ADDED)
        if not isinstance(data["stages"], list) or not isinstance(data["in_flight"], list):
            raise ValueError('"stages" and "in_flight" are lists')
        stages = []
        for number, stage in enumerate(data["stages"]):
            check_keys(stage, {field.name for field in fields(Stage)}, f"stage {number}")
            words = {"layers": "a list of names and not empty"}
            stages.append(read_fields(Stage, stage, words, f"stage {number}: "))
            if not stages[-1].layers:
                raise ValueError(f'stage {number}: "layers" is a list of names and not empty')
        words = {"in_flight": "a list of integers"}
        return read_fields(cls, {**data, "stages": tuple(stages)}, words)


STRAIGHT = "straight"


def parse_replicas(text: str, workers: int | None = None) -> tuple[int, ...]:
    """Return the replicas of each stage, the first stage first.

    Args:
        text: numbers joined by "-", as the paper has them, or "straight" for one worker a stage.
        workers: how many there are; the replicas must add up to them. "straight" needs it.

    Raises:
        TypeError, ValueError: no such text, or another number of workers; says what would do.

    Example:
        >>> parse_replicas("3-1"), parse_replicas("straight", workers=3)
        ((3, 1), (1, 1, 1))
    """
    if not isinstance(text, str):
        raise TypeError(f'replicas are written "3-1" or "straight", got {text!r}')
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    written = text.strip()
    if written == STRAIGHT:
        if workers is None:
            raise ValueError('"straight" is one worker a stage: say how many workers there are')
        return (1,) * workers
    if not re.fullmatch(r"[0-9]+(-[0-9]+)*", written):
        raise ValueError(
            f"{text!r} is no plan: write the workers of each stage, the first stage first, as "
            '"3-1", or "straight" for one worker a stage'
        )
    replicas = tuple(map(int, written.split("-")))
    if 0 in replicas:
        raise ValueError(f"{text!r} has a stage without workers: each needs at least 1")
    if workers is not None and sum(replicas) != workers:
        raise ValueError(
            f"{text!r} is for {sum(replicas)} workers, but there are {workers}: "
            f"start {sum(replicas)}, or write a plan whose numbers add up to {workers}"
            + (f', such as "{workers - 1}-1"' if workers > 1 else "")
        )
    return replicas
