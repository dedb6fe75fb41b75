"""One all-reduce; each rank writes where it was and what it got."""

import json
import socket
import sys
from pathlib import Path

import torch

import hvd_pipe.torch as hvd

hvd.init()
result = hvd.allreduce(torch.full((int(sys.argv[2]),), float(hvd.rank())), op=hvd.Sum)
answer = {"host": socket.gethostname(), "sum": result.mean().item()}
Path(sys.argv[1], f"{hvd.rank()}.json").write_text(json.dumps(answer))
