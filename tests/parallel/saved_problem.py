"""What saved files are written from, and how training goes on with them; never change it.

Archives in ``tests/data/saved`` hold what this problem came to under the version that wrote them.
All numbers are small binary fractions, and so are learning rate, momentum and the options: SGD
rounds nothing, so that every processor comes to the same bits. `ROUNDING` is for what divides.
"""

from __future__ import annotations

import importlib
import io
import json
import re
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

from hvd_pipe.cli.main import main

DATA = Path(__file__).parents[1] / "data" / "saved"

GRAPH = str(DATA.parent / "alexnet.graph.txt")
PIPE_SGD = "pipe-sgd:bucket_bytes=8388608"  # which the first version took by itself
COMMANDS = {
    "profile": f"plan {GRAPH} --cluster CLUSTER -n 8 -o FOLDER/plan.json",
    "partition": f"partition {GRAPH} -n 4 --bandwidth 10gbit -o FOLDER/partition.json "
    "--timeline FOLDER/pipeline.json",
    "simulated": f"trace {GRAPH} --strategy {PIPE_SGD} -n 2 --bandwidth 10gbit "
    "-o FOLDER/simulated.json",
    "again": "trace FOLDER/simulated.json -o FOLDER/out.json",
    "pipeline": "trace FOLDER/pipeline.json -o FOLDER/out.json",
    "job of torch": "trace FOLDER/timeline-torch -o FOLDER/out.json",
    "job of keras": "trace FOLDER/timeline-keras -o FOLDER/out.json",
    "profile of torch": "advise FOLDER/job-torch.profile.json --cluster CLUSTER -n 8",
    "profile of keras": "advise FOLDER/job-keras.profile.json --cluster CLUSTER -n 8",
}
"""Commands that read files of `make_saved.py`, and write some of them."""

Array = npt.NDArray[np.float64]

SHAPES = ((5,), (3, 2), (1,), (4,))
LR, MOMENTUM = 0.5, 0.5
SAVED, STEPS = 7, 6
PLANNED = 16  # steps after which merged-gradient and auto have measured and planned
ROUNDING = {"int8": 1e-9, "adam": 1e-12, "pipedream": 1e-9}


BASE = ("merged-gradient:plan=wfbp", "pipe-sgd", "cocod:period=4")
PREDICTIONS = ("pipe-sgd:prediction=local", "pipe-sgd:prediction=previous")
MOMENTA = "cocod:period=4,momentum=average"
OPTIONS = (
    "merged-gradient",
    "merged-gradient:plan=single",
    "pipe-sgd:warmup_steps=9",
    *PREDICTIONS,
    "pipe-sgd:bucket_bytes=64",
    "cocod:period=4,warmup_steps=9",
    MOMENTA,
    "cocod:period=4,pull_back=0.5,anchor_momentum=0.5",
    "cocod:period=4,outer=nesterov,outer_lr=0.25,outer_momentum=0.5",
    "cocod:period=4,weights=3/1",
    "cocod:period=4,fragments=2,outer=nesterov,outer_lr=0.25,outer_momentum=0.5",
)
CODECS: dict[str, Callable[[Any], Any]] = {
    "none": lambda hvd: hvd.Compression.none,
    "fp16": lambda hvd: hvd.Compression.fp16,
    "bf16": lambda hvd: hvd.Compression.bf16,
    "bf16 feedback": lambda hvd: hvd.BF16(error_feedback=True),
    "int8": lambda hvd: hvd.Compression.int8,
    "int8 feedback": lambda hvd: hvd.Int8(chunk=4, error_feedback=True),
}


@dataclass(frozen=True)
class Case:
    """One run, which is saved, and what it came to some steps later.

    ``way`` "pickled": PyTorch's model and optimizer are pickled, not their state dicts; "keras": a
    .keras file after ``synchronize()``, not a ``tf.train.Checkpoint``.
    """

    strategy: str
    optimizer: str = "momentum"
    codec: str = "none"
    passes: int = 1
    saved: int = SAVED
    way: str = ""

    def __str__(self) -> str:
        text = f"{self.strategy} {self.optimizer} {self.codec} {self.passes} {self.saved}"
        return re.sub(r"[:,=/ ]", "-", f"{text} {self.way}".rstrip())

    def arguments(self, hvd: Any) -> dict[str, Any]:
        return {
            "strategy": self.strategy,
            "compression": CODECS[self.codec](hvd),
            "backward_passes_per_step": self.passes,
        }


