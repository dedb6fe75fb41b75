"""The examples of pipelines as a user starts them: horovodrun, two workers, few steps."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import environment, run_script

from hvd_pipe.timeline import Timeline

pytestmark = pytest.mark.nightly  # whole scripts; tests/single tests their functions
FOLDER = Path(__file__).resolve().parents[2] / "torch_examples"
EPOCH = re.compile(
    r"^ +(?P<epoch>\d+)/\d+ +(?P<loss>[\d.]+) +(?P<accuracy>[\d.]+)% +(?P<test>[\d.]+)%"
    r" +(?P<speed>[\d,]+) +\d+% \|[# ]+\| \S+ +(?P<used>[\d ]+)$",
    re.MULTILINE,
)


def run(script: str, *arguments: str, **env: str) -> str:
    """What rank 0 printed, less the tags that mpirun puts into its lines."""
    output = run_script(2, str(FOLDER / script), *arguments, env=env)
    return re.sub(r"\[1,\d+\]<std(out|err)>:", "", output)


def final_accuracy(output: str) -> float:
    found = re.search(r"^test accuracy ([\d.]+)%, loss [\d.]+$", output, re.MULTILINE)
    assert found, output
    return float(found[1])


def test_vgg_trains_is_traced_and_goes_on(tmp_path: Path) -> None:
    checkpoint = ("--checkpoint", str(tmp_path / "saved"))
    traced = {"HVD_PIPE_TIMELINE": str(tmp_path / "timeline")}
    plan = ("--plan", "straight")
    output = run("pipedream_vgg.py", *plan, "--epochs", "3", *checkpoint, **traced)
    epochs = list(EPOCH.finditer(output))
    assert [match["epoch"] for match in epochs] == ["1", "2", "3"]
    assert all(len(match["used"].split()) == 2 for match in epochs)
    assert final_accuracy(output) == float(epochs[-1]["test"]) > 80  # guessing gets 10
    assert "1-1: 2 stages on 2 of 2 workers" in output  # what was chosen
    assert "\x1b" not in output  # no bar that a launcher keeps back
    assert Timeline.load(tmp_path / "timeline").workers == (0, 1)
    state = torch.load(tmp_path / "saved" / "model.pt")
    assert json.loads((tmp_path / "saved" / "pipeline.json").read_text())
    assert sum(x.numel() for x in state.values()) > 300_000

    again = run("pipedream_vgg.py", *plan, "--epochs", "4", *checkpoint, "--resume")
    assert "goes on after epoch 3" in again
    assert [match["epoch"] for match in EPOCH.finditer(again)] == ["4"]
    assert final_accuracy(again) > 80


def test_vgg_has_microbatches_bf16_and_recomputation() -> None:
    more = ("--microbatches", "4", "--wire", "bf16", "--recompute")
    output = run("pipedream_vgg.py", "--mode", "2bw", "--epochs", "3", *more)
    assert final_accuracy(output) > 70


def test_vgg_runs_alone() -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "pipedream_vgg.py"), "--epochs", "2"],
        capture_output=True,
        text=True,
        env=os.environ | environment(),
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1 worker, mode stash" in done.stdout
    assert final_accuracy(done.stdout) > 80


def test_language_model_beats_guessing() -> None:
    sizes = {"--width": "32", "--layers": "2", "--steps": "20", "--epochs": "3", "--lr": "0.01"}
    more = ("--warmup-steps", "10", "--plan", "straight")
    output = run(
        "pipedream_language_model.py", *(x for pair in sizes.items() for x in pair), *more
    )
    found = re.search(
        r"^held-out perplexity ([\d.]+), ([\d.]+) bits a character$", output, re.MULTILINE
    )
    assert found, output
    assert math.log2(float(found[1])) == pytest.approx(float(found[2]), abs=2e-3)
    guessing = re.search(r"guessing has perplexity (\d+)", output)
    assert guessing
    assert 1 < float(found[1]) < int(guessing[1]) / 2
