"""Time the clients in torch_examples/clients beside stock Horovod: a table for docs/clients.md.

    horovodrun --gloo -np 2 python benchmarks/clients.py

A cell is the time of a long run less that of a short one, per step: the least of three. So starts
of trainers do not count. Plans are not tried, as ``bucket_bytes`` is given.
``fails``: stock Horovod ends with a ``RecursionError``.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as stock
import torch
from torch.utils.data import Dataset, Subset

import hvd_pipe.torch as hvd

sys.path.insert(0, str(Path(__file__).parents[1] / "torch_examples" / "clients"))
import small_data

HOROVOD = "stock Horovod"
STRATEGIES = (
    HOROVOD,
    "merged-gradient",
    "merged-gradient:overlap=forward,bucket_bytes=65536",
    "pipe-sgd",
    "cocod:period=4",
)
BATCH, STEPS = 8, 40  # of a rank; steps of an epoch
SHORT, LONG = 1, 3  # epochs


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


def seconds(train: Callable[..., None], dataset: Any, strategy: str) -> float:
    """Return the seconds of a step."""
    times = []
    for epochs in (SHORT, LONG):
        hvd.barrier()
        begun = time.perf_counter()
        train(dataset, epochs, strategy)
        hvd.barrier()
        times.append(time.perf_counter() - begun)
    return (times[1] - times[0]) / (STEPS * (LONG - SHORT))


def main() -> None:
    hvd.init()
    small_data.hide_mpi()
    small_data.share_cores()
    count = BATCH * STEPS * hvd.size()
    text, digits = small_data.sonnets()[1], small_data.digits()[0]
    data = {"digits": Subset(digits, range(count))}
    data["text"] = Subset(text, [i % len(text) for i in range(count)])
    ours = hvd.DistributedOptimizer
    rows = [
        "| ms a step | " + " | ".join(STRATEGIES) + " |",
        "| --- " * (len(STRATEGIES) + 1) + "|",
    ]
    for name, (kind, train) in CLIENTS.items():
        cells = []
        for strategy in STRATEGIES:
            hvd.DistributedOptimizer = stock_optimizer if strategy == HOROVOD else ours
            try:
                step = min(seconds(train, data[kind], strategy) for _ in range(3))
                cells.append(f"{1000 * step:.1f}")
            except RecursionError:  # stock Horovod's zero_grad(), in a subclass of its optimizer
                cells.append("fails")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    if hvd.rank() == 0:
        print("\n".join(rows))
        print(
            f"load: {os.getloadavg()[0]:.1f}, cores: {os.cpu_count()}, torch {torch.__version__}"
        )


if __name__ == "__main__":
    main()
