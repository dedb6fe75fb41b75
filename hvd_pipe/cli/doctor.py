"""``hvd-pipe doctor``: what is installed, what Horovod was built with, and whether ranks reduce.

Imports and trial runs happen in processes of their own, which print one line of JSON behind
`_MARK`: an import that crashes or hangs ends that process and nothing else.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from hvd_pipe.build_horovod.recipe import installed
from hvd_pipe.cli.options import Command, count, job_size, json_option
from hvd_pipe.cli.output import InputError, progress

BUILD = "hvd-pipe build-horovod"
_RANKS = 2
_GRACE_S = 5
_MARK = "hvd-pipe-doctor:"
_FRAMEWORKS = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
_PACKAGES = ("hvd_pipe", "numpy", "horovod", "torch", "tensorflow", "keras", "mpi4py")
_MEND = {
    "hvd_pipe": "pip install -e . in hvd_pipe's checkout",
    "numpy": "pip install numpy",
    "horovod": BUILD,
    "torch": f"pip install torch, then build Horovod again: {BUILD}",
    "mpi4py": "pip install mpi4py (only pipelines need it)",
    "horovodrun": BUILD,
    "mpirun": "apt-get install openmpi-bin (or horovodrun --gloo, where Gloo is built)",
    "MPI": f"apt-get install openmpi-bin libopenmpi-dev; {BUILD}",
    "NCCL": f"{BUILD} --cuda: without NCCL gradients go through the host's memory",
}
# TensorFlow speaks of the processor unless told not to; Open MPI refuses root unless told.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

Answer = Mapping[str, Any]
"""What a process found, or only ``error``: why it found nothing."""


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    section: str
    name: str
    good: bool
    found: str = ""
    todo: str = ""
    required: bool = False


@click.command(cls=Command)
@click.option(
    "--self-test/--no-self-test",
    default=True,
    help="Really run an all-reduce on two ranks. On by default.",
)
@count("--timeout", default=60, metavar="SECONDS", help="How long each look may take.")
@json_option
def command(self_test: bool, timeout: int, as_json: bool) -> None:
    """Say what is missing here, and what to do.

    Looks at what is installed and at what Horovod was built with, and runs an all-reduce on two
    ranks. [X] is there and works, [ ] is not; a line behind -> says what to do. Exit code 0 when
    training can run (the rows that are marked ! are good), 1 otherwise.
    """
    if job_size() > 1:
        raise InputError(
            "doctor starts its own ranks: run `hvd-pipe doctor` alone, not under a launcher"
        )
    rows = [*_installed(timeout)]
    if self_test:
        rows += _self_test(rows, timeout)
    bad = [row for row in rows if row.required and not row.good]
    if as_json:
        document = {"command": "doctor", "good": not bad, "rows": [asdict(row) for row in rows]}
        click.echo(json.dumps(document, indent=2))
    else:
        _print(rows, len(bad))
    sys.exit(1 if bad else 0)


def _installed(seconds: int) -> Iterator[Row]:
    """Rows for what is installed, and what Horovod was built with, as ``--check-build`` has it."""
    versions = {name: installed(name) for name in _PACKAGES}
    versions["tensorflow"] = installed("tensorflow", "tensorflow-cpu", "tf-nightly")
    keras_alone = bool(versions["tensorflow"] and not versions["torch"])
    optional = {"tensorflow", "keras"} | ({"torch"} if versions["tensorflow"] else set())
    yield Row("Versions", "python", True, platform.python_version())
    for name, version in versions.items():
        todo = "" if version or name in optional else _MEND[name]
        required = name in ("hvd_pipe", "numpy", "horovod")
        yield Row("Versions", name, bool(version), version or "not installed", todo, required)
    loaded = {package: ask(package, seconds) for package in progress([*_FRAMEWORKS], "importing")}
    for package, name in _FRAMEWORKS.items():
        error, todo = loaded[package].get("error", ""), BUILD
        if "no answer" in error:
            statement = f"python -X importtime -c 'import hvd_pipe.{package}'"
            todo = f"{statement} shows where it hangs; or more --timeout"
        if error and not versions[package]:
            error, todo = "not installed", ""
        required = package == ("tensorflow" if keras_alone else "torch")
        yield Row("Frameworks", name, not error, error, todo if error else "", required)
    built = next((answer for answer in loaded.values() if "error" not in answer), {})
    for device in built.get("devices", ()):
        yield Row("GPUs", device, built["NCCL"], "", "" if built["NCCL"] else _MEND["NCCL"])
    none = bool(built) and not built["MPI"] and not built["Gloo"]
    for name in ("MPI", "Gloo"):
        state = "" if built else "unknown: Horovod does not load"
        todo = _MEND["MPI"] if none else ""
        yield Row("Controllers", name, built.get(name, False), state, todo, none)
    for name in ("NCCL", "DDL", "CCL", "MPI", "Gloo"):
        yield Row("Tensor operations", name, built.get(name, False))
    for name in ("horovodrun", "mpirun"):
        path = _tool(name)
        state, todo = (path, "") if path else ("not found on PATH", _MEND[name])
        yield Row("Launchers", name, bool(path), state, todo, name == "horovodrun")


def _self_test(rows: Sequence[Row], seconds: int) -> Iterator[Row]:
    """Run an all-reduce over each controller; training needs one that works."""
    name = f"all-reduce on {_RANKS} ranks"
    if missing := [row.name for row in rows if row.required and not row.good]:
        yield Row("Self-test", name, False, f"not run: {', '.join(missing)} first", required=True)
        return
    answers = {}
    controllers = [row.name for row in rows if row.section == "Controllers" and row.good]
    for controller in progress(controllers, "all-reducing"):
        flag = ["--gloo"] if controller == "Gloo" else []
        launcher = [str(_tool("horovodrun")), "-np", str(_RANKS), *flag]
        answers[controller] = ask("self_test", seconds, launcher)
    works = any(answer.get("right") for answer in answers.values())
    for controller, answer in answers.items():
        good = bool(answer.get("right"))
        state = f"{controller}, {answer['device']}" if good else answer.get("error", "a wrong sum")
        todo = f"horovodrun -np {_RANKS} --verbose hvd-pipe bench --budget 1 shows more"
        if "no answer" in state:
            todo += f"; a slow machine may need --timeout {4 * seconds}"
        row = f"{name}, {controller}"
        yield Row("Self-test", row, good, state, "" if good else todo, good or not works)


def _tool(name: str) -> str | None:
    """Return the command beside this Python, or else on PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def _print(rows: Sequence[Row], bad: int) -> None:
    width = max(len(row.name) for row in rows)
    for section, of_section in groupby(rows, lambda row: row.section):
        click.echo(("" if section == rows[0].section else "\n") + f"{section}:")
        for row in of_section:
            mark = "!" if row.required and not row.good else " "
            box = "[X]" if row.good else "[ ]"
            click.echo(f"  {mark} {box} {row.name:<{width}}  {row.found}".rstrip())
            if row.todo:
                click.echo(f"        -> {row.todo}")
    last = f"Training cannot run yet: see the {bad} row(s) marked with !"
    click.echo("\n" + (last if bad else "Training can run here."))


