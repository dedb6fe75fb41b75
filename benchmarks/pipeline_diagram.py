r"""The pipeline diagram, measured: which worker computes what, from start-up to drain.

    horovodrun -np 4 python benchmarks/pipeline_diagram.py docs/pipedream-vgg.png

One epoch of VGG-16 (PipeDream's profile) whose layers take their times without the processor, as
`pipeline_models.py` says: workers that share cores would show each other's turns on them. What is
drawn is the job's own timeline; messages, versions and updates are those of any pipeline.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from pipeline_models import EmulatedPipeline, profile, scaled

import hvd_pipe.torch as hvd
from hvd_pipe.planning.partition import partition
from hvd_pipe.planning.schedule import MODES
from hvd_pipe.planning.stages import parse_replicas
from hvd_pipe.runtime.timeline import DIRECTORY
from hvd_pipe.timeline import Timeline
from hvd_pipe.torch import pipedream

BATCH = 16


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("picture", type=Path, help=".png or .svg")
    parser.add_argument("--model", default="vgg16", choices=("vgg16", "language-model"))
    parser.add_argument("--plan", default="straight", help="workers by stage, e.g. 3-1")
    parser.add_argument("--mode", default="stash", choices=tuple(MODES))
    parser.add_argument("--microbatches", type=int, help="of a minibatch")
    parser.add_argument("--minibatches", type=int, default=14)
    parser.add_argument(
        "--compute", type=float, default=1.2, help="seconds a minibatch, all layers"
    )
    parser.add_argument("--timeline", type=Path, default=Path("timeline"), metavar="DIR")
    return parser.parse_args()


def main() -> None:
    """Train an epoch on all ranks, and draw it on rank 0."""
    args = arguments()
    os.environ[DIRECTORY] = str(args.timeline)
    pipedream.init()
    torch.set_num_threads(1)
    chain = scaled(profile(args.model, BATCH), args.compute, gradient_bytes=4_000_000)
    width = hvd.size()
    replicas = (1,) * width if args.plan == "straight" else parse_replicas(args.plan)
    stages = partition(chain, [(width, 1e9)], replicas=replicas)
    batch = torch.zeros(BATCH, 1), torch.zeros(BATCH, 1)
    engine = pipedream.PipeDream(
        EmulatedPipeline(chain),
        lambda output, _: output.sum(),
        partial(torch.optim.SGD, lr=1e-3),
        plan=stages,
        mode=args.mode,
        microbatches=args.microbatches,
        sample=batch,
    )
    stats = engine.train_epoch([batch] * args.minibatches)
    if hvd.rank() == 0:
        measured = Timeline.load(args.timeline)
        passes = tuple(e for e in measured.events if e.lane == "compute" and e.category != "ready")
        title = (
            f"{args.model} on {width} workers, {args.mode}: measured, with emulated layers "
            f"(period {1e3 * stats.period_s:.0f} ms)"
        )
        replace(measured, events=passes, title=title).save(args.picture, whole=True)
        print(f"{stats}\n{args.picture}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
