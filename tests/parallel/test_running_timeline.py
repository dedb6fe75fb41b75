"""Timelines of running jobs: what is in them, and that they are there however a job ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import workers_timeline
from cases import Raised
from ranks import run_ranks
from workers_timeline import BEGUN, CASES, STEPS

from hvd_pipe.timeline import Event, Timeline

RANKS = 2
SCRIPT = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
import hvd_pipe.torch as hvd
import workers_timeline as job
hvd.init()
model = job.make_model()
optimizer = job.wrap(model, "pipe-sgd")
job.train(model, optimizer, steps=100)
"""


def of(timeline: Timeline, category: str, worker: int = 0) -> list[Event]:
    return [e for e in timeline.events if (e.category, e.worker) == (category, worker)]


def overlap(a: Event, b: Event) -> bool:
    return a.start_s < b.end_s and b.start_s < a.end_s


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Timeline]]:
    """What each case writes on two ranks."""
    directory = tmp_path_factory.mktemp("timelines")
    for rank in range(RANKS):  # of an older run
        (directory / "small").mkdir(exist_ok=True)
        (directory / "small" / f"rank{rank}.json").write_text("x" * 100_000)
    run_ranks(RANKS, workers_timeline.written, directory, timeout=120)
    for case in CASES:
        files = sorted(path.name for path in (directory / "made" / case).iterdir())
        assert files == ["rank0.json", "rank1.json"]
    found = {case: Timeline.load(directory / "made" / case) for case in (*CASES, "overlap")}
    return directory, found


@pytest.fixture
def timelines(traced: tuple[Path, dict[str, Timeline]]) -> dict[str, Timeline]:
    return traced[1]


@pytest.mark.parametrize("case", CASES)
def test_every_category_is_there(timelines: dict[str, Timeline], case: str) -> None:
    timeline = timelines[case]
    assert timeline.workers == (0, 1)
    for worker in timeline.workers:
        count = Counter(e.category for e in timeline.events if e.worker == worker)
        assert (count["forward"], count["backward"], count["update"]) == (STEPS, STEPS, STEPS)
        assert count["allreduce"] >= STEPS // 3
        assert count["ready"] >= STEPS // 3
        assert count["wait"] >= STEPS // 3
        assert (count["codec"] > 0) == (case in ("bf16", "int8"))


@pytest.mark.parametrize("case", CASES)
def test_a_worker_does_one_thing_after_another(timelines: dict[str, Timeline], case: str) -> None:
    for worker in range(RANKS):
        passes = [e for e in timelines[case].events if (e.worker, e.lane) == (worker, "compute")]
        spans = sorted((e for e in passes if e.category != "ready"), key=lambda e: e.start_s)
        for before, after in pairwise(spans):
            assert before.end_s <= after.start_s + 1e-8, (before, after)
        order = [e.category for e in spans if e.category in ("forward", "backward", "update")]
        # Pipe-SGD's first step has nothing to apply; draining applies its last gradient.
        assert order[:2] == ["forward", "backward"]
        assert order.count("update") == STEPS


def test_forward_passes_wait_at_their_gates_and_steps_do_not(
    timelines: dict[str, Timeline],
) -> None:
    """Rank 1 begins late, so rank 0 waits: in its next forward pass, for one bucket by name."""
    timeline = timelines["overlap"]
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


@pytest.mark.parametrize("case", ["merged-gradient", "pipe-sgd", "cocod", "int8"])
def test_messages_begin_when_ready_and_end_on_all_ranks_together(
    timelines: dict[str, Timeline], case: str
) -> None:
    timeline = timelines[case]
    here, there = of(timeline, "allreduce", 0), of(timeline, "allreduce", 1)
    assert [e.args["message"] for e in here] == [e.args["message"] for e in there]
    for a, b in zip(here, there, strict=True):
        assert a.args["bytes"] > 0
        if case == "merged-gradient":
            ready = [e.start_s for e in of(timeline, "ready") if e.name == a.name]
            assert any(moment <= a.start_s + 1e-8 for moment in ready)
        # An all-reduce cannot be over on one rank before it has begun on the other.
        assert a.end_s > b.start_s
        assert b.end_s > a.start_s


