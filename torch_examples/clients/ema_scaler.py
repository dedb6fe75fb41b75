"""A loop as that of timm on several ranks: scaler, clipping, schedule, averaged weights.

    horovodrun -np 2 python torch_examples/clients/ema_scaler.py
    horovodrun -np 2 python torch_examples/clients/ema_scaler.py --strategy pipe-sgd

The lines are those of timm's train.py, written with torch alone.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import hvd_pipe.torch as hvd
from small_data import accuracy, digits, network, share_cores


def train(
    model: nn.Module,
    dataset: Dataset[Any],
    *,
    strategy: str | None = None,
    clip: float = 1.0,
    epochs: int = 10,
    batch_size: int = 32,
    lr: float = 0.005,
    decay: float = 0.95,
    scaled: bool = True,
) -> AveragedModel:
    """Train a model, and return the average of its weights.

    Args:
        model: The model.
        dataset: Inputs and labels.
        strategy: As in ``hvd.DistributedOptimizer``.
        clip: The largest norm of the gradients; 0 for any.
        epochs: How often all data are used.
        batch_size: Of a rank.
        lr: The learning rate of the first step.
        decay: How much of the averaged weights stays in a step.
        scaled: Scale losses, as float16 needs it.
    """
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05),
        named_parameters=model.named_parameters(),
        strategy=strategy,
    )
    sampler = DistributedSampler(dataset, hvd.size(), hvd.rank(), drop_last=True)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    steps = epochs * len(loader)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=lr / 50)
    kind = next(model.parameters()).device.type
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**10, growth_interval=7, enabled=scaled)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            averaged.update_parameters(model)
    optimizer.synchronize()
    return averaged


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on digits, and average the weights.")
    parser.add_argument("--strategy", help="merged-gradient, pipe-sgd, cocod:period=4, ...")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    hvd.init()
    share_cores()
    dataset, held_out = digits()
    model = network()
    averaged = train(model, dataset, **vars(options))
    # Under cocod, each rank has averaged weights of its own.
    hvd.broadcast_parameters(averaged.state_dict(), root_rank=0)
    last, smooth = accuracy(model, held_out), accuracy(averaged, held_out)
    if hvd.rank() == 0:
        print(f"accuracy {last:.1%}, of averaged weights {smooth:.1%}")


if __name__ == "__main__":
    main()
