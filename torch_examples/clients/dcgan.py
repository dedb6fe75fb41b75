"""PyTorch's DCGAN tutorial on several ranks, with digits of 8 x 8 pixels.

    horovodrun -np 2 python torch_examples/clients/dcgan.py

The discriminator has two backward passes a step, and the generator's pass goes through it.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import hvd_pipe.torch as hvd
from small_data import digits, share_cores

NOISE = 16


def generator(width: int = 32) -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, width, 4, 1, 0, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(width, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def discriminator(width: int = 32) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(width, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(width, 1, 4, 1, 0, bias=False),
        nn.Flatten(0),
    )


def noise_of(x: torch.Tensor) -> torch.Tensor:
    """Return noise for a batch of images."""
    return torch.randn(len(x), NOISE, 1, 1, dtype=x.dtype)


def train(
    net_g: nn.Module,
    net_d: nn.Module,
    dataset: Dataset[Any],
    *,
    strategy: str | None = None,
    epochs: int = 10,
    batch_size: int = 32,
    lr: float = 0.002,
    noise: Any = noise_of,
) -> None:
    """Train a generator and a discriminator against each other.

    Args:
        net_g: The generator.
        net_d: The discriminator, whose outputs are logits.
        dataset: Images of 64 pixels, and labels.
        strategy: As in ``hvd.DistributedOptimizer``.
        epochs: How often all data are used.
        batch_size: Of a rank.
        lr: The learning rate.
        noise: Makes noise for a batch.
    """

    def optimizer_of(net: nn.Module, name: str) -> Any:
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        return hvd.DistributedOptimizer(
            torch.optim.Adam(net.parameters(), lr=lr, betas=(0.5, 0.999)),
            # Both networks have a parameter "0.weight".
            named_parameters=net.named_parameters(prefix=name),
            strategy=strategy,
        )

    optimizer_g, optimizer_d = optimizer_of(net_g, "generator"), optimizer_of(net_d, "critic")
    criterion = nn.functional.binary_cross_entropy_with_logits
    sampler = DistributedSampler(dataset, hvd.size(), hvd.rank(), drop_last=True)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, _ in DataLoader(dataset, batch_size=batch_size, sampler=sampler):
            real, ones, zeros = x.view(-1, 1, 8, 8), x.new_ones(len(x)), x.new_zeros(len(x))
            net_d.zero_grad()
            with optimizer_d.no_sync():  # the second pass sends both gradients
                criterion(net_d(real), ones).backward()
            fake = net_g(noise(x))
            criterion(net_d(fake.detach()), zeros).backward()
            optimizer_d.step()

            net_g.zero_grad()
            net_d.requires_grad_(False)  # or this pass sends gradients that nobody uses
            criterion(net_d(fake), ones).backward()
            net_d.requires_grad_(True)
            optimizer_g.step()
    optimizer_d.synchronize()
    optimizer_g.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a DCGAN on digits.")
    parser.add_argument("--strategy", help="merged-gradient, pipe-sgd, cocod:period=4, ...")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    hvd.init()
    share_cores()
    dataset, _ = digits()
    torch.manual_seed(hvd.rank())  # each rank its own noise; rank 0's weights are sent to all
    net_g, net_d = generator(), discriminator()
    train(net_g, net_d, dataset, **vars(options))
    with torch.no_grad():
        image = net_g.eval()(torch.randn(1, NOISE, 1, 1))[0, 0]
    if hvd.rank() == 0:
        for row in image.tolist():
            print("".join(" .:-=+*#%@"[int((value + 1) * 4.99)] * 2 for value in row))


if __name__ == "__main__":
    main()
