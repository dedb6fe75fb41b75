#!/usr/bin/env python3
"""Install hvd_pipe into new environments, build Horovod in each, and train on two ranks.

    python docker/matrix/matrix.py [--work DIR] [--list] [CELL ...]

Each cell is an environment of its own outside of the checkout: a Python, and torch or TensorFlow
of one version. It gets hvd_pipe's wheel from pip, `hvd-pipe build-horovod` and `hvd-pipe doctor`,
and trains with smoke_torch.py or smoke_tensorflow.py under ``horovodrun --gloo``. What a cell has
found is kept in the work folder, with the sources that it was found for: a second run goes on
where the first one stopped. results.json and the table of docs/install.md get the cells that have
run; the rows of all others stay.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from release import Environment, build

from hvd_pipe.build_horovod.recipe import SetupError, default_cache, say

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULTS = HERE / "results.json"
SAYS = "run `hvd-pipe build-horovod` in this environment"
MODULES = ("torch", "tensorflow", "keras", "numpy")


@dataclass(frozen=True)
class Cell:
    """A Python (3.12), and the versions of torch and TensorFlow; None leaves one out."""

    python: str
    torch: str | None = None
    tensorflow: str | None = None

    @property
    def name(self) -> str:
        """Its folder."""
        parts = {"torch": self.torch, "tensorflow": self.tensorflow}
        return "-".join(["py" + self.python, *(f"{k}{v}" for k, v in parts.items() if v)])

    @property
    def frameworks(self) -> list[str]:
        """The modules of hvd_pipe that are tried in it."""
        return [name for name in ("torch", "tensorflow") if getattr(self, name)]


# The oldest and today's version of each framework, each without the other; then both, and other
# Pythons.
CELLS = (
    Cell("3.11", torch="2.4.1"),
    Cell("3.11", tensorflow="2.16.2"),
    Cell("3.11", torch="2.13.0"),
    Cell("3.11", tensorflow="2.21.0"),
    Cell("3.11", torch="2.13.0", tensorflow="2.21.0"),
    Cell("3.12", torch="2.13.0"),
    Cell("3.13", torch="2.13.0"),
    Cell("3.12", tensorflow="2.21.0"),
    Cell("3.13", tensorflow="2.21.0"),
)


def sources() -> str:
    """Return a digest of what a cell tries: hvd_pipe and the programs that train."""
    digest = hashlib.sha256()
    package = [path for path in (ROOT / "hvd_pipe").rglob("*.*") if path.suffix != ".pyc"]
    for path in [*sorted(package), *sorted(HERE.glob("smoke_*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def environment() -> dict[str, str]:
    """Return a user's variables: none that leads to the checkout."""
    return {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def try_cell(cell: Cell, wheel: Path, work: Path) -> dict[str, str]:
    """Carry out a cell; return the versions that it has."""
    folder, env = work / cell.name, environment()
    made = Environment(cell.name, folder, folder / "log", env)
    step, programs = made.step, made.programs
    python = programs / "python"
    made.make(shutil.which(f"python{cell.python}") or f"python{cell.python}")
    wanted = [f"{name}=={getattr(cell, name)}" for name in cell.frameworks]
    step("frameworks", python, "-m", "pip", "install", *wanted, wheel)
    step("hvd_pipe", python, "-m", "pip", "install", "--no-deps", "--force-reinstall", wheel)
    step("no Horovod", python, "-m", "pip", "uninstall", "-y", "horovod")
    for name in cell.frameworks:
        answer = subprocess.run(
            [python, "-c", f"import hvd_pipe.{name}"],
            capture_output=True,
            text=True,
            check=False,
            env=env,
            cwd=folder,
        )
        if SAYS not in answer.stderr:
            raise SetupError(f"{cell.name}: the error without Horovod is {answer.stderr[-300:]!r}")
    step("Horovod", programs / "hvd-pipe", "build-horovod", "--cache", work / "wheels")
    step("doctor", programs / "hvd-pipe", "doctor", "--timeout", "300")
    for name in cell.frameworks:
        smoke = shutil.copy(HERE / f"smoke_{name}.py", folder)
        step(f"train in {name}", programs / "horovodrun", "-np", "2", "--gloo", python, smoke)
    return made.versions(MODULES)


def carry_out(cells: Sequence[Cell], work: Path) -> bool:
    """Run the cells that have not passed with these sources; return whether all have."""
    made_for, wheel, good = sources(), None, True
    for cell in cells:
        result = work / f"{cell.name}.json"
        found = json.loads(result.read_text()) if result.exists() else {}
        if found.get("sources") == made_for and found["state"] == "passed":
            say(f"{cell.name}: passed before")
            continue
        wheel = wheel or build(work / "dist")[0]
        kept = {"cell": asdict(cell), "sources": made_for, "date": date.today().isoformat()}
        try:
            kept |= {"state": "passed", "versions": try_cell(cell, wheel, work)}
        except SetupError as error:
            kept |= {"state": f"failed: {error}"}
        good = good and kept["state"] == "passed"
        result.write_text(json.dumps(kept, indent=1) + "\n")
        say(f"{cell.name}: {kept['state']}")
    return good


def merge(results: Path, cells: Sequence[Cell], work: Path) -> dict[str, dict[str, str]]:
    """Put what cells have found into the file of results; return all rows.

    A cell that failed loses its row. What is known of other cells stays.
    """
    rows: dict[str, dict[str, str]] = json.loads(results.read_text())
    for cell in cells:
        found = json.loads((work / f"{cell.name}.json").read_text())
        rows.pop(cell.name, None)
        if found["state"] == "passed":
            rows[cell.name] = {**found["versions"], "date": found["date"]}
    rows = {cell.name: rows[cell.name] for cell in CELLS if cell.name in rows}
    results.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def table(rows: Mapping[str, Mapping[str, str]]) -> str:
    """Return rows in Markdown."""
    lines = [
        "| Python | torch | TensorFlow | Keras | NumPy | passed on |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for had in rows.values():
        cells = [had["python"], *(had[name] or "-" for name in MODULES), had["date"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    names = {cell.name: cell for cell in CELLS}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cells", nargs="*", metavar="CELL", help="these alone; --list names all")
    parser.add_argument("--list", action="store_true", help="name the cells and end")
    parser.add_argument(
        "--work", type=Path, default=default_cache() / "matrix", help="environments and results"
    )
    given = parser.parse_args()
    if given.list:
        return say("\n".join(names))
    unknown = [name for name in given.cells if name not in names]
    if unknown:
        raise SetupError(f"no such cell: {', '.join(unknown)}. --list names them.")
    work = given.work.resolve()
    if work.is_relative_to(ROOT):
        raise SetupError(f"{work} is in the checkout, which the cells must not see: --work DIR.")
    cells = [names[name] for name in given.cells or names]
    good = carry_out(cells, work)
    merge(RESULTS, cells, work)
    say("`docs/tables.py --write` puts the results into docs/install.md")
    return None if good else sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"matrix: {error}")
    except KeyboardInterrupt:
        sys.exit("matrix: interrupted. Run the same command again.")
