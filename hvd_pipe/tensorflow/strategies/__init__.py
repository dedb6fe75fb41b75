"""One module a strategy, and what all strategies share."""
