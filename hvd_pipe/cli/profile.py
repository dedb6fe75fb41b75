"""``hvd-pipe profile``: what each layer of a model costs, measured here."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hvd_pipe import units
from hvd_pipe.cli._model import Shape, made
from hvd_pipe.cli.options import (
    SharedCommand,
    check_writable,
    job_rank,
    job_size,
    json_option,
    output_option,
    profile_json,
    summary,
)
from hvd_pipe.cli.output import InputError, note, table, write_json
from hvd_pipe.errors import HvdPipeError
from hvd_pipe.planning.profile import LayerProfile, ModelProfile

__all__ = ["command", "measure_model", "profile_script"]


_SHOWN = 12


class _Command(SharedCommand):
    """Leaves everything behind a script to the script, as ``python train.py ...`` does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for index, argument in enumerate(args):
            if argument.endswith(".py"):
                args = [*args[: index + 1], "--", *args[index + 1 :]]
                break
        return super().parse_args(ctx, args)


@click.command(
    cls=_Command,
    epilog="Examples: hvd-pipe profile nets.py:resnet50 --input 32,3,224,224 -o resnet50.json; "
    "hvd-pipe profile train.py --batch-size 32",
)
@click.argument("target", metavar="SCRIPT_OR_MODEL")
@click.argument("arguments", metavar="[ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="SIZES[:DTYPE]",
    help="An input of the model, the batch first: 32,3,224,224 or 32,128:int64. Repeat it for "
    "models with several.",
)
@click.option(
    "--loss",
    metavar="MODULE:FUNCTION",
    help="From the model's output to a loss.  [default: the mean of the output]",
)
@click.option("--device", help="Where to measure: cpu, cuda.  [default: a GPU if there is one]")
@click.option("--steps", type=click.IntRange(min=1), help="Steps to measure.  [default: 10]")
@output_option(".json", what="the profile")
@json_option
def command(
    target: str,
    arguments: tuple[str, ...],
    inputs: tuple[str, ...],
    loss: str | None,
    device: str | None,
    steps: int | None,
    path: Path | None,
    as_json: bool,
) -> None:
    """Measure the layers of SCRIPT_OR_MODEL.

    The profile goes to NAME.profile.json, or to -o, for advise, plan, simulate and partition.

    A model is package.module:factory or file.py:factory, where factory() returns a
    torch.nn.Module or a keras.Model; its training step is measured in this process, and --input
    says with what. A Keras model that knows its input is fed 32 samples of that by default.

    A script, train.py and its arguments, trains with hvd_pipe; it is run until its profile is
    there (under horovodrun to its end). The options of this command stand before the script.
    """
    if target.endswith(".py"):
        given = {"--input": inputs, "--loss": loss, "--device": device, "--steps": steps}
        extra = [name for name, value in given.items() if value]
        if extra:
            raise click.UsageError(f"{', '.join(extra)}: for models only; a script has its own.")
        path = path or Path(f"{Path(target).stem}.profile.json")
        check_writable(path)
        profile_script([target, *arguments], path, job_rank(), job_size())
        if job_rank() > 0:
            return
        profile = ModelProfile.load(path)
    elif ":" in target:
        if arguments:
            raise click.UsageError(f"a model takes no arguments, got {' '.join(arguments)}.")
        if job_size() > 1:
            raise InputError("a model is measured on one process: run this without a launcher")
        path = path or Path(f"{target.rpartition(':')[2]}.profile.json")
        check_writable(path)
        try:
            profile = measure_model(target, inputs, loss, device, steps or 10)
        except ImportError as error:
            raise HvdPipeError(f"{error}; hvd-pipe doctor says what is missing") from error
        profile.save(path)
    else:
        raise click.UsageError(
            f"{target!r} is neither a script (train.py) nor a model (package.module:factory or "
            "file.py:factory)."
        )
    _print(profile, path, as_json)


