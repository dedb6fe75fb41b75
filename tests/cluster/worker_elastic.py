"""Elastic training until one worker has gone on alone; rank 0 writes how many there are."""

import sys
import time
from pathlib import Path

import torch

import hvd_pipe.torch as hvd

STEPS_ALONE = 20

hvd.init()
model = torch.nn.Linear(4, 2)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), strategy="pipe-sgd"
)
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, alone=0)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    while state.alone < STEPS_ALONE:
        if hvd.rank() == 0:
            with Path(sys.argv[1], "workers").open("a") as file:
                file.write(f"{hvd.size()}\n")
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
        state.step += 1
        state.alone += hvd.size() == 1
        time.sleep(0.02)
        if state.step % 10 == 0:
            state.commit()
    optimizer.synchronize()


train(state)
