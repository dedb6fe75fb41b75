"""``hvd-pipe advise``: which strategy, with which options, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from hvd_pipe import strategy, units
from hvd_pipe.cli import options
from hvd_pipe.cli.output import emit, exposed
from hvd_pipe.planning.advise import PIPEDREAM, Advice, Row, advise
from hvd_pipe.planning.cluster import Cluster
from hvd_pipe.planning.comm import CODECS
from hvd_pipe.planning.methods import Method, parse
from hvd_pipe.planning.profile import ModelProfile

_MOMENTUM = click.FloatRange(min=0, max=1, max_open=True)


def _allowed(text: str) -> Method | str:
    return PIPEDREAM if text.strip() == PIPEDREAM else parse(text)


@click.command(
    "advise",
    cls=options.Command,
    epilog="Example: hvd-pipe advise model.json -n 16 --bandwidth 10gbit --momentum 0.9",
)
@options.profile_argument
@options.cluster_options()
@click.option(
    "--allow",
    type=options.Parsed("strategy", _allowed),
    metavar="NAME",
    multiple=True,
    help="A strategy to consider, may be repeated: pipe-sgd, cocod:period=8, pipedream.  "
    "[default: all]",
)
@click.option(
    "--compression",
    type=click.Choice(tuple(CODECS)),
    multiple=True,
    help="A compression to consider, may be repeated.  [default: none]",
)
@options.number("--momentum", type=_MOMENTUM, help="Of SGD: 0.9.")
@options.number("--learning-rate", positive=True, help="Of SGD: 0.1.")
@options.number(
    "--curvature", positive=True, help="Largest eigenvalue of the loss's Hessian, if known."
)
@options.optimizer_state_option
@options.json_option
def command(
    profile: ModelProfile,
    cluster: Cluster,
    allow: tuple[Method | str, ...],
    compression: tuple[str, ...],
    optimizer_state: float,
    as_json: bool,
    **training: Any,
) -> None:
    """Rank the strategies for PROFILE on a cluster.

    Prints the predicted step of each, the share that waits for the network, and the strategy=
    to paste. --momentum, --learning-rate and --curvature let it warn of strategies whose delayed
    gradients would not be stable.
    """
    advice = advise(
        profile,
        cluster,
        methods=allow or None,
        codecs=compression or ("none",),
        optimizer_ratio=optimizer_state,
        **training,
    )
    document = advice.to_json()
    with_codecs = {"codec~": "codec"} if any(row.codec != "none" for row in advice.rows) else {}
    emit(
        options.document("advise", profile, cluster, **document),
        document["rows"],
        {
            "strategy~": _strategy,
            **with_codecs,
            "step": lambda row: units.format_seconds(row["time"]["total_s"]),
            "exposed": lambda row: exposed(row["time"]["exposed_s"], row["time"]["total_s"]),
            "speedup": lambda row: f"{row['speedup']:.2f}",
            "of\nlimit": lambda row: f"{row['time']['of_limit']:.0%}",
            "memory": "memory_bytes",
            "stale": "staleness",
            "equal~": "identical",
        },
        as_json=as_json,
        above=(options.summary(profile), options.describe(cluster)),
        below=_notes(advice),
    )


def _strategy(row: Any) -> str:
    """Write a strategy, long options on lines of their own; a baseline by its short name."""
    name = row["time"]["method"] if row["baseline"] else row["strategy"]
    lines = name.replace(",", ",\n").replace(":overlap", ":\noverlap")
    return f"{lines}{'' if row['usable'] else ' (!)'}"


def _notes(advice: Advice) -> Iterator[str]:
    best = advice.best
    if not all(row.usable for row in advice.rows):
        yield "(!) is not usable as it is."
    candidates = [row for row in advice.rows if not row.baseline]
    yield from (f"! {text}" for text in advice.warnings)
    for text in dict.fromkeys(text for row in candidates for text in row.warnings):
        names = list(dict.fromkeys(row.strategy for row in candidates if text in row.warnings))
        everyone = len(names) > 1 and set(names) == {row.strategy for row in candidates}
        yield f"! {'all' if everyone else ', '.join(names)}: {text}"
    for row in advice.rows:
        if row.pipeline is not None:
            yield f"{row.strategy}: {row.reason}. {row.pipeline.paste}"
    yield from advice.notes
    yield advice.reason
    if best.samples_per_s is not None:
        yield f"All workers together: {best.samples_per_s:.4g} samples a second."
    if best.batches is not None:
        yield f"Batches that balance it: {', '.join(map(str, best.batches))}."
    yield _paste(best)


def _paste(row: Row) -> str:
    """Say what to write into the training script."""
    verb = "Paste" if row.usable else "Not to be used as it is"
    if row.pipeline is not None:
        return f"{verb}: {row.pipeline.paste}"
    try:
        strategy.parse(row.strategy)
    except ValueError:
        return f"Best: {row.strategy} (not one of hvd_pipe's strategies)."
    codec = f", compression={row.compression}" if row.codec != "none" else ""
    more = "\nAnd optimizer.synchronize() before evaluation and at the end, on every rank."
    after = more if row.usable and row.staleness else ""
    return f'{verb}: strategy="{row.strategy}"{codec}{after}'