def _print(profile: ModelProfile, path: Path, as_json: bool) -> None:
    if as_json:
        layers = [asdict(layer) for layer in profile.layers]
        document: dict[str, Any] = {"command": "profile", "path": str(path)}
        write_json(
            document
            | {
                "profile": profile_json(profile),
                "batch": profile.batch,
                "layers": layers,
            }
        )
        return

    def seconds(layer: LayerProfile) -> float:
        return layer.forward_s + layer.backward_s

    slowest = sorted(profile.layers, key=seconds, reverse=True)[:_SHOWN]
    total = sum(map(seconds, profile.layers)) or 1.0
    rest = len(profile.layers) - len(slowest)
    note(summary(profile))
    table(
        ["layer", ">forward", ">backward", ">share", ">gradient", ">activation", "what~"],
        [
            [
                layer.name,
                units.format_seconds(layer.forward_s),
                units.format_seconds(layer.backward_s),
                f"{seconds(layer) / total:.1%}",
                units.format_bytes(layer.gradient_bytes),
                units.format_bytes(layer.activation_bytes),
                layer.description,
            ]
            for layer in slowest
        ],
        title="slowest layers" + (f" ({rest} more are in the file)" if rest else ""),
    )
    note(
        f"A step computes {units.format_seconds(profile.compute_s)}"
        + (f" for {profile.batch} samples." if profile.batch else ".")
    )
    click.echo(f"Wrote {path}: hvd-pipe advise {path} -n 16 --bandwidth 10gbit")


_POLL_S = 0.2
_GRACE_S = 10.0


def measure_model(
    name: str, inputs: Sequence[str], loss: str | None, device: str | None, steps: int
) -> ModelProfile:
    """Measure the training step of the model that a factory makes.

    Args:
        name: ``package.module:factory`` or ``file.py:factory``.
        inputs: What the model is fed, as `Shape.parse` reads it; the batch first. None of them
            where a Keras model knows its own.
        loss: Names a function from the model's output to its loss; None for a plain mean.
        device: Where; None for a GPU if there is one.
        steps: How many steps count.

    Raises:
        InputError: One of these is not what it should be; one line.
    """
    shapes = [Shape.parse(text) for text in inputs]
    model = made(name)
    short = name.rpartition(":")[2]
    # No framework is imported for a model of another.
    if "keras" in sys.modules and isinstance(model, sys.modules["keras"].Model):
        from hvd_pipe.cli import _keras_model  # noqa: PLC0415

        return _keras_model.measure(model, short, shapes, loss, device, steps)
    if "torch" in sys.modules and isinstance(model, sys.modules["torch"].nn.Module):
        if not shapes:
            raise InputError("say what the model is fed: --input 32,3,224,224")
        from hvd_pipe.cli import _torch_model  # noqa: PLC0415

        return _torch_model.measure(model, name, shapes, loss, device, steps)
    raise InputError(
        f"{name}() returned {type(model).__name__}, not a torch.nn.Module or a keras.Model"
    )


def profile_script(command: Sequence[str], target: Path, rank: int, size: int) -> None:
    """Run a script and return when it has written its profile to ``target``.

    Alone, the script is ended then: nobody waits for the rest of a training. Under a launcher it
    runs to its end, because a rank that leaves early is a failure to the others. What the script
    prints goes to stderr: stdout is the command's own.

    Args:
        command: The script and its arguments.
        target: Where the profile goes; replaced only by a whole one.
        rank: This process's; rank 0 writes.
        size: How many ranks there are.

    Raises:
        HvdPipeError: The script failed, or ended without a profile.
    """
    if not Path(command[0]).is_file():
        raise InputError(f"{command[0]}: No such file")
    part = target.with_name(f".{target.name}.part")
    if rank == 0:
        part.write_text("")  # a target that cannot be written is told now, not after the training
    process = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        env=os.environ | {"HVD_PIPE_PROFILE": str(part.resolve())},
    )
    try:
        while process.poll() is None and (size > 1 or _read(part) is None):
            time.sleep(_POLL_S)
        code = process.poll()
        if rank == 0 and not code and (profile := _read(part)) is not None:
            part.unlink()
            name = profile.name or Path(command[0]).stem
            dataclasses.replace(profile, name=name).save(target)
        elif code:
            how = f"exit status {code}" if code > 0 else f"{signal.Signals(-code).name}"
            raise HvdPipeError(f"{command[0]} failed ({how}); its own message is above")
        elif rank == 0:
            raise HvdPipeError(
                f"{command[0]} ended before its profile was written: it must train for 20 steps "
                "with hvd_pipe.torch's DistributedOptimizer. Of Keras, profile the model: "
                "hvd-pipe profile FILE.py:FUNCTION --input BATCH,..."
            )
    finally:  # a KeyboardInterrupt comes this way, too
        _end(process)
        if rank == 0:
            part.unlink(missing_ok=True)


def _read(part: Path) -> ModelProfile | None:
    """Return the profile once it is there, and not half of it."""
    try:
        return ModelProfile.load(part)
    except (OSError, ValueError):
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    for end in (process.terminate, process.kill):
        if process.poll() is None:
            end()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
