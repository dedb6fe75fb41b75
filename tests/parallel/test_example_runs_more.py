"""language_model.py, gan.py and resume.py as a user starts them: horovodrun, two workers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks import run_script

pytestmark = pytest.mark.nightly  # whole scripts; tests/single tests their functions
FOLDER = Path(__file__).resolve().parents[2] / "torch_examples"


def run(script: str, *arguments: str) -> str:
    """What the ranks printed, less the tags that mpirun puts into their lines."""
    output = run_script(2, str(FOLDER / script), *arguments, timeout=240)
    return re.sub(r"\[1,\d+\]<std(out|err)>:", "", output)


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


def test_the_gan_makes_digits(tmp_path: Path) -> None:
    # Imported here, as the test above needs neither.
    from matplotlib.image import imread  # noqa: PLC0415

    plot = tmp_path / "gan.png"
    output = run("gan.py", "--steps", "600", "--evaluate", "300", "--plot", str(plot))
    rows = {
        name.strip(): tuple(map(float, numbers))
        for name, *numbers in re.findall(
            r"^([a-z ]+?)  +([\d.]+)% +([\d.]+) +([\d.]+)$", output, re.MULTILINE
        )
    }
    real, kinds, frechet = rows["made here"]
    assert rows["noise"][0] < 1
    assert real > 15
    assert kinds > 5
    assert frechet < rows["pixels shuffled"][2] < rows["noise"][2]
    pixels = imread(plot)
    right = pixels[:, pixels.shape[1] // 2 :, :3]  # what was made
    assert right.std() > 0.2
    assert len({round(float(value), 2) for value in right[::5, ::5, 0].flat}) > 20


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
    continued = train("killed", "--die-at", "19", "--verify")
    assert "continuing after step 14" in continued
    assert "verified: bit for bit the same" in continued
    undisturbed = train("undisturbed")
    assert "continuing" not in undisturbed
    weights = r"^weights  ([0-9a-f]{64})  accuracy ([\d.]+)%$"
    assert re.findall(weights, continued, re.MULTILINE) == re.findall(
        weights, undisturbed, re.MULTILINE
    )
