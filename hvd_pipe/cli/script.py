"""A training script as the target of a command: it is run until its steps are measured."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import click

from hvd_pipe import units
from hvd_pipe.cli import options
from hvd_pipe.cli.options import counted
from hvd_pipe.cli.output import InputError, warning
from hvd_pipe.errors import HvdPipeError
from hvd_pipe.measuring.facts import PROFILE, Facts, Left
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.runtime.gradient_index import RECORD_STEPS, SKIP_STEPS

_OF_A_CLUSTER = ("-n", "--workers", "--machines", "--cluster", "--bandwidth", "--inner-bandwidth")
_STARTERS = ("python", "python3", "-m", "torchrun", "horovodrun", "mpirun", "accelerate")
_RUNNER = "hvd_pipe.measuring.script"
_BUSY = 0.75  # of all cores
_UNLIKE = 2.0  # the longest step, as a multiple of the shortest
_POLL_S = 0.2
_GRACE_S = 3.0
_OF_GPUS = re.compile("CUDA|NCCL|NVIDIA")
_STEPS = SKIP_STEPS + RECORD_STEPS + 2  # two show which optimizers there are
_ELSE = (
    ". A script that needs a GPU is measured where there is one. One that starts its own workers "
    "(torch.multiprocessing.spawn), or trains with Keras, is measured by its model: "
    "FILE.py:FUNCTION --input BATCH,..."
)


class Command(options.Command):
    """Passes what follows a script to the script, as ``python train.py ...`` does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args = end_options(args)
        starter = next(
            (word for word in itertools.takewhile("--".__ne__, args) if word in _STARTERS), None
        )
        if starter is not None:
            raise click.UsageError(
                f"{starter}: name the file of the script, as in train.py --lr 0.1. It is started "
                "by this command, in one process.",
                ctx,
            )
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run; say so where the script would get the options that this command lacks."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            behind = [word.partition("=")[0] for word in ctx.params.get("arguments") or ()]
            lost = next((word for word in behind if word in _OF_A_CLUSTER), None)
            if lost is None:
                raise
            raise click.UsageError(
                f"{error.message} {lost} stands behind the script, which gets it: the options of "
                "this command stand before the script.",
                error.ctx,
            ) from error


def end_options(args: list[str]) -> list[str]:
    """End the command's own options behind the script.

    >>> end_options(["--workers", "2", "train.py", "--lr", "1"])
    ['--workers', '2', 'train.py', '--', '--lr', '1']
    """
    ends = next((i for i, argument in enumerate(args, 1) if argument.endswith(".py")), None)
    return args if ends is None else [*args[:ends], "--", *args[ends:]]


def measure_script(command: Sequence[str]) -> tuple[ModelProfile | None, Facts | None]:
    """Run a script with its arguments until its steps are measured, and end it.

    It is started as ``torchrun --nproc-per-node 1`` does; where it fails before its first step,
    once more without torchrun's variables. Under a launcher it runs to its end, because a rank
    that leaves early fails the others, and the first rank alone returns a profile. What it prints
    goes to stderr: stdout is the command's. Where something divides parameters or the optimizer's
    state over ranks, there is no profile.
    """
    if not Path(command[0]).is_file():
        raise InputError(f"{command[0]}: No such file")
    if find_spec("torch") is None:
        raise HvdPipeError(
            f"{command[0]} is measured by hooks of PyTorch, which is not installed here. Of "
            "Keras, name the model: FILE.py:FUNCTION --input BATCH,..."
        )
    if options.job_size() > 1:
        return _run_a_rank(command), None
    load = os.getloadavg()[0]
    click.echo(f"{command[0]} runs until its steps are measured.", err=True)
    code, left = _run(command, _of_torchrun(), alone=True)
    why = left.failure
    if code == 1 and left.facts is None:  # not killed, and not of wrong usage
        click.echo(f"{command[0]} failed as a worker of torchrun. Once more, alone:", err=True)
        code, left = _run(command, {}, alone=True)
        if why != left.failure:
            both = [failure or "see above" for failure in (why, left.failure)]
            why = "as a worker of torchrun, {}; alone, {}".format(*both)
    click.echo(err=True)  # a bar of the script has not ended its line
    facts = left.facts
    if not left.is_enough:
        said = f"{_failed(code) if code else 'ended'} after "
        said += f"{counted(facts.steps if facts else 0, 'step')} of PyTorch's optimizers"
        said += "" if code else f", and it takes {_STEPS} to measure them"
        said += f": {why}" if why else ""
        is_own = facts or code not in (0, 1) or (left.failure and not _OF_GPUS.search(why))
        raise HvdPipeError(f"{command[0]} {said}{'' if is_own else _ELSE}")
    _warn_of(load, facts)
    return _named(left.profile, command[0]), facts


