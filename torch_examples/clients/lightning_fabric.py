"""A loop with Lightning's Fabric on several ranks: a small network reads digits.

    horovodrun -np 2 python torch_examples/clients/lightning_fabric.py
    horovodrun -np 2 python torch_examples/clients/lightning_fabric.py --strategy cocod:period=4

Fabric has one device, and believes that it trains alone. So the loader has this rank's share of
the data, and rank 0 prints.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import hvd_pipe.torch as hvd
from small_data import accuracy, digits, network, share_cores


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
    precision: Any = "32-true",
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
        precision: Of Fabric.
    """
    fabric = Fabric(devices=1, precision=precision, plugins=[LightningEnvironment()])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    wrapped = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        named_parameters=model.named_parameters(),
        strategy=strategy,
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(wrapped, 0.99)
    net, optimizer = fabric.setup(model, wrapped)
    sampler = DistributedSampler(dataset, hvd.size(), hvd.rank(), drop_last=True)
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=batch_size, sampler=sampler))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader, start=1):
            last = number % accumulation == 0 or number == len(loader)
            with nullcontext() if last else wrapped.no_sync():
                fabric.backward(nn.functional.cross_entropy(net(x), y) / accumulation)
            if last:
                if clip:
                    fabric.clip_gradients(net, optimizer, max_norm=clip)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    wrapped.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on digits in a loop of Fabric.")
    parser.add_argument("--strategy", help="merged-gradient, pipe-sgd, cocod:period=4, ...")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--accumulation", type=int, default=1, help="batches a step")
    options = parser.parse_args()
    hvd.init()
    share_cores()
    dataset, held_out = digits()
    model = network()
    train(model, dataset, **vars(options))
    right = accuracy(model, held_out)
    if hvd.rank() == 0:
        print(f"accuracy {right:.1%}")


if __name__ == "__main__":
    main()
