"""A pipeline's checkpoints: a plain model's weights, and by stage what training goes on from.

    DIRECTORY/model.weights.h5   the plain model's, for its load_weights
    DIRECTORY/stage0.npz ...     optimizer variables, and seeds and statistics of each replica
    DIRECTORY/pipeline.json      the stages, the mode, and the number of epochs

Rank 0 writes and reads all files, so no disk needs to be shared. Variables of the model are known
by their places in ``model.variables``, as names that Keras makes up differ from run to run.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from horovod.tensorflow.mpi_ops import global_process_set, rank

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.pipeline.checkpoint import read_checkpoint, resume, write_checkpoint
from hvd_pipe.tensorflow.agree import agreement
from hvd_pipe.tensorflow.horovod_api import allgather_object, broadcast_object, broadcast_variables
from hvd_pipe.tensorflow.pipedream.build import KerasPipeline
from hvd_pipe.tensorflow.pipedream.graph import blocks_of
from hvd_pipe.tensorflow.pipedream.stage import ByMinibatch

SCHEMA = "hvd_pipe.keras_pipeline/1"
_NAME = "hvd_pipe.pipeline.checkpoint"
_WEIGHTS = "model.weights.h5"
_OTHER_LISTS = {"_trainable_variables", "_variables"}  # lists of several slots

Arrays = dict[str, npt.NDArray[Any]]


def save(built: KerasPipeline, directory: Path, epoch: int) -> None:
    """Write a checkpoint on rank 0; all ranks take part."""
    built.gather()
    values = _optimizer_values(built) if built.assignment.worker.replica == 0 else {}
    values |= {
        f"replica{built.assignment.worker.replica}.{name}": x for name, x in _state(built).items()
    }
    gathered = allgather_object(_packed(values), name=f"{_NAME}.gather")

    def write() -> None:
        writers: dict[str, Callable[[Path], object]] = {
            _WEIGHTS: built.options.model.save_weights,
        }
        for stage in range(built.assignment.layout.stages):
            arrays: Arrays = {}
            for member in built.assignment.layout.ranks(stage):
                arrays |= _unpacked(gathered[member])
            writers[f"stage{stage}.npz"] = partial(Path.write_bytes, data=_packed(arrays))
        write_checkpoint(
            directory,
            writers,
            schema=SCHEMA,
            built=built,
            epoch=epoch,
            layers=blocks_of(built.options.graph),
            variables=_variables(built),
        )

    agreement.found_by_first(write, f"{_NAME}.save", global_process_set)


def load(built: KerasPipeline, directory: Path) -> tuple[int, bool]:
    """Load a checkpoint; return its number of epochs, and whether its stages are these.

    Raises:
        HvdPipeError: The directory has no checkpoint, or one of another model.
    """
    stages: list[bytes] = []

    def look() -> dict[str, Any]:
        document, files = read_checkpoint(directory, SCHEMA, partial(_read, directory))
        _check_model(document["variables"], built, directory)
        stages.extend(files)
        return document

    document = agreement.found_by_first(look, f"{_NAME}.look", global_process_set)
    files = broadcast_object(stages if rank() == 0 else None, name=f"{_NAME}.stages")
    arrays = [_unpacked(file) for file in files]
    # Check everything that may not fit before anything changes.
    optimizer = agreement.checked(
        lambda: (_optimizer_of(built, arrays), []), f"{_NAME}.optimizer", global_process_set
    )
    model = built.options.model
    agreement.found_by_first(
        lambda: model.load_weights(directory / _WEIGHTS), f"{_NAME}.weights", global_process_set
    )
    broadcast_variables(model.variables, 0)
    same_stages = resume(built, document, blocks_of(built.options.graph))
    _load_state(built, arrays, same_stages)
    for slot, value in optimizer:
        slot.assign(value)
    return int(document["epoch"]), same_stages


def _state(built: KerasPipeline) -> Arrays:
    """Return the values of variables that are not trained, by place."""
    places = _places(built)
    return {f"state.{places[id(v)]}": v.numpy() for v in built.stage.passes.state}


def _load_state(built: KerasPipeline, stages: list[Arrays], same_stages: bool) -> None:
    replica = built.assignment.worker.replica if same_stages else 0
    state = {name: x for stage in stages for name, x in stage.items()}
    places = _places(built)
    for variable in built.stage.passes.state:
        variable.assign(state[f"replica{replica}.state.{places[id(variable)]}"])


def _slots(built: KerasPipeline) -> dict[str, Any]:
    """Return the optimizer's variables: those of a weight by its place, others by name."""
    optimizer, weights, places = built.stage.optimizer, built.stage.passes.weights, _places(built)
    if not weights:
        return {}
    others = {id(v): v for v in optimizer.variables}
    named: dict[str, Any] = {}
    for name, slots in sorted(vars(optimizer).items()):
        if name in _OTHER_LISTS or not isinstance(slots, list):
            continue
        for weight in weights:
            place = optimizer._get_variable_index(weight)
            slot = slots[place] if place < len(slots) else None
            if slot is not None and others.pop(id(slot), None) is not None:
                named[f"slot.{places[id(weight)]}.{name}"] = slot
    rate = optimizer._learning_rate
    counted = {"scalar.minibatches": rate.minibatches} if isinstance(rate, ByMinibatch) else {}
    return named | {f"scalar.{v.name}": v for v in others.values()} | counted