def cases(passes: int, way: str) -> list[Case]:
    """The cases of both frameworks."""
    return [
        *(Case(strategy) for strategy in (*BASE, *OPTIONS)),
        *(Case(strategy, codec=codec) for strategy in BASE for codec in CODECS if codec != "none"),
        *(Case(strategy, "adam") for strategy in (*BASE, *PREDICTIONS, MOMENTA)),
        *(Case(strategy, passes=passes) for strategy in BASE),
        Case("pipe-sgd", saved=1),
        *(Case(strategy, way=way) for strategy in BASE),
    ]


FIRST = [Case(strategy, codec=codec) for strategy in BASE for codec in ("none", "int8 feedback")]
"""Also loaded on all ranks from rank 0's file, where ranks do not have files of their own."""


class Pipeline:
    """A pipeline's run of an epoch, which is saved, and of one more."""

    def __init__(self, mode: str, plan: str) -> None:
        self.mode, self.plan = mode, plan

    def __str__(self) -> str:
        return f"pipedream-{self.mode}-{self.plan}"

    def start(self, first: float) -> Any:
        """The pipeline, its weights moved by ``first``."""
        raise NotImplementedError

    def values(self, engine: Any) -> Sequence[Any]:
        """Weights and statistics."""
        raise NotImplementedError

    def data(self, epoch: int) -> list[tuple[Any, Any]]:
        def draw(width: int, step: int) -> Array:
            return target((8, width), width, epoch, step, exact=False)

        return [(draw(3, step), draw(2, step)) for step in range(6)]

    def write(self, folder: Path) -> Array:
        engine = self.start(0.0)
        engine.train_epoch(self.data(0))
        engine.save(folder / str(self))
        return self.ended(engine)

    def go_on(self, folder: Path) -> Array:
        engine = self.start(1.0)
        engine.load(folder / str(self))
        return self.ended(engine)

    def ended(self, engine: Any) -> Array:
        """The loss of one epoch more, and the values after it."""
        loss = engine.train_epoch(self.data(1)).loss
        values = [np.asarray(each.numpy(), np.float64).ravel() for each in self.values(engine)]
        engine.close()
        return np.concatenate([[loss], *values])


class Saver(NamedTuple):
    """What one framework's files are written and read by."""

    hvd: Any
    cases: Sequence[Case]
    pipelines: Sequence[Pipeline]
    write: Callable[[Case, Path], Array]
    """Write a rank's checkpoint to this path without its ending; what the run itself came to."""
    go_on: Callable[[Case, Path], Array]
    """What a run comes to that loads such a checkpoint."""

    def write_all(self, folder: Path) -> dict[str, Array]:
        """Write all checkpoints; return what the runs themselves came to."""
        self.hvd.init(process_sets="dynamic")
        own = folder / f"rank{self.hvd.rank()}"
        own.mkdir(parents=True, exist_ok=True)
        runs = {str(case): self.write(case, own / str(case)) for case in self.cases}
        return runs | {str(each): each.write(folder) for each in self.pipelines}

    def runs_from(self, folder: Path) -> dict[str, Callable[[], Array]]:
        """How to go on from each rank's own checkpoints, and from some of rank 0's, by name."""
        runs: dict[str, Callable[[], Array]] = {}
        for case in self.cases:
            if list((folder / "rank0").glob(f"{case}.*")):
                own = folder / f"rank{self.hvd.rank()}" / str(case)
                runs[f"own {case}"] = partial(self.go_on, case, own)
                if case in FIRST:
                    runs[f"first {case}"] = partial(self.go_on, case, folder / "rank0" / str(case))
        for pipeline in self.pipelines:
            if (folder / str(pipeline)).exists():
                runs[f"own {pipeline}"] = partial(pipeline.go_on, folder)
        return runs

    def go_on_all(self, folder: Path) -> dict[str, Array]:
        self.hvd.init(process_sets="dynamic")
        return {name: run() for name, run in self.runs_from(folder).items()}


