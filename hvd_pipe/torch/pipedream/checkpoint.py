"""A pipeline's checkpoints: a plain model, and by stage what training goes on from.

    DIRECTORY/model.pt        the plain model's state_dict
    DIRECTORY/stage0.pt ...   optimizer state by parameter, options of its groups, scheduler, and
                              of each replica its random state and BatchNorm's statistics
    DIRECTORY/pipeline.json   the stages, the mode, and the number of epochs

Rank 0 writes and reads all files, so no disk needs to be shared. Between epochs nothing is in
flight, so there is one version of the weights.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from horovod.torch.functions import allgather_object
from horovod.torch.mpi_ops import broadcast_, global_process_set, rank

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.pipeline.checkpoint import read_checkpoint, resume, write_checkpoint
from hvd_pipe.planning.schedule import Worker
from hvd_pipe.torch.agree import agreement
from hvd_pipe.torch.horovod_api import broadcast_tensors
from hvd_pipe.torch.pipedream.build import TorchPipeline

SCHEMA = "hvd_pipe.pipeline/1"
_NAME = "hvd_pipe.pipeline.checkpoint"


def whole_state(built: TorchPipeline) -> dict[str, torch.Tensor]:
    """Return the state of all stages as the plain model's, on every rank."""
    built.average_statistics()
    local = built.stage.module.state_dict()
    device = next((x.device for x in local.values()), torch.device("cpu"))
    state: dict[str, torch.Tensor] = {}
    for name, (shape, dtype) in built.shapes.items():
        if name in built.unused:
            state[name] = built.unused[name].clone()
            continue
        stage = built.owners[name]
        is_here = stage == built.assignment.worker.stage
        value = local[name].clone() if is_here else torch.empty(shape, dtype=dtype, device=device)
        first = built.assignment.layout.rank(Worker(stage, 0))
        broadcast_tensors([(f"{_NAME}.{name}", value)], first)
        state[name] = value.cpu()
    return state


def save(built: TorchPipeline, directory: Path, epoch: int) -> None:
    """Write a checkpoint on rank 0; all ranks take part."""
    state = whole_state(built)  # which has averaged the buffers of replicas
    replicas = _gather(
        {"random": _random_state(), "buffers": dict(built.stage.module.named_buffers())}
    )
    # Replicas of a stage have the same optimizer.
    optimizers = _gather(_training_state(built) if built.assignment.worker.replica == 0 else None)

    def write() -> None:
        writers: dict[str, Callable[[Path], object]] = {"model.pt": partial(torch.save, state)}
        for stage in range(built.assignment.layout.stages):
            ranks = built.assignment.layout.ranks(stage)
            document = {"training": optimizers[ranks[0]], "replicas": [replicas[r] for r in ranks]}
            writers[f"stage{stage}.pt"] = partial(torch.save, document)
        write_checkpoint(
            directory,
            writers,
            schema=SCHEMA,
            built=built,
            epoch=epoch,
            layers=built.layers,
        )

    agreement.found_by_first(write, f"{_NAME}.save", global_process_set)


def load(built: TorchPipeline, directory: Path) -> tuple[int, bool]:
    """Load a checkpoint; return its number of epochs, and whether its stages are these."""
    files: list[Any] = []

    def look() -> dict[str, Any]:
        document, read = read_checkpoint(directory, SCHEMA, partial(_read, directory))
        _check_model(read[0], built, directory)
        files.extend(read)
        return document

    document = agreement.found_by_first(look, f"{_NAME}.look", global_process_set)
    count = len(document["partition"]["stages"])
    state, *stages = map(_from_first, files or [None] * (1 + count))
    built.stage.module.load_state_dict({n: state[n] for n in built.stage.module.state_dict()})
    built.unused.update({name: state[name] for name in built.unused})
    worker = built.assignment.worker
    _load_training(built, [stage["training"] for stage in stages])
    same_stages = resume(built, document, built.layers)
    if same_stages:
        replica = stages[worker.stage]["replicas"][worker.replica]
        for name, value in replica["buffers"].items():
            built.stage.module.get_buffer(name).copy_(value)
        torch.set_rng_state(replica["random"]["cpu"])
        if "cuda" in replica["random"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(replica["random"]["cuda"])
    return int(document["epoch"]), same_stages


def _training_state(built: TorchPipeline) -> dict[str, Any]:
    """Return the optimizer's state by the names of its parameters, and its groups likewise."""
    optimizer, scheduler = built.updates.optimizer, built.scheduler
    groups = [] if optimizer is None else optimizer.param_groups
    names = {id(p): name for name, p in built.stage.module.named_parameters()}
    return {
        "state": {
            names[id(p)]: dict(optimizer.state[p])
            for group in groups
            for p in group["params"]
            if optimizer is not None and optimizer.state.get(p)
        },
        "groups": [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": [names[id(p)] for p in group["params"]],
            }
            for group in groups
        ],
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "lr_scale": built.assignment.lr_scale,
    }


