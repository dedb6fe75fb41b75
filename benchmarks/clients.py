"""Time the clients in torch_examples/clients beside stock Horovod: a table for docs/clients.md.

    horovodrun --gloo -np 2 python benchmarks/clients.py

A cell is the time from one read of a batch to the next one, the mean of a run's last 80 steps; the
strategies take turns, and the table has the median of five runs. So starts of trainers do not
count. Stock Horovod clips the gradients of one rank, where a client clips.
``fails``: stock Horovod ends with a ``RecursionError``.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import horovod.torch as stock
import torch
from torch.utils.data import Dataset

import hvd_pipe.torch as hvd

sys.path.insert(0, str(Path(__file__).parents[1] / "torch_examples" / "clients"))
import small_data

HOROVOD = "stock Horovod"
STRATEGIES = (
    HOROVOD,
    "merged-gradient",
    "merged-gradient:overlap=forward",
    "pipe-sgd",
    "cocod:period=4",
)
OURS = hvd.DistributedOptimizer
BATCH, STEPS, WARM_UP = 8, 160, 80  # of a rank
RUNS = 5


class Timed(Dataset[Any]):
    """A data set that notes when the first item of each batch is read."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset
        self._reads = 0
        self._times: list[float] = []

    def __len__(self) -> int:
        return BATCH * STEPS * hvd.size()

    def __getitem__(self, index: int) -> Any:
        if self._reads % BATCH == 0:
            self._times.append(time.perf_counter())
        self._reads += 1
        return self._dataset[index % len(self._dataset)]  # type: ignore[arg-type]

    def step_time(self) -> float:
        """Return the mean time of a step after the warm-up, in seconds."""
        return (self._times[STEPS - 1] - self._times[WARM_UP]) / (STEPS - 1 - WARM_UP)


def stock_optimizer(optimizer: Any, named_parameters: Any, strategy: str, **options: Any) -> Any:
    """Wrap as stock Horovod does; ``no_sync()`` is not its own, and an accumulation is."""
    return stock.DistributedOptimizer(optimizer, named_parameters=named_parameters, **options)


def language_model() -> Any:
    from transformers import GPT2LMHeadModel  # noqa: PLC0415 - for two of the clients

    return GPT2LMHeadModel(small_data.small_gpt2(64))


def trainer(dataset: Dataset[Any], epochs: int, strategy: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        importlib.import_module("transformers_trainer").train(
            language_model(),
            dataset,
            strategy=strategy,
            folder=Path(folder),
            num_train_epochs=epochs,
            per_device_train_batch_size=BATCH,
            save_strategy="no",
            logging_strategy="no",
            use_cpu=True,
        )


def adapters(dataset: Dataset[Any], epochs: int, strategy: str) -> None:
    peft = importlib.import_module("peft_lora")
    model = peft.adapted(small_data.small_gpt2(64))
    peft.train(model, dataset, strategy=strategy, epochs=epochs, batch_size=BATCH)


def networks(name: str, **options: Any) -> Callable[[Dataset[Any], int, str], None]:
    def train(dataset: Dataset[Any], epochs: int, strategy: str) -> None:
        script = importlib.import_module(name)
        model = small_data.network()
        script.train(model, dataset, strategy=strategy, epochs=epochs, batch_size=BATCH, **options)

    return train


CLIENTS = {
    "transformers.Trainer": ("text", trainer),
    "Accelerate": ("digits", networks("accelerate_loop")),
    "Lightning's Trainer": ("digits", networks("lightning_trainer", accelerator="cpu")),
    "Fabric": ("digits", networks("lightning_fabric")),
    "PEFT": ("text", adapters),
    "averaged weights, no clip": ("digits", networks("ema_scaler", clip=0.0, scaled=False)),
}


def seconds(train: Callable[..., None], dataset: Dataset[Any], strategy: str) -> float:
    """Return the time of a step of one run, in seconds; infinity where it fails."""
    hvd.DistributedOptimizer = stock_optimizer if strategy == HOROVOD else OURS
    timed = Timed(dataset)
    hvd.barrier()
    try:
        train(timed, 1, strategy)
    except RecursionError:  # stock Horovod's zero_grad(), in a subclass of its optimizer
        return math.inf
    return timed.step_time()


def main() -> None:
    hvd.init()
    small_data.hide_mpi()
    small_data.share_cores()
    data = {"digits": small_data.digits()[0], "text": small_data.sonnets()[1]}
    rows = [
        "| ms a step | " + " | ".join(STRATEGIES) + " |",
        "| --- " * (len(STRATEGIES) + 1) + "|",
    ]
    for name, (kind, train) in CLIENTS.items():
        runs = [[seconds(train, data[kind], each) for each in STRATEGIES] for _ in range(RUNS)]
        medians = [median(times) for times in zip(*runs, strict=True)]
        cells = ["fails" if math.isinf(time) else f"{1000 * time:.1f}" for time in medians]
        rows.append(f"| {name} | {' | '.join(cells)} |")
        if hvd.rank() == 0:
            print(rows[-1], flush=True)
    if hvd.rank() == 0:
        print("\n".join(rows))
        print(
            f"load: {os.getloadavg()[0]:.1f}, cores: {os.cpu_count()}, torch {torch.__version__}"
        )


if __name__ == "__main__":
    main()
