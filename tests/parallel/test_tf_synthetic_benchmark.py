"""TensorFlow's synthetic benchmark as a user starts it: horovodrun, two workers, few steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks import run_script

pytestmark = pytest.mark.nightly  # a whole script, of which Keras' model takes a minute
SCRIPT = Path(__file__).resolve().parents[2] / "tf_examples" / "synthetic_benchmark.py"


@pytest.mark.parametrize(
    "given",
    [
        ("--strategy", "merged-gradient", "--compression", "bf16"),
        ("--strategy", "horovod", "--fp16-allreduce"),
    ],
    ids=["ours", "stock"],
)
def test_it_adds_up(given: tuple[str, ...]) -> None:
    sizes = {"--batch-size": "2", "--num-iters": "2", "--num-batches-per-iter": "2"}
    words = [word for pair in sizes.items() for word in pair]
    output = run_script(2, str(SCRIPT), *words, *given, timeout=300)
    output = re.sub(r"\[1,\d+\]<std(out|err)>:", "", output)
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
