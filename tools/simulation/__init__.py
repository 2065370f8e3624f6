"""Simulated steps: the buckets of auto and of others, for models, networks and numbers of ranks."""
