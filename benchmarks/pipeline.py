r"""PipeDream beside data parallelism, on four emulated hosts.

    python benchmarks/pipeline.py --predict
    sudo python benchmarks/pipeline.py --ratios 1 4 8 --json pipeline.json

Hosts, links and turns are those of `throughput.py`: links are set so that an all-reduce of all
gradients takes ``r`` times a worker's computation of a minibatch. The models are chains of
PipeDream's profiles (`pipeline_models.py`), whose layers take time without the processor, or, with
``--compute cpu``, small networks of the same kinds, whose layers all hosts measure at once.

All figures are by the worker's batch: data parallelism trains n of them a step, a pipeline one a
period. Bytes are what the hosts' interfaces have counted. Predictions are made from the measured
all-reduce and computation, before the pipelines run.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pipeline_models
from cluster import Cluster as Hosts
from cluster import ClusterError
from contestants import period_of
from harness import markdown
from throughput import PLANNING_STEPS, SETTLE_STEPS, Team, set_ratio, settle_steps, steps_for
from throughput_rank import write
from tqdm import tqdm

from hvd_pipe.planning.cluster import Cluster, Link, Network
from hvd_pipe.planning.pipeline_plans import (
    Planner,
    coalesced,
    fewest_microbatches,
    scheduled,
)
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.schedule import MODES
from hvd_pipe.planning.stages import Partition, parse_replicas
from hvd_pipe.planning.timing import step_time

CYCLE_MS = {"mpi": "20", "gloo": "2"}  # over MPI Horovod's thread polls, and takes the cores
SCRIPT = Path(__file__).with_name("pipeline_rank.py")
BATCHES = {"vgg16": 128, "language-model": 64}  # of the profiles
PLANS = {"vgg16": "3-1", "language-model": "straight"}  # as the paper has them for 4 workers
LATENCY_S = 1e-3  # Horovod's cycle
STEPS_ALONE = 8  # of one worker without communication, to see how long computing takes
LEAST_MINIBATCHES = 16  # of a short epoch: several rounds of all replicas


@dataclass(frozen=True)
class Pipeline:
    """A contestant: PipeDream with a plan and a mode, and what it is predicted to do.

    Figures are by the worker's batch.
    """

    plan: str  # replicas as people write them
    mode: str
    partition: Partition
    planned_s: float  # what the plan promises, where all messages are hidden
    microbatches: int  # of a minibatch, each a worker's batch
    seconds: float
    busiest_s: float  # of the busiest stage's computation
    sent_bytes: float  # of all hosts
    memory_bytes: tuple[int, ...]  # of a worker of each stage

    @property
    def name(self) -> str:
        """What the tables call it."""
        return f"pipedream {self.plan} {self.mode}"

    def figures(self) -> dict[str, Any]:
        """Return all of it for JSON, with the layers at which its stages end."""
        ends = [stage.layers[-1] for stage in self.partition.stages]
        in_transit = self.partition.in_transit
        return {**asdict(self), "partition": ends, "in_transit": in_transit}


def network(profile: ModelProfile, workers: int, all_reduce_s: float) -> Cluster:
    """Return the cluster on which an all-reduce of all gradients takes so long, as a ring."""
    wire = 2 * (workers - 1) / workers * float(profile.gradient_bytes().sum())
    return Cluster(workers, Network(Link.of(wire / all_reduce_s, LATENCY_S)))


def predicted(profile: ModelProfile, cluster: Cluster, plan: str, mode: str) -> Pipeline:
    """Return a pipeline and what is expected of it.

    A minibatch of a mode that cuts it is as many workers' batches as it has microbatches.
    """
    replicas = parse_replicas(plan, cluster.workers)
    made = Planner(profile, cluster, mode, 0.0).best(replicas)
    count = fewest_microbatches(mode, replicas, cluster.workers)
    whole, stages = coalesced(profile, made, count)
    _, cost = scheduled(
        stages,
        whole,
        cluster,
        mode=mode,
        microbatches=count,
        optimizer_bytes_per_parameter_byte=0.0,
        in_transit=made.in_transit,
    )
    return Pipeline(
        plan=plan,
        mode=mode,
        partition=made,
        planned_s=made.period_s,
        microbatches=count,
        seconds=cost.period_s / count,
        busiest_s=cost.compute_s / count,
        sent_bytes=cost.wire_bytes / count,
        memory_bytes=cost.memory_bytes,
    )


def copies(ratio: float) -> dict[str, list[str]]:
    """Return the names of data parallelism's contestants, by team."""
    k = max(2, math.ceil(ratio))
    return {
        "stock": ["single", "horovod"],
        "ours": ["merged-gradient", "pipe-sgd", f"cocod:period={k}"],
    }