def ask(look: str, seconds: int, launcher: Sequence[str] = ()) -> Answer:
    """Look at one thing in a process of its own, or in the ranks that a launcher starts."""
    root = _ROOT if os.geteuid() == 0 else {}
    late = {"error": f"no answer within {seconds} s"}
    try:
        done = subprocess.run(
            [*launcher, sys.executable, "-m", "hvd_pipe.cli.doctor", look, str(seconds)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env={**_QUIET, **root, **os.environ},
            timeout=seconds + _GRACE_S,  # processes that it has started end by themselves
            check=False,
        )
    except subprocess.TimeoutExpired:
        return late
    _, mark, rest = done.stdout.partition(_MARK)
    if mark:  # a launcher may add a rank behind it
        answer: Answer = json.JSONDecoder().raw_decode(rest)[0]
        return answer
    if done.returncode < 0:
        ended = signal.Signals(-done.returncode).name
        return late if ended == "SIGALRM" else {"error": f"the process was ended by {ended}"}
    # Launchers end with a banner, so the line that tells best is seldom the last.
    output = done.stderr or done.stdout
    lines = [line.strip() for line in output.splitlines() if line.strip(" -*=\t")]
    telling = [line for line in lines if "error" in line.lower()]
    best = [*telling[-1:], *lines[-1:], "no output"][0]
    return {"error": f"{best[:300]} (exit status {done.returncode})"}


def _look(name: str) -> Answer:
    """Import our package for a framework and say what its Horovod was built with."""
    hvd: Any = importlib.import_module(f"hvd_pipe.{name}")
    framework: Any = importlib.import_module(name)
    devices = []
    if name == "torch" and framework.cuda.is_available():
        numbers = range(framework.cuda.device_count())
        devices = [framework.cuda.get_device_name(number) for number in numbers]
    names = ("MPI", "Gloo", "NCCL", "DDL", "CCL")
    built = {key: bool(getattr(hvd, f"{key.lower()}_built")()) for key in names}
    return {**built, "devices": devices}


def _all_reduce() -> Answer:
    """All-reduce among the ranks that run this; rank 0 returns what came out."""
    name = "torch" if importlib.util.find_spec("torch") else "tensorflow"
    hvd: Any = importlib.import_module(f"hvd_pipe.{name}")
    framework: Any = importlib.import_module(name)
    hvd.init()
    device, value = "cpu", float(hvd.rank() + 1)
    if name == "torch":
        if framework.cuda.is_available() and framework.cuda.device_count() >= hvd.local_size():
            device = f"cuda:{hvd.local_rank()}"
        ones = framework.full((1000,), value, device=device)
        total = hvd.allreduce(ones, op=hvd.Sum, name="doctor").cpu().numpy()
    else:
        with framework.device("CPU:0"):
            total = hvd.allreduce(framework.fill([1000], value), op=hvd.Sum, name="doctor").numpy()
    right = bool((total == hvd.size() * (hvd.size() + 1) / 2).all())
    first = hvd.rank() == 0
    hvd.shutdown()
    return {"right": right, "device": device} if first else {}


def main(name: str, seconds: str) -> None:
    """Look at one thing and print the answer; end this process after so many seconds."""
    signal.alarm(int(seconds))
    try:
        answer = _all_reduce() if name == "self_test" else _look(name)
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    if answer:
        # In one piece: launchers put a rank in front of each piece that they read.
        sys.stdout.write(f"\n{_MARK}{json.dumps(answer)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
