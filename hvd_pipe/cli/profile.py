"""``hvd-pipe profile``: what each layer of a model costs, measured here."""

# ruff: noqa: PLC0415 - no framework is imported for a model of another

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from hvd_pipe import units
from hvd_pipe.cli import options, script
from hvd_pipe.cli.output import InputError, emit
from hvd_pipe.errors import HvdPipeError
from hvd_pipe.measuring.facts import Facts
from hvd_pipe.planning.profile import LayerProfile, ModelProfile

BATCH = 32
"""Of a Keras model that knows the rest of its input's sizes: what ``fit`` takes, too."""

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "bool")
_INPUT = re.compile(r"(?P<sizes>[1-9][0-9]*(,[1-9][0-9]*)*)(:(?P<dtype>\w+))?")
_SHOWN = 12


@dataclasses.dataclass(frozen=True)
class Target:
    """What is to be measured: a script with its arguments, or a model and what it is fed."""

    target: str
    arguments: tuple[str, ...]
    inputs: tuple[str, ...]
    loss: str | None
    device: str | None
    steps: int | None

    def __post_init__(self) -> None:
        given = {"--input": self.inputs, "--loss": self.loss, "--device": self.device}
        extra = [name for name, value in {**given, "--steps": self.steps}.items() if value]
        if self.is_script:
            if extra:
                raise click.UsageError(
                    f"{', '.join(extra)}: for models only; a script has its own."
                )
        elif ":" not in self.target:
            raise click.UsageError(
                f"{self.target!r} is neither a script (train.py) nor a model "
                "(package.module:factory or file.py:factory)."
            )
        elif self.arguments:
            raise click.UsageError(f"a model takes no arguments, got {' '.join(self.arguments)}.")

    @property
    def is_script(self) -> bool:
        """Whether it is a script."""
        return self.target.endswith(".py")

    @property
    def name(self) -> str:
        """The name of its profile."""
        return Path(self.target).stem if self.is_script else self.target.rpartition(":")[2]

    def measure(self) -> tuple[ModelProfile | None, Facts | None]:
        """Measure it; without a profile on other ranks than the first, or where it is sharded."""
        if self.is_script:
            return script.measure_script([self.target, *self.arguments])
        if options.job_size() > 1:
            raise InputError("a model is measured on one process: run this without a launcher")
        how = (self.inputs, self.loss, self.device, self.steps or 10)
        try:
            return measure_model(self.target, *how), None
        except ImportError as error:
            raise HvdPipeError(f"{error}; hvd-pipe doctor says what is missing") from error


