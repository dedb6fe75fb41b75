"""``hvd-pipe plan``: which gradients travel together, and what that is predicted to cost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from hvd_pipe import units
from hvd_pipe.cli import options
from hvd_pipe.cli.output import emit, from_to
from hvd_pipe.planning import merge
from hvd_pipe.planning.cluster import Cluster
from hvd_pipe.planning.comm import CODECS, CommModel
from hvd_pipe.planning.profile import ModelProfile


@click.command(
    "plan",
    cls=options.Command,
    epilog="Example: hvd-pipe plan model.json -n 16 --bandwidth 10gbit -o plan.json",
)
@options.profile_argument
@options.cluster_options()
@click.option(
    "--method",
    type=click.Choice(merge.METHODS),
    help="How to group.  [default: exact, or bytes with --bucket-bytes]",
)
@click.option("--bucket-bytes", type=options.BYTES, help="Bucket size of --method bytes: 8MB.")
@options.compression_option
@options.output_option(".json", what="the plan")
@options.json_option
def command(
    profile: ModelProfile,
    cluster: Cluster,
    method: str | None,
    bucket_bytes: int | None,
    compression: str,
    path: Path | None,
    as_json: bool,
) -> None:
    """Group the gradients of PROFILE into messages.

    Prints the buckets in the order in which they are sent, the predicted finish and how much of
    it sticks out behind backward. strategy="merged-gradient:plan=./plan.json" uses a plan
    written with -o, if the profile has the model's parameters as its layers (`hvd-pipe profile`
    writes such).
    """
    if method is None:
        method = "exact" if bucket_bytes is None else "bytes"
    if (method == "bytes") != (bucket_bytes is not None):
        raise click.UsageError(
            "--bucket-bytes belongs to --method bytes: give both, or --bucket-bytes alone."
        )
    names = profile.gradient_order()
    if not names:
        raise ValueError("the profile has no layer with a gradient, so there is nothing to send")
    comm = cluster.comm().compressed(CODECS[compression])
    ready, sizes = profile.ready_times(), profile.gradient_bytes()
    plan = merge.plan(names, ready, sizes, comm, method, bucket_bytes)
    if path is not None:
        plan.save(path)
    rows = _rows(plan, profile, comm)
    emit(
        options.document(
            "plan",
            profile,
            cluster,
            method=method,
            bucket_bytes=bucket_bytes,
            compression=compression,
            predicted_s=plan.predicted_s,
            exposed_s=plan.exposed_s,
            buckets=rows,
        ),
        rows,
        {
            "tensors": lambda row: len(row["names"]),
            "size": "bytes",
            "ready": "ready_s",
            "starts": "start_s",
            "ends": "end_s",
            "layers~": lambda row: from_to(row["names"]),
        },
        as_json=as_json,
        above=(options.summary(profile), options.describe(cluster)),
        title=f"{plan.method} plan: {options.counted(len(names), 'tensor')} in "
        f"{options.counted(len(rows), 'bucket')}",
        below=_notes(plan, path),
    )


def _rows(plan: merge.Plan, profile: ModelProfile, comm: CommModel) -> list[dict[str, Any]]:
    """What each bucket weighs, and when it is ready, starts and ends."""
    ready, sizes = profile.ready_times(), profile.gradient_bytes()
    ends = merge.finish_times([*map(len, plan.buckets)], ready, sizes, comm).tolist()
    rows: list[dict[str, Any]] = []
    last = 0
    for bucket, end in zip(plan.buckets, ends, strict=True):
        first, last = last, last + len(bucket)
        size = int(sizes[first:last].sum())
        times = {"ready_s": float(ready[last - 1]), "start_s": end - float(comm(size))}
        rows.append({"names": list(bucket), "bytes": size, **times, "end_s": end})
    return rows


def _notes(plan: merge.Plan, path: Path | None) -> Iterator[str]:
    yield (
        f"Finished {units.format_seconds(plan.predicted_s or 0.0)} after backward starts, "
        f"{units.format_seconds(plan.exposed_s or 0.0)} of it exposed."
    )
    if path is not None:
        shown = path if os.sep in str(path) else f".{os.sep}{path}"
        yield (
            f'Wrote {path}: strategy="merged-gradient:plan={shown}" uses it, where the names are '
            "those of the job's parameters, as in the profile of a training script."
        )
