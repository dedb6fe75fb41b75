"""Messages of a pipeline between real ranks: all arrive, in order, whoever computes meanwhile.

Wrong calls and ranks that are lost end all ranks with a message.
"""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path

import pytest
import workers_pipeline_transport as workers
from cases import of_case
from faults import NEVER_S, TIMEOUT_S, Job
from ranks import once, run_ranks

from hvd_pipe.pipeline.transport import Layout
from hvd_pipe.planning.instructions import RecvActivation, RecvGradient
from hvd_pipe.planning.schedule import schedule

DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
LAUNCHERS = {"mpi": "mpi", "process-sets": "gloo"}
CLASSES = {"mpi": "MpiTransport", "process-sets": "ProcessSetTransport"}

run_torch = functools.partial(run_ranks, framework="torch")
wrong = once(run_torch)


@pytest.mark.parametrize("replicas", [(1, 1, 1, 1), (2, 1), (3, 1)])
@pytest.mark.parametrize("transport", CLASSES)
def test_messages_arrive_in_the_order_of_a_schedule(
    transport: str, replicas: tuple[int, ...]
) -> None:
    """Both ends of a chain, its inner ranks that are in two pairs, and replicas that share one."""
    minibatches, layout = 20, Layout(replicas)
    programs = schedule("1f1b", replicas, minibatches).programs
    results = run_torch(
        layout.size,
        workers.run_schedule,
        "torch",
        "auto",
        replicas,
        minibatches,
        2,
        launcher=LAUNCHERS[transport],
        env=DYNAMIC,
    )
    for rank, (name, carried, sent, wrong) in enumerate(results):
        program = programs[layout.worker(rank)]
        own = sum(isinstance(step, RecvActivation | RecvGradient) for step in program)
        assert (name, carried, wrong) == (CLASSES[transport], 2 * own, [])
        assert sent > 0.9 * carried * workers.FORMAT.capacity  # the last minibatch is smaller


def test_process_sets_beside_mpi() -> None:
    results = run_torch(
        4, workers.run_schedule, "torch", "process-sets", (1, 1, 1, 1), 10, env=DYNAMIC
    )
    assert {(name, len(wrong)) for name, _, _, wrong in results} == {("ProcessSetTransport", 0)}


@pytest.mark.parametrize("transport", CLASSES)
def test_tensorflow_carries_the_same_messages(transport: str) -> None:
    results = run_ranks(
        3,
        workers.run_schedule,
        "tensorflow",
        "auto",
        (2, 1),
        10,
        framework="tensorflow",
        launcher=LAUNCHERS[transport],
        env=DYNAMIC,
    )
    assert {(name, len(wrong)) for name, _, _, wrong in results} == {(CLASSES[transport], 0)}


@pytest.mark.parametrize("transport", CLASSES)
def test_large_messages_arrive_while_nobody_asks(transport: str) -> None:
    """A send that waited for its receive would never end: the receiver waits for it to return."""
    first, second = run_torch(
        2, workers.send_large, transport, launcher=LAUNCHERS[transport], env=DYNAMIC
    )
    assert (first, second) == ([], [True] * 3)


