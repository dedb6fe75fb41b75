"""Uses of the optimizer state."""

from __future__ import annotations

from uses import Use

USES: list[Use] = []