def _load_training(built: TorchPipeline, stages: list[dict[str, Any]]) -> None:
    """Load the optimizer state and the group of each parameter here, from any stage."""
    optimizer, scheduler = built.updates.optimizer, built.scheduler
    if optimizer is None:
        return
    state = {k: v for stage in stages for k, v in stage["state"].items()}
    groups = {
        name: (stage, g) for stage in stages for g in stage["groups"] for name in g["params"]
    }
    names = {id(p): name for name, p in built.stage.module.named_parameters()}
    owned = [group for group in optimizer.param_groups if group["params"]]
    for group in owned:  # another stage may have none of a group's parameters
        for p in group["params"]:
            optimizer.state.pop(p, None)
            if names[id(p)] in state:
                optimizer.state[p] = _like(state[names[id(p)]], p)
        stage, saved = groups[names[id(group["params"][0])]]
        scale = built.assignment.lr_scale / stage["lr_scale"]
        for key, value in saved.items():
            if key != "params":
                group[key] = value * scale if key in {"lr", "initial_lr"} else value
    if scheduler is not None:
        name = names[id(owned[0]["params"][0])]
        stage, _ = groups[name]
        scale = built.assignment.lr_scale / stage["lr_scale"]
        saved = dict(stage["scheduler"])
        for key in ("base_lrs", "_last_lr"):
            if key in saved:
                # As many as this stage has groups: another stage may have had more or fewer.
                rates = [saved[key][0] * scale] * len(optimizer.param_groups)
                same_count = len(saved[key]) == len(rates)
                saved[key] = [rate * scale for rate in saved[key]] if same_count else rates
        scheduler.load_state_dict(saved)


def _like(state: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Return a parameter's state on its device; counters stay where they are."""
    return {
        key: value.to(parameter.device)
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
        else value
        for key, value in state.items()
    }


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _read(directory: Path, stages: int) -> list[Any]:
    names = ["model.pt", *(f"stage{stage}.pt" for stage in range(stages))]
    return [torch.load(directory / name, map_location="cpu", weights_only=True) for name in names]


def _check_model(state: dict[str, Any], built: TorchPipeline, directory: Path) -> None:
    saved = {name: (tuple(x.shape), x.dtype) for name, x in state.items()}
    for name in sorted(saved.keys() ^ built.shapes.keys()):
        where = "only in the checkpoint" if name in saved else "not in the checkpoint"
        raise HvdPipeError(f"{directory} is of another model: {name} is {where}.")
    for name, (shape, dtype) in built.shapes.items():
        if saved[name] != (shape, dtype):
            raise HvdPipeError(
                f"{directory} is of another model: {name} has shape {saved[name][0]} and "
                f"{saved[name][1]} there, {shape} and {dtype} here."
            )


def _gather(value: Any) -> list[Any]:
    """Return every rank's value, which may hold tensors."""
    file = io.BytesIO()
    torch.save(value, file)
    parts = allgather_object(file.getvalue(), name=f"{_NAME}.gather")
    return [torch.load(io.BytesIO(part), map_location="cpu") for part in parts]


def _from_first(value: Any) -> Any:
    """Return rank 0's value on every rank; Horovod's broadcast_object stops at 2 GiB."""
    file = io.BytesIO()
    if rank() == 0:
        torch.save(value, file)
    size = agreement.from_first(file.tell(), f"{_NAME}.bytes", global_process_set)
    data = torch.frombuffer(bytearray(file.getvalue() or bytes(size)), dtype=torch.uint8)
    broadcast_(data, 0, name=f"{_NAME}.value")
    return torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu")
