"""The planning commands of ``hvd-pipe``: what they print, what they write, and their options."""

from __future__ import annotations

import doctest
import inspect
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hvd_pipe.cli import advise, options, output, partition, simulate
from hvd_pipe.cli.main import COMMANDS, main
from hvd_pipe.planning.advise import Advice
from hvd_pipe.planning.advise import advise as make_advice
from hvd_pipe.planning.cluster import Cluster, Link, Network
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.partition import MAX_STATES
from hvd_pipe.planning.partition import partition as divide
from hvd_pipe.planning.plan import Plan
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.timeline import Timeline

DATA = Path(__file__).parent.parent / "data"
GOOGLENET = str(DATA / "googlenet_k80_backward.csv")
NETWORK = ("--bandwidth", "10gbit", "--latency", "30us")
CLUSTER = ("--workers", "16", *NETWORK)

PLANNING = ("advise", "plan", "simulate", "partition", "trace")


def run(*arguments: object, ok: bool = True) -> Result:
    result = CliRunner().invoke(main, [*map(str, arguments)], env={"COLUMNS": "80"})
    if ok:
        assert result.exit_code == 0, result.output
        lines = [] if "--json" in arguments else result.stdout.splitlines()
        assert [line for line in lines if len(line) > 80] == []
    return result


