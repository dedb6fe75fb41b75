"""Accelerate's own loop on several ranks: a small network reads digits.

    horovodrun -np 2 python torch_examples/clients/accelerate_loop.py
    horovodrun -np 2 python torch_examples/clients/accelerate_loop.py --accumulation 2

Accelerate believes that it trains alone. So the loader has this rank's share of the data, and
rank 0 prints.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import hvd_pipe.torch as hvd
from small_data import accuracy, digits, hide_mpi, network, share_cores


def train(
    model: nn.Module,
    dataset: Dataset[Any],
    *,
    strategy: str | None = None,
    accumulation: int = 1,
    clip: float = 1.0,
    epochs: int = 10,
    batch_size: int = 32,
    lr: float = 0.05,
) -> None:
    """Train a model on a data set of all ranks.

    Args:
        model: The model.
        dataset: Inputs and labels.
        strategy: As in ``hvd.DistributedOptimizer``.
        accumulation: Batches a step.
        clip: The largest norm of the gradients; 0 for any.
        epochs: How often all data are used.
        batch_size: Of a rank.
        lr: The learning rate, which decays.
    """
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    model.to(accelerator.device)
    wrapped = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=accumulation,  # accumulate() does not call its no_sync()
        strategy=strategy,
    )
    sampler = DistributedSampler(dataset, hvd.size(), hvd.rank(), drop_last=True)
    model, optimizer, loader, schedule = accelerator.prepare(
        model,
        wrapped,
        DataLoader(dataset, batch_size=batch_size, sampler=sampler),
        torch.optim.lr_scheduler.ExponentialLR(wrapped, 0.99),
    )
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                if accelerator.sync_gradients and clip:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    wrapped.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on digits in a loop of Accelerate.")
    parser.add_argument("--strategy", help="merged-gradient, pipe-sgd, cocod:period=4, ...")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--accumulation", type=int, default=1, help="batches a step")
    options = parser.parse_args()
    hvd.init()
    hide_mpi()
    share_cores()
    dataset, held_out = digits()
    model = network()
    train(model, dataset, **vars(options))
    right = accuracy(model, held_out)
    if hvd.rank() == 0:
        print(f"accuracy {right:.1%}")


if __name__ == "__main__":
    main()
