"""Timelines of running jobs: what is in them, and that they are there however a job ends."""

from __future__ import annotations

import copy
import functools
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from on_ranks import gather, on_ranks, place
from torch import nn

import hvd_pipe.torch as hvd
from hvd_pipe.runtime.timeline import DIRECTORY, MEGABYTES, OFF
from hvd_pipe.timeline import Event, Timeline
from hvd_pipe.torch.measuring import timeline as recording

RANKS = 2
two = on_ranks(RANKS, init=hvd.init)
dynamic = on_ranks(RANKS, init=hvd.init, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})

WIDTH = 256
STEPS = 12
BEGUN = 6  # overlap=forward defers updates by then
PAUSE_S = 0.05

CASES = {
    "merged-gradient": ("merged-gradient", "none"),
    "pipe-sgd": ("pipe-sgd", "none"),
    "cocod": ("cocod:period=3", "none"),
    "bf16": ("merged-gradient", "bf16"),
    "int8": ("pipe-sgd", "int8"),
    "overlap": ("merged-gradient:plan=wfbp,overlap=forward", "none"),
}
WHOLE = [case for case in CASES if case != "overlap"]
SCRIPT = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
import hvd_pipe.torch as hvd
import test_running_timeline as job
hvd.init()
model = job.make_model()
optimizer = job.wrap(model, "pipe-sgd")
job.train(model, optimizer, steps=100)
"""


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS, pause_s: float = 0.0
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        time.sleep(pause_s)
        model(torch.randn(64, WIDTH)).square().mean().backward()
        optimizer.step()


def wrap(model: nn.Module, strategy: str, compression: str = "none") -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        model.named_parameters(),
        compression=getattr(hvd.Compression, compression),
        strategy=strategy,
    )


def begin(**environment: str) -> None:
    """Be as a new process with this environment; what was written is on the disk."""
    recording.active.close()
    recording.active = OFF
    for name in (DIRECTORY, MEGABYTES):
        os.environ.pop(name, None)
    os.environ.update(environment)


def written(directory: Path) -> Timeline:
    """Return what all ranks have written."""
    begin()
    gather(None)
    return Timeline.load(directory)


@functools.cache
def timeline_of(case: str) -> Timeline:
    """Train in one way. With overlap, rank 0 waits for rank 1, whose forward passes begin late."""
    directory = place()[0] / case
    begin(HVD_PIPE_TIMELINE=str(directory))
    model = make_model()
    optimizer = wrap(model, *CASES[case])
    train(model, optimizer, pause_s=PAUSE_S * hvd.rank() if case == "overlap" else 0.0)
    optimizer.synchronize()
    timeline = written(directory)
    assert sorted(path.name for path in directory.iterdir()) == ["rank0.json", "rank1.json"]
    return timeline


def of(timeline: Timeline, category: str, worker: int = 0) -> list[Event]:
    return [e for e in timeline.events if (e.category, e.worker) == (category, worker)]


def overlap(a: Event, b: Event) -> bool:
    return a.start_s < b.end_s and b.start_s < a.end_s


@two
@pytest.mark.parametrize("case", WHOLE)
def test_every_category_is_there_one_after_another(case: str) -> None:
    timeline = timeline_of(case)
    assert timeline.workers == (0, 1)
    for worker in timeline.workers:
        count = Counter(e.category for e in timeline.events if e.worker == worker)
        assert (count["forward"], count["backward"], count["update"]) == (STEPS, STEPS, STEPS)
        assert count["allreduce"] >= STEPS // 3
        assert count["ready"] >= STEPS // 3
        assert count["wait"] >= STEPS // 3
        assert (count["codec"] > 0) == (case in ("bf16", "int8"))
        passes = [e for e in timeline.events if (e.worker, e.lane) == (worker, "compute")]
        spans = sorted((e for e in passes if e.category != "ready"), key=lambda e: e.start_s)
        for before, after in pairwise(spans):
            assert before.end_s <= after.start_s + 1e-8, (before, after)
        order = [e.category for e in spans if e.category in ("forward", "backward", "update")]
        # Pipe-SGD's first step has nothing to apply; draining applies its last gradient.
        assert order[:2] == ["forward", "backward"]
        assert order.count("update") == STEPS


@two
def test_forward_passes_wait_at_their_gates_and_steps_do_not() -> None:
    """Rank 1 begins late, so rank 0 waits: in its next forward pass, for one bucket by name."""
    timeline = timeline_of("overlap")
    for worker in range(RANKS):
        forward = {e.args["step"]: e for e in of(timeline, "forward", worker)}
        backward = {e.args["step"]: e for e in of(timeline, "backward", worker)}
        assert set(forward) == set(backward) == set(range(STEPS))
        # A wait for no bucket reads the flags at the round's end, when all has arrived; the last
        # `synchronize` waits, too.
        gated = [
            e
            for e in of(timeline, "wait", worker)
            if BEGUN < e.args["step"] < STEPS and e.name.startswith("gradients.")
        ]
        for wait in gated:
            around = forward[wait.args["step"]]
            assert around.start_s - 1e-8 <= wait.start_s <= wait.end_s <= around.end_s + 1e-8
        updates = [e for e in of(timeline, "update", worker) if BEGUN < e.args["step"] < STEPS]
        assert updates
        for update in updates:
            assert overlap(update, forward[update.args["step"]])
        if worker == 0:
            assert gated
            longest = max(gated, key=lambda e: e.duration_s)
            around = forward[longest.args["step"]]
            behind = [e for e in of(timeline, "allreduce", 0) if overlap(e, around)]
            assert longest.name in {e.name for e in behind}
            assert any(e.start_s < around.start_s for e in behind)  # it left in the step before


@two
@pytest.mark.parametrize("case", ["merged-gradient", "pipe-sgd", "cocod", "int8"])
def test_messages_begin_when_ready_and_end_on_all_ranks_together(case: str) -> None:
    timeline = timeline_of(case)
    here, there = of(timeline, "allreduce", 0), of(timeline, "allreduce", 1)
    assert [e.args["message"] for e in here] == [e.args["message"] for e in there]
    for a, b in zip(here, there, strict=True):
        assert a.args["bytes"] > 0
        if case == "merged-gradient":
            ready = [e.start_s for e in of(timeline, "ready") if e.name == a.name]
            assert any(moment <= a.start_s + 1e-8 for moment in ready)
            # Who waits lets a message land, if the observer has not seen it before.
            waits = [w.end_s for w in of(timeline, "wait") if w.args["step"] == a.args["step"]]
            assert a.end_s <= waits[0] + 2e-6
        # An all-reduce cannot be over on one rank before it has begun on the other.
        assert a.end_s > b.start_s
        assert b.end_s > a.start_s


@two
def test_a_file_stays_within_its_limit_and_says_so() -> None:
    directory = Path(place()[0] / "small")
    directory.mkdir(exist_ok=True)
    path = directory / f"rank{hvd.rank()}.json"
    path.write_text("x" * 100_000)  # of an older run
    begin(HVD_PIPE_TIMELINE=str(directory), HVD_PIPE_TIMELINE_MB="0.01")
    model = make_model()
    train(model, wrap(model, "pipe-sgd"), 3 * STEPS)
    timeline = written(directory)
    assert path.stat().st_size <= 10_000
    last = json.loads(path.read_text())[-1]
    assert last["name"] == "the trace ends here: raise HVD_PIPE_TIMELINE_MB"
    assert len(of(timeline, "forward")) >= 2


class _Fails(nn.Module):
    """Raises in its forward or backward pass when told to."""

    where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            raise RuntimeError(self.where)
        if self.where == "backward":
            x.register_hook(self._raise)
        return x

    def _raise(self, _: torch.Tensor) -> None:
        raise RuntimeError(self.where)


@two
def test_jobs_that_stumble_go_on() -> None:
    """What jobs do beside training in a loop; each of 5 trainings is of ``STEPS`` steps."""
    directory = place()[0] / "troubled"
    begin(HVD_PIPE_TIMELINE=str(directory))
    model = nn.Sequential(make_model(), _Fails())
    optimizer = wrap(model, "merged-gradient")
    train(model, optimizer)
    for where in ("forward", "backward"):
        model[1].where = where
        with pytest.raises(RuntimeError, match=where):
            train(model, optimizer, steps=1)
        model[1].where = ""
    train(model, optimizer)
    # A model that was traced is copied and pickled as any other.
    model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    train(model, optimizer)
    # Made anew; two at once; evaluation.
    optimizer = wrap(model, "pipe-sgd")
    other = copy.deepcopy(model)
    train(model, optimizer)
    train(other, wrap(other, "cocod:period=2"))
    with torch.no_grad():
        model(torch.randn(4, WIDTH))
    count = Counter(e.name for e in written(directory).events if e.worker == 0)
    # Five trainings, a forward pass that fails, one whose backward pass does, and an evaluation.
    assert count["forward"] == 5 * STEPS + 2
    assert count["forward, no gradients"] == 1
    # A copy hears of gradients from its first step() on.
    assert 5 * STEPS - 1 <= count["backward"] <= 5 * STEPS


@two
def test_scripted_models_and_lbfgs_and_files_of_an_older_run() -> None:
    directory = place()[0] / "other models"
    directory.mkdir(exist_ok=True)
    (directory / "rank2.json").write_text("of a run on three ranks")
    begin(HVD_PIPE_TIMELINE=str(directory))
    model = torch.jit.script(make_model())
    train(model, wrap(model, "merged-gradient"))
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.LBFGS(model.parameters(), max_iter=2), model.named_parameters()
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, WIDTH)).square().mean()
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
    timeline = written(directory)
    assert timeline.workers == (0, 1)
    # A scripted model takes no hooks; LBFGS moves the weights after each of its closures.
    passes = len(of(timeline, "forward"))
    assert passes > STEPS
    assert len(of(timeline, "update")) == STEPS + passes


@dynamic
def test_a_rank_outside_of_the_first_process_set_has_the_clock_of_its_host() -> None:
    directory = place()[0] / "outside"
    begin(HVD_PIPE_TIMELINE=str(directory))
    first = hvd.add_process_set([0])
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, hvd.DistributedOptimizer(optimizer, process_set=first))
    model = make_model()
    train(model, wrap(model, "merged-gradient"))
    timeline = written(directory)
    assert timeline.span_s < 60.0
    for a, b in zip(
        of(timeline, "allreduce", 0)[-3:], of(timeline, "allreduce", 1)[-3:], strict=True
    ):
        assert a.end_s > b.start_s
        assert b.end_s > a.start_s


@two
@pytest.mark.parametrize(
    ("environments", "words"),
    [
        (
            [{DIRECTORY: "{}"}, {}],
            ["ranks disagree on HVD_PIPE_TIMELINE: rank 0 has set"] * 2,
        ),
        (
            [{DIRECTORY: "{}"}, {DIRECTORY: "/dev/null/traces"}],
            [
                "rank 1 was given something wrong, and rank 0 was not: HvdPipeError: "
                "HVD_PIPE_TIMELINE=/dev/null/traces",
                "name a directory that this user can write on every host",
            ],
        ),
        (
            [{DIRECTORY: "{}", MEGABYTES: "64MB"}] * 2,
            ["HVD_PIPE_TIMELINE_MB must be a number of megabytes"] * 2,
        ),
    ],
    ids=["one rank alone", "unwritable", "wrong limit"],
)
def test_what_cannot_be_is_refused_on_every_rank(
    environments: list[dict[str, str]], words: list[str]
) -> None:
    directory = str(place()[0] / "refused")
    begin(**{k: v.format(directory) for k, v in environments[hvd.rank()].items()})
    with pytest.raises((RuntimeError, ValueError), match=words[hvd.rank()]):
        wrap(make_model(), "pipe-sgd")
    begin()


@pytest.mark.parametrize(
    ("end", "code"),
    [("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL), ("1 / 0", 1)],
)
def test_a_file_is_whole_however_the_job_ends(tmp_path: Path, end: str, code: int) -> None:
    command = [sys.executable, "-c", SCRIPT + end, str(Path(__file__).parent)]
    done = subprocess.run(
        command,
        env={"HVD_PIPE_TIMELINE": str(tmp_path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == code, done.stderr.decode()
    timeline = Timeline.load(tmp_path)
    assert len(of(timeline, "forward")) == 100
