"""``hvd-pipe profile``: models by their factories, scripts by their names, and wrong input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import frozen
import pytest
from click.testing import CliRunner, Result

from hvd_pipe.cli.main import main
from hvd_pipe.planning.profile import ModelProfile

pytestmark = pytest.mark.slow

NETS = """
import torch
from torch import nn

def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def fails():
    raise ValueError("no weights here")

def frozen():
    return mlp().requires_grad_(False)

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(50, 8), nn.Linear(8, 2)

    def forward(self, words, mask):
        h = self.words(words) * mask[..., None]
        return {"logits": [self.out(h)], "name": "words"}

class Nothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return None

def cross_entropy(output):
    return nn.functional.cross_entropy(output, torch.zeros(len(output), dtype=torch.long))

def same(output):
    return output
"""

TRAIN = """
import sys, time
import torch
import hvd_pipe.torch as hvd
hvd.init()
print("options", sys.argv[1:])
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for step in range(int(sys.argv[2])):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
time.sleep(float(sys.argv[4]))
"""

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Invoke ``hvd-pipe profile`` in a directory with models and scripts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # A module's name stays known to Python, so each test has its own.
    (tmp_path / f"nets_{tmp_path.name}.py").write_text(NETS)
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "hello.py").write_text("print('hello')\n")
    (tmp_path / "syntax.py").write_text("def f(:\n")
    return lambda *arguments: CliRunner().invoke(
        main, ["profile", *arguments], prog_name="hvd-pipe"
    )


def test_a_model_of_a_file_or_a_module(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("nets.py:mlp", "--input", "5,8")
    assert result.exit_code == 0, result.output
    profile = ModelProfile.load(tmp_path / "mlp.profile.json")
    assert (profile.name, profile.batch) == ("mlp", 5)
    assert int(profile.gradient_bytes().sum()) == 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert min(profile.forward_s, profile.backward_s) > 0
    assert "slowest layers" in result.stdout
    assert "for 5 samples" in result.stdout
    assert "hvd-pipe advise mlp.profile.json" in result.stdout
    module = f"nets_{tmp_path.name}"
    loss = ("--loss", f"{module}:cross_entropy")
    result = invoke(f"{module}:mlp", "--input", "5,8", *loss, "-o", "p.json")
    assert result.exit_code == 0, result.output
    assert ModelProfile.load(tmp_path / "p.json").batch == 5


def test_several_inputs_integers_and_nested_outputs(invoke: Invoke) -> None:
    result = invoke("nets.py:Words", "--input", "3,7:int64", "--input", "3,7:bool", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    frozen.compare_types("cli/profile", document)
    assert document["path"] == "Words.profile.json"
    assert document["batch"] == 3
    assert document["profile"]["gradient_bytes"] == 4 * (50 * 8 + 8 * 2 + 2)
    assert {"words", "out"} <= {layer["name"] for layer in document["layers"]}


WRONG = [
    ("mlp", "neither a script (train.py) nor a model"),
    ("nets.py:mlp", "say what the model is fed: --input"),
    ("nets.py:mlp --input 5;8", "--input takes sizes and perhaps a dtype"),
    ("nets.py:mlp --input 5,9", "RuntimeError: mat1 and mat2 shapes cannot be multiplied (5x9"),
    ("nets.py:fails --input 5,8", "ValueError: no weights here"),
    ("nets.py:frozen --input 5,8", "has no parameter to train"),
    ("nets.py:Nothing --input 5,8", "has no tensor with a gradient: say with --loss"),
    ("nets.py:mlp --input 5,8 --loss nets.py:same", "one number with a gradient, got a [5, 4]"),
    ("nets.py:mlp --input 5,8 --device gpu", "--device gpu: "),
    ("absent.py:mlp --input 5,8", "absent.py: No such file"),
    ("syntax.py:mlp --input 5,8", "importing syntax.py failed: SyntaxError"),
    ("--input 5,8 hello.py", "--input: for models only"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG)
def test_wrong_input_is_one_line(
    invoke: Invoke, tmp_path: Path, arguments: str, said: str
) -> None:
    result = invoke(*arguments.split())
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert not result.stdout
    assert "Traceback" not in result.output
    assert not [*tmp_path.glob("*.profile.json")]


def script(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a process: a script prints to a real stderr."""
    return subprocess.run(
        [sys.executable, "-m", "hvd_pipe", "profile", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={k: v for k, v in os.environ.items() if not k.startswith("HVD_PIPE_")},
    )


@pytest.mark.nightly  # it starts a script that sleeps
def test_a_script_is_ended_when_its_profile_is_there(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    start = time.monotonic()
    run = script(tmp_path, "--json", "train.py", "--steps", "100", "-o", "1000")
    assert run.returncode == 0, run.stderr
    assert time.monotonic() - start < 200
    assert "options ['--steps', '100', '-o', '1000']" in run.stderr
    document = json.loads(run.stdout)
    assert document["profile"]["name"] == "train"
    assert document["profile"]["gradient_bytes"] == 4 * (4 * 2 + 2)
    profile = ModelProfile.load(tmp_path / "train.profile.json")
    assert profile.gradient_order() == ("bias", "weight")
    assert not [*tmp_path.glob(".*")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (TRAIN, "ended before its profile was written"),
        ("import os; os.abort()", "train.py failed (SIGABRT)"),
    ],
)
def test_a_script_without_a_profile_says_why(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "train.py").write_text(content)
    run = script(tmp_path, "train.py", "--steps", "2", "-o", "0")
    assert run.returncode == 1
    assert said in run.stderr
    assert not run.stdout
    assert not [*tmp_path.glob("*.json"), *tmp_path.glob(".*")]
