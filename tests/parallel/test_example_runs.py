"""The examples as a user starts them: horovodrun, two workers, few steps.

tests/single tests their functions. One of PyTorch and one of Keras stays in ``make test``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import environment, run_program, run_script

from hvd_pipe.timeline import Timeline

FOLDER = Path(__file__).resolve().parents[2] / "torch_examples"
EPOCH = re.compile(
    r"^ +(?P<epoch>\d+)/\d+ +(?P<loss>[\d.]+) +(?P<accuracy>[\d.]+)% +(?P<test>[\d.]+)%"
    r" +(?P<speed>[\d,]+) +\d+% \|[# ]+\| \S+ +(?P<used>[\d ]+)$",
    re.MULTILINE,
)

nightly = pytest.mark.nightly  # whole scripts


def run(script: str, *arguments: str, **env: str) -> str:
    """What the ranks printed, less the tags that mpirun puts into their lines."""
    output = run_script(2, str(FOLDER / script), *arguments, env=env, timeout=240)
    return re.sub(r"\[1,\d+\]<std(out|err)>:", "", output)


def found(pattern: str, output: str) -> re.Match[str]:
    match = re.search(pattern, output, re.MULTILINE)
    assert match, output
    return match


@nightly
@pytest.mark.parametrize("is_limited", [True, False])
def test_the_demo_trains_over_a_limited_link(is_limited: bool, tmp_path: Path) -> None:
    """Or, where no namespace can be had, without a limit; and says so."""
    plot, tools = tmp_path / "demo.png", tmp_path / "tools"
    if not is_limited:
        tools.mkdir()
        (tools / "unshare").write_text("#!/bin/sh\necho refused >&2; exit 1\n")
        (tools / "unshare").chmod(0o755)
    path = os.pathsep.join([str(tools), os.environ["PATH"], "/usr/sbin", "/sbin"])
    can_limit = subprocess.run(["unshare", "--net", "true"], check=False).returncode == 0
    if is_limited and not can_limit:
        pytest.skip("no network namespace can be made here")
    command = [sys.executable, str(FOLDER / "demo.py"), "--plot", str(plot)]
    output = run_program(command, {"PATH": path}, timeout=240)
    rows = re.findall(r"^(\S+(?: \S+)?) +([\d.]+)% +[\d,]+ +[\d.]+ +\d+%$", output, re.MULTILINE)
    accuracy = {name: float(percent) for name, percent in rows}
    exact = ["stock Horovod", "PyTorch DDP", "merged-gradient", "overlap=forward"]
    assert [*accuracy] == [*exact, "pipe-sgd", "cocod"]
    assert accuracy["merged-gradient"] == accuracy["overlap=forward"] == accuracy["stock Horovod"]
    assert min(accuracy.values()) > 85
    assert ("cannot be limited here" in output) == ("refused" in output) == (not is_limited)
    assert ("Mbit/s" in output) == is_limited
    assert "<stdout>" not in output
    assert plot.read_bytes().startswith(b"\x89PNG\r\n")


@nightly
def test_digits_takes_its_strategy_from_the_environment() -> None:
    output = run("digits.py", HVD_PIPE_STRATEGY="pipe-sgd:warmup_steps=20")
    percent = re.findall(r"^epoch \d/3: test accuracy ([\d.]+)%$", output, re.MULTILINE)
    assert len(percent) == 3
    assert float(percent[-1]) > 90


def test_synthetic_benchmark_adds_up() -> None:
    batches = ("--batch-size", "2", "--num-warmup-batches", "2", "--num-batches-per-iter", "2")
    sizes = ("--model", "resnet18", "--image-size", "32", "--num-iters", "2", *batches)
    output = run("synthetic_benchmark.py", *sizes)
    worker = found(r"^Img/sec per worker: ([\d.]+) \+-[\d.]+$", output)
    total = found(r"^Total img/sec on 2 worker\(s\): ([\d.]+) \+-[\d.]+$", output)
    assert float(total[1]) > 0
    assert abs(float(total[1]) - 2 * float(worker[1])) <= 0.2  # both are printed to 0.1


@nightly
@pytest.mark.parametrize(
    ("strategy", "compression"),
    [
        ("merged-gradient", "bf16"),
        ("pipe-sgd:warmup_steps=20", "fp16"),
        ("cocod:period=2", "int8"),
    ],
)
def test_the_language_model_learns(strategy: str, compression: str) -> None:
    sizes = ["--steps", "60", "--evaluate", "30", "--warmup-steps", "10", "--width", "48"]
    options = ["--strategy", strategy, "--compression", compression, "--sample", "20"]
    output = run("language_model.py", *sizes, *options)
    lines = re.findall(r"^ +\d+/60 +([\d.]+) +([\d.]+) +([\d,]+) ", output, re.MULTILINE)
    assert len(lines) == 2
    loss, bits, speed = (float(value.replace(",", "")) for value in lines[-1])
    assert loss < 3.3  # nats; guessing gets 4.08, knowing the frequencies of characters 3.1
    assert bits < 4.6  # guessing gets 5.88
    assert speed > 0
    sample = output.partition("A sample")[2].partition("|:")[2]
    assert len(sample.partition("|")[2].strip()) > 5


@nightly
@pytest.mark.parametrize("strategy", ["merged-gradient", "pipe-sgd:warmup_steps=5", "cocod"])
def test_a_killed_run_continues_bit_for_bit(strategy: str, tmp_path: Path) -> None:
    def train(folder: str, *more: str) -> str:
        # --every and --die-at are in the middle of an epoch and of a round of cocod.
        options = ["--steps", "30", "--every", "7", "--batch-size", "8", "--strategy", strategy]
        return run("resume.py", *options, "--checkpoints", str(tmp_path / folder), *more)

    with pytest.raises(AssertionError) as caught:
        train("killed", "--die-at", "19")
    assert "step 19: killed" in str(caught.value)
    assert "weights" not in str(caught.value).partition("killed")[2]
    continued = train("killed", "--die-at", "19")
    assert "continuing after step 14" in continued
    undisturbed = train("undisturbed")
    assert "continuing" not in undisturbed
    weights = r"^weights  ([0-9a-f]{64})  accuracy ([\d.]+)%$"
    assert found(weights, continued).groups() == found(weights, undisturbed).groups()


# Pipelines ---------------------------------------------------------------------------------------


def final_accuracy(output: str) -> float:
    return float(found(r"^test accuracy ([\d.]+)%, loss [\d.]+$", output)[1])


@nightly
def test_vgg_trains_is_traced_and_goes_on(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    options = ("--plan", "straight", "--checkpoint", str(saved))
    traced = str(tmp_path / "timeline")
    output = run("pipedream_vgg.py", *options, "--epochs", "3", HVD_PIPE_TIMELINE=traced)
    epochs = list(EPOCH.finditer(output))
    assert [match["epoch"] for match in epochs] == ["1", "2", "3"]
    assert all(len(match["used"].split()) == 2 for match in epochs)
    assert final_accuracy(output) == float(epochs[-1]["test"]) > 80  # guessing gets 10
    assert "1-1: 2 stages on 2 of 2 workers" in output  # what was chosen
    assert "\x1b" not in output  # no bar that a launcher keeps back
    assert Timeline.load(tmp_path / "timeline").workers == (0, 1)
    assert json.loads((saved / "pipeline.json").read_text())
    assert sum(x.numel() for x in torch.load(saved / "model.pt").values()) > 300_000

    again = run("pipedream_vgg.py", *options, "--epochs", "4", "--resume")
    assert "goes on after epoch 3" in again
    assert [match["epoch"] for match in EPOCH.finditer(again)] == ["4"]
    assert final_accuracy(again) > 80


@nightly
def test_vgg_has_microbatches_bf16_and_recomputation() -> None:
    more = ("--microbatches", "4", "--wire", "bf16", "--recompute")
    output = run("pipedream_vgg.py", "--mode", "2bw", "--epochs", "3", *more)
    assert final_accuracy(output) > 70


@nightly
def test_vgg_runs_alone() -> None:
    command = [sys.executable, str(FOLDER / "pipedream_vgg.py"), "--epochs", "2"]
    env = os.environ | environment()
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "1 worker, mode stash" in done.stdout
    assert final_accuracy(done.stdout) > 80
