"""Some steps under a strategy; each rank writes where it was and what it ended with."""

import json
import socket
import sys
from pathlib import Path

import torch

import hvd_pipe.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 2)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), strategy=sys.argv[2]
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for _ in range(30):
    optimizer.zero_grad()
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
optimizer.synchronize()
answer = {
    "host": socket.gethostname(),
    "size": hvd.size(),
    "local_rank": hvd.local_rank(),
    "weights": model.weight.tolist(),
}
Path(sys.argv[1], f"{hvd.rank()}.json").write_text(json.dumps(answer))
hvd.shutdown()
