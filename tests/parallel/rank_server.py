"""Fork ranks from a process that has imported their framework, as those imports cost seconds.

    pytest --- mpirun (or horovodrun) --- client, once a rank: it imports next to nothing
       |                                     | its environment, folder and standard streams
       +--- server, with the framework <-----+
               +--- fork --- rank: `rank_main.main`

A server starts no thread, no Horovod and no operation of its framework, so that a rank finds what
it would find after the same imports of its own. The client stands for its rank towards the
launcher: it ends as the rank ends, and the server kills the rank of a client that has ended. A
server ends with pytest, which holds the other end of its standard input, and its ranks with it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

# Optimizers of torch import Dynamo when they are first made.
TORCH = (
    "pytest",
    "hypothesis",
    "horovod.torch",
    "hvd_pipe.torch.pipedream",
    "torch._dynamo",
)

# What a rank would import.
FRAMEWORKS = {
    "torch": TORCH,
    "clients": (*TORCH, "transformers.trainer", "accelerate", "peft", "lightning"),
    "tensorflow": (
        "pytest",
        "hypothesis",
        "horovod.tensorflow.keras",
        "hvd_pipe.tensorflow.keras",
        "hvd_pipe.tensorflow.pipedream",
    ),
}
STATUS_BYTES = 4
PR_SET_PDEATHSIG = 1


def address(folder: str, framework: str, rank: int) -> str:
    """The socket of a rank's server.

    Neighbours have different servers. There strings hash differently, as in ranks that are
    launched: a set that one rank walks in another order than the next is noticed.
    """
    return f"{folder}/{framework}.{rank % 2}"


def ask(folder: str, framework: str, directory: str) -> None:
    """As a client: have a rank forked, and end as it ends."""
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["HOROVOD_RANK"])
    name = address(folder, framework, rank)
    words = [directory, os.getcwd()]  # noqa: PTH109 - pathlib takes as long as the rest
    words += (f"{key}={value}" for key, value in os.environ.items())
    request = os.fsencode("\0".join(words))
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(name)
        socket.send_fds(server, [len(request).to_bytes(8)], [0, 1, 2])
        server.sendall(request)
        answer = server.recv(STATUS_BYTES)
    if not answer:
        sys.exit(f"the server of rank {rank} has ended, see {name}.log")
    status = int.from_bytes(answer, signed=True)
    if status < 0:
        os.kill(os.getpid(), -status)
    sys.exit(status)


def serve(listener: socket.socket) -> str:
    """As a server: return in each rank that is forked, with the rank's directory.

    Ends this process when its standard input ends.
    """
    from contextlib import suppress  # noqa: PLC0415 - no client needs them
    from select import select  # noqa: PLC0415

    server = os.getpid()
    while True:
        ready, _, _ = select([sys.stdin, listener], [], [])
        with suppress(ChildProcessError):  # none is left
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if sys.stdin in ready:
            os._exit(0)
        client, _ = listener.accept()
        if os.fork() == 0:
            break
        client.close()
    _die_with(server)
    listener.close()
    header, streams, _, _ = socket.recv_fds(client, 8, 3)
    with client.makefile("rb") as stream:
        words = os.fsdecode(stream.read(int.from_bytes(header))).split("\0")
    keeper = os.getpid()
    rank = os.fork()
    if rank:
        handle = os.pidfd_open(rank)
        if client in select([handle, client], [], [])[0]:  # it says no more, so it has ended
            os.kill(rank, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
        client.send(status.to_bytes(STATUS_BYTES, signed=True), socket.MSG_NOSIGNAL)
        os._exit(0)
    _die_with(keeper)
    client.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    directory, folder, *environment = words
    os.setpgid(0, 0)  # as Open MPI has it
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(word.split("=", 1) for word in environment)
    return directory


def _die_with(parent: int) -> None:
    """Have the system kill this process when its parent ends."""
    import ctypes  # noqa: PLC0415 - no client needs it

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(1)


def main(framework: str, descriptor: int) -> None:
    """Be a server on a listening socket, and then a rank."""
    import gc  # noqa: PLC0415 - no client needs what follows
    import importlib  # noqa: PLC0415
    from pathlib import Path  # noqa: PLC0415

    for module in FRAMEWORKS[framework]:
        importlib.import_module(module)
    import numpy as np  # noqa: PLC0415
    import rank_main  # noqa: PLC0415

    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads after the import of {framework}"
    gc.freeze()  # a rank's collections need not touch, and so copy, all of this
    directory = serve(socket.socket(fileno=descriptor))
    np.random.seed()  # noqa: NPY002 - Python's own generators are seeded anew by themselves
    sys.argv = [rank_main.__file__, directory]
    rank_main.main(Path(directory))


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        ask(*sys.argv[2:])
    else:
        main(sys.argv[2], int(sys.argv[3]))
