"""Utilities for post-grad graphs: operators, operator families, collectives, edits, text."""