WRONG = {
    "unknown": ("one of auto, mpi, process-sets, got 'carrier-pigeon'",) * 2,
    "one rank alone chooses": ("one of auto, mpi, process-sets, got 'tcp'",) * 2,
    "capacities": (
        "rank 0 has activation messages to rank 1 of up to 64 bytes; rank 1 says 65 bytes",
    )
    * 2,
    "one side": ("activation messages from rank 0 of up to 64 bytes; rank 0 sends none",) * 2,
    "itself": ("rank 0 has activation messages to rank 0, which is none of the 1 others",) * 2,
    "twice": ("rank 0 has activation messages to rank 1 twice",) * 2,
    "empty": ("of up to 0 bytes; a message can have 1 to 2147483647",) * 2,
    "huge": ("of up to 2147483648 bytes; a message can have 1 to 2147483647",) * 2,
    "no such channel": ("no channel of gradient messages with rank 1", "messages with rank 0"),
    "too large": ("to rank 1 have at most 64 bytes by the plan, got one of 65", "not my turn"),
    "not expected": ("nothing", "no activation messages from rank 0 are expected after 0"),
    "recycled twice": ("sent", "only a buffer that receive() has returned can be recycled"),
    "closed": ("this transport is closed",) * 2,
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("transport", CLASSES)
def test_a_wrong_call_is_told_on_every_rank(transport: str, case: str) -> None:
    results = wrong(2, workers.wrong_calls, transport, launcher=LAUNCHERS[transport])
    for said, expected in zip(of_case(results, case), WRONG[case], strict=True):
        assert expected in said


def test_more_comes_than_was_planned() -> None:
    sender, receiver = run_torch(2, workers.truncated)
    assert sender == "sent"
    assert (
        "gradient messages from rank 0 have at most 64 bytes by the plan, and one of 100 has come"
        in receiver
    )


def test_what_has_arrived_is_received_after_the_end_of_mpi() -> None:
    _, (size, said) = run_torch(2, workers.finalised)
    assert size == 8
    assert "Horovod has been shut down, here or on another rank" in said


def test_the_communication_thread_sleeps_while_nothing_is_on_its_way() -> None:
    for without, under in run_torch(2, workers.idle):
        assert without == 0
        assert under >= 0
    assert under > 10  # rank 1 expects a message


@pytest.mark.parametrize(
    ("transport", "launcher", "env", "without", "told"),
    [
        ("mpi", "gloo", {}, "", ["over Gloo: start it with mpirun"] * 4),
        ("process-sets", "mpi", {}, "", ["call pipedream.init() in place of hvd.init()"] * 4),
        ("auto", "gloo", {}, "", ['or hvd.init(process_sets="dynamic")'] * 4),
        ("auto", "mpi", {"HOROVOD_MPI_THREADS_DISABLE": "1"}, "", ["THREADS_DISABLE"] * 4),
        (
            "auto",
            "mpi",
            {},
            "mpi4py",
            ["rank 1 was given something wrong", "pip install mpi4py", "need mpi4py", "mpi4py"],
        ),
    ],
)
def test_what_is_missing_is_told_on_every_rank(
    transport: str, launcher: str, env: dict[str, str], without: str, told: list[str]
) -> None:
    results = run_torch(4, workers.refusal, transport, without, launcher=launcher, env=env)
    for said, expected in zip(results, told, strict=True):
        assert expected in said
        assert "Error: " in said


SCRIPT = Path(workers.__file__)


@pytest.mark.parametrize("transport", ["mpi", "process-sets", "tensorflow:mpi"])
def test_a_rank_raises_while_others_wait(transport: str) -> None:
    """Horovod's end ends the others' waits over MPI; over Gloo it may itself wait for them.

    There the watch over ranks ends them, before Gloo gives up without a name. Horovod's end also
    removes process sets: a rank that sent just then took that for a mistake of its own, and was
    named.
    """
    launcher = LAUNCHERS[transport.rpartition(":")[2]]
    limit_s = NEVER_S if launcher == "mpi" else TIMEOUT_S
    with Job(launcher, transport, "raise", timeout_s=limit_s, ranks=3, script=SCRIPT) as job:
        job.started()
        job.ended()
        assert job.launched.returncode != 0
        job.told_who_raised(workers.LATE, "ValueError: bad sample 17")


@pytest.mark.parametrize("transport", ["mpi", "process-sets", "tensorflow:mpi"])
def test_a_rank_is_stopped_while_others_wait(transport: str) -> None:
    """Over process sets, rank 0 may stand still in a call that keeps Python's interpreter lock.

    It could not say that it was alive, and the last rank took it for the one that was stopped.
    """
    launcher = LAUNCHERS[transport.rpartition(":")[2]]
    with Job(launcher, transport, timeout_s=TIMEOUT_S, ranks=3, script=SCRIPT) as job:
        job.train()
        os.kill(job.pid(workers.LATE), signal.SIGSTOP)
        job.ended()
        assert job.launched.returncode != 0
        job.told_who_is_lost(workers.LATE)
        assert "has been silent" in job.output
