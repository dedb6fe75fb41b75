"""The page of convergence.py: what each method has learnt, with intervals over seeds."""

from __future__ import annotations

MARK = "convergence: "
