"""Patches of torch: which functions are replaced, from when to when, and how that is undone."""
