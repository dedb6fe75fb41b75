"""Record a running job's timeline, whatever its framework."""
