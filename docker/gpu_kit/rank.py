"""One rank of a section of the kit: `kit.py` starts it, and reads each result as it is there.

horovodrun -np 2 --gloo python rank.py SECTION --out FILE --device cuda [--small]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT / "tests" / "parallel"), str(ROOT)]

# Before CUDA and NCCL start: NCCL refuses two ranks on a GPU unless they seem to be of two hosts.
NUMBER = os.environ.get("HOROVOD_RANK", "0")
if os.environ.get("KIT_RANKS_ON_A_GPU") == "host-id":
    os.environ["NCCL_HOSTID"] = f"rank-{NUMBER}"

import hvd_pipe.torch as hvd  # noqa: E402
import torch  # noqa: E402

Job = Callable[[], "Found"]


@dataclass
class Found:
    """What a check or a measurement has found; ``good`` is None where nothing is judged."""

    good: bool | None
    text: str
    numbers: dict[str, Any] = field(default_factory=dict)


class Report:
    """The results so far, in a file that is whole at any moment."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._results: list[dict[str, Any]] = []

    def run(self, name: str, job: Job) -> None:
        """Carry out one job; a failure is a result, and does not stop the next one."""
        begun = time.monotonic()
        try:
            found = job()
        except Exception as error:
            traceback.print_exc()
            found = Found(False, f"{type(error).__name__}: {error}"[:400])
        seconds = round(time.monotonic() - begun, 3)
        self._results.append({"name": name, "seconds": seconds, **vars(found)})
        self._write()

    def _write(self) -> None:
        beside = self._path.with_suffix(".part")
        beside.write_text(json.dumps(self._results))
        beside.replace(self._path)


@dataclass(frozen=True)
class Place:
    """Where a rank works, and whether with small sizes (the rehearsal on a CPU)."""

    device: torch.device
    small: bool

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.cuda:
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("section")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", int(NUMBER) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    import checks  # noqa: PLC0415 - they need the paths above, as the next ones
    import measures  # noqa: PLC0415

    hvd.init()
    place = Place(device, arguments.small)
    jobs = {**checks.SECTIONS, **measures.SECTIONS}[arguments.section](place)
    report = Report(arguments.out.with_suffix(f".{hvd.rank()}.json"))
    for name, job in jobs.items():
        report.run(name, job)
    hvd.shutdown()


if __name__ == "__main__":
    # `checks` asks for this module, which is not to be loaded twice.
    sys.modules["rank"] = sys.modules["__main__"]
    main()