def target(shape: tuple[int, ...], number: int, rank: int, step: int, exact: bool) -> Array:
    """What a tensor is drawn to: quarters from -2 to 2, or (int8 must not meet ties) others."""
    places = np.arange(np.prod(shape)) + 11 * number
    if exact:
        values = ((7 * rank + 5 * step + 3 * places) % 17 - 8) / 4
    else:
        values = ((31 * rank + 17 * step + 13 * places) % 97 - 48) / 97
    return np.asarray(values.reshape(shape), np.float64)


def is_exact(values: Array) -> bool:
    """Whether nothing was rounded: the last binary places are still free."""
    scaled = values * 2.0**40
    return bool((scaled == np.rint(scaled)).all())


def tolerance(case: str) -> float:
    """By how much another processor's numbers may differ."""
    return max((ROUNDING[word] for word in ROUNDING if word in case), default=0.0)


def pack(directory: Path, archive: Path) -> None:
    """Write all files of a directory to an archive."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz", preset=9) as file:
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                entry = tarfile.TarInfo(str(path.relative_to(directory)))
                content = path.read_bytes()
                entry.size = len(content)
                file.addfile(entry, io.BytesIO(content))


def unpack(archive: Path, directory: Path) -> None:
    """Write an archive's files to a directory."""
    with tarfile.open(archive) as file:
        file.extractall(directory, filter="data")


def document(folder: Path, arguments: Sequence[str]) -> Any:
    """What one of `COMMANDS` says; files are named without their folder."""
    line = [
        each.replace("FOLDER", str(folder)).replace("CLUSTER", str(folder / "cluster.json"))
        for each in arguments
    ]
    result = CliRunner().invoke(main, [*line, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.replace(f"{folder}/", ""))


def archives(part: str) -> list[Path]:
    """All versions' archives of one part."""
    return sorted(DATA.glob(f"*/{part}.tar.xz"))


@cache
def expected(archive: Path) -> list[dict[str, Array]]:
    """What runs came to that load an archive's checkpoints, by rank and case."""
    found: list[dict[str, Array]] = []
    with tarfile.open(archive) as file:
        for rank in range(2):
            member = file.extractfile(f"rank{rank}.npz")
            assert member is not None
            with np.load(io.BytesIO(member.read())) as arrays:
                found.append(dict(arrays))
    return found


def run_all(part: str, what: str, folder: Path) -> dict[str, Array]:
    """Call a method of a framework's `Saver`, on one rank."""
    saver: Saver = importlib.import_module(f"saved_{part}").SAVER
    result: dict[str, Array] = getattr(saver, what)(folder)
    return result


# In tests.


def cases_of(part: str, first: Sequence[Any], nightly: str = "^$") -> list[Any]:
    """Parameters: an archive, and the name of one of its checkpoints that tests load.

    Those of rank 0 on all ranks are among them where ``first`` has them; ``nightly`` is a pattern.
    """
    kept = {f"first {case}" for case in first}
    return [
        pytest.param(
            archive,
            case,
            id=f"{archive.parent.name}-{case}",
            marks=[pytest.mark.nightly] if re.search(nightly, case) else [],
        )
        for archive in archives(part)
        for case in expected(archive)[0]
        if case in kept or case.startswith("own ")
    ]


def unpacked(archive: Path, factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an archive's files, which all tests of a process share."""
    path = factory.getbasetemp() / "saved" / archive.parent.name / archive.name
    if not path.exists():
        unpack(archive, path)
    return path


def assert_same(found: Array, archive: Path, case: str, rank: int) -> None:
    """Compare with what the version came to: bit for bit where nothing is rounded."""
    wanted = expected(archive)[rank][case]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance(case))