def _optimizer_values(built: KerasPipeline) -> Arrays:
    values = {name: slot.numpy() for name, slot in _slots(built).items()}
    places = sorted(_places(built)[id(weight)] for weight in built.stage.passes.weights)
    return values | {
        "weights": np.array(places, np.int64),
        "lr_scale": np.array(built.assignment.lr_scale),
    }


def _optimizer_of(
    built: KerasPipeline, stages: list[Arrays]
) -> list[tuple[Any, npt.NDArray[Any]]]:
    """Return this stage's optimizer variables and their saved values, from any stage."""
    slots = _slots(built)
    if not slots:
        return []
    first = _places(built)[id(built.stage.passes.weights[0])]
    source = next(stage for stage in stages if first in stage["weights"])
    values = {name: x for one in stages for name, x in one.items() if name.startswith("slot.")}
    values |= {name: x for name, x in source.items() if name.startswith("scalar.")}
    lost = sorted(slots.keys() - values.keys())
    if lost:
        raise HvdPipeError(
            f"the checkpoint is of another optimizer: it has no {lost[0]!r}, which "
            f"{type(built.stage.optimizer).__name__} needs. Make the one that it was saved with."
        )
    name = f"scalar.{getattr(built.stage.optimizer._learning_rate, 'name', '')}"
    if name in values:  # else a schedule, which is scaled already
        values[name] = values[name] * (built.assignment.lr_scale / float(source["lr_scale"]))
    return [(slot, values[name]) for name, slot in slots.items()]


def _places(built: KerasPipeline) -> dict[int, int]:
    return {id(variable): place for place, variable in enumerate(built.options.model.variables)}


def _variables(built: KerasPipeline) -> list[list[Any]]:
    return [[v.path, list(map(int, v.shape)), str(v.dtype)] for v in built.options.model.variables]


def _read(directory: Path, stages: int) -> list[bytes]:
    return [(directory / f"stage{stage}.npz").read_bytes() for stage in range(stages)]


def _check_model(saved: list[list[Any]], built: KerasPipeline, directory: Path) -> None:
    here = _variables(built)
    for place in range(max(len(saved), len(here))):
        theirs, ours = (one[place] if place < len(one) else None for one in (saved, here))
        if theirs is None or ours is None or theirs[1:] != ours[1:]:
            says = [
                "no such variable" if one is None else f"{one[0]} of shape {one[1]} and {one[2]}"
                for one in (theirs, ours)
            ]
            raise HvdPipeError(
                f"{directory} is of another model: variable {place} is {says[0]} there, and "
                f"{says[1]} here."
            )


def _packed(arrays: Arrays) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def _unpacked(data: bytes) -> Arrays:
    with np.load(io.BytesIO(data)) as arrays:
        return dict(arrays)
