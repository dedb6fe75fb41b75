"""``hvd-pipe advise``: which strategy, with which options, and why.

With --json, in bytes and seconds::

    {"command", "profile", "cluster", then `Advice.to_json`: "schema", "workers", "best", "reason",
     "warnings", "notes", "rows"}
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from hvd_pipe import strategy, units
from hvd_pipe.cli import options
from hvd_pipe.cli._cluster import cluster_options
from hvd_pipe.cli.output import exposed, note, table, wrapped, write_json
from hvd_pipe.planning.advise import PIPEDREAM, Advice, Row, advise
from hvd_pipe.planning.cluster import Cluster
from hvd_pipe.planning.codec import CODECS
from hvd_pipe.planning.methods import Method, parse
from hvd_pipe.planning.profile import ModelProfile

__all__ = ["command"]


def _allowed(text: str) -> Method | str:
    return PIPEDREAM if text.strip() == PIPEDREAM else parse(text)


@click.command(
    "advise",
    cls=options.Command,
    epilog="Example: hvd-pipe advise model.json -n 16 --bandwidth 10gbit --momentum 0.9",
)
@options.profile_argument
@cluster_options()
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
@click.option(
    "--momentum",
    type=click.FloatRange(min=0, max=1, max_open=True),
    metavar="NUMBER",
    help="Of SGD: 0.9.",
)
@click.option(
    "--learning-rate",
    type=click.FloatRange(min=0, min_open=True),
    metavar="NUMBER",
    help="Of SGD: 0.1.",
)
@click.option(
    "--curvature",
    type=click.FloatRange(min=0, min_open=True),
    metavar="NUMBER",
    help="Largest eigenvalue of the loss's Hessian, if known.",
)
@options.optimizer_state_option
@options.json_option
def command(
    profile: ModelProfile,
    cluster: Cluster,
    allow: tuple[Method | str, ...],
    compression: tuple[str, ...],
    momentum: float | None,
    learning_rate: float | None,
    curvature: float | None,
    optimizer_state: float,
    as_json: bool,
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
        learning_rate=learning_rate,
        curvature=curvature,
        momentum=momentum,
        optimizer_ratio=optimizer_state,
    )
    if as_json:
        write_json(options.document("advise", profile, cluster, **advice.to_json()))
    else:
        options.heading(profile, cluster)
        _print(advice)


def _print(advice: Advice) -> None:
    compressed = any(row.codec != "none" for row in advice.rows)
    table(
        [
            "strategy~",
            *(["codec"] if compressed else []),
            ">step",
            ">exposed",
            ">speedup",
            ">of\nlimit",
            ">memory",
            ">stale",
            "equal",
        ],
        [_cells(row, compressed) for row in advice.rows],
    )
    if not all(row.usable for row in advice.rows):
        note("(!) is not usable as it is.")
    for text in (*advice.warnings, *_warnings(advice.rows)):
        note(f"! {text}")
    for row in advice.rows:
        if row.pipeline is not None:
            note(f"{row.strategy}: {row.reason}. {row.pipeline.paste}")
    for text in advice.notes:
        note(text)
    note(advice.reason)
    if advice.best.samples_per_s is not None:
        note(f"All workers together: {advice.best.samples_per_s:.4g} samples a second.")
    if advice.best.batches is not None:
        note(f"Batches that balance it: {', '.join(map(str, advice.best.batches))}.")
    note(_paste(advice.best))


def _cells(row: Row, compressed: bool) -> list[object]:
    return [
        wrapped(_name(row)) + ("" if row.usable else " (!)"),
        *([row.codec] if compressed else []),
        units.format_seconds(row.time.total_s),
        units.format_seconds(exposed(row.time.exposed_s, row.time.total_s)),
        f"{row.speedup:.2f}",
        f"{row.time.of_limit:.0%}",
        units.format_bytes(row.memory_bytes),
        row.staleness,
        "yes" if row.identical else "no",
    ]


def _name(row: Row) -> str:
    """The strategy; a baseline by its short name."""
    return row.time.method if row.baseline else row.strategy


def _warnings(rows: Sequence[Row]) -> list[str]:
    """Each warning of what could be recommended, behind the names of all that it is about."""
    candidates = [row for row in rows if not row.baseline]
    about: dict[str, dict[str, None]] = {}
    for row in candidates:
        for text in row.warnings:
            about.setdefault(text, {})[_name(row)] = None
    everyone = {_name(row) for row in candidates}
    return [
        f"{'all' if len(everyone) > 1 and set(names) == everyone else ', '.join(names)}: {text}"
        for text, names in about.items()
    ]


def _paste(row: Row) -> str:
    """What to write into the training script, where hvd_pipe has the strategy."""
    if row.pipeline is not None:
        return f"{'Paste' if row.usable else 'Not to be used as it is'}: {row.pipeline.paste}"
    try:
        strategy.parse(row.strategy)
    except ValueError:
        return f"Best: {row.strategy} (not one of hvd_pipe's strategies)."
    text = f'strategy="{row.strategy}"{_codec(row)}'
    if not row.usable:
        return f"Not to be used as it is: {text}"
    more = "\nAnd optimizer.synchronize() before evaluation and at the end, on every rank."
    return f"Paste: {text}{more if row.staleness else ''}"


def _codec(row: Row) -> str:
    return f", compression={row.compression}" if row.codec != "none" else ""