def _run_a_rank(command: Sequence[str]) -> ModelProfile | None:
    """Run a script of a job to its end; return the profile on the first rank."""
    code, left = _run(command, {}, alone=False)
    if code:
        raise HvdPipeError(f"{command[0]} {_failed(code)}; its own message is above")
    if options.job_rank() == 0 and left.profile is None:
        raise HvdPipeError(
            f"{command[0]} ended before its steps were measured. Under a launcher, it must make "
            f"at least {_STEPS} steps of hvd_pipe.torch's DistributedOptimizer; without one, "
            "hvd-pipe profile measures any script of PyTorch."
        )
    return _named(left.profile, command[0])


def _failed(code: int) -> str:
    return f"failed ({f'exit status {code}' if code > 0 else signal.Signals(-code).name})"


def _named(profile: ModelProfile | None, script: str) -> ModelProfile | None:
    return profile and dataclasses.replace(profile, name=profile.name or Path(script).stem)


def _run(
    command: Sequence[str], variables: Mapping[str, str], *, alone: bool
) -> tuple[int | None, Left]:
    """Run a script until it has ended or is measured; return its status and what it has left."""
    # Signals end this process by an exception, so that it takes the script with it.
    with _exits_by(signal.SIGTERM, signal.SIGHUP), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = subprocess.Popen(
            [sys.executable, *(["-m", _RUNNER, name] if alone else []), *command],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            env={**os.environ, **variables, "HVD_PIPE_PROFILE": str(folder / PROFILE)},
            start_new_session=alone,
        )
        try:
            while process.poll() is None:
                left = Left.load(folder)
                if alone and left.is_enough:
                    return None, left
                time.sleep(_POLL_S)
            return process.poll(), Left.load(folder)
        finally:
            _end(process, with_children=alone)


def _warn_of(load: float, facts: Facts | None) -> None:
    """Warn where other programs have computed, as steps are then longer, or seem to have."""
    cores = os.cpu_count() or 1
    if load > _BUSY * cores:
        warning(
            f"this machine was busy (load {load:.1f} on {counted(cores, 'core')}): steps take "
            "longer than they do alone"
        )
    elif facts and facts.range_s and facts.range_s[1] > _UNLIKE * facts.range_s[0]:
        least, most = map(units.format_seconds, facts.range_s)
        warning(f"steps took {least} to {most}: they are unlike, or other programs computed, too")


def _of_torchrun() -> dict[str, str]:
    """Return the variables that `torchrun --nproc-per-node 1` sets and a script reads."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _end(process: subprocess.Popen[bytes], *, with_children: bool) -> None:
    """End a script, and the processes that load its data."""

    def send(number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            if with_children:
                os.killpg(process.pid, number)
            elif process.poll() is None:
                process.send_signal(number)

    try:
        send(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    finally:  # another signal ends the wait alone
        send(signal.SIGKILL)
        process.wait()


@contextmanager
def _exits_by(*numbers: signal.Signals) -> Iterator[None]:
    """Have signals that would end this process at once raise SystemExit, so that it cleans up."""
    before = {number: signal.signal(number, _exit) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)