_TARGET_OPTIONS = (
    click.argument("target", metavar="SCRIPT_OR_MODEL"),
    click.argument("arguments", metavar="[ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED),
    click.option(
        "--input",
        "inputs",
        multiple=True,
        metavar="SIZES[:DTYPE]",
        help="An input of the model, the batch first: 32,3,224,224 or 32,128:int64. Repeat it "
        "for models with several.",
    ),
    click.option(
        "--loss",
        metavar="MODULE:FUNCTION",
        help="From the model's output to a loss.  [default: the mean of the output]",
    ),
    click.option(
        "--device", help="Where to measure: cpu, cuda.  [default: a GPU if there is one]"
    ),
    options.count("--steps", help="Steps to measure.  [default: 10]"),
)


def target_options(command: options.Function) -> options.Function:
    """Add what names and describes a `Target`, handed on as ``target``."""

    @functools.wraps(command)
    def with_target(**given: Any) -> Any:
        fields = {field.name: given.pop(field.name) for field in dataclasses.fields(Target)}
        return command(target=Target(**fields), **given)

    decorated: options.Function = with_target
    for option in reversed(_TARGET_OPTIONS):
        decorated = option(decorated)
    return decorated


@click.command(
    cls=script.Command,
    epilog="Examples: hvd-pipe profile nets.py:resnet50 --input 32,3,224,224 -o resnet50.json; "
    "hvd-pipe profile train.py --batch-size 32",
)
@target_options
@options.output_option(".json", what="the profile")
@options.json_option
def command(target: Target, path: Path | None, as_json: bool) -> None:
    """Measure the layers of SCRIPT_OR_MODEL.

    The profile goes to NAME.profile.json, or to -o, for advise, plan, simulate and partition.

    A model is package.module:factory or file.py:factory, where factory() returns a
    torch.nn.Module or a keras.Model; its training step is measured in this process, and --input
    says with what. A Keras model that knows its input is fed 32 samples of that by default.

    A script, train.py and its arguments, trains with PyTorch, and need not import hvd_pipe. It is
    run in one process until its steps are measured; under horovodrun, where it trains with
    hvd_pipe, to its end. The options of this command stand before the script.
    """
    path = path or Path(f"{target.name}.profile.json")
    options.check_writable(path)
    profile, facts = target.measure()
    if facts is not None and facts.sharded:
        raise HvdPipeError(
            f"{target.target} divides its parameters over workers ({facts.sharded}): hvd_pipe "
            "averages the gradients of whole replicas, and there is nothing to plan"
        )
    if profile is not None:
        profile.save(path)
        _print(profile, path, as_json)


def _print(profile: ModelProfile, path: Path, as_json: bool) -> None:
    def seconds(layer: LayerProfile) -> float:
        return layer.forward_s + layer.backward_s

    slowest = sorted(profile.layers, key=seconds, reverse=True)[:_SHOWN]
    total = sum(map(seconds, profile.layers)) or 1.0
    rest = len(profile.layers) - len(slowest)
    samples = f" for {profile.batch} samples" if profile.batch else ""
    emit(
        {
            "command": "profile",
            "path": str(path),
            "profile": options.profile_json(profile),
            "batch": profile.batch,
            "layers": [dataclasses.asdict(layer) for layer in profile.layers],
        },
        [{**dataclasses.asdict(layer), "share": seconds(layer) / total} for layer in slowest],
        {
            "layer~": "name",
            "forward": "forward_s",
            "backward": "backward_s",
            "share": lambda row: f"{row['share']:.1%}",
            "gradient": "gradient_bytes",
            "activation": "activation_bytes",
            "what~": "description",
        },
        as_json=as_json,
        above=[options.summary(profile)],
        title="slowest layers" + (f" ({rest} more are in the file)" if rest else ""),
        below=(
            f"A step computes {units.format_seconds(profile.compute_s)}{samples}.",
            f"Wrote {path}: hvd-pipe advise {path} -n 16 --bandwidth 10gbit",
        ),
    )


def measure_model(
    name: str, inputs: Sequence[str], loss: str | None, device: str | None, steps: int
) -> ModelProfile:
    """Measure the training step of the model that ``module:factory`` makes."""
    shapes = [Shape.parse(text) for text in inputs]
    factory = find(name)
    with _as_input_error(f"{name}() failed", "; it is called without arguments"):
        model = factory()
    if "keras" in sys.modules and isinstance(model, sys.modules["keras"].Model):
        shapes, measure = shapes or _known_shapes(model), _measure_keras
    elif "torch" in sys.modules and isinstance(model, sys.modules["torch"].nn.Module):
        measure = _measure_torch
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise InputError(f"{name}()'s model has no parameter to train")
    else:
        raise InputError(
            f"{name}() returned {type(model).__name__}, not a torch.nn.Module or a keras.Model"
        )
    if not shapes:
        raise InputError("say what the model is fed: --input 32,3,224,224")
    how = {"batch": shapes[0].sizes[0], "steps": steps, "name": name.rpartition(":")[2]}
    return measure(model, shapes, None if loss is None else find(loss), device, **how)


@dataclasses.dataclass(frozen=True)
class Shape:
    """An input of a model: normal numbers, or zeros and ones where it has integers.

    Those are indices of every embedding, and classes of every task with two.
    """

    text: str
    sizes: tuple[int, ...]
    dtype: str

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read ``32,3,224,224`` or ``32,128:int64``."""
        match = _INPUT.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"--input takes sizes and perhaps a dtype, 32,3,224,224 or 32,128:int64; "
                f"got {text!r}"
            )
        name = match["dtype"] or "float32"
        if name not in DTYPES:
            raise ValueError(f"--input {text}: the dtype is one of {', '.join(DTYPES)}")
        return cls(text, tuple(map(int, match["sizes"].split(","))), name)


def find(name: str) -> Callable[..., Any]:
    """Return what ``package.module:attribute`` or ``file.py:attribute`` names."""
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise InputError(f"{name!r} is no module:name: write package.module:name or file.py:name")
    module = _module(where)
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            has = [
                key
                for key, item in vars(module).items()
                if getattr(item, "__module__", "") == module.__name__
            ]
            raise InputError(f"{where} has no {attribute}; it has {', '.join(has[:8])}")
        value = getattr(value, part)
    if not callable(value):
        raise InputError(f"{name} is {type(value).__name__}, not a function or class to call")
    return value  # type: ignore[no-any-return]


def _module(where: str) -> ModuleType:
    path = Path(where)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise InputError(f"{where}: No such file")
    # A console script does not look for modules here, as `python -m` would.
    sys.path.insert(0, str(path.parent.resolve() if is_file else Path.cwd()))
    with _as_input_error(f"importing {where} failed"):
        if not is_file:
            return importlib.import_module(where)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    return module


@contextmanager
def _as_input_error(what: str, more: str = "") -> Iterator[None]:
    """Turn an error of the user's code into one line: its kind and the first line of it."""
    try:
        yield
    except Exception as error:
        text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        kind = type(error).__name__
        raise InputError(f"{what}: {kind}: {text or '(no message)'}{more}") from error


def _as_options(shapes: Sequence[Shape]) -> str:
    return " ".join(f"--input {shape.text}" for shape in shapes)


def _measure_torch(
    model: Any,
    shapes: Sequence[Shape],
    loss_of: Callable[..., Any] | None,
    device: str | None,
    **how: Any,
) -> ModelProfile:
    import torch

    from hvd_pipe.torch.layer_times import measure_profile

    try:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=where)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {device}: {str(error).splitlines()[0]}") from error
    model = model.to(where).train()
    inputs = [
        torch.randn(shape.sizes, device=where, dtype=getattr(torch, shape.dtype))
        if "float" in shape.dtype
        else torch.randint(0, 2, shape.sizes, device=where, dtype=getattr(torch, shape.dtype))
        for shape in shapes
    ]
    loss_of = loss_of or _mean_of

    def step() -> None:
        model.zero_grad()
        loss_of(model(*inputs)).backward()

    with _as_input_error(f"the model does not take {_as_options(shapes)}"):
        output = model(*inputs)
    with _as_input_error("the loss of the model's output failed"):
        value = loss_of(output)
    tensor = isinstance(value, torch.Tensor)
    if not tensor or value.numel() != 1 or not value.requires_grad:
        what = f"{list(value.shape)} tensor" if tensor else type(value).__name__
        raise InputError(f"the loss must be one number with a gradient, got a {what}")
    with _as_input_error("the backward pass failed"):
        step()
    return measure_profile(model, step, **how)


