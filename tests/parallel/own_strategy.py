"""What one rank does for `test_own_strategy`: it trains under the page's strategy."""

from __future__ import annotations

import torch

import hvd_pipe.torch as hvd

STEPS, RESUMED = 9, 5


def inputs(step: int, rank: int) -> torch.Tensor:
    """Return a rank's data, which every rank can make."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 3, dtype=torch.float64, generator=generator)


def loss(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    """Return a loss in which the last bias has a gradient in even steps alone."""
    first, last = model.children()
    bias = last.bias if step % 2 == 0 else last.bias.detach()
    hidden = first(inputs(step, rank)).tanh()
    return torch.nn.functional.linear(hidden, last.weight, bias).square().sum()


def network() -> torch.nn.Module:
    """Return two layers."""
    layers = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)
    return torch.nn.Sequential(*layers).double()


def main() -> None:
    """Compare every weight with the equation, in one process."""
    hvd.init()
    torch.manual_seed(0)
    model, serial = network(), network()
    serial.load_state_dict(model.state_dict())
    sgd = torch.optim.SGD(serial.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        named_parameters=model.named_parameters(),
        strategy="every-second:bucket_bytes=32",
    )
    for step in range(STEPS):
        if step == RESUMED:  # between the two steps of a pair
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        loss(model, step, hvd.rank()).backward()
        optimizer.step()
        for rank in range(hvd.size()):
            (loss(serial, step, rank) / hvd.size()).backward()
        if step % 2 == 1:
            sgd.step()
            sgd.zero_grad()
    optimizer.synchronize()
    for own, expected in zip(model.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=0)
    print(f"rank {hvd.rank()} is right")


if __name__ == "__main__":
    main()
