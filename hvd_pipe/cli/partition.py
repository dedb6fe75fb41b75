"""``hvd-pipe partition``: PipeDream's stages and replicas.

With --json, in bytes and seconds::

    {"command", "profile", "cluster", "partition": as -o writes it, "config": "15-1",
     "simulated_period_s": null unless --versions stash,
     "on_paper": null, or {"config", "period_s", "simulated_period_s"} of the plan that is faster
                 where all messages are hidden, and slower where the schedule runs}
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hvd_pipe import units
from hvd_pipe.cli import options
from hvd_pipe.cli._cluster import cluster_options
from hvd_pipe.cli.output import InputError, note, one_line, progress, table, write_json
from hvd_pipe.planning.cluster import Cluster
from hvd_pipe.planning.partition import MAX_STATES, VERSIONS, partition
from hvd_pipe.planning.pipeline_plans import Offer, best_plan, offer_of
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.simulate_pipeline import simulate_partition
from hvd_pipe.planning.stages import Partition, Stage, parse_replicas

__all__ = ["command"]


@click.command(
    "partition",
    cls=options.Command,
    epilog="Example:\n  hvd-pipe partition model.json --machines 4x4 --bandwidth 10gbit \\\n"
    "      --inner-bandwidth 80gbit --memory 16GB",
)
@options.profile_argument
@cluster_options(machines=True)
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
@click.option(
    "--max-states",
    type=click.IntRange(min=2),
    metavar="N",
    default=MAX_STATES,
    show_default=True,
    help="Cuts to try in a model with branches.",
)
@click.option(
    "--timeline",
    callback=options.suffix_checker(".json", ".png", ".svg"),
    type=options.OUTPUT_PATH,
    metavar="FILE",
    help="Write the start of PipeDream's schedule, simulated (.json, .png, .svg).",
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
    how = {"max_states": max_states}
    try:
        made, on_paper = _found(
            profile, cluster, versions, optimizer_state, straight, replicas, how
        )
    except ValueError as error:
        raise InputError(_with_flags(one_line(error))) from error
    if path is not None:
        made.save(path)
    if timeline is not None:
        few = _turns(made, 2 * made.replicas[0] * made.in_flight[0])
        simulate_partition(made, profile, cluster, minibatches=few).timeline.save(timeline)
    if as_json:
        found = {
            "partition": json.loads(made.to_json()),
            "config": made.config,
            "simulated_period_s": made.simulated_s,
            "on_paper": on_paper
            and {
                "config": on_paper.config,
                "period_s": on_paper.period_s,
                "simulated_period_s": on_paper.simulated_s,
            },
        }
        write_json(options.document("partition", profile, cluster, **found))
        return
    options.heading(profile, cluster)
    _print(made, on_paper)
    if not made.exact:
        note(f"Not all cuts of the model were tried: raise --max-states {max_states} to try more.")
    for written in filter(None, (path, timeline)):
        note(f"Wrote {written}.")


def _found(
    profile: ModelProfile,
    cluster: Cluster,
    versions: str,
    optimizer_state: float,
    straight: bool,
    replicas: tuple[int, ...] | None,
    how: dict[str, Any],
) -> tuple[Partition, Partition | None]:
    """The plan that is fastest as it runs, and that which only is so on paper, if another."""
    ratio: dict[str, Any] = {"optimizer_bytes_per_parameter_byte": optimizer_state}
    made = partition(
        profile, cluster, versions=versions, straight=straight, replicas=replicas, **ratio, **how
    )
    if versions != "stash":
        return made, None
    with progress("simulating plans", None) as step:

        @functools.cache
        def offer(plan: Partition) -> Offer:
            step()
            return offer_of(profile, cluster, "stash", optimizer_state, plan)

        made = offer(made).plan
        if straight:
            return made, None
        best = best_plan(
            profile, cluster, "stash", optimizer_state, replicas=replicas, offer=offer, **how
        )
        if best.simulated_s is None:  # one stage
            best = offer(best).plan
    assert made.simulated_s is not None
    assert best.simulated_s is not None
    return (best, made) if best.simulated_s < made.simulated_s else (made, None)


def _print(made: Partition, on_paper: Partition | None) -> None:
    table(
        [
            ">stage",
            ">workers",
            ">in\nflight",
            ">compute",
            ">period",
            ">load",
            ">weights",
            ">memory",
            "layers~",
        ],
        [_cells(number, stage, made) for number, stage in enumerate(made.stages)],
        title=made.config,
    )
    note(_comparison(made))
    if made.simulated_s is not None:
        price = f", with in_transit={made.in_transit}: {_price(made)}" if made.in_transit else ""
        seconds = units.format_seconds(made.simulated_s)
        note(f"Simulated with 1F1B and round robin, it takes {seconds}{price}.")
    if on_paper is not None and on_paper.simulated_s is not None:
        other = on_paper.config if on_paper.replicas != made.replicas else "another cut"
        note(
            f"On paper {other} takes {units.format_seconds(on_paper.period_s)}, but its "
            f"schedule reaches {units.format_seconds(on_paper.simulated_s)}: replicas that finish "
            "in bursts starve the stages behind them."
        )


def _price(made: Partition) -> str:
    """What minibatches in transit cost."""
    fewer = made.with_in_transit(0).in_flight[0]
    return (
        "messages take minibatches of their own, so a worker of the first stage has "
        f"{made.in_flight[0]} in flight, not {fewer}, with the memory above, and its gradients "
        "are as much later"
    )


def _replicas(plan: str, workers: int, straight: bool) -> tuple[int, ...]:
    if straight:
        raise click.UsageError("--straight is a plan of its own: leave it out, or --plan.")
    try:
        return parse_replicas(plan, workers)
    except ValueError as error:
        raise click.BadParameter(one_line(error), param_hint="'--plan'") from error


def _with_flags(message: str) -> str:
    """A message of the library, in terms of the command's options; sizes are rounded up.

    >>> _with_flags("memory_bytes = 1000: the least takes 7402295296 bytes; or versions='2bw'")
    '--memory 1 kB: the least takes 7.41 GB; or --versions 2bw'
    """
    rewrites: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
        (r"; give levels=.*", "; leave out --speeds to take them for equal"),
        (r"memory_bytes( =)?", "--memory"),
        (r"versions='(\w+)' or '(\w+)'", r"--versions \1 or \2"),
        (r"versions='(\w+)'", r"--versions \1"),
        (r"give the slowest, such as .*", "leave out --machines or --workers-per-node"),
        (r"replicas = \((.*?),?\)", lambda match: f"--plan {match[1].replace(', ', '-')}"),
        (r"straight=True", "--straight"),
        (r"straight=False", "leave out --straight"),
        (r"max_states( =)?", "--max-states"),
    )
    for pattern, flag in rewrites:
        message = re.sub(pattern, flag, message)
    return re.sub(
        r"(?<=--memory )(\d+)|\b(\d+) bytes\b",
        lambda match: _rounded_up(int(match[1] or match[2])),
        message,
    )


def _rounded_up(size: int) -> str:
    """A size to three digits that is no less than it.

    >>> _rounded_up(7402295296), _rounded_up(16_000_000_000)
    ('7.41 GB', '16 GB')
    """
    step = 10 ** max(0, len(str(size)) - 3)
    return units.format_bytes(-(-size // step) * step)


def _cells(number: int, stage: Stage, made: Partition) -> list[object]:
    slowest = max(stage.time_s for stage in made.stages)
    first, last = stage.layers[0], stage.layers[-1]
    return [
        number,
        stage.replicas,
        made.in_flight[number],
        units.format_seconds(stage.compute_s),
        units.format_seconds(stage.time_s),
        f"{stage.time_s / slowest:.0%}" if slowest else "",
        units.format_bytes(stage.parameter_bytes),
        units.format_bytes(stage.memory_bytes),
        f"{first} .. {last}" if len(stage.layers) > 1 else first,
    ]


def _turns(made: Partition, least: int) -> int:
    """The least minibatches that are whole turns of all replicas, and no fewer than asked."""
    turn = math.lcm(*made.replicas)
    return turn * -(-least // turn)


def _comparison(made: Partition) -> str:
    period = units.format_seconds(made.period_s)
    parallel, single = (
        units.format_seconds(seconds) for seconds in (made.data_parallel_s, made.single_s)
    )
    return (
        f"A minibatch takes {period}; data parallel {parallel} "
        f"({made.data_parallel_s / made.period_s:.2f}x), one worker {single} "
        f"({made.single_s / made.period_s:.2f}x)."
    )
