"""``hvd-pipe partition``: PipeDream's stages and replicas."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hvd_pipe import units
from hvd_pipe.cli import options
from hvd_pipe.cli.output import InputError, emit, from_to, one_line, wrote
from hvd_pipe.planning.cluster import Cluster
from hvd_pipe.planning.partition import MAX_STATES, VERSIONS
from hvd_pipe.planning.pipeline_plans import Planner
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.simulate_pipeline import simulate_partition
from hvd_pipe.planning.stages import Partition, parse_replicas

_FLAGS = (
    (r"; give levels=.*", "; leave out --speeds to take them for equal"),
    (r"give the slowest, such as .*", "leave out --machines or --workers-per-node"),
    (r"memory_bytes( =)?", "--memory"),
    (r"versions='(\w+)' or '(\w+)'", r"--versions \1 or \2"),
    (r"versions='(\w+)'", r"--versions \1"),
    (r"straight=True", "--straight"),
    (r"straight=False", "leave out --straight"),
    (r"replicas = \(.*?\)", "the replicas of --plan"),
    (r"max_states( =)?", "--max-states"),
)
"""Words of the library's messages, and those of the command's options."""


@click.command(
    "partition",
    cls=options.Command,
    epilog="\b\nExample:\n  hvd-pipe partition model.json --machines 4x4 --bandwidth 10gbit \\\n"
    "      --inner-bandwidth 80gbit --memory 16GB",
)
@options.profile_argument
@options.cluster_options(machines=True)
@click.option("--straight", is_flag=True, help="One worker a stage: no replicas.")
@click.option(
    "--plan",
    metavar="PLAN",
    help="Workers of each stage, the first stage first: 15-1.  [default: the best]",
)
@click.option(
    "--versions",
    type=click.Choice(VERSIONS),
    default="stash",
    show_default=True,
    help="Copies of the weights: PipeDream, PipeDream-2BW, or a flush a batch.",
)
@options.optimizer_state_option
@options.count(
    "--max-states", least=2, default=MAX_STATES, help="Cuts to try in a model with branches."
)
@options.output_option(
    *(".json", ".png", ".svg"),
    what="the start of PipeDream's schedule, simulated",
    name="--timeline",
)
@options.output_option(".json", what="the partition")
@options.json_option
def command(
    profile: ModelProfile,
    cluster: Cluster,
    straight: bool,
    plan: str | None,
    versions: str,
    optimizer_state: float,
    max_states: int,
    timeline: Path | None,
    path: Path | None,
    as_json: bool,
) -> None:
    """Split PROFILE's layers into pipeline stages.

    Finds the stages, and how many workers replicate each, with the shortest time a minibatch (with
    --plan, the best cuts for it). With --versions stash, that is the time which PipeDream's
    schedule reaches in a simulation, with as many minibatches in flight as it needs;
    fails when nothing fits into --memory, and says how much would do.
    """
    replicas = None if plan is None else _replicas(plan, cluster.workers, straight)
    if timeline is not None and versions != "stash":
        raise click.UsageError("--timeline shows PipeDream's own schedule: --versions stash.")
    try:
        planner = Planner(profile, cluster, versions, optimizer_state, max_states=max_states)
        best, on_paper = planner.choose(straight, replicas)
    except ValueError as error:
        message = one_line(error)
        for pattern, flag in _FLAGS:
            message = re.sub(pattern, flag, message)
        raise InputError(message) from error
    if path is not None:
        best.save(path)
    if timeline is not None:
        turn = math.lcm(*best.replicas)
        minibatches = turn * -(-2 * best.replicas[0] * best.in_flight[0] // turn)
        run = simulate_partition(best, profile, cluster, minibatches=minibatches)
        run.timeline.save(timeline)
    slowest = max(stage.time_s for stage in best.stages) or 1.0
    emit(
        options.document("partition", profile, cluster, **_results(best, on_paper)),
        [
            {**asdict(stage), "in_flight": in_flight}
            for stage, in_flight in zip(best.stages, best.in_flight, strict=True)
        ],
        {
            "workers": "replicas",
            "in\nflight": "in_flight",
            "compute": "compute_s",
            "period": "time_s",
            "load": lambda row: f"{row['time_s'] / slowest:.0%}",
            "weights": "parameter_bytes",
            "memory": "memory_bytes",
            "layers~": lambda row: from_to(row["layers"]),
        },
        as_json=as_json,
        above=(options.summary(profile), options.describe(cluster)),
        title=best.config,
        below=_notes(best, on_paper, max_states, path, timeline),
    )


def _results(best: Partition, on_paper: Partition | None) -> dict[str, Any]:
    paper = on_paper and {
        "config": on_paper.config,
        "period_s": on_paper.period_s,
        "simulated_period_s": on_paper.simulated_s,
    }
    return {
        "partition": json.loads(best.to_json()),
        "config": best.config,
        "simulated_period_s": best.simulated_s,
        "on_paper": paper,
    }


def _notes(
    best: Partition, on_paper: Partition | None, max_states: int, *paths: Path | None
) -> Iterator[str]:
    seconds = units.format_seconds
    yield (
        f"A minibatch takes {seconds(best.period_s)}; data parallel "
        f"{seconds(best.data_parallel_s)} ({best.data_parallel_s / best.period_s:.2f}x), one "
        f"worker {seconds(best.single_s)} ({best.single_s / best.period_s:.2f}x)."
    )
    if best.simulated_s is not None:
        price = ""
        if best.in_transit:
            fewer = best.with_in_transit(0).in_flight[0]
            price = (
                f", with in_transit={best.in_transit}: messages take minibatches of their own, "
                f"so a worker of the first stage has {best.in_flight[0]} in flight, not {fewer}, "
                "with the memory above, and its gradients are as much later"
            )
        yield f"Simulated with 1F1B and round robin, it takes {seconds(best.simulated_s)}{price}."
    if on_paper is not None and on_paper.simulated_s is not None:
        other = on_paper.config if on_paper.replicas != best.replicas else "another cut"
        yield (
            f"On paper {other} takes {seconds(on_paper.period_s)}, but its schedule reaches "
            f"{seconds(on_paper.simulated_s)}: replicas that finish in bursts starve the stages "
            "behind them."
        )
    if not best.exact:
        yield (
            f"Not all cuts of the model were tried: raise --max-states {max_states} to try more."
        )
    yield from wrote(*paths)


def _replicas(plan: str, workers: int, straight: bool) -> tuple[int, ...]:
    if straight:
        raise click.UsageError("--straight is a plan of its own: leave it out, or --plan.")
    try:
        return parse_replicas(plan, workers)
    except ValueError as error:
        raise click.BadParameter(one_line(error), param_hint="'--plan'") from error
