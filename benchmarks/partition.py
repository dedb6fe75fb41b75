"""How long the partitioner takes: ``python benchmarks/partition.py [--profiles tests/data]``.

PipeDream's own code takes about 1 s for the first case and 142 s for the second (one core).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from hvd_pipe.planning.partition import partition
from hvd_pipe.planning.profile import ModelProfile

CASES = (
    ("vgg16", [(16, 1e9)], None),
    ("resnet50", [(4, 1e10), (4, 1.25e9)], None),
    ("resnet50", [(4, 1e10), (4, 1.25e9)], 20e9),
    ("gnmt", [(16, 1e9)], None),
    ("gnmt", [(16, 1e9)], 4e9),
)


def main() -> None:
    """Print a line a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profiles", type=Path, default=Path("tests/data"))
    folder = parser.parse_args().profiles
    print(
        f"{'model':10} {'workers':>8} {'memory GB':>9} {'seconds':>8} {'ms/minibatch':>12}  stages"
    )
    for name, levels, memory_bytes in CASES:
        profile = ModelProfile.read(folder / f"{name}.graph.txt")
        start = time.perf_counter()
        made = partition(profile, levels, memory_bytes=memory_bytes)
        seconds = time.perf_counter() - start
        workers = "x".join(str(components) for components, _ in levels)
        memory = "any" if memory_bytes is None else f"{memory_bytes / 1e9:.0f}"
        print(
            f"{name:10} {workers:>8} {memory:>9} {seconds:8.2f} {made.period_s * 1e3:12.3f}  "
            f"{made.config}"
        )


if __name__ == "__main__":
    main()
