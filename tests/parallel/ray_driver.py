"""A driver whose second worker raises in the middle of training; test_ray.py starts it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import hvd_pipe.torch as hvd

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "torch_examples"))
from ray_digits import on_workers


def train(failing: int) -> None:
    hvd.init()
    model = nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), strategy="pipe-sgd"
    )
    for step in range(20):
        if hvd.rank() == 1 and step == failing:
            raise ValueError(f"the data of step {step} are missing")
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    on_workers(2, None, train, 5)
