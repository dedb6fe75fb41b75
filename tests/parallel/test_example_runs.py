"""The examples as a user starts them: horovodrun, two workers, few steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks import run_script

FOLDER = Path(__file__).resolve().parents[2] / "torch_examples"


def run(script: str, *arguments: str, strategy: str | None = None) -> str:
    """What rank 0 printed, less the tags that mpirun puts into its lines."""
    env = {"HVD_PIPE_STRATEGY": strategy} if strategy else {}
    output = run_script(2, str(FOLDER / script), *arguments, env=env)
    return re.sub(r"\[1,\d+\]<std(out|err)>:", "", output)


# nightly: whole scripts; one of PyTorch and one of Keras stays in make test.
@pytest.mark.nightly
def test_digits_compares_all_strategies(tmp_path: Path) -> None:
    plot = tmp_path / "digits.png"
    output = run("digits.py", "--compare", "--epochs", "2", "--plot", str(plot))
    # The table at the end: strategy, images/s, final accuracy, seconds to the target.
    rows = re.findall(r"^(\S+) +[\d,]+ +([\d.]+)% +(?:[\d.]+|not reached)$", output, re.MULTILINE)
    accuracy = {strategy: float(percent) for strategy, percent in rows}
    assert [strategy.partition(":")[0] for strategy, _ in rows] == [
        "horovod",
        "merged-gradient",
        "pipe-sgd",
        "cocod",
    ]
    assert accuracy["merged-gradient"] == accuracy["horovod"]  # two workers: bit for bit
    assert min(accuracy.values()) > 50  # guessing gets 10
    assert plot.read_bytes().startswith(b"\x89PNG\r\n")
    assert plot.stat().st_size > 10_000


@pytest.mark.nightly
def test_mnist_takes_its_strategy_from_the_environment() -> None:
    output = run("mnist.py", "--epochs", "2", strategy="pipe-sgd:warmup_steps=20")
    percent = re.findall(r"^test +loss [\d.]+ +accuracy ([\d.]+)%$", output, re.MULTILINE)
    assert len(percent) == 2
    assert float(percent[-1]) > 70


def test_synthetic_benchmark_adds_up() -> None:
    sizes = {
        "--model": "resnet18",
        "--image-size": "32",
        "--batch-size": "2",
        "--num-iters": "2",
        "--num-warmup-batches": "2",
        "--num-batches-per-iter": "2",
    }
    output = run("synthetic_benchmark.py", *(word for pair in sizes.items() for word in pair))
    worker = re.search(r"^Img/sec per worker: ([\d.]+) \+-[\d.]+$", output, re.MULTILINE)
    total = re.search(
        r"^Total img/sec on 2 worker\(s\): ([\d.]+) \+-[\d.]+$", output, re.MULTILINE
    )
    assert worker
    assert total
    assert float(total[1]) > 0
    assert abs(float(total[1]) - 2 * float(worker[1])) <= 0.2  # both are printed to 0.1
