"""`torchrun` starts a job in which Horovod runs over Gloo."""

from __future__ import annotations

import json
import os
import socket
import socketserver
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_program

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.torch import torchrun
from tests import pages

SCRIPT = """
import json
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

import hvd_pipe.torch as hvd

folder, fails = Path(sys.argv[1]), len(sys.argv) > 2
hvd.init()
if os.environ["GROUP_WORLD_SIZE"] == "1":
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
if fails and hvd.rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3)
torch.manual_seed(hvd.rank())
model, data = torch.nn.Linear(4, 2), range(8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
README
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
optimizer.synchronize()
weights = hvd.allgather_object(model.weight.detach().tolist())
dist.init_process_group("gloo")  # the script's own, from torchrun's variables
number = torch.tensor([hvd.rank() + 1])
dist.all_reduce(number)
dist.destroy_process_group()
said = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_rank(), hvd.cross_size()]
line = {"said": said, "alike": weights[0] == weights[-1], "sum": int(number)}
(folder / f"rank{hvd.rank()}").write_text(json.dumps(line))
hvd.shutdown()
"""
TORCHRUN = f"{sys.executable} -m torch.distributed.run"


def script(folder: Path) -> str:
    """Write what each rank runs: a few steps, and a line about its job."""
    diff = next(b.text for b in pages.blocks(pages.ROOT / "README.md") if b.language == "diff")
    added = [line[1:] for line in diff.splitlines() if line[0] == "+"]
    (folder / "script.py").write_text(SCRIPT.replace("README", "\n".join(added)))
    return str(folder / "script.py")


def lines(folder: Path) -> list[dict[str, Any]]:
    """What the ranks wrote."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*"))]


def row(rank: int, local_rank: int, node: int, nodes: int) -> dict[str, Any]:
    return {"said": [rank, 2, local_rank, node, nodes], "alike": True, "sum": 3}


@pytest.mark.nightly
@pytest.mark.parametrize("restarts", [0, 1])
def test_ranks_of_a_node_train_also_after_a_restart(restarts: int, tmp_path: Path) -> None:
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    fails = ["fails"] * restarts
    run_program([*TORCHRUN.split(), *words, script(tmp_path), str(tmp_path), *fails])
    assert lines(tmp_path) == [row(0, 0, 0, 1), row(1, 1, 0, 1)]


def test_ranks_of_two_nodes_train(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = f"{TORCHRUN} --nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1"
    path = script(tmp_path)
    nodes = [
        f"{common} --master-port {port} --node-rank {node} {path} {tmp_path}" for node in (0, 1)
    ]
    # As srun sets them for each node's torchrun.
    env = {"PMI_RANK": "0", "OMPI_COMM_WORLD_RANK": "0", "HOROVOD_GLOO_IFACE": "lo"}
    run_program(["sh", "-c", f"{nodes[1]} & {nodes[0]}; status=$?; wait $! && exit $status"], env)
    assert lines(tmp_path) == [row(0, 0, 0, 2), row(1, 0, 1, 2)]


ONE_OF_TWO = {
    **{"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.1.1"},
    **{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2"},
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "3"}, r"3 ranks on 2 nodes.*nproc-per-node"),
        ({"RANK": "2", "GROUP_RANK": "1"}, r"2 ranks on 2 nodes.*nproc-per-node"),
        ({}, r"MASTER_ADDR 127.0.1.1 is the loopback.*--master-addr.*HOROVOD_GLOO_IFACE"),
        ({"MASTER_ADDR": "::1"}, r"no way by IPv4 to ::1"),
        ({"HOROVOD_GLOO_IFACE": "nic9"}, r"no interface nic9 .*HOROVOD_GLOO_IFACE"),
    ],
)
def test_what_cannot_be_is_refused(
    change: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another test may have begun Horovod in this process.
    monkeypatch.setattr(torchrun.mpi_ops, "is_initialized", lambda: False)
    for name in ("HOROVOD_RANK", "HOROVOD_GLOO_IFACE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**ONE_OF_TWO, **change}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(HvdPipeError, match=words):
        torchrun.begin()
    assert "HOROVOD_RANK" not in os.environ


def test_a_job_that_horovod_has_begun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_RANK", raising=False)
    monkeypatch.setattr(torchrun.mpi_ops, "is_initialized", lambda: True)
    monkeypatch.setattr(torchrun.mpi_ops, "size", lambda: 1)
    for name, value in ONE_OF_TWO.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(HvdPipeError, match=r"hvd_pipe\.torch\.init\(\)"):
        torchrun.begin()


class Garbage(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.sendall(b"no HTTP\r\n\r\n")


def old_server(kind: str) -> socketserver.TCPServer:
    """What has the port of a server that has ended: nobody, another attempt's, or a stranger."""
    if kind == "rendezvous":
        return torchrun.RendezvousHTTPServer(("127.0.0.1", 0), torchrun.RendezvousHandler, 0)
    return socketserver.TCPServer(("127.0.0.1", 0), Garbage)


@pytest.fixture(params=["nobody", "rendezvous", "stranger"])
def store(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[dist.Store, int]]:
    """A store in which the server of a job that has ended is named, and its port."""
    store, server = dist.HashStore(), old_server(request.param)
    port = server.server_address[1]
    store.set("hvd_pipe.horovod", f"127.0.0.1 {port} old")
    module = sys.modules["torch.distributed.rendezvous"]  # a function of it has its name
    monkeypatch.setattr(module, "rendezvous", lambda *_: [(store, 0, 2)])
    answers = request.param != "nobody"
    if answers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    else:
        server.server_close()
    yield store, port
    if answers:
        server.shutdown()
        server.server_close()


def test_ranks_wait_for_the_server_of_this_attempt(store: tuple[dist.Store, int]) -> None:
    answers: list[tuple[str, int]] = []
    waiting = threading.Thread(target=lambda: answers.append(torchrun._server(1, 2, "127.0.0.1")))
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    answers.append(torchrun._server(0, 2, "127.0.0.1"))
    waiting.join(30)
    assert answers[0] == answers[1]
    assert answers[0][1] != store[1]


def test_a_server_that_does_not_answer_is_named(
    store: tuple[dist.Store, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchrun, "LIMIT_S", 0.5)
    named = rf"rank 0's rendezvous server \(127\.0\.0\.1 {store[1]}\)"
    with pytest.raises(HvdPipeError, match=named):
        torchrun._server(1, 2, "127.0.0.1")


@pytest.mark.parametrize("launcher", ["horovodrun", None])
def test_other_processes_are_left_alone(
    launcher: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launcher is not None:
        for name, value in {**ONE_OF_TWO, "HOROVOD_RANK": "0"}.items():
            monkeypatch.setenv(name, value)
    before = dict(os.environ)
    torchrun.begin()
    assert dict(os.environ) == before
