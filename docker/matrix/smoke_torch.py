"""Two ranks train a small network under two strategies and in a pipeline: they learn, and agree.

horovodrun -np 2 --gloo python smoke_torch.py
"""

from __future__ import annotations

import torch
from torch import nn

import hvd_pipe.torch as hvd
from hvd_pipe.torch import pipedream

STEPS = 30


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(4 * 36, 32), nn.ReLU(), nn.Linear(32, 3)),
    )


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return images whose class is the third of the rows that is bright."""
    generator = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(STEPS):
        y = torch.randint(3, (16,), generator=generator)
        x = torch.rand(16, 1, 6, 6, generator=generator)
        for image, third in zip(x, y, strict=True):
            image[0, 2 * third : 2 * third + 2] += 1.0
        found.append((x, y))
    return found


def train(strategy: str) -> None:
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), strategy=strategy)
    losses = []
    for x, y in batches(hvd.rank()):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    optimizer.synchronize()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyone = hvd.allgather(weights[None], name=f"weights {strategy}")
    assert torch.equal(everyone[0], everyone[1]), f"{strategy}: the replicas differ"
    assert losses[-1] < 0.7 * losses[0], f"{strategy}: loss {losses[0]:.3f} to {losses[-1]:.3f}"
    told(f"{strategy}: loss {losses[0]:.3f} to {losses[-1]:.3f}, equal replicas")


def pipeline() -> None:
    engine = pipedream.PipeDream(
        network(),
        nn.functional.cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        plan="straight",
    )
    losses = [engine.train_epoch(batches(0)).loss for _ in range(3)]
    assert losses[-1] < 0.7 * losses[0], f"pipedream: loss {losses[0]:.3f} to {losses[-1]:.3f}"
    told(f"pipedream: loss {losses[0]:.3f} to {losses[-1]:.3f}")


def told(text: str) -> None:
    if hvd.rank() == 0:
        print(f"smoke: {text}", flush=True)


if __name__ == "__main__":
    pipedream.init()
    assert hvd.size() == 2, hvd.size()
    torch.set_num_threads(1)
    for each in ("merged-gradient", "pipe-sgd"):
        train(each)
    pipeline()