def test_without_the_variable_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_ranks(RANKS, workers_timeline.untraced)
    assert list(tmp_path.iterdir()) == []


def test_a_file_stays_within_its_limit_and_says_so(
    traced: tuple[Path, dict[str, Timeline]],
) -> None:
    directory = traced[0] / "small"
    for rank in range(RANKS):
        path = directory / f"rank{rank}.json"
        assert path.stat().st_size <= 10_000
        last = json.loads(path.read_text())["traceEvents"][-1]
        assert last["name"] == "the trace ends here: raise HVD_PIPE_TIMELINE_MB"
    assert len(of(Timeline.load(directory), "forward")) >= 2


def test_jobs_that_stumble_go_on(tmp_path: Path) -> None:
    env = {"HVD_PIPE_TIMELINE": str(tmp_path)}
    run_ranks(RANKS, workers_timeline.troubled, env=env)
    timeline = Timeline.load(tmp_path)
    count = Counter(e.name for e in timeline.events if e.worker == 0)
    # Five trainings, a forward pass that fails, one whose backward pass does, and an evaluation.
    assert count["forward"] == 5 * STEPS + 2
    assert count["forward, no gradients"] == 1
    # A copy hears of gradients from its first step() on.
    assert 5 * STEPS - 1 <= count["backward"] <= 5 * STEPS
    assert json.loads((tmp_path / "rank0.json").read_text())


def test_scripted_models_and_lbfgs_and_files_of_an_older_run(tmp_path: Path) -> None:
    (tmp_path / "rank2.json").write_text("of a run on three ranks")
    env = {"HVD_PIPE_TIMELINE": str(tmp_path)}
    run_ranks(RANKS, workers_timeline.other_models, env=env)
    timeline = Timeline.load(tmp_path)
    assert timeline.workers == (0, 1)
    # A scripted model takes no hooks; LBFGS moves the weights after each of its closures.
    passes = len(of(timeline, "forward"))
    assert passes > STEPS
    assert len(of(timeline, "update")) == STEPS + passes


def test_a_rank_outside_of_the_first_process_set_has_the_clock_of_its_host(tmp_path: Path) -> None:
    env = {"HVD_PIPE_TIMELINE": str(tmp_path), "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    run_ranks(RANKS, workers_timeline.outside, env=env)
    timeline = Timeline.load(tmp_path)
    assert timeline.span_s < 60.0
    for a, b in zip(
        of(timeline, "allreduce", 0)[-3:], of(timeline, "allreduce", 1)[-3:], strict=True
    ):
        assert a.end_s > b.start_s
        assert b.end_s > a.start_s


def test_what_cannot_be_is_refused_on_every_rank(tmp_path: Path) -> None:
    env = {"HVD_PIPE_TIMELINE": str(tmp_path)}
    words = {
        "one rank alone": ["ranks disagree on HVD_PIPE_TIMELINE: rank 0 has set"] * 2,
        "unwritable": [
            "rank 1 was given something wrong, and rank 0 was not: HvdPipeError: "
            "HVD_PIPE_TIMELINE=/dev/null/traces",
            "name a directory that this user can write on every host",
        ],
        "wrong limit": ["HVD_PIPE_TIMELINE_MB must be a number of megabytes"] * 2,
    }
    results = run_ranks(RANKS, workers_timeline.refused, env=env)
    for rank, result in enumerate(results):
        for case, wanted in words.items():
            raised = result[case]
            assert isinstance(raised, Raised), case
            assert wanted[rank] in raised.traceback


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        pytest.param(
            *("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT), marks=pytest.mark.nightly
        ),
        pytest.param("os._exit(3)", 3, marks=pytest.mark.nightly),
        pytest.param("raise SystemExit(4)", 4, marks=pytest.mark.nightly),
        ("1 / 0", 1),
    ],
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
