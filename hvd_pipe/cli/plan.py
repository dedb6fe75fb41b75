"""``hvd-pipe plan``: which gradients travel together, and what that is predicted to cost.

With --json, in bytes and seconds::

    {"command", "profile", "cluster", "method", "bucket_bytes", "compression", "predicted_s",
     "exposed_s", "buckets": [{"names", "bytes", "ready_s", "start_s", "end_s"}, ...]}
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from hvd_pipe import units
from hvd_pipe.cli import options
from hvd_pipe.cli._cluster import cluster_options
from hvd_pipe.cli.output import note, table, write_json
from hvd_pipe.planning import merge
from hvd_pipe.planning.cluster import Cluster
from hvd_pipe.planning.codec import CODECS
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.profile import ModelProfile

__all__ = ["command"]


@click.command(
    "plan",
    cls=options.Command,
    epilog="Example: hvd-pipe plan model.json -n 16 --bandwidth 10gbit -o plan.json",
)
@options.profile_argument
@cluster_options()
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
    ready, sizes = profile.ready_times(), profile.gradient_bytes()
    comm = cluster.comm().compressed(CODECS[compression])
    made = merge.plan(names, ready, sizes, comm, method, bucket_bytes)
    if path is not None:
        made.save(path)
    rows = [
        {"names": list(bucket), **times}
        for bucket, times in zip(
            made.buckets, _times([*map(len, made.buckets)], ready, sizes, comm), strict=True
        )
    ]
    if as_json:
        write_json(
            options.document(
                "plan",
                profile,
                cluster,
                method=method,
                bucket_bytes=bucket_bytes,
                compression=compression,
                predicted_s=made.predicted_s,
                exposed_s=made.exposed_s,
                buckets=rows,
            )
        )
        return
    options.heading(profile, cluster)
    _print(made, rows)
    if path is not None:
        shown = path if os.sep in str(path) else f".{os.sep}{path}"
        note(
            f'Wrote {path}: strategy="merged-gradient:plan={shown}" uses it, where the names are '
            "those of the job's parameters, as in the profile of a training script."
        )


def _print(made: merge.Plan, rows: list[dict[str, Any]]) -> None:
    table(
        [">bucket", ">tensors", ">size", ">ready", ">starts", ">ends", "layers~"],
        [
            [
                number,
                len(row["names"]),
                units.format_bytes(row["bytes"]),
                *(units.format_seconds(row[key]) for key in ("ready_s", "start_s", "end_s")),
                _names(row["names"]),
            ]
            for number, row in enumerate(rows)
        ],
        title=f"{made.method} plan: {_count(len(made.names), 'tensor')} in "
        f"{_count(len(rows), 'bucket')}",
    )
    note(
        f"Finished {units.format_seconds(made.predicted_s or 0.0)} after backward starts, "
        f"{units.format_seconds(made.exposed_s or 0.0)} of it exposed."
    )


def _times(
    counts: list[int],
    ready: npt.NDArray[np.float64],
    sizes: npt.NDArray[np.int64],
    comm: CommModel,
) -> list[dict[str, Any]]:
    """What each bucket weighs, and when it is ready, starts and ends."""
    ends = merge.finish_times(counts, ready, sizes, comm).tolist()
    last = np.cumsum(counts)
    nbytes = np.diff(np.cumsum(sizes)[last - 1], prepend=0).tolist()
    return [
        {
            "bytes": size,
            "ready_s": float(ready[index - 1]),
            "start_s": end - float(comm(size)),
            "end_s": end,
        }
        for index, size, end in zip(last.tolist(), nbytes, ends, strict=True)
    ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


def _names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
