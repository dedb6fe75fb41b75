"""What is known of a training script beside the times of its gradients."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

PROFILE, FACTS = "profile.json", "facts.json"
"""The files of a script that is measured."""


@dataclass(frozen=True)
class Facts:
    """What `hvd_pipe.measuring.script` notes of a script, in a JSON file.

    Args:
        optimizer: the classes of the optimizers that are measured.
        state_ratio: bytes of their state a byte of weights.
        device: where parameters are, "cpu" or "cuda".
        steps: how many steps were made so far.
        range_s: seconds of the shortest and of the longest step that was measured.
        sharded: what divides parameters or the optimizer's state over workers, such as "FSDP".
        caveats: what is not as it seems.
    """

    optimizer: str
    state_ratio: float
    device: str
    steps: int
    range_s: tuple[float, float] | None = None
    sharded: str = ""
    caveats: str = ""

    def save(self, path: Path) -> None:
        """Write the file in one go, as another process waits for it."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)))
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """Read the file; None where there is none yet."""
        return cls(**json.loads(path.read_text())) if path.is_file() else None
