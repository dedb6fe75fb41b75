"""``hvd-pipe build-horovod``: Horovod for the torch and TensorFlow of this environment."""

from __future__ import annotations

from pathlib import Path

import click

from hvd_pipe.build_horovod.recipe import default_cache, features_here, install


@click.command()
@click.option("--cuda", is_flag=True, help="Build for GPUs: with CUDA and NCCL.")
@click.option(
    "--only",
    type=click.Choice(("torch", "tensorflow")),
    help="Build for this framework alone, where both are installed.",
)
@click.option("--without-mpi", is_flag=True, help="Build with Gloo alone.")
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep the built wheel here. Default: HVD_PIPE_CACHE, or ~/.cache/hvd_pipe.",
)
def command(cuda: bool, only: str | None, without_mpi: bool, cache: Path | None) -> None:
    """Build and install Horovod for this environment.

    Horovod has no wheels. This downloads the source of its newest release, 0.28.1, mends it for
    today's frameworks, builds it for the torch and the TensorFlow that are installed here,
    installs it with pip and tries it on two ranks. That takes 5 to 20 minutes once; the wheel is
    kept.
    """
    install(features_here(only, mpi=not without_mpi, cuda=cuda), cache or default_cache())
