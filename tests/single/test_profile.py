"""ModelProfile: what the backward pass makes ready when, and the files that say so."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_pipe.planning import _files, profile
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


def test_doctests() -> None:
    for module in (profile, _files):
        result = doctest.testmod(module)
        assert result.failed == 0
        assert result.attempted > 0


def test_planning_imports_no_framework() -> None:
    """The theory runs where no framework is installed, and starts fast where one is."""
    code = (
        "import sys\n"
        "import hvd_pipe.planning.comm, hvd_pipe.planning.merge, hvd_pipe.planning.plan\n"
        "import hvd_pipe.planning.profile\n"
        "print(sorted({'torch', 'tensorflow', 'keras', 'horovod', 'mpi4py'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_backward_order() -> None:
    assert MODEL.gradient_order() == ("fc", "bn", "conv")
    assert MODEL.gradient_bytes().tolist() == [4000, 80, 400]
    np.testing.assert_allclose(MODEL.ready_times(), [0.1, 0.3, 0.65])  # relu's 0.05 counts
    assert MODEL.ready_times().dtype == np.float64
    assert MODEL.gradient_bytes().dtype == np.int64


def test_a_model_without_gradients() -> None:
    model = ModelProfile((LayerProfile("relu", 0, 1.0),))
    assert model.gradient_order() == ()
    assert model.ready_times().shape == model.gradient_bytes().shape == (0,)


def test_round_trip(tmp_path: Path) -> None:
    assert ModelProfile.from_json(MODEL.to_json()) == MODEL
    MODEL.save(tmp_path / "model.json")
    assert ModelProfile.load(tmp_path / "model.json") == MODEL


def test_numpy_numbers_become_plain_ones() -> None:
    layer = LayerProfile("fc", np.int64(8), np.float32(0.5))  # type: ignore[arg-type]
    assert (type(layer.gradient_bytes), type(layer.backward_s)) == (int, float)
    assert ModelProfile.from_json(ModelProfile((layer,)).to_json()).layers == (layer,)


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
        ({"gradient_bytes": -1}, r"'fc': gradient_bytes must be an integer of at least 0, got -1"),
        ({"gradient_bytes": 1.5}, r"gradient_bytes must be an integer .*got 1.5"),
        ({"activation_bytes": "8"}, r"activation_bytes must be an integer .*got '8'"),
        (
            {"backward_s": -0.1},
            r"'fc': backward_s must be finite and at least 0 seconds, got -0.1",
        ),
        ({"backward_s": None}, r"backward_s must be finite .*got None"),
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


def document(**changes: Any) -> str:
    layer = {"name": "fc", "gradient_bytes": 8, "backward_s": 0.1}
    return json.dumps({"schema": "hvd_pipe.profile/1", "layers": [layer], **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"no JSON"),
        ("[]", r"expected a JSON object with a \"schema\" key"),
        ("{}", r"expected a JSON object with a \"schema\" key"),
        (
            document(schema="hvd_pipe.profile/9"),
            r"unknown schema 'hvd_pipe.profile/9'.*reads '.*/1'",
        ),
        (document(layer=1), r"lacks the keys \[\] and has the unknown keys \['layer'\]"),
        ('{"schema": "hvd_pipe.profile/1"}', r"lacks the keys \['layers'\]"),
        (document(layers={}), r"\"layers\" is a list, got dict"),
        (document(layers=[3]), r"layer 0 is a JSON object, got int"),
        (document(layers=[{"name": "a"}]), r"layer 0 lacks the keys \['backward_s', 'gradient_b"),
        (
            document(layers=[{"name": "a", "gradient_bytes": 1, "backward_s": -1}]),
            r"backward_s must be finite and at least 0 seconds, got -1",
        ),
    ],
)
def test_bad_documents(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        ModelProfile.from_json(text)
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"model\.json: "):
        ModelProfile.load(path)


def test_optional_keys_may_be_left_out() -> None:
    assert ModelProfile.from_json(document()).layers == (LayerProfile("fc", 8, 0.1),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"trace\.csv: the header must be 'layer,.*got 'an empty file'"),
        (
            "# x\nname,bytes\n",
            r"header must be 'layer,parameter_bytes,backward_us', got 'name,bytes'",
        ),
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
