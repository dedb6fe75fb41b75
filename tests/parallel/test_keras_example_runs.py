"""The Keras examples as a user starts them: horovodrun, two workers, few steps."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from ranks import run_program, run_script

pytest.importorskip("tensorflow")

FOLDER = Path(__file__).resolve().parents[2] / "tf_examples"


# Where a launcher binds a rank to one core, TensorFlow has one thread for all operations: what
# waits must leave it to what is waited for.
ONE_THREAD = {"TF_NUM_INTEROP_THREADS": "1"}


def run(script: str, *arguments: str, timeout: float = 150.0) -> str:
    """What rank 0 printed, less the tags that mpirun puts into its lines."""
    output = run_script(2, str(FOLDER / script), *arguments, env=ONE_THREAD, timeout=timeout)
    return re.sub(r"\[1,\d+\]<std(out|err)>:", "", output)


# nightly: whole scripts; one stays in make test.
@pytest.mark.parametrize(
    "strategy",
    [
        "merged-gradient",
        pytest.param("pipe-sgd", marks=pytest.mark.nightly),
        pytest.param("cocod:period=4", marks=pytest.mark.nightly),
    ],
)
def test_fit_leaves_equal_weights_on_all_ranks(strategy: str) -> None:
    output = run("keras_digits.py", "--epochs", "3", "--strategy", strategy)
    percent = re.search(rf"^{strategy}: test accuracy ([\d.]+)%$", output, re.MULTILINE)
    assert percent
    assert float(percent[1]) > 80  # guessing gets 10
    assert "weights on 2 ranks: alike" in output


@pytest.mark.nightly
def test_the_demo_trains(tmp_path: Path) -> None:
    plot, script = tmp_path / "demo.png", FOLDER.parent / "torch_examples" / "demo.py"
    output = run_program([sys.executable, str(script), "--keras", "--plot", str(plot)], {}, 280)
    rows = re.findall(r"^(\S+(?: \S+)?) +([\d.]+)% +[\d,]+ +[\d.]+ +\d+%$", output, re.MULTILINE)
    assert [name for name, _ in rows] == [
        *("stock Horovod", "merged-gradient", "overlap=forward", "pipe-sgd", "cocod")
    ]
    assert min(float(percent) for _, percent in rows) > 85
    assert plot.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["merged-gradient", "pipe-sgd"])
def test_a_loop_of_ones_own(strategy: str) -> None:
    output = run("custom_loop_digits.py", "--epochs", "3", "--strategy", strategy)
    percent = re.search(rf"^{strategy}: test accuracy ([\d.]+)%$", output, re.MULTILINE)
    assert percent
    assert float(percent[1]) > 80


@pytest.mark.nightly
@pytest.mark.parametrize(
    "given",
    [
        ("--strategy", "merged-gradient", "--compression", "bf16"),
        ("--strategy", "horovod", "--fp16-allreduce"),
    ],
    ids=["ours", "stock"],
)
def test_the_synthetic_benchmark_adds_up(given: tuple[str, ...]) -> None:
    sizes = {"--batch-size": "2", "--num-iters": "2", "--num-batches-per-iter": "2"}
    words = [word for pair in sizes.items() for word in pair]
    output = run("synthetic_benchmark.py", *words, *given, timeout=300)
    assert f"Strategy: {given[1]}, batch size 2" in output
    assert output.count("Iter #") == 2  # rank 0's alone
    worker = re.search(r"^Img/sec per worker: ([\d.]+) \+-[\d.]+$", output, re.MULTILINE)
    total = re.search(
        r"^Total img/sec on 2 worker\(s\): ([\d.]+) \+-[\d.]+$", output, re.MULTILINE
    )
    assert worker
    assert total
    assert float(total[1]) > 0
    assert abs(float(total[1]) - 2 * float(worker[1])) <= 0.2  # both are printed to 0.1
