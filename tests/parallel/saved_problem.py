"""What saved files are written from, and how training goes on with them; never change it.

Archives in ``tests/data/saved`` hold what this problem came to under the version that wrote them.
All numbers are small binary fractions, and so are learning rate, momentum and the options: SGD
rounds nothing, so that every processor comes to the same bits. `ROUNDING` is for what divides.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

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
