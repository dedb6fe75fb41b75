"""What a model costs, layer by layer: times of the passes, bytes of gradients and activations."""

from __future__ import annotations

import csv
import json
import math
import operator
import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning._files import check_keys, read_object

__all__ = ["LayerProfile", "ModelProfile"]

SCHEMA = "hvd_pipe.profile/1"
_CSV_COLUMNS = ["layer", "parameter_bytes", "backward_us"]


@dataclass(frozen=True)
class LayerProfile:
    """One layer, or one parameter tensor where times are known that finely.

    Args:
        name: unique in its model.
        gradient_bytes: bytes of its gradient; 0 for a layer without parameters.
        backward_s: seconds from the previous gradient being ready to this one being ready.
        forward_s: seconds of its forward pass.
        activation_bytes: bytes of its output for one minibatch.

    Raises:
        ValueError: an empty name, or a negative or non-finite number.

    Example:
        >>> LayerProfile("fc", gradient_bytes=4096, backward_s=1e-3).forward_s
        0.0
    """

    name: str
    gradient_bytes: int
    backward_s: float
    forward_s: float = 0.0
    activation_bytes: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a layer needs a non-empty string as its name, got {self.name!r}")
        for field in ("gradient_bytes", "activation_bytes"):
            value = getattr(self, field)
            try:
                count = operator.index(value)
            except TypeError:
                count = -1
            if count < 0:
                raise ValueError(
                    f"layer {self.name!r}: {field} must be an integer of at least 0, got {value!r}"
                )
            object.__setattr__(self, field, count)
        for field in ("backward_s", "forward_s"):
            value = getattr(self, field)
            try:
                seconds = float(value)
            except (TypeError, ValueError):
                seconds = math.nan
            if not (math.isfinite(seconds) and seconds >= 0.0):
                raise ValueError(
                    f"layer {self.name!r}: {field} must be finite and at least 0 seconds, "
                    f"got {value!r}; measure it again"
                )
            object.__setattr__(self, field, seconds)


@dataclass(frozen=True)
class ModelProfile:
    """The layers of a model in forward order.

    The backward pass takes them in reverse. :meth:`gradient_order`, :meth:`ready_times` and
    :meth:`gradient_bytes` agree entry by entry, and leave out layers without a gradient, which
    send nothing; the time that those take still delays what comes after them.

    Args:
        layers: at least one, in forward order.

    Raises:
        ValueError: no layers, or two of one name.

    Example:
        >>> model = ModelProfile((
        ...     LayerProfile("conv", gradient_bytes=8, backward_s=0.5),
        ...     LayerProfile("relu", gradient_bytes=0, backward_s=0.25),
        ...     LayerProfile("fc", gradient_bytes=64, backward_s=1.0),
        ... ))
        >>> model.gradient_order()
        ('fc', 'conv')
        >>> model.ready_times().tolist()
        [1.0, 1.75]
        >>> model.gradient_bytes().tolist()
        [64, 8]

    Source: MG-WFBP, arXiv 1912.09268 (its tau_b + t_b is the ready time).
    """

    layers: tuple[LayerProfile, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise ValueError("a model needs at least one layer, got none")
        twice = [n for n, count in Counter(x.name for x in self.layers).items() if count > 1]
        if twice:
            raise ValueError(f"layer names must be unique, but these occur twice: {twice}")

    def gradient_order(self) -> tuple[str, ...]:
        """Names of the layers with a gradient, in the order in which backward makes them ready."""
        return tuple(layer.name for layer in reversed(self.layers) if layer.gradient_bytes)

    def ready_times(self) -> npt.NDArray[np.float64]:
        """Seconds from the start of backward to each gradient, in gradient order; float64."""
        ready = np.cumsum([layer.backward_s for layer in reversed(self.layers)])
        sends = [layer.gradient_bytes > 0 for layer in reversed(self.layers)]
        return np.asarray(ready[sends], dtype=np.float64)

    def gradient_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes of each gradient, in gradient order; int64."""
        sizes = [layer.gradient_bytes for layer in reversed(self.layers) if layer.gradient_bytes]
        return np.array(sizes, dtype=np.int64)

    def to_json(self) -> str:
        """A JSON document; :meth:`from_json` reads it back exactly."""
        layers = [asdict(layer) for layer in self.layers]
        return json.dumps({"schema": SCHEMA, "layers": layers}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ModelProfile:
        """The model in a JSON document.

        ``forward_s`` and ``activation_bytes`` may be left out and are 0 then.

        Args:
            text: ``{"schema": "hvd_pipe.profile/1", "layers": [{"name": ...}, ...]}``.

        Raises:
            ValueError: no such document; says which key or layer is wrong.

        Example:
            >>> model = ModelProfile((LayerProfile("fc", 64, 0.1),))
            >>> ModelProfile.from_json(model.to_json()) == model
            True
        """
        layers = read_object(text, SCHEMA, {"layers"})["layers"]
        if not isinstance(layers, list):
            raise ValueError(f'"layers" is a list, got {type(layers).__name__}')
        for number, layer in enumerate(layers):
            check_keys(
                layer,
                {"name", "gradient_bytes", "backward_s"},
                f"layer {number}",
                optional={"forward_s", "activation_bytes"},
            )
        return cls(tuple(LayerProfile(**layer) for layer in layers))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes :meth:`to_json` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ModelProfile:
        """The model in a file that :meth:`save` wrote; ValueError names the file."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str]) -> ModelProfile:
        """The model in a trace of its backward pass.

        Args:
            path: CSV with the header ``layer,parameter_bytes,backward_us`` and one row a layer in
                forward order, times in microseconds. Lines that begin with ``#`` are comments.

        Raises:
            ValueError: another header or a malformed row; names the file and the row.
        """
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        rows = list(csv.reader(line for line in lines if line and not line.startswith("#")))
        if not rows or rows[0] != _CSV_COLUMNS:
            raise ValueError(
                f"{os.fspath(path)}: the header must be {','.join(_CSV_COLUMNS)!r}, "
                f"got {','.join(rows[0]) if rows else 'an empty file'!r}"
            )
        layers = []
        for row in rows[1:]:
            try:
                name, size, microseconds = row
                layers.append(LayerProfile(name, int(size), float(microseconds) * 1e-6))
            except ValueError as error:
                raise ValueError(f"{os.fspath(path)}: row {','.join(row)!r}: {error}") from error
        return cls(tuple(layers))
