"""Measure a running job: times of its parts, and its timeline."""