def predicted_row(profile: ModelProfile, cluster: Cluster, name: str) -> dict[str, Any]:
    """Return what is expected of data parallelism, by the worker's batch."""
    n = cluster.workers
    if name == "single":
        return {"seconds": profile.compute_s, "sent_bytes": 0.0}
    seconds = step_time(name, profile, cluster.comm()).total_s / n
    wire = 2 * (n - 1) / n * float(profile.gradient_bytes().sum()) / period_of(name)
    return {"seconds": seconds, "sent_bytes": wire}


def run_cell(
    model: str, ratio: float, hosts: Hosts, teams: dict[str, Team], options: argparse.Namespace
) -> dict[str, Any]:
    """Race all contestants of a model at a rate and return the cell."""
    workers = len(hosts.hosts)
    hosts.rate(None)
    if options.compute == "emulated":
        profile = profile_of(model, options)
        build = {"model": model, "profile": profile.to_json()}
    else:
        profile = measured(teams, model)
        build = {"model": model, "profile": None}
    size = int(profile.gradient_bytes().sum())
    all_reduce_s = set_ratio(hosts, teams["ours"], profile.compute_s, ratio, size)
    cluster = network(profile, workers, all_reduce_s)
    pipes = [predicted(profile, cluster, PLANS[model], mode) for mode in options.modes]

    entrants: list[tuple[str, str]] = []
    steps: dict[tuple[str, str], int] = {}
    expected: dict[tuple[str, str], dict[str, Any]] = {}
    for team, names in copies(ratio).items():
        for name in names:
            settle = settle_steps(name)
            teams[team].ask("build", name=name, settle=settle, **build)
            expected[team, name] = predicted_row(profile, cluster, name)
            a_step = expected[team, name]["seconds"] * (1 if name == "single" else workers)
            steps[team, name] = steps_for(name, options.seconds / a_step)
            entrants.append((team, name))
    for pipe in pipes:
        count = rounds_of(pipe, options.seconds)
        teams["pipeline"].ask(
            "build",
            name=pipe.name,
            settle=max(count, PLANNING_STEPS["merged-gradient"] * max(pipe.partition.replicas)),
            plan=pipe.partition.to_json(),
            mode=pipe.mode,
            microbatches=pipe.microbatches,
            **build,
        )
        expected["pipeline", pipe.name] = pipe.figures()
        steps["pipeline", pipe.name] = count
        entrants.append(("pipeline", pipe.name))

    results: dict[tuple[str, str], list[dict[str, float]]] = {each: [] for each in entrants}
    for number in range(options.rounds):
        shift = number % len(entrants)
        for each in entrants[shift:] + entrants[:shift]:
            answers = teams[each[0]].ask("race", name=each[1], steps=steps[each])
            results[each].append(
                {
                    "seconds": max(answer["seconds"] for answer in answers),
                    "cpu_s": sum(answer["cpu_s"] for answer in answers),
                    "sent_bytes": sum(answer["sent_bytes"] for answer in answers),
                    "busy_s": max(answer.get("busy_s", 0.0) for answer in answers),
                }
            )
    for team in teams.values():
        team.ask("drop")
    return {
        "model": model,
        "workers": workers,
        "ratio": ratio,
        "compute": options.compute,
        "reached_ratio": all_reduce_s / profile.compute_s,
        "compute_s": profile.compute_s,
        "gradient_bytes": size,
        "all_reduce_s": all_reduce_s,
        "rows": [
            {
                "contestant": name,
                **{
                    key: median(each[key] for each in rounds)
                    for key in ("seconds", "cpu_s", "sent_bytes", "busy_s")
                },
                "least_s": min(each["seconds"] for each in rounds),
                "most_s": max(each["seconds"] for each in rounds),
                "predicted": expected[team, name],
            }
            for (team, name), rounds in results.items()
        ],
    }


