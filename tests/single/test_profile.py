"""ModelProfile: what the backward pass makes ready when, and the files that say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_pipe.planning.profile import LayerProfile, ModelProfile

DATA = Path(__file__).parent.parent / "data"
MODEL = ModelProfile(
    (
        LayerProfile("conv", 400, 0.3, forward_s=0.1, activation_bytes=1000),
        LayerProfile("relu", 0, 0.05, forward_s=0.01, activation_bytes=1000),
        LayerProfile("bn", 80, 0.2),
        LayerProfile("fc", 4000, 0.1),
    )
)


def test_googlenet_trace() -> None:
    model = ModelProfile.from_csv(DATA / "googlenet_k80_backward.csv")
    assert len(model.layers) == 64
    assert model.gradient_order()[0] == "63"
    assert model.gradient_bytes().sum() == 4 * 13_379_136
    assert model.ready_times()[0] == pytest.approx(461.088e-6)
    assert model.ready_times()[-1] == pytest.approx(0.205334312)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, r"non-empty string as its name, got ''"),
        (
            {"gradient_bytes": -1},
            r"gradient_bytes must be an integer from 0 to 1125899906842624, got -1",
        ),
        ({"gradient_bytes": 1.5}, r"gradient_bytes must be an integer .*got 1.5"),
        ({"activation_bytes": "8"}, r"activation_bytes must be an integer .*got '8'"),
        (
            {"backward_s": -0.1},
            r"'fc': backward_s must be finite and at least 0 seconds, got -0.1",
        ),
        ({"backward_s": None}, r"backward_s must be finite .*got None"),
        ({"description": None}, r"'fc': description must be a string, got None"),
        ({"forward_s": float("nan")}, r"forward_s must be finite .*got nan; measure it again"),
    ],
)
def test_bad_layers(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerProfile(**{"name": "fc", "gradient_bytes": 8, "backward_s": 0.1, **arguments})


def test_bad_models() -> None:
    with pytest.raises(ValueError, match=r"at least one layer, got none"):
        ModelProfile(())
    with pytest.raises(ValueError, match=r"unique, but these occur twice: \['fc'\]"):
        ModelProfile((LayerProfile("fc", 8, 0.1), LayerProfile("fc", 8, 0.1)))


LAYERS = (LayerProfile("a", 8, 0.5, 0.25), LayerProfile("b", 0, 0.25, 1.0, 4, "ReLU()"))


def test_whole_model() -> None:
    model = ModelProfile(LAYERS, (("a", "b"),), batch=np.int64(32), update_s=0.125, name="net")
    assert (model.forward_s, model.backward_s, model.compute_s) == (1.25, 0.75, 2.125)
    assert type(model.batch) is int
    assert ModelProfile.from_json(model.to_json()) == model
    assert ModelProfile.from_json(ModelProfile(LAYERS, ()).to_json()).edges == ()
    assert ModelProfile(LAYERS).edges is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"edges": (("a", "c"),)}, r"edge \('a', 'c'\) names an unknown layer 'c'"),
        ({"edges": (("b", "a"),)}, r"leads from layer 1 to layer 0: list the layers so that each"),
        ({"edges": (("a", "a"),)}, r"leads from layer 0 to layer 0"),
        ({"edges": (("a", "b"), ("a", "b"))}, r"occur twice: \[\('a', 'b'\)\]"),
        ({"batch": 0}, r"batch is an integer of at least 1, or None, got 0"),
        ({"update_s": -1.0}, r"update_s must be finite and at least 0 seconds, got -1.0"),
        ({"update_s": float("inf")}, r"update_s must be finite .*got inf"),
        ({"name": None}, r"name of a model must be a string, got None"),
    ],
)
def test_bad_extras(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelProfile(LAYERS, **arguments)


def test_read_goes_by_the_suffix(tmp_path: Path) -> None:
    MODEL.save(tmp_path / "model.JSON")
    assert ModelProfile.read(tmp_path / "model.JSON") == MODEL
    csv = DATA / "googlenet_k80_backward.csv"
    assert ModelProfile.read(csv) == ModelProfile.from_csv(csv)
    assert len(ModelProfile.read(DATA / "alexnet.graph.txt").layers) == 22
    for name, found in (("model.pt", r"\.pt"), ("model", "none")):
        with pytest.raises(ValueError, match=rf"ends in \.json .*, \.csv .* got '{found}'"):
            ModelProfile.read(tmp_path / name)


@pytest.mark.parametrize("columns", [(), (0,), (1,), (0, 1)])
def test_a_trace_with_more_columns(columns: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    more = [("forward_us", "500000"), ("activation_bytes", "64")]
    names, values = zip(*(more[at] for at in columns), strict=True) if columns else ((), ())
    rows = (["layer", "parameter_bytes", "backward_us", *names], ["fc", "8", "250000", *values])
    path.write_text("\n".join(map(",".join, rows)))
    forward, activation = 0.5 * (0 in columns), 64 * (1 in columns)
    expected = LayerProfile("fc", 8, 0.25, forward, activation)
    assert ModelProfile.from_csv(path).layers == (expected,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"trace\.csv: the header must be 'layer,.*got 'an empty file'"),
        (
            "# x\nname,bytes\n",
            r"header must be 'layer,parameter_bytes,backward_us', got 'name,bytes'",
        ),
        (
            "layer,parameter_bytes,backward_us,activation_bytes,forward_us\n",
            r"backward_us', got '.*'; forward_us and activation_bytes may follow",
        ),
        ("layer,parameter_bytes,backward_us,forward_us\n0,1,2\n", r"row '0,1,2': .*shorter"),
        ("layer,parameter_bytes,backward_us\n0,1,2,3\n", r"row '0,1,2,3': .*longer"),
        ("layer,parameter_bytes,backward_us\n0,1,2\n0,1,2\n", r"trace\.csv: .*occur twice"),
        ("layer,parameter_bytes,backward_us\n0,1\n", r"trace\.csv: row '0,1': not enough values"),
        ("layer,parameter_bytes,backward_us\n0,x,1\n", r"row '0,x,1': invalid literal"),
        ("layer,parameter_bytes,backward_us\n0,1,-1\n", r"row '0,1,-1': .*at least 0 seconds"),
    ],
)
def test_bad_traces(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        ModelProfile.from_csv(path)
