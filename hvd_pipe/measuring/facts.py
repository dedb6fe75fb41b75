"""What a training script that is measured leaves in a folder, for the command that runs it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from hvd_pipe.planning.profile import ModelProfile

PROFILE, FACTS, FAILURE = "profile.json", "facts.json", "failure.txt"
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


@dataclass(frozen=True)
class Left:
    """What a script has left so far: a profile, facts, and the exception that has ended it."""

    profile: ModelProfile | None
    facts: Facts | None
    failure: str

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read what is there; a profile that is not written completely is not."""
        failure = folder / FAILURE
        try:
            profile = ModelProfile.load(folder / PROFILE)
        except (OSError, ValueError):
            profile = None
        # The facts are written first, so they are read last.
        facts = Facts.load(folder / FACTS)
        return cls(profile, facts, failure.read_text().strip() if failure.exists() else "")

    @property
    def is_enough(self) -> bool:
        """Whether nothing more is to be measured."""
        return self.profile is not None or bool(self.facts and self.facts.sharded)
