"""``python -m hvd_pipe.build_horovod``: the recipe where only the standard library is there."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hvd_pipe.build_horovod.features import features_here
from hvd_pipe.build_horovod.recipe import default_cache, install
from hvd_pipe.build_horovod.system import SetupError


def main() -> None:
    """Install Horovod as the command line asks for it."""
    parser = argparse.ArgumentParser(
        prog="python -m hvd_pipe.build_horovod",
        description="Build, install and try Horovod for the frameworks of this Python.",
    )
    parser.add_argument("--cuda", action="store_true", help="build for CUDA with NCCL")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="keep wheels here")
    parser.add_argument("--only", choices=("torch", "tensorflow"), help="build for one alone")
    parser.add_argument("--without-mpi", action="store_true", help="build with Gloo alone")
    parser.add_argument("--source", type=Path, help="Horovod's sdist, not to be downloaded")
    given = parser.parse_args()
    features = features_here(given.only, not given.without_mpi, given.cuda)
    install(features, given.cache, given.source)


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"build_horovod: {error}")
    except KeyboardInterrupt:
        sys.exit("build_horovod: interrupted. Run the same command again.")
