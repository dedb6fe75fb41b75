"""``python -m hvd_pipe.build_horovod``: the recipe where only the standard library is there."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hvd_pipe.build_horovod.recipe import SetupError, default_cache, features_here, install

if __name__ == "__main__":
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
    try:
        features = features_here(given.only, not given.without_mpi, given.cuda)
        install(features, given.cache, given.source)
    except SetupError as error:
        sys.exit(f"build_horovod: {error}")
    except KeyboardInterrupt:
        sys.exit("build_horovod: interrupted. Run the same command again.")