def measured(teams: dict[str, Team], model: str) -> ModelProfile:
    """Return a small network's layers, as slow as whole steps are while all hosts compute.

    Hosts may be more than this machine has cores: many a layer is measured within one turn on a
    core, and a step takes several turns.
    """
    answers = teams["pipeline"].ask("profile", model=model)
    profile = ModelProfile.from_json(answers[0]["profile"])
    teams["stock"].ask("build", name="single", model=model, profile=None, settle=SETTLE_STEPS)
    answers = teams["stock"].ask("race", name="single", steps=STEPS_ALONE)
    return pipeline_models.slowed(profile, max(answer["seconds"] for answer in answers))


def rounds_of(pipe: Pipeline, seconds: float) -> int:
    """Return minibatches of a short epoch: whole rounds of the replicas, about so many seconds."""
    a_round = math.lcm(*pipe.partition.replicas)
    least = max(LEAST_MINIBATCHES // pipe.microbatches, 2)
    wanted = max(least, seconds / (pipe.seconds * pipe.microbatches))
    return a_round * math.ceil(wanted / a_round)


def prediction(model: str, ratio: float, options: argparse.Namespace) -> dict[str, Any]:
    """Return a cell of predictions alone, as if the rate had been reached exactly."""
    profile = profile_of(model, options)
    cluster = network(profile, options.workers, ratio * profile.compute_s)
    pipes = [predicted(profile, cluster, PLANS[model], mode) for mode in options.modes]
    rows = [
        {"contestant": name, "predicted": predicted_row(profile, cluster, name)}
        for names in copies(ratio).values()
        for name in names
    ]
    rows += [{"contestant": pipe.name, "predicted": pipe.figures()} for pipe in pipes]
    return {
        "model": model,
        "workers": options.workers,
        "ratio": ratio,
        "compute": "emulated",
        "reached_ratio": ratio,
        "compute_s": profile.compute_s,
        "gradient_bytes": int(profile.gradient_bytes().sum()),
        "rows": [{**row, **row["predicted"]} for row in rows],
    }


def profile_of(model: str, options: argparse.Namespace) -> ModelProfile:
    """Return the emulated model's profile."""
    whole = pipeline_models.profile(model, BATCHES[model])
    return pipeline_models.scaled(whole, options.compute_ms / 1e3, options.gradient_bytes)


def table(cell: dict[str, Any]) -> str:
    """Return a cell as a table, by the worker's batch."""
    title = (
        f"{cell['model']} ({cell['compute']}), {cell['workers']} workers, "
        f"r = {cell['ratio']:g} (reached {cell['reached_ratio']:.2f}); "
        f"{cell['compute_s'] * 1e3:.0f} ms and "
        f"{cell['gradient_bytes'] / 2**20:.1f} MiB a worker"
    )
    heads = ["contestant", "ms a batch", "predicted", "x stock", "busiest stage", "sent MB"]
    stock = row_of(cell, "horovod")
    rows = []
    for row in cell["rows"]:
        busiest = row["predicted"].get("busiest_s") and busy_of(row)
        rows.append(
            [
                row["contestant"],
                f"{row['seconds'] * 1e3:.1f}",
                f"{row['predicted']['seconds'] * 1e3:.1f}",
                f"{stock['seconds'] / row['seconds']:.2f}",
                "-" if busiest is None else f"{busiest / row['seconds']:.0%}",
                f"{row['sent_bytes'] / 1e6:.2f}",
                f"{1.0 - row['sent_bytes'] / stock['sent_bytes']:.0%}",
            ]
        )
    return f"{title}\n\n{markdown([*heads, 'less by'], rows)}\n"


def row_of(cell: dict[str, Any], contestant: str) -> dict[str, Any]:
    """Return a contestant's row."""
    row: dict[str, Any] = next(row for row in cell["rows"] if row["contestant"] == contestant)
    return row


def busy_of(row: dict[str, Any]) -> float:
    """Return for how long the busiest worker's device computed, or where none ran, should."""
    return float(row.get("busy_s") or row["predicted"]["busiest_s"])


def main() -> int:
    """Run the grid, or predict it, and report it."""
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that all that was started ends
    grid = [(model, ratio) for model in options.models for ratio in options.ratios]
    if options.predict:
        cells = [prediction(model, ratio, options) for model, ratio in grid]
    else:
        try:
            cells = raced(grid, options)
        except (ClusterError, RuntimeError) as error:
            print(f"pipeline: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 130  # as a shell says it
    if options.predict:
        print("\n".join(map(table, cells)))
    if options.json:
        write(Path(options.json), cells)
    return 0


def raced(grid: Sequence[tuple[str, float]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all cells."""
    cells: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="pipeline-") as folder,
        Hosts(options.workers) as hosts,
        ExitStack() as started,
        tqdm(total=len(grid), desc="cells", disable=None) as progress,
    ):
        teams = {}
        for name in ("stock", "ours", "pipeline"):
            env = {"HOROVOD_CYCLE_TIME": CYCLE_MS[options.backend]} if name == "pipeline" else {}
            teams[name] = Team(hosts, name, env, Path(folder), options.backend, SCRIPT)
            started.callback(teams[name].close)
            teams[name].ask("drop")  # it is up, and stops
        for model, ratio in grid:
            cells.append(run_cell(model, ratio, hosts, teams, options))
            print(table(cells[-1]))
            if options.json:
                write(Path(options.json), cells)
            progress.update()
    return cells


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4, help="hosts (default 4)")
    parser.add_argument("--models", nargs="+", default=list(PLANS), choices=list(PLANS))
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=[1.0, 4.0], help="all-reduce / computation"
    )
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--compute", choices=("emulated", "cpu"), default="emulated")
    parser.add_argument(
        "--compute-ms", type=float, default=120.0, help="of a worker's emulated batch"
    )
    parser.add_argument("--gradient-bytes", type=int, default=3 * 2**20, help="of emulated models")
    parser.add_argument("--backend", choices=("gloo", "mpi"), default="mpi")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (default 3)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn (default 2)")
    parser.add_argument("--predict", action="store_true", help="no hosts: predictions alone")
    parser.add_argument("--json", help="write all cells here")
    options = parser.parse_args(words)
    if options.workers < 2:
        parser.error("--workers: 2 at least")
    if min(options.ratios) <= 0.0 or options.compute_ms <= 0.0 or options.gradient_bytes < 4:
        parser.error("--ratios, --compute-ms and --gradient-bytes: more than 0")
    if options.predict and options.compute == "cpu":
        parser.error("--predict: of emulated computation only; --compute cpu is measured")
    if options.rounds < 1 or options.seconds <= 0.0:
        parser.error("--rounds and --seconds: more than 0")
    for model in options.models:
        try:
            parse_replicas(PLANS[model], options.workers)
        except ValueError as error:
            parser.error(f"--workers: {model}: {error}")
    if options.json and not Path(options.json).resolve().parent.is_dir():
        parser.error(f"{options.json}: no such folder")
    return options


if __name__ == "__main__":
    sys.exit(main())
