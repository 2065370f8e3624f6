"""Inductor lowerings of the package's own operators."""
