"""Write archives of files as users save them, for test_saved.py to load ever after.

    python tests/parallel/make_saved.py NAME [PART...]     writes tests/data/saved/NAME/PART.tar.xz

NAME is the commit that is checked out, or a version. Archives that are there stay as they are.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import saved_keras
import saved_torch
import workers_cli
from ranks import run_ranks
from saved_problem import COMMANDS, DATA, Array, document, is_exact, pack, run_all, tolerance


def checkpoints(part: str, folder: Path) -> None:
    """Checkpoints under each strategy, option and codec, and of pipelines."""
    framework = "torch" if part == "torch" else "tensorflow"
    whole = run_ranks(2, run_all, part, "write_all", folder, framework=framework, timeout=400)
    keep(
        folder,
        whole,
        run_ranks(2, run_all, part, "go_on_all", folder, framework=framework, timeout=400),
    )


def files(folder: Path) -> None:
    """Plans, profiles, clusters and timelines, and what commands make of them."""
    profiles = [folder / f"job-{name}.profile.json" for name in ("torch", "keras")]
    timelines = [{"HVD_PIPE_TIMELINE": str(folder / f"timeline-{n}")} for n in ("torch", "keras")]
    env = timelines[0] | {"HVD_PIPE_PROFILE": str(profiles[0])}
    run_ranks(2, saved_torch.timed, env=env)
    run_ranks(2, saved_keras.timed, profiles[1], env=timelines[1])
    short = ("--budget", "1", "--max-bytes", "64KiB")
    run_ranks(2, workers_cli.bench, *short, "-o", str(folder / "cluster.json"))
    made: dict[str, Any] = {}
    for name, line in COMMANDS.items():
        made[name] = document(folder, line.split())
    (folder / "out.json").unlink()
    (folder / "made.json").write_text(json.dumps(made, indent=1))


def keep(folder: Path, whole: Sequence[Any], loaded: Sequence[Any]) -> None:
    """Write what runs came to; a run that was loaded must come to what it would have come to."""
    found: list[dict[str, Array]] = [{}, {}]
    for case in loaded[0]:
        kind, _, name = case.partition(" ")
        for rank, values in enumerate(each[case] for each in loaded):
            if kind == "own":
                np.testing.assert_array_equal(values, whole[rank][name], err_msg=case)
            assert tolerance(name) or is_exact(values), case
            found[rank][case] = values
    for rank, values in enumerate(found):
        np.savez(folder / f"rank{rank}.npz", **values)  # type: ignore[arg-type]


PARTS: dict[str, Callable[[Path], None]] = {
    "torch": partial(checkpoints, "torch"),
    "keras": partial(checkpoints, "keras"),
    "files": files,
}


def main() -> None:
    name, *parts = sys.argv[1:]
    wanted = [part for part in parts or PARTS if not (DATA / name / f"{part}.tar.xz").exists()]
    for part in wanted:
        with tempfile.TemporaryDirectory() as text:
            PARTS[part](Path(text))
            pack(Path(text), DATA / name / f"{part}.tar.xz")


if __name__ == "__main__":
    main()