def run_json(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    assert found["command"] == arguments[0]
    return found


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model of eight layers, of which half have gradients, with forward times and a batch."""
    layers = [
        LayerProfile(f"layer{n}", 4_000_000 * (n % 2), 4e-3, 2e-3, 1_000_000) for n in range(8)
    ]
    path = tmp_path / "model.json"
    ModelProfile(tuple(layers), batch=32, update_s=1e-3, name="tiny").save(path)
    return str(path)


def test_doctests() -> None:
    for module in (options, output, partition, simulate):
        assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("name", [None, *PLANNING])
def test_help(name: str | None) -> None:
    text = run(*([name] if name else []), "--help").stdout
    if name is None:
        assert "Exit codes: 0 done, 1 failed, 2 wrong usage or input." in text
        assert all(f"  {command}" in text for command in COMMANDS)
    else:
        assert f"Example: hvd-pipe {name}" in text or f"hvd-pipe {name}" in text
        assert "v100-56gbib" in text


def test_the_command_imports_no_framework() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from hvd_pipe.cli.main import main;"
        f"assert not CliRunner().invoke(main, ['plan', {GOOGLENET!r}, '--cluster', 'k80-10gbe'])"
        ".exit_code; print(sorted({'torch', 'tensorflow', 'horovod', 'mpi4py', 'matplotlib'}"
        " & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# plan


def test_plan(model: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    text = run("plan", model, *CLUSTER, "-o", path).stdout
    assert "exact plan: 4 tensors in" in text
    assert f'strategy="merged-gradient:plan={path}"' in text.replace("\n", "")
    assert Plan.load(path).names == ("layer7", "layer5", "layer3", "layer1")


@pytest.mark.parametrize("method", ["exact", "greedy", "wfbp", "single", "bytes"])
def test_plan_json(model: str, method: str) -> None:
    more = ("--bucket-bytes", "8MB") if method == "bytes" else ()
    found = run_json("plan", model, *CLUSTER, "--method", method, *more)
    assert set(found) == {
        "command",
        "profile",
        "cluster",
        "method",
        "bucket_bytes",
        "compression",
        "predicted_s",
        "exposed_s",
        "buckets",
    }
    buckets = found["buckets"]
    assert set(buckets[0]) == {"names", "bytes", "ready_s", "start_s", "end_s"}
    assert sum(bucket["bytes"] for bucket in buckets) == 16_000_000
    assert buckets[-1]["end_s"] == pytest.approx(found["predicted_s"])
    assert len(buckets) == {"wfbp": 4, "single": 1, "bytes": 2}.get(method, len(buckets))
    assert all(bucket["ready_s"] <= bucket["start_s"] + 1e-12 for bucket in buckets)


def test_compression_shortens_messages(model: str) -> None:
    plain, half = (
        run_json("plan", model, *CLUSTER, "--method", "single", "--compression", name)
        for name in ("none", "bf16")
    )
    assert half["predicted_s"] < plain["predicted_s"]


def test_a_cluster_is_understood_from_options_and_files_alike(model: str, tmp_path: Path) -> None:
    by_options = run_json("plan", model, *CLUSTER, "--memory", "16GB")
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(by_options["cluster"]))
    assert run_json("plan", model, "--cluster", path) == by_options
    more = run_json("plan", model, "--cluster", path, "--workers", "32")
    assert more == run_json("plan", model, "-n", "32", *NETWORK, "--memory", "16GB")


def test_machines_with_fast_links_inside(model: str) -> None:
    flat, nested = (
        run_json("plan", model, *CLUSTER, "--method", "single", *more)
        for more in (
            (),
            ("--workers-per-node", 4, "--inner-bandwidth", "100gbit"),
        )
    )
    assert nested["cluster"] != flat["cluster"]
    assert nested["predicted_s"] != flat["predicted_s"]


@pytest.mark.parametrize(
    ("each", "workers", "words"),
    [
        (4, 4, None),
        (4, 8, "measured on 4 ranks of one machine: the network between machines is not in it"),
        (4, 64, "measured on 4 ranks of one machine: the network between machines is not in it"),
        (2, 16, None),
        (2, 17, "measured on 4 ranks: for 17 workers it is extrapolated"),
        (None, 16, None),
        (None, 64, "measured on 4 ranks: for 64 workers it is extrapolated"),
    ],
)
def test_a_far_extrapolation_warns(
    model: str, tmp_path: Path, each: int | None, workers: int, words: str | None
) -> None:
    path = tmp_path / "cluster.json"
    ring = CommModel.linear(1e-4, 1e-9)
    measured = Network(None, measured=ring, measured_workers=4, measured_per_node=each)
    Cluster(4, measured).save(path)
    for asked in (
        ("plan", model, "--cluster", path, "-n", workers),
        ("simulate", model, "--cluster", path, "--method", "wfbp", "--sweep", f"4,{workers}"),
    ):
        for more in ((), ("--json",)):
            found = run(*asked, *more)
            assert found.stderr.count("warning: ") == (words is not None)
            assert found.stderr.startswith(f"warning: {words or ''}" if words else "")
            assert not more or json.loads(found.stdout)


def test_a_noisy_measurement_warns(model: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    for error, words in ((0.2, None), (0.55, "the measured all-reduce is off by 55% on average")):
        ring = CommModel((0.0,), (1e-4,), (1e-9,), error=error)
        Cluster(4, Network(None, measured=ring, measured_workers=4)).save(path)
        found = run("plan", model, "--cluster", path)
        assert (words or "") in found.stderr
        assert bool(found.stderr) == (words is not None)


# advise


def test_what_is_not_usable_is_not_to_be_pasted(model: str) -> None:
    found = run("advise", model, *CLUSTER, "--memory", "1MB").stdout
    assert "Paste" not in found
    assert "Not to be used as it is: strategy=" in found


def test_only_strategies_of_hvd_pipe_are_to_be_pasted(model: str) -> None:
    for name in ("local-sgd", "horovod", "wide-pipe-sgd:width=4"):
        found = run("advise", model, *CLUSTER, "--allow", name).stdout
        assert "Paste" not in found
        assert f"Best: {name} (not one of hvd_pipe's strategies)." in found


def test_rounding_errors_are_not_exposed() -> None:
    [row] = [row for row in _advised().rows if row.strategy == "merged-gradient"]
    rounded = replace(row.time, total_s=row.time.compute_s * (1 + 1e-15))
    assert rounded.exposed_s > 0
    assert "0 s" in advise._cells(replace(row, time=rounded), False)


def _advised() -> Advice:
    profile = ModelProfile((LayerProfile("fc", 4_000_000, 0.3, 0.1),))
    return make_advice(profile, Cluster(1, Network(Link.of(1.25e9, 30e-6))))


def test_advise(model: str) -> None:
    text = run("advise", model, *CLUSTER, "--allow", "merged-gradient", "--allow", "pipe-sgd")
    assert 'Paste: strategy="' in text.stdout


def test_advice_on_a_pipeline() -> None:
    vgg = ("advise", DATA / "vgg16.graph.txt", *CLUSTER, "--allow", "pipedream")
    text = " ".join(run(*vgg).stdout.split())
    call = 'PipeDream(model, loss_fn, optimizer_fn, plan="15-1", mode="stash")'
    assert call in text
    assert "Paste: PipeDream(model" in text
    rows = {row["strategy"]: row for row in run_json(*vgg)["rows"]}
    assert rows["pipedream 15-1 stash"]["pipeline"]["staleness"] == [1, 0]
    assert rows["merged-gradient"]["pipeline"] is None
    unstable = ("--momentum", 0.9, "--learning-rate", 1, "--curvature", 1)
    found = " ".join(run(*vgg, *unstable).stdout.split())
    assert "pipedream 15-1 stash (!)" in found
    resnet = run("advise", DATA / "resnet50.graph.txt", *CLUSTER, "--allow", "pipedream")
    assert "data parallelism is PipeDream's best partition" in " ".join(resnet.stdout.split())


def test_advise_json(model: str) -> None:
    found = run_json("advise", model, *CLUSTER, "--compression", "none", "--compression", "bf16")
    assert {"command", "profile", "cluster", "rows", "best", "reason", "warnings"} <= set(found)
    assert {row["codec"] for row in found["rows"]} == {"none", "bf16"}


def test_advice_warns_of_instability(model: str) -> None:
    unstable = ("--momentum", 0.9, "--learning-rate", 1, "--curvature", 1)
    found = run("advise", model, *CLUSTER, "--allow", "pipe-sgd", *unstable)
    assert "! pipe-sgd: diverges" in found.stdout


# simulate


@pytest.mark.parametrize(
    ("workers", "exposed_ms", "messages"),
    [  # wfbp, single, greedy, exact; messages of the third
        (32, ("32.6", "111.0", "2.09", "2.09"), 21),
        (64, ("167.1", "114.8", "4.16", "4.16"), 4),
        (128, ("433", "119.8", "88.03", "8.31"), 2),
        (256, ("965", "128.5", "105.06", "17.57"), 2),
    ],
)
def test_googlenet_on_a_k80(workers: int, exposed_ms: tuple[str, ...], messages: int) -> None:
    """Where the published greedy rule loses: from 128 workers on, 88 ms against 8 ms exposed."""
    found = run_json("simulate", GOOGLENET, "--cluster", "k80-10gbe", "--workers", workers)
    rows = {row["method"]: row for row in found["rows"]}
    for method, printed in zip(
        ("wfbp", "single", "greedy", "merged-gradient"), exposed_ms, strict=True
    ):
        digits = len(printed.partition(".")[2])
        assert f"{rows[method]['exposed_s'] * 1e3:.{digits}f}" == printed
    assert rows["greedy"]["messages"] == messages


def test_simulate_sweeps(model: str, tmp_path: Path) -> None:
    path = tmp_path / "sweep.svg"
    text = run("simulate", model, *NETWORK, "--sweep", "4,64", "--steps", 20, "-o", path).stdout
    assert "Speedup of N workers over one" in text
    assert path.read_text().lstrip().startswith("<?xml")
    numbers = [line.split()[0] for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert numbers.count("4") == numbers.count("64") >= 3


def test_the_default_sweep_is_4_to_2048(model: str) -> None:
    found = run_json("simulate", model, *NETWORK, "--method", "wfbp", "--steps", 10)
    assert [row["workers"] for row in found["rows"]] == [2**power for power in range(2, 12)]
    assert set(found) == {
        "command",
        "profile",
        "cluster",
        "compression",
        "steps",
        "seed",
        "rows",
    }
    assert set(found["rows"][0]) == {
        "workers",
        "method",
        "step_s",
        "exposed_s",
        "comm_s",
        "messages",
        "speedup",
        "efficiency",
    }


def test_one_number_of_workers_and_its_timeline(model: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    method = ("--method", "horovod:cycle=2ms")
    text = run("simulate", model, *CLUSTER, *method, "--timeline", path).stdout
    assert "horovod:cycle=0.002s" in text
    assert {event.category for event in Timeline.load(path).events} >= {"backward", "allreduce"}


def test_jitter_is_slower(model: str) -> None:
    one = ("simulate", model, *CLUSTER, "--method", "single")
    still, jittery = run_json(*one), run_json(*one, "--jitter", 0.2)
    assert still["rows"][0]["step_s"] < jittery["rows"][0]["step_s"]
    assert (
        run_json(*one, "--jitter", 0.2) == jittery != run_json(*one, "--jitter", 0.2, "--seed", 1)
    )


FORWARD = "merged-gradient:overlap=forward"


def test_messages_behind_the_next_forward_pass(model: str, tmp_path: Path) -> None:
    """What all commands say about them is of one calculation."""
    path = tmp_path / "run.json"
    found = run_json("simulate", model, *CLUSTER, "--method", FORWARD, "--timeline", path)
    (row,) = found["rows"]
    assert row["method"] == FORWARD
    assert any(e.name.startswith("wait for bucket") for e in Timeline.load(path).events)
    asked = ("--allow", "merged-gradient", "--allow", FORWARD)
    rows = run_json("advise", model, *CLUSTER, *asked)["rows"]
    (advised,) = (each for each in rows if each["strategy"] == FORWARD)
    assert advised["time"]["total_s"] == pytest.approx(row["step_s"], rel=1e-9)
    shaken = (*CLUSTER, "--jitter", 0.1)
    jittery = run_json("simulate", model, *shaken, "--method", FORWARD)["rows"][0]
    assert jittery["step_s"] > row["step_s"]
    rows = run_json("advise", model, *shaken, *asked)["rows"]
    (advised,) = (each for each in rows if each["strategy"] == FORWARD)
    assert advised["time"]["total_s"] > row["step_s"]


def test_trace_shows_messages_behind_the_next_forward_pass(model: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    unlike = ("--workers", 2, "--speeds", "1,0.5", *NETWORK)
    run("trace", model, "--strategy", FORWARD, *unlike, "--steps", 3, "-o", path)
    timeline = Timeline.load(path)
    assert timeline.workers == (0, 1)
    forward = [e for e in timeline.events if (e.worker, e.category) == (0, "forward")]
    sent = [e for e in timeline.events if (e.worker, e.category) == (0, "allreduce")]
    assert len(forward) > 3  # cut by waits
    assert any(
        message.start_s < part.end_s and part.start_s < message.end_s
        for message in sent
        for part in forward
        if part.args["step"] == message.args["step"] + 1
    )
    run("trace", path, "-o", tmp_path / "run.png")


def test_speeds_say_how_many_workers(model: str) -> None:
    found = run_json("simulate", model, *NETWORK, "--speeds", "1,1,2,2")
    assert {row["workers"] for row in found["rows"]} == {4}


@pytest.mark.parametrize("per_node", [2, 3, 8, 4096])
def test_the_default_sweep_fills_machines(model: str, per_node: int) -> None:
    inner = ("--workers-per-node", per_node, "--inner-bandwidth", "100gbit")
    one = ("--method", "single", "--steps", 2)
    rows = run_json("simulate", model, *NETWORK, *inner, *one)["rows"]
    assert len(rows) >= 8
    assert all(n <= per_node or n % per_node == 0 for n in (row["workers"] for row in rows))


@pytest.mark.parametrize(
    ("profile", "wfbp", "single"),
    [("googlenet_k80_backward.csv", 1.78, 1.53), ("resnet50.graph.txt", 1.86, 1.47)],
)
def test_merged_gradient_on_64_workers(profile: str, wfbp: float, single: float) -> None:
    """How many times as long a step is without merging, and with one message.

    MG-WFBP has 1.78 and 1.35 for GoogLeNet, 1.75 and 1.45 for ResNet-50; tests/README.md says
    where the differences come from.
    """
    found = run_json("simulate", DATA / profile, "--cluster", "k80-10gbe", "--workers", 64)
    steps = {row["method"]: row["step_s"] for row in found["rows"]}
    ratios = [steps[name] / steps["merged-gradient"] for name in ("wfbp", "single")]
    assert ratios == pytest.approx([wfbp, single], abs=0.005)


# partition


def test_partition(model: str, tmp_path: Path) -> None:
    path = tmp_path / "stages.json"
    text = run("partition", model, "-n", 4, *NETWORK, "-o", path).stdout
    assert "A minibatch takes" in text
    assert "data parallel" in text
    assert json.loads(path.read_text())["stages"]


def test_partition_json(model: str, tmp_path: Path) -> None:
    path = tmp_path / "stages.json"
    machines = ("--machines", "2x2", *NETWORK, "--inner-bandwidth", "100gbit")
    found = run_json("partition", model, *machines, "-o", path)
    assert {"command", "profile", "cluster", "partition", "config"} <= set(found)
    assert json.loads(path.read_text())["stages"]
    assert found["config"] == "-".join(
        str(stage["replicas"]) for stage in found["partition"]["stages"]
    )


def test_a_straight_pipeline_replicates_nothing(model: str) -> None:
    found = run_json("partition", model, "-n", 3, *NETWORK, "--straight")
    assert found["config"] == "1-1-1"


def test_a_plan_settles_the_replicas(model: str) -> None:
    base = ("partition", model, "-n", 4, *NETWORK)
    found = run_json(*base, "--plan", "2-2")
    assert found["config"] == "2-2"
    assert found["on_paper"] is None
    assert (
        run_json(*base, "--plan", "straight")["partition"]
        == (run_json(*base, "--straight")["partition"])
    )


def test_too_little_memory_says_how_much_would_do(model: str) -> None:
    result = run("partition", model, "-n", 4, *NETWORK, "--memory", "1MB", ok=False)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "MB" in result.stderr


# trace


@pytest.mark.parametrize("suffix", ["json", "png", "svg"])
def test_trace_simulates(model: str, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"trace.{suffix}"
    text = run("trace", model, "--strategy", "pipe-sgd", *CLUSTER, "-o", path).stdout
    assert "compute" in text
    assert path.stat().st_size > 500
    if suffix == "json":
        again = tmp_path / "again.svg"
        found = run_json("trace", path, "-o", again)
        assert set(found) == {
            "command",
            "output",
            "title",
            "strategy",
            "events",
            "span_s",
            "lanes",
        }
        assert set(found["lanes"][0]) == {"worker", "lane", "events", "busy_s"}
        assert found["events"] == len(Timeline.load(path).events)


def test_trace_puts_the_ranks_of_a_job_together(model: str, tmp_path: Path) -> None:
    """A directory as HVD_PIPE_TIMELINE leaves it: a file a rank."""
    folder = tmp_path / "job"
    folder.mkdir()
    run("trace", model, "--strategy", "wfbp", *CLUSTER, "--jitter", 0.1, "-o", tmp_path / "a.json")
    whole = Timeline.load(tmp_path / "a.json")
    assert whole.workers == (0, 1, 2, 3)
    for rank in whole.workers:
        mine = tuple(event for event in whole.events if event.worker == rank)
        Timeline(mine).save(folder / f"rank{rank}.json")
    found = run_json("trace", folder, "-o", tmp_path / "job.png")
    assert {lane["worker"] for lane in found["lanes"]} == set(whole.workers)
    assert found["events"] == len(whole.events)
    assert (tmp_path / "job.png").read_bytes().startswith(b"\x89PNG")


def test_trace_shows_a_part(model: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    run("trace", model, "--strategy", "wfbp", *CLUSTER, "-o", path)
    whole = Timeline.load(path)
    half = whole.span_s / 2
    found = run_json("trace", path, "--from", half, "-o", tmp_path / "b.json")
    part = Timeline.load(tmp_path / "b.json")
    assert found["events"] == len(part.events) == len(whole.between(half, math.inf).events)
    assert 0 < len(part.events) < len(whole.events)
    assert run_json("trace", path, "--to", half, "-o", path)["events"] < len(whole.events)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--from", 2, "--to", 1), "--from 2 must be less than --to 1"),
        (("--from", 10_000), "nothing happens between 10000 and inf s"),
        (("--to", 0), "--to"),
    ],
)
def test_trace_refuses_a_part_without_events(
    model: str, tmp_path: Path, arguments: tuple[object, ...], words: str
) -> None:
    path = tmp_path / "a.json"
    run("trace", model, "--strategy", "wfbp", *CLUSTER, "-o", path)
    done = run("trace", path, *arguments, "-o", tmp_path / "b.json", ok=False)
    assert done.exit_code != 0
    assert words in " ".join(done.stderr.split())


# as a program


def program(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hvd_pipe", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


def test_the_program_runs() -> None:
    done = program("plan", GOOGLENET, "--cluster", "k80-10gbe", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["cluster"]["workers"] == 16


def test_the_program_fails_in_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    done = program("plan", bad, "--cluster", "k80-10gbe")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {bad}: ")
    assert done.stderr.count("\n") == 1


def test_a_reader_that_leaves_is_no_error(model: str) -> None:
    command = f"{sys.executable} -m hvd_pipe simulate {model} {' '.join(NETWORK)} --steps 5"
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -n 1"], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


@pytest.mark.nightly  # a search of seconds, as in the tests beside it
def test_partition_finds_cuts_that_run_faster_with_the_same_replicas() -> None:
    asked = ("partition", DATA / "gnmt.graph.txt", "-n", "8", "--bandwidth", "24gbit")
    found = run_json(*asked, "--latency", "0us")
    made, other = found["partition"], found["on_paper"]
    assert found["config"] == other["config"]
    assert made["simulated_s"] < 0.8 * other["simulated_period_s"]
    again = run_json(*asked, "--latency", "0us", "--plan", found["config"])
    assert again["partition"]["stages"] == made["stages"]
    assert "On paper another cut takes" in run(*asked, "--latency", "0us").stdout


def test_partition_prints_what_is_fastest_as_it_runs() -> None:
    """GNMT's best replicas on paper finish in bursts, and starve the stages behind them."""
    asked = ("partition", DATA / "gnmt.graph.txt", "-n", "16", "--bandwidth", "25gbit")
    found = run_json(*asked)
    made, other = found["partition"], found["on_paper"]
    assert found["simulated_period_s"] == made["simulated_s"] <= made["period_s"] / 0.95
    assert other["period_s"] < made["period_s"]
    assert other["simulated_period_s"] > 1.3 * made["simulated_s"]
    text = " ".join(run(*asked).stdout.split())
    assert f"with in_transit={made['in_transit']}: messages take minibatches" in text
    assert f"has {made['in_flight'][0]} in flight, not 16" in text
    paper = f"On paper {other['config']} takes {other['period_s'] * 1e3:.2f} ms"
    assert f"{paper}, but its schedule reaches" in text
    assert "On paper" not in run(*asked, "--straight").stdout


@pytest.mark.nightly  # a search of seconds, as in the tests beside it
@pytest.mark.parametrize("memory", ["2GB", "4GB"])
def test_the_fastest_plan_keeps_to_the_memory(memory: str) -> None:
    asked = ("--memory", memory, "--optimizer-state", 2)
    base = ("partition", DATA / "gnmt.graph.txt", "-n", 16, "--bandwidth", "25gbit", *asked)
    stages = run_json(*base)["partition"]["stages"]
    assert max(stage["memory_bytes"] for stage in stages) <= float(memory[0]) * 1e9


def test_messages_within_a_machine_take_its_links() -> None:
    machine = ("--machines", "1x4", "--bandwidth", "1gbit", "--latency", "1ms")
    inside = ("--inner-bandwidth", "80gbit", "--straight")
    found = run_json("partition", DATA / "vgg16.graph.txt", *machine, *inside)
    assert found["simulated_period_s"] == pytest.approx(0.236, rel=0.01)


def test_the_library_and_the_command_try_as_many_cuts() -> None:
    [option] = [found for found in partition.command.params if found.name == "max_states"]
    assert option.default == MAX_STATES
    assert inspect.signature(divide).parameters["max_states"].default == MAX_STATES
