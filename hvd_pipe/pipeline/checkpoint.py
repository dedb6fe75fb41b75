"""Checkpoints of both frameworks: ``pipeline.json``, and files that are written together."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.pipeline.runner import BuiltPipeline
from hvd_pipe.planning.stages import Partition

NEW = "new."
"""Prefix of a file's name until all files are written."""


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_together(directory: Path, writers: Mapping[str, Callable[[Path], object]]) -> None:
    """Write files so that the last one is there only beside all others of its own time.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for text in "ab":
        ...         write = lambda path: path.write_text(text)
        ...         write_together(Path(folder), {"weights": write, "about.json": write})
        ...     sorted((path.name, path.read_text()) for path in Path(folder).iterdir())
        [('about.json', 'b'), ('weights', 'b')]
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, write in writers.items():
        write(directory / f"{NEW}{name}")
    *_, last = writers
    (directory / last).unlink(missing_ok=True)
    for name in writers:
        (directory / f"{NEW}{name}").replace(directory / name)


ABOUT = "pipeline.json"
"""The file's name: it is written last, so where it is, all others are."""

T = TypeVar("T")

_WRONG_VALUES = (ValueError, LookupError, TypeError, AttributeError)
_DAMAGE = (*_WRONG_VALUES, OSError, EOFError, RuntimeError, UnpicklingError)


def write_checkpoint(
    directory: Path,
    files: Mapping[str, Callable[[Path], object]],
    *,
    schema: str,
    built: BuiltPipeline,
    epoch: int,
    layers: Iterable[str],
    **more: Any,
) -> None:
    """Write a checkpoint: a framework's files, and then the document about the pipeline."""
    stages = json.loads(built.assignment.partition.to_json())
    norms = [None if math.isnan(norm) else norm for norm in built.stage.norms.squared]
    mode = built.assignment.mode.name
    document = {"schema": schema, "mode": mode, "epoch": epoch, "partition": stages}
    document |= {"squared_norms": norms, "layers": list(layers), **more}

    def write_about(path: Path) -> None:
        document["files"] = {name: digest(directory / f"{NEW}{name}") for name in files}
        path.write_text(json.dumps(document, indent=1), encoding="utf-8")

    write_together(directory, {**files, ABOUT: write_about})


def read_checkpoint(
    directory: Path, schema: str, read: Callable[[int], T]
) -> tuple[dict[str, Any], T]:
    """Return the document about a pipeline, and what ``read`` returns for its stages."""
    try:
        document = json.loads((directory / ABOUT).read_text(encoding="utf-8"))
        if document.get("schema") != schema:
            raise ValueError(f"its schema is {document.get('schema')!r}, not {schema!r}")
        for name, expected in document["files"].items():
            if digest(directory / name) != expected:
                raise ValueError(f"{name} is damaged, or not the one that was written")
        return document, read(len(document["partition"]["stages"]))
    except _DAMAGE as error:
        raise HvdPipeError(
            f"{directory} holds no checkpoint of such a pipeline ({error}): name a directory that "
            "PipeDream.save() of this framework has written, on rank 0's host."
        ) from error


def resume(built: BuiltPipeline, document: dict[str, Any], layers: Iterable[str]) -> bool:
    """Load the gradient norms of a checkpoint; return whether its stages are these.

    Layers are compared by their places, as names that Keras makes up differ from run to run.
    """
    saved = Partition.from_json(json.dumps(document["partition"]))
    same_stages = _placed(saved, document["layers"]) == _placed(built.assignment.partition, layers)
    if same_stages:
        built.stage.norms.squared = tuple(
            math.nan if norm is None else norm for norm in document["squared_norms"]
        )
    return same_stages


def _placed(partition: Partition, layers: Iterable[str]) -> list[tuple[list[int], int]]:
    place = {name: at for at, name in enumerate(layers)}
    return [([place[n] for n in stage.layers], stage.replicas) for stage in partition.stages]
