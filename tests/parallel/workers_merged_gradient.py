"""`branching`, for those that import it from here."""

from branching import SWITCH, Branches, Heads, branches_loss, heads_loss

__all__ = ["SWITCH", "Branches", "Heads", "branches_loss", "heads_loss"]
