"""Checks that only a GPU can run, in parts that run in their own processes."""