def _mean_of(output: Any) -> Any:
    """Return the sum of the means of all tensors in an output that carry a gradient."""
    means = [tensor.float().mean() for tensor in _tensors(output) if tensor.requires_grad]
    if not means:
        raise ValueError(
            f"the model's output ({type(output).__name__}) has no tensor with a gradient: "
            "say with --loss module:function how it becomes a loss"
        )
    return sum(means)


def _tensors(output: Any) -> list[Any]:
    if hasattr(output, "requires_grad"):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, Sequence) and not isinstance(output, str):
        return [tensor for part in output for tensor in _tensors(part)]
    return []


def _measure_keras(
    model: Any,
    shapes: Sequence[Shape],
    loss_of: Callable[..., Any] | None,
    device: str | None,
    **how: Any,
) -> ModelProfile:
    import tensorflow as tf

    from hvd_pipe.tensorflow.layer_times import measure_profile

    device = device or ("gpu" if tf.config.list_physical_devices("GPU") else "cpu")
    kind, _, number = device.replace("cuda", "gpu").partition(":")
    devices = tf.config.list_physical_devices(kind.upper()) if kind in ("cpu", "gpu") else []
    if not devices or (number and not (number.isdigit() and int(number) < len(devices))):
        raise InputError(f"--device {device}: TensorFlow sees no such device here")
    with tf.device(f"/{kind}:{number or 0}"):
        inputs = []
        for shape in shapes:
            dtype = tf.as_dtype(shape.dtype)
            if dtype.is_floating:
                inputs.append(tf.random.normal(shape.sizes, dtype=dtype))
            else:
                inputs.append(tf.cast(tf.random.uniform(shape.sizes, 0, 2, tf.int32), dtype))
        with (
            _as_input_error(f"the model does not take {_as_options(shapes)}"),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # that the structure of inputs is another
            model(inputs[0] if len(inputs) == 1 else inputs)
        return measure_profile(model, inputs, loss_of, **how)


def _known_shapes(model: Any) -> list[Shape]:
    """Return the shapes of a Keras model's inputs for `BATCH` samples, where it knows them."""
    import keras

    try:
        inputs = list(model.inputs or [])
    except (AttributeError, ValueError):
        inputs = []
    if not inputs:
        raise InputError(
            f"{type(model).__name__} does not know the shape of its input: say what it is fed, "
            "such as --input 32,224,224,3"
        )
    shapes = []
    for tensor in inputs:
        sizes = [tensor.shape[0] or BATCH, *tensor.shape[1:]]
        if None in sizes:
            text = ",".join("?" if size is None else str(size) for size in sizes)
            raise InputError(
                f"the input {tensor.name} has sizes that the model leaves open: say what it is "
                f"fed, --input {text} with numbers for the question marks"
            )
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        shapes.append(Shape.parse(f"{','.join(map(str, sizes))}:{dtype}"))
    return shapes
