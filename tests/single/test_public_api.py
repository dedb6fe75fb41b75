"""Public names and signatures, as users find them: a change breaks their scripts.

``tests/data/frozen/api/*.json`` hold one line a name: what it is, and the parameters that it takes
with their defaults. Names that are Horovod's or a framework's are frozen by name only. Where a
change is meant, this rewrites the files::

    REWRITE_FROZEN=1 python -m pytest tests/single/test_public_api.py
"""

from __future__ import annotations

import enum
import importlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import frozen
import keras
import pytest
import tensorflow as tf
import torch

import hvd_pipe.tensorflow.keras as keras_hvd
import hvd_pipe.torch as torch_hvd
from hvd_pipe.tensorflow import DistributedGradientTape

# The documented paths, by the file that freezes them. `hvd_pipe.planning` is one of many modules:
# README calls them "the same as functions", so those are here that hold what a command does
# and what it takes and gives. Others may move.
MODULES = {
    "strategy": ["hvd_pipe", "hvd_pipe.strategy"],
    "planning": [
        f"hvd_pipe.planning.{name}"
        for name in (
            "advise",
            "cluster",
            "comm",
            "merge",
            "methods",
            "partition",
            "plan",
            "profile",
            "simulate",
            "simulate_pipeline",
            "stages",
            "timing",
        )
    ],
    "torch": [
        "hvd_pipe.torch",
        "hvd_pipe.torch.elastic",
        "hvd_pipe.torch.layer_times",
        "hvd_pipe.torch.pipedream",
    ],
    "tensorflow": [
        "hvd_pipe.tensorflow",
        "hvd_pipe.tensorflow.elastic",
        "hvd_pipe.tensorflow.keras",
        "hvd_pipe.tensorflow.keras.callbacks",
        "hvd_pipe.tensorflow.keras.elastic",
        "hvd_pipe.tensorflow.layer_times",
        "hvd_pipe.tensorflow.pipedream",
    ],
}
HOROVODS_OWN = {"hvd_pipe.tensorflow:gradient_aggregation_eager", "hvd_pipe.tensorflow:keras"}
"""Modules of `horovod.tensorflow` that it has from the moment that someone imports them."""

STRATEGIES = ("merged-gradient", "pipe-sgd", "cocod:period=3")

# Methods that a language construct calls are public too.
SPECIAL = {
    "__call__",
    "__contains__",
    "__enter__",
    "__exit__",
    "__getitem__",
    "__iter__",
    "__len__",
}


@pytest.mark.parametrize("package", MODULES)
def test_names_and_signatures(package: str) -> None:
    found: dict[str, str] = {}
    for path in MODULES[package]:
        module = importlib.import_module(path)
        for name in module.__dict__.get("__all__", ["__version__"]):
            if f"{path}:{name}" not in HOROVODS_OWN:
                found.update(_described(f"{path}:{name}", getattr(module, name)))
    frozen.compare(f"api/{package}", found)


def test_methods_of_what_is_wrapped() -> None:
    """A distributed optimizer or tape has methods that the user's class lacks."""
    torch_hvd.init()
    keras_hvd.init()
    found: dict[str, str] = {}
    for strategy in STRATEGIES:
        parameter = torch.nn.Parameter(torch.ones(1))
        plain = torch.optim.SGD([parameter], lr=0.1)
        ours: Any = torch_hvd.DistributedOptimizer(plain, strategy=strategy)
        found.update(_gained(f"torch, {strategy}", type(ours), torch.optim.SGD))
        ours = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(), strategy=strategy)
        found.update(_gained(f"keras, {strategy}", type(ours), keras.optimizers.SGD))
    tape = type(DistributedGradientTape(tf.GradientTape()))
    found.update(_gained("tape", tape, tf.GradientTape))
    frozen.compare("api/wrapped", found)


def _gained(name: str, ours: type, plain: type) -> dict[str, str]:
    found = {}
    for member in dir(ours):
        attribute = inspect.getattr_static(ours, member)
        other = inspect.getattr_static(plain, member, None)
        if _is_public(member) and attribute is not other:
            found[f"{name}: {member}"] = _member(attribute)
    return found


def _described(name: str, value: Any) -> dict[str, str]:
    if isinstance(value, types.ModuleType):
        return {name: "module"}
    if not isinstance(value, type | types.FunctionType):
        return {name: _value(value)}
    if not value.__module__.startswith("hvd_pipe"):
        return {name: "of another package"}
    if isinstance(value, types.FunctionType):
        return {name: "function " + _signature(value)}
    bases = [base.__name__ for base in value.__mro__[1:] if base.__module__ in _BASES]
    made = "" if issubclass(value, Exception) else " " + _signature(value)
    found = {name: f"class{_bases(bases)}{made}"}
    for member, attribute in _members(value):
        found[f"{name}.{member}"] = _member(attribute)
    return found


_BASES = {"builtins", "hvd_pipe.errors", "enum"}


def _bases(names: list[str]) -> str:
    names = [name for name in names if name != "object"]
    return f" of {', '.join(names)}" if names else ""


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield public members that our classes define; fields are in the constructor's signature."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("hvd_pipe"):
            continue
        for name, attribute in vars(base).items():
            if _is_public(name) and name not in seen:
                seen.add(name)
                if name not in getattr(cls, "__dataclass_fields__", {}):
                    yield name, attribute


def _member(attribute: Any) -> str:
    if isinstance(attribute, property) or type(attribute).__name__ == "cached_property":
        return "property"
    if isinstance(attribute, classmethod | staticmethod):
        kind = type(attribute).__name__
        return f"{kind} {_signature(attribute.__func__)}"
    if isinstance(attribute, types.FunctionType):
        return "method " + _signature(attribute)
    if isinstance(attribute, types.MemberDescriptorType):
        return "field"
    return _value(attribute)


def _signature(function: Callable[..., Any]) -> str:
    """Write a signature without annotations, and defaults without addresses."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return "(?)"
    parameters = [
        each.replace(
            annotation=inspect.Parameter.empty,
            default=each.default if each.default is each.empty else _Text(_value(each.default)),
        )
        for each in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


class _Text(str):
    """Its repr is itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _value(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if _is_plain(value):
        return repr(value)
    if isinstance(value, type | types.FunctionType):
        return value.__qualname__
    if isinstance(value, Mapping):
        return f"mapping of {', '.join(map(str, value))}"
    return f"<{type(value).__name__}>"


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, [*value, *value.values()]))
    return value is None or isinstance(value, bool | int | float | str | bytes)


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name in SPECIAL
